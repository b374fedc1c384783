"""The values that sampling parameters may have, from the table to requests and the samplers."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from pydantic import ValidationError

from tasc_engine.sampling.row_parameters import rules_of
from tasc_protocol import PARAMETERS, Sampling, SamplingDefaults
from tasc_runtime.sampling_options import RuleFields

PROBES = (0.0, 0.5, 1.0, 1.5, 2.0, 99.0, 100.0, 101.0, 2.0**31 - 1, 2.0**31, 2.0**64, math.inf)
NEAR = (-1, 0, 1)


def taken(rule: Callable[..., object], name: str, value: float) -> bool:
    try:
        rule(**{name: value})
    except (ValueError, ValidationError):
        return False
    return True


def probes(name: str) -> list[float]:
    """Returns values on both sides of each possible limit, and of 0."""
    if PARAMETERS[name].is_integer:
        return [int(p) + d for p in PROBES if math.isfinite(p) for d in NEAR]
    around = [
        near
        for p in PROBES
        for near in (p, math.nextafter(p, math.inf), math.nextafter(p, -math.inf))
    ]
    return [*itertools.chain(*((p, -p) for p in around)), math.nan]


@pytest.mark.parametrize("name", PARAMETERS)
def test_tasks_and_sampling_rules_accept_the_same_values(name: str) -> None:
    found = {
        value: (taken(SamplingDefaults, name, value), taken(Sampling, name, value))
        for value in probes(name)
    }
    assert {value for value, (task, answer) in found.items() if task != answer} == set()
    assert {task for task, _ in found.values()} == {True, False}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampling_rules_accept_every_value_that_requests_accept(name: str) -> None:
    neutral = {"top_p": 0.0, "top_k": -1}.get(name)  # accepted, and left out or replaced
    sent = {value for value in probes(name) if taken(RuleFields, name, value)}
    assert {v for v in sent if v != neutral and not taken(Sampling, name, v)} == set()
    assert taken(RuleFields, name, PARAMETERS[name].default)
    assert sent < {*probes(name)}


def test_sampling_has_a_field_for_every_limited_parameter() -> None:
    own = {"logit_bias", "seed", "prompt", "choice"}
    assert {f.name for f in fields(Sampling)} == {*PARAMETERS} | own
    assert all(getattr(Sampling(), name) == one.default for name, one in PARAMETERS.items())


@pytest.mark.parametrize("name", PARAMETERS)
def test_only_penalties_change_the_choice_at_temperature_0(name: str) -> None:
    changed = replace(Sampling(), **{name: 0.5 if name != "top_k" else 1})
    assert changed.penalises == PARAMETERS[name].is_penalty
    assert changed.plain == (name != "temperature" and not changed.penalises)


def test_rows_without_a_request_have_default_sampling_parameters() -> None:
    columns = rules_of(3, 8, 16).parameters._asdict()
    assert {name: set(column) for name, column in columns.items()} == {
        name: {one.default} for name, one in PARAMETERS.items()
    }
