"""A batch job killed again and again, against the same job left alone: the same bytes.

    python tests/benchmarks/bench_batch.py
    python tests/benchmarks/bench_batch.py --rows 2000 --kills 5 --seed 7
    python tests/benchmarks/bench_batch.py --rows 600 --kills 2 --tiny

`tasc generate` answers rows of the shipped MASSIVE data, repeated with ids of their own, with the
shipped model in float32 (or, --tiny, with a random one of two layers). Once it is left alone. Once
its driver, its engine and its Redis are killed by SIGKILL at random moments, Redis coming back
without what it wrote last; a driver that died is started again by the same command. Since rows are
repeated, drafts of answers given before are better than on rows of one's own: rows/s are of no use
but beside one another. Progress goes to stderr; the last line of stdout is one JSON object. The
exit code is 1 where outputs differ.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench_command import parser_of

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Asked:
    """The command line."""

    rows: int
    kills: int
    seed: int
    tiny: bool
    shared_ray: bool
    json: Path | None


def arguments() -> Asked:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=50_000, help="input rows (50000)")
    add("--kills", type=int, default=5, help="kills, at least one of each kind from 3 on (5)")
    add("--seed", type=int, default=0, help="of kinds and moments (0)")
    add("--tiny", action="store_true", help="a random model of two layers, no draft index")
    add("--shared-ray", action="store_true", help="one Ray for all drivers: starts sooner")
    add("--json", type=Path, help="file for the JSON object as well")
    return Asked(**vars(parser.parse_args()))


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", RAY_USAGE_STATS_ENABLED="0")
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    from batch_compare import compared, told
    from batch_faults import planned
    from batch_runs import Driver
    from batch_work import prepare
    from draft_report import print_report

    from killable import RedisServer
    from tasc_jobs.ray_local import local_ray

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-batch-")))
        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        work = prepare(server.url, folder, asked.rows, tiny=asked.tiny)
        if asked.shared_ray:
            stack.enter_context(local_ray())
        driver = Driver(server, work, folder, own_ray=not asked.shared_ray)
        stack.callback(driver.end)
        alone = driver.undisturbed(folder / "alone.jsonl")
        killed = driver.disturbed(
            folder / "killed.jsonl", planned(asked.kills, asked.seed, asked.rows)
        )
        found = compared(alone, killed, asked.rows)
    print(told(found))
    model = "tiny" if asked.tiny else "massive_en"
    print_report("batch", {"model": model, "seed": asked.seed, **found}, asked.json)
    return 0 if found["identical"] and not found["missing"] and not found["doubled"] else 1


if __name__ == "__main__":
    sys.exit(main())
