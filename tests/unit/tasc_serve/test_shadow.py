"""Tests that drafted answers are decoded again in the background, and differences reported."""

import numpy as np
import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry

import tiny
from support import eventually, load_target, lying, make_proposer, replace, ruled
from tasc_draft import SOURCES
from tasc_engine import (
    Engine,
    EngineConfig,
    EngineTotals,
    GuideSpec,
    Request,
    Sampling,
    TokenLogprob,
)
from tasc_engine.sampling.sampler import token_logprobs
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.monitor.shadow import MARGINS, ShadowCheck, difference
from tasc_serve.replica.step_loop import EngineLoop
from tasc_serve.settings import ShadowSettings

CONFIG = EngineConfig(rows=3, max_model_len=256, prefill_chunk=8, max_waiting=4)
ALL = ShadowSettings(sample_rate=1.0, max_age_s=600)
LABELS = {"task": "t", "model_name": "m"}


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, CONFIG)


@pytest.fixture(scope="module")
def requests(tokenizer):
    texts = [*tiny.SENTENCES, *(f"{s} please" for s in tiny.SENTENCES)]
    return [
        Request(str(i), tuple(tokenizer.encode_prompt(text)), 20 + i)
        for i, text in enumerate(texts)
    ]


class Checked:
    """An engine with a shadow check, stepped manually like in the loop."""

    def __init__(self, target, tokenizer, settings=ALL, config=CONFIG):
        proposer = make_proposer(tokenizer, config=config)
        self.totals = EngineTotals(len(SOURCES), proposer.max_depth)
        self.records = []
        self.registry = CollectorRegistry()
        self.engine = Engine(target, tokenizer, proposer, config, on_step=self._held)
        self.engine.compile_rules()
        metrics = ReplicaMetrics(self.registry, task="t", model_name="m", proposer="tasc")
        self.shadow = ShadowCheck(self.engine, settings, "float64", metrics, self.records.append)

    def _held(self, record):
        self.shadow.hold(record)

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"tasc_lossless_{name}_total", LABELS | labels)

    def step(self):
        self.shadow.fill()
        return self.shadow.own(self.engine.step())

    def answer(self, requests):
        """Returns answers of requests that start when rows are free; the check gets each answer."""
        waiting, held, found = list(requests), {}, {}
        while waiting or held:
            if waiting and len(held) < CONFIG.rows:
                self.shadow.make_way()
                held[waiting[0].id] = waiting[0]
                self.engine.submit(waiting.pop(0))
            for delta in self.step():
                if delta.result:
                    found[delta.id] = delta.result
                    request = held.pop(delta.id)
                    self.shadow.finished(request, request, delta.result)
        return found

    def settle(self):
        """Steps until all checks are finished."""
        self.step()
        while self.engine.running or self.engine.waiting:
            assert self.step() == []


@pytest.fixture
def checked(target, tokenizer):
    return Checked(target, tokenizer)


def test_drafted_answers_are_decoded_again_and_are_the_same(checked, requests):
    found = checked.answer(requests)
    drafted = [r for r in found.values() if any(r.acceptance.drafted)]
    assert sum(sum(r.acceptance.accepted) for r in drafted) > 0
    checked.settle()
    assert checked.count("checks") == len(drafted) > 5
    assert checked.count("mismatches", kind="real") == 0
    assert checked.count("mismatches", kind="near_tie") == 0


def test_an_engine_that_lies_about_drafts_is_caught(checked, requests, target, monkeypatch, caplog):
    lying(monkeypatch, target.vocab_size)
    checked.answer(requests)
    checked.settle()
    real = checked.count("mismatches", kind="real")
    assert 0 < real == checked.count("checks")
    told = [r.getMessage() for r in caplog.records if "differs" in r.getMessage()]
    assert 1 < len(told) < real, "the 1st, 2nd, 4th ... are told"
    assert f"'prompt tokens': {len(requests[0].prompt)}," in " ".join(told)
    assert tiny.SENTENCES[0] not in " ".join(told)


def test_what_users_did_is_told_without_what_shadows_did(checked, target, tokenizer, requests):
    without = Checked(target, tokenizer, ShadowSettings(sample_rate=0.0))
    for each in (without, checked):
        each.answer(requests)
        each.settle()
        for record in each.records:
            each.totals.add(record)
    assert checked.count("checks") > 0
    assert without.count("checks") == 0
    for name in ("row_steps", "emitted_tokens", "bonus_tokens", "drafts"):
        assert getattr(checked.totals, name) == getattr(without.totals, name), name


