"""Runs steps as captured CUDA graphs: one graph per bucket of tokens, replayed each step.

A step of a small model launches hundreds of kernels, each shorter than its launch; a graph launches
all of them at once. A graph needs fixed shapes, so a step is padded to the size of its bucket.
Padding tokens use a scratch slot of the cache and see only that slot. A graph cannot depend on
where a prompt ends, so it computes the logits of every token, and the host selects the logits that
the step needs. One transfer copies all integers of a step to the device, and one copies the chosen
tokens back; the host waits only for the second transfer, and is free until then. Steps with many
prompt tokens are left to the caller. This module does not depend on requests, draft trees, or the
implementation of the forward and the cache.

Code with a forward and a cache on a GPU calls a `GraphedForward` before its own forward::

    chosen = graphs.start_tokens(step)     # a result of `lay_out`
    if chosen is None:                     # no graph can run this step
        tokens = greatest(...)
    else:
        ...                                # the host works while the graph runs
        tokens = chosen()
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int64, StepLayout
from tasc_engine.model.operations import first_greatest

Step = StepLayout[Int64]
Work = Callable[[], tuple[Tensor, Tensor]]  # logits, and the greedy token of each line
log = logging.getLogger(__name__)

_PER_TOKEN = ("ids", "positions", "slots", "visible_lens", "tree", "adapters")
_PER_ROW = ("kv_starts", "trunks", "nodes")
_WARM_UPS = 2  # the first compiles kernels and makes libraries allocate workspaces
# Maximum number of tokens in a step whose logits are not used. A graph computes these logits too,
# and many of them cost more than the launches that the graph saves.
_MAX_UNREAD = 256


class Recorder(Protocol):
    """Records work on fixed tensors so that it can be repeated, and waits for the device."""

    def record(self, run: Work) -> Work:
        """Returns a function that fills the same tensors again at each call; may drop ``run``."""

    def wait(self) -> None:
        """Waits until the device has done all its work."""


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of a step that a graph can run.

    Attributes:
        rows: Rows of the cache.
        tokens: Tokens of all rows.
        moves: Cache slots that move before the step.
        scratch: The cache slot that belongs to no row.
    """

    rows: int
    tokens: int
    moves: int
    scratch: int


def buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that graphs are made for, up to ``max_tokens``.

    From eight tokens on, a step fills at least two thirds of its bucket. Two to seven tokens cost
    as much as eight.
    """
    sizes, size = [1, 8], 8
    while size < max_tokens:
        sizes += [size * 3 // 2, size * 2]
        size *= 2
    return (*(s for s in sizes if s < max_tokens), max_tokens)


def sizes(limits: Limits, tokens: int) -> dict[str, int]:
    """Length of each part of a bucket's buffer, in order; an additional row is for padding."""
    per_token = dict.fromkeys(_PER_TOKEN, tokens)
    per_row = dict.fromkeys(_PER_ROW, limits.rows + 1)
    return {**per_token, "query_offsets": limits.rows + 2, **per_row, "moves": 2 * limits.moves}


def fill(parts: dict[str, Int64], step: Step, limits: Limits) -> None:
    """Write a step into the parts of a buffer, and padding after it.

    Args:
        parts: The parts that `sizes` lists, each flat.
        step: A step within ``limits`` and the bucket.
    """
    n, rows, k = len(step.ids), len(step.kv_starts), step.moves.shape[1]
    padding = dict.fromkeys((*_PER_TOKEN, *_PER_ROW), 0) | {"visible_lens": 1, "trunks": 1}
    padding |= {"slots": limits.scratch, "kv_starts": limits.scratch}
    for name, value in padding.items():
        own: Int64 = getattr(step, name)
        parts[name][: len(own)] = own
        parts[name][len(own) :] = value
    query_offsets, moves = parts["query_offsets"], parts["moves"].reshape(2, limits.moves)
    query_offsets[: rows + 1] = step.query_offsets
    query_offsets[rows + 1 :] = n
    query_offsets[-1] = len(parts["ids"])
    moves[:, :k] = step.moves
    moves[:, k:] = limits.scratch


