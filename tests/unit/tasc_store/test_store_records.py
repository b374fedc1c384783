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
from tasc_store import (
    ArtifactCache,
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    NeuralDrafting,
    SamplingDefaults,
    TaskRecord,
)
from tasc_store.corpus import MAX_BATCH
from tasc_store.tasks.record import MOST_CHOICE_CHARACTERS, MOST_CHOICES, MOST_TEXT_BYTES

RECORD = TaskRecord("intents", "org/model", "f" * 32, "Classify: {input}\n")
TEXT = st.text(min_size=1)


# As records were written before there was sampling, quantization, choices, schema, regex, adapters
# or neural.
BEFORE = (
    '{"adapter":null,"corpus":null,"draft":{"corpus_weight":0.75,"learning_rate":0.1,"min_prob":0.2'
    ',"mixture":"mixed","n_max":6,"neighbour_tokens":4096,"neighbours":32,'
    '"num_speculative_tokens":16,"p_min":1,"prefix":3,"recent_tokens":65536,"sources":["corpus",'
    '"prompt","neighbours","recent","bigrams","aligned"]},"dtype":"float32","fingerprint":"'
    + "f"
    * 32
    + '","max_tokens":256,"model":"org/model","name":"intents","revision":null,"stop":[],'
    '"template":"Classify: {input}\\n"}'
)


def test_a_record_of_before_loads_and_is_written_as_it_was() -> None:
    record = TaskRecord.from_json(BEFORE)
    assert record == RECORD
    assert (record.sampling, record.quantization) == (SamplingDefaults(), None)
    assert (record.choices, record.schema, record.regex) == ((), None, None)
    assert (record.adapters, record.neural) == ((), None)
    assert record.to_json() == BEFORE


@given(
    numbers=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, 2**31 - 1),
            "presence_penalty": st.floats(-100, 100),
        },
    ),
    form=st.sampled_from(
        [{}, {"choices": ("a", "é ")}, {"schema": '{"type": "string"}'}, {"regex": "a|b"}]
    ),
    quantization=st.sampled_from([None, "nf4", "int8"]),
)
def test_how_answers_are_made_survives_json(
    numbers: dict[str, float], form: dict[str, Any], quantization: str | None
) -> None:
    sampling = SamplingDefaults(**numbers)
    record = replace(RECORD, sampling=sampling, quantization=quantization, **form)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    assert again.to_json() == record.to_json()
    assert sampling.given == numbers


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


def test_adapters_survive_json_in_their_order_and_may_be_written_as_an_object() -> None:
    adapters = (("z", "/somewhere"), ("A.b-c_1", "org/adapter"), ("x" * 64, "b"))
    record = replace(RECORD, adapters=adapters)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    assert again.adapter_names == ("z", "A.b-c_1", "x" * 64)
    content = json.loads(record.to_json())
    assert content["adapters"] == [list(pair) for pair in adapters]
    assert TaskRecord.from_json(json.dumps({**content, "adapters": dict(adapters)})) == record