def test_users_find_the_rows_they_would_find_without_shadows(checked, requests):
    checked.answer(requests[:6])
    while checked.engine.running < CONFIG.rows:
        checked.step()
    assert checked.shadow.running == CONFIG.rows, "shadows hold every row"
    users = [replace(r, id=f"again {r.id}") for r in requests[: CONFIG.rows + CONFIG.max_waiting]]
    for user in users:
        checked.shadow.make_way()
        checked.engine.submit(user)  # as many as rows and queue hold: QueueFull would be a fault
    checked.shadow.fill()
    checked.engine.step()
    assert checked.shadow.running == 0
    assert checked.engine.running == CONFIG.rows
    assert checked.engine.waiting == CONFIG.max_waiting


def test_users_find_the_cache_a_step_later_where_shadows_fill_it(folder, tokenizer, requests):
    place = 2 * 2 * 2 * 8 * 8  # bytes: keys and values, layers, heads, their size, float64
    needed = len(requests[0].prompt) + requests[0].max_tokens
    small = replace(CONFIG, kv_cache_bytes=place * (2 * needed + 8))
    target = load_target(folder, small)
    checked = Checked(target, tokenizer, config=small)
    alike = [replace(requests[0], id=str(i)) for i in range(4)]
    checked.answer(alike)
    while checked.shadow.running < 2:
        checked.step()
    for user in (replace(r, id=f"again {r.id}") for r in alike[:2]):
        checked.shadow.make_way()
        checked.engine.submit(user)
    checked.step()
    assert (checked.engine.waiting, checked.shadow.running) == (1, 1)
    checked.step()
    assert (checked.engine.waiting, checked.shadow.running) == (0, 0)


def test_shadows_go_on_beside_users_who_leave_rows_free(checked, requests):
    checked.answer(requests[:1])
    for i in range(40):
        if checked.engine.running == checked.shadow.running:
            checked.shadow.make_way()
            checked.engine.submit(replace(requests[i % 4], id=f"busy {i}", max_tokens=3))
        checked.step()
    assert checked.count("checks") == 1


def test_given_back_answers_are_checked_when_rows_are_idle_again(checked, requests):
    checked.answer(requests[:3])
    checked.step()
    assert checked.shadow.running
    checked.answer([replace(r, id=f"again {r.id}") for r in requests])
    checked.settle()
    assert checked.count("checks") == 3 + len(requests)
    assert sum(checked.count("checks_dropped", reason=r) for r in ("full", "old", "failed")) == 0


def test_too_many_and_too_old_answers_are_dropped_and_counted(target, tokenizer, requests):
    few = Checked(target, tokenizer, ShadowSettings(sample_rate=1.0, max_waiting=2, max_age_s=1e-9))
    found = Checked(target, tokenizer, ShadowSettings()).answer(requests[:5])
    for request in requests[:5]:
        few.shadow.finished(request, request, found[request.id])
    assert few.count("checks_dropped", reason="full") == 3
    few.settle()
    assert few.count("checks_dropped", reason="old") == 2
    assert few.count("checks") == 0


def test_a_check_that_fails_harms_no_answer(checked, requests, monkeypatch, caplog):
    found = checked.answer(requests[:3])
    taken = replace(requests[0], id="taken", prompt=(10**6,))  # no engine takes such a prompt
    checked.shadow.finished(taken, taken, found["0"])
    monkeypatch.setattr("tasc_serve.monitor.shadow.difference", None)
    checked.settle()
    assert checked.count("checks") == 0
    assert checked.count("checks_dropped", reason="failed") == 4
    assert caplog.text.count("an answer could not be checked") == 4
    checked.engine.check_integrity()
    again = [replace(r, id=f"again {r.id}") for r in requests[:3]]
    answered = checked.answer(again)
    assert all(answered[f"again {id_}"].tokens == result.tokens for id_, result in found.items())


def test_a_tenth_of_the_answers_is_a_tenth_of_the_answers(target, tokenizer, requests):
    some = Checked(target, tokenizer, ShadowSettings(sample_rate=0.1, max_age_s=600))
    (result,) = Checked(target, tokenizer).answer(requests[:1]).values()
    for i in range(40):
        some.shadow.finished(requests[0], replace(requests[0], id=str(i)), result)
    some.settle()
    assert some.count("checks") == pytest.approx(4, abs=1)


