"""Tests that drafted answers are decoded again in the background, and differences reported."""

import threading

import numpy as np
import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry

import tiny
from support import eventually, load_target, lying, make_proposer, replace, ruled
from tasc_engine import (
    Engine,
    EngineConfig,
    GuideSpec,
    Request,
    Sampling,
    TokenLogprob,
)
from tasc_engine.errors import GuideError
from tasc_engine.sampling.sampler import token_logprobs
from tasc_protocol import Acceptance
from tasc_runtime.engine.step_loop import EngineLoop
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.monitor.shadow import MARGINS, ShadowCheck, difference, without_checks
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
    """A step loop with a shadow check; `after_step` is called on the engine's thread."""

    def __init__(self, target, tokenizer, settings=ALL, config=CONFIG):
        proposer = make_proposer(tokenizer, config=config)
        self.records, self.after_step = [], lambda: None
        self.registry = CollectorRegistry()
        self.engine = Engine(target, tokenizer, proposer, config, on_step=self._observe)
        metrics = ReplicaMetrics(self.registry, task="t", model_name="m", proposer="tasc")
        self.loop = EngineLoop(self.engine)
        submit_idle = self.loop.submit_idle
        self.shadow = ShadowCheck(self.engine, submit_idle, settings, "float64", metrics)

    def _observe(self, record):
        if users := without_checks(record):
            self.records.append(users)
        self.after_step()

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"tasc_lossless_{name}_total", LABELS | labels)

    def submit(self, request, found, ended=lambda: None):
        """Submits a request; its answer is kept, and the check gets it."""

        def sink(output):
            found[request.id] = output.result
            self.shadow.finished(request, request, output.result)
            ended()

        self.loop.submit(request, sink)

    def answer(self, requests):
        """Returns answers of requests that start when rows are free."""
        found, free = {}, threading.Semaphore(CONFIG.rows)
        for request in requests:
            assert free.acquire(timeout=60)
            self.submit(request, found, free.release)
        eventually(lambda: len(found) == len(requests))
        return found

    def finish(self, *answers):
        """Passes answers on to the check, on the engine's thread."""
        done = threading.Event()

        def finish():
            for request, result in answers:
                self.shadow.finished(request, request, result)
            done.set()

        self.loop.between_steps(finish)
        assert done.wait(60)

    def settle(self):
        """Waits until all checks are finished."""
        eventually(lambda: self.shadow.pending == 0)


@pytest.fixture
def make_checked(target, tokenizer):
    """Makes step loops with a shadow check; they end after the test."""
    made = []

    def make(settings=ALL, config=CONFIG, target=target):
        made.append(Checked(target, tokenizer, settings, config))
        return made[-1]

    yield make
    for each in made:
        each.loop.close()


@pytest.fixture
def checked(make_checked):
    return make_checked()


def test_shadow_checks_decode_drafted_answers_again_with_equal_results(checked, requests):
    found = checked.answer(requests)
    drafted = [r for r in found.values() if any(r.acceptance.drafted)]
    assert sum(sum(r.acceptance.accepted) for r in drafted) > 0
    checked.settle()
    assert checked.count("checks") == len(drafted) > 5
    assert checked.count("mismatches", kind="real") == 0
    assert checked.count("mismatches", kind="near_tie") == 0


def test_shadow_checks_detect_wrong_verification(checked, requests, target, monkeypatch, caplog):
    lying(monkeypatch, target.vocab_size)
    checked.answer(requests)
    checked.settle()
    real = checked.count("mismatches", kind="real")
    assert 0 < real == checked.count("checks")
    told = [r.getMessage() for r in caplog.records if "differs" in r.getMessage()]
    assert 1 < len(told) < real, "the 1st, 2nd, 4th ... are told"
    assert any(f"'prompt tokens': {len(r.prompt)}," in told[0] for r in requests)
    assert tiny.SENTENCES[0] not in " ".join(told)


def crowded(checked, first, shadows, users):
    """Answers requests, and others once this many shadows hold rows; returns the next states.

    A state is taken when a step begins: running and waiting requests, and shadows among them.
    """
    engine, loop, states = checked.engine, checked.loop, []
    answers, found, begin = {}, {}, checked.engine.launch

    def launch():
        begin()
        state = engine.running, engine.waiting, loop.idle_running
        if states:
            states.append(state)
        elif state == (shadows, 0, shadows):
            states.append(state)
            for user in users:
                checked.submit(user, found)

    engine.launch = launch
    loop.between_steps(lambda: [checked.submit(request, answers) for request in first])
    eventually(lambda: len(found) == len(users))
    assert all(any(result.acceptance.drafted) for result in answers.values())
    assert all(result.error is None for result in found.values())
    return states[1:]


def test_shadow_checks_release_their_rows_to_requests(checked, requests):
    again = requests[: CONFIG.rows + CONFIG.max_waiting]  # as many as rows and queue hold
    users = [replace(r, id=f"again {r.id}", draft=False) for r in again]
    states = crowded(checked, requests[:3], CONFIG.rows, users)
    assert states[0] == (CONFIG.rows, CONFIG.max_waiting, 0)


