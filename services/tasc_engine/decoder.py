"""The forward of Llama-like models over packed tokens, in as few tensor operations as it takes.

At the sizes of task models a step spends more time between operations than in them. It takes its
weights from a transformers model and runs none of that model's code afterwards. It knows no rows
and no masks: whoever holds keys and values attends.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import ACT2FN

from tasc_engine.linears import Linear, RmsNorm

# Whose forward is the one below; a class of somebody else that uses the same name is not.
FAMILIES: dict[str, type] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
# Rope that depends on how long the longest row is has no table.
_VARYING_ROPE = {"dynamic", "longrope"}
# Settings of other architectures that would change the forward if a class took them over.
_UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")


class KeyValues(Protocol):
    """Who holds keys and values."""

    def attend(
        self, layer: int, query: Tensor, kv: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Store ``kv [N, 2, kv_heads, D]`` and attend: ``[N, heads, D]`` to the same.

        ``query`` is a view whose rows do not lie one behind the other, ``kv`` is contiguous.
        ``window`` counts the tokens a query looks back, itself included; None for all.
        """
        ...


@dataclass(frozen=True)
class Layer:
    """One layer's weights; ``head_norm`` is of queries and keys together."""

    before_attention: RmsNorm
    qkv: Linear
    head_norm: RmsNorm | None
    out: Linear
    before_mlp: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None


class LeanDecoder:
    """A Llama-like model; made by :func:`lean`, called under ``torch.inference_mode``.

    Nothing in a call waits for the device or depends on values, so that it can be captured in a
    CUDA graph.

    Attributes:
        device, dtype: Of the weights.
        vocab_size: Logits of a token.
        layers, heads, kv_heads, head_dim: Of its attention.
    """

    def __init__(self, model: Any, max_positions: int) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(attention.head_dim)
        self.vocab_size = int(model.lm_head.weight.shape[0])
        self._scale = float(attention.scaling)
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._turns = _turns(model, max_positions)
        act = config.hidden_act
        self._activation = functional.silu if act == "silu" else ACT2FN[act]
        self._layers = [_layer(model, index) for index in range(config.num_hidden_layers)]
        self.layers = len(self._layers)
        self._norm = RmsNorm(model.model.norm.weight, config.rms_norm_eps)
        self._head = Linear.joining(model.lm_head)

    def __call__(
        self, ids: Tensor, positions: Tensor, looked_at: Tensor, cache: KeyValues
    ) -> Tensor:
        """Logits ``[M, vocab_size]`` in the model's dtype.

        Args:
            ids: ``int64[N]`` token ids.
            positions: ``int64[N]`` positions in their row, below ``max_positions``.
            looked_at: ``int64[M]`` which of the N tokens get logits.
            cache: Is given the keys and values of all N, in every layer.
        """
        hidden = functional.embedding(ids, self._embedding)
        turn = self._turn(positions)
        for index, layer in enumerate(self._layers):
            seen = self._attend(index, layer, hidden, turn, cache)
            if index == self.layers - 1:  # behind it nothing is read of other tokens
                hidden, seen = hidden.index_select(0, looked_at), seen.index_select(0, looked_at)
            hidden.add_(layer.out(seen))
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, -1)
            hidden.add_(layer.down(self._activation(gate).mul_(up)))
        return self._head(self._norm(hidden))

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for all heads that turn; written out, later products run faster."""
        shape = (-1, -1, self.heads + self.kv_heads, -1)
        cos, sin = self._turns.index_select(0, positions).expand(shape).unbind(1)
        return cos.contiguous(), sin.contiguous()

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: KeyValues,
    ) -> Tensor:
        tokens, (cos, sin) = hidden.shape[0], turn
        joined = layer.qkv(layer.before_attention(hidden))
        joined = joined.view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = joined.narrow(1, 0, self.heads + self.kv_heads)
        heads = turned if layer.head_norm is None else layer.head_norm(turned)
        # Su et al. 2021; with the sign of the first half in ``sin``, swapping halves is a roll.
        swapped = heads.roll(self.head_dim // 2, -1)
        torch.mul(heads, cos, out=turned).addcmul_(swapped, sin)
        kv = joined.narrow(1, self.heads, 2 * self.kv_heads).contiguous()
        kv = kv.view(tokens, 2, self.kv_heads, self.head_dim)
        query = joined.narrow(1, 0, self.heads)
        return cache.attend(index, query, kv, self._scale, layer.window).flatten(1)


def lean(model: Any, max_positions: int) -> LeanDecoder | None:
    """The lean forward of a transformers causal LM, or None if the model needs other code.

    Weights that are joined or laid out are copies: drop ``model`` afterwards.

    Args:
        model: In evaluation mode, on any device, of any dtype.
        max_positions: Positions of the longest row; rope is tabulated for so many.
    """
    known = FAMILIES.get(model.config.model_type) is type(model)
    if not (known and _is_plain(model) and _settings_known(model.config)):
        return None
    decoder = LeanDecoder(model, max_positions)
    # Partial rope would turn the first part of each head only.
    return decoder if decoder._turns.shape[-1] == decoder.head_dim else None


def _is_plain(model: Any) -> bool:
    """All of one dtype on one device, and no layer replaced by another kind."""
    kinds = {(p.device, p.dtype) for p in model.parameters()}
    linears = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    plain = all(type(m) is nn.Linear for m in linears)
    return plain and len(kinds) == 1 and type(model.model.embed_tokens) is nn.Embedding


def _settings_known(config: Any) -> bool:
    rope = (config.rope_parameters or {}).get("rope_type")
    static = rope is not None and rope not in _VARYING_ROPE
    whole = getattr(config, "pretraining_tp", None) in (None, 1)
    return static and whole and all(getattr(config, name, None) is None for name in _UNKNOWN)


def _layer(model: Any, index: int) -> Layer:
    layer, config = model.model.layers[index], model.config
    attention, mlp, eps = layer.self_attn, layer.mlp, config.rms_norm_eps
    of_model = config.sliding_window if config.model_type == "mistral" else None
    return Layer(
        before_attention=RmsNorm(layer.input_layernorm.weight, eps),
        qkv=Linear.joining(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=_head_norm(attention, config) if hasattr(attention, "q_norm") else None,
        out=Linear.joining(attention.o_proj),
        before_mlp=RmsNorm(layer.post_attention_layernorm.weight, eps),
        gate_up=Linear.joining(mlp.gate_proj, mlp.up_proj),
        down=Linear.joining(mlp.down_proj),
        window=getattr(attention, "sliding_window", of_model),
    )


def _head_norm(attention: Any, config: Any) -> RmsNorm:
    query = attention.q_norm.weight.expand(config.num_attention_heads, -1)
    key = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
    return RmsNorm(torch.cat((query, key)), config.rms_norm_eps)


def _turns(model: Any, max_positions: int) -> Tensor:
    """Cosines and signed sines ``[max_positions, 2, 1, head_dim]`` of the model's own rope."""
    weight = model.model.embed_tokens.weight.detach()
    positions = torch.arange(max_positions, device=weight.device)[None]
    cos, sin = model.model.rotary_emb(weight, positions)
    first, second = sin[0].chunk(2, -1)
    return torch.stack((cos[0], torch.cat((-first, second), -1)), 1).unsqueeze(2)
