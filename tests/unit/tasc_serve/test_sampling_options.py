"""Tests that each field of a request reaches the replica and overrides the task's setting."""

import json

import pytest
from fake_backend import COMPLETIONS, GOOD, FakeBackend, Service, answer
from msgspec import structs

from support import refused
from tasc_engine import Sampling
from tasc_protocol import PARAMETERS, FieldError, GuideSpec, Request, SamplingDefaults
from tasc_runtime.engine.reader import adapter_of, parameters_of
from tasc_runtime.sampling_options import guide_of
from tasc_store import TaskRecord

SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"type": "null"}}}
OBJECT_SCHEMA = {"name": "it", "schema": SCHEMA, "strict": True, "description": "a thing"}
either_endpoint = pytest.mark.parametrize("path", GOOD)


def asked(path: str, n: int = 1, **fields: object) -> list[Request]:
    backend = FakeBackend(*answer("yes"))
    response = Service(backend).ask("POST", path, json=GOOD[path] | {"n": n} | fields)
    assert response.status_code == 200, response.text
    return list(backend.calls)


@either_endpoint
@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {}),
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": None, "top_p": 1e-9}, {"top_p": 1e-9}),
        ({"top_k": 5, "min_p": 0.5}, {"top_k": 5, "min_p": 0.5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, None),
        ({"logit_bias": {"0": -100, "17": 2.5}}, {"logit_bias": ((0, -100.0), (17, 2.5))}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [3, 5]}, {"stop_token_ids": (3, 5)}),
        ({"include_stop_str_in_output": True, "min_tokens": 2}, None),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ({"add_special_tokens": False}, {"add_special_tokens": False}),
        ({"adapter": "fr"}, {"adapter": "fr"}),
        ({"adapter": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"guided_choice": None, "stop": None}, {"unguided": True}),
        ({"structured_outputs": None, "guided_json": None}, {"unguided": True}),
    ],
    ids=str,
)
def test_request_field_reaches_the_replica_and_other_fields_stay_unset(path, fields, found):
    (one,) = asked(path, seed=3, **fields)
    expected = dict(fields if found is None else found)
    parameters = {name: expected.pop(name) for name in PARAMETERS if name in expected}
    (plain,) = asked(path, seed=3)
    assert one == structs.replace(plain, id=one.id, parameters=parameters, **expected)


@either_endpoint
@pytest.mark.parametrize(
    ("field", "value", "spec"),
    [
        ("choice", ["yes", "no"], GuideSpec("choice", choices=("yes", "no"))),
        ("regex", "[0-9]+", GuideSpec("regex", text="[0-9]+")),
        ("grammar", 'start: "a"', GuideSpec("grammar", text='start: "a"')),
    ],
)
def test_guide_has_the_name_of_its_request_field(path, field, value, spec):
    (one,) = asked(path, **{f"guided_{field}": value})
    assert (one.guide, one.guide.field) == (spec, f"guided_{field}")
    (one,) = asked(path, structured_outputs={field: value})
    assert (one.guide, one.guide.field) == (spec, f"structured_outputs.{field}")


@either_endpoint
def test_guide_is_used_if_the_other_guide_field_is_null(path):
    (one,) = asked(path, guided_choice=None, guided_regex="x", response_format={"type": "text"})
    assert (one.guide.field, one.unguided) == ("guided_regex", False)


@either_endpoint
@pytest.mark.parametrize(
    ("field", "value", "schema"),
    [
        ("guided_json", SCHEMA, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": OBJECT_SCHEMA}, SCHEMA),
        ("response_format", {"type": "json_object"}, {"type": "object"}),
        ("structured_outputs.json", {"json": SCHEMA}, SCHEMA),
        ("structured_outputs.json_object", {"json_object": True}, {"type": "object"}),
        ("guided_json", json.dumps(SCHEMA), SCHEMA),
        ("structured_outputs.json", {"json": json.dumps(SCHEMA, indent=1)}, SCHEMA),
    ],
)
def test_schema_keeps_the_order_of_its_properties(path, field, value, schema):
    (one,) = asked(path, **{field.partition(".")[0]: value})
    assert (one.guide.field, one.guide.kind) == (field, "json_schema")
    found = json.loads(one.guide.text)
    assert found == schema
    assert json.dumps(found) == json.dumps(schema)


LENIENT = {"type": "json_schema", "json_schema": OBJECT_SCHEMA | {"strict": False}}
SPACED = {"json": SCHEMA, "whitespace_pattern": "[ \n]{0,3}"}
OBJECT = {"json_object": True, "disable_any_whitespace": True}
OWN = SCHEMA | {"x-guidance": {"lenient": True}}
COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}


