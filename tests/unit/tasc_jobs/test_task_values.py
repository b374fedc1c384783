"""Options of a command line as values of a record, and what differs between two records."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from support import refused
from tasc_draft.settings import DraftSettings
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks import shown
from tasc_jobs.tasks.options import TaskOptions
from tasc_jobs.tasks.values import NEURAL, defaults, flat, given_values, option, record_of
from tasc_store import NeuralDrafting, SamplingDefaults, TaskRecord

RECORD = TaskRecord("t", "org/model", "f", "{input}")
OTHER = TaskRecord(
    "t", "org/other", "g", "say {input}", "org/adapter", "v1", "bfloat16", ("\n", "."), 8, "c",
    DraftSettings("tasc", n_max=4), "nf4", SamplingDefaults(temperature=0.5, top_k=3), ("a", "b"),
    neural=NeuralDrafting("/drafter", "neural", "recent", 9, 3, 8, 31, 0.5),
)  # fmt: skip


def test_names_of_values_are_told_apart() -> None:
    names = [f.name for f in fields(TaskRecord)]
    names += [f.name for part in (SamplingDefaults, DraftSettings) for f in fields(part)]
    names += NEURAL
    assert len(set(names)) == len(names)
    assert sorted(NEURAL.values()) == sorted(f.name for f in fields(NeuralDrafting))
    assert set(flat(RECORD)) == set(names) - {"sampling", "draft", "neural"}
    assert set(defaults()) == set(flat(RECORD)) - {"name", "model", "fingerprint", "template"}


@pytest.mark.parametrize("record", [RECORD, OTHER])
def test_a_record_s_values_make_it_again(record: TaskRecord) -> None:
    assert record_of(flat(record)) == record


def test_values_left_out_are_the_defaults() -> None:
    needed = {"name": "t", "model": "org/model", "fingerprint": "f", "template": "{input}"}
    assert record_of(needed) == record_of({**needed, **defaults()}) == RECORD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"template": "x"}, "--template has"),
        ({"top_p": 2.0}, "--top-p is 2.0"),
        ({"n_max": 99}, "--draft n_max is 99"),
        ({"mixture": "x"}, "--mixture is 'x'"),
        ({"choices": ("a", "a")}, "--choices has 'a' twice"),
        ({"corpus": "a b"}, "task name 'a b'"),
        ({"adapters": (("a", "b"), ("a", "c"))}, "--adapters has 'a' twice"),
        ({"adapter": "a", "adapters": (("a", "b"),)}, "--adapter and adapters are set"),
        ({"drafter": "d", "proposer": "x"}, "--proposer is 'x'"),
        ({"drafter": "d", "draft_vocabulary": "x"}, "--draft-vocabulary is 'x'"),
        ({"drafter": "d", "draft_depth": 17}, "--draft-depth is 17"),
        ({"drafter": "d", "draft_width": 32}, "--draft-depth 5 and width 32"),
        ({"draft_nodes": 9}, "--draft-nodes is 9"),
    ],
)
def test_a_value_that_is_refused_is_named_by_its_option(change: dict[str, Any], said: str) -> None:
    with refused(UsageError, said):
        record_of({**flat(RECORD), **change})


def test_every_value_with_an_option_is_called_by_it() -> None:
    taken = {f"--{f.name.replace('_', '-')}" for f in fields(TaskOptions)}
    called = {option(name) for name in [*defaults(), "model", "template"]}
    assert {name for name in called if not name.startswith("--draft ")} <= taken


def test_only_what_was_given_is_there() -> None:
    assert given_values(TaskOptions()) == {}
    options = TaskOptions(max_tokens=3, template=r"a\n{input}", stop=[r"\n", "x"], temperature=0.0)
    assert given_values(options) == {
        "max_tokens": 3, "template": "a\n{input}", "stop": ("\n", "x"), "temperature": 0.0,
    }  # fmt: skip


def test_folders_are_known_by_their_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = given_values(TaskOptions(model="./model", adapter="org/adapter"))
    assert found == {"model": str(tmp_path / "model"), "adapter": "org/adapter"}


def test_adapters_are_names_and_folders_by_their_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fr=1").mkdir()
    monkeypatch.chdir(tmp_path)
    found = given_values(TaskOptions(adapters=["fr=./fr=1", "de=org/adapter"]))
    adapters = (("fr", str(tmp_path / "fr=1")), ("de", "org/adapter"))
    assert found == {"adapters": adapters}
    words = shown.changes_in_words(shown.changes(RECORD, replace(RECORD, adapters=adapters[1:])))
    assert words == "adapters unset -> de=org/adapter"
    for wrong in ("fr", "=x", "fr="):
        with refused(UsageError, f"--adapters is '{wrong}'"):
            given_values(TaskOptions(adapters=[wrong]))


def test_labels_come_in_the_order_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffone\r\n\n two \nthr\u2028ee".encode())
    found = given_values(TaskOptions(choice=["zero"], choices=path))
    assert found == {"choices": ("zero", "one", " two ", "thr\u2028ee")}
    path = tmp_path / "labels.json"
    path.write_text('["one", "two\\n"]')
    assert given_values(TaskOptions(choices=path)) == {"choices": ("one", "two\n")}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("l.txt", b"", "holds no label"),
        ("l.txt", b"\n\n", "holds no label"),
        ("l.txt", b"caf\xe9", "is no UTF-8"),
        ("l.json", b"{}", "holds no list"),
        ("l.json", b"[", "is no JSON"),
        ("l.json", b"[1,2]", "holds 1"),
        ("l.json", b'["a", ["a"]]', "holds ['a']"),
        ("l.json", b'["\\udce6"]', r"holds '\udce6'"),
        ("l.json", b"[" * 100_000, "is no JSON"),
        ("l.txt", b"a" * 24_000_001, "is larger than 24000000 bytes"),
    ],
)
def test_a_file_that_holds_no_labels_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with refused(UsageError, f"--choices {path} {said}"):
        given_values(TaskOptions(choices=path))


def test_a_schema_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "string"}')
    assert given_values(TaskOptions(schema=path)) == {"schema": '{"type": "string"}'}
    path.write_text(" " * 65_537)
    with refused(UsageError, f"--schema {path}", "65536"):
        given_values(TaskOptions(schema=path))
    with refused(UsageError, f"--schema {tmp_path}"):
        given_values(TaskOptions(schema=tmp_path))


def test_any_draft_setting_can_be_given() -> None:
    pairs = [
        f"{f.name}={'corpus, prompt' if f.name == 'sources' else f.default}"
        for f in fields(DraftSettings)
    ]
    found = given_values(TaskOptions(draft=pairs))
    assert DraftSettings(**found) == DraftSettings(sources=("corpus", "prompt"))
    assert {name: type(value) for name, value in found.items()} == {
        f.name: type(f.default) for f in fields(DraftSettings)
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TaskOptions(draft=["n_max"]), "--draft is 'n_max'"),
        (TaskOptions(draft=["nmax=3"]), "--draft is 'nmax=3'"),
        (TaskOptions(draft=["n_max=3.5"]), "--draft n_max is '3.5'"),
        (TaskOptions(draft=["min_prob=high"]), "--draft min_prob is 'high'"),
        (TaskOptions(draft=["n-max=3", "n_max=3"]), "n_max is given twice"),
        (TaskOptions(mixture="trie", draft=["mixture=trie"]), "mixture is given twice"),
    ],
)
def test_a_draft_setting_that_is_none_is_named(options: TaskOptions, said: str) -> None:
    with refused(UsageError, said):
        given_values(options)


def test_what_changed_is_each_value_that_differs() -> None:
    assert shown.changes(RECORD, RECORD) == {}
    found = shown.changes(RECORD, OTHER)
    assert found["n_max"] == (6, 4)
    assert found["temperature"] == (None, 0.5)
    assert record_of({**flat(RECORD), **{k: new for k, (_, new) in found.items()}}) == OTHER
    words = shown.changes_in_words(found)
    assert 'stop unset -> ["\\n", "."]' in words
    assert "choices unset -> 2 labels: a, b" in words
    assert "top_p" not in words


def test_changed_labels_are_counted_and_long_values_cut() -> None:
    new = replace(OTHER, choices=("b", "c", "d"), template="x" * 500 + "{input}")
    words = shown.changes_in_words(shown.changes(OTHER, new))
    assert "choices +2 -1 labels" in words
    assert len(words) < 200


def test_a_table_has_every_value_and_every_version() -> None:
    past = [
        shown.Past(1, {}), shown.Past(2, shown.changes(RECORD, OTHER)),
        shown.Past(3, shown.changes(OTHER, RECORD), same_as=1),
    ]  # fmt: skip
    lines = shown.table(OTHER, 2, past).splitlines()
    said = dict(line.split(maxsplit=1) for line in lines if line[:1].strip() and " " in line)
    assert said.pop("version") == "2 of 3"
    assert set(said) == set(flat(OTHER))
    assert said["stop"] == '["\\n", "."]'
    assert lines[-4:-2] == ["versions", "   1  first"]
    assert lines[-1] == "   3  same as version 1"
    plain = shown.table(RECORD, 1, past[:1])
    assert "drafter                 unset" in plain.splitlines()
    assert "draft_depth" not in plain


def test_json_has_every_field() -> None:
    found = json.loads(json.dumps(shown.as_json(RECORD)))
    assert set(found) == {f.name for f in fields(TaskRecord)}
    assert found["sampling"]["temperature"] is None
