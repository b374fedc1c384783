"""Compiles grammars for llguidance, in this process or in a separate one that may be killed.

llguidance's limits bound most of its work, but not all. Some grammars would compile for hours, such
as a negated terminal that may match in many ways, or ``multipleOf`` with a large number. So each
new grammar is first compiled in a separate process that runs this file. The system ends the process
if it exceeds its limit of processor time or memory. This file imports nothing from the project, so
that the process starts quickly.
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

# Half of llguidance's default fuel per mask, and about an eighth of its default lexer states. With
# these limits, the slowest masks took some 30 ms with a vocabulary of 100,000 tokens, and a lexer
# holds about 30 MB. An enumeration of 2,000 labels, the most expensive of the usual schemas,
# takes less than half of the fuel.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 30_000,
    "verbose_errors": False,
}
_MAX_REASON_CHARS = 300


def make_tokens(tokenizer: str, vocab_size: int, eos_id: int) -> "LLTokenizer":
    """Makes llguidance's tokenizer from a ``tokenizer.json``.

    Raises:
        ValueError: llguidance does not support this kind of tokenizer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_id)


def make_matcher(tokens: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Makes a matcher at the start of a grammar; `refusal` checks the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def refusal(matcher: "LLMatcher", eos_id: int) -> str:
    """The reason why a grammar cannot guide answers; empty if it can. Consumes the matcher."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << eos_id)
    if matcher.is_error():
        return reason(matcher)
    if not mask:
        return "it allows no answer, or only an empty one"
    matcher.consume_token((mask & -mask).bit_length() - 1)
    matcher.rollback(1)
    return reason(matcher)


def reason(matcher: "LLMatcher") -> str:
    """The short error of a matcher; empty if the matcher has no error."""
    message = matcher.get_error().split("\n<")[0]
    lines = [line for line in message.splitlines() if line.startswith("error: ")] or [message]
    words = " ".join(lines[0].split())[:_MAX_REASON_CHARS]
    return words.replace("NoExtensionBias", "no token may follow")


def main() -> None:
    """Reads settings from the first line; answers each later line, a grammar, with its refusal.

    All lines and answers are JSON.
    """
    about = json.loads(sys.stdin.readline())
    tokens = make_tokens(about["tokenizer"], about["vocab_size"], about["eos_id"])
    _limit_memory(about["bytes"])
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, about["seconds"])  # ends the process at the limit
        try:
            message = refusal(make_matcher(tokens, json.loads(line)), about["eos_id"])
        except MemoryError:
            os.abort()  # as llguidance does when it runs out of memory
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(message), flush=True)


def _limit_memory(more: int) -> None:
    """Limits this process to ``more`` bytes above its current memory, if the system reports it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        max_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


if __name__ == "__main__":
    main()
