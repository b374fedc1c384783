"""What a draft takes by its vocabulary, for a target whose head is under 30 % of it (MicroSpec).

Random weights and answers, and windows that are full, of nearly as many tokens as they have room
for: no task is drafted for. Half the width of Llama-3.2-1B, as many layers as Llama-3.2-3B.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, MICROSPEC, RECENT, Policy, vocabulary_of
from neural_kept import kept
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from tasc_engine.decoder import lean
from tasc_engine.neural.drafters import Eagle
from tasc_engine.neural.proposer import NeuralProposer
from tasc_engine.neural.ranking import Ranking
from tasc_engine.neural.seen import Seen

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, LAYERS = 100_352, 1024, 4096, 16, 28
ROWS, PROMPT, EMITTED, STEPS = 8, 768, 3, 8
LENGTH = 1024
USED = 20_000  # tokens that prompts and answers are drawn from
POLICIES = (FULL, Policy(4000), RECENT, Policy(1000, recent=True))
LESS = 0.55


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    torch.set_num_threads(1)
    settings = f"V {VOCABULARY}, hidden {HIDDEN}, {ROWS} x {PROMPT}, {STEPS} steps, {USED} used"
    found = kept(asked.work / "latency.json", settings, _measured)
    share = found["head_share"]
    table = table_of(
        f"a draft of depth 5, 60 nodes for 8 rows, V = {VOCABULARY:,}, hidden {HIDDEN}, head "
        f"{share:.0%} of a target of {LAYERS} layers",
        ["vocabulary", "active", "ms (least-greatest)", "less than full"],
    )
    figures, full = list[Figure](), statistics.median(found["ms"][FULL.name])
    for policy in POLICIES:
        ms, size = found["ms"][policy.name], found["size"][policy.name]
        cut = 1 - statistics.median(ms) / full
        times = f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"
        table.add_row(policy.name, f"{size:,.0f}", times, f"{cut:.1%}")
        if policy.recent:
            name = f"draft latency cut by {policy.name}, head {share:.0%} of the target"
            least = 1 - max(ms) / min(found["ms"][FULL.name])
            figures.append(Figure(name, cut, "", LESS if policy == RECENT else None, least=least))
    console.print(table)
    return figures, found


def _measured() -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS // 4,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = VOCABULARY * HIDDEN
    decoder = lean(model, LENGTH)
    assert decoder is not None, "Llama is a family the engine runs"
    joint = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN
    found: dict[str, Any] = {"head_share": head / (head + LAYERS * layer), "ms": {}, "size": {}}
    for policy in POLICIES:
        vocabulary = vocabulary_of(policy, model.lm_head.weight, lambda origin: _ranking())
        proposer = NeuralProposer(
            Eagle(decoder, joint, ROWS, LENGTH), vocabulary, MICROSPEC, rows=ROWS, capacity=LENGTH,
            vocab_size=VOCABULARY, eos_ids=(0,),
        )  # fmt: skip
        found["ms"][policy.name] = _times(proposer)
        sizes = vocabulary.sizes(torch.arange(ROWS))
        found["size"][policy.name] = float(sizes.float().mean())
    return found


def _times(proposer: NeuralProposer) -> list[float]:
    """Milliseconds of drafts, the first two left out."""
    rng = np.random.default_rng(0)
    rows, budget = np.arange(ROWS, dtype=np.int32), np.full(ROWS, MICROSPEC.nodes, np.int32)
    for row in range(ROWS):
        proposer.start(row, _tokens(rng, PROMPT))
        proposer.observe(row, _tokens(rng, 1), _seen(rng, 0, PROMPT))
    found = []
    for step in range(STEPS + 2):
        began = time.perf_counter()
        proposer.propose(rows, budget)
        found.append(1000 * (time.perf_counter() - began))
        for row in range(ROWS):
            seen = _seen(rng, PROMPT + step * EMITTED, EMITTED)
            proposer.observe(row, _tokens(rng, EMITTED), seen)
    return found[2:]


def _ranking() -> Ranking:
    counts = np.arange(VOCABULARY, 0, -1, dtype=np.int64)
    return Ranking.of(counts, eos_id=0, fingerprint="none", origin="target", rows=1)


def _tokens(rng: np.random.Generator, size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.integers(1, USED, size, np.int32)


def _seen(rng: np.random.Generator, begin: int, size: int) -> Seen:
    top = torch.from_numpy(_tokens(rng, 3 * size).astype(np.int64)).view(size, 3)
    return Seen(begin, torch.randn(size, HIDDEN), top)
