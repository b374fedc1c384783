"""Measure what proxy, gateway, connection and replica cost in requests per second and CPU time.

    python benchmarks/serve/way_in.py
    python benchmarks/serve/way_in.py --old ../before --seconds 3
    python benchmarks/serve/way_in.py --only service,ceilings --proxy python
    VLLM_PYTHON benchmarks/serve/way_in.py --backend vllm --only engine,service --connections 16

In each round come, one after the other: the demo's engine in a process without a service; the
service with the demo's task, whole answers and streams, drafts on and off; the service with a tiny
random model in two replicas, one token a request; and the ceilings, which are Ray Serve without
work, one hop and two, in the same proxy mode, and a uvicorn application, all with the same bodies
and the same answer. With --old the first three are also measured of another checkout. Every other
round has the reverse order. Each is started for its turn and ended after it, so that nothing idle
takes processor time from what is measured. wrk sends the requests where it is installed; over one
connection a client of ours sends the rows that the engine alone gets, one after the other. With
--backend vllm, the task is answered by SmolLM2 (`make bench-model`), and vLLM is measured alone,
too; the Python needs vLLM beside this project (docs/how-to/vllm.md). Tables
go to stdout, progress to stderr; the last line of stdout is one JSON object.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    ROOT,
    Figure,
    at_least,
    digits,
    finish,
    folder,
    git_revision,
    in_turn,
    listed,
    median_of,
    names_of,
    parser_of,
    processor,
    show_figures,
    show_table,
    to_stderr,
    use_one_thread,
    versions,
)
from benchmarks.serve.load import WRK
from benchmarks.serve.sides import LIST, ROLES, ROWS, TASK, Bench, Measured, Side

PARTS = ("engine", "service", "one-token", "lists", "ceilings")
CEILINGS = "ceilings"

Runs = dict[str, list[float]]  # a figure's value in each round
Derived = tuple[list[Figure], dict[str, Any]]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--seconds", type=at_least(1), default=5, help="seconds of each window (5)")
    add("--rounds", type=at_least(1), default=3, help="rounds of all parts (3)")
    add(
        "--connections",
        type=counts,
        default=(1, 16, 64),
        help="connections, one above 1 (1,16,64)",
    )
    add("--requests", type=at_least(1), default=48, help="requests over one connection (48)")
    add(
        "--gateways",
        type=at_least(1),
        default=1,
        help="number of gateways and of bare ingresses (1)",
    )
    add(
        "--proxy",
        choices=("haproxy", "python"),
        default="haproxy",
        help="Ray Serve's proxy (haproxy)",
    )
    add(
        "--only",
        type=names_of(*PARTS),
        default=PARTS,
        help=f"parts: {','.join(PARTS)} (all)",
    )
    add(
        "--backend",
        choices=("tasc", "vllm"),
        default="tasc",
        help="the engine of the service; vllm needs an environment with both (tasc)",
    )
    add("--old", type=folder, help="checkout of another commit, to compare with")
    return parser.parse_args()


def counts(text: str) -> tuple[int, ...]:
    """An argument type: numbers of connections, in order, at least one above one."""
    found = tuple(sorted({int(each) for each in listed(text)}))
    if not found or found[0] < 1 or found[-1] < 2:
        raise argparse.ArgumentTypeError(f"{text}; a number above 1 is needed, and none below 1")
    return found


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # children are to be ended
    use_one_thread()
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="way-in-"))
        bench = bench_of(options, Path(name))
        sides = sides_of(options, bench, stack)
        found = rounds(options, bench, sides)
    show(found)
    records = {}
    for side in sides:
        figures, records[side] = derived(side, found[side], found[CEILINGS], bench.crowds)
        if figures:
            show_figures(figures)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "wrk": WRK is not None,
        "proxy": options.proxy,
        "backend": options.backend,
        **versions("ray"),
    }
    about = {"errors": bench.errors, "skipped": bench.skipped, "machine": machine}
    new = records.pop("new")
    finish({**new, **records, **about, "git": git_revision()})


def bench_of(options: argparse.Namespace, place: Path) -> Bench:
    from tasc_jobs.demo.tasks import read_split

    return Bench(
        folder=place,
        inputs=[row["input"] for row in read_split(TASK, "test")[:ROWS]],
        seconds=options.seconds,
        requests=options.requests,
        crowds=[count for count in options.connections if count > 1],
        alone=1 in options.connections,
        gateways=options.gateways,
        proxy=options.proxy,
        parts=options.only,
        backend=options.backend,
    )


def sides_of(options: argparse.Namespace, bench: Bench, stack: ExitStack) -> dict[str, Side]:
    """This checkout and, if there is one, the other, with their stores."""
    from tasc_store import EmbeddedRedis

    sides = {}
    for name, root in (("new", ROOT), ("old", options.old)):
        if root:
            store = stack.enter_context(EmbeddedRedis.start())
            place = bench.folder / name
            place.mkdir()
            sides[name] = Side(name, root.resolve(), store.url, place, bench)
            if set(options.only) != {CEILINGS}:
                sides[name].prepare()
    return sides


def rounds(options: argparse.Namespace, bench: Bench, sides: dict[str, Side]) -> dict[str, Runs]:
    """All figures of each side and of the ceilings."""
    runs: dict[tuple[str, str], Callable[[], Measured]] = {}
    if {"engine", "service", "lists"} & set(options.only):
        runs |= {(name, "engine"): side.engine for name, side in sides.items()}
        if options.backend == "vllm":
            runs |= {(name, "vLLM"): side.vllm for name, side in sides.items()}
    if {"service", "lists"} & set(options.only):
        runs |= {(name, "service"): side.service for name, side in sides.items()}
    if "one-token" in options.only:
        runs |= {(name, "one token"): side.one_token for name, side in sides.items()}
    if "ceilings" in options.only:
        runs |= {(CEILINGS, "no work"): bench.no_work, (CEILINGS, "uvicorn"): bench.bare}

    def said(key: tuple[str, str]) -> Measured:
        to_stderr(": ".join(key))
        return runs[key]()

    found: dict[str, Runs] = {name: {} for name in (*sides, CEILINGS)}
    for (name, _), measured in in_turn(
        {key: lambda key=key: said(key) for key in runs}, options.rounds
    ).items():
        for figure in measured[0]:
            found[name][figure] = [each[figure] for each in measured]
    return found


def show(found: dict[str, Runs]) -> None:
    """Print every figure of every side; new over old where there are both."""
    sides = [name for name in found if name != CEILINGS]
    headings = ["", *(f"{side} {of}" for side in sides for of in ("least", "median", "greatest"))]
    rows = []
    for name in found["new"]:
        cells = [cell for side in sides for cell in _spread(found[side].get(name, []))]
        old = found.get("old", {}).get(name)
        ratio = [digits(_median(over(found["new"][name], old)))] if old else []
        rows.append([name, *cells, *ratio])
    if rows:
        show_table("service", [*headings, *(["new / old"] if "old" in found else [])], rows)
    ceilings = [[name, *_spread(values)] for name, values in found[CEILINGS].items()]
    if ceilings:
        show_table("ceilings", ["", "least", "median", "greatest"], ceilings)


def _spread(values: Sequence[float]) -> list[str]:
    return [digits(of(values)) if values else "" for of in (min, median_of, max)]


def derived(side: str, own: Runs, ceilings: Runs, crowds: Sequence[int]) -> Derived:
    """What is required of a side, with its bars, and the record; without what was left out."""
    few, many = crowds[0], crowds[-1]

    def http(kind: str, connections: int, unit: str = "rows/s") -> Sequence[float]:
        return own.get(f"HTTP, drafts on, {kind}, {connections}, {unit}", ())

    engine = own.get("engine, drafts on, rows/s", ())
    over_engine = {str(each): over(http("whole", each), engine) for each in crowds}
    over_vllm = over(http("whole", few), own.get(f"vLLM alone, {few}, rows/s", ()))
    one_token = own.get(f"one token, {many}, requests/s", ())
    one_token_over = over(one_token, ceilings.get(f"no work, one hop, {many}, requests/s", ()))
    noop = ceilings.get("no work, one hop, 1, p50 ms", ())
    alone = own.get("engine, drafts on, p50 ms", ())
    added = [h - e for h, e in zip(http("whole", 1, "p50 ms"), alone, strict=False)]
    lists = f"lists of {LIST}, rows/s"
    list_over = over(own.get(f"HTTP, {lists}", ()), own.get(f"engine, {lists}", ()))
    streaming = over(http("streams", few), http("whole", few))
    spent = {role: own.get(f"processor, {role}, ms a request", ()) for role in ROLES}
    bare = ceilings.get("processor, uvicorn, command, ms a request", ())
    paced = ceilings.get(f"processor, uvicorn at the rate of {side}, ms a request", ())
    outside = [g + r for g, r in zip(spent["gateway"], spent["replica"], strict=True)]
    processor_time = "processor time outside engine and proxy / uvicorn's"
    rows = [
        (processor_time, few, over(outside, bare), 2.5),
        (f"{processor_time} at the service's rate", few, over(outside, paced), None),
        *(
            ("rows/s over HTTP / engine alone", int(each), runs, 0.8 if int(each) <= 16 else 0.9)
            for each, runs in over_engine.items()
        ),
        ("rows/s over HTTP / vLLM alone", few, over_vllm, 0.8),
        ("one token, two replicas / no work, one hop", many, one_token_over, 0.4),
        ("p50 over HTTP less engine's / no work, one hop", 1, over(added, noop), 1.5),
        (f"lists of {LIST}, rows/s / engine alone", 1, list_over, 0.93),
        ("streams / whole answers", few, streaming, 0.85),
    ]
    figures = [  # shares are to be large, multiples small
        Figure.of_runs(
            f"{side}: {name}, {connections} at a time", runs, "x", bar, bool(bar and bar < 1)
        )
        for name, connections, runs, bar in rows
        if runs
    ]
    record = {
        "http_over_engine": {each: _median(runs) for each, runs in over_engine.items()},
        "http_over_vllm": _median(over_vllm),
        "one_token_over_noop": _median(one_token_over),
        "added_p50_ms": _median(added),
        "noop_p50_ms": _median(noop),
        "list_over_engine": _median(list_over),
        "streaming_over_whole": _median(streaming),
        "cpu_ms_per_request": {
            "gateway": _median(spent["gateway"]),
            "replica_beside_engine": _median(spent["replica"]),
            "proxy": _median(spent["proxy"]),
            "bare_uvicorn": _median(bare),
            "bare_uvicorn_at_service_rate": _median(paced),
        },
    }
    return figures, record


def over(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio in each round; none where one of them was not measured."""
    return [a / b for a, b in zip(above, below, strict=False) if b]


def _median(runs: Sequence[float]) -> float | None:
    return median_of(runs) if runs else None


if __name__ == "__main__":
    main()
