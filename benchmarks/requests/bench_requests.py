"""Hold the options of requests to their bars: exact sampling, guides, adapters, NF4.

    python benchmarks/requests/bench_requests.py
    python benchmarks/requests/bench_requests.py --data DIR --parts choices,schemas
    python benchmarks/requests/bench_requests.py --rows 64 --requests 100
    python benchmarks/requests/bench_requests.py --data DIR --parts labels,labels-speed

Parts: `grid` answers random requests with and without drafts, alone and eight together; `sampling`
tests sampled tokens against the exact distribution; `choices` answers from label sets; `schemas`
answers by random JSON schemas of calls; `adapters` has two adapters in one batch; `nf4` quantises;
`labels` compares probabilities of labels with brute force; `labels-speed` compares their rate with
those of guided answers and of brute force. The models are tiny random ones and the shipped one, and
SmolLM2 for labels. DIR has `massive_en`, `clinc150` and `eurlex_labels` as folders with
`train.jsonl.gz` and `test.jsonl.gz`. Without it, label sets that do not ship are left out, and so
is SmolLM2, which `make bench-model` makes.
Progress goes to stderr, tables to stdout; the last line of stdout is one JSON object.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    about,
    add_data,
    add_json,
    add_parts,
    add_repeats,
    at_least,
    finish,
    measured,
    parser_of,
    use_one_thread,
    use_test_helpers,
)

if TYPE_CHECKING:
    from benchmarks.requests.engines import Options

PARTS = ("grid", "sampling", "choices", "schemas", "adapters", "nf4", "labels", "labels-speed")
ARCHITECTURES = ("qwen2", "llama")
LEAST_P, PLANTED_P = 0.001, 1e-6


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_parts(parser, PARTS)
    add_data(parser)
    add("--rows", type=at_least(1), default=256, help="test rows of a label set or adapter (256)")
    add("--requests", type=at_least(1), default=500, help="random requests of the grid (500)")
    add("--schemas", type=at_least(1), default=200, help="random JSON schemas (200)")
    add_repeats(parser, 3)
    add_json(parser)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    use_one_thread()
    use_test_helpers("lossless_cases", "request_grid", "test_choosing_statistics")
    from benchmarks.requests.engines import Options
    from benchmarks.requests.guides import choices, schemas
    from benchmarks.requests.label_speed import labels_speed
    from benchmarks.requests.labels import labels
    from benchmarks.requests.weights import adapters, nf4

    parts = (grid, sampling, choices, schemas, adapters, nf4, labels, labels_speed)
    measures = dict(zip(PARTS, parts, strict=True))
    found = measured(measures, options.parts, Options(**vars(options)))
    finish({"benchmark": "requests", **found, **about()}, options.json)


def grid(options: "Options") -> tuple[list[Figure], dict[str, Any]]:
    """Answer random requests of all settings in four ways that must agree, in float64."""
    from lossless_cases import make_case
    from request_grid import Way, answer_all_ways, random_requests

    equal, accepted, rejected = 0, 0, 0
    each = options.requests // len(ARCHITECTURES)
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


def sampling(_: "Options") -> tuple[list[Figure], dict[str, Any]]:
    """Test 100,000 sampled tokens of each rule; a planted error shows that the test detects one."""
    from test_choosing_statistics import RULES, SOME, drawn, exact, fits, numbers_of, sampled

    found = {}
    for name, rule in RULES.items():
        allowed = SOME if "mask" in name else None
        found[name] = fits(sampled(rule, allowed), rule, allowed)
    rule = RULES["top_p"]
    wrong = replace(rule, top_p=rule.top_p + 0.01)
    planted = fits(drawn(lambda position: exact(wrong, position), numbers_of()), rule)
    least = min(found.values())
    return [
        Figure(f"sampling: least p of {len(found)} rules, chi-square", least, "", LEAST_P),
        Figure("sampling: p of a planted wrong sampler", planted, "", PLANTED_P, upwards=False),
    ], {"p": found, "planted_p": planted, "tokens_each": 100_000}


if __name__ == "__main__":
    main()
