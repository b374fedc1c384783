"""What a request may ask for that the engine cannot do is refused, or fails alone."""

import numpy as np
import pytest
import torch

from tasc_engine import GenerationRequest, GuideSpec, Sampling, verifier
from tasc_engine.errors import GuideError

PROMPT = (5, 9, 30, 41, 7)
CHOICES = GuideSpec("choice", ("alarm", "weather"))


def request(name: str, **fields) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, 12, **fields)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_bias_on_an_unknown_token_is_refused_by_its_number(make_engine, token: int) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"logit_bias is on token {token}; ids go from 0 to"):
        engine.submit(request("a", sampling=Sampling(logit_bias=((token, 1.0),))))


def test_an_unknown_adapter_is_refused(make_engine) -> None:
    with pytest.raises(ValueError, match="adapter is 'nobody'"):
        make_engine().submit(request("a", adapter="nobody"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GuideSpec("choice", ("a choice that needs more tokens than there is room for",)), "12"),
        (GuideSpec("regex", text="a(b"), "regex"),
        (GuideSpec("json_schema", text='{"type": "nothing"}'), "json_schema"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(make_engine, spec, message: str) -> None:
    engine = make_engine()
    with pytest.raises(GuideError, match=message):
        engine.submit(request("a", guide=spec))
    assert engine.waiting == 0


class Stuck:
    """A guide that gives up after two tokens, as a grammar does that grows too complex."""

    words, ended, seen, error = 10, False, 0, ""

    def look(self, tokens, parents, kept, masks) -> None:
        masks[:] = 0xFFFFFFFF if self.seen < 2 else 0
        kept[:] = self.seen < 1
        self.error = "the grammar grew too complex" if self.seen >= 2 else ""

    def advance(self, tokens) -> None:
        self.seen += len(tokens)

    def forced(self, most: int) -> np.ndarray:
        return np.zeros(0, np.int32)


def test_a_guide_that_gives_up_fails_its_request_alone(make_engine, monkeypatch) -> None:
    engine = make_engine()
    alone = next(iter(engine.generate([request("b")]))).tokens
    monkeypatch.setattr(engine.guides, "of", lambda spec, most: Stuck())
    found = {
        r.id: r for r in engine.generate([request("a", guide=CHOICES, draft=False), request("b")])
    }
    assert (found["a"].finish_reason, len(found["a"].tokens)) == ("error", 2)
    assert found["a"].error == "the grammar grew too complex"
    assert found["b"].tokens == alone
    engine.check_integrity()


def test_a_guided_answer_streams_the_text_it_forces(make_engine) -> None:
    engine, pieces = make_engine(), []
    engine.submit(request("a", guide=CHOICES, stream=True))
    while engine.running or engine.waiting:
        for delta in engine.step():
            pieces.append(delta.text)
            result = delta.result
    assert "".join(pieces) == result.text in CHOICES.choices
    assert result.acceptance.steps < len(result.tokens)


def test_logprobs_add_up_over_the_deltas(make_engine) -> None:
    engine, told = make_engine(), []
    engine.submit(request("a", logprobs=2, guide=CHOICES, stream=True))
    while engine.running or engine.waiting:
        for delta in engine.step():
            assert [one.token for one in delta.logprobs] == list(delta.tokens)
            told += delta.logprobs
            result = delta.result
    assert tuple(told) == result.logprobs
    assert all(len(one.top) == 2 and one.logprob <= one.top[0][1] for one in told)


@pytest.mark.parametrize("broken", ["choose", "logprobs"])
def test_choosing_that_does_not_fit_memory_fails_one_request_alone(
    make_engine, monkeypatch, broken: str
) -> None:
    engine, plain = make_engine(), {r.id: r.tokens for r in make_engine().generate(both())}
    where = engine._chooser if broken == "choose" else verifier
    name = "choose" if broken == "choose" else "token_logprobs"
    honest, calls = getattr(where, name), []

    def scarce(*args):
        calls.append(args)
        if len(calls) in (4, 5):  # with drafts, and again without
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(*args)

    monkeypatch.setattr(where, name, scarce)
    found = {r.id: r for r in engine.generate(both())}
    errors = [r for r in found.values() if r.error]
    assert len(errors) <= 2
    assert all("did not fit the memory" in r.error for r in errors)
    assert all(found[n].tokens == plain[n] for n in plain if not found[n].error)
    assert len(calls) > 5
    engine.check_integrity()


def both() -> list[GenerationRequest]:
    warm = Sampling(temperature=1.0, seed=5)
    asked = [request(name, sampling=warm, logprobs=1) for name in "abc"]
    return [*asked, request("d", sampling=warm, logprobs=0)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "twice"),
        ({"logit_bias": ((5, 1.7e308),)}, "it goes from -10000 to 10000"),
        ({"logit_bias": ((5, float("nan")),)}, "it goes from"),
        ({"top_k": 1.5}, "must be an integer"),
        ({"seed": True}, "must be an integer"),
        ({"seed": 2**64}, "it goes from 0 to"),
        ({"temperature": float("nan")}, "it goes from"),
        ({"top_p": 0.0}, "above 0"),
    ],
)
def test_a_rule_out_of_range_cannot_be_made(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
