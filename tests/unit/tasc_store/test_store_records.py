"""What a task record and a corpus row may be, and that they survive JSON. No server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft.settings import DraftSettings
from tasc_store import ArtifactCache, ArtifactStore, CorpusRow, CorpusStore, TaskRecord
from tasc_store.corpora import MAX_BATCH

RECORD = TaskRecord("intents", "org/model", "f" * 32, "Classify: {input}\n")
TEXT = st.text(min_size=1)


@given(
    stop=st.lists(TEXT),
    model=TEXT,
    prompt=TEXT,
    max_tokens=st.integers(1),
    n_max=st.integers(2, 16),
)
def test_a_record_survives_json(
    stop: list[str], model: str, prompt: str, max_tokens: int, n_max: int
) -> None:
    template = prompt.replace("{", "(") + "{input}"
    record = TaskRecord("a.b-c_1", model, "f", template, stop=tuple(stop), max_tokens=max_tokens)
    record = replace(record, draft=DraftSettings(n_max=n_max))
    assert TaskRecord.from_json(record.to_json()) == record


def test_a_short_hand_written_record_gets_the_defaults() -> None:
    fields = {"name": "t", "model": "m", "fingerprint": "f", "template": "{input}"}
    record = TaskRecord.from_json(json.dumps(fields))
    assert record == TaskRecord("t", "m", "f", "{input}")
    assert record.corpus_name == "t"
    assert replace(record, corpus="other").corpus_name == "other"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "two words"}, "two words"),
        ({"name": "x" * 65}, "64"),
        ({"name": ".hidden"}, "begin"),
        ({"name": "br{ace}"}, "br{ace}"),
        ({"name": "line\n"}, "name"),
        ({"corpus": "no/slash"}, "no/slash"),
        ({"fingerprint": "a:b"}, "fingerprint"),
        ({"model": ""}, "model"),
        ({"adapter": ""}, "adapter"),
        ({"template": "nothing"}, "0 times"),
        ({"template": "{input}{input}"}, "2 times"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"stop": ("",)}, "stop"),
        ({"stop": "ab"}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "12"}, "max_tokens"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(RECORD, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"modle": "x"}, "unknown fields modle"),
        ({"draft": {"nmax": 3}}, "draft has unknown fields nmax"),
        ({"draft": {"n_max": 99}}, "n_max is 99"),
        ({"draft": 3}, "draft is 3"),
    ],
)
def test_a_field_json_should_not_have_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TaskRecord.from_json(json.dumps({**json.loads(RECORD.to_json()), **change}))


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"name": "t", "model": "m"}', "lacks fingerprint, template"), ("[1]", "JSON object")],
)
def test_json_that_is_no_record_is_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TaskRecord.from_json(text)


def test_a_row_needs_a_key_and_real_text() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        CorpusRow("", "in", "out")
    with pytest.raises(ValueError, match="'k' holds a lone surrogate"):
        CorpusRow("k", "in", "\ud800")


def test_limits_of_arguments_are_named() -> None:
    rows = [CorpusRow(str(i), "", "") for i in range(MAX_BATCH + 1)]
    with redis.Redis() as unconnected:
        corpus = CorpusStore(unconnected, "t")
        with pytest.raises(ValueError, match=f"{MAX_BATCH + 1} rows.*{MAX_BATCH}"):
            corpus.append(rows)
        with pytest.raises(ValueError, match="start <= stop"):
            corpus.read(2, 1)
        with pytest.raises(ValueError, match="keep is 0"):
            ArtifactStore(unconnected, "t", "f").prune(0)
    with pytest.raises(ValueError, match="keep is 0"):
        ArtifactCache(Path("unused"), keep=0)


def test_keys_of_a_task_share_a_cluster_slot() -> None:
    from tasc_store import keys

    assert keys.task_key("t", "index", 3) == "tasc:{t}:index:3"
