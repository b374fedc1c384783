"""Tests that a task's settings apply if a request has none. Needs only Redis."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import tiny
from lora_folders import make_adapter
from support import refused
from tasc_engine import Sampling
from tasc_protocol import FieldError, GuideSpec, Request, SamplingDefaults
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_store import TaskStore, connect

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(rows=4, max_model_len=128, device="cpu", cost_aware=False)
DEFAULTS = SamplingDefaults(temperature=0.5, top_p=0.9)
CHOICES = ("wake up", "play music")
FIRST, SECOND = NAMES = ("z-first", "a.second")  # the first in order, not by name
UNCLOSED = GuideSpec("regex", text="((", field="guided_regex")


@pytest.fixture(scope="module")
def worker_of(redis_url, made, tmp_path_factory):
    """Returns a function that starts a worker of the tiny model's task with more fields."""
    with connect(redis_url) as client:

        def start(**fields):
            record = replace(made.record, name=f"asked-{uuid.uuid4().hex}", corpus=None, **fields)
            TaskStore(client).put(record)
            cache = tmp_path_factory.mktemp("cache")
            return EngineBuilder.of_task(client, record.name, ENGINE, cache_dir=cache)

        yield start


@pytest.fixture(scope="module")
def worker(worker_of):
    return worker_of(choices=CHOICES, sampling=DEFAULTS, max_tokens=100)


@pytest.fixture(scope="module")
def adapters(made, tmp_path_factory):
    folders = tmp_path_factory.mktemp("adapters")
    model = Path(made.record.model)
    return {name: make_adapter(model, folders / name, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def adapted(worker_of, adapters):
    return worker_of(adapters=tuple((name, str(place)) for name, place in adapters.items()))


def call(value=tiny.SENTENCES[0], number=1, **asked):
    return Request(str(number), value, templated=True, **asked)


def test_the_tasks_rule_and_choices_are_the_answers(worker):
    request = worker.reader.request(call(seed=3, stop_token_ids=worker.tokenizer.eos_ids))
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, seed=3)
    assert request.guide == GuideSpec("choice", choices=CHOICES)
    (result,) = worker.engine.generate([request])
    assert (result.text in CHOICES, result.finish_reason) == (True, "stop")


def test_a_requests_own_come_before_them(worker):
    guide = GuideSpec("regex", text="[0-9]{4}", field="guided_regex")
    request = worker.reader.request(
        call(parameters={"temperature": 0.0}, logit_bias=((5, 1.0),), choice_index=2, guide=guide)
    )
    assert request.sampling == Sampling(top_p=0.9, logit_bias=((5, 1.0),), choice=2)
    (result,) = worker.engine.generate([request])
    assert (len(result.text), result.text.isdigit()) == (4, True)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (call(logit_bias=((10**6, 1.0),)), "logit_bias"),
        (call(guide=UNCLOSED), "guided_regex"),
        (call(guide=GuideSpec("json_schema", text="{", field="guided_json")), "guided_json"),
        (call(ignore_eos=True), "ignore_eos"),
        (call(stop_token_ids=(10**6,)), "stop_token_ids"),
        (call(stop_token_ids=(5,)), "stop_token_ids"),  # would cut a choice
        (call(min_tokens=1), "min_tokens"),
        (structs.replace(call(), stop=("x", "music")), "stop"),  # inside a choice
        (call((1,) * 128, guide=UNCLOSED), "messages.0.content"),  # before the guide is asked
        (call(adapter="gone"), "adapter"),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(worker, adapted, asked, field):
    with refused(FieldError, field, field=field):
        (adapted if field == "adapter" else worker).reader.request(asked)


def test_an_answer_that_is_too_short_for_its_choice_is_cut(worker):
    (result,) = worker.engine.generate(
        [worker.reader.request(structs.replace(call(), max_tokens=1))]
    )
    assert (len(result.tokens), result.finish_reason) == (1, "length")
    assert any(choice.startswith(result.text) for choice in CHOICES)


def test_a_prompt_alone_needs_no_room_for_the_tasks_choices(worker):
    request = worker.reader.request(structs.replace(call(echo=True, logprobs=0), max_tokens=0))
    assert (request.guide, request.max_tokens) == (None, 1)
    (result,) = worker.engine.generate([request])
    assert len(result.logprobs) == len(request.prompt)


@pytest.mark.parametrize(("most", "kept"), [(None, 64), (0, 127), (1, 127), (90, 38)])
def test_a_truncated_prompt_leaves_as_much_room_as_its_answer_needs(worker, most, kept):
    ids, asked = tuple(i % 99 for i in range(150)), call(truncate_prompt_tokens=-1)
    cut = structs.replace(asked, prompt=ids, max_tokens=most)
    request = worker.reader.read(cut, "1", worker.record_version)
    assert request.prompt == ids[-kept:]


def test_a_stop_that_no_choice_holds_is_taken(worker):
    assert worker.reader.request(structs.replace(call(), stop=("musical",))).stop[-1] == "musical"
