"""Tests that captured graphs and GPU operations compute the same as a plain step."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from tree_layouts import Eager, Row, by_definition, layout_of, parents_of, rows_of

from tasc_engine.kernels.gpu import attention as tree_kernel
from tasc_engine.kernels.gpu.attention import INTERPRETED, available
from tasc_engine.layout import StepLayout
from tasc_engine.model.cuda_graphs import CudaGraphs, GraphedForward, Limits, Step, buckets, fill
from tasc_engine.model.operations import FusedOperations, Norm, TensorOperations, first_greatest

LENGTH, ROWS, VOCAB = 64, 4, 50
LIMITS = Limits(rows=ROWS, tokens=30, moves=6, scratch=ROWS * LENGTH)
CPU = torch.device("cpu")
ROW = st.tuples(
    st.integers(0, 40), st.one_of(st.just(1), st.integers(2, 8)), st.none() | parents_of(6)
)
STEP = st.lists(ROW, min_size=1, max_size=ROWS).filter(
    lambda rows: tokens_of(rows) <= LIMITS.tokens
)


def tokens_of(rows: Sequence[Row]) -> int:
    return sum(brought + len(parents or ()) for _, brought, parents in rows)


class PoolCache:
    """The pool of `LIMITS`; attention token by token, or by the kernel on a GPU."""

    def __init__(self, model: "Model") -> None:
        shape = (model.layers, LIMITS.scratch + 1, 2, model.kv_heads, model.head_dim)
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.pool = numbers.to(model.device, model.dtype)
        self.host = self.device = None

    def move(self, moves: Tensor) -> None:
        source, target = moves
        self.pool[:, target] = self.pool[:, source]

    def begin(self, host: Step, device: StepLayout[Tensor]) -> None:
        self.move(device.moves)
        self.host, self.device = host, device

    def attend(self, layer: int, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        pool = self.pool[layer]
        pool.index_copy_(0, self.device.slots, kv)
        if pool.is_cuda:
            return tree_kernel.attend(query, pool, self.device, scale, longest=4 * LENGTH)
        return by_definition(query, pool, [*map(self.seen, range(len(query)))], scale, None)

    def seen(self, n: int) -> list[int]:
        """The places that a packed token sees."""
        lie = self.device
        row = int(torch.searchsorted(lie.query_offsets, n, right=True)) - 1
        bits = range(int(lie.nodes[row]))
        nodes = [int(lie.trunks[row]) + b for b in bits if int(lie.tree[n]) >> b & 1]
        return [
            int(lie.kv_starts[row]) + place for place in (*range(int(lie.visible_lens[n])), *nodes)
        ]


class Model:
    """A forward pass of a few products; its results depend on everything that its tokens see."""

    layers, kv_heads, head_dim = 2, 2, 16

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        make, width = torch.Generator().manual_seed(0), 4 * self.head_dim
        weights = self.layers * [(2 * width, width)]
        shapes = [(VOCAB, width), (LENGTH, width), (VOCAB, width), *weights]
        numbers = [torch.randn(shape, generator=make).to(device, dtype) for shape in shapes]
        self.embedding, self.cos_sin, self.head, *self.weights = numbers
        self.device, self.dtype = device, dtype

    def __call__(
        self, ids: Tensor, logits_indices: Tensor, cache: Any, out: Tensor | None = None
    ) -> Tensor:
        hidden = self.embedding[ids] + self.cos_sin[cache.device.positions]
        for layer, weight in enumerate(self.weights):
            heads = (hidden @ weight.T / 8).view(len(ids), 8, self.head_dim)
            kv = heads[:, 4:].reshape(len(ids), 2, self.kv_heads, self.head_dim)
            hidden = hidden + cache.attend(layer, heads[:, :4], kv, 0.5).flatten(1)
        return torch.mm(hidden[logits_indices], self.head.T, out=out)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(torch.float64, CPU)


class Replayed(Eager):
    """A recorder that runs the work once, like a graph; a replay gives the same numbers."""

    def record(self, run: Any) -> Any:
        found = run()
        return lambda: found


def host_of(rows: Sequence[Row], moves: tuple[Any, ...] = ((), ()), scored: bool = False) -> Step:
    """Returns the layout of rows; with ``scored``, all tokens get logits a second time."""
    layout = layout_of(rows, range(0, len(rows) * LENGTH, LENGTH))
    arrays = {name: part.numpy() for name, part in vars(layout).items()}
    if scored:
        arrays["logits_indices"] = np.append(
            arrays["logits_indices"], np.arange(len(arrays["ids"]))
        )
    return StepLayout(**{**arrays, "moves": np.array(moves, np.int64).reshape(2, -1)})


def logits_for(model: Model, limits: Limits = LIMITS) -> Tensor:
    """Returns the tensor that all graphs write their logits to."""
    return torch.empty((limits.tokens, VOCAB), dtype=model.dtype, device=model.device)


def graphed(model: Model, recorder: Any) -> tuple[GraphedForward, PoolCache]:
    cache = PoolCache(model)
    return GraphedForward(model, cache, LIMITS, logits_for(model), recorder), cache


@torch.inference_mode()
def alone(model: Model, cache: PoolCache, step: Step) -> torch.Tensor:
    """The step without padding."""
    parts = vars(step).items()
    own = StepLayout(**{name: torch.from_numpy(part).to(model.device) for name, part in parts})
    cache.begin(step, own)
    return model(own.ids, own.logits_indices, cache)


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_token_count_has_a_close_bucket(n, most) -> None:
    n = min(n, most)
    found = buckets(most)
    assert list(found) == sorted(set(found))
    size = next(s for s in found if s >= n)
    assert size == found[-1] or size <= max(2 * n, 8)
    assert found[-1] == most


@given(rows_of(ROWS, 30, 1, 6), st.integers(0, 6))
def test_padding_follows_the_step_and_uses_only_the_scratch_slot(rows, moved) -> None:
    step, n, size = host_of(rows, (range(moved), range(10, 10 + moved))), len(rows), 30
    step.adapters[:] = range(1, 1 + len(step.ids))
    padding = dict.fromkeys(("ids", "positions", "tree", "adapters"), (size, 0))
    padding |= {"slots": (size, LIMITS.scratch), "visible_lens": (size, 1)}
    padding |= {"kv_starts": (ROWS + 1, LIMITS.scratch), "trunks": (ROWS + 1, 1)}
    padding |= {"nodes": (ROWS + 1, 0), "moves": (12, None), "query_offsets": (ROWS + 2, None)}
    parts = {name: np.full(length, -7, np.int64) for name, (length, _) in padding.items()}
    fill(parts, step, LIMITS)
    moves, offsets = parts.pop("moves").reshape(2, 6), parts.pop("query_offsets").tolist()
    for name, part in parts.items():
        own, (length, value) = getattr(step, name).tolist(), padding[name]
        assert part.tolist() == own + [value] * (length - len(own)), name
    assert offsets == [*step.query_offsets.tolist(), *[len(step.ids)] * (ROWS - n), size]
    assert moves[:, :moved].tolist() == step.moves.tolist()
    assert (moves[:, moved:] == LIMITS.scratch).all()


@settings(deadline=None, max_examples=20)
@given(steps=st.lists(STEP, min_size=1, max_size=3), scored=st.booleans())
def test_padded_step_equals_the_unpadded_step(model, steps, scored) -> None:
    recorder = Eager()
    run, cache = graphed(model, recorder)
    other = PoolCache(model)
    for rows in steps:
        step, calm = host_of(rows, ((20, 22), (19, 20)), scored), host_of(rows, scored=scored)
        expected = alone(model, other, step)
        assert run.start_tokens(step)().tolist() == first_greatest(expected).tolist()
        torch.testing.assert_close(run.start_logits(calm)(), alone(model, other, calm))
        torch.testing.assert_close(cache.pool[:, :-1], other.pool[:, :-1])
    assert recorder.recorded == len({run.size_of(host_of(rows)) for rows in steps})


def test_step_beyond_a_limit_uses_no_graph(model) -> None:
    run, cache = graphed(model, Eager())
    assert run.size_of(host_of([(3, 1, (-1,)), (0, 1, ())])) == 8
    assert run.size_of(host_of([(3, 1, ()), (0, 29, None)])) == 30
    assert run.start_tokens(host_of([(3, 1, ()), (0, 30, ())])) is None  # 31 tokens
    assert run.start_tokens(host_of([(3, 1, range(-1, 30))])) is None  # 32 tokens
    assert run.start_tokens(host_of([(3, 1, ())], (range(7), range(7)))) is None  # 7 moves
    assert run.start_tokens(host_of([(3, 1, ())] * (ROWS + 1))) is None
    assert torch.equal(cache.pool, PoolCache(model).pool)


def test_warm_up_records_each_bucket_once_and_changes_no_row(model) -> None:
    recorder = Eager()
    run, cache = graphed(model, recorder)
    for _ in range(2):
        run.warm_up()
    assert recorder.recorded == len(buckets(LIMITS.tokens))
    assert torch.equal(cache.pool[:, :-1], PoolCache(model).pool[:, :-1])
    assert run.start_tokens(host_of([(3, 1, ())])) is not None
    assert recorder.recorded == len(buckets(LIMITS.tokens))


def test_graph_tensors_outlive_the_recording_of_the_graph(model) -> None:
    """A graph reads by address, so freed memory would have other numbers."""
    seen = list[weakref.ref[Tensor]]()

    class Watched(PoolCache):
        def begin(self, host: Step, device: StepLayout[Tensor]) -> None:
            super().begin(host, device)
            seen.extend(map(weakref.ref, vars(device).values()))

    run = GraphedForward(model, Watched(model), LIMITS, logits_for(model), Replayed())
    run.warm_up()
    gc.collect()
    assert seen
    assert all(tensor() is not None for tensor in seen)


@pytest.mark.parametrize("tokens", [8, 30, 264])
def test_all_graphs_hold_the_logits_of_the_largest_one_only(model, tokens: int) -> None:
    """After warm-up, the bytes held do not grow with the number of graphs."""
    limits, held = replace(LIMITS, tokens=tokens), list[Tensor]()

    class Holding(Replayed):
        def record(self, run: Any) -> Any:
            replay = super().record(run)
            held.append(replay()[0])
            return replay

    run = GraphedForward(model, PoolCache(model), limits, logits_for(model, limits), Holding())
    run.warm_up()
    assert sorted(map(len, held)) == list(buckets(tokens))
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    apart = sum(each.nbytes for each in held)
    print(f"{len(held)} graphs hold {sum(memory.values())} bytes of logits; apart {apart}")
    assert [*memory.values()] == [tokens * VOCAB * model.dtype.itemsize]


def test_cache_moves_happen_even_if_logits_run_out_of_memory(model, monkeypatch) -> None:

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run, cache = graphed(model, Replayed())
    run.warm_up()
    step = host_of([(3, 2, ()), (4, 1, ())], ((20, 22), (19, 20)))
    monkeypatch.setattr(Tensor, "index_select", full)
    with pytest.raises(torch.OutOfMemoryError):
        run.start_logits(step)
    pool = PoolCache(model).pool
    assert torch.equal(cache.pool[:, [19, 20]], pool[:, [20, 22]])


def test_step_with_many_prompt_tokens_uses_no_graph(model) -> None:
    limits = replace(LIMITS, rows=5, tokens=400)
    run = GraphedForward(model, PoolCache(model), limits, logits_for(model, limits), Eager())
    assert run.size_of(host_of([(0, 60, ())] * 4)) == 256
    assert run.size_of(host_of([(0, 64, None)] * 4)) == 256
    assert run.size_of(host_of([(0, 64, None)] * 4 + [(3, 1, ())])) == 384
    assert run.size_of(host_of([(0, 64, None)] * 4 + [(3, 1, None)])) is None


def test_graph_that_does_not_fit_memory_is_tried_once(model) -> None:
    class Full(Eager):
        def record(self, run: Any) -> Any:
            super().record(run)
            raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = Full()
    run, _ = graphed(model, recorder)
    assert [run.start_tokens(host_of([(3, 1, ())])) for _ in range(2)] == [None, None]
    assert recorder.recorded == 1


def test_graph_capture_error_is_raised(model) -> None:
    class Broken(Eager):
        def record(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    run, _ = graphed(model, Broken())
    with pytest.raises(RuntimeError):
        run.start_tokens(host_of([(3, 1, ())]))


@pytest.mark.skipif(
    not (torch.cuda.is_available() and tree_kernel.available()), reason="needs a CUDA GPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_graphs_equal_eager_steps(dtype) -> None:
    """Successive layouts of the same bucket, and then another bucket and back."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(dtype, device)
    run, cache = graphed(model, CudaGraphs(device))
    eager, other = graphed(model, Eager())  # padded alike, so that products round alike
    tree = (-1, -1, 0, 1)
    rows: list[list[Row]] = [
        [(5, 1, tree), (30, 1, ())], [(2, 1, ()), (40, 1, tree)], [(9, 1, ())], [(0, 1, ())] * 4,
        [(50, 1, (-1, 0, 1, 2, 3))], [(5, 1, range(-1, 6)), (1, 1, range(-1, 12)), (33, 1, tree)],
        [(7, 1, (-1, 0)), (8, 1, (-1, -1)), (9, 1, ())], [(0, 17, ()), (6, 1, tree), (0, 5, None)],
        [(3, 9, None)], [(12, 1, ())],
    ]  # fmt: skip
    for each in rows:
        step = host_of(each, ((20, 22), (19, 20)))
        found = run.start_tokens(step)
        assert found is not None
        assert found().tolist() == eager.start_tokens(step)().tolist()
        assert torch.equal(cache.pool[:, :-1], other.pool[:, :-1])
        if dtype == torch.float32:  # where products of a padded step round nearly alike
            calm, third = host_of(each, scored=True), PoolCache(model)
            third.pool.copy_(cache.pool)
            unpadded = alone(model, third, calm)
            torch.testing.assert_close(run.start_logits(calm)(), unpadded, rtol=1e-4, atol=1e-3)
            eager.start_logits(calm)()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_choice_equals_cpu_choice() -> None:
    logits = torch.randint(0, 9, (33, 5000), generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[7, 4321] = torch.nan
    assert first_greatest(logits.cuda()).tolist() == first_greatest(logits).tolist()


needs_triton = pytest.mark.skipif(
    not available(),
    reason="needs Triton and a GPU, or Triton and TRITON_INTERPRET=1, as in .ci/run",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter's products of bfloat16 are wrong.
CLOSE = {torch.float32: 1e-5, torch.float16 if INTERPRETED else torch.bfloat16: 2e-2}
TOKENS, PLACES = 5, 12
by_shape = pytest.mark.parametrize("shape", [(14, 2, 64), (4, 2, 24)])
by_dtype = pytest.mark.parametrize("dtype", CLOSE)


class Pools:
    """Keys and values of two layers; the positions and places of a step."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.all = torch.zeros((2, PLACES, 2, kv_heads, dim), dtype=dtype, device=DEVICE)
        self.device = SimpleNamespace(
            positions=torch.tensor([3, 4, 9, 0, 39], device=DEVICE),
            slots=torch.tensor([7, 2, 5, 11, 0], device=DEVICE),
        )

    def pool(self, layer: int, *_: object) -> Tensor:
        return self.all[layer]

    def keep(self, layer: int, kv: Tensor) -> None:
        self.all[layer].index_copy_(0, self.device.slots, kv.nan_to_num(0.0, 0.0, 0.0))


def both(shape, dtype) -> tuple[FusedOperations, TensorOperations]:
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    cos_sin = some((40, 2, dim), dtype)
    return FusedOperations(cos_sin, heads, kv_heads), TensorOperations(
        cos_sin, heads, kv_heads, functional.silu
    )


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=CLOSE[a.dtype], atol=CLOSE[a.dtype])


@needs_triton
@by_shape
@by_dtype
@pytest.mark.parametrize("adds", [False, True])
def test_fused_add_and_norm_equals_torch(shape, dtype, adds: bool) -> None:
    fused, plain = both(shape, dtype)
    width = shape[0] * shape[2]
    norm, hidden = Norm(some((width,), dtype), 1e-6), some((TOKENS, width), dtype)
    delta, copy = some((TOKENS, width), dtype) if adds else None, hidden.clone()
    close(fused.add_and_norm(hidden, delta, norm), plain.add_and_norm(copy, delta, norm))
    close(hidden, copy)


@needs_triton
@by_shape
@by_dtype
@pytest.mark.parametrize("normed", [False, True])
def test_fused_rope_and_kv_write_equal_torch(shape, dtype, normed) -> None:
    fused, plain = both(shape, dtype)
    heads, kv_heads, dim = shape
    norm = Norm(some((heads + kv_heads, dim), dtype), 1e-6) if normed else None
    qkv = some((TOKENS, (heads + 2 * kv_heads) * dim), dtype)
    qkv[2, -1], qkv[3, -2] = torch.nan, torch.inf
    ours, theirs = Pools(kv_heads, dim, dtype), Pools(kv_heads, dim, dtype)
    query = fused.apply_rope_and_write_kv(1, qkv.clone(), norm, ours)
    close(query, plain.apply_rope_and_write_kv(1, qkv.clone(), norm, theirs))
    close(ours.all, theirs.all)
    assert ours.all.isfinite().all()
    assert ours.all[1].abs().sum() > 0


@needs_triton
@by_shape
@by_dtype
def test_fused_gate_equals_torch(shape, dtype) -> None:
    fused, plain = both(shape, dtype)
    gate_up = some((TOKENS, 2 * 1500), dtype)
    close(fused.gate(gate_up), plain.gate(gate_up.clone()))
