"""The chaos benchmark with one fault, and what its clients must not overlook."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from chaos_clients import Failed, Question, Tally, ask

BENCHMARK = Path(__file__).with_name("bench_chaos.py")
QUESTION = Question({"model": "m", "prompt": "p"}, "right", 1)
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.mark.ray
@pytest.mark.redis
def test_a_killed_replica_and_a_killed_gateway_cost_no_answer() -> None:
    command = [sys.executable, str(BENCHMARK), "--requests", "400", "--faults", "replica,gateway"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 400
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert min(found["recovery_seconds"].values()) > 0


def said(answer: Answer, stream: bool = False) -> str:
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return ask(client, "http://service/v1/completions", QUESTION, stream, "key")


def event(text: str, reason: str | None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}) + "\n\n"


def test_whole_and_streamed_answers_are_read() -> None:
    whole = {"choices": [{"text": "right"}]}
    assert said(lambda request: httpx.Response(200, json=whole)) == "right"
    events = event("ri", None) + event("ght", "stop") + "data: [DONE]\n\n"
    assert said(lambda request: httpx.Response(200, text=events), stream=True) == "right"


@pytest.mark.parametrize(
    ("response", "stream", "clean"),
    [
        (httpx.Response(503, json={"error": {"message": "later"}}), False, True),
        (httpx.Response(500, text="Internal Server Error"), False, False),
        (httpx.Response(500, text="Internal Server Error"), True, False),
        (httpx.Response(200, text=event("ri", None)), True, False),
        (httpx.Response(200, text='data: {"error": {"message": "x"}}\n\n'), True, True),
    ],
)
def test_errors_are_failures_clean_or_not(
    response: httpx.Response, stream: bool, clean: bool
) -> None:
    with pytest.raises(Failed) as failed:
        said(lambda request: response, stream)
    assert failed.value.clean is clean


def test_wrong_and_duplicated_answers_are_counted_and_shown() -> None:
    tally = Tally()
    for text in ("right", "wrong", "rightright"):
        tally.answered(QUESTION, text)
    assert (tally.requests, tally.wrong, tally.duplicated) == (3, 2, 1)
    assert len(tally.examples) == 2


def test_a_pause_is_the_longest_time_without_an_answer() -> None:
    tally = Tally(answered_at=[1.0, 2.0, 5.0, 6.0, 30.0])
    assert tally.longest_pause(1.5, 10.0) == 4.0
    tally.asking = False
    assert tally.longest_pause(1.5, 10.0) == 3.0
