"""A job of several stages shows each by itself and knows how long each took."""

import io

import pytest

from tasc_jobs.stages import Stages

UNITS = {"read": "rows", "sort": "parts"}


def test_each_stage_is_shown_with_its_own_total_and_unit():
    out = io.StringIO()
    with Stages("index t", UNITS, stream=out) as stages:
        for done in (0, 3, 10):
            stages("read", done, 10)
        stages("sort", 0, 2)
        stages("sort", 1, 2)
    lines = [line.split(", ")[0] for line in out.getvalue().splitlines()]
    assert lines == ["index t: read: 10/10 rows", "index t: sort: 1/2 parts"]


def test_seconds_of_every_stage_are_kept_in_order():
    with Stages("index t", UNITS, stream=io.StringIO()) as stages:
        stages("read", 0, 1)
        stages("sort", 0, 1)
    assert list(stages.seconds) == ["read", "sort"]
    assert all(spent > 0 for spent in stages.seconds.values())


def test_a_stage_that_fails_still_shows_how_far_it_came():
    out = io.StringIO()

    def fail():
        with Stages("index t", UNITS, stream=out) as stages:
            stages("read", 4, 10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert out.getvalue().startswith("index t: read: 4/10 rows")


def test_what_a_stage_needs_said_is_said_once_when_it_begins():
    out = io.StringIO()
    with Stages("index t", UNITS, notes={"sort": "takes long"}, stream=out) as stages:
        stages("read", 1, 1)
        stages("sort", 0, 2)
        assert out.getvalue().splitlines()[1:] == ["index t: sort: takes long"]
        stages("sort", 2, 2)
    assert out.getvalue().count("takes long") == 1


def test_without_a_stage_nothing_is_shown():
    out = io.StringIO()
    with Stages("index t", UNITS, stream=out) as stages:
        pass
    assert (out.getvalue(), stages.seconds) == ("", {})
