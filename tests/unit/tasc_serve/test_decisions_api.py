"""Tests ``/v1/decisions``: calls of replicas, answers in OpenAI's types, and refusals."""

import json
import math
from typing import get_type_hints

import pytest
from fake_backend import STATUS, TASK, FakeBackend, Service, answer, error_of
from msgspec import structs
from openai.types import Decision
from openai.types.decision_create_params import DecisionCreateParams

from tasc_protocol import LabelScores, Scoring
from tasc_runtime.protocol import Refusal
from tasc_serve.http.decisions_api import DecisionsRequest
from tasc_text import Message

DECISIONS = "/v1/decisions"
COLOURS = {
    "type": "choice",
    "name": "colour",
    "instructions": "Which colour?",
    "choices": [{"value": "red", "description": "like blood"}, {"value": "blue"}],
}
PAID = {"type": "choice", "instructions": "", "choices": [{"value": True}, {"value": False}]}
ANGRY = {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it angry?"}]}
URGENT = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent?",
    "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "today"}],
}
QUESTIONS = [COLOURS, PAID, ANGRY, URGENT]
# The likeliest first, as replicas send them.
SHARES = [{1: 0.75, 0: 0.25}, {0: 0.625, 1: 0.375}, {1: 0.875, 0: 0.125}, {2: 0.5, 0: 0.3, 1: 0.2}]
SYSTEMS = [
    "Which colour?\n\nAnswer with one of these options:\n- red: like blood\n- blue",
    None,
    "Is it angry?\n\nAnswer with one of these options:\n- yes\n- no",
    "How urgent?\n\nAnswer with one of these options:\n- low\n- middle\n- high: today",
]


def scored(shares, mass=0.5):
    """The outputs of a request whose labels have these shares."""
    logprobs = tuple(math.log(share * (mass or 1)) for share in shares.values())
    scores = LabelScores(
        labels=tuple(f"label {at}" for at in shares),
        numbers=tuple(shares),
        logprobs=logprobs,
        total=math.log(mass or 1),
        unseen=0.0,
        count=len(shares),
        mass=mass,
    )
    (output,) = answer("")
    return [structs.replace(output, result=structs.replace(output.result, scores=scores))]


def backend_of(mass=0.5):
    return FakeBackend(by_choice={at: scored(shares, mass) for at, shares in enumerate(SHARES)})


def asked(backend, limits=None, /, **more):
    body = {"model": TASK, "input": "hi", "questions": QUESTIONS, **more}
    return Service(backend, **(limits or {})).ask("POST", DECISIONS, content=json.dumps(body))


def test_each_question_is_a_request_with_its_own_prompt_and_labels():
    backend = backend_of()
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "it is "}] * 2},
        {"type": "message", "role": "assistant", "content": "so", "phase": "final_answer"},
        {"role": "user", "content": "no"},
    ]
    assert asked(backend, input=turns, adapter="a", timeout=3).status_code == 200
    expected = (Message("user", "it is it is "), Message("assistant", "so"), Message("user", "no"))
    labels = [("red", "blue"), ("true", "false"), ("yes", "no"), ("low", "middle", "high")]
    assert [call.guide.choices for call in backend.calls] == labels
    for at, (call, system) in enumerate(zip(backend.calls, SYSTEMS, strict=True)):
        first = () if system is None else (Message("system", system),)
        assert call.prompt.messages == (*first, *expected)
        assert call.prompt.strict
        assert call.guide.field == f"questions.{at}"
        assert call.scoring == Scoring(exact=True, abstain_below=0.0, mass=True)
        assert (call.templated, call.adapter, call.timeout_s, call.stream) == (True, "a", 3, False)
        assert (call.prompts, call.prompt_index, call.record_version) == (4, at, 1)


def test_answers_are_valid_in_openais_types_and_in_the_order_of_the_questions():
    found = asked(backend_of()).raise_for_status().json()
    assert (found["object"], found["model"]) == ("decision", TASK)
    decision = Decision.model_validate(found, strict=True)
    colour, paid, angry, urgent = decision.answers
    assert [one.type for one in decision.answers] == ["choice", "choice", "predicate", "score"]
    assert [one.name for one in decision.answers] == ["colour", None, None, "urgency"]
    assert (colour.choice, colour.confidence) == ("blue", pytest.approx(0.75 * 0.5))
    assert {each.value: each.probability for each in colour.probabilities} == pytest.approx(
        {"red": 0.25, "blue": 0.75}
    )
    assert paid.choice is True
    assert [each.value for each in paid.probabilities] == [True, False]
    assert angry.probability == pytest.approx(0.125)
    assert urgent.score == pytest.approx(0 * 0.3 + 1 * 0.2 + 2 * 0.5)
    assert urgent.confidence == pytest.approx(0.5 * 0.5)
    listed = [(each.value, each.label) for each in urgent.probabilities]
    assert listed == [(0, "low"), (1, "middle"), (2, "high")]
    shares = [each.probability for each in urgent.probabilities]
    assert shares == pytest.approx([0.3, 0.2, 0.5])
    usage = decision.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 0, 20)
    assert (usage.input_tokens_details.cached_tokens, found["answers"][1]["name"]) == (0, None)


