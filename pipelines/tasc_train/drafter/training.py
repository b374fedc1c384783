"""Training of drafters: their layers and loss, and how often they predict the target's token."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from tasc_engine.drafting.neural.files import SPECIAL
from tasc_engine.model.decoder import FAMILIES
from tasc_train.drafter.hyperparameters import DrafterSettings
from tasc_train.errors import FinetuneError
from tasc_train.finetune.examples import Example, packed
from tasc_train.finetune.training import Trainer

# Fields of a target's config that describe its storage and class; a drafter's config omits them.
_NOT_SHAPE = ("quantization_config", "dtype", "architectures", "model_type", "transformers_version")
# Fields copied into a Llama config when our decoder has no forward pass for the target's family.
_CARRIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
_QUARTER, _MIN_HIDDEN = 4, 8
_WARM_UP = 0.05  # share of all steps


class EagleHead(nn.Module):
    """One layer shaped like the target's, and a norm; without the target's embedding and LM head.

    Attributes:
        joint: Maps the concatenated embedding and hidden state, in this order, to the input of
            ``body``.
        body: A causal LM of one layer; its embedding and LM head have one token and are not used.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_size = int(config.vocab_size)
        width = int(config.hidden_size)
        self.joint = nn.Linear(2 * width, width, bias=False)
        self.body: Any = _made(_changed(config, 1, vocab_size=1, **dict.fromkeys(SPECIAL)))
        for end in (self.body.get_input_embeddings(), self.body.get_output_embeddings()):
            end.requires_grad_(False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Returns ``[R, L, D]``: at j, the predicted hidden state of the target at j + 1.

        Args:
            embedded: ``[R, L, D]``; at j, the embedding of the token at j + 1.
            hidden: ``[R, L, D]``; at j, the hidden state that the target's LM head reads.
        """
        inputs = self.joint(torch.cat((embedded, hidden), -1))
        found: Tensor = self.body.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return found


def eagle_head(target: Any) -> EagleHead:
    """Returns a head with random weights and a copy of the target's norm.

    The norm gives the head's outputs the scale of the target's hidden states.

    Raises:
        FinetuneError: Our decoder does not run the target. An EAGLE head needs hidden states, which
            only our decoder returns.
    """
    family, its_class = target.config.model_type, type(target)
    if FAMILIES.get(family) is not its_class:
        raise FinetuneError(
            f"an EAGLE head needs a target of {', '.join(FAMILIES)}, but this is {family}; use "
            "--kind independent"
        )
    head = EagleHead(target.config)
    with torch.no_grad():
        head.body.model.norm.weight.copy_(target.model.norm.weight)
    return head


def small_model(config: Any, layers: int | None, hidden: int | None) -> Any:
    """Returns a causal LM with random weights and the target's vocabulary.

    Args:
        config: The target's config.
        layers: Number of layers; None: a quarter of the target's, rounded up.
        hidden: Hidden size; None: a quarter of the target's, at least 8.
    """
    target_hidden = int(config.hidden_size)
    hidden = hidden or max(_MIN_HIDDEN, target_hidden // _QUARTER)
    layers = layers or math.ceil(config.num_hidden_layers / _QUARTER)
    head_dim = getattr(config, "head_dim", None) or target_hidden // config.num_attention_heads
    heads = max(1, round(hidden / head_dim))
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    smaller = _changed(
        _family(config),
        layers,
        hidden_size=hidden,
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, kv_heads),
        intermediate_size=max(1, config.intermediate_size * hidden // target_hidden),
    )
    return _made(smaller)


def _made(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _family(config: Any) -> Any:
    """Returns the config if our decoder runs its family, else a Llama config of the same sizes."""
    if config.model_type in FAMILIES:
        return config
    return LlamaConfig(**{name: getattr(config, name) for name in _CARRIED})


def _changed(config: Any, layers: int, **changes: Any) -> Any:
    """Returns a copy with ``layers`` layers of full attention, and with other changes."""
    shape = {k: v for k, v in config.to_dict().items() if k not in _NOT_SHAPE}
    changes |= {"num_hidden_layers": layers}
    for name, value in (
        ("layer_types", ["full_attention"] * layers),
        ("sliding_window", None),
        ("use_sliding_window", False),
    ):
        if name in shape:
            changes[name] = value
    return type(config)(**{**shape, **changes})


class TrainableEagle:
    """An EAGLE head in training. The frozen target's hidden states are computed in every step.

    Args:
        target: A transformers model in evaluation mode.
    """

    def __init__(self, target: Any, settings: DrafterSettings) -> None:
        self._target, self._settings = target, settings
        self._head: Tensor = target.lm_head.weight.detach()
        self.model: EagleHead = eagle_head(target).to(self._head.device)

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """Returns the sum of the losses of the answers' tokens."""
        noise, own_share = self._settings.noise, self._settings.own_share
        predicted, target, _ = self._states(examples, noise, own_share)
        distance = functional.smooth_l1_loss(predicted, target, reduction="none").mean(-1).sum()
        tokens = self._logits(target).softmax(-1)
        entropy = functional.cross_entropy(self._logits(predicted), tokens, reduction="sum")
        return distance + self._settings.token_weight * entropy

    def predictions(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Returns the most likely and the actual tokens of the answers, both ``int64[n]``."""
        predicted, _, ids = self._states(examples, 0.0, 0.0)
        return self._logits(predicted).argmax(-1), ids

    def _states(
        self, examples: Sequence[Example], noise: float, own_share: float
    ) -> tuple[Tensor, ...]:
        """Returns the head's states, the target's states and the ids at answer positions."""
        ids, weights = packed(examples)
        ids, chosen = ids.to(self._head.device), (weights[:, 1:] > 0).to(self._head.device)
        with torch.no_grad():
            hidden = self._target.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            hidden = hidden.float()
            embedded = self._target.get_input_embeddings()(ids[:, 1:-1]).float()
        inputs = self._inputs(embedded, hidden[:, :-1], noise, own_share)
        return self.model(embedded, inputs)[chosen], hidden[:, 1:][chosen], ids[:, 2:][chosen]

    @torch.no_grad()
    def _inputs(self, embedded: Tensor, hidden: Tensor, noise: float, own_share: float) -> Tensor:
        """Returns the target's hidden states with noise, some replaced by the head's own states."""
        inputs = hidden + torch.empty_like(hidden).uniform_(-noise, noise) if noise else hidden
        if not own_share:
            return inputs
        own = torch.cat((hidden[:, :1], self.model(embedded, inputs)[:, :-1]), 1)
        return torch.where(torch.rand_like(hidden[..., :1]) < own_share, own, inputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.to(self._head.dtype), self._head).float()


class TrainableSmallModel:
    """A small model in training on the target's answers; the target itself is not needed.

    Args:
        config: The target's config.
    """

    def __init__(self, config: Any, settings: DrafterSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self.model: Any = small_model(config, settings.layers, settings.hidden).to(device)

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """Returns the sum of the weighted losses of the rows' tokens."""
        logits, ids, weights = self._logits(examples, self._settings.prompt_weight)
        return (functional.cross_entropy(logits, ids, reduction="none") * weights).sum()

    def predictions(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """See `TrainableEagle.predictions`."""
        logits, ids, _ = self._logits(examples, 0.0)
        return logits.argmax(-1), ids

    def _logits(self, examples: Sequence[Example], prompt_weight: float) -> tuple[Tensor, ...]:
        """Returns logits, target tokens and weights at the positions with a weight above 0."""
        ids, weights = (each.to(self._device) for each in packed(examples, prompt_weight))
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        chosen = weights > 0
        logits = self.model.lm_head(hidden[chosen]).float()
        return logits, ids[:, 1:][chosen], weights[chosen]


Trainable: TypeAlias = TrainableEagle | TrainableSmallModel


class DrafterTrainer(Trainer):
    """The training loop of a drafter; the learning rate rises linearly, then falls to 0."""

    def __init__(
        self, trainable: Trainable, examples: Sequence[Example], settings: DrafterSettings
    ) -> None:
        super().__init__(trainable.model, examples, settings)
        self._trainable = trainable

    def _share(self, step: int) -> float:
        rising = max(1, round(_WARM_UP * self.steps))
        return min((step + 1) / rising, 1 - max(0, step - rising) / max(1, self.steps - rising))

    def loss(self, rows: Sequence[int]) -> Tensor:
        return self._trainable.loss(self._at(rows))


@torch.no_grad()
def agreement(trainable: Trainable, examples: Sequence[Example], micro_rows: int) -> float:
    """Returns the share of the answers' tokens that the drafter predicts as the most likely."""
    trainable.model.eval()
    right = total = 0
    for start in range(0, len(examples), micro_rows):
        predicted, ids = trainable.predictions(examples[start : start + micro_rows])
        right += int((predicted == ids).sum())
        total += len(ids)
    return right / total if total else 0.0
