"""Tests admission, refusal, cancellation and records, and that failures harm no other request."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from choosing_cases import HAS_KERNELS
from transformers import AutoModelForCausalLM

from support import (
    EAGER,
    FakeClock,
    failing_where,
    load_target,
    make_proposer,
    refused,
    replace,
    ruled,
)
from tasc_draft import SOURCES, Drafts
from tasc_engine import (
    Engine,
    EngineTotals,
    GenerationResult,
    GuideSpec,
    QueueFull,
    Request,
    RequestTooLong,
    Sampling,
    StepRecord,
)
from tasc_engine.errors import GuideError
from tasc_engine.guided import following
from tasc_engine.guided.following import LeastTokens
from tasc_engine.kernels.gpu.attention import INTERPRETED
from tasc_engine.model import target as module
from tasc_engine.sampling import sampler
from tasc_engine.sampling.accept import EmitLimits
from tasc_engine.sampling.sampler import Sampler
from tasc_engine.stats import StepClock
from tasc_engine.step import verify as verifier
from tasc_text import TaskTokenizer

PROMPT = (5, 9, 30, 41, 7)


def request(name: str, **fields) -> Request:
    return Request(**{"id": name, "prompt": PROMPT, "max_tokens": 12, **fields})


def run(engine, request):
    (result,) = engine.generate([request])
    return result


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (RequestTooLong, {"max_tokens": 60}, ["60", "64"]),
        *(
            (ValueError, {field: ids}, [field, str(ids[-1])])
            for field in ("prompt", "stop_token_ids", "committed_ids")
            for ids in ((5, 10**6), (-1,))
        ),
        *((ValueError, {"logit_bias": ((token, 1.0),)}, [str(token)]) for token in (-1, 10**6)),
        (ValueError, {"adapter": "unknown"}, ["unknown"]),
        (GuideError, {"guide": GuideSpec("regex", text="a(b")}, ["regex"]),
        *((ValueError, {"prompt": wrong}, ["prompt"]) for wrong in ((), "a text")),
        (ValueError, {"max_tokens": None}, ["max_tokens"]),
        (ValueError, {"max_tokens": 0}, ["max_tokens is 0"]),
        (ValueError, {"logprobs": 21}, ["logprobs"]),
        (ValueError, {"stop": ("",)}, ["stop"]),
        (ValueError, {"committed_ids": (5,) * 12}, ["max_tokens"]),  # no token is left
    ],
)
def test_refused_request_leaves_no_state(make_engine, kind, fields, named):
    engine = make_engine()
    with refused(kind, *named):
        engine.submit(request("a", **fields))
    assert engine.waiting == 0
    assert len(run(engine, request("b", max_tokens=59)).tokens) == 59
    engine.check_integrity()


def test_queue_accepts_exactly_its_maximum_of_requests(make_engine) -> None:
    engine = make_engine(rows=2, max_waiting=3)
    for i in range(5):
        engine.submit(Request(str(i), PROMPT, 4))
    with pytest.raises(QueueFull):
        engine.submit(Request("over", PROMPT, 4))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 3)
    with pytest.raises(QueueFull):
        engine.submit(Request("over", PROMPT, 4))


def test_cancelled_request_frees_its_row(make_engine) -> None:
    engine = make_engine(rows=1)
    alone = run(engine, Request("alone", PROMPT, 9)).tokens
    engine.submit(Request("long", (3, 4), 40))
    engine.submit(Request("next", PROMPT, 9))
    engine.step()
    assert engine.cancel("long")
    assert not engine.cancel("long")
    engine.check_integrity()
    tokens = [d.result.tokens for _ in range(20) for d in engine.step() if d.result]
    assert tokens == [alone]


@pytest.mark.parametrize("draft", [True, False])
def test_stop_string_cuts_text_and_tokens(make_engine, tokenizer, draft: bool) -> None:
    whole = run(make_engine(), Request("whole", PROMPT, 40))
    stop = whole.text[8:11]
    result = run(make_engine(), Request("a", PROMPT, 40, stop=(stop,), draft=draft))
    assert (result.text, result.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert stop in tokenizer.decode(result.tokens)
    assert stop not in tokenizer.decode(result.tokens[:-1])


def test_step_records_add_up_to_the_emitted_tokens(make_engine) -> None:
    totals = EngineTotals(len(SOURCES), 4)
    engine = make_engine(on_step=totals.add)
    results = list(engine.generate(Request(str(i), PROMPT, 20 + i) for i in range(5)))
    emitted = sum(len(r.tokens) for r in results)
    assert totals.drafted.sum() > 0
    assert totals.emitted_tokens == emitted
    assert totals.row_steps == sum(r.acceptance.steps for r in results)
    assert totals.accepted.sum() == sum(sum(r.acceptance.accepted) for r in results)
    assert totals.drafted.sum() == sum(sum(r.acceptance.drafted) for r in results)
    assert totals.prompt_tokens == 5 * len(PROMPT)
    assert (totals.accepted <= totals.drafted).all()
    assert totals.block_efficiency == emitted / totals.row_steps


def test_request_timings_are_in_chronological_order(make_engine) -> None:
    engine = make_engine(rows=1)
    results = list(engine.generate(Request(str(i), PROMPT, 5) for i in range(3)))
    assert len(results) == 3
    assert all(0 <= r.timings.queued <= r.timings.first_token <= r.timings.total for r in results)


def test_rules_compiled_is_true_only_after_all_sampling_code_is_compiled(
    make_engine, monkeypatch
) -> None:
    engine, compiled = make_engine(), []
    monkeypatch.setattr(sampler, "_warm", set())
    monkeypatch.setattr(following, "warm_up", lambda: compiled.append(engine.rules_compiled))
    engine.compile_rules()
    assert compiled == [False]
    assert engine.rules_compiled


@pytest.mark.parametrize("asked", [{"min_tokens": 2}, {"logprobs": 0}, {"logit_bias": ((1, 1.0),)}])
def test_requests_with_a_sampling_rule_or_logprobs_are_not_plain(asked) -> None:
    assert request("a").is_plain
    assert not request("a", **asked).is_plain


class Stuck:
    """A guide that fails after two tokens, like a grammar that becomes too complex."""

    words, seen, error, labels = 10, 0, "", None

    def look(self, tokens, parents, kept, masks) -> None:
        masks[:] = 0xFFFFFFFF if self.seen < 2 else 0
        kept[:] = self.seen < 1
        self.error = "the grammar grew too complex" if self.seen >= 2 else ""

    def advance(self, tokens) -> None:
        self.seen += len(tokens)

    def forced(self, most: int) -> np.ndarray:
        return np.zeros(0, np.int32)


def test_failing_guide_fails_only_its_request(make_engine, monkeypatch) -> None:
    engine = make_engine()
    alone = run(engine, request("b")).tokens
    monkeypatch.setattr(engine.guides, "of", lambda spec: Stuck())
    asked = [request("a", guide=GuideSpec("choice", ("alarm",)), draft=False), request("b")]
    found = {r.id: r for r in engine.generate(asked)}
    assert (found["a"].finish_reason, len(found["a"].tokens)) == ("error", 2)
    assert (found["a"].error, found["b"].tokens) == ("the grammar grew too complex", alone)
    engine.check_integrity()


def test_guide_time_includes_forced_tokens(make_engine, monkeypatch) -> None:
    clock, records = FakeClock(), list[StepRecord]()

    class Slow(LeastTokens):
        def forced(self, most: int) -> np.ndarray:
            clock.now += 1.0
            return np.array([7, 8][:most], np.int32)

    engine = make_engine(on_step=records.append)
    monkeypatch.setattr(engine.guides, "of", lambda spec: Slow((), engine.vocab_size, 0))
    monkeypatch.setattr("tasc_engine.stats.time", SimpleNamespace(perf_counter=clock))
    asked = request("a", guide=GuideSpec("choice", ("alarm",)), max_tokens=10)
    result = run(engine, asked)
    assert len(result.tokens) == 10
    steps = result.acceptance.steps
    assert sum(record.guide_seconds for record in records) == steps > 1


@pytest.mark.parametrize("broken", ["choose", "logprobs"])
def test_out_of_memory_in_sampling_fails_only_one_request(
    make_engine, monkeypatch, broken: str
) -> None:
    engine, plain = make_engine(), {r.id: r.tokens for r in make_engine().generate(four())}
    function = (Sampler, "start_choice") if broken == "choose" else (verifier, "token_logprobs")
    full = torch.OutOfMemoryError("CUDA out of memory")
    calls = failing_where(
        monkeypatch, *function, full, lambda n, *_: n in (4, 5)
    )  # without drafts too
    found = {r.id: r for r in engine.generate(four())}
    errors = [r for r in found.values() if r.error]
    assert len(errors) <= 2
    assert all("did not fit the memory" in r.error for r in errors)
    assert all(found[n].tokens == plain[n] for n in plain if not found[n].error)
    assert len(calls) > 5
    engine.check_integrity()


def four() -> list[Request]:
    warm = Sampling(temperature=1.0, seed=5)
    asked = [request(name, **ruled(warm), logprobs=1) for name in "abc"]
    return [*asked, request("d", **ruled(warm), logprobs=0)]


WRONG_RULES = {
    "logit_bias": [((5, 1.0), (5, 2.0)), ((5, 1.7e308),), ((5, float("nan")),)],
    "top_k": [1.5], "top_p": [0.0], "seed": [True, 2**64], "temperature": [float("nan")],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_RULES)
def test_sampling_parameters_out_of_range_are_refused(name: str) -> None:
    for value in WRONG_RULES[name]:
        with refused(ValueError, name):
            Sampling(**{name: value})


PROMPTS = [(5, 9, 30, 41, 7), (8, 8, 8, 2), tuple(range(40, 60)), (3, 1, 4, 1, 5, 9, 2, 6)]
REQUESTS = [Request(str(i), p, 20) for i, p in enumerate(PROMPTS)]


class Watched:
    def __init__(self, make_engine: Any, folder: Path, tokenizer: TaskTokenizer) -> None:
        self.target, self.records = load_target(folder), list[StepRecord]()
        self.proposer: Any = make_proposer(tokenizer, replace(EAGER, num_speculative_tokens=4))
        self._make = make_engine

    def engine(self) -> Engine:
        return self._make(target=self.target, proposer=self.proposer, on_step=self.records.append)

    @property
    def failures(self) -> int:
        return sum(record.draft_failures for record in self.records)

    def with_forward(self, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Engine:
        """Calls ``change(ids, logits)`` on the inputs and logits of each forward pass."""
        engine, honest = self.engine(), self.target.forward
        self.target.forward = lambda ids, *rest: change(ids, honest(ids, *rest))
        return engine


@pytest.fixture
def watched(make_engine, folder: Path, tokenizer: TaskTokenizer) -> Watched:
    return Watched(make_engine, folder, tokenizer)


def answers(engine: Engine) -> dict[str, GenerationResult]:
    found = {r.id: r for r in engine.generate(REQUESTS)}
    engine.check_integrity()
    return found


def tokens(found: dict[str, GenerationResult]) -> dict[str, tuple[int, ...]]:
    return {name: result.tokens for name, result in found.items()}


@pytest.fixture
def plain(make_engine) -> dict[str, tuple[int, ...]]:
    return tokens(answers(make_engine()))


@pytest.mark.parametrize("method", ["start", "propose", "observe_rows", "finish"])
def test_failing_proposer_changes_no_answer(watched, plain, monkeypatch, method) -> None:
    broken = ArithmeticError("the proposer broke")
    raised = failing_where(monkeypatch, watched.proposer, method, broken, lambda n, *_: n % 3 == 0)
    engine = watched.engine()
    assert [tokens(answers(engine)) for _ in range(2)] == [plain] * 2
    assert watched.failures >= sum(raised) > 0


WRONG: dict[str, Callable[[Any], Any]] = {
    "parent after the node": lambda d: replace(d, parents=d.parents + 1),
    "parent that does not exist": lambda d: replace(d, parents=d.parents - 9),
    "wrong depth": lambda d: replace(d, depths=d.depths + 1),
    "id outside the vocabulary": lambda d: replace(d, tokens=d.tokens + 10**6),
    "id below zero": lambda d: replace(d, tokens=d.tokens - 10**6),
    "unknown source": lambda d: replace(d, source=d.source + 99),
    "rows missing": lambda d: replace(d, offsets=d.offsets[:-1]),
    "rows falling": lambda d: replace(d, offsets=d.offsets[::-1].copy()),
    "arrays of different length": lambda d: replace(d, parents=d.parents[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_draft_trees_are_dropped(watched: Watched, plain, name: str) -> None:
    honest = watched.proposer.propose
    proposed: list[int] = []

    def propose(rows: Any, budget: Any, min_probs: Any = None) -> Any:
        drafts = honest(rows, budget, min_probs)
        proposed.append(len(drafts.tokens))
        return WRONG[name](drafts) if len(drafts.tokens) else drafts

    watched.proposer.propose = propose
    assert tokens(answers(watched.engine())) == plain
    assert watched.failures == sum(n > 0 for n in proposed) > 0


def test_drafts_beyond_the_budget_are_dropped(watched: Watched, plain) -> None:
    propose = watched.proposer.propose
    watched.proposer.propose = lambda rows, most, min_probs: propose(rows, 0 * most + 4, min_probs)
    assert tokens(answers(watched.engine())) == plain
    assert watched.failures > 0


@pytest.mark.parametrize("committed", [0, 2, 7])
def test_min_tokens_has_no_cost_after_it_is_reached(watched, plain, monkeypatch, committed):
    engine, masked, honest = watched.engine(), [], watched.target.start_logits
    monkeypatch.setattr(
        watched.target, "start_logits", lambda batch: masked.append(1) or honest(batch)
    )
    whole = plain["0"]
    one = replace(REQUESTS[0], min_tokens=4, draft=False, committed_ids=whole[:committed])
    assert run(engine, one).tokens == whole
    assert len(masked) == max(4 - committed, 0) < len(watched.records)


@pytest.mark.skipif(not (HAS_KERNELS and INTERPRETED), reason="needs TRITON_INTERPRET=1")
def test_kernels_of_a_gpu_give_the_answers_of_a_cpu(make_engine, monkeypatch) -> None:
    rules: list[dict[str, Any]] = [
        ruled(Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=3)),
        ruled(Sampling(temperature=1.0, top_k=9, min_p=0.01, frequency_penalty=0.3)),
        {"guide": GuideSpec("choice", ("alarm", "alarm set", "weather"))},
        # While it runs, all places have logits, as they do on a GPU.
        {"logprobs": 5, "min_tokens": 3, "max_tokens": 30, "draft": False},
    ]
    requests = [request(str(i), **{"max_tokens": 9, **rule}) for i, rule in enumerate(rules)]
    right = {r.id: r for r in make_engine(rows=4).generate(requests)}
    used = list[torch.device]()
    monkeypatch.setattr(sampler, "_has_kernels", lambda device: used.append(device) or True)
    found = {r.id: r for r in make_engine(rows=4).generate(requests)}
    assert tokens(found) == tokens(right)
    for one, other in zip(found["3"].logprobs, right["3"].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert used


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_chooses_tokens_before_the_host_waits(monkeypatch, device: str) -> None:
    done, chooser = list[str](), Sampler(1, 8, 40)
    chooser.start(0, np.zeros(1, np.int32), Sampling(temperature=1.0))
    honest, logits, drafts = chooser.start_choice, torch.zeros(1, 40), Drafts.empty(1)
    limits = EmitLimits(np.ones(1, np.int32), np.ones(1, bool), np.zeros(40, bool))
    monkeypatch.setattr(
        chooser, "start_choice", lambda *args: done.append("choice") or honest(*args)
    )
    target: Any = SimpleNamespace(
        device=torch.device(device),
        is_busy=lambda: False,
        start_logits=lambda _: lambda: done.append("logits") or logits,
    )
    plan: Any = SimpleNamespace(
        emitting_rows=np.zeros(1, np.int32),
        emitting=[SimpleNamespace(request=REQUESTS[0], scorer=None)],
        scored=None, batch=lambda *_: None, limits=lambda _: done.append("limits") or limits,
    )  # fmt: skip
    verification = verifier.Verifier(target, chooser, limits.is_eos)
    started = verification.start(plan, drafts, None)
    assert done == (["logits", "choice"] if device == "cuda" else [])
    assert verification.finish(started, StepClock()).accepted.emitted.tolist() == [1]
    assert sorted(done) == ["choice", "limits", "logits"]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_nan_logits_end_only_their_request(watched: Watched, plain, steps) -> None:
    seen = []

    def poison(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Changes the logits of request 0, which has the first row, in one step."""
        if len(seen) == steps:
            logits[0] = torch.nan
        seen.append(1)
        return logits

    found = answers(watched.with_forward(poison))
    assert found["0"].finish_reason == "error"
    assert "NaN" in found["0"].error
    assert found["0"].tokens == plain["0"][: len(found["0"].tokens)]
    assert all(found[n].tokens == plain[n] for n in ("1", "2", "3"))


