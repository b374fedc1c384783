"""Proposers by name, as they are compared in a replay: settings, shape, what their index holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tasc_draft import DraftSettings
from tasc_jobs.errors import JobError


class Reads(Enum):
    """What a proposer's index is built from."""

    NOTHING = "nothing"
    OUTPUTS = "outputs"
    ALL = "prompts and outputs"


@dataclass(frozen=True)
class NamedProposer:
    """A proposer to compare. ``settings`` hold no budget and no recent answers yet."""

    name: str
    settings: DraftSettings
    branching: bool
    reads: Reads

    @property
    def learns(self) -> bool:
        """Whether it has weights."""
        return self.settings.mixture == "mixed"


_MIXED = DraftSettings(min_prob=0.0, recent_tokens=0)
_TASC = DraftSettings(mixture="tasc", min_prob=0.0)
_CORPUS = DraftSettings(mixture="tasc", min_prob=0.0, corpus_weight=1.0)
_BIGRAMS = DraftSettings(min_prob=0.0, recent_tokens=0, sources=("bigrams",))
PROPOSERS = {
    p.name: p
    for p in (
        NamedProposer("mixed", _MIXED, True, Reads.ALL),
        NamedProposer("mixed-chain", _MIXED, False, Reads.ALL),
        NamedProposer("tasc", _TASC, False, Reads.OUTPUTS),
        NamedProposer("tasc-tree", _TASC, True, Reads.OUTPUTS),
        NamedProposer("corpus", _CORPUS, False, Reads.OUTPUTS),
        NamedProposer("trie", DraftSettings.published("trie"), True, Reads.NOTHING),
        NamedProposer("bigrams", _BIGRAMS, True, Reads.NOTHING),
    )
}


def named_proposers(names: Sequence[str], bigrams: bool) -> list[NamedProposer]:
    """The proposers of these names, each once, in this order.

    Args:
        bigrams: Whether there is a table of the target's own bigrams.

    Raises:
        JobError: A name is unknown, or ``bigrams`` is asked for without a table.
    """
    for name in names:
        if name not in PROPOSERS:
            raise JobError(f"proposer {name!r} is unknown; there are {', '.join(PROPOSERS)}")
        if name == "bigrams" and not bigrams:
            raise JobError("proposer bigrams needs --bigrams FILE; `tasc model-bigrams` makes one")
    return [PROPOSERS[name] for name in dict.fromkeys(names)]
