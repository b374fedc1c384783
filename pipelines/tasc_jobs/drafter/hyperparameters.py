"""Settings of a drafter's training. Loss weights of an EAGLE head: arXiv 2401.15077."""

from dataclasses import dataclass
from typing import Any

from tasc_engine.drafting.neural.card import Kind
from tasc_jobs.errors import UsageError

# Settings that only one kind has.
_EAGLE, _INDEPENDENT = ("token_weight", "noise", "own_share"), ("prompt_weight", "layers", "hidden")


@dataclass(frozen=True)
class DrafterSettings:
    """What a drafter is reproducible by, with its target and the target's answers.

    Attributes:
        kind: ``eagle``, a layer over the target's hidden states, or ``independent``, a small model.
        epochs: Passes over the answers; 2.5 ends in the middle of the third.
        learning_rate: The greatest, at the end of the warm-up; it falls to 0 in a straight line.
        batch_rows: Rows of one step of the optimizer.
        micro_rows: Rows that go through the models together: a matter of memory and speed.
        max_length: Tokens of prompt and answer together; longer rows are left out, and counted.
        token_weight: Of an EAGLE head's cross-entropy with what the target says, beside how far its
            hidden state is from the target's. Raise it for small targets.
        noise: Most that is added to, or taken from, each number of the hidden states a head reads,
            as its own will not be right.
        own_share: Of the hidden states a head reads, how many are its own guesses of them: behind
            the first token of a draft it has no others. Costs one more forward of the head.
        prompt_weight: Of a small model's cross-entropy at a token of a prompt; at an answer's it
            is 1.
        layers, hidden: Of a small model; None: a quarter of the target's.
        seed: Of first values, of the rows' order and of the noise.
    """

    kind: Kind
    epochs: float = 10.0
    learning_rate: float = 1e-3
    batch_rows: int = 32
    micro_rows: int = 8
    max_length: int = 1024
    token_weight: float = 0.1
    noise: float = 0.1
    own_share: float = 0.5
    prompt_weight: float = 0.1
    layers: int | None = None
    hidden: int | None = None
    seed: int = 0


def of_kind(kind: Kind, **given: float | None) -> dict[str, Any]:
    """Settings that only one kind of drafter has, of those given; None was not given.

    Raises:
        UsageError: One is the other kind's.
    """
    found = {name: value for name, value in given.items() if value is not None}
    other: Kind = "independent" if kind == "eagle" else "eagle"
    for name in _INDEPENDENT if kind == "eagle" else _EAGLE:
        if name in found:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} is {found[name]}, and only --kind {other} has it; this is --kind "
                f"{kind}, leave it out"
            )
    return found
