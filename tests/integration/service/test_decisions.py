"""Decisions over HTTP: their shares are those of `LLM.classify`, their mass that of the model.

The mass is the sum of the probabilities that transformers computes for each label alone.
"""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError
from peft import PeftModel
from ray import serve
from serving import ADAPTERS, ALPHA, BETA, MODEL_LEN, TEXT, Service
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from chat_families import make_chat_tokenizer
from tasc_jobs.demo import tasks as demo
from tasc_runtime.llm import LLM
from tasc_runtime.models import chat_template
from tasc_serve.app import build, newest_digests
from tasc_serve.settings import ServedTask
from tasc_store import TaskRecord, TaskStore, connect
from tasc_text import TaskTokenizer

pytestmark = [pytest.mark.ray, pytest.mark.redis]

SIZES = {"max_model_len": MODEL_LEN, "device": "cpu", "cost_aware": False}
CHAT, SHIPPED = f"chat-{uuid.uuid4().hex}", f"shipped-{uuid.uuid4().hex}"
CLOSE = 1e-4
COLOURS = {
    "type": "choice",
    "name": "what",
    "instructions": "What does the user want?",
    "choices": [
        {"value": "set an alarm", "description": "to wake up"},
        {"value": "set a timer"},
    ],
}
KNOWN = {
    "type": "choice",
    "instructions": "Is the artist known?",
    "choices": [{"value": False}, {"value": True}],
}
ANGRY = {"type": "predicate", "name": "angry", "instructions": "Is the user angry?"}
URGENT = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How urgent is it?"}],
    "levels": [{"label": "not"}, {"label": "somewhat"}, {"label": "very", "description": "now"}],
}
SYSTEMS = [
    "What does the user want?\n\nAnswer with one of these options:\n"
    "- set an alarm: to wake up\n- set a timer",
    "Is the artist known?\n\nAnswer with one of these options:\n- false\n- true",
    "Is the user angry?\n\nAnswer with one of these options:\n- yes\n- no",
    "How urgent is it?\n\nAnswer with one of these options:\n- not\n- somewhat\n- very: now",
]
LABELS = [
    ["set an alarm", "set a timer"],  # their common beginning counts for the mass
    ["false", "true"],
    ["yes", "no"],
    ["not", "somewhat", "very"],
]
TALK = [
    {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
    {"role": "assistant", "content": "for nine?"},
    {"role": "user", "content": tiny.SENTENCES[1]},
]
TURNS = [{**TALK[0], "content": TEXT}, *TALK[1:]]


class Alone:
    """A model of transformers, which scores each label alone."""

    def __init__(self, folder, adapter=None):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter).eval()
        self.eos = TaskTokenizer.from_folder(folder).eos_ids

    @torch.inference_mode()
    def mass(self, prompt, labels, end=None):
        """Returns the probability that the answer is one of the labels, and then ends."""
        total = 0.0
        for label in labels:
            own = self.tokenizer.encode(label + (end or ""), add_special_tokens=False)
            for answer in [own] if end else [[*own, id_] for id_ in self.eos]:
                logits = self.model(torch.tensor([[*prompt, *answer]])).logits
                logps = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                total += float(logps[range(len(answer)), answer].sum().exp())
        return total

    def prompt(self, *turns):
        found = self.tokenizer.apply_chat_template([*turns], add_generation_prompt=True)
        return found["input_ids"]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = make_chat_tokenizer(tmp_path_factory.mktemp("decisions") / "model", "qwen")
    tiny.make_model(folder, seed=5, sharpness=0.1)  # so that its answers are uncertain
    return folder


@pytest.fixture(scope="module")
def deciding(service: Service, chat_folder) -> Iterator[Service]:
    """The shipped model and one with a chat template, in a separate application."""
    chat = TaskRecord(
        name=CHAT,
        model=str(chat_folder),
        fingerprint=TaskTokenizer.from_folder(chat_folder).fingerprint,
        template="{input}",
        dtype="float64",
        max_tokens=16,
        chat=chat_template(chat_folder),
        abstain_below=1.0,  # it always abstains, which changes no decision
    )
    shipped = replace(demo.demo_record("massive_en"), name=SHIPPED, label_end=",", dtype="float32")
    with connect(service.redis_url) as client:
        for record in (chat, shipped):
            TaskStore(client).put(record)
    tasks = [ServedTask.model_validate({"name": n, "num_cpus": 0.1}) for n in (CHAT, SHIPPED)]
    limits = service.settings.limits.model_copy(update={"max_compiling_guides": 1})
    settings = service.settings.model_copy(update={"tasks": tuple(tasks), "limits": limits})
    application = build(settings, service.redis_url, newest_digests(settings, service.redis_url))
    serve.run(application, name="decisions", route_prefix="/decisions")
    try:
        yield replace(service, base=f"{service.base}/decisions", settings=settings)
    finally:
        serve.delete("decisions")


def ask(service, task, *questions, input=TEXT, **more):
    with service.client() as client:
        return client.decisions.create(model=task, input=input, questions=questions, **more)


def shares_of(answer):
    """Returns the probabilities in an answer, in the order of its options."""
    if answer.type == "predicate":
        return [answer.probability, 1 - answer.probability]
    return [each.probability for each in answer.probabilities]


def refusal(service, task, *questions, **more):
    with pytest.raises(BadRequestError) as caught:
        ask(service, task, *questions, **more)
    return caught.value.body