def test_replica_that_cannot_give_the_mass_is_named_as_the_cause():
    assert "too old" in error_of(asked(backend_of(mass=None)), 503)["message"]


def test_every_field_of_the_openai_client_is_used_or_harmless():
    assert {*get_type_hints(DecisionCreateParams)} - {*DecisionsRequest.model_fields} == set()
    extra = {"safety_identifier": "u", "prompt_cache_key": "k", "prompt_cache_options": {}}
    assert asked(backend_of(), **extra).status_code == 200


def with_option(question, field, *options):
    return {"questions": [question | {field: list(options)}]}


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [ANGRY] * 401}, "questions", "at most 400"),
        ({"input": 3}, "input", "valid array"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [3]}, "input.0", "an object"),
        ({"input": [{"role": "system", "content": "x"}]}, "input.0.role", "'user' or 'assistant'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "not supported here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content", "input_image is not supported"),
        ({"stream": True}, "stream", "False"),
        ({"labels": ["a"]}, "labels", "unknown field"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"questions": [ANGRY | {"type": "noul"}]}, "questions.0.type", "'choice', 'predicate'"),
        ({"questions": [ANGRY, {"type": "predicate"}]}, "questions.1.instructions", "required"),
        ({"questions": [ANGRY | {"levels": URGENT["levels"]}]}, "questions.0", "levels with score"),
        ({"questions": [URGENT | {"type": "choice"}]}, "questions.0", "choices go with type"),
        ({"questions": [COLOURS | {"choices": None}]}, "questions.0", "choices go with type"),
        (with_option(COLOURS, "choices", {"value": "a"}), "questions.0.choices", "at least 2"),
        (with_option(COLOURS, "choices", *({"value": str(i)} for i in range(256))),
         "questions.0.choices", "at most 255"),
        (with_option(URGENT, "levels", *({"label": str(i)} for i in range(11))),
         "questions.0.levels", "at most 10"),
        (with_option(COLOURS, "choices", {"value": "a"}, {"value": 1}),
         "questions.0.choices.1.value", "string, true or false"),
        (with_option(COLOURS, "choices", {"value": "a"}, {"value": "a"}), "questions.0", "equal"),
        (with_option(PAID, "choices", {"value": "true"}, {"value": True}), "questions.0", "'true'"),
        (with_option(PAID, "choices", {"value": "a"}, {"value": "b", "description": "c"}),
         "questions.0", "descriptions need instructions"),
        (with_option(PAID, "choices", {"value": "a" * 2_000_000}, {"value": "b"}),
         "questions.0", "at most 2000000"),
    ],
)  # fmt: skip
def test_wrong_body_is_refused_by_field(more, param, says):
    backend = backend_of()
    error = error_of(asked(backend, **more), 400)
    assert (error["param"], backend.calls) == (param, [])
    assert says in error["message"], error


@pytest.mark.parametrize(
    ("limits", "more", "param", "says"),
    [
        ({"max_prompts": 3}, {}, "questions", "at most 3 are taken (limits.max_prompts)"),
        ({"max_prompt_bytes": 8}, {"input": "longer than 8"}, "input",
         "the prompt of question 0 has"),
        ({"max_prompt_bytes": 100, "max_choices": 1}, {"input": "123456789"}, "questions",
         "at most 100 are taken (limits.max_prompt_bytes)"),
    ],
)  # fmt: skip
def test_limits_of_the_service_are_named(limits, more, param, says):
    backend = backend_of()
    error = error_of(asked(backend, limits, **more), 400)
    assert (error["param"], backend.calls) == (param, [])
    assert says in error["message"], error


@pytest.mark.parametrize(
    ("param", "message", "found", "says"),
    [
        ("messages.0", "the format string takes the last user message only, not messages.0 "
         "(system); remove these messages", "questions",
         "questions: the task has no chat template; send one user message, no instructions"),
        ("messages.0", "the format string takes the last user message only, not messages.0 "
         "(user); remove these messages", "input",
         "input: the task has no chat template; send one user message, no instructions"),
        ("messages", "messages has no message with the role user", "input",
         "input has no message with the role user"),
        ("input.2", "input.2 has 99 tokens; a row holds 9: shorten it, or have it cut by "
         "truncate_prompt_tokens", "input",
         "the prompt of question 2 has 99 tokens; a row holds 9: shorten it"),
        ("questions.3", "questions.3: labels 0 ('a') and 1 ('b') have the same tokens",
         "questions.3", "questions.3: labels 0 ('a') and 1 ('b') have the same tokens"),
    ],
)  # fmt: skip
def test_refusals_of_replicas_are_in_the_fields_of_this_endpoint(param, message, found, says):
    backend = FakeBackend(Refusal("invalid", message, param), status=STATUS)
    error = error_of(asked(backend), 400)
    assert (error["param"], error["message"]) == (found, says)
