"""What surrounds decoding: admission, refusal, cancellation, stop strings, records."""

import pytest

from tasc_draft import SOURCES
from tasc_engine import EngineTotals, GenerationRequest, QueueFull, RequestTooLong

PROMPT = (5, 9, 30, 41, 7)


def run(engine, request):
    (result,) = engine.generate([request])
    return result


def test_a_request_too_long_for_a_row_is_refused_with_both_numbers(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(RequestTooLong, match=r"5 tokens.*60\).*65, a row holds 64"):
        engine.submit(GenerationRequest("a", PROMPT, 60))
    assert run(engine, GenerationRequest("b", PROMPT, 59)).finish_reason == "length"


def test_a_row_may_be_filled_to_its_last_token(make_engine) -> None:
    engine = make_engine()
    assert len(run(engine, GenerationRequest("a", PROMPT, 59)).tokens) == 59
    engine.check_integrity()


@pytest.mark.parametrize("prompt", [(5, 10**6), (-1,)])
def test_ids_outside_the_vocabulary_are_refused(make_engine, prompt) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        make_engine().submit(GenerationRequest("a", prompt, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"max_tokens": 0}, "least is 1"),
        ({"stop": ("",)}, "stop string is empty"),
    ],
)
def test_a_request_that_makes_no_sense_cannot_be_made(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationRequest(**{"id": "a", "prompt": PROMPT, "max_tokens": 3, **fields})


def test_the_queue_has_an_exact_bound(make_engine) -> None:
    engine = make_engine(rows=2, max_waiting=3)
    for i in range(5):
        engine.submit(GenerationRequest(str(i), PROMPT, 4))
    with pytest.raises(QueueFull, match="5 requests wait"):
        engine.submit(GenerationRequest("over", PROMPT, 4))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 3)
    with pytest.raises(QueueFull):
        engine.submit(GenerationRequest("over", PROMPT, 4))


def test_a_cancelled_row_is_free_for_the_next_step(make_engine) -> None:
    engine = make_engine(rows=1)
    alone = run(engine, GenerationRequest("alone", PROMPT, 9)).tokens
    engine.submit(GenerationRequest("long", (3, 4), 40))
    engine.submit(GenerationRequest("next", PROMPT, 9))
    engine.step()
    assert engine.cancel("long")
    assert not engine.cancel("long")
    engine.check_integrity()
    tokens = [d.result.tokens for _ in range(20) for d in engine.step() if d.result]
    assert tokens == [alone]


def test_a_waiting_request_can_be_cancelled(make_engine) -> None:
    engine = make_engine(rows=1)
    engine.submit(GenerationRequest("first", PROMPT, 3))
    engine.submit(GenerationRequest("second", PROMPT, 3))
    assert engine.cancel("second")
    ids = [d.result.id for _ in range(5) for d in engine.step() if d.result]
    assert ids == ["first"]


def test_a_stop_string_cuts_text_and_tokens_alike_with_and_without_drafts(
    make_engine, tokenizer
) -> None:
    whole = run(make_engine(), GenerationRequest("whole", PROMPT, 40))
    stop = whole.text[8:11]
    at = whole.text.index(stop)
    found = [
        run(make_engine(), GenerationRequest("a", PROMPT, 40, stop=(stop,), draft=draft))
        for draft in (True, False)
    ]
    assert found[0].tokens == found[1].tokens
    for result in found:
        assert result.text == whole.text[:at]
        assert result.finish_reason == "stop"
        assert result.tokens == whole.tokens[: len(result.tokens)]
        assert stop in tokenizer.decode(result.tokens)
        assert stop not in tokenizer.decode(result.tokens[:-1])


def test_streamed_text_adds_up_to_the_whole(make_engine) -> None:
    whole = run(make_engine(), GenerationRequest("whole", PROMPT, 40)).text
    engine = make_engine()
    engine.submit(GenerationRequest("a", PROMPT, 40, stream=True))
    deltas = [d for _ in range(41) for d in engine.step()]
    assert len([d for d in deltas if d.text]) > 3
    assert "".join(d.text for d in deltas) == whole == deltas[-1].result.text
    assert sum((d.tokens for d in deltas), ()) == deltas[-1].result.tokens


def test_records_add_up_to_what_was_emitted(make_engine) -> None:
    totals = EngineTotals(len(SOURCES), 4)
    engine = make_engine(on_step=totals.add)
    results = list(engine.generate(GenerationRequest(str(i), PROMPT, 20 + i) for i in range(5)))
    emitted = sum(len(r.tokens) for r in results)
    assert totals.drafted.sum() > 0
    assert totals.emitted_tokens == emitted
    assert totals.row_steps == sum(r.acceptance.steps for r in results)
    assert totals.accepted.sum() == sum(sum(r.acceptance.accepted) for r in results)
    assert totals.drafted.sum() == sum(sum(r.acceptance.drafted) for r in results)
    assert totals.prompt_tokens == 5 * len(PROMPT)
    assert (totals.accepted <= totals.drafted).all()
    assert totals.block_efficiency == emitted / totals.row_steps


def test_drafting_off_at_construction_decodes_plainly(make_engine) -> None:
    drafted = run(make_engine(), GenerationRequest("a", PROMPT, 30))
    plain = run(make_engine(drafts=0), GenerationRequest("a", PROMPT, 30))
    assert sum(drafted.acceptance.drafted) > 0
    assert not any(plain.acceptance.drafted)
    assert drafted.tokens == plain.tokens


def test_timings_are_ordered(make_engine) -> None:
    engine = make_engine(rows=1)
    results = list(engine.generate(GenerationRequest(str(i), PROMPT, 5) for i in range(3)))
    assert len(results) == 3
    assert all(0 <= r.timings.queued <= r.timings.first_token <= r.timings.total for r in results)


def test_an_idle_engine_steps_without_effect(make_engine) -> None:
    assert make_engine().step() == []
