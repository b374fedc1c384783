"""Compiles grammars for llguidance, here or in a process of its own that may die of one.

Most of what it does is bounded by its limits. Some is not (a negated terminal that may match in
many ways, ``multipleOf`` a large number): it would compile for hours. So each new grammar is first
compiled by this file run as a program, which the system ends when it has used its seconds of
processor time or its memory. It imports nothing of the project, so that it starts at once, and
knows no answers.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Half of a mask's fuel and an eighth of the states that llguidance grants. So the worst masks took
# some 30 ms at 100,000 tokens, and a lexer holds about 30 MB. An enumeration of 2,000 labels, the
# hungriest of what people write, takes less than half of the fuel.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 30_000,
    "verbose_errors": False,
}
_MOST_WORDS = 300  # characters of a reason


def make_tokens(tokenizer: str, vocab_size: int, eos_id: int) -> "LLTokenizer":
    """A tokenizer as llguidance has it, from a ``tokenizer.json``.

    Raises:
        ValueError: It is of a kind that llguidance does not know.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_id)


def make_matcher(tokens: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A grammar at its begin; whether it is one, `refusal` says."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def refusal(matcher: "LLMatcher", eos_id: int) -> str:
    """Why no answer can be guided by it; empty where one can. The matcher is used up."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << eos_id)
    if matcher.is_error():
        return reason(matcher)
    if not mask:
        return "it allows no answer, or only an empty one"
    matcher.consume_token((mask & -mask).bit_length() - 1)
    matcher.rollback(1)
    return reason(matcher)


def reason(matcher: "LLMatcher") -> str:
    """The error of a matcher in few words; empty if there is none."""
    told = matcher.get_error().split("\n<")[0]
    lines = [line for line in told.splitlines() if line.startswith("error: ")] or [told]
    words = " ".join(lines[0].split())[:_MOST_WORDS]
    return words.replace("NoExtensionBias", "no token may follow")


def main() -> None:
    """Answer each line, a grammar as JSON, with its refusal as JSON; the first line is about it."""
    about = json.loads(sys.stdin.readline())
    tokens = make_tokens(about["tokenizer"], about["vocab_size"], about["eos_id"])
    _limit_memory(about["bytes"])
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, about["seconds"])  # ends the process when it is over
        try:
            told = refusal(make_matcher(tokens, json.loads(line)), about["eos_id"])
        except MemoryError:
            os.abort()  # as where the library itself runs out of it
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(told), flush=True)


def _limit_memory(more: int) -> None:
    """Let this process take so much more than it has, where the system tells what it has."""
    told = Path("/proc/self/statm")
    if told.exists():
        most = int(told.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
