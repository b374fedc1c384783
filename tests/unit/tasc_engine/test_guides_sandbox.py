"""The process that compiles grammars first: what ends it, and what that says of a grammar."""

import os
import signal
from pathlib import Path

import pytest
from guide_walks import allowed, regex

from tasc_engine.errors import GuideError
from tasc_engine.guides import GuideLimits, Guides, sandbox
from tasc_engine.guides.sandbox import Effort, Sandbox, Unsettled
from tasc_text import TaskTokenizer

GRAMMAR = '{"grammars": [{"lark_grammar": "start: \\"friday\\""}]}'


def made(tokenizer: TaskTokenizer) -> Sandbox:
    text = tokenizer.backend.to_str()
    return Sandbox(text, tokenizer.vocab_size, tokenizer.eos_id, Effort(30.0, 2**26))


def pid(asked: Sandbox) -> int:
    assert asked._process
    return asked._process.pid


@pytest.mark.parametrize("wait", [False, True])
def test_a_process_that_was_killed_says_nothing_of_the_next_grammar(
    tokenizer: TaskTokenizer, wait: bool
) -> None:
    asked = made(tokenizer)
    assert not asked.refusal(GRAMMAR)
    first = pid(asked)
    os.kill(first, signal.SIGKILL)
    if wait:
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert not asked.refusal(GRAMMAR)
    assert pid(asked) != first


def test_a_process_that_stands_still_is_ended_and_nothing_is_kept(
    tokenizer: TaskTokenizer,
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, GuideLimits(compile_seconds=0.1))
    assert allowed(guides.of(regex("alarm"), 99))
    os.kill(pid(guides._library._sandbox), signal.SIGSTOP)
    with pytest.raises(GuideError, match="took too long: more than 0.5 s"):
        guides.of(regex("friday"), 99)
    assert not guides.known(regex("friday"))
    assert allowed(guides.of(regex("friday"), 99))
    assert guides.known(regex("friday"))


def test_a_process_that_ends_twice_settles_nothing(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ends.py"
    program.write_text("input(); print('\"\"', flush=True); input(); raise SystemExit(7)")
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    with pytest.raises(Unsettled, match="ended twice .by 7"):
        made(tokenizer).refusal(GRAMMAR)
    program.write_text("raise SystemExit(3)")
    with pytest.raises(Unsettled, match="ended at once .3"):
        made(tokenizer).refusal(GRAMMAR)
    monkeypatch.setattr(sandbox.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(Unsettled, match="does not start"):
        made(tokenizer).refusal(GRAMMAR)


def test_a_process_compiles_so_many_grammars(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MOST_ASKED", 2)
    asked = made(tokenizer)
    pids = [(asked.refusal(GRAMMAR), pid(asked))[1] for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
