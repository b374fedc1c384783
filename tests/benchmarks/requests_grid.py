"""Random requests over all settings, answered in four ways that must agree; float64."""

import tempfile
from pathlib import Path
from typing import Any

from bench_requests import Asked
from draft_bars import Figure
from lossless_cases import make_case
from request_grid import Way, answer_all_ways, random_requests

ARCHITECTURES = ("qwen2", "llama")


def measure(asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    """As many requests on each of two architectures as make the number asked for."""
    equal, accepted, rejected = 0, 0, 0
    each = asked.requests // len(ARCHITECTURES)
    for seed, architecture in enumerate(ARCHITECTURES):
        with tempfile.TemporaryDirectory(prefix="requests-grid-") as folder:
            case = make_case(Path(folder) / architecture, architecture)
            ways = answer_all_ways(case, random_requests(case, each, seed))
        totals = ways.totals[Way(8, True)]
        equal += sum(ways.equal())
        accepted += int(totals.accepted.sum())
        rejected += int(totals.drafted.sum() - totals.accepted.sum())
    number = each * len(ARCHITECTURES)
    return [
        Figure("grid: requests equal in all ways", equal, f"of {number}", number),
        Figure("grid: draft tokens accepted", accepted, "", 1),
        Figure("grid: draft tokens rejected", rejected, "", 1),
    ], {"requests": number, "equal": equal, "accepted": accepted, "rejected": rejected}
