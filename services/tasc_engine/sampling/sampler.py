"""The target's token at each place of the rows' draft trees, by each row's own rule.

What is chosen at a place depends on its logits, the request's rule, the tokens before it and the
random number of its output position: on no draft, no neighbour and no step before. It knows
neither how logits are made nor what is done with the tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.layout import Int32, Int64
from tasc_engine.sampling import compiled_sampler as compiled
from tasc_engine.sampling import tensor_sampler
from tasc_engine.sampling.compiled_sampler import scratch_for
from tasc_engine.sampling.parameters import Sampling, TokenLogprob, uniforms
from tasc_engine.sampling.row_parameters import (
    AHEAD,
    SETTINGS,
    Allowed,
    hold_answer,
    hold_prompt,
    release,
    rules_of,
)

_AT_ONCE = 1 << 22  # logits that are looked at together: some three times their 32 MB are held


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, places: Int64, tokens: Int64, most: Sequence[int] | Int64
) -> list[TokenLogprob]:
    """Natural logarithms of the probabilities of tokens, and of the likeliest beside them.

    Args:
        logits: ``[M, V]`` of any floating dtype, on any device.
        places: ``int64[n]`` of the logits.
        tokens: ``int64[n]``, one for each place.
        most: How many likeliest tokens of each place; of equal ones the first. Those that are
            impossible are left out.
    """
    at_once = max(_AT_ONCE // logits.shape[1], 1)
    parts = [slice(begin, begin + at_once) for begin in range(0, len(places), at_once)]
    return [one for p in parts for one in _of_part(logits, places[p], tokens[p], most[p])]


def _of_part(
    logits: Tensor, places: Int64, tokens: Int64, most: Sequence[int] | Int64
) -> list[TokenLogprob]:
    counts = [int(n) for n in most]
    asked = torch.from_numpy(np.stack((places, tokens))).to(logits.device)
    logs = logits.index_select(0, asked[0]).double().log_softmax(-1)
    own = logs.gather(-1, asked[1].unsqueeze(-1))
    n = min(max(1, *counts), logits.shape[1])
    values, ids = _likeliest(logs, n)
    rows = torch.cat((own, values, ids.double()), -1).tolist()  # float64 holds ids exactly
    return [
        TokenLogprob(token, line[0], _possible(line[1 : n + 1], line[n + 1 :])[:count])
        for token, line, count in zip(tokens.tolist(), rows, counts, strict=True)
    ]


def _likeliest(logs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` greatest of each line and their ids; of equal ones the first."""
    values, _ = logs.topk(n)  # which of equal ones it finds is undefined
    width, least = logs.shape[1], values[:, -1:]
    above, equal = logs > least, logs == least
    found = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    ids = torch.where(found, torch.arange(width, device=logs.device), width)
    ids = ids.topk(n, largest=False).values
    values, order = logs.gather(-1, ids).sort(descending=True, stable=True)
    return values, ids.gather(-1, order)


