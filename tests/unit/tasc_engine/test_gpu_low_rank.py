"""Tests of LoRA products by Triton kernels, on a GPU or in Triton's interpreter, and in graphs.

A machine with Triton and no GPU runs this file with TRITON_INTERPRET=1. `benchmarks/gpu/gpu.py`
runs it without any conftest, on machines that have no Redis and no Ray.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import ROWS, SPACE, batches, logits_of, relative
from hypothesis import given, seed, settings
from low_rank_cases import by_definition, cases, numbers, weights_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from interpreted_targets import as_on_gpu
from lora_folders import make_adapter
from tasc_engine.config import EngineConfig
from tasc_engine.kernels.gpu import low_rank
from tasc_engine.kernels.gpu.attention import INTERPRETED, available
from tasc_engine.layout import lay_out
from tasc_engine.lora.low_rank import GroupedTokens, MaskedTokens
from tasc_engine.model.cuda_graphs import GraphedForward, Limits, buckets
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target
from tiny import make_folder

needs_triton = pytest.mark.skipif(
    not available(),
    reason="needs Triton and a GPU, or Triton and TRITON_INTERPRET=1, as in .ci/run",
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
DEVICE = "cpu" if INTERPRETED else "cuda"
# Relative to the sum of absolute values; the interpreter's products of bfloat16 are wrong.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, HALF])
# Ranks of each adapter in each joined layer, inputs, widths, and the adapter of each token.
MIXED: Any = (
    [[17, 3, 0], [0, 0, 0], [4, 0, 70]], 1100, [150, 16, 33],
    [1, 3, 0, 2, 3, 3, *[1] * 18, 0, 2, *[3] * 4, 1],
)  # fmt: skip
MANY: Any = ([[n % 3 + 1] for n in range(20)], 40, [48], [*range(21), 20, 3, 0, 3])
NONE: Any = ([[4], [2]], 24, [16], [0, 0, 0])


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests run; they do if no conftest adds the option."""
    return bool(request.config.getoption("--all", default=True))


def added(case: Any, dtype: torch.dtype, way: Any = GroupedTokens, wrong: int = 0) -> float:
    """The error of a result; ``wrong`` tokens get the adapter of the token before them."""
    ranks, size, widths, own = case
    torch.manual_seed(0)
    weights = weights_of(ranks, size, widths, dtype)
    x, y = numbers(len(own), size, dtype=dtype), numbers(len(own), sum(widths), dtype=dtype)
    tokens, found = way(len(ranks)), y.to(DEVICE, copy=True)
    add = tokens.addition(weights, widths, torch.zeros(1, dtype=dtype, device=DEVICE))
    given = torch.tensor(own)
    given[1 : 1 + wrong] = given[:wrong].clone()
    tokens.begin(given.to(DEVICE))
    add(x[None].to(DEVICE), found[None])
    found = found.cpu()
    assert torch.equal(found[given == 0], y[given == 0])
    summed = by_definition(x, y, weights, widths, own, size=True).norm()
    return float((found - by_definition(x, y, weights, widths, own)).norm() / summed)


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rows of the interpreter's products one order of summation, as a GPU's have.

    Without AVX-512, NumPy's product of a tile sums its last rows in another order.
    """
    from triton.runtime import interpreter

    class RowByRow:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def matmul(a: Any, b: Any, dtype: Any) -> Any:
            return np.concatenate([np.matmul(a[i : i + 1], b, dtype=dtype) for i in range(len(a))])

    monkeypatch.setattr(interpreter, "np", RowByRow())


@needs_triton
@by_dtype
def test_grouped_product_of_each_token_equals_its_definition(dtype, everything: bool) -> None:
    @seed(int(os.environ.get("TASC_TEST_SEED", "0")))
    @settings(max_examples=60 if everything else 6, database=None, deadline=None)
    @given(case=cases())
    def adds(case: Any) -> None:
        assert added(case, dtype) <= CLOSE[dtype]

    adds()
    for case in (MIXED, MANY, NONE):
        assert added(case, dtype) <= CLOSE[dtype]


@needs_triton
def test_wrong_adapter_of_one_token_is_detected() -> None:
    """Positive control of the test above."""
    for case in (MIXED, MANY):
        assert added(case, torch.float32, wrong=1) > 100 * CLOSE[torch.float32]


@needs_triton
@by_dtype
def test_grouped_result_of_a_token_does_not_depend_on_other_tokens(dtype, monkeypatch) -> None:
    if INTERPRETED:
        multiply_row_by_row(monkeypatch)
    ranks, size, widths, own = MIXED
    weights = weights_of(ranks, size, widths, dtype)
    x, y = numbers(len(own), size, dtype=dtype), numbers(len(own), sum(widths), dtype=dtype)
    x, y, tokens = x.to(DEVICE), y.to(DEVICE), GroupedTokens(len(ranks))
    add = tokens.addition(weights, widths, y)

    def result(chosen: list[int]) -> Tensor:
        found = y[chosen].clone()
        tokens.begin(torch.tensor(own, device=DEVICE)[chosen])
        add(x[chosen], found)
        return found

    together, backwards = result([*range(len(own))]), result([*range(len(own))][::-1])
    assert torch.equal(backwards.flip(0), together)
    alone = [*range(0, len(own), 4)]
    assert torch.equal(torch.cat([result([t]) for t in alone]), together[alone])


@needs_triton
def test_weights_of_absent_adapters_are_not_read() -> None:
    ranks, size, widths = [[4, 2], [3, 5], [1, 0]], 20, [16, 7]
    weights = weights_of(ranks, size, widths, torch.float32)
    for part in weights[1]:
        part.down.fill_(torch.nan)
        part.up.fill_(torch.nan)
    x = numbers(5, size, dtype=torch.float32).to(DEVICE)
    for way, finite in ((GroupedTokens, True), (lambda _: MaskedTokens(), False)):
        tokens, y = way(len(ranks)), torch.zeros(5, sum(widths), device=DEVICE)
        add = tokens.addition(weights, widths, y)
        tokens.begin(torch.tensor([1, 3, 0, 1, 3], device=DEVICE))
        add(x, y)
        assert bool(y.isfinite().all()) == finite


@needs_triton
@pytest.mark.parametrize("tokens", [1, 5, 3000])
def test_groups_hold_each_token_of_an_adapter_once_and_in_order(tokens: int) -> None:
    own = torch.randint(0, 6, (tokens,), generator=torch.Generator().manual_seed(tokens))
    groups = low_rank.group(own.to(DEVICE), 5)
    for adapter in range(5):
        members = groups.members[adapter, : int(groups.counts[adapter])].tolist()
        assert members == (own == adapter + 1).nonzero().flatten().tolist()


class Tape(TorchDispatchMode):
    """A recorder that, like a CUDA graph, repeats recorded operations on the same tensors.

    Attributes:
        nodes: Number of recorded operations of each graph: launches, and torch operations that do
            more than make a view or an empty tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes = list[int]()

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self._steps, count = list[Callable[[], Any]](), len(self.nodes)
        self.nodes.append(0)
        with self, self._launches():
            found = run()
        steps, self._steps = self._steps, []
        assert steps
        assert len(self.nodes) == count + 1

        def replay() -> Any:
            for step in steps:
                step()
            return found

        return replay

    def wait(self) -> None:
        """Nothing runs meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        results = found if isinstance(found, tuple | list) else [found]
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.nodes[-1] += not (views or "empty" in str(func))

        def again() -> None:
            new = func(*args, **kwargs)
            news = new if isinstance(new, tuple | list) else [new]
            for old, own in zip(results, news, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != own.data_ptr():
                    old.copy_(own)

        self._steps.append(again)
        return found

    @contextmanager
    def _launches(self) -> Iterator[None]:
        """Records each launch of a kernel as one operation."""
        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)
            self.nodes[-1] += 1
            self._steps.append(lambda: launch(kernel, *args, **kwargs))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "run", recorded)
            yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base, an adapter of all layers, and one of some layers of the first block."""
    folder = tmp_path_factory.mktemp("lora")
    base = make_folder(folder / "base", "llama")
    first = make_adapter(base, folder / "first", 1, r=4, rank_pattern={"q_proj": 17})
    second = make_adapter(
        base, folder / "second", 2, r=3, target_modules=["k_proj", "up_proj"],
        layers_to_transform=[0],
    )  # fmt: skip
    return base, first, second