def test_prompt_that_does_not_fit_memory_fails_only_its_request(watched: Watched, plain) -> None:
    def too_much(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) >= 17:  # a prompt chunk of 16 and the other row; shorter ones fit
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")
        return logits

    found = answers(watched.with_forward(too_much))
    assert found["2"].finish_reason == "error"
    assert "on cpu did not fit the memory; lower rows (" in found["2"].error
    assert "prefill_chunk (16), max_draft_tokens (" in found["2"].error
    assert {n for n, r in found.items() if r.error} == {"2"}
    assert all(found[n].tokens == plain[n] for n in ("0", "1", "3"))


@pytest.mark.parametrize("place", ["lay_out", "begin", "forward"])
def test_drafts_that_do_not_fit_memory_are_left_out(watched, plain, monkeypatch, place) -> None:
    """Kept tokens end at their places, even if they moved before memory ran out."""
    engine, target, scarce = watched.engine(), watched.target, [False]
    where: Any = {"lay_out": module, "begin": target.cache, "forward": target}[place]
    honest, honest_step = getattr(where, place), target.start_tokens

    def fails_with_drafts(*args: Any) -> Any:
        found = honest(*args) if place == "forward" or not scarce[-1] else None
        if scarce[-1]:
            raise MemoryError
        return found

    def start_tokens(batch: Any) -> Any:
        scarce.append(len(batch.drafts.tokens) > 0 and len(scarce) % 2 == 1)
        return honest_step(batch)

    monkeypatch.setattr(target, "start_tokens", start_tokens)
    monkeypatch.setattr(where, place, fails_with_drafts)
    assert tokens(answers(engine)) == plain
    assert sum(scarce) > 3


