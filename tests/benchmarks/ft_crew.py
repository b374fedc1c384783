"""Makes many fine-tunes in a few processes, and measures them one by one. It tables nothing."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from bench_command import to_stderr
from ft_runs import FtRun, Workshop


def make_all(workshop: Workshop, runs: Sequence[FtRun], processes: int) -> None:
    """Those that are not there; what takes longest first is the caller's to say."""
    missing = [run for run in runs if not workshop.is_made(run)]
    begun = time.monotonic()
    jobs = {run.name: (workshop.make, run) for run in missing}
    for done, name in enumerate(in_processes(jobs, processes), 1):
        left = (time.monotonic() - begun) / done * (len(missing) - done)
        to_stderr(f"{done}/{len(missing)} {name}; {left:.0f} s left")


def in_processes(jobs: Mapping[str, tuple[Any, ...]], processes: int) -> Iterator[str]:
    """Names of jobs as they are done: each a function and what it takes."""
    if processes == 1:
        for name, (do, *given) in jobs.items():
            do(*given)
            yield name
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _quietly) as pool:
        made = {pool.submit(*job): name for name, job in jobs.items()}
        for future in as_completed(made):
            future.result()
            yield made[future]


def measure_all(
    workshop: Workshop, runs: Sequence[FtRun], *, drafts: bool
) -> dict[FtRun, dict[str, Any]]:
    """What each run's answers are like; those measured before are read."""
    found = dict[FtRun, dict[str, Any]]()
    for run in runs:
        known = workshop.measured(run)
        if known is None or (drafts and "drafted" not in known["sides"]):
            to_stderr(f"measuring {run.name}")
            known = workshop.measure(run, drafts=drafts)
        found[run] = known
    return found


def _quietly() -> None:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
