"""Tests that a GPU's kernels choose and score tokens as compiled code does on a CPU.

They run on a GPU or in Triton's interpreter (TRITON_INTERPRET=1), as those of the attention do.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from choosing_cases import DEVICE, HAS_KERNELS, Asked, allowed_of, begin, both, chooser_of, ints
from torch import Tensor
from tree_layouts import forest

from tasc_draft import Drafts
from tasc_engine import Sampling
from tasc_engine.kernels.gpu import sampling as kernels
from tasc_engine.kernels.gpu.attention import INTERPRETED
from tasc_engine.sampling import gpu_sampler, sampler
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, token_logprobs
from tasc_protocol import PARAMETERS

pytestmark = pytest.mark.skipif(
    not HAS_KERNELS,
    reason="Triton is not installed (CUDA builds of torch bring it), or there is neither a GPU "
    "nor TRITON_INTERPRET=1",
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.3, 1.0, 2.5],
    "top_p": [1.0, 1.0, 0.95, 0.5, 1e-9, 1 - 1e-12],
    "top_k": [0, 0, 1, 7, 100, 2000, 10**6],
    "min_p": [0.0, 0.0, 0.01, 1.0],
    "repetition_penalty": [1.0, 1.0, 1.4],
    "presence_penalty": [0.0, 0.0, 0.6],
    "frequency_penalty": [0.0, 0.0, 0.3],
}


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> int:
    """Rows of each comparison; few where the interpreter runs daily."""
    everything = request.config.getoption("--all", default=True)
    return 300 if not INTERPRETED else 100 if everything else 12


def some_asked(make: np.random.Generator, n: int, width: int) -> list[Asked]:
    """Returns random rules of rows that have seen some tokens."""
    found = []
    for seed in range(n):
        values = {name: each[make.integers(len(each))] for name, each in CHOICES.items()}
        biased = make.choice(width, 3, replace=False).tolist() if make.random() < 0.3 else []
        biases = tuple((token, float(make.normal() * 3)) for token in biased)
        prompt, answer = make.integers(0, width, (2, 9)).tolist()
        sampling = Sampling(**values, logit_bias=biases, seed=seed)
        found.append(Asked(sampling, tuple(prompt), (*answer, answer[0])))
    return found


def some_lines(make: np.random.Generator, n: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns flat and peaked lines, some with ties, some with impossible tokens."""
    x = make.standard_normal((n, width)) * make.choice([0.05, 1.0, 4.0], (n, 1))
    x = np.where(make.random((n, 1)) < 0.3, x.round(), x)
    x[make.random(x.shape) < make.choice([0.0, 0.0, 0.9], (n, 1))] = -np.inf
    x[np.arange(n), make.integers(0, width, n)] = make.choice([0.0, 3.0, 30.0], n)
    return torch.from_numpy(x).to(dtype)


def some_allowed(make: np.random.Generator, n: int, width: int) -> Allowed:
    """Returns masks that allow half of the tokens, a single token, or all of them."""
    half = set(np.flatnonzero(make.random(width) < 0.5).tolist())
    sets = [half, {int(make.integers(width))}, set(range(width))]
    return allowed_of(sets, make.integers(-1, 3, n).tolist(), width)


def chosen(chooser: Sampler, logits: Tensor, allowed: Allowed | None = None) -> list[int]:
    """Returns the kernels' tokens of rows without drafts."""
    n = len(logits)
    tokens = gpu_sampler.start(
        logits.to(DEVICE), ints(range(n)), Drafts.empty(n), allowed, chooser.rules
    )
    return tokens().tolist()


