"""Tests valid task records and corpus rows, and that they survive JSON, without a server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_draft.settings import DraftSettings
from tasc_protocol import SamplingDefaults
from tasc_protocol.request import MOST_CHOICE_BYTES, MOST_CHOICES, MOST_GUIDE_BYTES
from tasc_store import (
    ArtifactCache,
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    NeuralDrafting,
    TaskRecord,
)
from tasc_store.corpus import MAX_BATCH
from tasc_text import ChatTemplate

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


def test_record_of_an_earlier_version_loads_unchanged() -> None:
    record = TaskRecord.from_json(BEFORE)
    assert record == RECORD
    assert (record.sampling, record.quantization) == (SamplingDefaults(), None)
    assert (record.choices, record.schema, record.regex) == ((), None, None)
    assert (record.adapters, record.neural, record.chat) == ((), None, None)
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
    stop=st.lists(TEXT),
    model=TEXT,
    prompt=TEXT.map(lambda text: text.replace("{", "(")),
    max_tokens=st.integers(1),
    draft=st.integers(2, 16).map(lambda n: DraftSettings(n_max=n)),
)
def test_task_record_survives_json(
    numbers: dict[str, float], form: dict[str, Any], stop: list[str], prompt: str, **fields: Any
) -> None:
    sampling, name = SamplingDefaults(**numbers), "a.b-c_1"
    record = replace(RECORD, name=name, template=prompt + "{input}", **form, **fields)
    record = replace(record, stop=tuple(stop), sampling=sampling)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    assert again.to_json() == record.to_json()
    assert sampling.given == numbers


def test_adapters_and_drafters_survive_json_and_may_be_written_by_hand() -> None:
    adapters = (("z", "/somewhere"), ("A.b-c_1", "org/adapter"), ("x" * 64, "b"))
    record = replace(RECORD, adapters=adapters)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    assert again.adapter_names == ("z", "A.b-c_1", "x" * 64)
    content = json.loads(record.to_json())
    assert content["adapters"] == [list(pair) for pair in adapters]
    assert TaskRecord.from_json(json.dumps({**content, "adapters": dict(adapters)})) == record
    neural = NeuralDrafting("/somewhere", "neural", "recent+ranked", 7, 3, 8, 24, 0.5)
    record = replace(RECORD, neural=neural)
    again = TaskRecord.from_json(record.to_json())
    assert again == record
    content = json.loads(record.to_json())
    short = TaskRecord.from_json(json.dumps({**content, "neural": {"drafter": "d"}}))
    assert short.neural == NeuralDrafting("d")
    assert TaskRecord.from_json(json.dumps({**content, "neural": None})) == RECORD
    chat = ChatTemplate("{{ messages }}", (("bos_token", "<s>"),), "be", (("a", "b"), ("c", "")))
    record = replace(RECORD, template="{input}", chat=chat)
    assert TaskRecord.from_json(record.to_json()) == record
    content = json.loads(record.to_json())
    short = TaskRecord.from_json(json.dumps({**content, "chat": {"source": "a"}}))
    assert short.chat == ChatTemplate("a")
    fields = {"name": "t", "model": "m", "fingerprint": "f", "template": "{input}"}
    record = TaskRecord.from_json(json.dumps(fields))
    assert record == TaskRecord("t", "m", "f", "{input}")
    assert record.corpus_name == "t"
    assert replace(record, corpus="other").corpus_name == "other"


WRONG: dict[str, list[Any]] = {  # each value is refused by the field's name
    "name": ["two words", "x" * 65, ".hidden", "br{ace}", "line\n"],
    "fingerprint": ["a:b"],
    "model": [""],
    "adapter": [""],
    "template": ["nothing", "{input}{input}"],
    "dtype": ["int8"],
    "stop": [("",), "ab"],
    "max_tokens": [0, True, "12"],
    "quantization": ["int4", ""],
    "choices": [
        "ab", ["a"], ("a", ""), ("a", 1), ("a", "b", "a"), ("\ud800",),
        tuple(map(str, range(MOST_CHOICES + 1))), ("é" * (MOST_CHOICE_BYTES // 2 + 1),),
    ],
    "schema": ["", "{", "[" * 60_000, "[1]", '{"é":"' + "x" * (MOST_GUIDE_BYTES - 8) + '"}'],
    "regex": ["", "x" * (MOST_GUIDE_BYTES + 1)],
    "adapters": [
        [("a", "b")], (("a", "b", "c"),), (("a", ""),), (("a", 1),), (("a b", "c"),),
        (("a\n", "c"),), (("x" * 65, "c"),), (("a", "b"), ("c", "d"), ("a", "e")),
    ],
    "neural": ["d"],
    "chat": ["d", ChatTemplate("a")],  # beside a format string
    "allow_special_tokens_in_input": [1, "yes"],
}  # fmt: skip
WRONG_DRAFTERS: dict[str, list[Any]] = {
    "drafter": [""],
    "proposer": ["both"],
    "vocabulary": [[]],
    "ranked_tokens": [0],
    "depth": [17],
    "width": [True],
    "nodes": [64],
    "sure": [1.5, float("nan")],
}
WRONG_JSON: dict[str, list[Any]] = {
    "modle": ["x"],
    "draft": [{"nmax": 3}, 3],
    "sampling": [{"temp": 1}],
    "n_max": [{"draft": {"n_max": 99}}],
    "top_k": [{"sampling": {"top_k": 2.0}}],
    "top_p": [{"sampling": {"top_p": "1"}}, {"sampling": {"top_p": True}}],
    "choices": ["ab"],
    "adapters": ["ab", ["ab"], [[["a"], "b"]], {"a": None}],
    "neural": [{"depth": 3}, "d"],
    "chat": ["d", {"system": "a"}],
    "few_shot": [{"chat": {"source": "a", "shots": [["a"]]}}],
    "chat_tokens": [{"chat": {"source": "a", "tokens": {"bos_token": 1}}}],
}


def each(table: dict[str, list[Any]]) -> list[Any]:
    pairs = [(field, value) for field, values in table.items() for value in values]
    return [pytest.param(*pair, id=f"{pair[0]}={pair[1]!r:.30}") for pair in pairs]


@pytest.mark.parametrize(("field", "value"), each(WRONG))
def test_invalid_value_is_named_in_the_error(field: str, value: Any) -> None:
    with refused(ValueError, field):
        replace(RECORD, **{field: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"corpus": "no/slash"}, ("no/slash",)),
        ({"choices": ("a",), "regex": "a"}, ("choices", "regex")),
        ({"schema": "{}", "regex": "a"}, ("schema", "regex")),
        ({"adapters": (("a", "b"),), "adapter": "c"}, ("adapter", "adapters")),
    ],
)
def test_contradicting_values_are_named_in_the_error(change: Any, named: Any) -> None:
    with refused(ValueError, *named):
        replace(RECORD, **change)


@pytest.mark.parametrize(("field", "value"), each(WRONG_DRAFTERS))
def test_invalid_drafter_setting_is_named_in_the_error(field: str, value: Any) -> None:
    with refused(ValueError, field):
        NeuralDrafting(**{"drafter": "d", field: value})


def test_error_of_a_too_large_draft_tree_names_its_settings() -> None:
    with refused(ValueError, "depth 16", "width 5"):
        NeuralDrafting("d", depth=16, width=5)


@pytest.mark.parametrize(("field", "value"), each(WRONG_JSON))
def test_unknown_field_in_json_is_named_in_the_error(field: str, value: Any) -> None:
    nested = isinstance(value, dict) and value.keys() <= {"draft", "sampling"}
    change = value if nested else {field: value}
    with refused(ValueError, field):
        TaskRecord.from_json(json.dumps({**json.loads(RECORD.to_json()), **change}))


@pytest.mark.parametrize(
    ("text", "named"), [('{"name": "t", "model": "m"}', "fingerprint, template"), ("[1]", "JSON")]
)
def test_invalid_json_is_refused(text: str, named: str) -> None:
    with refused(ValueError, named):
        TaskRecord.from_json(text)


def test_values_at_their_limits_are_accepted() -> None:
    schema = '{"é":"' + "x" * (MOST_GUIDE_BYTES - 9) + '"}'
    for form in (
        {"choices": tuple(map(str, range(MOST_CHOICES)))},
        {"choices": ("é" * (MOST_CHOICE_BYTES // 2),)},
        {"schema": schema},
        {"regex": "x" * MOST_GUIDE_BYTES},
    ):
        assert replace(RECORD, **form) != RECORD


def test_limits_of_rows_and_arguments_are_named_in_the_error() -> None:
    with refused(ValueError, "key"):
        CorpusRow("", "in", "out")
    with refused(ValueError, "'k'"):
        CorpusRow("k", "in", "\ud800")
    rows = [CorpusRow(str(i), "", "") for i in range(MAX_BATCH + 1)]
    with redis.Redis() as unconnected:
        corpus = CorpusStore(unconnected, "t")
        with refused(ValueError, str(MAX_BATCH)):
            corpus.append(rows)
        with refused(ValueError, "start", "stop"):
            corpus.read(2, 1)
        with refused(ValueError, "keep"):
            ArtifactStore(unconnected, "t", "f").prune(0)
    with refused(ValueError, "keep"):
        ArtifactCache(Path("unused"), keep=0)
