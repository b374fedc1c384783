"""100,000 sampled tokens by each of several rules against the exact distribution."""

from dataclasses import replace
from typing import Any

from bench_requests import Asked
from draft_bars import Figure
from test_choosing_statistics import RULES, SOME, drawn, exact, fits, numbers_of, sampled

LEAST_P, PLANTED_P = 0.001, 1e-6


def measure(_asked: Asked) -> tuple[list[Figure], dict[str, Any]]:
    """A planted wrong sampler, nearly right, shows that the test can tell."""
    found = {}
    for name, rule in RULES.items():
        allowed = SOME if "mask" in name else None
        found[name] = fits(sampled(rule, allowed), rule, allowed)
    rule = RULES["top_p"]
    wrong = replace(rule, top_p=rule.top_p + 0.01)
    planted = fits(drawn(lambda position: exact(wrong, position), numbers_of()), rule)
    worst = min(found.values())
    return [
        Figure(f"sampling: least p of {len(found)} rules, chi-square", worst, "", LEAST_P),
        Figure("sampling: p of a planted wrong sampler", planted, "", PLANTED_P, upwards=False),
    ], {"p": found, "planted_p": planted, "tokens_each": 100_000}
