"""What asks for a guide: refused where it is none, equal and hashed by what it says."""

import pickle

import pytest

from tasc_engine.request import GuideSpec


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"kind": "choice"}, "choices is empty; give at least one"),
        ({"kind": "choice", "choices": ("a",), "text": "b"}, "text besides"),
        ({"kind": "regex"}, "by regex needs its text"),
        ({"kind": "regex", "text": "a", "choices": ("a",)}, "nothing else"),
        ({"kind": "yaml", "text": "a"}, "'yaml'; it is one of choice, json_schema, regex, grammar"),
        ({"kind": "choice", "choices": ("a", "b\ud800")}, r"choice 1 .*'\\ud800' at character 1"),
        ({"kind": "regex", "text": "\udfff"}, r"regex .*'\\udfff' at character 0"),
    ],
)
def test_what_is_no_guide_is_refused_by_name(parts: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GuideSpec(**parts)


def test_equal_guides_have_one_hash_wherever_they_come_from() -> None:
    one, other = GuideSpec("choice", ("a", "東 🙂")), GuideSpec("choice", ("a", "東 🙂"))
    assert hash(one) == hash(other)
    assert {one: 1}[other] == 1
    assert one != GuideSpec("choice", ("a",))
    sent = pickle.dumps(one)
    assert sent == pickle.dumps(other)
    assert pickle.loads(sent) == one
    assert one.characters == 4
    assert b"_hash" not in sent
