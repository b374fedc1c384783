"""Rows held out of a task's corpus, for learning weights and for judging settings.

Weights are learnt from one half, and settings are judged on the other half. The index that drafts
come from has neither half.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tasc_draft import NGRAM_SOURCES, BigramTable, DraftIndex, DraftSettings, Int32, Replay
from tasc_draft.index.weights import Weights
from tasc_draft.replaying import MIN_ROWS, held_out, learn_weights
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.replays import GuidedAnswers, run
from tasc_protocol import GuideSpec
from tasc_runtime.data.local_corpus import TokenRows, index_of
from tasc_text import TaskTokenizer


class HeldOut:
    """Held-out rows and an index of the other rows.

    Args:
        branching: Whether drafts are trees; otherwise they are chains.
        bigrams: The target model's bigram table, if there is one.
        max_bytes: Maximum bytes of the index's corpus part, if limited.
        guide: The guide of the task's answers, if they have one.

    Attributes:
        guided: The tokens that the guide forces.
        judging: Prompt and answer ids of the judging rows.

    Raises:
        JobError: There are too few rows to hold some out, or the guide cannot be compiled.
    """

    def __init__(
        self,
        rows: TokenRows,
        tokenizer: TaskTokenizer,
        *,
        branching: bool,
        bigrams: BigramTable | None = None,
        max_bytes: int | None = None,
        guide: GuideSpec | None = None,
    ) -> None:
        if len(rows) < MIN_ROWS:
            raise JobError(
                f"the corpus has {len(rows)} rows; at least {MIN_ROWS} are needed to hold some "
                "out: ingest more"
            )
        kept, held = held_out(len(rows))
        inner = index_of(rows.take(kept), tokenizer, max_bytes=max_bytes)
        self._inner = replace(inner, bigrams=bigrams)
        self._tokenizer = tokenizer
        self._branching = branching
        self._held, self._teaching = rows.take(held), rows.take(held[::2])
        self.judging = rows.take(held[1::2]).answers(tokenizer.eos_id)
        answers = [answer for _, answer in self.judging]
        self.guided = GuidedAnswers.of(guide, answers, tokenizer) if guide else GuidedAnswers()
        prompts = [prompt for prompt, _ in self.judging]
        self._shared = _shared(prompts)

    @property
    def rows(self) -> int:
        """Number of judging rows."""
        return len(self.judging)

    @property
    def context(self) -> float:
        """Mean number of tokens of a judging row when half of its answer is decoded."""
        return sum(len(p) + len(a) / 2 for p, a in self.judging) / len(self.judging)

    @property
    def prompt_tokens(self) -> float:
        """Mean number of tokens of a judging row's prompt, without the prompts' common prefix."""
        return sum(len(p) - self._shared for p, _ in self.judging) / len(self.judging)

    def index(self, settings: DraftSettings, weights: Weights | None) -> DraftIndex:
        """Returns the index of the rows that are not held out, with these settings and weights."""
        return replace(self._inner, weights=weights, settings=settings)

    @property
    def sources(self) -> tuple[str, ...]:
        """The draft sources that have data."""
        silent = set()
        if self._inner.aligned is None:
            silent.add("aligned")
        if self._inner.bigrams is None:
            silent.add("bigrams")
        return tuple(name for name in NGRAM_SOURCES if name not in silent)

    def weights(self, settings: DraftSettings, *, final: bool = False) -> Weights:
        """Returns weights learnt from the half that is not used for judging.

        Args:
            final: Whether to learn from all held-out rows, because judging is finished.
        """
        rows, eos_id = self._held if final else self._teaching, self._tokenizer.eos_id
        return learn_weights(
            self._inner, rows.prompts, rows.outputs, eos_id=eos_id, settings=settings
        )

    def replay(
        self,
        settings: DraftSettings,
        weights: Weights | None,
        progress: Callable[[], None] = lambda: None,
    ) -> Replay:
        """Replay the judging rows."""
        return run(
            replace(self._inner, weights=weights),
            self.judging,
            settings,
            branching=self._branching,
            tokenizer=self._tokenizer,
            progress=progress,
            guided=self.guided,
        )


def _shared(prompts: Sequence[Int32]) -> int:
    """Returns the length of the prompts' common prefix, which is shorter than each prompt."""
    first = prompts[0]
    shared = min(len(prompt) for prompt in prompts) - 1
    for prompt in prompts:
        differ = np.flatnonzero(prompt[:shared] != first[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return max(shared, 0)
