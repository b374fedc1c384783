"""What a task says of its answers holds where a request does not say; it needs Redis only."""

import uuid
from dataclasses import replace

import pytest
from serving import make_task

import tiny
from tasc_engine import GuideSpec, Sampling
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.protocol import Call
from tasc_runtime.sampling_options import AnswerGuide, FieldError, SamplingOptions
from tasc_store import SamplingDefaults, TaskStore, connect

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(rows=2, max_model_len=128, device="cpu", cost_aware=False)
DEFAULTS = SamplingDefaults(temperature=0.5, top_p=0.9)
CHOICES = ("wake up", "play music")


@pytest.fixture(scope="module")
def worker(redis_url, tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("model"), "alpha")
    record = replace(
        made.record,
        name=f"asked-{uuid.uuid4().hex}",
        corpus=None,
        choices=CHOICES,
        sampling=DEFAULTS,
        max_tokens=20,
    )
    with connect(redis_url) as client:
        TaskStore(client).put(record)
        yield EngineBuilder.of_task(
            client, record.name, ENGINE, cache_dir=tmp_path_factory.mktemp("cache")
        )


def call(**asked):
    return Call("1", tiny.SENTENCES[0], templated=True, options=SamplingOptions(**asked))


def test_the_tasks_rule_and_choices_are_the_answers(worker):
    request = worker.request(call(seed=3))
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, seed=3)
    assert request.guide == GuideSpec("choice", choices=CHOICES)
    (result,) = worker.engine.generate([request])
    assert (result.text in CHOICES, result.finish_reason) == (True, "stop")


def test_a_requests_own_come_before_them(worker):
    guide = AnswerGuide(GuideSpec("regex", text="[0-9]{4}"), "guided_regex")
    request = worker.request(call(temperature=0.0, logit_bias=((5, 1.0),), choice=2, guide=guide))
    assert request.sampling == Sampling(top_p=0.9, logit_bias=((5, 1.0),), choice=2)
    (result,) = worker.engine.generate([request])
    assert (len(result.text), result.text.isdigit()) == (4, True)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
        ({"guide": AnswerGuide(GuideSpec("regex", text="(("), "guided_regex")}, "guided_regex"),
        ({"guide": AnswerGuide(GuideSpec("json_schema", text="{"), "guided_json")}, "guided_json"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids"),
        ({"min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(worker, asked, field):
    with pytest.raises(FieldError, match=field) as refused:
        worker.request(call(**asked))
    assert refused.value.field == field


def test_an_answer_too_short_for_the_tasks_choices_names_max_tokens(worker):
    with pytest.raises(FieldError) as refused:
        worker.request(replace(call(), max_tokens=1))
    assert refused.value.field == "max_tokens"


def test_a_stop_inside_a_choice_is_refused_by_name(worker):
    with pytest.raises(FieldError) as refused:
        worker.request(replace(call(), stop=("x", "music")))
    assert refused.value.field == "stop"
    assert worker.request(replace(call(), stop=("musical",))).stop[-1] == "musical"


def test_a_prompt_that_fills_a_row_is_refused_before_its_guide_is_asked(worker):
    guide = AnswerGuide(GuideSpec("regex", text="(("), "guided_regex")
    long = replace(call(guide=guide), prompt=(1,) * 128)
    with pytest.raises(FieldError) as refused:
        worker.request(long)
    assert refused.value.field == "messages.0.content"