@pytest.mark.parametrize(
    ("width", "dtype"),
    [*itertools.product([7, 2047, 8192], DTYPES), (2049, torch.float32), (4096, torch.float64)],
)
def test_random_rules_choose_the_tokens_of_compiled_code(width, dtype, rows) -> None:
    """`both` compares; widths are below, at and above those of a block and of a tile."""
    make = np.random.default_rng(width)
    asked, logits = some_asked(make, rows, width), some_lines(make, rows, width, dtype)
    logits[-1, width // 2] = make.choice([np.nan, np.inf])
    chooser = chooser_of(asked, width)
    found = both(chooser, logits, range(rows), None, some_allowed(make, rows, width))
    assert found[-1] == -1
    assert len({*found}) > 4
    free = both(chooser, logits, range(rows))
    assert free != found


def test_vocabulary_of_152k_tokens_is_sampled_like_on_a_cpu(rows) -> None:
    width, make = 151_936, np.random.default_rng(3)
    rules = [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        Sampling(temperature=1.0, top_k=40, top_p=0.95),
        Sampling(temperature=1.2, min_p=0.02, logit_bias=((width - 1, 9.0),)),
        Sampling(presence_penalty=2.0, frequency_penalty=0.5),
    ]
    logits = torch.from_numpy(make.standard_normal((len(rules), width)) * 2.5).bfloat16()
    answer = tuple(logits[4].topk(6).indices.tolist())
    asked = [Asked(replace(rule, seed=5), answer[:2], answer) for rule in rules]
    drafts = forest([(-1,), (), (), (), ()], [(1,), (), (), (), ()])
    logits = torch.cat((logits[:1], logits))
    allowed = some_allowed(make, len(logits), width)
    found = both(chooser_of(asked, width), logits, range(len(asked)), drafts)
    assert min(found[2:]) >= 0
    both(chooser_of(asked, width), logits, range(len(asked)), drafts, allowed)


def test_long_lists_of_penalties_and_biases_are_applied_once_per_token() -> None:
    """Lists are longer than a program reads at once, and drafts repeat held and new tokens."""
    width, make = 3000, np.random.default_rng(4)
    order = make.permutation(width).tolist()
    biases = tuple((token, float(make.normal())) for token in order[500:1300])
    rule = Sampling(
        temperature=0.5, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4,
        logit_bias=biases,
    )  # fmt: skip
    assert len(biases) > kernels.LOT
    changed = 0
    for seed in range(12):
        logits = torch.from_numpy(make.standard_normal((5, width))).float()
        asked = Asked(replace(rule, seed=seed), tuple(order[:700]), tuple(order[400:630]))
        chooser = Sampler(1, 1024, width)
        begin(chooser, 0, asked)
        empty = Allowed(np.zeros((0, -(-width // 32)), np.uint32), ints([-1] * 5))
        path: list[int] = []
        for _ in range(4):  # a chain of the right tokens, then one with a repeated token
            drafts = forest([tuple(range(-1, len(path) - 1))], [tuple(path)])
            masks = empty.at(ints(range(len(path) + 1)))
            path.append(both(chooser, logits[: len(path) + 1], [0], drafts, masks)[-1])
        again = forest([(-1, 0, 1)], [(path[0], path[0], order[5])])
        flat = logits[:1].expand(4, -1).clone()
        flat[:, path[0]] = 40.0
        changed += both(chooser, flat, [0], again)[1] == path[0]
    assert changed > 6


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", 0.2), ("top_p", 0.999), ("top_k", 60), ("min_p", 0.001),
        ("repetition_penalty", 1.01), ("presence_penalty", 0.1), ("frequency_penalty", 0.05),
        ("logit_bias", ()), ("seed", 1),
    ],
)  # fmt: skip
def test_wrong_rule_is_detected(name, wrong) -> None:
    """Positive control: tokens of compiled code differ from those of a slightly other rule."""
    width, make, n = 300, np.random.default_rng(5), 24
    right = {
        "temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.5,
        "presence_penalty": 0.9, "frequency_penalty": 0.5, "logit_bias": ((7, 6.0),), "seed": 0,
    }  # fmt: skip
    assert {*right} > {*PARAMETERS}
    alone = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {**right, **{cut: alone[cut] for cut in alone if cut != name}}
    both_rules = [Sampling(**values), Sampling(**{**values, name: wrong})]
    # Tokens that were held have the greatest logits, so that penalties matter.
    logits = torch.from_numpy(make.standard_normal((n, width)))
    logits[:, :6] += 3.0
    ways = []
    for rule in both_rules:
        asked = [Asked(replace(rule, choice=i), (0, 1, 2), (3, 4, 5, 3)) for i in range(n)]
        ways.append(chooser_of(asked, width))
    expected = both(ways[0], logits, range(n))
    assert chosen(ways[0], logits) == expected
    assert chosen(ways[1], logits) != expected


def test_wrong_mask_and_wrong_tie_are_detected() -> None:
    """Positive control for masks and for the order of equal tokens."""
    width, n = 200, 20
    rules = [Sampling(temperature=1.0, top_k=50, seed=seed) for seed in range(n)]
    chooser, equal = chooser_of([Asked(rule) for rule in rules], width), torch.zeros(n, width)
    expected = both(chooser, equal, range(n))
    assert {*expected} <= {*range(50)}
    assert len({*expected}) > 10
    assert chosen(chooser, equal + torch.arange(width) * 1e-3) != expected
    masks = [allowed_of([{*range(0, width, 2)} - {gone}], [0] * n, width) for gone in (-1, 0, 2)]
    assert len({tuple(both(chooser, equal, range(n), None, mask)) for mask in masks}) == 3
    one = allowed_of([{199}], [0] * n, width)
    assert chosen(chooser, equal, one) == [199] * n
    none: Any = allowed_of([set()], [0] * n, width)
    assert chosen(chooser, equal, none) == [-1] * n


def test_host_waits_once_and_only_when_it_needs_the_tokens(monkeypatch) -> None:
    waits, launches = [], []
    monkeypatch.setattr(gpu_sampler, "_wait", waits.append)
    for name in ("_adjust", "_choose"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, Counted(kernel, launches))
    chooser = chooser_of([Asked(Sampling(temperature=1.0, top_p=0.9))] * 3, 90)
    tokens = gpu_sampler.start(
        torch.randn(3, 90, device=DEVICE), ints(range(3)), Drafts.empty(3), None, chooser.rules
    )
    assert (len(launches), len(waits)) == (2, 0)
    tokens()
    assert (len(launches), len(waits)) == (2, 1)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches.append(grid)
        return self._kernel[grid]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("width", [1, 5, 2048, 5000])
def test_kernels_score_tokens_as_a_cpu_does(width, dtype, monkeypatch) -> None:
    make, n = np.random.default_rng(width), 10
    numbers = make.standard_normal((6, width)).round(1) * 3
    numbers[make.random(numbers.shape) < 0.2] = -np.inf
    numbers[:, make.integers(width)] = 1.0
    numbers[4, make.integers(width)] = make.choice([np.nan, np.inf])
    numbers[5] = -np.inf
    logits = torch.from_numpy(numbers).to(dtype)
    places, tokens = make.integers(0, 6, n), make.integers(0, width, n)
    places[:2], most = (4, 5), [0, 1, 2, 5, 20, 20, 20, 3, 0, 7]
    right = token_logprobs(logits, places, tokens, most)
    monkeypatch.setattr(sampler, "_has_kernels", lambda device: True)
    for at_once in (1 << 22, 3 * width):
        monkeypatch.setattr(kernels, "_AT_ONCE", at_once)
        found = token_logprobs(logits.to(DEVICE), places, tokens, most)
        for one, expected in zip(found, right, strict=True):
            assert one.token == expected.token
            assert one.logprob == pytest.approx(expected.logprob, abs=1e-12, nan_ok=True)
            assert [token for token, _ in one.top] == [token for token, _ in expected.top]
            values = [value for _, value in expected.top]
            assert [value for _, value in one.top] == pytest.approx(values, abs=1e-12)
    assert token_logprobs(logits.to(DEVICE), places[:0], tokens[:0], []) == []