@dataclass(frozen=True)
class _Bucket:
    """The host and device buffers of one bucket, and the recorded work on them.

    Attributes:
        padded: The layout on the host, in ``parts``.
        reads: The tensors that ``replay`` reads. A graph stores only addresses, so the bucket keeps
            these tensors alive.
    """

    parts: dict[str, Int64]
    host: Tensor
    device: Tensor
    padded: Step
    reads: StepLayout[Tensor]
    moves: Tensor
    chosen: Tensor
    replay: Work

    def run(self, step: Step, limits: Limits, cache: RowCache) -> tuple[Tensor, Tensor]:
        fill(self.parts, step, limits)
        self.device.copy_(self.host, non_blocking=True)
        # Moves are not part of the graph, which would move the maximum number of slots each time.
        cache.move(self.moves[:, : step.moves.shape[1]])
        return self.replay()


class GraphedForward:
    """Runs steps with few prompt tokens; other steps are left to the caller.

    Args:
        forward: Takes ids, the indices of tokens that need logits, the cache, and a tensor that
            receives the logits ``[M, vocab]``; returns that tensor. Neither ``forward`` nor
            ``cache.begin`` may wait for the device or depend on values.
        cache: A cache with allocated memory; its slot ``limits.scratch`` belongs to no row.
        logits: ``[limits.tokens, vocab]``, in the dtype of the logits. Only one graph runs at a
            time, so all graphs write to the first lines of this tensor.
        recorder: Captures graphs; None for `CudaGraphs`.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Any, Tensor], Tensor],
        cache: RowCache,
        limits: Limits,
        logits: Tensor,
        recorder: Recorder | None = None,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._limits = limits
        self._logits = logits
        self._device = logits.device
        self._recorder = CudaGraphs(logits.device) if recorder is None else recorder
        self._sizes = buckets(limits.tokens)
        # By number of tokens, and whether a token has an adapter: a forward decides by the layout
        # on the host whether it applies adapters.
        self._buckets: dict[tuple[int, bool], _Bucket | None] = {}

    @torch.inference_mode()
    def start_tokens(self, step: Step) -> Callable[[], Int64] | None:
        """Starts a step; returns a function that waits for it, or None if no graph can run it.

        The function must be called before the next step starts, which uses the same buffers. It
        returns ``int64[M]``, the greedy next token at each of ``step.logits_indices``. A token is
        below 0 if its logits contain NaN. The first step of a bucket captures the bucket's graph.
        If the capture does not fit the memory, no graph runs the steps of this bucket.
        """
        bucket = self._bucket_of(step)
        if bucket is None:
            return None
        _, chosen = bucket.run(step, self._limits, self._cache)
        bucket.chosen.copy_(chosen, non_blocking=True)
        on_host: Int64 = bucket.chosen.numpy()

        def tokens() -> Int64:
            self._recorder.wait()
            return on_host[step.logits_indices]

        return tokens

    @torch.inference_mode()
    def start_logits(self, step: Step) -> Callable[[], Tensor] | None:
        """Starts a step as `start_tokens` does.

        The returned function returns ``[M, vocab]`` on the device, valid until the next step, and
        does not wait: work on the logits is queued behind the graph. The caller must wait for the
        device before the next step, which uses the same buffers.
        """
        bucket = self._bucket_of(step)
        if bucket is None:
            return None
        everything = np.array_equal(step.logits_indices, np.arange(len(step.ids)))
        # Copied before the graph is launched, as this copy waits for all work of the device.
        indices = None if everything else torch.from_numpy(step.logits_indices).to(self._device)
        logits, _ = bucket.run(step, self._limits, self._cache)
        try:
            needed = logits[: len(step.ids)] if indices is None else logits.index_select(0, indices)
        except RuntimeError:
            self._recorder.wait()
            raise
        return lambda: needed

    @torch.inference_mode()
    def warm_up(self, adapters: bool = False) -> None:
        """Captures all graphs, the largest first, because it needs the most memory.

        Args:
            adapters: Whether to capture graphs of steps in which tokens have adapters, too.
        """
        for size in reversed(self._sizes):
            for adapted in (False, True)[: 1 + adapters]:
                self._bucket(size, adapted)

    def size_of(self, step: Step) -> int | None:
        """The bucket of a step; None if the step exceeds a limit."""
        limits, n = self._limits, len(step.ids)
        fits = len(step.kv_starts) <= limits.rows and step.moves.shape[1] <= limits.moves
        few = n - len(step.logits_indices) <= _MAX_UNREAD
        if not (fits and few and 0 < n <= limits.tokens):
            return None
        return next(size for size in self._sizes if size >= n)

    def _bucket_of(self, step: Step) -> _Bucket | None:
        size = self.size_of(step)
        return None if size is None else self._bucket(size, bool(step.adapters.any()))

    def _bucket(self, size: int, adapted: bool) -> _Bucket | None:
        key = size, adapted
        if key not in self._buckets:
            try:
                self._buckets[key] = self._with_adapters(size) if adapted else self._record(size)
            except RuntimeError as error:
                # The error of an aborted capture does not contain the cause.
                if not any(is_out_of_memory(e) for e in (error, error.__context__) if e):
                    raise
                log.warning(
                    "no memory for the graph of %d tokens; such steps run slower: lower rows (%d), "
                    "max_draft_tokens, kv_cache_bytes or gpu_memory_share", size, self._limits.rows,
                )  # fmt: skip
                self._buckets[key] = None
        return self._buckets[key]

    def _with_adapters(self, size: int) -> _Bucket | None:
        """Records the same work for padding that has an adapter, in the buffers of the bucket."""
        if (bucket := self._bucket(size, False)) is None:
            return None
        fill(bucket.parts, _NOTHING, self._limits)
        bucket.parts["adapters"][:] = 1
        bucket.device.copy_(bucket.host)
        work = self._work(bucket.padded, bucket.reads)
        return replace(bucket, replay=self._recorder.record(work))

    def _record(self, size: int) -> _Bucket:
        """Records the work of a bucket on padding only, so that no row is changed."""
        counts, pinned = sizes(self._limits, size), self._device.type == "cuda"
        host = torch.empty(sum(counts.values()), dtype=torch.int64, pin_memory=pinned)
        device = torch.empty(len(host), dtype=torch.int64, device=self._device)
        split = list(counts.values())
        parts = dict(zip(counts, np.split(host.numpy(), np.cumsum(split)[:-1]), strict=True))
        fill(parts, _NOTHING, self._limits)
        device.copy_(host)
        own_parts = dict(zip(counts, device.split(split), strict=True))
        own = _layout(own_parts, torch.arange(size, device=self._device))
        padded: Step = _layout(parts, np.arange(size))
        chosen = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        moves = own_parts["moves"].view(2, -1)
        replay = self._recorder.record(self._work(padded, own))
        return _Bucket(parts, host, device, padded, own, moves, chosen, replay)

    def _work(self, padded: Step, own: StepLayout[Tensor]) -> Work:
        def run() -> tuple[Tensor, Tensor]:
            self._cache.begin(padded, own)
            out = self._logits[: len(own.ids)]
            logits = self._forward(own.ids, own.logits_indices, self._cache, out)
            return logits, first_greatest(logits)

        return run


class CudaGraphs:
    """CUDA graphs on one device. They share working memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all graphs: libraries keep a workspace for each stream.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def record(self, run: Work) -> Work:
        """Runs the work, then captures it; the work must not wait for the device.

        Raises:
            RuntimeError: The work cannot be captured, or does not fit the memory.
        """
        with torch.cuda.device(self._device):
            self._warm_up(run)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use the device during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = run()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return found

        return replay

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def _warm_up(self, run: Work) -> None:
        # On a separate stream, like the capture: memory of the caller's stream is not reused.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _layout(parts: dict[str, Any], logits_indices: Any) -> StepLayout[Any]:
    """The layout of a step without its moves, which are made before the forward."""
    none = parts["moves"][:0].reshape(2, 0)
    return StepLayout(**{**parts, "moves": none, "logits_indices": logits_indices})


_NONE = np.zeros(0, np.int64)
_NOTHING = Step(
    **dict.fromkeys((*_PER_TOKEN, *_PER_ROW, "logits_indices"), _NONE),
    query_offsets=np.zeros(1, np.int64),
    moves=np.zeros((2, 0), np.int64),
)