def _possible(values: list[float], ids: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple((int(token), value) for token, value in pairs if value > -math.inf)


NOTHING = np.zeros(0, np.int32)
_warm: set[tuple[torch.dtype, str]] = set()


class Sampler:
    """Chooses for rows that are started, observed as their answers grow, and finished.

    Args:
        rows: Most rows at a time.
        capacity: Most tokens of a row, prompt and answer together.
        vocab_size: Logits of a place.

    Attributes:
        rules: What is known of each row.
    """

    def __init__(self, rows: int, capacity: int, vocab_size: int) -> None:
        self.rules = rules_of(rows, capacity, vocab_size)
        self._samplings = [Sampling()] * rows
        self._scratch = scratch_for(vocab_size)
        self._vocab_size = vocab_size

    def start(
        self, row: int, prompt: Int32, sampling: Sampling, committed: Int32 = NOTHING
    ) -> None:
        """Begin a row that is not in use, with ``int32[*]`` ids of its prompt.

        Args:
            sampling: Biases are for ids of the vocabulary.
            committed: ``int32[*]`` beginning of its answer.
        """
        rules, biases = self.rules, dict(sampling.logit_bias)
        self._samplings[row] = sampling
        for name in SETTINGS:
            getattr(rules, name)[row] = getattr(sampling, name)
        rules.plain[row], rules.penalises[row] = sampling.plain, sampling.penalises
        rules.biases[row] = len(biases)
        rules.bias_ids[row, : len(biases)] = list(biases)
        rules.bias_values[row, : len(biases)] = list(biases.values())
        if sampling.repetition_penalty != 1:
            hold_prompt(rules, row, prompt)
        rules.answered[row] = 0
        self.observe(row, committed)
        self._look_ahead(row)

    def observe(self, row: int, tokens: Int32) -> None:
        """Append ``int32[*]`` tokens that entered a row's answer, whoever chose them."""
        rules = self.rules
        if rules.penalises[row]:
            hold_answer(rules, row, tokens)
        rules.answered[row] += len(tokens)
        if rules.answered[row] - rules.first[row] > AHEAD:
            self._look_ahead(row)

    def finish(self, row: int) -> None:
        """Forget a row; afterwards it may be started again."""
        release(self.rules, row)
        self.rules.plain[row] = True

    def plain(self, rows: Int32) -> bool:
        """Whether each of ``int32[n]`` rows takes the greatest of the target's own logits."""
        return bool(self.rules.plain[rows].all())

    def choose(self, logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None) -> Int64:
        """``int64[M]`` the token at each place that is visited; below 0 elsewhere.

        A place is visited if the tokens chosen above it are those of its path. It is -1 where a
        logit is NaN or infinity, or where nothing may be chosen. A row that decodes plainly says
        what `operations.greatest` says wherever it has no mask.

        Args:
            logits: ``[M, V]`` of any floating dtype, on any device: of each row its current
                token's, then those of its draft's nodes.
            rows: ``int32[n]``.
            drafts: Of these rows, in the same order; of at most ``MOST_NODES`` tokens each.
            allowed: Of the same places; None where all rows may say anything.

        Raises:
            ValueError: The logits are not as many as the vocabulary.
        """
        if logits.shape[1] != self._vocab_size:
            raise ValueError(
                f"{logits.shape[1]} logits for a vocabulary of {self._vocab_size}; "
                "make the sampler for the target it chooses for"
            )
        if logits.device.type != "cpu":
            return tensor_sampler.choose(logits, rows, drafts, allowed, self.rules)
        return compiled.choose(logits, rows, drafts, allowed, self.rules, self._scratch)

    def _look_ahead(self, row: int) -> None:
        """Random numbers of the next positions: more than a step looks at, as each call costs."""
        rules, sampling = self.rules, self._samplings[row]
        rules.first[row] = begin = int(rules.answered[row])
        if sampling.temperature > 0:
            rules.numbers[row] = uniforms(sampling, begin, rules.numbers.shape[1])


def is_warm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a choice among such logits waits for no compiler."""
    return (dtype, device.type) in _warm


def warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """Compile, or load what is compiled, to choose among such logits."""
    sampler, one = Sampler(1, 2, 2), np.zeros(1, np.int32)
    sampler.start(0, one, Sampling(temperature=1, repetition_penalty=2))
    sampler.observe(0, one)
    draft = Drafts(
        one,
        one - 1,
        np.ones(1, np.int16),
        np.arange(2, dtype=np.int32),
        np.zeros(1, np.float32),
        np.zeros(1, np.int8),
    )
    logits = torch.zeros(2, 2, dtype=dtype)
    if device.type == "cpu":
        sampler.choose(logits, one, draft, None)
    else:  # what is compiled of it runs on the host
        tensor_sampler.choose(logits, one, draft, None, sampler.rules)
    sampler.finish(0)
    _warm.add((dtype, device.type))
