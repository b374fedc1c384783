"""What new tokens will bring before anything is fine-tuned: entropy, length, steps, time.

Algorithm 1 adds one token after the other, so one run to the largest budget has all smaller ones in
it. It measures no model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings, enrich
from tasc_jobs.enrich.family import Growing
from tasc_text import TaskTokenizer

_BATCH = 1000


@dataclass(frozen=True)
class Price:
    """What answers cost on a machine, as a straight line: milliseconds of an answer's prompt, and
    of each of its steps, where b rows share the time.
    """

    prompt_ms: float
    step_ms: float

    def of(self, steps: float) -> float:
        return self.prompt_ms + steps * self.step_ms


@dataclass(frozen=True)
class Point:
    """What is to be expected of one token budget.

    Attributes:
        new_tokens: Fewer than the budget where the outputs have no more to give.
        renyi2_bits: Entropy of order 2 of the tokens of the train outputs.
        train_reduction: Tokens of the train outputs without new tokens, by those with them.
        length_reduction: The same of held-out outputs.
        steps_per_answer: Expected without drafts: a token each, and one for the end.
        ms_per_answer: None where no model was measured.
    """

    budget: int
    new_tokens: int
    renyi2_bits: float
    train_reduction: float
    length_reduction: float
    steps_per_answer: float
    ms_per_answer: float | None = None

    def priced(self, price: Price) -> "Point":
        return replace(self, ms_per_answer=price.of(self.steps_per_answer))


def forecast(
    tokenizer: TaskTokenizer,
    train: Sequence[str],
    held_out: Sequence[str],
    settings: EnrichSettings,
    budgets: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, most: None,
) -> tuple[Point, ...]:
    """A point of each budget, rising.

    Args:
        settings: How tokens are chosen; its budget counts for nothing.
        progress: Told the tokens added and the greatest budget.

    Raises:
        FamilyError: A tokenizer of this kind cannot be enriched.
    """
    rising = sorted(set(budgets))
    found = enrich(tokenizer, train, replace(settings, budget=rising[-1]), progress)
    lengths = lengths_by_budget(tokenizer, found, held_out, rising)
    return tuple(
        _point(found, budget, lengths[0], length, len(held_out))
        for budget, length in zip(rising, lengths[1:], strict=True)
    )


def lengths_by_budget(
    tokenizer: TaskTokenizer, found: Enriched, texts: Sequence[str], budgets: Sequence[int]
) -> list[int]:
    """Tokens of texts without new tokens, and with those of each budget."""
    growing = Growing(tokenizer.backend)
    lengths = [_length(growing, texts)]
    for fewer, more in pairwise((0, *budgets)):
        for token in found.tokens[fewer:more]:
            growing.add(token.content)
        lengths.append(_length(growing, texts))
    return lengths


def _point(found: Enriched, budget: int, before: int, after: int, rows: int) -> Point:
    given = found.tokens[:budget]
    last = given[-1] if given else found
    return Point(
        budget=budget,
        new_tokens=len(given),
        renyi2_bits=last.renyi2_bits,
        train_reduction=found.length / max(last.length, 1),
        length_reduction=before / max(after, 1),
        steps_per_answer=after / rows + 1,
    )


def _length(growing: Growing, texts: Sequence[str]) -> int:
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    return sum(len(ids) for batch in batches for ids in growing.encode(batch))
