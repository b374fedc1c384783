"""Kill a batch job repeatedly; its output must have the same bytes as without the kills.

    python benchmarks/batch/bench_batch.py
    python benchmarks/batch/bench_batch.py --rows 2000 --kills 5 --seed 7
    python benchmarks/batch/bench_batch.py --rows 600 --kills 2 --tiny

`tasc generate` answers rows of the shipped MASSIVE data, which are repeated with ids of their own.
The model is the shipped one in float32 or, with --tiny, a random one of two layers. The job runs
once undisturbed. In a second run its driver, its engine and its Redis are killed by SIGKILL at
random moments. Redis comes back without its last writes; a driver that died is started again by
the same command. As rows are repeated, drafts from earlier answers are better than on real data:
compare the rows/s of the two runs with each other only. Progress goes to stderr; the last line of
stdout is one JSON object. The exit code is 1 if the outputs differ.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    about,
    add_json,
    at_least,
    finish,
    parser_of,
    show_table,
    use_one_thread,
    use_test_helpers,
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=at_least(1), default=50_000, help="number of input rows (50000)")
    add(
        "--kills",
        type=at_least(0),
        default=5,
        help="kills; from three on of all kinds (5)",
    )
    add("--seed", type=int, default=0, help="seed of kinds and moments (0)")
    add("--tiny", action="store_true", help="use a random model of two layers and no draft index")
    add("--shared-ray", action="store_true", help="start one Ray for all drivers, which is faster")
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    use_test_helpers()
    from benchmarks.batch.runs import Driver, compared, planned, prepare
    from killable import RedisServer
    from tasc_jobs.ray_local import local_ray

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-batch-")))
        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        work = prepare(server.url, folder, options.rows, tiny=options.tiny)
        if options.shared_ray:
            stack.enter_context(local_ray())
        driver = Driver(server, work, folder, own_ray=not options.shared_ray)
        stack.callback(driver.end)
        alone = driver.run(folder / "alone.jsonl", ())
        faults = planned(options.kills, options.seed, options.rows)
        found = compared(alone, driver.run(folder / "killed.jsonl", faults), options.rows)
    show(found)
    model = "tiny" if options.tiny else "massive_en"
    finish(
        {"benchmark": "batch", "model": model, "seed": options.seed, **found, **about()},
        options.json,
    )
    return 0 if found["identical"] and not found["missing"] and not found["doubled"] else 1


def show(found: dict[str, Any]) -> None:
    runs = {name: found[name] for name in ("undisturbed", "disturbed")}
    show_table(
        f"{found['rows']:,} rows",
        ["run", "s", "rows/s"],
        [[n, f"{r['seconds']:.1f}", f"{r['rows_per_second']:.1f}"] for n, r in runs.items()],
    )
    show_table(
        "kills",
        ["killed", "at row", "finished rows redone", "continues after s"],
        [
            [h["kind"], str(h["done"]), str(h["redone"]), f"{h['recovery_seconds']:.1f}"]
            for h in found["faults"]
        ],
    )
    same = "equal byte for byte" if found["identical"] else "DIFFERENT"
    print(f"outputs {same}; {found['missing']} ids missing, {found['doubled']} doubled")


if __name__ == "__main__":
    sys.exit(main())
