"""Settings of a drafter's training. Loss weights of an EAGLE head: arXiv 2401.15077."""

from dataclasses import dataclass
from typing import Annotated

from tasc_engine.drafting.neural.card import Kind
from tasc_train.finetune.hyperparameters import BatchRows, LoopSettings, MicroRows, Setting

# Settings that only one kind of drafter has.
OF_KIND: dict[Kind, tuple[str, ...]] = {
    "eagle": ("token_weight", "noise", "own_share"),
    "independent": ("prompt_weight", "layers", "hidden"),
}


@dataclass(frozen=True)
class DrafterSettings(LoopSettings):
    """Settings of a drafter's training, which are also options of a command.

    Together with the target and its answers they determine the drafter.

    Attributes:
        kind: ``eagle``, a layer over the target's hidden states, or ``independent``, a small model.
        epochs: Passes over the answers; 2.5 stops in the middle of the third.
        learning_rate: Learning rate at the end of the warm-up, after which it decays linearly to 0.
        batch_rows: Rows per optimizer step.
        micro_rows: Rows per forward pass; affects memory and speed.
        max_length: Maximum tokens of prompt and answer together; longer rows are left out and
            counted.
        token_weight: Weight of an EAGLE head's cross-entropy with the target's prediction, relative
            to the distance between the head's hidden states and the target's. Raise the weight for
            small targets.
        noise: Maximum absolute value of the noise added to each number of the hidden states that a
            head reads, because the states that a head predicts in use are inexact.
        own_share: Share of the hidden states that are replaced by the head's own predictions in
            training. In use, a head reads only its own predictions after the first token of a
            draft. A share above 0 needs one more forward pass of the head.
        prompt_weight: Weight of a small model's cross-entropy at tokens of a prompt; at tokens of
            an answer it is 1.
        layers, hidden: Number of layers and hidden size of a small model; None: a quarter of the
            target's.
        seed: Seed of the initial values, of the row order and of the noise.
    """

    kind: Annotated[
        Kind,
        Setting(help="eagle: a layer over the model's hidden states; independent: a small model."),
    ]
    epochs: Annotated[float, Setting(min=0.01, max=1000, help="Passes over the answers.")] = 10.0
    learning_rate: Annotated[float, Setting(min=0, max=1, help="Maximum learning rate.")] = 1e-3
    batch_rows: BatchRows = 32
    micro_rows: MicroRows = 8
    max_length: Annotated[
        int,
        Setting(min=3, help="Maximum tokens of prompt and answer; longer rows are left out."),
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
            min=0,
            max=1,
            help="Share of the hidden states that are replaced by an EAGLE head's own predictions "
            "in training.",
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
            min=8,
            help="Hidden size of an independent drafter.",
            show_default="a quarter of the model's",
        ),
    ] = None
    seed: Annotated[int, Setting(min=0, help="Seed of initial values, row order and noise.")] = 0