def test_broken_row_does_not_affect_later_rows(watched: Watched, plain) -> None:
    """Keys and values that are no numbers must not reach a row that is longer or comes later."""
    engine = watched.engine()
    operations = watched.target.decoder.operations
    honest = operations.apply_rope_and_write_kv
    poisoned = [True]

    def apply_rope_and_write_kv(layer: int, qkv: Any, *rest: Any) -> Any:
        if poisoned[0] and layer == 1:
            qkv.fill_(torch.nan)
        return honest(layer, qkv, *rest)

    operations.apply_rope_and_write_kv = apply_rope_and_write_kv
    broken = Request("broken", tuple(range(1, 60)), 2)
    (result,) = engine.generate([broken])
    assert result.finish_reason == "error"
    poisoned[0] = False
    assert tokens(answers(engine)) == plain


def test_prefix_that_does_not_fit_memory_is_not_kept(make_engine, plain, folder: Path) -> None:
    target, records = load_target(folder), []
    engine = make_engine(target=target, on_step=records.append)
    target.cache.copied = Mock(side_effect=MemoryError)
    twice = [replace(r, id=f"{r.id}-{k}") for k in range(2) for r in REQUESTS]
    found = {r.id: r.tokens for r in engine.generate(twice)}
    assert found == {f"{n}-{k}": t for k in range(2) for n, t in plain.items()}
    assert not any(record.shared_tokens for record in records)


