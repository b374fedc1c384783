"""The parts of the neural benchmark; each repeats the tables of a paper or adds to them."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import Figure, show_table
from benchmarks.neural.models import KINDS
from benchmarks.neural.side import (
    FR_SPEC,
    FULL,
    MICROSPEC,
    RECENT,
    VOCABTRIM,
    Bench,
    Measured,
    Policy,
    kept,
    vocabulary_of,
)
from tasc_draft import DraftIndex, DraftSettings, NgramProposer, Proposer, build_learnt_index
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.card import Kind
from tasc_engine.drafting.neural.drafters import Eagle
from tasc_engine.drafting.neural.hybrid import HybridProposer, TwoArmedBandit
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.model.decoder import lean
from tasc_runtime.data.local_corpus import encode

Part = tuple[list[Figure], dict[str, Any]]
Rows = list[list[str] | None]

LEFT = 0.25  # the greatest share of the head that a ranked vocabulary has


@dataclass(frozen=True)
class Options:
    """The benches of the requested targets, and the folder where measurements are kept."""

    benches: tuple[Bench, ...]
    work: Path


def _rates(side: Measured) -> str:
    return f"{side.tokens_s:.0f} ({side.least:.0f}-{side.greatest:.0f})"


# VocabTrim (arXiv 2506.22694)
#
# A memory-bound speed-up is the tokens of a step / (c g + 1): c is the number of parameters of the
# drafter over that of the target, for the shapes below; g is the number of forwards of the drafter.
# A head of k of our V tokens is priced as the same share of the 128,256 tokens of the shapes.

ORIGINS: tuple[Origin, ...] = ("raw", "target", "draft")
TRIMMED = (256, 64)  # smaller vocabularies
VOCABULARY = 128_256
KEPT, GAIN, MOST_TOKENS = 0.97, 0.25, 5000


@dataclass(frozen=True)
class Shape:
    """Parameters of a model in millions.

    Attributes:
        rest: Those of an EAGLE head without embedding and LM head; its width is the target's.
    """

    target: float
    width: int
    rest: float


# From the configs of the models: one layer, and the projection of two vectors to one.
SHAPES = {
    "Llama-3.2-1B": Shape(1235.8, 2048, 60.8 + 8.4),
    "Llama-3.2-3B": Shape(3212.7, 3072, 100.7 + 18.9),
}
_INDEPENDENT = Shape(314.0, 1024, 314.0 - 131.3)  # the small model of the paper; its head is tied


def vocabtrim(options: Options) -> Part:
    """Accepted length and memory-bound speed-up of a trimmed head, by the origin of its ranking."""
    figures, found = list[Figure](), dict[str, Any]()
    for kind in KINDS:
        if not (benches := [bench for bench in options.benches if kind in bench.case.kinds]):
            continue
        rows: Rows = []
        for bench in benches:
            own = found[f"{bench.case.name}, {kind}"] = _trimmed(bench, kind)
            for k, by in own["ranked"].items():
                lengths = [by["length"].get(origin) for origin in ORIGINS]
                cells = [f"{e:.2f} ({e / own['full']:.1%})" if e else "" for e in lengths]
                gains = [f"{by['speed_up'][s]:.2f} (+{by['gains'][s]:.1%})" for s in SHAPES]
                rows.append([bench.case.name, f"{own['full']:.2f}", str(k), *cells, *gains])
            rows.append(None)
            figures += _trimmed_figures(bench, kind, own)
        show_table(
            f"VocabTrim, {kind} drafter, 4 levels, top 8, 32 nodes: accepted length (of the full "
            f"head's) by whose answers rank, memory-bound speed-up (over the full head's)",
            ["task", "full", "k", *ORIGINS, *SHAPES],
            rows,
        )
    return figures, found


def speed_up(length: float, shape: Shape, kind: Kind, share: float) -> float:
    """The memory-bound speed-up with a head of this share of the vocabulary."""
    own = shape if kind == "eagle" else _INDEPENDENT
    ends = VOCABULARY * own.width / 1e6
    drafter = own.rest + share * ends + (ends if kind == "eagle" else 0.0)
    return length / (VOCABTRIM.depth * drafter / shape.target + 1)


def _trimmed(bench: Bench, kind: Kind) -> dict[str, Any]:
    full = bench.neural(kind, FULL, VOCABTRIM, 0).length
    found: dict[str, Any] = {"full": full, "ranked": {}}
    # Only an independent drafter has answers of its own.
    origins = ORIGINS if "independent" in bench.case.kinds else ("raw", "target")
    for k in bench.sizes(round(LEFT * bench.vocab_size), *TRIMMED):
        by = {
            origin: bench.neural(kind, Policy(k, origin), VOCABTRIM, 0).length for origin in origins
        }
        after, before = (
            {name: speed_up(length, shape, kind, share) for name, shape in SHAPES.items()}
            for length, share in ((by["target"], k / bench.vocab_size), (full, 1.0))
        )
        gains = {name: after[name] / before[name] - 1 for name in SHAPES}
        found["ranked"][k] = {"length": by, "speed_up": after, "gains": gains}
    return found


def _trimmed_figures(bench: Bench, kind: Kind, own: dict[str, Any]) -> Iterator[Figure]:
    """The figures of the largest ranked vocabulary."""
    name, (k, by) = f"{bench.case.name}, {kind}", next(iter(own["ranked"].items()))
    share = by["length"]["target"] / own["full"]
    title = f"{name}: accepted length kept by {k} of {bench.vocab_size} tokens"
    yield Figure(title, share, "", KEPT)
    if kind == "eagle" and k <= MOST_TOKENS:
        for shape, gain in by["gains"].items():
            title = f"{name}: memory-bound speed-up gained by {k} tokens, {shape}"
            yield Figure(title, gain, "", GAIN)


# FR-Spec (arXiv 2502.14856)

FEW = (1024, 256, 64)  # smaller vocabularies


def frspec(options: Options) -> Part:
    """Accepted length and speed by the number of tokens that remain in the head."""
    found, rows = dict[str, Any](), list[list[str] | None]()
    for bench in options.benches:
        name, sizes = bench.case.name, bench.sizes(round(LEFT * bench.vocab_size), *FEW)
        sides = {
            policy.ranked or bench.vocab_size: bench.neural("eagle", policy, FR_SPEC, bench.repeats)
            for policy in (FULL, *map(Policy, sizes))
        }
        full = sides[bench.vocab_size]
        rows += [
            [
                name, f"{size:,}", f"{side.length:.2f}", f"{side.length / full.length:.1%}",
                _rates(side), f"{side.tokens_s / full.tokens_s:.2f}",
            ]
            for size, side in sides.items()
        ]  # fmt: skip
        rows.append(None)
        found[name] = {
            size: {"length": side.length, "tokens_s": side.tokens_s} for size, side in sides.items()
        }
    show_table(
        "FR-Spec, EAGLE head, depth 6, 60 nodes, ranked by the target's answers",
        ["task", "tokens", "accepted length", "of the full head's", "tokens/s (least-greatest)",
         "over the full head's"],
        rows,
    )  # fmt: skip
    return [], found


# MicroSpec (arXiv 2605.26444)

BASES = (1024, 256)  # smaller ranked vocabularies, alone and with a window
ABLATIONS = (
    Policy(recent=True, extension=False),
    Policy(recent=True, context=False),
    Policy(recent=True, gathered=False),
)
FASTER, ACTIVE, COVERED = 1.3, 2000, 0.97


def microspec(options: Options) -> Part:
    """Vocabularies by size, coverage, times and speed; the sources of tokens of a window.

    A window with a ranked vocabulary is not in the paper. The ceiling is the speed with the tokens
    per step of the full head and the cost of a step with the pruned one.
    """
    figures, found, rows = list[Figure](), dict[str, Any](), list[list[str] | None]()
    for bench in options.benches:
        name = bench.case.name
        sides = {p: bench.neural("eagle", p, MICROSPEC, bench.repeats) for p in _policies(bench)}
        rows += [[name, p.name, *_cells(side, sides[FULL])] for p, side in sides.items()]
        rows.append(None)
        found[name] = {policy.name: asdict(side) for policy, side in sides.items()}
        figures += _window_figures(bench, sides)
    show_table(
        "MicroSpec, EAGLE head, depth 5, 60 nodes, b = 8",
        ["task", "vocabulary", "active", "coverage", "accepted length", "draft ms", "verify ms",
         "tokens/s (least-greatest)", "ceiling"],
        rows,
    )  # fmt: skip
    return figures, found


def _policies(bench: Bench) -> list[Policy]:
    ranked = bench.sizes(round(LEFT * bench.vocab_size), *BASES)
    unions = [Policy(k, recent=True) for k in bench.sizes(*BASES)]
    ablations = ABLATIONS if bench.case.wide else ()
    return [FULL, *map(Policy, ranked), RECENT, *unions, *ablations]


def _cells(side: Measured, full: Measured) -> list[str]:
    ceiling = side.tokens_s * full.efficiency / side.efficiency
    return [
        f"{side.size:,.0f}", f"{side.coverage:.1%}", f"{side.length:.2f}",
        f"{side.draft_ms:.1f}", f"{side.verify_ms:.1f}",
        _rates(side), f"{ceiling:.0f}",
    ]  # fmt: skip


def _window_figures(bench: Bench, sides: dict[Policy, Measured]) -> list[Figure]:
    """The figures of the larger union, and the speeds of the largest ranked vocabulary."""
    name, full = bench.case.name, sides[FULL]
    union = next(policy for policy in sides if policy.recent and policy.ranked)
    ranked = next(policy for policy in sides if policy.ranked and not policy.recent)
    size, coverage = sides[union].size or 0.0, sides[union].coverage or 0.0
    figures = [
        Figure(f"{name}: active tokens of {union.name}", size, "", ACTIVE, False),
        Figure(f"{name}: coverage of {union.name}", coverage, "", COVERED),
    ]
    for policy in (ranked, union, RECENT) if bench.case.wide else ():
        side = sides[policy]
        figures.append(Figure(
            f"{name}: tokens/s of {policy.name} / full", side.tokens_s / full.tokens_s, "x",
            FASTER, least=side.least / full.greatest, greatest=side.greatest / full.least,
        ))  # fmt: skip
    return figures


# The hybrid, which no paper has

NODES, SURE = 24, 0.9
TEST_ROWS = 256  # the trust in either part is learnt during a run
TREE = NeuralSettings(5, 8, NODES)
NGRAMS = DraftSettings(num_speculative_tokens=NODES, min_prob=0.0)
BETTER, BETTER_ON = 1.1, 4


def hybrid(options: Options) -> Part:
    """N-grams and a drafter in one tree, against each alone with as many nodes."""
    figures, found = list[Figure](), dict[str, Any]()
    benches = [
        Bench(bench.models, bench.case, max(bench.rows, TEST_ROWS), bench.repeats, NODES)
        for bench in options.benches
        if not bench.case.wide
    ]
    for kind in KINDS:
        if not (own := [bench for bench in benches if kind in bench.case.kinds]):
            continue
        better, rows = 0, []
        for bench in own:
            sides = _hybrid(bench, kind)
            steps = {name: side.efficiency for name, side in sides.items()}
            over = steps["always"] / max(steps["ngrams"], steps["neural"])
            better += over >= BETTER
            cells = (f"{side.efficiency:.2f} ({side.tokens_s:.0f})" for side in sides.values())
            rows.append([bench.case.name, *cells, f"{over:.2f}"])
            found[f"{bench.case.name}, {kind}"] = {n: asdict(side) for n, side in sides.items()}
        show_table(
            f"{NODES} nodes a row, {kind} drafter with its full head, n-grams of the rows that it "
            f"learnt, {TEST_ROWS} test rows where there are as many: tokens a step (tokens/s)",
            ["task", "n-grams", "drafter", "hybrid, always asked",
             f"asked if n-grams are under {SURE} sure", "over the better"],
            rows,
        )  # fmt: skip
        name = f"tasks where the hybrid has {BETTER} x the better part's tokens a step, {kind}"
        bar = BETTER_ON if len(own) >= BETTER_ON else None
        figures.append(Figure(name, better, "tasks", bar))
    return figures, found


class Always(TwoArmedBandit):
    """Asks the model at every step."""

    def begin(self) -> bool:
        return True


def _hybrid(bench: Bench, kind: Kind) -> dict[str, Measured]:
    index = cache(lambda: _index(bench))

    def ngrams() -> NgramProposer:
        return bench.side.ngrams(index(), NGRAMS)

    def neural() -> Proposer:
        return bench.proposer(kind, FULL, TREE)

    sides = {
        "ngrams": ngrams,
        "neural": neural,
        "always": lambda: HybridProposer(ngrams(), neural(), 1.0, Always()),
        "unsure": lambda: HybridProposer(ngrams(), neural(), SURE, Always()),
    }
    return {
        name: bench.measured(
            f"{name}, {kind if name != 'ngrams' else 'none'}, {NODES} nodes", bench.repeats,
            lambda watch, make=make: make(),
        )
        for name, make in sides.items()
    }  # fmt: skip


def _index(bench: Bench) -> DraftIndex:
    """The index of the rows that the drafter learnt, with the outputs of the data."""
    side = bench.side
    found = encode(bench.models.learnt(bench.case), side.tokenizer, bench.case.of.prompt)
    facts = side.tokenizer.index_facts
    return build_learnt_index(found.outputs, found.prompts, settings=NGRAMS, **facts)


# Latency of drafts (MicroSpec)
#
# Half the width of Llama-3.2-1B, as many layers as Llama-3.2-3B: the head is less than 30 % of the
# target. Weights and answers are random, and windows are full, with nearly as many distinct tokens
# as they have places.

WIDE, HIDDEN, INTERMEDIATE, HEADS, LAYERS = 100_352, 1024, 4096, 16, 28
BATCH, PROMPT, EMITTED, STEPS = 8, 768, 3, 8
LENGTH = 1024
USED = 20_000  # tokens that prompts and answers are drawn from
POLICIES = (FULL, Policy(4000), RECENT, Policy(1000, recent=True))
LESS = 0.55


def latency(options: Options) -> Part:
    """The time of a draft by its vocabulary."""
    torch.set_num_threads(1)
    settings = f"V {WIDE}, hidden {HIDDEN}, {BATCH} x {PROMPT}, {STEPS} steps, {USED} used"
    found = kept(options.work / "latency.json", settings, _latencies)
    share = found["head_share"]
    figures, rows = list[Figure](), []
    full = statistics.median(found["ms"][FULL.name])
    for policy in POLICIES:
        ms, size = found["ms"][policy.name], found["size"][policy.name]
        less = 1 - statistics.median(ms) / full
        times = f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"
        rows.append([policy.name, f"{size:,.0f}", times, f"{less:.1%}"])
        if policy.recent:
            name = f"draft latency cut by {policy.name}, head {share:.0%} of the target"
            least = 1 - max(ms) / min(found["ms"][FULL.name])
            figures.append(Figure(name, less, "", LESS if policy == RECENT else None, least=least))
    show_table(
        f"a draft of depth 5, 60 nodes for 8 rows, V = {WIDE:,}, hidden {HIDDEN}, head "
        f"{share:.0%} of a target of {LAYERS} layers",
        ["vocabulary", "active", "ms (least-greatest)", "less than full"],
        rows,
    )
    return figures, found


def _latencies() -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDE, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS // 4,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = WIDE * HIDDEN
    decoder = lean(model, LENGTH)
    assert decoder is not None, "Llama is a family the engine runs"
    joint = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN
    found: dict[str, Any] = {"head_share": head / (head + LAYERS * layer), "ms": {}, "size": {}}
    for policy in POLICIES:
        vocabulary = vocabulary_of(policy, model.lm_head.weight, lambda origin: _ranking())
        proposer = NeuralProposer(
            Eagle(decoder, joint, BATCH, LENGTH), vocabulary, MICROSPEC, rows=BATCH,
            capacity=LENGTH, vocab_size=WIDE, eos_ids=(0,),
        )  # fmt: skip
        found["ms"][policy.name] = _times(proposer)
        sizes = vocabulary.sizes(torch.arange(BATCH))
        found["size"][policy.name] = float(sizes.float().mean())
    return found


def _times(proposer: NeuralProposer) -> list[float]:
    """Milliseconds of drafts, without the first two."""
    rng = np.random.default_rng(0)
    rows, budget = np.arange(BATCH, dtype=np.int32), np.full(BATCH, MICROSPEC.nodes, np.int32)
    for row in range(BATCH):
        proposer.start(row, _tokens(rng, PROMPT))
        proposer.observe(row, _tokens(rng, 1), _seen(rng, 0, PROMPT))
    found = []
    for step in range(STEPS + 2):
        began = time.perf_counter()
        proposer.propose(rows, budget)
        found.append(1000 * (time.perf_counter() - began))
        for row in range(BATCH):
            seen = _seen(rng, PROMPT + step * EMITTED, EMITTED)
            proposer.observe(row, _tokens(rng, EMITTED), seen)
    return found[2:]


def _ranking() -> Ranking:
    counts = np.arange(WIDE, 0, -1, dtype=np.int64)
    return Ranking.of(counts, eos_id=0, fingerprint="none", origin="target", rows=1)


def _tokens(rng: np.random.Generator, size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.integers(1, USED, size, np.int32)


def _seen(rng: np.random.Generator, begin: int, size: int) -> RowHiddenStates:
    top = torch.from_numpy(_tokens(rng, 3 * size).astype(np.int64)).view(size, 3)
    return RowHiddenStates(begin, torch.randn(size, HIDDEN), top)