def load(folders: tuple[Path, Path, Path], adapters: bool = True) -> Target:
    base, first, second = folders
    named = (("first", first), ("second", second)) if adapters else ()
    config = EngineConfig(rows=len(ROWS), max_model_len=SPACE, prefill_chunk=16)
    return Target.load(ModelSource(base, dtype="float32", adapters=named), config)


def graphs_of(target: Target, recorder: Any) -> GraphedForward:
    limits = Limits(rows=9, tokens=24, moves=4, scratch=target.cache.slots)
    logits = torch.empty(limits.tokens, target.vocab_size)
    return GraphedForward(target.forward, target.cache, limits, logits, recorder)


@interpreted
@torch.inference_mode()
def test_graphs_with_and_without_adapters_serve_their_steps(folders, monkeypatch) -> None:
    """A step without adapters replays the same nodes as a target that has none."""
    rows = [(n, a + b - 1, 1, tree[:1]) for n, a, b, tree in ROWS]
    plain = [(0, *part) for _, *part in rows]
    expected = [logits_of(load(folders), these) for these in (rows, plain)]
    assert relative(*expected) > 0.01
    as_on_gpu(monkeypatch)
    target, tape = load(folders), Tape()
    graphs, steps = graphs_of(target, tape), [lay_out(batches(these)[1]) for these in (rows, plain)]
    target.logits(batches(rows)[0])
    prompts = target.cache.copied(0, target.cache.slots)
    target.logits(batches(plain)[0])
    bare = target.cache.copied(0, target.cache.slots)
    for _ in range(2):
        for step, logits, kv in zip(steps, expected, (prompts, bare), strict=True):
            target.cache.paste(0, kv)
            found = graphs.start_logits(step)
            assert found is not None
            assert relative(found(), logits) < 5e-6
    # The first step records both graphs, since they share buffers.
    without, within = tape.nodes
    base, alone = load(folders, adapters=False), Tape()
    assert graphs_of(base, alone).start_logits(steps[1]) is not None
    assert alone.nodes == [without]
    layers, products = 2, 4
    assert within == without + 3 + 2 * layers * products


@interpreted
@torch.inference_mode()
def test_warm_up_records_graphs_with_adapters_only_if_asked(folders, monkeypatch) -> None:
    as_on_gpu(monkeypatch)

    class Counting(Tape):
        def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
            self.nodes.append(0)
            return run

    target, tape = load(folders), Counting()
    graphs = graphs_of(target, tape)
    for adapters, times in ((False, 1), (True, 2), (True, 2)):
        graphs.warm_up(adapters)
        assert len(tape.nodes) == times * len(buckets(24))