@either_endpoint
@pytest.mark.parametrize(
    ("guide", "pattern", "options"),
    [
        ({"guided_json": SCHEMA}, " ?", {"whitespace_pattern": " ?"}),
        ({"structured_outputs": SPACED}, None, {"whitespace_pattern": "[ \n]{0,3}"}),
        ({"structured_outputs": OBJECT}, None, COMPACT),
        ({"response_format": {"type": "json_object"}}, "", COMPACT),
        ({"response_format": LENIENT}, None, {"lenient": True}),
        ({"guided_json": OWN}, " ?", {"lenient": True, "whitespace_pattern": " ?"}),
    ],
    ids=str,
)
def test_schema_options_are_part_of_the_schema(path, guide, pattern, options):
    (one,) = asked(path, **guide, guided_whitespace_pattern=pattern)
    assert json.loads(one.guide.text)["x-guidance"] == options


def test_logprobs_are_a_number_for_completions_and_two_fields_for_chats():
    def logprobs_of(path, **fields):
        (one,) = asked(path, **fields)
        return one.logprobs

    completions, chats = GOOD
    assert [logprobs_of(completions, logprobs=n) for n in (None, 0, 20)] == [None, 0, 20]
    assert (
        logprobs_of(chats, logprobs=True) == logprobs_of(chats, logprobs=True, top_logprobs=0) == 0
    )
    assert logprobs_of(chats, logprobs=True, top_logprobs=20) == 20
    assert logprobs_of(chats) is logprobs_of(chats, logprobs=False) is None


@either_endpoint
def test_request_without_a_seed_draws_one_seed_for_all_choices(path):
    seeds = [{one.seed for one in asked(path, n=2)} for _ in range(3)]
    assert [len(s) for s in seeds] == [1, 1, 1]
    assert len(set.union(*seeds)) == 3


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_signed_seeds_map_to_distinct_unsigned_seeds(seed):
    (one,) = asked("/v1/completions", seed=seed)
    assert Sampling(seed=one.seed).seed == seed % 2**64


def record(**fields: object) -> TaskRecord:
    return TaskRecord("greet", "model", "f" * 32, "{input}", **fields)


def test_request_parameters_override_task_parameters():
    task = SamplingDefaults(temperature=0.7, top_p=0.9, presence_penalty=1.0)
    found = parameters_of({"temperature": 0.0, "top_k": 3}, task)
    assert found == {"temperature": 0.0, "top_p": 0.9, "presence_penalty": 1.0, "top_k": 3}
    assert parameters_of({}, SamplingDefaults()) == {}


def test_top_p_of_0_is_accepted_only_for_greedy_answers():
    (none,) = asked(COMPLETIONS, top_p=0, seed=0)
    (greedy,) = asked(COMPLETIONS, top_p=0, temperature=0, seed=0)
    warm = SamplingDefaults(temperature=0.7, top_p=0.9)
    assert parameters_of(none.parameters, SamplingDefaults(top_p=0.9)) == {}
    assert parameters_of(greedy.parameters, warm) == {"temperature": 0}
    with refused(FieldError, "top_p", "0.7") as caught:
        parameters_of(none.parameters, warm)
    assert caught.value.field == "top_p"


def test_request_guide_replaces_the_task_guide():
    own = {
        "choices": (("a", "b"), GuideSpec("choice", choices=("a", "b"))),
        "schema": ("{}", GuideSpec("json_schema", text="{}")),
        "regex": ("x+", GuideSpec("regex", text="x+")),
    }
    sent = GuideSpec("regex", text="y", field="guided_regex")
    for field, (value, spec) in own.items():
        task = record(**{field: value})
        found = Request().guided_by(guide_of(task))
        assert (found, found.field) == (spec, "model")
        assert Request(guide=sent).guided_by(guide_of(task)) == sent
        assert Request(unguided=True).guided_by(guide_of(task)) is None
    assert Request().guided_by(guide_of(record())) is None


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_fields_that_contradict_a_guide_are_refused_and_named(field):
    asked = Request(**{field: 1})
    assert asked.guided_by(guide_of(record())) is None
    with refused(FieldError, "the task's regex", field=field):
        asked.guided_by(guide_of(record(regex="x")))


def test_request_adapter_overrides_the_first_adapter_of_the_task():
    task = record(adapters=(("fr", "org/fr"), ("de", "org/de")))
    assert [adapter_of(name, task) for name in (None, "fr", "de")] == [
        "fr", "fr", "de",
    ]  # fmt: skip
    assert adapter_of(None, record()) is adapter_of(None, record(adapter="org/fr")) is None


@pytest.mark.parametrize(
    ("fields", "known"),
    [({"adapters": (("fr", "x"), ("de", "y"))}, "fr, de"), ({}, ""), ({"adapter": "it"}, "")],
)
def test_error_of_an_unknown_adapter_lists_the_known_adapters(fields, known):
    with refused(FieldError, "'it'", "greet", known, field="adapter"):
        adapter_of("it", record(**fields))
