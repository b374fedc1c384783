"""The target: a Hugging Face causal LM that maps packed tokens to next tokens in one call.

This module handles models, devices and dtypes; it does not depend on requests, drafts or text.
"""

import itertools
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.config import EngineConfig
from tasc_engine.errors import (
    OutOfMemory,
    UnsupportedModel,
    is_out_of_memory,
    out_of_memory_is,
)
from tasc_engine.kernels.gpu.attention import available
from tasc_engine.kv.cache import RowCache, attach, attention_layers, on_device
from tasc_engine.kv.device_memory import MemoryOf, limit_process, memory_of, room_for_cache
from tasc_engine.layout import (
    ForwardBatch,
    Int64,
    StepLayout,
    chains,
    lay_out,
    plain_batch,
)
from tasc_engine.lora.adapter_files import Adapter, read_adapter
from tasc_engine.lora.adapters import Adapters
from tasc_engine.model.cuda_graphs import GraphedForward, Limits, Recorder
from tasc_engine.model.decoder import FAMILIES, CompiledDecoder, LeanDecoder, lean
from tasc_engine.model.folder import weight_files
from tasc_engine.model.hidden_states import HiddenStateRequest, HiddenStates
from tasc_engine.model.linears import lay_out_linears, quantise_linears
from tasc_engine.model.loading import ModelSource, load_model, positions_of
from tasc_engine.model.operations import choose, greatest

# Maximum relative error: the norm of the difference divided by the norm of the logits. It allows
# for rounding, but not for a wrong mask.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.1,
}
# bitsandbytes uses different kernels for few and for many tokens, which round differently.
QUANTISED_TOLERANCE = 0.2

# Single tokens are compared with the same rounded layers in the model's own code, which adds in
# another order and so rounds some numbers up instead of down. The limit grows with the error of
# rounding itself. One token can move far more than the average one, so all are compared together.
# Steps of several tokens must have the bits of single tokens.
INT8_TOLERANCE, INT8_PART = 0.05, 0.5
_FAR, _TOO_FAR = 0.2, 0.7  # distances of int8 logits from those of the unrounded model

T = TypeVar("T")
log = logging.getLogger(__name__)
# Takes token ids, the indices that need logits, and a cache with the step's layout; returns logits.
Forward = Callable[[Tensor, Tensor, RowCache], Tensor]