def test_what_cannot_be_judged_is_not_chosen(checked, requests):
    (result,) = checked.answer(requests[:1]).values()
    checked.settle()
    before = checked.count("checks")
    request = requests[0]
    for other in (
        replace(request, **ruled(Sampling(temperature=0.5))),
        replace(request, **ruled(Sampling(presence_penalty=1.0))),
        replace(request, **ruled(Sampling(logit_bias=((1, 2.0),)))),
        replace(request, draft=False),
    ):
        checked.shadow.finished(other, other, result)
    checked.shadow.finished(request, request, structs.replace(result, finish_reason="error"))
    checked.settle()
    assert checked.count("checks") == before == 1


def test_guided_and_resumed_answers_are_checked_whole(checked, requests):
    guide = GuideSpec("choice", ("wake me up at nine am on friday", "wake me up at nine"))
    guided = replace(requests[0], guide=guide, max_tokens=64)
    (whole,) = checked.answer([requests[1]]).values()
    resumed = replace(requests[1], id="resumed", committed_ids=whole.tokens[:4])
    found = checked.answer([guided, resumed])
    assert found["resumed"].tokens == whole.tokens
    checked.settle()
    drafted = [r for r in (whole, *found.values()) if any(r.acceptance.drafted)]
    assert checked.count("checks") == len(drafted) >= 2
    assert checked.count("mismatches", kind="real") == 0


def test_the_loop_checks_when_it_is_idle_and_tells_users_only(checked, requests):
    told = []
    loop = EngineLoop(checked.engine, shadow=checked.shadow)

    def sink(request):
        def take(delta):
            told.append(delta)
            checked.shadow.finished(request, request, delta.result)

        return take

    for request in requests[:4]:
        loop.submit(request, sink(request))
    eventually(lambda: checked.count("checks") >= 4)
    loop.close()
    assert loop.failure is None
    assert sorted(delta.id for delta in told) == ["0", "1", "2", "3"]
    assert checked.count("mismatches", kind="real") == 0


def test_what_users_did_is_told_in_steps_of_which_shadows_have_none(checked, requests):
    """Steps of shadow checks are not counted either, even while users' requests wait."""
    checked.answer(requests[:1])
    checked.step()
    assert checked.shadow.running == 1
    before = len(checked.records)
    checked.shadow.make_way()
    checked.engine.submit(replace(requests[1], id="user"))
    said = 0
    while checked.engine.running:
        said += sum(len(delta.tokens) for delta in checked.step() if delta.id == "user")
    told = checked.records[before:]
    assert said == sum(record.emitted_tokens for record in told) > 0
    assert all(record.row_steps or record.prompt_tokens for record in told)


def test_equal_logits_are_a_near_tie_and_others_are_real():
    logits = torch.tensor([[0.0, 5.0, 5.0, 4.999], [3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    shadow = tuple(token_logprobs(logits, np.arange(2), np.array([1, 0]), [3, 3]))
    for dtype, margin in MARGINS.items():
        assert difference((1, 0), shadow, margin) is None
        tie, clear = difference((2, 0), shadow, margin), difference((1, 1), shadow, margin)
        assert (tie.place, tie.gap, tie.kind) == (0, 0.0, "near_tie"), dtype
        assert (clear.place, clear.kind) == (1, "real"), dtype
        assert clear.gap == pytest.approx(2.0)
    assert difference((3, 0), shadow, MARGINS["float32"] / 2).kind == "real"
    assert difference((3, 0), shadow, MARGINS["bfloat16"]).kind == "near_tie"


@pytest.mark.parametrize("answer", [(1,), (1, 0, 0), ()])
def test_an_answer_of_another_length_differs_really(answer):
    shadow = tuple(TokenLogprob(token, -0.1, ((token, -0.1),)) for token in (1, 0))
    found = difference(answer, shadow, 1.0)
    assert (found.place, found.kind) == (min(len(answer), 2), "real")


def test_a_token_that_was_none_of_the_likeliest_differs_really():
    found = difference((7,), (TokenLogprob(1, -0.1, ((1, -0.1),)),), 1e9)
    assert (found.gap, found.kind) == (float("inf"), "real")
