"""Drafters in training: their layers, their loss, and how often they agree with the target."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from tasc_engine.drafting.neural.files import SPECIAL
from tasc_engine.model.decoder import FAMILIES
from tasc_jobs.drafter.hyperparameters import DrafterSettings
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.examples import Example, packed
from tasc_jobs.finetune.training import Trainer

# Of a target's config, what says how it is kept or run and not what it computes.
_NOT_SHAPE = ("quantization_config", "dtype", "architectures", "model_type", "transformers_version")
# And what a Llama's config has of a family that is run as one.
_CARRIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
_QUARTER, _LEAST_HIDDEN = 4, 8
_WARM_UP = 0.05  # of all steps


class EagleHead(nn.Module):
    """One layer like the target's own, with a norm behind it and nothing of the target in it.

    Attributes:
        joint: Makes an input of an embedding, first, and a hidden state.
        body: A causal LM of one layer, whose ends of one token are not used.
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
        """``[R, L, D]``: at j the guess of the target's hidden state at j + 1.

        Args:
            embedded: ``[R, L, D]`` the embedding of the token at j + 1.
            hidden: ``[R, L, D]`` what the target's LM head reads at j.
        """
        inputs = self.joint(torch.cat((embedded, hidden), -1))
        found: Tensor = self.body.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return found


def eagle_head(target: Any) -> EagleHead:
    """A head with random weights and the target's norm, so that its outputs have the same scale.

    Raises:
        FinetuneError: The target's own code runs it, which gives no hidden states.
    """
    family, its_class = target.config.model_type, type(target)
    if FAMILIES.get(family) is not its_class:
        raise FinetuneError(
            f"an EAGLE head needs a target of {', '.join(FAMILIES)}, this is {family}; take --kind "
            "independent"
        )
    head = EagleHead(target.config)
    with torch.no_grad():
        head.body.model.norm.weight.copy_(target.model.norm.weight)
    return head


def small_model(config: Any, layers: int | None, hidden: int | None) -> Any:
    """A causal LM of the target's family, or of Llama's, and of its vocabulary; random weights.

    Args:
        config: The target's.
    """
    wide = int(config.hidden_size)
    hidden = hidden or max(_LEAST_HIDDEN, wide // _QUARTER)
    layers = layers or math.ceil(config.num_hidden_layers / _QUARTER)
    head_dim = getattr(config, "head_dim", None) or wide // config.num_attention_heads
    heads = max(1, round(hidden / head_dim))
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    smaller = _changed(
        _family(config),
        layers,
        hidden_size=hidden,
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, kv_heads),
        intermediate_size=max(1, config.intermediate_size * hidden // wide),
    )
    return _made(smaller)


def _made(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _family(config: Any) -> Any:
    """The config itself, if an engine's own forward runs its family; else Llama's like it."""
    if config.model_type in FAMILIES:
        return config
    return LlamaConfig(**{name: getattr(config, name) for name in _CARRIED})


def _changed(config: Any, layers: int, **changes: Any) -> Any:
    """A config of so many layers, all of which look back as far as there is."""
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
    """An EAGLE head beside its target, which thinks anew in every step and learns nothing.

    Args:
        target: A transformers model in evaluation mode.
    """

    def __init__(self, target: Any, settings: DrafterSettings) -> None:
        self._target, self._settings = target, settings
        self._head: Tensor = target.lm_head.weight.detach()
        self.model: EagleHead = eagle_head(target).to(self._head.device)

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """Summed over the tokens of the answers."""
        said, thought, _ = self._thoughts(examples, self._settings.noise, self._settings.own_share)
        far = functional.smooth_l1_loss(said, thought, reduction="none").mean(-1).sum()
        wanted = self._logits(thought).softmax(-1)
        surprise = functional.cross_entropy(self._logits(said), wanted, reduction="sum")
        return far + self._settings.token_weight * surprise

    def guesses(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """``int64[n]`` both: the likeliest token at places of answers, and the answers' own."""
        said, _, ids = self._thoughts(examples, 0.0, 0.0)
        return self._logits(said).argmax(-1), ids

    def _thoughts(
        self, examples: Sequence[Example], noise: float, own: float
    ) -> tuple[Tensor, ...]:
        """Hidden states of head and target before each token of the answers, and those tokens."""
        ids, weights = packed(examples)
        ids, chosen = ids.to(self._head.device), (weights[:, 1:] > 0).to(self._head.device)
        with torch.no_grad():
            seen = self._target.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            seen = seen.float()
            embedded = self._target.get_input_embeddings()(ids[:, 1:-1]).float()
        read = self._read(embedded, seen[:, :-1], noise, own)
        return self.model(embedded, read)[chosen], seen[:, 1:][chosen], ids[:, 2:][chosen]

    @torch.no_grad()
    def _read(self, embedded: Tensor, seen: Tensor, noise: float, own: float) -> Tensor:
        """What the head reads: the target's hidden states, disturbed, and some of its own."""
        read = seen + torch.empty_like(seen).uniform_(-noise, noise) if noise else seen
        if not own:
            return read
        said = torch.cat((seen[:, :1], self.model(embedded, read)[:, :-1]), 1)
        return torch.where(torch.rand_like(seen[..., :1]) < own, said, read)

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.to(self._head.dtype), self._head).float()


class TrainableSmallModel:
    """A small model by itself: it needs the target's answers and not the target.

    Args:
        config: The target's.
    """

    def __init__(self, config: Any, settings: DrafterSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self.model: Any = small_model(config, settings.layers, settings.hidden).to(device)

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """Summed over the tokens of the rows, each by its weight."""
        logits, ids, weights = self._logits(examples, self._settings.prompt_weight)
        surprise = functional.cross_entropy(logits, ids, reduction="none")
        return (surprise * weights).sum()

    def guesses(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """As of `TrainableEagle`."""
        logits, ids, _ = self._logits(examples, 0.0)
        return logits.argmax(-1), ids

    def _logits(self, examples: Sequence[Example], prompt_weight: float) -> tuple[Tensor, ...]:
        """Logits, right tokens and weights of the places that have one."""
        ids, weights = (each.to(self._device) for each in packed(examples, prompt_weight))
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        chosen = weights > 0
        logits = self.model.lm_head(hidden[chosen]).float()
        return logits, ids[:, 1:][chosen], weights[chosen]


Trainable: TypeAlias = TrainableEagle | TrainableSmallModel


class DrafterTrainer(Trainer):
    """The training loop of a drafter; the learning rate rises at first, then falls."""

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
    """The share of the answers' tokens that are the drafter's likeliest token."""
    trainable.model.eval()
    right = places = 0
    for start in range(0, len(examples), micro_rows):
        said, ids = trainable.guesses(examples[start : start + micro_rows])
        right += int((said == ids).sum())
        places += len(ids)
    return right / places if places else 0.0
