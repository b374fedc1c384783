"""The forward of Llama-like models over packed tokens, in few tensor operations.

With small models, a step spends more time between operations than in them. The decoder takes its
weights from a transformers model and runs none of that model's code afterwards. It does not handle
rows or masks, since the cache computes attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import ACT2FN

from tasc_engine.kernels.cpu.attention import MAX_LANES, Scratch
from tasc_engine.kernels.cpu.compiling import Size, bits
from tasc_engine.kernels.cpu.decoder import Memory, Own, Shape, Step, Weight, Weights, forward
from tasc_engine.kernels.cpu.products import Int8Weight, multiplies, room_for_sums
from tasc_engine.kernels.cpu.team import Team
from tasc_engine.kernels.gpu.attention import available
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int64, StepLayout
from tasc_engine.lora.adapters import Adapters, Matmul
from tasc_engine.model.hidden_states import HiddenStateRequest, HiddenStates
from tasc_engine.model.linears import (
    CompiledLinear,
    Linear,
    fastest,
    int8_joined,
    is_quantised,
    packed,
    product_of,
)
from tasc_engine.model.operations import (
    CompiledOperations,
    FusedOperations,
    Norm,
    Operations,
    TensorOperations,
)

# Classes whose forward equals the one below. Custom classes with the same names do not count.
FAMILIES: dict[str, type] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
# Rope that depends on the length of the longest row cannot be tabulated.
_VARYING_ROPE = {"dynamic", "longrope"}
# Settings of other architectures that would change the forward if a class adopted them.
_UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class Layer:
    """One layer's weights; ``head_norm`` is for queries and keys, ``next_norm`` for the result."""

    qkv: Matmul
    head_norm: Norm | None
    out: Matmul
    before_mlp: Norm
    gate_up: Matmul
    down: Matmul
    next_norm: Norm
    window: int | None


