"""The store takes the values that the engine takes, though neither knows the other's limits."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields

import pytest

from tasc_engine import Sampling
from tasc_engine import request as guides
from tasc_store import SamplingDefaults
from tasc_store.tasks import record as answer_forms

NAMES = [f.name for f in fields(SamplingDefaults)]
PROBES = (0.0, 0.5, 1.0, 1.5, 99.0, 100.0, 101.0, 2.0**31 - 1, 2.0**31, 2.0**64, math.inf)
NEAR = (-1, 0, 1)


def taken(rule: Callable[..., object], name: str, value: float) -> bool:
    try:
        rule(**{name: value})
    except ValueError:
        return False
    return True


def probes(name: str) -> list[float]:
    """Around each place where a limit could be, on both sides of 0."""
    if name == "top_k":
        return [int(p) + d for p in PROBES if math.isfinite(p) for d in NEAR]
    around = [
        near
        for p in PROBES
        for near in (p, math.nextafter(p, math.inf), math.nextafter(p, -math.inf))
    ]
    return [*itertools.chain(*((p, -p) for p in around)), math.nan]


@pytest.mark.parametrize("name", NAMES)
def test_store_and_engine_take_the_same_values(name: str) -> None:
    found = {
        value: (taken(SamplingDefaults, name, value), taken(Sampling, name, value))
        for value in probes(name)
    }
    assert {value for value, (ours, theirs) in found.items() if ours != theirs} == set()
    assert {ours for ours, _ in found.values()} == {True, False}


def test_every_number_of_a_sampling_rule_that_is_no_request_s_own_has_a_default() -> None:
    assert {f.name for f in fields(Sampling)} - set(NAMES) == {
        "logit_bias", "seed", "prompt", "choice",
    }  # fmt: skip


def test_the_store_takes_answer_forms_as_large_as_guides_are_followed() -> None:
    assert (guides.MOST_CHOICES, guides.MOST_CHOICE_BYTES, guides.MOST_GUIDE_BYTES) == (
        answer_forms.MOST_CHOICES,
        answer_forms.MOST_CHOICE_BYTES,
        answer_forms.MOST_TEXT_BYTES,
    )
