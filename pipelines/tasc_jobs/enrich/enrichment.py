"""Enriches a tokenizer by a task's outputs, and says what that saves. It trains nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings
from tasc_jobs.enrich.refine import refined
from tasc_jobs.enrich.saving import require_new, require_same_texts, save
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.runtime.stages import StageProgress, silent
from tasc_text import TaskTokenizer

STAGES = {"merge": "tokens", "check": "texts"}


@dataclass(frozen=True)
class EnrichReport:
    """What new tokens save on some outputs.

    Attributes:
        judged_on: ``test``: outputs that no token was chosen by; ``train``: those that were.
        new_tokens: Added; fewer than the budget where the outputs had no more to give.
        tokens_before: Of all judged outputs, as the base tokenizer has them.
        length_reduction: Tokens before, by tokens after.
    """

    judged_on: str
    budget: int
    new_tokens: int
    collided: int
    unwritable: int
    tokens_before: int
    tokens_after: int
    bytes_per_token_before: float
    bytes_per_token_after: float
    length_reduction: float
    output: str

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def in_words(self) -> str:
        fewer = "" if self.new_tokens == self.budget else f" (of {self.budget}: there is no more)"
        return (
            f"{self.new_tokens} new tokens{fewer}; {self.judged_on} outputs have "
            f"{self.length_reduction:.2f} x fewer tokens ({self.tokens_before:,} -> "
            f"{self.tokens_after:,}); left out: {self.collided} for collisions, {self.unwritable} "
            f"whose text cannot be a token's\n{self.output}"
        )


def enrich_and_save(
    tokenizer: TaskTokenizer,
    train: Sequence[str],
    settings: EnrichSettings,
    output: Path,
    *,
    test: Sequence[str] = (),
    others: Sequence[str] = (),
    progress: StageProgress = silent,
) -> EnrichReport:
    """Choose tokens by ``train`` outputs, and save the tokenizer in the folder ``output``.

    Args:
        test: Outputs to judge by; without any, ``train`` is judged.
        others: Further texts, such as inputs, that must be read back as before.

    Raises:
        EmptyCorpusError: There are no outputs.
        FamilyError: Texts would not be read back as before, or transformers would not find the
            new tokens; nothing is saved.
        FileError: The folder is there already, or cannot be written.
    """
    require_new(output)
    if not any(train):
        raise EmptyCorpusError("there are no outputs to take n-grams from; ingest some")
    found = refined(tokenizer, train, settings, lambda done, most: progress("merge", done, most))
    texts = [*train, *test, *others]
    progress("check", 0, len(texts))
    require_same_texts(tokenizer.backend, found.tokenizer, texts)
    progress("check", len(texts), len(texts))
    saved = save(found, settings, tokenizer, output, train)
    return _report(tokenizer, saved, found, settings, test or train, bool(test), output)


def _report(
    base: TaskTokenizer,
    saved: TaskTokenizer,
    found: Enriched,
    settings: EnrichSettings,
    judged: Sequence[str],
    held_out: bool,
    output: Path,
) -> EnrichReport:
    size = sum(len(text.encode()) for text in judged)
    before, after = (sum(map(len, t.encode_outputs(judged))) for t in (base, saved))
    return EnrichReport(
        judged_on="test" if held_out else "train",
        budget=settings.budget,
        new_tokens=len(found.tokens),
        collided=found.collided,
        unwritable=found.unwritable,
        tokens_before=before,
        tokens_after=after,
        bytes_per_token_before=size / max(before, 1),
        bytes_per_token_after=size / max(after, 1),
        length_reduction=before / max(after, 1),
        output=str(output),
    )