class Target:
    """A causal LM with a KV cache for ``config.rows`` rows.

    Args:
        adapters: Adapters; each row uses one or none of them.
        memory: Asked once, after the weights are loaded, for the memory that limits the KV cache.
        int8: Whether products are of int8 numbers; the model is float32, on a CPU.
        int8_head: Whether the LM head's product is, too.

    Attributes:
        adapters: Names of the adapters, which are numbered from 1 in this order.
        forward: Computes logits from token ids and the step's layout in the cache.
        decoder: This project's decoder; None if the model's own code runs.

    Raises:
        UnsupportedModel: The model cannot be decoded exactly. The message names it and the cause.
        OutOfMemory: The device lacks memory for the KV cache of one row.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        adapters: Sequence[Adapter] = (),
        memory: MemoryOf = memory_of,
        int8: bool = False,
        int8_head: bool = True,
    ) -> None:
        self.config = config
        self.adapters = tuple(adapter.name for adapter in adapters)
        weight = model.get_input_embeddings().weight  # quantised layers have other dtypes
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        layers, longest = attention_layers(model), config.max_model_len
        _check_config(model.config, config.max_model_len)
        self._name = type(model.eval()).__name__
        expected = _own_logits(model)
        self._tolerance = TOLERANCE[self.dtype]
        self._quantised = int8 or bool(getattr(model.config, "quantization_config", None))
        if self._quantised:
            self._tolerance = max(self._tolerance, QUANTISED_TOLERANCE)
        added = Adapters(model, adapters)
        decoder = lean(model, longest, added, int8, int8_head)
        if int8 and decoder is None:
            raise UnsupportedModel(
                f"int8-dynamic is asked for, and this {self._name} is run by the code of "
                "transformers, because of its rope or of another setting; use dtype bfloat16 or "
                "another quantization"
            )
        if int8:
            quantise_linears(model, int8_head)
            rounded = _own_logits(model)
            moved = _checked_distance(self._name, rounded, expected)
            expected, self._tolerance = rounded, max(INT8_TOLERANCE, INT8_PART * moved)
        # Taken before the KV cache gets what is left.
        logits = None if decoder is None else self._logits_of_graphs(decoder)
        found = memory(self.device)
        room = None if found is None else room_for_cache(found, config)
        slots, nbytes = config.rows * longest, config.kv_cache_bytes
        exact = isinstance(decoder, CompiledDecoder)
        self.cache = RowCache(layers, slots, nbytes, longest, room, exact=exact)
        self.forward: Forward = (
            through_modules(model, self.cache, added) if decoder is None else decoder
        )
        self.decoder = decoder
        self._check_against(expected, exact, int8)
        _check_windows(model.config, self.cache.windows, config.max_model_len)
        names = ("rows", "prefill_chunk", "max_draft_tokens", "max_model_len", "kv_cache_bytes")
        self._limits_in_words = ", ".join(f"{name} ({getattr(config, name)})" for name in names)
        if self.device.type == "cuda":
            self._limits_in_words += f", gpu_memory_share ({config.gpu_memory_share:g})"
        self._graphs = None
        if decoder is not None and logits is not None:
            self._graphs = graphs_of(decoder, config, self.cache, logits)
        if self.device.type == "cuda" and self._graphs is None:
            log.warning(without_graphs(self._name, decoder is not None, self._quantised))

    @classmethod
    def load(
        cls, source: ModelSource, config: EngineConfig, memory: MemoryOf = memory_of
    ) -> "Target":
        """Loads weights and adapters, and checks that decoding is exact. May run on any thread.

        Raises:
            UnsupportedModel: The model cannot be decoded exactly, or an adapter is not supported.
            OutOfMemory: The weights, or the KV cache of one row, do not fit the device's memory.
        """
        adapters = [read_adapter(name, folder) for name, folder in source.adapters]
        limit_process(torch.device(source.device), config)
        try:
            model, head = load_model(source), source.int8_head
            return cls(model, config, adapters, memory, source.is_int8, head)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            files = sum(path.stat().st_size for path in weight_files(source.folder))
            part = f", and num_gpus gives {config.gpu_part:g} of a GPU"
            given = "" if torch.device(source.device).type == "cpu" else part
            raise OutOfMemory(
                f"{source.folder} in {source.dtype}, quantization {source.quantization}, does not "
                f"fit the memory of {source.device} (its files have {files} bytes{given}); use a "
                "smaller dtype, quantization nf4, a smaller model, or more memory, or lower rows "
                f"({config.rows}) or max_draft_tokens ({config.max_draft_tokens})"
            ) from error

    def adapter_number(self, name: str | None) -> int:
        """The number of an adapter; 0 for None.

        Raises:
            ValueError: No adapter has this name.
        """
        if name is None:
            return 0
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise ValueError(f"adapter is {name!r}; the target has {known}")
        return self.adapters.index(name) + 1

    @property
    def hidden_states(self) -> HiddenStates:
        """The hidden states of the last step that `keep_hidden_states` requested."""
        return HiddenStates() if self.decoder is None else self.decoder.hidden_states

    def keep_hidden_states(self, request: HiddenStateRequest) -> None:
        """Keep the requested hidden states of each step from now on, without CUDA graphs.

        Raises:
            UnsupportedModel: The model's own code runs, which does not provide hidden states.
        """
        if request == self._requested:
            return
        if self.decoder is None:
            raise UnsupportedModel(
                f"{self._name} does not provide hidden states; a proposer that reads them needs "
                f"one of {', '.join(FAMILIES)}"
            )
        self.decoder.requested, self.decoder.hidden_states = request, HiddenStates()

    @contextmanager
    def without_hidden_states(self) -> Iterator[None]:
        """While active, steps keep no hidden states and need less memory."""
        request = self._requested
        self.keep_hidden_states(HiddenStateRequest())
        try:
            yield
        finally:
            self.keep_hidden_states(request)

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs before the first request; all rows must be free.

        Raises:
            UnsupportedModel: A quantised layer cannot be captured.
        """
        if graphs := self._usable_graphs:
            try:
                with self._current():
                    graphs.warm_up(adapters=bool(self.adapters))
            except RuntimeError as error:
                if not self._quantised or is_out_of_memory(error):
                    raise
                raise UnsupportedModel(
                    f"the quantised layers of {self._name} cannot be captured in a CUDA graph "
                    f"({error}); leave quantization out with dtype bfloat16, use nf4 instead of "
                    "int8, or set device to cpu"
                ) from error
            length = min(self.config.prefill_chunk, self.config.max_model_len, self.cache.slots)
            # The last step has too many prompt tokens for a graph, and uses other kernels.
            for rows in range(1, min(self.config.rows, self.cache.slots // length) + 1):
                kv_starts = list(range(0, rows * length, length))
                batch = plain_batch(kv_starts, 0, np.zeros(length, np.int32))
                self.next_tokens(batch)
                if graphs.size_of(lay_out(batch)) is None:
                    break
            self.cache.clear()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """The device and how it is used, as a key for measurements."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} cpu, {torch.get_num_threads()} threads"

    def next_tokens(self, batch: ForwardBatch) -> Int64:
        """Runs one step; see `start_tokens`."""
        return self.start_tokens(batch)()

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Runs one step; see `start_logits`."""
        found = self.start_logits(batch)()
        if found.device.type == "cuda":
            torch.cuda.current_stream(found.device).synchronize()
        return found

    def start_tokens(self, batch: ForwardBatch) -> Callable[[], Int64]:
        """Starts one step, and returns a function that waits for its result.

        On a GPU, the forward runs meanwhile. On a CPU, the function runs the forward. The function
        must be called before the next step is started. It returns ``int64[M]``, the greedy next
        token where logits are needed. A token is below 0 if its logits contain NaN.

        Raises:
            OutOfMemory: The forward did not fit the memory; the rows' cache is still valid. The
                returned function may raise it, too.
        """
        return self._start(batch, self._tokens_of)

    def start_logits(self, batch: ForwardBatch) -> Callable[[], Tensor]:
        """Starts one step, as `start_tokens` does.

        The function returns ``[M, vocab]`` on the target's device, valid until the next step. It
        does not wait for a GPU, which the caller must do before the next step.

        Raises:
            OutOfMemory: See `start_tokens`.
        """
        return self._start(batch, self._logits_of)

    def is_busy(self) -> bool:
        """Whether the forward of the started step has not ended yet; on a CPU, always True."""
        on_cpu = self.device.type == "cpu"
        return on_cpu or not torch.cuda.current_stream(self.device).query()

    def _start(
        self, batch: ForwardBatch, start: Callable[[StepLayout[Int64]], Callable[[], T]]
    ) -> Callable[[], T]:
        tokens, rows = len(batch.tokens) + len(batch.drafts.tokens), len(batch.kv_starts)
        guarded = partial(self._run, f"a step of {rows} rows and {tokens} tokens on {self.device}")

        def begin() -> Callable[[], T]:
            return start(lay_out(batch, self.cache.pending_moves))

        def run() -> T:
            wait = begin()
            return wait()

        return partial(guarded, run if self.device.type == "cpu" else guarded(begin))

    @torch.inference_mode()
    def _run(self, name: str, work: Callable[[], T]) -> T:
        with out_of_memory_is(name, self._limits_in_words), self._current():
            return work()

    def _tokens_of(self, step: StepLayout[Int64]) -> Callable[[], Int64]:
        if (graphs := self._usable_graphs) and (tokens := graphs.start_tokens(step)):
            return tokens
        logits = self._forward_of(step)
        return partial(choose if logits.device.type == "cpu" else greatest, logits)

    def _logits_of(self, step: StepLayout[Int64]) -> Callable[[], Tensor]:
        if (graphs := self._usable_graphs) and (logits := graphs.start_logits(step)):
            return logits
        logits_of_step = self._forward_of(step)
        return lambda: logits_of_step

    @property
    def keeps_hidden_states(self) -> bool:
        """Whether steps keep hidden states."""
        return bool(self._requested)

    @property
    def _usable_graphs(self) -> GraphedForward | None:
        """The CUDA graphs; None while hidden states are kept, since graphs cannot keep them."""
        return None if self.keeps_hidden_states else self._graphs

    @property
    def _requested(self) -> HiddenStateRequest:
        return HiddenStateRequest() if self.decoder is None else self.decoder.requested

    def _forward_of(self, step: StepLayout[Int64]) -> Tensor:
        device = on_device(step, self.device)
        self.cache.begin(step, device)
        return self.forward(device.ids, device.logits_indices, self.cache)

    def _logits_of_graphs(self, decoder: LeanDecoder) -> Tensor | None:
        """Memory for the logits of CUDA graphs; None if graphs cannot be used."""
        cuda = self.device.type == "cuda"
        usable = cuda and available(self.dtype, decoder.head_dim, self.device)
        return logits_of_graphs(decoder, self.config) if usable else None

    @torch.inference_mode()
    def _check_against(self, expected: Tensor, exact: bool, int8: bool) -> None:
        """Compare steps of each kind with the model's own logits, ``[T, vocab]``.

        Two rows read a prompt in two parts, then two single tokens, then a draft with a wrong last
        token, and then two tokens after the right part of the draft. These are seven forwards of a
        few tokens.

        Args:
            exact: Whether these steps must have the bits of single tokens.
            int8: Whether single tokens are compared with the model's own logits, and other steps
                only with single tokens.
        """
        with self._current():
            if not int8:
                self._try(expected, self._tolerance)
            if exact:
                self.cache.clear()
                self._check_bits(self._alone(expected if int8 else None), refuse=int8)
        self.cache.clear()

    def _alone(self, expected: Tensor | None) -> Tensor:
        """The logits of steps of one token, which are compared with the expected ones, if any."""
        ids, found = _trial_ids(self.vocab_size), list[Tensor]()
        longest = min(len(ids), self.config.max_model_len, self.cache.slots)
        for at in range(longest):
            step = lay_out(plain_batch([0], at, ids[at : at + 1]))
            found.append(self._forward_of(step).clone())
        self.cache.clear()
        if expected is not None:
            self._compare(torch.cat(found), expected[:longest], self._tolerance)
        return torch.cat(found)

    def _check_bits(self, expected: Tensor, refuse: bool) -> None:
        """Compares the bits of steps of each kind with those of single tokens.

        With adapters, steps of separate operations are compared, too. This also compiles them
        before the first request comes.

        Args:
            refuse: Whether to refuse a model that differs, or to log it.
        """
        assert isinstance(self.decoder, CompiledDecoder), "other steps are not exact"
        try:
            self._try(expected, 0.0)
            if self.adapters:
                self.cache.clear()
                with self.decoder.separately():
                    self._try(expected, 0.0)
        except UnsupportedModel as error:
            if refuse:
                raise
            log.warning("%s", error)

    def _try(self, expected: Tensor, tolerance: float) -> None:
        ids = _trial_ids(self.vocab_size)
        kv_starts = [0, len(ids)] if self.config.rows > 1 else [0]  # leaks come from neighbours
        longest = min(self.config.max_model_len, self.cache.slots // len(kv_starts))
        for start, end in itertools.pairwise(_TRIAL_CUTS):
            if end <= longest:
                batch = plain_batch(kv_starts, start, ids[start:end])
                self._compare(self._forward_of(lay_out(batch)), expected[[end - 1]], tolerance)
        if longest < len(ids):
            return
        at = _TRIAL_CUTS[-1]
        right, wrong = ids[at + 1 : at + 3], (ids[at + 3 : at + 4] + 1) % self.vocab_size
        drafts = chains(np.tile(np.concatenate((right, wrong)), (len(kv_starts), 1)))
        batch = replace(plain_batch(kv_starts, at, ids[at : at + 1]), drafts=drafts)
        found = self._forward_of(lay_out(batch)).view(len(kv_starts), 4, -1)
        self._compare(found[:, :3], expected[at : at + 3], tolerance)
        for start in (at + 3, at + 4):  # the slot of the wrong token, and the next
            batch = plain_batch(kv_starts, start, ids[start : start + 1])
            self._compare(self._forward_of(lay_out(batch)), expected[[start]], tolerance)

    def _compare(self, found: Tensor, expected: Tensor, tolerance: float) -> None:
        error = _distance(found, expected.expand_as(found))
        if not error <= tolerance:  # also refuses NaN
            if not tolerance:
                raise UnsupportedModel(
                    f"{self._name} computes other logits in steps of several tokens than in steps "
                    f"of one (relative difference {error:.3g}), which compiled steps must not; "
                    "use another dtype or quantization, and report it"
                )
            raise UnsupportedModel(
                f"{self._name} computes other logits with the packed cache than on its own "
                f"(relative difference {error:.3g}); this architecture is not supported"
            )

    def _current(self) -> AbstractContextManager[Any]:
        """Makes the target's device the current device, on which custom kernels are launched."""
        cuda = self.device.type == "cuda"
        return torch.cuda.device(self.device) if cuda else nullcontext()


def logits_of_graphs(decoder: LeanDecoder, config: EngineConfig) -> Tensor:
    """``[tokens, vocab]`` for the logits of all rows with all drafts."""
    tokens = config.rows * (1 + config.max_draft_tokens)
    return decoder.embedding.new_empty((tokens, decoder.head.out_features))


def graphs_of(
    decoder: LeanDecoder,
    config: EngineConfig,
    cache: RowCache,
    logits: Tensor,
    recorder: Recorder | None = None,
) -> GraphedForward:
    """CUDA graphs for steps of all rows with all drafts."""
    most_moves = config.rows * config.max_draft_tokens
    limits = Limits(config.rows, len(logits), most_moves, cache.slots)
    return GraphedForward(decoder, cache, limits, logits, recorder)


def without_graphs(name: str, lean: bool, quantised: bool) -> str:
    """Says why a model runs on a GPU without CUDA graphs, and what would help.

    Args:
        name: The model's class.
        lean: Whether this project's decoder runs the model.
        quantised: Whether the model is quantised.
    """
    slow = f"{name} runs each step on a GPU without CUDA graphs, which takes many times as long"
    if lean:
        return (
            f"{slow}: its attention needs Triton, an Ampere or later GPU, and float32, bfloat16 or "
            "float16; install torch's CUDA build, or change dtype"
        )
    kept = " with linear layers that are plain, or nf4 or int8 by bitsandbytes" * quantised
    return (
        f"{slow}: the code of transformers runs it; graphs need one of {', '.join(FAMILIES)}{kept}"
    )


def through_modules(model: Any, cache: RowCache, adapters: Adapters) -> Forward:
    """The model's own code with the packed attention and with weights laid out once."""
    attach(model, cache)
    adapters.attach(model)
    lay_out_linears(model)

    def forward(ids: Tensor, logits_indices: Tensor, held: RowCache) -> Tensor:
        assert held.device is not None, "a forward begins with a layout"
        adapters.begin(held, logits_indices)
        out = model(
            input_ids=ids[None],
            position_ids=held.device.positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: Tensor = out.logits[0]
        return logits

    return forward


def _check_config(config: Any, max_model_len: int) -> None:
    text, longest = config.get_text_config(), positions_of(config)
    if max_model_len > longest:
        raise UnsupportedModel(
            f"max_model_len is {max_model_len}, but {config.model_type} was made for {longest} "
            f"positions; set max_model_len to {longest} or less"
        )
    if varying := _rope_types(text) & {"dynamic", "longrope"}:
        raise UnsupportedModel(
            f"{config.model_type} uses {', '.join(varying)} rope, which depends on the longest row "
            "of the batch; answers would depend on their neighbours"
        )
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        raise UnsupportedModel(
            f"{config.model_type} attends in chunks of {chunk} tokens and a row may hold "
            f"{max_model_len}; set max_model_len to {chunk} or less"
        )


def _check_windows(config: Any, windows: Mapping[int, int | None], max_model_len: int) -> None:
    """Refuse layers that define their window only by a mask, since packed attention has no mask."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is None or window >= max_model_len:
        return
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    if any(types[layer] == "sliding_attention" and own is None for layer, own in windows.items()):
        raise UnsupportedModel(
            f"{config.model_type} limits attention to {window} tokens by a mask, which is not "
            f"supported, and a row may hold {max_model_len}; set max_model_len to {window} or less"
        )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rope a model uses: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if "rope_type" in part}


_TRIAL_CUTS = (0, 4, 8, 9, 10)  # where the trial steps before the draft begin and end


def _trial_ids(vocab_size: int) -> NDArray[np.int32]:
    return (np.arange(1, 16, dtype=np.int32) * 7) % vocab_size


def _distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected logits."""
    return float((found - expected).double().norm() / expected.double().norm())


def _checked_distance(name: str, rounded: Tensor, exact: Tensor) -> float:
    """The distance of int8 logits from those of the unrounded model.

    Logs a large distance.

    Raises:
        UnsupportedModel: The logits have nothing to do with those of the model.
    """
    if not (error := _distance(rounded, exact)) <= _TOO_FAR:
        raise UnsupportedModel(
            f"{name} computes other logits with int8-dynamic than without (relative "
            f"difference {error:.3g}); use dtype bfloat16 or another quantization"
        )
    if error > _FAR:
        log.warning(
            "%s: logits with int8-dynamic differ by %.2g from those without; compare answers "
            "before you use it", name, error,
        )  # fmt: skip
    return error


@torch.inference_mode()
def _own_logits(model: Any) -> Tensor:
    """The unchanged model's logits at each of the trial ids, ``[T, vocab]``."""
    ids = torch.from_numpy(_trial_ids(model.config.get_text_config().vocab_size).astype(np.int64))
    logits: Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    return logits[0]