def test_shadow_checks_release_their_cache_within_a_step(folder, make_checked, requests):
    place = 2 * 2 * 2 * 8 * 8  # bytes: keys and values, layers, heads, their size, float64
    needed = len(requests[0].prompt) + requests[0].max_tokens
    small = replace(CONFIG, kv_cache_bytes=place * (2 * needed + 8))
    checked = make_checked(config=small, target=load_target(folder, small))
    alike = [replace(requests[0], id=str(i)) for i in range(2)]
    users = [replace(r, id=f"again {r.id}", draft=False) for r in alike]
    states = crowded(checked, alike, 2, users)
    assert [state[1:] for state in states[:2]] == [(1, 1), (0, 0)]


def test_interrupted_shadow_checks_are_repeated_when_rows_are_idle(checked, requests):
    crowded(checked, requests[:3], 3, [replace(r, id=f"again {r.id}") for r in requests[:6]])
    checked.settle()
    assert checked.count("checks") == 3 + 6
    assert sum(checked.count("checks_dropped", reason=r) for r in ("full", "old", "failed")) == 0


def test_excess_and_outdated_shadow_answers_are_dropped_and_counted(make_checked, requests):
    few = make_checked(ShadowSettings(sample_rate=1.0, max_waiting=2, max_age_s=1e-9))
    found = make_checked(ShadowSettings()).answer(requests[:5])
    few.finish(*((request, found[request.id]) for request in requests[:5]))
    assert few.count("checks_dropped", reason="full") == 3
    few.settle()
    assert few.count("checks_dropped", reason="old") == 2
    assert few.count("checks") == 0


def test_failed_shadow_check_affects_no_answer(make_checked, requests, monkeypatch, caplog):
    plain = make_checked(ShadowSettings()).answer(requests[:3])
    monkeypatch.setattr("tasc_serve.monitor.shadow.difference", None)
    checked = make_checked()
    found = checked.answer(requests[:3])
    taken = replace(requests[0], id="taken", prompt=(10**6,))  # no engine takes such a prompt
    checked.finish((taken, found["0"]))
    checked.settle()
    assert checked.count("checks") == 0
    assert checked.count("checks_dropped", reason="failed") == 4
    assert caplog.text.count("an answer could not be checked") == 4
    checked.loop.between_steps(checked.engine.check_integrity)
    again = checked.answer([replace(r, id=f"again {r.id}") for r in requests[:3]])
    assert all(again[f"again {id_}"].tokens == result.tokens for id_, result in plain.items())
    assert "between two steps failed" not in caplog.text


def test_refused_guide_drops_the_check_and_affects_no_answer(checked, requests, monkeypatch):
    guided = replace(requests[0], guide=GuideSpec("regex", text="[a-z ]{0,40}"))
    (result,) = checked.answer([guided]).values()
    checked.settle()

    def refused(guide):
        raise GuideError("its states exceed the limit")

    monkeypatch.setattr(checked.engine.guides, "of", refused)
    drafted = structs.replace(result, acceptance=Acceptance((1,), (1,)))
    checked.finish((guided, drafted))  # raises nothing
    assert checked.count("checks_dropped", reason="failed") == 1


def test_shadow_sample_rate_is_the_share_of_checked_answers(make_checked, requests):
    some = make_checked(ShadowSettings(sample_rate=0.1, max_age_s=600))
    (result,) = make_checked(ShadowSettings()).answer(requests[:1]).values()
    some.finish(*((replace(requests[0], id=str(i)), result) for i in range(40)))
    some.settle()
    assert some.count("checks") == pytest.approx(4, abs=1)


def test_uncheckable_answers_are_not_sampled(checked, requests):
    (result,) = checked.answer(requests[:1]).values()
    checked.settle()
    before = checked.count("checks")
    request = requests[0]
    others = (
        replace(request, **ruled(Sampling(temperature=0.5))),
        replace(request, **ruled(Sampling(presence_penalty=1.0))),
        replace(request, **ruled(Sampling(logit_bias=((1, 2.0),)))),
        replace(request, draft=False),
    )
    checked.finish(*((other, result) for other in others))
    checked.finish((request, structs.replace(result, finish_reason="error")))
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


def test_step_counts_exclude_tokens_of_shadow_checks(checked, requests):
    found, mark = {}, []

    def after_step():
        if checked.loop.idle_running == checked.engine.running == 1 and not mark:
            mark.append(len(checked.records))
            checked.submit(replace(requests[1], id="user", draft=False), found)

    checked.after_step = after_step
    checked.answer(requests[:1])
    eventually(lambda: found)
    checked.settle()
    assert checked.count("checks") == 1
    counted = checked.records[mark[0] :]
    assert len(found["user"].tokens) == sum(record.emitted_tokens for record in counted) > 0
    assert all(record.row_steps or record.prompt_tokens for record in counted)


def test_equal_logits_are_a_near_tie_and_other_differences_are_real():
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
def test_answer_of_another_length_is_a_real_difference(answer):
    shadow = tuple(TokenLogprob(token, -0.1, ((token, -0.1),)) for token in (1, 0))
    found = difference(answer, shadow, 1.0)
    assert (found.place, found.kind) == (min(len(answer), 2), "real")