def test_other_forward_errors_are_raised(watched: Watched) -> None:
    broken = Mock(side_effect=RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        answers(watched.with_forward(broken))


_RNG = np.random.default_rng(5)
SCORED = [tuple(_RNG.integers(3, 300, n).tolist()) for n in (40, 1, 2, 23, 40)]
SCORED[4] = (*SCORED[0][:30], *SCORED[4][30:])  # shares a beginning


def close(result, folder, prompt, n):
    """Asserts that log-probabilities equal those of a forward pass over the whole prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    assert len(result.logprobs) == len(prompt) - 1 + len(result.tokens)
    for place, (found, token) in enumerate(zip(result.logprobs, prompt[1:], strict=False)):
        assert found.token == token
        assert found.logprob == pytest.approx(want[place, token].item(), abs=1e-4)
        values, _ = want[place].topk(n)
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [want[place, i].item() for i, _ in found.top] == pytest.approx(
            values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_prompt_logprobs_equal_the_model_in_any_batch(make_engine, folder, chunk):
    engine = make_engine(rows=3, prefill_chunk=chunk)
    alone = [Request(f"p{i}", prompt, 12) for i, prompt in enumerate(SCORED)]
    tokens = {r.id: r.tokens for r in make_engine(rows=1).generate(alone)}
    scored = [
        Request(f"s{i}", prompt, 1 + i, logprobs=3, echo=True) for i, prompt in enumerate(SCORED)
    ]
    for _ in range(3):  # what prompts share is kept from the second turn on
        mixed = [one for pair in zip(scored, alone, strict=True) for one in pair]
        for result in engine.generate(mixed):
            assert result.tokens == tokens[f"p{result.id[1]}"][: len(result.tokens)]
            if result.id[0] == "s":
                close(result, folder, SCORED[int(result.id[1])], 3)
    engine.check_integrity()


def test_prompt_logprobs_come_once_with_the_first_streamed_tokens(make_engine, folder):
    engine = make_engine(prefill_chunk=8)
    one = Request("a", SCORED[0], 12, stream=True, logprobs=0, echo=True)
    engine.submit(one)
    deltas = [delta for _ in range(40) for delta in engine.step()]
    assert len(deltas[0].logprobs) == len(SCORED[0]) - 1 + len(deltas[0].tokens)
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas[1:])
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert tuple(logprobs) == deltas[-1].result.logprobs


def test_cancelling_all_requests_drops_results_that_were_not_returned(make_engine) -> None:
    engine = make_engine()
    results = engine.generate([Request(name, (5, 9, 30), 4) for name in ("a", "b")])
    next(results)
    engine.launch()
    engine.collect()
    results.close()
    engine.cancel_all()
    assert not engine.has_outputs
    assert [result.id for result in engine.generate([Request("c", (5, 9, 30), 4)])] == ["c"]


def test_parts_of_a_step_give_the_answers_of_whole_steps(make_engine) -> None:
    """Requests that arrive, and one that is cancelled, while a forward runs."""
    alone = {r.id: r.tokens for r in make_engine().generate(REQUESTS)}
    engine, found = make_engine(), {}
    engine.submit(REQUESTS[0])
    engine.launch()
    for request in REQUESTS[1:]:
        engine.submit(request)
    engine.submit(replace(REQUESTS[0], id="cancelled"))
    engine.collect()
    engine.launch()
    assert engine.cancel("cancelled")
    while engine.running or engine.waiting or engine.has_outputs:
        engine.launch()
        found |= {o.id: o.result.tokens for o in engine.outputs() if o.result}
        engine.collect()
    assert found == alone
