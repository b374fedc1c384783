"""What is trained: an EAGLE head of one layer, or a small model, shaped after a target.

It says what they compute, as `tasc_engine.drafting.neural` does step by step. It knows no loss.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tasc_engine.drafting.neural.files import SPECIAL
from tasc_engine.model.decoder import FAMILIES
from tasc_jobs.finetune.errors import FinetuneError

# Of a target's config, what says how it is kept or run and not what it computes.
_NOT_SHAPE = ("quantization_config", "dtype", "architectures", "model_type", "transformers_version")
_QUARTER, _LEAST_HIDDEN = 4, 8


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
        """``[R, L, D]``: at j what the target thinks at j + 1.

        Args:
            embedded: ``[R, L, D]`` the embedding of the token at j + 1.
            hidden: ``[R, L, D]`` what the target's LM head reads at j.
        """
        inputs = self.joint(torch.cat((embedded, hidden), -1))
        found: Tensor = self.body.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return found


def eagle_head(target: Any) -> EagleHead:
    """A head with random weights; its norm is the target's, so that it speaks as loudly.

    Raises:
        FinetuneError: The target's own code runs it, which tells no hidden states.
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
    return _made(_changed(
        _family(config), layers, hidden_size=hidden, head_dim=head_dim, num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, kv_heads),
        intermediate_size=max(1, config.intermediate_size * hidden // wide),
    ))  # fmt: skip


def _made(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _family(config: Any) -> Any:
    """The config itself, if an engine's own forward runs its family; else Llama's like it."""
    if config.model_type in FAMILIES:
        return config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings",
    )  # fmt: skip
    return LlamaConfig(**{name: getattr(config, name) for name in names})


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
