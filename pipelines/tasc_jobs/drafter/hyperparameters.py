"""Settings of a drafter's training. Loss weights of an EAGLE head: arXiv 2401.15077."""

from dataclasses import dataclass
from typing import Annotated

from tasc_engine.drafting.neural.card import Kind
from tasc_jobs.finetune.hyperparameters import BatchRows, LoopSettings, MicroRows, Setting

# Settings that only one kind has.
OF_KIND: dict[Kind, tuple[str, ...]] = {
    "eagle": ("token_weight", "noise", "own_share"),
    "independent": ("prompt_weight", "layers", "hidden"),
}


@dataclass(frozen=True)
class DrafterSettings(LoopSettings):
    """Settings of a drafter's training, which are also options of a command.

    With the target and its answers they give the same drafter.

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

    kind: Annotated[
        Kind,
        Setting(help="eagle: a layer over the model's hidden states; independent: a small model."),
    ]
    epochs: Annotated[float, Setting(min=0.01, max=1000, help="Passes over the answers.")] = 10.0
    learning_rate: Annotated[float, Setting(min=0, max=1, help="Greatest learning rate.")] = 1e-3
    batch_rows: BatchRows = 32
    micro_rows: MicroRows = 8
    max_length: Annotated[
        int, Setting(min=3, help="Maximum tokens of prompt and answer; longer rows are left out.")
    ] = 1024
    token_weight: Annotated[
        float,
        Setting(
            min=0,
            max=1000,
            help="Weight of an EAGLE head's cross-entropy; raise it for small models.",
        ),
    ] = 0.1
    noise: Annotated[
        float,
        Setting(min=0, max=100, help="Noise on the hidden states that an EAGLE head reads."),
    ] = 0.1
    own_share: Annotated[
        float,
        Setting(
            min=0, max=1, help="Share of the hidden states that an EAGLE head replaces by its own."
        ),
    ] = 0.5
    prompt_weight: Annotated[
        float,
        Setting(min=0, max=1, help="Weight of prompt tokens for an independent drafter."),
    ] = 0.1
    layers: Annotated[
        int | None,
        Setting(
            min=1, help="Layers of an independent drafter.", show_default="a quarter of the model's"
        ),
    ] = None
    hidden: Annotated[
        int | None,
        Setting(
            min=8, help="Width of an independent drafter.", show_default="a quarter of the model's"
        ),
    ] = None
    seed: Annotated[int, Setting(min=0, help="Seed of initial values, row order and noise.")] = 0
