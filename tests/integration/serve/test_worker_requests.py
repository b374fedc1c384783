"""Tests that a task's settings apply if a request has none. Needs only Redis."""

import uuid
from dataclasses import replace

import pytest
from msgspec import structs

import tiny
from support import refused
from tasc_protocol import FieldError, GuideSpec, Request, SamplingDefaults
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_store import TaskStore, connect

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(rows=4, max_model_len=128, device="cpu", cost_aware=False)
CHOICES = ("wake up", "play music")
UNCLOSED = GuideSpec("regex", text="((", field="guided_regex")


@pytest.fixture(scope="module")
def worker(redis_url, made, tmp_path_factory):
    """A worker of a task with labels and its own sampling rule."""
    own = {"choices": CHOICES, "sampling": SamplingDefaults(temperature=0.5), "max_tokens": 100}
    record = replace(made.record, name=f"asked-{uuid.uuid4().hex}", corpus=None, **own)
    with connect(redis_url) as client:
        TaskStore(client).put(record)
        cache = tmp_path_factory.mktemp("cache")
        yield EngineBuilder.of_task(client, record.name, ENGINE, cache_dir=cache)


def call(value=tiny.SENTENCES[0], number=1, **asked):
    return Request(str(number), value, templated=True, **asked)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (call(logit_bias=((10**6, 1.0),)), "logit_bias"),
        (call(guide=UNCLOSED), "guided_regex"),
        (call(guide=GuideSpec("json_schema", text="{", field="guided_json")), "guided_json"),
        (call(ignore_eos=True), "ignore_eos"),
        (call(stop_token_ids=(10**6,)), "stop_token_ids"),
        (call(stop_token_ids=(5,)), "stop_token_ids"),  # it would end a label early
        (call(min_tokens=1), "min_tokens"),
        (structs.replace(call(), stop=("x", "music")), "stop"),  # a label contains it
        (call((1,) * 128, guide=UNCLOSED), "messages.0.content"),  # before the guide is asked
        (call(adapter="gone"), "adapter"),
    ],
)
def test_unsupported_request_is_refused_and_named(worker, asked, field):
    with refused(FieldError, field, field=field):
        worker.reader.request(asked)


def test_echo_without_new_tokens_needs_no_room_for_the_labels(worker):
    request = worker.reader.request(structs.replace(call(echo=True, logprobs=0), max_tokens=0))
    assert (request.guide, request.max_tokens) == (None, 1)
    (result,) = worker.engine.generate([request])
    assert len(result.logprobs) == len(request.prompt)


@pytest.mark.parametrize(("most", "kept"), [(None, 64), (0, 127), (1, 127), (90, 38)])
def test_truncated_prompt_leaves_room_for_its_answer(worker, most, kept):
    ids, asked = tuple(i % 99 for i in range(150)), call(truncate_prompt_tokens=-1)
    cut = structs.replace(asked, prompt=ids, max_tokens=most)
    request = worker.reader.read(cut, "1", worker.record_version)
    assert request.prompt == ids[-kept:]


def test_stop_string_outside_the_labels_is_accepted(worker):
    assert worker.reader.request(structs.replace(call(), stop=("musical",))).stop[-1] == "musical"
