"""Tests the frequencies of 100,000 sampled tokens per rule, and that wrong rules are detected."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from choosing_cases import Asked, allowed_of, chooser_of, ints, no_limits

from choosing_reference import reference_weights
from tasc_draft import Drafts
from tasc_engine import Sampling
from tasc_engine.sampling.sampler import uniforms

VOCAB = 30
ROWS, POSITIONS = 5000, 20
PROMPT = (1, 4, 9)
ANSWER = [int(t) for t in np.random.default_rng(0).integers(0, 12, POSITIONS)]
LOGITS = np.random.default_rng(1).standard_normal((POSITIONS, VOCAB)) * 1.5
SOME = set(range(0, VOCAB, 3)) | {1, 4}
SURE = 1e-6  # p-value below which a rule counts as wrong
# The tokens that each rule allows are compared with a reference elsewhere.
RULES = {
    "plain": Sampling(temperature=1.0),
    "top_p": Sampling(temperature=1.3, top_p=0.8),
    "top_k": Sampling(temperature=1.0, top_k=7),
    "all of them": Sampling(
        temperature=1.4, min_p=0.02, top_k=12, top_p=0.9, logit_bias=((0, 1.0), (2, -2.0)),
        repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.3,
    ),
    "mask": Sampling(temperature=0.8, top_p=0.9),
}  # fmt: skip


def exact(sampling: Sampling, position: int, allowed: set[int] | None = None) -> np.ndarray:
    """``float64[V]`` probabilities."""
    answer = ANSWER[:position]
    weights = reference_weights(LOGITS[position], sampling, PROMPT, answer, allowed)
    assert weights is not None
    return weights / weights.sum()


def sampled(sampling: Sampling, allowed: set[int] | None = None) -> np.ndarray:
    """Returns tokens ``int64[POSITIONS, ROWS]`` of equal rows with different seeds."""
    asked = [Asked(replace(sampling, seed=seed), PROMPT) for seed in range(ROWS)]
    chooser, rows, drafts = chooser_of(asked, VOCAB), ints(range(ROWS)), Drafts.empty(ROWS)
    masks = None if allowed is None else allowed_of([allowed], [0] * ROWS, VOCAB)
    found, limits = [], no_limits(ROWS, VOCAB)
    for position in range(POSITIONS):
        logits = torch.from_numpy(LOGITS[position]).expand(ROWS, -1)
        found.append(chooser.start_choice(logits, rows, drafts, masks)(limits).tokens[:, 0])
        for row in range(ROWS):
            chooser.observe(row, ints(ANSWER[position : position + 1]))
    return np.array(found)


def drawn(probabilities: Callable[[int], np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """Returns tokens drawn independently with random numbers ``float64[POSITIONS, ROWS]``."""
    lines = [np.cumsum(probabilities(position)) for position in range(POSITIONS)]
    return np.array([np.searchsorted(p, n, "right") for p, n in zip(lines, numbers, strict=True)])


def numbers_of(seeds: range = range(ROWS)) -> np.ndarray:
    return np.array([uniforms(Sampling(seed=seed), 0, POSITIONS) for seed in seeds]).T


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square test by line; tokens expected less than five times are merged."""
    statistic, freedom = 0.0, 0
    for found, right in zip(counts, expected, strict=True):
        if found[right == 0].any():
            return 0.0
        often = right >= 5
        cells = [np.append(line[often], line[~often].sum()) for line in (found, right)]
        found_in, right_in = (cell[cells[1] > 0] for cell in cells)
        statistic += ((found_in - right_in) ** 2 / right_in).sum()
        freedom += len(right_in) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def fits(tokens: np.ndarray, sampling: Sampling, allowed: set[int] | None = None) -> float:
    counts = np.array([np.bincount(line, minlength=VOCAB) for line in tokens])
    return p_value(counts, ROWS * np.array([exact(sampling, i, allowed) for i in range(POSITIONS)]))


def independent(first: np.ndarray, second: np.ndarray, sampling: Sampling) -> float:
    """Returns the p-value of the frequencies of pairs of tokens if both are independent."""
    both = first * VOCAB + second
    pairs = np.array([np.bincount(line, minlength=VOCAB**2) for line in both])
    own = [exact(sampling, position) for position in range(POSITIONS)]
    following = own if len(first) == POSITIONS else own[1:]
    together = [np.outer(x, y).ravel() for x, y in zip(own, following, strict=False)]
    return p_value(pairs, ROWS * np.array(together))


@pytest.mark.parametrize("name", RULES)
def test_token_frequencies_match_the_sampling_rule(name) -> None:
    allowed = SOME if name == "mask" else None
    tokens = sampled(RULES[name], allowed)
    assert tokens.size == 100_000
    assert fits(tokens, RULES[name], allowed) > 0.001


def test_successive_tokens_and_choices_are_independent() -> None:
    rule = RULES["top_k"]
    tokens = sampled(rule)
    assert independent(tokens[:-1], tokens[1:], rule) > 0.001
    assert independent(tokens, sampled(replace(rule, choice=1)), rule) > 0.001
    assert independent(tokens, tokens, rule) < SURE
    again = drawn(lambda i: exact(rule, i), np.repeat(numbers_of()[::2], 2, axis=0))
    assert independent(again[:-1], again[1:], rule) < SURE


def test_frequency_test_detects_other_sampling_rules() -> None:
    """Positive control: right random numbers with a slightly wrong rule must fail."""
    rule, numbers = RULES["top_p"], numbers_of()

    def cut_before_temperature(position: int) -> np.ndarray:
        kept = exact(replace(rule, temperature=1.0), position) > 0
        hot = exact(replace(rule, top_p=1.0), position) * kept
        return hot / hot.sum()

    def of(other: Sampling) -> Callable[[int], np.ndarray]:
        return lambda position: exact(other, position)

    assert fits(drawn(of(rule), numbers), rule) > 0.001
    assert fits(drawn(cut_before_temperature, numbers), rule) < SURE
    assert fits(drawn(of(replace(rule, temperature=1.25)), numbers), rule) < SURE
    assert fits(drawn(of(replace(rule, top_p=0.81)), numbers), rule) < SURE
    without_count = replace(RULES["all of them"], frequency_penalty=0.0)
    assert fits(drawn(of(without_count), numbers), RULES["all of them"]) < SURE
