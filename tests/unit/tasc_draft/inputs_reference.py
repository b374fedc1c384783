"""The inverted index and the search in plain Python, by definition and slowly."""

from collections import defaultdict
from itertools import pairwise
from math import log, sqrt

WINDOW, PAIRS, CORPUS_PAIRS, LEAST, LAST, BOUND = 24, 16, 4096, 0.01, 1024, 100_000
FULL = 2**64 - 1
MIX, SECOND, FINAL = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9

Prompt = list[int]


def features(prompt: Prompt) -> set[int]:
    """Even keys for tokens, odd ones for pairs, of the prompt's end."""
    prompt = prompt[-LAST:]
    tokens = {max((t + 1) * MIX % 2**64 >> 33, 1) << 1 for t in prompt}
    pairs = {
        ((((a + 1) * MIX % 2**64) ^ ((b + 7) * SECOND % 2**64)) * MIX % 2**64 >> 33) << 1 | 1
        for a, b in pairwise(prompt)
    }
    return tokens | pairs


def rows_of(prompts: list[Prompt]) -> dict[int, list[int]]:
    """The rows of every feature that is kept; of one in too many rows none."""
    rows = defaultdict(list)
    for row, prompt in enumerate(prompts):
        for key in features(prompt):
            rows[key].append(row)
    wide = {key: len(having) > 0.3 * len(prompts) for key, having in rows.items()}
    return {
        key: [] if wide[key] else having
        for key, having in sorted(rows.items())
        if wide[key] or len(having) > 1 or key % 2 == 0
    }


def draw(seed: int, number: int, size: int) -> tuple[int, int]:
    x = (seed + number + 1) * MIX & FULL
    x = (x ^ (x >> 30)) * FINAL & FULL
    x ^= x >> 31
    a, b = (x >> 32) * size >> 32, (x & 0xFFFFFFFF) * (size - 1) >> 32
    return a, (a + 1 + b) % size


def agreement(a: Prompt, b: Prompt) -> float:
    ended = [[*a, -1][:WINDOW], [*b, -1][:WINDOW]]
    common = 0
    for x, y in zip(*ended, strict=False):
        if x != y:
            break
        common += 1
    return common / max(map(len, ended))


def purities(kept: dict[int, list[int]], outputs: list[Prompt]) -> dict[int, float]:
    shared, n = LEAST, len(outputs)
    if n > 1:
        pairs = [draw(0, i, n) for i in range(CORPUS_PAIRS)]
        shared = sum(agreement(outputs[a], outputs[b]) for a, b in pairs) / CORPUS_PAIRS
    found = {}
    for key, rows in kept.items():
        size = len(rows)
        if size < 2:
            continue
        pairs = [draw(key << 32, i, size) for i in range(min(size * (size - 1) // 2, PAIRS))]
        agreed = sum(agreement(outputs[rows[a]], outputs[rows[b]]) for a, b in pairs)
        found[key] = max((agreed + shared) / (len(pairs) + 1), LEAST)
    mean = sum(found.values()) / len(found) if found else max(shared, LEAST)
    return {key: found.get(key, mean) for key in kept}


def weights(prompts: list[Prompt], outputs: list[Prompt]) -> dict[int, float]:
    kept = rows_of(prompts)
    purity = purities(kept, outputs)
    return {
        key: log(len(prompts) / len(rows)) * sqrt(purity[key]) if rows else 0.0
        for key, rows in kept.items()
    }


def norms(prompts: list[Prompt], outputs: list[Prompt]) -> list[float]:
    return _norms(prompts, weights(prompts, outputs))


def _norms(prompts: list[Prompt], weight: dict[int, float]) -> list[float]:
    return [sqrt(sum(weight.get(key, 0) ** 2 for key in features(p))) for p in prompts]


def cosines(prompts: list[Prompt], outputs: list[Prompt], prompt: Prompt) -> dict[int, float]:
    """The cosine of every row that shares a feature; of the rarest features, up to the bound."""
    kept, weight, asked = rows_of(prompts), weights(prompts, outputs), features(prompt)
    unknown = 0.3 * log(max(len(prompts), 1)) ** 2
    square = sum(weight[key] ** 2 if key in weight else unknown for key in asked)
    scores: defaultdict[int, float] = defaultdict(float)
    looked_at = 0
    for key in sorted(asked & {k for k in kept if kept[k]}, key=lambda key: (len(kept[key]), key)):
        looked_at += len(kept[key])
        if looked_at > BOUND:
            break
        for row in kept[key]:
            scores[row] += weight[key] ** 2
    length = _norms(prompts, weight)
    return {row: score / (length[row] * sqrt(square)) for row, score in scores.items()}