class LeanDecoder:
    """A Llama-like model, made by :func:`lean` and called under ``torch.inference_mode``.

    On a GPU, a call does not wait for the device or depend on values, so it can be captured in a
    CUDA graph.

    Attributes:
        operations: The operations between matrix products.
        layers, heads, kv_heads, head_dim: The shape of the model's attention.
        embedding: ``[vocab_size, D]``.
        head: Computes logits from hidden states.
        requested: The values that each call keeps in `hidden_states`. If it is not empty, a call
            computes the last layer for every token.
    """

    head: Linear | CompiledLinear

    def __init__(self, model: Any, max_positions: int, adapters: Adapters) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self.embedding: Tensor = model.model.embed_tokens.weight.detach()
        self.layers = int(config.num_hidden_layers)
        self._adapters = adapters
        cos_sin = _rope_table(model, max_positions)
        self.rotary_dim = cos_sin.shape[-1]
        self.requested = HiddenStateRequest()
        self.hidden_states = HiddenStates()
        self.operations = _operations(cos_sin, self.heads, self.kv_heads, model.config.hidden_act)
        self._first = Norm(model.model.layers[0].input_layernorm.weight, model.config.rms_norm_eps)
        self._prepare(model)
        self._layers = [_layer(model, i, self._product, adapters) for i in range(self.layers)]

    def _prepare(self, model: Any) -> None:
        self.head = Linear.joining(model.lm_head)

    def _product(self, model: Any, layer: int, name: str) -> Matmul:
        return product_of(*_linears(model, layer, name).values())

    def __call__(
        self, ids: Tensor, logits_indices: Tensor, cache: RowCache, out: Tensor | None = None
    ) -> Tensor:
        """Logits ``[M, vocab_size]`` in the model's dtype.

        Args:
            ids: ``int64[N]`` token ids.
            logits_indices: ``int64[M]``, the indices of the tokens that get logits.
            cache: Holds the step's layout; receives keys and values of all N tokens in every layer.
            out: Receives the logits; None for a new tensor.
        """
        if not self.requested:
            return self.head(self.states(self.embed(ids), logits_indices, cache), out)
        hidden = self.states(self.embed(ids), None, cache).clone()
        self.hidden_states = HiddenStates(self.requested, hidden, self.head)
        return self.head(hidden.index_select(0, logits_indices), out)

    @property
    def windowed(self) -> bool:
        """Whether some layer attends only to a sliding window of tokens."""
        return any(layer.window is not None for layer in self._layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., D]`` of ids ``int64[...]``."""
        return functional.embedding(ids, self.embedding)

    def states(self, hidden: Tensor, logits_indices: Tensor | None, cache: RowCache) -> Tensor:
        """Returns the inputs of the LM head, ``[M, D]``, valid until the next call.

        Args:
            hidden: ``[N, D]``, the inputs of the first layer; they are overwritten.
            logits_indices: ``int64[M]``, indices of the tokens to return; None for all tokens.
        """
        self._adapters.begin(cache, logits_indices)
        ops = self.operations
        normed = ops.add_and_norm(hidden, None, self._first)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(normed)
            query = ops.apply_rope_and_write_kv(index, qkv, layer.head_norm, cache)
            attention_output = cache.attend(index, query, self._scale, layer.window).flatten(1)
            if index == self.layers - 1 and logits_indices is not None:
                # The other tokens are not needed from here on.
                hidden = hidden.index_select(0, logits_indices)
                attention_output = attention_output.index_select(0, logits_indices)
            normed = ops.add_and_norm(hidden, layer.out(attention_output), layer.before_mlp)
            delta = layer.down(ops.gate(layer.gate_up(normed)))
            normed = ops.add_and_norm(hidden, delta, layer.next_norm)
        return normed


class CompiledDecoder(LeanDecoder):
    """A decoder on a CPU, all of whose layers and LM head are one compiled call.

    If hidden states are requested, the LM head is a second call. If a row uses an adapter, each
    operation is a call. The bits of a token's logits depend neither on that, nor on the other
    tokens of a step, nor on the number of threads.

    Args:
        int8: Whether products are of int8 numbers; otherwise, they are of those of the model.
        int8_head: The same for the LM head.
    """

    def __init__(
        self, model: Any, max_positions: int, adapters: Adapters, int8: bool, int8_head: bool
    ) -> None:
        self._int8, self._int8_head, self._separate = int8, int8_head, False
        super().__init__(model, max_positions, adapters)
        layers, scale = self._layers, np.float32(self._scale)
        norms = [norm for each in layers for norm in (each.before_mlp, each.next_norm)]
        head_norms = [each.head_norm.flat for each in layers if each.head_norm is not None]
        assert isinstance(self.operations, CompiledOperations), "the model is on a CPU, with SiLU"
        self._weights = Weights(
            **self._packed,
            norms=np.concatenate([norm.flat for norm in (self._first, *norms)]),
            head_norms=np.concatenate(head_norms or [np.zeros(0, np.float32)]),
            cos_sin=self.operations.cos_sin,
            windows=np.array([each.window or 0 for each in layers]),
        )
        heads, eps = (self.heads, self.kv_heads, self.head_dim), np.float32(self._first.eps)
        self._shape, self._size = Shape(self.layers, *heads, eps, scale), Size(self.head_dim)
        self._own = list[tuple[Scratch, NDArray[np.int32]]]()
        self._memory: tuple[int, Memory] | None = None

    def _prepare(self, model: Any) -> None:
        self._team, self._packed = Team(), dict[str, Weight]()
        for name in _LINEARS:
            parts = [list(_linears(model, i, name).values()) for i in range(self.layers)]
            self._packed[name] = _joined(parts, self._int8)
        self._packed["head"] = _joined([[model.lm_head]], self._int8_head)
        self.head = CompiledLinear(self._packed["head"], team=self._team)

    def _product(self, model: Any, layer: int, name: str) -> Matmul:
        return CompiledLinear(self._packed[name], layer, self._team)

    def __call__(
        self, ids: Tensor, logits_indices: Tensor, cache: RowCache, out: Tensor | None = None
    ) -> Tensor:
        if self.requested or self._is_separate(cache):
            return super().__call__(ids, logits_indices, cache, out)
        if out is None:
            out = self.embedding.new_empty((len(logits_indices), self.head.out_features))
        self._run(self.embed(ids), logits_indices, cache, bits(out))
        return out

    @contextmanager
    def separately(self) -> Iterator[None]:
        """Runs each operation of a step as a call, as in steps with adapters."""
        self._separate = True
        try:
            yield
        finally:
            self._separate = False

    def _is_separate(self, cache: RowCache) -> bool:
        return self._separate or self._adapters.used_in(cache)

    def states(self, hidden: Tensor, logits_indices: Tensor | None, cache: RowCache) -> Tensor:
        if self._is_separate(cache):
            return super().states(hidden, logits_indices, cache)
        return self._run(hidden, logits_indices, cache, bits(hidden.new_empty(0)))

    def _run(
        self, hidden: Tensor, picked: Tensor | None, cache: RowCache, logits: NDArray[Any]
    ) -> Tensor:
        step, (n, width) = cache.current, hidden.shape
        m = n if picked is None else len(picked)
        if m > n:  # scored tokens may be picked twice
            hidden = torch.cat((hidden, hidden.new_empty((m - n, width))))
        if self._memory is None or self._memory[0] < max(m, n):
            room = max(m, n) * 5 // 4  # steps that grow slowly do not allocate each time
            elements = bits(hidden).dtype
            self._memory = room, Memory.of(room, self._weights, self._shape, elements)
        memory, lengths = self._memory[1], step.trunks + step.nodes
        tokens = max(MAX_LANES // self.heads, 1)
        pieces = _pieces(step, tokens, torch.get_num_threads())
        fields = [getattr(step, name) for name in Step._fields[:-1]]
        indices = step.logits_indices if picked is None else picked.numpy()
        self._team.run(
            forward, bits(hidden), picked is None,
            cache.all_bits(self.kv_heads, self.head_dim, hidden), self._weights, self._shape,
            self._size, fastest(), Step._make([*fields, indices]), memory, logits,
            own=partial(self._own_of, pieces, int(lengths.max(initial=0))),
        )  # fmt: skip
        return torch.from_numpy(memory.normed[: m * width]).view(hidden.dtype).view(m, width)

    def _own_of(self, pieces: Sequence[Int64], slots: int, part: int, parts: int) -> Own:
        """The working memory and the work of one thread.

        Args:
            pieces: See `_pieces`.
            slots: Number of slots of the longest row.
        """
        while len(self._own) <= part:
            scratch = Scratch(self.heads, self.kv_heads, self.head_dim, np.float32)
            self._own.append((scratch, room_for_sums()))
        scratch, products = self._own[part]
        scratch.hold(slots)
        work = [each[part::parts].copy() for each in pieces]
        return Own._make([*work, *scratch.arrays, products])


def _pieces(step: StepLayout[Int64], tokens: int, threads: int) -> tuple[Int64, Int64, Int64]:
    """Cuts rows into pieces of so many tokens, if several threads share the step.

    Returns:
        The row, the first token and the end of each piece; pieces with much work come first.
    """
    counts = np.diff(step.query_offsets)
    if threads == 1:
        return np.arange(len(counts)), step.query_offsets[:-1], step.query_offsets[1:]
    each = -(-counts // tokens)
    rows = np.repeat(np.arange(len(counts)), each)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each)
    begins = step.query_offsets[rows] + place * tokens
    ends = np.minimum(begins + tokens, step.query_offsets[rows + 1])
    order = np.argsort((begins - ends) * step.visible_lens[ends - 1], kind="stable")
    return rows[order], begins[order], ends[order]


def lean(
    model: Any,
    max_positions: int,
    adapters: Adapters | None = None,
    int8: bool = False,
    int8_head: bool = True,
) -> LeanDecoder | None:
    """Makes a `LeanDecoder` of a transformers causal LM; None if the model needs other code.

    Weights that are laid out are copies: drop ``model`` afterwards. Projections that bitsandbytes
    quantised keep their weights and their code, which a CUDA graph can capture (see
    `docs/decisions/07-exact-kernels.md`).

    Args:
        model: A model in evaluation mode, on any device, with any dtype. A quantised model must
            have run once, since that prepares its layers.
        max_positions: Number of positions of the longest row; rope is tabulated for them.
        adapters: Adapters of this model; each row uses one or none of them.
        int8: Whether products are of int8 numbers; the model is float32, on a CPU.
        int8_head: Whether the LM head's product is, too.
    """
    known = FAMILIES.get(model.config.model_type) is type(model)
    if not (known and _is_plain(model) and _settings_known(model.config)):
        return None
    if int8 and model.config.hidden_act != "silu":  # torch's code for others depends on the batch
        return None
    added = Adapters(model) if adapters is None else adapters
    decoder = (
        CompiledDecoder(model, max_positions, added, int8, int8 and int8_head)
        if int8 or _compiles(model)
        else LeanDecoder(model, max_positions, added)
    )
    # Partial rope would rotate only the first part of each head.
    return decoder if decoder.rotary_dim == decoder.head_dim else None


def _compiles(model: Any) -> bool:
    """Whether a step of floats can be one compiled call, and is faster than separate operations.

    For bfloat16, oneDNN uses AMX where a processor has it.
    """
    weight = model.model.embed_tokens.weight
    linears = [m for name, m in model.named_modules() if name.endswith("_proj")]
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if model.config.hidden_act != "silu" or any(map(is_quantised, linears)):
        return False
    if weight.dtype == torch.bfloat16 and (
        torch.cpu.get_capabilities().get("amx_bf16", False)
        or any(each.in_features % 2 for each in linears)
    ):
        return False
    return multiplies(weight.itemsize)


def _is_plain(model: Any) -> bool:
    """Whether weights share one dtype and device, and linear layers and embedding are known.

    Projections may be quantised; their own weights have any dtype.
    """
    named = dict(model.named_modules())
    projections = [m for name, m in named.items() if name.endswith("_proj")]
    quantised = [m for m in projections if is_quantised(m)]
    apart = {id(p) for m in quantised for p in m.parameters()}
    kinds = {(p.device, p.dtype) for p in model.parameters() if id(p) not in apart}
    linears = [named["lm_head"], *(m for m in projections if not is_quantised(m))]
    plain = all(type(m) is nn.Linear for m in linears)
    return plain and len(kinds) == 1 and type(model.model.embed_tokens) is nn.Embedding


def _settings_known(config: Any) -> bool:
    rope = (config.rope_parameters or {}).get("rope_type")
    static = rope is not None and rope not in _VARYING_ROPE
    whole = getattr(config, "pretraining_tp", None) in (None, 1)
    return static and whole and all(getattr(config, name, None) is None for name in _UNKNOWN)


# The linear layers of each product, whose outputs are concatenated.
_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _linears(model: Any, layer: int, name: str) -> dict[str, nn.Linear]:
    """The linear layers of one product, by their names in the model."""
    paths = [f"model.layers.{layer}.{path}" for path in _LINEARS[name]]
    return {path: model.get_submodule(path) for path in paths}


def _joined(layers: list[list[nn.Linear]], int8: bool) -> Weight:
    """The weights of one product in all layers."""
    return Int8Weight.joined([int8_joined(*own) for own in layers]) if int8 else packed(layers)


def _layer(
    model: Any, index: int, made: Callable[[Any, int, str], Matmul], adapters: Adapters
) -> Layer:
    layer, config = model.model.layers[index], model.config
    attention, eps = layer.self_attn, config.rms_norm_eps
    last = index == config.num_hidden_layers - 1
    next_norm = model.model.norm if last else model.model.layers[index + 1].input_layernorm

    def product(name: str) -> Matmul:
        linears = _linears(model, index, name)
        widths = [linear.out_features for linear in linears.values()]
        picked = last and name != "qkv"
        return adapters.around(made(model, index, name), list(linears), widths, picked)

    return Layer(
        qkv=product("qkv"),
        head_norm=_head_norm(attention, config) if hasattr(attention, "q_norm") else None,
        out=product("out"),
        before_mlp=Norm(layer.post_attention_layernorm.weight, eps),
        gate_up=product("gate_up"),
        down=product("down"),
        next_norm=Norm(next_norm.weight, eps),
        window=_window(attention, config),
    )


def _window(attention: Any, config: Any) -> int | None:
    of_model = config.sliding_window if config.model_type == "mistral" else None
    window: int | None = getattr(attention, "sliding_window", of_model)
    return window


def _head_norm(attention: Any, config: Any) -> Norm:
    query = attention.q_norm.weight.expand(config.num_attention_heads, -1)
    key = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
    return Norm(torch.cat((query, key)), config.rms_norm_eps)


def _operations(cos_sin: Tensor, heads: int, kv_heads: int, activation: str) -> Operations:
    if activation != "silu":
        return TensorOperations(cos_sin, heads, kv_heads, ACT2FN[activation])
    if cos_sin.device.type == "cpu":
        return CompiledOperations(cos_sin, heads, kv_heads)
    if available(cos_sin.dtype, cos_sin.shape[-1], cos_sin.device):
        return FusedOperations(cos_sin, heads, kv_heads)
    return TensorOperations(cos_sin, heads, kv_heads, functional.silu)


def _rope_table(model: Any, max_positions: int) -> Tensor:
    """Cosines and signed sines ``[max_positions, 2, head_dim]`` of the model's own rope."""
    weight = model.model.embed_tokens.weight.detach()
    positions = torch.arange(max_positions, device=weight.device)[None]
    cos, sin = model.model.rotary_emb(weight, positions)
    first, second = sin[0].chunk(2, -1)
    return torch.stack((cos[0], torch.cat((-first, second), -1)), 1)
