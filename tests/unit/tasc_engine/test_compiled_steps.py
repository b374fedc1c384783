"""Tests of products, and that a token's logits have the same bits in any compiled step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import numba
import numpy as np
import pytest
import torch
from numba import njit
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from tree_layouts import depths_of, forest

import tiny
from lora_folders import make_adapter
from support import refused
from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.errors import UnsupportedModel
from tasc_engine.kernels.cpu import int8
from tasc_engine.kernels.cpu.compiling import Size
from tasc_engine.kernels.cpu.products import (
    MOST_INPUTS,
    PLAIN,
    SHIFT,
    SPARE_BYTES,
    Int8Weight,
    instructions,
    multiplies,
    multiply,
    room_for_sums,
)
from tasc_engine.kernels.cpu.simd import WIDTH
from tasc_engine.kernels.cpu.team import Team, meet
from tasc_engine.layout import ForwardBatch, plain_batch
from tasc_engine.model import decoder, linears, loading
from tasc_engine.model.decoder import FAMILIES, CompiledDecoder
from tasc_engine.model.folder import OWN_TYPES
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.linears import CompiledLinear, packed
from tasc_store import TaskRecord
from tasc_store.tasks import record

ROWS, LENGTH = 4, 96
VOCAB = 97
SHAPE: dict[str, Any] = {**tiny.SHAPE, "vocab_size": VOCAB, "intermediate_size": 80}


def one_kv_head(heads: int) -> dict[str, Any]:
    """A shape whose heads of 16 elements fill a vector, and share one head of keys."""
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 16}
    return {**SHAPE, **heads_of, "hidden_size": 16 * heads}


# The number of queries that share a head decides on their lanes. Heads of 8 fill no vector.
MODELS = {
    "qwen2": Qwen2Config(**SHAPE),
    "llama": LlamaConfig(**one_kv_head(3)),
    "two queries": LlamaConfig(**one_kv_head(2)),
    "seven queries": Qwen2Config(**one_kv_head(7)),
    "eight queries": Qwen3Config(**one_kv_head(8)),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 32, "num_key_value_heads": 4}),
    "mistral": MistralConfig(**one_kv_head(9), sliding_window=16),
}

# Others are not compiled on this processor.
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if multiplies(dtype.itemsize)]
HOW = {"int8": "int8-dynamic", "float head": "int8-dynamic-float-head"}
KINDS = ["int8", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]


@pytest.mark.parametrize("kind", instructions())
@pytest.mark.parametrize("outputs", [33, 48, 97])
@pytest.mark.parametrize("width", [1, 7, 64, 1041, MOST_INPUTS])
def test_product_is_the_rounded_sum_of_integers(kind: int, outputs: int, width: int) -> None:
    make = np.random.default_rng(width)
    x, weights = (
        make.integers(-127, 128, (15, width)),
        make.integers(-127, 128, (2, outputs, width)),
    )
    x[:2], weights[:, :2], weights[:, 2] = 127, 127, -127  # the greatest sums
    scales, bias = make.random((2, outputs)).astype(np.float32)
    by_row, sums = make.random(15).astype(np.float32), room_for_sums()
    for own in (bias, None):
        each = [Int8Weight.of(w.astype(np.int8), scales, own) for w in weights]
        joined = Int8Weight.joined(each)
        for layer, rows in ((0, 15), (1, 15), (1, 3), (0, 1), (0, 0)):
            shifted = (x[:rows] + SHIFT).astype(np.uint8).reshape(-1)
            shifted = np.concatenate((shifted, np.full(SPARE_BYTES, 255, np.uint8)))
            out = np.full(rows * outputs + WIDTH, np.nan, np.float32)
            for part in (1, 0):
                multiply(shifted, by_row, rows, joined, layer, Size(kind), sums, out, part, 2)
            assert np.isnan(out[rows * outputs :]).all()  # nothing is written behind the last row
            exact = (x[:rows] @ weights[layer].T).astype(np.float32)
            expected, found = (
                exact * scales * by_row[:rows, None],
                out[: rows * outputs].reshape(rows, outputs),
            )
            if own is None:
                assert np.array_equal(found, expected)
            else:  # the last product and the bias may be rounded together
                assert np.allclose(found, expected + own, rtol=1e-5, atol=1e-3)
        assert np.array_equal(each[1].unpacked(), weights[1])


@pytest.mark.parametrize("width", [1, 16, 37, 160])
def test_rows_are_rounded_by_their_greatest_number(width: int) -> None:
    make = np.random.default_rng(width)
    sizes = [[1e-30], [1.0], [1e30], [0.0], [1], [1], [1e-38]]
    x = (make.standard_normal((7, width)) * sizes).astype("f4")
    x[4, width // 2], x[5, -1] = np.nan, -np.inf
    out, scales = np.empty(x.shape, np.uint8), np.empty(7, np.float32)
    int8.quantise(x.reshape(-1), out.reshape(-1), scales)
    whole, factors = out[:4].astype(int) - 128, np.abs(x[:4]).max(1) / np.float32(127)
    assert np.array_equal(scales[:4], factors)
    assert np.abs(whole[:3]).max(1).tolist() == [127] * 3
    assert not whole[3].any()
    assert (np.abs(x[:4] - whole * factors[:, None]) <= 0.501 * factors[:, None]).all()
    assert np.isnan(scales[4:6]).all()
    assert scales[6] == 0
    assert (out[6] == 128).all()


@pytest.mark.parametrize("biased", [False, True])
def test_joined_int8_layers_are_close_to_the_separate_layers(biased: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(48, width, biased).requires_grad_(False) for width in (32, 17)]
    x, joined = torch.randn(5, 48), CompiledLinear.rounding(*layers)
    expected = torch.cat([layer(x) for layer in layers], -1)
    assert (joined(x) - expected).norm() / expected.norm() < 0.02
    out = torch.empty_like(expected)
    assert joined(x, out) is out
    assert torch.equal(out, joined(x))
    assert joined(x[:0]).shape == (0, 49)
    weights = torch.cat([layer.weight for layer in layers])
    assert (joined.weight - weights).abs().max() <= weights.abs().max() / 127
    x[1, 3] = torch.inf
    assert joined(x)[1].isnan().all()
    assert torch.equal(joined(x)[2:], out[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [33, 96])
@pytest.mark.parametrize("width", [2, 64, 1042])
def test_float_products_are_close_and_have_the_same_bits_for_any_rows(
    dtype: torch.dtype, outputs: int, width: int
) -> None:
    torch.manual_seed(width)
    layers = [[nn.Linear(width, n, n > 9).to(dtype) for n in (9, outputs - 9)] for _ in range(2)]
    weight, x = packed(layers), torch.randn(15, width).to(dtype)
    weight_of_first = packed(layers[:1])
    for layer, own in enumerate(layers):
        exact = torch.cat([linear.double()(x.double()) for linear in own], -1)
        found = CompiledLinear(weight, layer)(x)
        error = (found - exact).norm() / exact.norm()
        # Rounding each partial sum to float32 moves a sum by about width ** 0.5 / 5 units.
        limit = max(width**0.5 / 4, 1) * torch.finfo(torch.float32).eps
        assert error < max(limit, torch.finfo(dtype).eps * (dtype != torch.float32))
        for row in range(15):
            assert torch.equal(CompiledLinear(weight, layer)(x[row]), found[row])
    alone = CompiledLinear(weight_of_first)
    assert torch.equal(alone.weight, torch.cat([linear.weight.to(dtype) for linear in layers[0]]))


def make_target(
    folder: Path, name: str, rows: int, kind: str = "int8", adapters: tuple[Path, ...] = ()
) -> Target:
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder)
    how = {"quantization": HOW[kind]} if kind in HOW else {"dtype": kind}
    config = EngineConfig(rows=rows, max_model_len=LENGTH, max_draft_tokens=8)
    named = tuple((path.name, path) for path in adapters)
    return Target.load(ModelSource(folder, adapters=named, **how), config)


class Session:
    """Rows of known tokens, in random steps of chunks and trees; row i may use an adapter."""

    def __init__(
        self, target: Target, tokens: list[list[int]], seed: int, adapters: list[int]
    ) -> None:
        self.target, self.tokens, self.random = target, tokens, Random(seed)
        self.adapters = np.array(adapters, np.int32)
        self.cached = [0] * len(tokens)

    def step(self) -> list[tuple[int, int, torch.Tensor]]:
        """Runs a step; returns the logits after some places, as ``(row, place, logits)``."""
        rows = [r for r, done in enumerate(self.cached) if done < LENGTH - 20]
        rows = self.random.sample(rows, self.random.randint(1, len(rows)))
        trees, drafts, given, found, moves = [], [], [], [], []
        before = [self.cached[r] for r in rows]
        for r in rows:
            done = self.cached[r]
            chunk = self.random.choice((1, 1, 2, 5, 11))
            given.append(self.tokens[r][done : done + chunk])
            tree = [self.random.randrange(-1, i) for i in range(self.random.choice((0, 0, 3, 8)))]
            path = self._path(tree)
            words = [self.random.randrange(VOCAB) for _ in tree]
            for depth, node in enumerate(path):
                words[node] = self.tokens[r][done + chunk + depth]
            trees.append(tree)
            drafts.append(words)
            # Logits come after the last token, and after each node.
            places = [(0, done + chunk - 1)]
            places += [(1 + n, done + chunk + d) for d, n in enumerate(path)]
            found.append((r, places, 1 + len(tree)))
            first = r * LENGTH + done + chunk
            moves += [(first + node, first + depth) for depth, node in enumerate(path)]
            self.cached[r] = done + chunk + len(path)
        counts = [len(words) for words in given]
        batch = ForwardBatch(
            kv_starts=np.array([r * LENGTH for r in rows]),
            context_lens=np.array(before, np.int32),
            tokens=np.array([t for words in given for t in words], np.int32),
            query_offsets=np.cumsum([0, *counts]).astype(np.int32),
            draft_of=np.arange(len(rows), dtype=np.int32),
            drafts=forest(trees, drafts),
            adapters=self.adapters[rows],
        )
        logits, begin, after = self.target.logits(batch).clone(), 0, []
        for r, places, count in found:
            after += [(r, place, logits[begin + at]) for at, place in places]
            begin += count
        self.target.cache.pending_moves = np.array(moves, np.int64).reshape(-1, 2).T
        return after

    def _path(self, tree: list[int]) -> list[int]:
        """The nodes from a child of the root down to a random node; they get the true tokens."""
        node, path = self.random.randrange(-1, len(tree)), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = tree[node]
        assert [depths_of(tree)[n] for n in path] == [*range(1, len(path) + 1)]
        return path


@torch.inference_mode()
def each_alone(target: Target, tokens: list[int], adapter: int = 0) -> torch.Tensor:
    """The logits of each token in a step of its own, ``[n, vocab]``."""
    used = np.array([adapter], np.int32)
    steps = (plain_batch([0], i, np.array([t], np.int32)) for i, t in enumerate(tokens))
    return torch.cat([target.logits(replace(s, adapters=used)).clone() for s in steps])


@torch.inference_mode()
def differing(
    folder: Path,
    name: str,
    steps: int,
    seed: int,
    kind: str = "int8",
    threads: int = 1,
    adapters: tuple[Path, ...] = (),
) -> list[bool]:
    """For each compared place, whether its logits differ from those of the token alone.

    Tokens alone are computed on one thread, and steps on ``threads``. Rows use no adapter or one of
    the adapters, in turn.
    """
    words = Random(seed)
    tokens = [[words.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(ROWS)]
    own = [row % (len(adapters) + 1) for row in range(ROWS)]
    alone = make_target(folder, name, 1, kind, adapters)
    expected = [each_alone(alone, row[:-1], used) for row, used in zip(tokens, own, strict=True)]
    target, found, step = make_target(folder, name, ROWS, kind, adapters), list[bool](), 0
    with threads_of_torch(threads):
        while step < steps:
            session = Session(target, tokens, seed + step, own)
            while step < steps and min(session.cached) < LENGTH - 20:
                for row, place, logits in session.step():
                    found.append(not torch.equal(logits, expected[row][place]))
                step += 1
            target.cache.clear()
            target.cache.pending_moves = np.zeros((2, 0), np.int64)
    return found


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "int8") for name in MODELS),
        *((name, kind) for kind in KINDS[1:] for name in ("llama", "qwen3")),
        ("llama", "float head"),
        *(("mistral", kind) for kind in KINDS[1:2]),
    ],
)
def test_logits_have_the_bits_of_each_token_alone(
    name: str, kind: str, tmp_path: Path, everything, seed
) -> None:
    found = differing(tmp_path / name, name, 1000 if everything else 100, seed, kind)
    assert len(found) > 100
    assert not any(found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_adapters_have_the_bits_of_each_token_alone(
    kind: str, tmp_path: Path, seed
) -> None:
    make_target(tmp_path / "qwen2", "qwen2", 1)
    adapters = [make_adapter(tmp_path / "qwen2", tmp_path / f"a{n}", seed=n) for n in (1, 2)]
    found = differing(tmp_path / "qwen2", "qwen2", 60, seed, kind, adapters=tuple(adapters))
    assert len(found) > 60
    assert not any(found)
    target, tokens = make_target(tmp_path / "qwen2", "qwen2", 1, kind, tuple(adapters)), [3, 14, 15]
    each = [each_alone(target, tokens, used) for used in range(3)]
    assert not torch.allclose(each[0], each[1])
    assert not torch.allclose(each[1], each[2])
    assert torch.equal(
        each[0], each_alone(make_target(tmp_path / "qwen2", "qwen2", 1, kind), tokens)
    )


def test_logits_of_separate_operations_have_other_bits_in_other_steps(
    tmp_path: Path, monkeypatch
) -> None:
    """Positive control of the tests above."""
    monkeypatch.setattr(decoder, "_compiles", lambda model: False)
    assert any(differing(tmp_path / "llama", "llama", 60, 0, "float32"))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_compiled_steps_are_close_to_separate_operations(
    kind: str, tmp_path: Path, monkeypatch
) -> None:
    tokens = [3, 14, 15, 92, 65, 35]
    target = make_target(tmp_path / "qwen3", "qwen3", 1, kind)
    assert isinstance(target.decoder, CompiledDecoder)
    found = each_alone(target, tokens)
    monkeypatch.setattr(decoder, "_compiles", lambda model: False)
    other = make_target(tmp_path / "qwen3", "qwen3", 1, kind)
    assert not isinstance(other.decoder, CompiledDecoder)
    expected = each_alone(other, tokens)
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < 4 * torch.finfo(found.dtype).eps


@pytest.mark.parametrize("kind", instructions()[:-1])
def test_all_instructions_give_the_same_bits(kind: int, tmp_path: Path, monkeypatch) -> None:
    tokens = [3, 14, 15, 92, 65, 35]
    found = each_alone(make_target(tmp_path / "qwen2", "qwen2", 1), tokens)
    monkeypatch.setattr(decoder, "fastest", lambda: Size(kind))
    other = make_target(tmp_path / "qwen2", "qwen2", 1)
    assert torch.equal(each_alone(other, tokens), found)


def test_logits_are_close_to_those_in_float32(tmp_path: Path) -> None:
    tokens = [3, 14, 15, 92, 65, 35]
    rounded, head, exact = (
        each_alone(make_target(tmp_path / "llama", "llama", 1, kind), tokens)
        for kind in ("int8", "float head", "float32")
    )
    assert 0 < (head - exact).norm() < (rounded - exact).norm() < 0.05 * exact.norm()


def test_unrelated_int8_logits_are_refused_and_distant_ones_logged(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(linears, "MOST", 2)
    make_target(tmp_path / "llama", "llama", 1)
    assert "differ by" in caplog.text
    monkeypatch.setattr(linears, "MOST", 0.4)  # all weights are 0
    with refused(UnsupportedModel, "int8-dynamic", "relative difference"):
        make_target(tmp_path / "llama", "llama", 1)


@pytest.mark.parametrize("wrong", ["scale", "eps"])
def test_int8_logits_of_wrong_operations_are_refused(
    wrong: str, tmp_path: Path, monkeypatch
) -> None:
    make_target(tmp_path / "llama", "llama", 1)
    made = decoder.CompiledDecoder.__init__

    def make(self: CompiledDecoder, model: Any, *given: Any) -> None:
        if wrong == "eps":
            model.config.rms_norm_eps = 0.3
        made(self, model, *given)
        if wrong == "scale":
            self._shape = self._shape._replace(scale=np.float32(3))

    monkeypatch.setattr(decoder.CompiledDecoder, "__init__", make)
    with refused(UnsupportedModel, "relative difference"):
        make_target(tmp_path / "llama", "llama", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_other_bits_are_refused_in_int8_and_logged_in_floats(
    kind: str, tmp_path: Path, monkeypatch, caplog
) -> None:
    found = Target._alone
    monkeypatch.setattr(Target, "_alone", lambda *given: found(*given) + 1e-3)
    if kind == "int8":
        with refused(UnsupportedModel, "steps of several tokens"):
            make_target(tmp_path / "llama", "llama", 1, kind)
    else:
        assert make_target(tmp_path / "llama", "llama", 1, kind)
        assert "steps of several tokens" in caplog.text


def test_models_and_processors_without_float_products_have_separate_operations(
    monkeypatch,
) -> None:
    def compiles(dtype: torch.dtype = torch.bfloat16, **config: Any) -> bool:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | config)).to(dtype).eval()
        return isinstance(decoder.lean(model, 64), CompiledDecoder)

    for dtype in (torch.float32, torch.bfloat16):
        assert compiles(dtype) == multiplies(dtype.itemsize)
        assert not compiles(dtype, hidden_act="gelu")
    assert not compiles(torch.float16)
    assert not compiles(torch.float64)
    assert not compiles(intermediate_size=81)
    assert compiles(torch.float32, intermediate_size=81) == multiplies(4)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert not compiles()
    assert compiles(torch.float32) == multiplies(4)
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not compiles(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_any_number_of_threads_gives_the_same_bits(
    threads: int, kind: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(decoder, "MAX_LANES", 6)  # threads share the attention of a row
    assert not any(differing(tmp_path / "llama", "llama", 20, 0, kind, threads=threads))


def test_target_may_change_its_number_of_threads(tmp_path: Path) -> None:
    target, tokens = make_target(tmp_path / "llama", "llama", 1), [3, 14, 15, 92]
    expected = each_alone(target, tokens)
    for threads in (4, 2, 3, 1, 4):
        with threads_of_torch(threads):
            assert torch.equal(each_alone(target, tokens), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scored_prompts_and_hidden_states_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    target, tokens = make_target(tmp_path / "llama", "llama", 2, kind), [3, 14, 15, 92, 65]
    expected, known = each_alone(target, tokens), np.array([True, False])
    batch = plain_batch([0, LENGTH], 0, np.array(tokens, np.int32))
    batch = replace(batch, scored=np.array([5, 5], np.int32), known=known)
    assert torch.equal(target.logits(batch), torch.cat((expected[-1:], expected, expected)))
    target.keep_hidden_states(HiddenStateRequest(hidden=True))
    assert torch.equal(target.logits(batch), torch.cat((expected[-1:], expected, expected)))
    hidden, _ = target.hidden_states.at(torch.arange(10))
    assert torch.equal(target.decoder.head(hidden), torch.cat((expected, expected)))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_of_one_thread_ends_the_call_and_not_the_team(failing: int) -> None:
    team = Team()

    @njit(nogil=True)
    def both_meet(found: Any, part: int, parts: int, counter: Any, target: int) -> None:
        found[part] = parts
        meet(counter, target, parts)

    def called(found: Any, own: Any, *parts: Any) -> None:
        if own == failing and len(found) > 3:
            raise MemoryError("for part 1")
        both_meet(found, *parts)

    ids = lambda part, parts: part  # noqa: E731
    with threads_of_torch(3):
        good, bad = np.zeros(3, np.int64), np.zeros(4, np.int64)
        team.run(called, good, own=ids)  # the first one compiles, on one thread
        assert good.tolist() == [1, 0, 0]
        for _ in range(3):
            with refused(MemoryError, "part 1"):
                team.run(called, bad, own=ids)
            good[:] = 0
            team.run(called, good, own=ids)
            assert good.tolist() == [3, 3, 3]


def test_interrupted_call_and_one_that_fails_between_meetings_leave_the_team_usable() -> None:
    team, error = Team(), dict[int, BaseException]()

    @njit(nogil=True)
    def meets(counter: Any, target: int, parts: int) -> int:
        return meet(counter, target, parts)

    def called(found: Any, own: int, part: int, parts: int, counter: Any, target: int) -> None:
        target = meets(counter, target, parts)
        if own in error:
            raise error[own]
        found[part] = parts
        meets(counter, target, parts)

    ids = lambda part, parts: part  # noqa: E731
    with threads_of_torch(3):
        found = np.zeros(3, np.int64)
        team.run(called, found, own=ids)
        for failing in (0, 2):
            error[failing] = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                team.run(called, found, own=ids)
            error.clear()
            found[:] = 0
            team.run(called, found, own=ids)
            assert found.tolist() == [3, 3, 3]


def test_only_plain_instructions_are_used_if_numba_compiles_for_another_processor(
    monkeypatch,
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert instructions() == (PLAIN,)
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    monkeypatch.setattr(numba.config, "ENABLE_AVX", 0)
    assert instructions() == (PLAIN,)


def test_other_settings_and_models_are_refused(tmp_path: Path) -> None:
    for wrong, part in (
        ({"dtype": "bfloat16"}, "leave dtype out"),
        ({"device": "cuda"}, "use int8 or nf4"),
    ):
        for quantization in HOW.values():
            with refused(ValueError, quantization, part):
                ModelSource(tmp_path, quantization=quantization, **wrong)
    known = {"name": "t", "model": "m", "fingerprint": "0" * 32, "template": "{input}"}
    for quantization in HOW.values():
        with refused(ValueError, quantization, "float32"):
            TaskRecord(**known, dtype="bfloat16", quantization=quantization)
    folder = tiny.make_folder(tmp_path / "neox", "gpt_neox")
    gelu = tmp_path / "gelu"
    config = LlamaConfig(**SHAPE, hidden_act="gelu")
    AutoModelForCausalLM.from_config(config).save_pretrained(gelu)
    for other in (folder, gelu):
        with refused(UnsupportedModel, "int8-dynamic", "with silu gates"):
            small = EngineConfig(rows=1, max_model_len=LENGTH)
            Target.load(ModelSource(other, quantization="int8-dynamic"), small)
    assert set(OWN_TYPES) == FAMILIES.keys()
    assert get_args(loading.Quantization) == get_args(record.Quantization)