@pytest.mark.parametrize("input", [TEXT, TALK])
def test_decisions_of_a_chat_model_are_those_of_the_model_alone(deciding, chat_folder, input):
    alone, llm = Alone(chat_folder), LLM.from_task(CHAT, deciding.redis_url, **SIZES)
    found = ask(deciding, CHAT, COLOURS, KNOWN, ANGRY, URGENT, input=input)
    turns = TURNS if isinstance(input, list) else [{"role": "user", "content": input}]
    prompts = [alone.prompt({"role": "system", "content": s}, *turns) for s in SYSTEMS]
    assert found.usage.input_tokens == sum(map(len, prompts))
    assert (found.usage.output_tokens, found.model) == (0, CHAT)
    for answer, prompt, labels in zip(found.answers, prompts, LABELS, strict=True):
        (own,) = llm.classify([prompt], labels, exact=True)
        shares = [own.probabilities[label] for label in labels]
        assert shares_of(answer) == pytest.approx(shares, rel=CLOSE, abs=1e-9)
        assert max(shares) < 1
        if answer.type != "predicate":
            mass = alone.mass(prompt, labels)
            assert answer.confidence == pytest.approx(max(shares) * mass, rel=CLOSE)
    what, known, _, urgent = found.answers
    assert what.choice == LABELS[0][int(np.argmax(shares_of(what)))]
    assert known.choice is bool(np.argmax(shares_of(known)))
    assert [each.value for each in known.probabilities] == [False, True]
    assert urgent.score == pytest.approx(np.dot([0, 1, 2], shares_of(urgent)))
    assert [one.name for one in found.answers] == ["what", None, "angry", None]


def test_decision_of_the_shipped_model_has_the_mass_of_labels_with_their_end(deciding):
    labels = sorted({row["output"].split(",")[0] for row in demo.read_split("massive_en", "test")})
    labels, texts = labels[:20], ["wake me up at nine am on friday", "set an alarm"]
    alone = Alone(demo.MODEL, demo.ADAPTERS / "massive_en")
    llm = LLM.from_task(SHIPPED, deciding.redis_url, **SIZES)
    asked = {"type": "choice", "instructions": "", "choices": [{"value": each} for each in labels]}
    for text, own in zip(texts, llm.classify(texts, labels, exact=True), strict=True):
        (answer,) = ask(deciding, SHIPPED, asked, input=text).answers
        listed = {each.value: each.probability for each in answer.probabilities}
        assert [*listed] == labels
        assert listed == pytest.approx(dict(own.probabilities), abs=1e-6)
        assert answer.choice == own.label
        prompt = alone.tokenizer.encode(demo.TEMPLATES["massive_en"].format(input=text))
        mass = alone.mass(prompt, labels, ",")
        assert 0.5 < mass <= 1
        assert answer.confidence == pytest.approx(own.probability * mass, rel=1e-3)


def test_many_questions_with_other_labels_each_are_all_answered(deciding):
    many = [
        {**URGENT, "levels": [{"label": f"{at} {word}"} for word in ("low", "high")]}
        for at in range(13)
    ]
    answers = ask(deciding, CHAT, *many).answers
    assert [[each.label for each in one.probabilities] for one in answers] == [
        [level["label"] for level in question["levels"]] for question in many
    ]


def test_an_adapter_decides(service):
    asked = {**COLOURS, "instructions": ""}
    asked["choices"] = [{"value": each["value"]} for each in COLOURS["choices"]]
    llm, found = LLM.from_task(BETA, service.redis_url, **SIZES), []
    for adapter in ADAPTERS:
        (answer,) = ask(service, BETA, asked, extra_body={"adapter": adapter}).answers
        (own,) = llm.classify(TEXT, LABELS[0], exact=True, adapter=adapter)
        expected = [own.probabilities[label] for label in LABELS[0]]
        assert shares_of(answer) == pytest.approx(expected, abs=1e-6)
        found.append(shares_of(answer))
    assert found[0] != pytest.approx(found[1], abs=1e-6)


PLAIN = {"type": "predicate", "instructions": ""}


@pytest.mark.parametrize(
    ("questions", "more", "param", "says"),
    [
        ([PLAIN, ANGRY], {}, "questions", "the task has no chat template"),
        ([PLAIN], {"input": TALK}, "input", "the task has no chat template"),
        ([PLAIN], {"input": TALK[1:2]}, "input", "no message with the role user"),
        ([PLAIN], {"extra_body": {"adapter": "none"}}, "adapter", "none"),
        ([PLAIN, PLAIN], {"input": TEXT * 90}, "input", "the prompt of question"),
        ([{**URGENT, "instructions": ""}], {}, "questions.0", "descriptions need instructions"),
        ([PLAIN] * 257, {}, "questions", "limits.max_prompts"),
    ],
)
def test_wrong_questions_to_a_task_with_a_format_string_are_refused_by_field(
    service, questions, more, param, says
):
    error = refusal(service, ALPHA, *questions, **more)
    assert (error["param"], says in error["message"]) == (param, True), error
    assert "truncate_prompt_tokens" not in error["message"]


def test_batches_take_no_decisions(service):
    body = {"input_file_id": "f", "endpoint": "/v1/decisions", "completion_window": "24h"}
    answer = httpx.post(f"{service.base}/v1/batches", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "endpoint")