def test_a_drafter_survives_json_and_has_defaults_where_written_by_hand() -> None:
    neural = NeuralDrafting("/somewhere", "neural", "recent+ranked", 7, 3, 8, 24, 0.5)
    record = replace(RECORD, neural=neural)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    content = json.loads(record.to_json())
    short = TaskRecord.from_json(json.dumps({**content, "neural": {"drafter": "d"}}))
    assert short.neural == NeuralDrafting("d")
    assert TaskRecord.from_json(json.dumps({**content, "neural": None})) == RECORD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"drafter": ""}, "drafter is ''; it must be a folder"),
        ({"proposer": "both"}, "proposer is 'both'; use one of neural, hybrid"),
        ({"vocabulary": []}, "vocabulary is .*full, ranked, recent, recent.ranked"),
        ({"ranked_tokens": 0}, "ranked_tokens is 0; it must be an integer from 1"),
        ({"depth": 17}, "depth is 17; .* from 1 to 16"),
        ({"width": True}, "width is True"),
        ({"nodes": 64}, "nodes is 64; .* from 1 to 63"),
        ({"depth": 16, "width": 5}, "depth 16 and width 5 expand 75 nodes; the most is 63"),
        ({"sure": 1.5}, "sure is 1.5; it must be a number from 0 to 1"),
        ({"sure": float("nan")}, "sure is nan"),
    ],
)
def test_how_a_drafter_cannot_draft_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NeuralDrafting(**{"drafter": "d", **change})


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
        ({"quantization": "int4"}, "quantization is 'int4'; use nf4 or int8"),
        ({"quantization": ""}, "quantization"),
        ({"choices": "ab"}, "choices is 'ab'"),
        ({"choices": ["a"]}, "choices"),
        ({"choices": ("a", "")}, "choices"),
        ({"choices": ("a", 1)}, "choices"),
        ({"choices": ("a", "b", "a")}, "choices has 'a' twice"),
        ({"choices": ("\ud800",)}, "choices has a lone surrogate"),
        ({"choices": tuple(map(str, range(MOST_CHOICES + 1)))}, "20001 labels; at most 20000"),
        ({"choices": ("x" * (MOST_CHOICE_CHARACTERS + 1),)}, "2000001 characters; at most"),
        ({"schema": ""}, "schema is ''"),
        ({"schema": "{"}, "schema is no JSON"),
        ({"schema": "[" * 60_000}, "schema is no JSON"),
        ({"schema": "[1]"}, "schema is '.1.'; it must be a JSON object"),
        ({"schema": '{"é":"' + "x" * (MOST_TEXT_BYTES - 8) + '"}'}, "65537 bytes; at most 65536"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": "x" * (MOST_TEXT_BYTES + 1)}, "regex has 65537 bytes"),
        ({"choices": ("a",), "regex": "a"}, "choices and regex are set"),
        ({"schema": "{}", "regex": "a"}, "schema and regex are set"),
        ({"adapters": [("a", "b")]}, "adapters is .* pairs of a name and a folder"),
        ({"adapters": (("a", "b", "c"),)}, "adapters is"),
        ({"adapters": (("a", ""),)}, "adapters is"),
        ({"adapters": (("a", 1),)}, "adapters is"),
        ({"adapters": (("a b", "c"),)}, "name 'a b'; use 1 to 64"),
        ({"adapters": (("a\n", "c"),)}, "adapters has the name"),
        ({"adapters": (("x" * 65, "c"),)}, "use 1 to 64"),
        ({"adapters": (("a", "b"), ("c", "d"), ("a", "e"))}, "adapters has 'a' twice"),
        ({"adapters": (("a", "b"),), "adapter": "c"}, "adapter and adapters are set; unset one"),
        ({"neural": "d"}, "neural is 'd'; it must be an object, or unset"),
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
        ({"sampling": {"temp": 1}}, "sampling has unknown fields temp"),
        ({"sampling": {"top_k": 2.0}}, "top_k is 2.0; it must be an integer"),
        ({"sampling": {"top_p": "1"}}, "top_p is '1'; it must be a number"),
        ({"sampling": {"top_p": True}}, "top_p is True"),
        ({"choices": "ab"}, "choices is 'ab'"),
        ({"adapters": "ab"}, "adapters is 'ab'"),
        ({"adapters": ["ab"]}, "adapters is"),
        ({"adapters": [[["a"], "b"]]}, "adapters is"),
        ({"adapters": {"a": None}}, "adapters is"),
        ({"neural": {"depth": 3}}, "neural lacks drafter"),
        ({"neural": "d"}, "neural is 'd'; it must be a JSON object"),
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


def test_values_at_their_limits_are_taken() -> None:
    schema = '{"é":"' + "x" * (MOST_TEXT_BYTES - 9) + '"}'
    for form in (
        {"choices": tuple(map(str, range(MOST_CHOICES)))},
        {"choices": ("x" * MOST_CHOICE_CHARACTERS,)},
        {"schema": schema},
        {"regex": "x" * MOST_TEXT_BYTES},
    ):
        assert replace(RECORD, **form) != RECORD


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
