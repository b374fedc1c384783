"""The tokens of known answers that a task's guide forces, for replays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Int32
from tasc_draft.labels import LabelTrie
from tasc_engine.errors import GuideError
from tasc_jobs.errors import JobError
from tasc_protocol import GuideSpec
from tasc_text import TaskTokenizer

if TYPE_CHECKING:
    from tasc_engine.guided import Guide


@dataclass(frozen=True)
class GuidedAnswers:
    """The labels or the tokens that a guide prescribes for some answers.

    Attributes:
        labels: The labels to which answers are limited, if the guide is a set of labels.
        forced: For each answer, a mask ``bool[n]`` of the tokens that its guide forces, or None if
            the guide does not allow the answer. None if ``labels`` determine the forced tokens.
    """

    labels: LabelTrie | None = None
    forced: Sequence[NDArray[np.bool_] | None] | None = None

    @classmethod
    def of(cls, spec: GuideSpec, answers: Sequence[Int32], tokenizer: TaskTokenizer) -> Self:
        """Find the tokens that a guide forces in answers.

        An answer that the guide does not allow counts as not guided.

        Args:
            answers: Token ids of answers, with end-of-sequence.

        Raises:
            JobError: The guide cannot be compiled.
        """
        from tasc_engine.guided import Guides  # imports torch, which other replays do not need

        guides = Guides(tokenizer, tokenizer.vocab_size)
        try:
            labels = guides.of(spec).labels
            if labels is not None:
                return cls(labels)
            return cls(forced=[_forced(guides.of(spec), answer) for answer in answers])
        except GuideError as error:
            raise JobError(f"the task's {spec.kind} cannot be followed: {error}") from error


def _forced(guide: "Guide", answer: Int32) -> NDArray[np.bool_] | None:
    found, at = np.zeros(len(answer), bool), 0
    while at < len(answer):
        stretch = guide.forced(len(answer) - at)
        if len(stretch):
            if not np.array_equal(stretch, answer[at : at + len(stretch)]):
                return None
            found[at : at + len(stretch)] = True
            guide.advance(stretch)
            at += len(stretch)
        else:
            guide.advance(answer[at : at + 1])
            at += 1
        if guide.error:
            return None
    return found
