"""Chooses the target's token at each node of the draft trees, by each request's sampling rule.

The choice depends only on the node's logits, the request's rule, the tokens before the node and the
random number of the output position. It does not depend on drafts, other rows or earlier steps.
`Sampler` keeps the state of the rows; `compiled_sampler` (CPU) and `gpu_sampler` (GPU) apply the
rules. A GPU without Triton gives its logits to the CPU.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.kernels.gpu.attention import available
from tasc_engine.layout import Int32, Int64, chains
from tasc_engine.sampling import compiled_sampler as compiled
from tasc_engine.sampling import gpu_sampler
from tasc_engine.sampling.accept import Accepted, EmitLimits, accept
from tasc_engine.sampling.compiled_sampler import scratch_for
from tasc_engine.sampling.row_parameters import (
    AHEAD,
    Allowed,
    hold_answer,
    hold_prompt,
    make_plain,
    release,
    rules_of,
)
from tasc_protocol import PARAMETERS, Sampling, TokenLogprob

_BLOCK = 4  # numbers that Philox generates per counter value
_AT_ONCE = 1 << 22  # logits scored together; about three times their 32 MB are allocated


def uniforms(sampling: Sampling, begin: int, n: int) -> NDArray[np.float64]:
    """Returns ``float64[n]`` random numbers in [0, 1) for output positions from ``begin`` on.

    The numbers depend only on seed, prompt, choice and position: a counter-based generator (Philox;
    Salmon et al. 2011) has no state that drafts or other requests could change.
    """
    key = np.array([sampling.seed, sampling.prompt << 32 | sampling.choice], np.uint64)
    stream = np.random.Philox(key=key)
    block, skip = divmod(begin, _BLOCK)
    stream.advance(block)
    raw = stream.random_raw(skip + n)[skip:]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, places: Int64, tokens: Int64, num_top: Sequence[int] | Int64
) -> list[TokenLogprob]:
    """Returns natural log-probabilities of tokens, and of the most likely tokens at their places.

    Args:
        logits: ``[M, V]`` of any floating dtype, on any device.
        places: ``int64[n]``, lines of ``logits``.
        tokens: ``int64[n]``, one for each place.
        num_top: Number of most likely tokens to return for each place. Among equal tokens, lower
            ids come first. Tokens with probability 0 are left out.
    """
    if not len(places):
        return []
    if _has_kernels(logits.device):
        counts = np.asarray(num_top, np.int64)
        return _scores(gpu_sampler.scores(logits, places, tokens, counts), tokens)
    at_once = max(_AT_ONCE // logits.shape[1], 1)
    parts = [slice(begin, begin + at_once) for begin in range(0, len(places), at_once)]
    return [one for p in parts for one in _of_part(logits, places[p], tokens[p], num_top[p])]


@torch.inference_mode()
def continuation_logprobs(logits: Tensor, places: Int64, tokens: Int64) -> NDArray[np.float64]:
    """Returns ``float64[n]``, natural log-probabilities of tokens at places, in that order.

    Few places may have many tokens each. Places with NaN or infinite logits have NaN.

    Args:
        logits: ``[M, V]`` of any floating dtype, on any device.
        places: ``int64[n]``, lines of ``logits``.
        tokens: ``int64[n]``, one for each place.
    """
    lines, line_of = np.unique(places, return_inverse=True)
    at = torch.from_numpy(lines).to(logits.device)
    parts = at.split(max(_AT_ONCE // logits.shape[1], 1))
    # One pass for each part, in at least float32: softmax needs no more for these numbers.
    totals = [_as_float(logits.index_select(0, part)).logsumexp(-1).double() for part in parts]
    found = torch.from_numpy(np.stack((places, tokens))).to(logits.device)
    own = logits[found[0], found[1]].double().cpu().numpy()
    total: NDArray[np.float64] = torch.cat(totals).cpu().numpy() if totals else np.zeros(0)
    total[~np.isfinite(total)] = np.nan
    return np.asarray(own - total[line_of], np.float64)


def _as_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _of_part(
    logits: Tensor, places: Int64, tokens: Int64, num_top: Sequence[int] | Int64
) -> list[TokenLogprob]:
    counts = [int(n) for n in num_top]
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
    """Returns the ``n`` greatest values of each line and their ids; of equal values, the first."""
    values, _ = logs.topk(n)  # the choice of `topk` among equal values is undefined
    width, smallest = logs.shape[1], values[:, -1:]
    above, equal = logs > smallest, logs == smallest
    found = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    ids = torch.where(found, torch.arange(width, device=logs.device), width)
    ids = ids.topk(n, largest=False).values.clamp_(max=width - 1)  # lines of NaN have no greatest
    values, order = logs.gather(-1, ids).sort(descending=True, stable=True)
    return values, ids.gather(-1, order)


def _scores(found: NDArray[np.float64], tokens: Int64) -> list[TokenLogprob]:
    """Reads the result of `gpu_sampler.scores`."""
    most, result = found.shape[1] // 2 - 1, list[TokenLogprob]()
    for token, (own, n, *rest) in zip(tokens.tolist(), found.tolist(), strict=True):
        ids, values = rest[most : most + int(n)], rest[: int(n)]
        # The sort is stable, so that equal tokens stay in the order of their ids.
        top = sorted(zip(map(int, ids), values, strict=True), key=lambda pair: -pair[1])
        result.append(TokenLogprob(token, own, tuple(top)))
    return result


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and available(device=device)


def _possible(values: list[float], ids: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple((int(token), value) for token, value in pairs if value > -math.inf)


NOTHING = np.zeros(0, np.int32)
_warm: set[tuple[torch.dtype, str]] = set()


class Sampler:
    """Chooses tokens for rows. Call `start`, then `observe` as the answer grows, then `finish`.

    Args:
        rows: Maximum number of rows.
        capacity: Maximum tokens of a row, prompt and answer together.
        vocab_size: Number of logits per place.

    Attributes:
        rules: Parameters and counts of each row.
    """

    def __init__(self, rows: int, capacity: int, vocab_size: int) -> None:
        self.rules = rules_of(rows, capacity, vocab_size)
        self._samplings = dict[int, Sampling]()  # of the rows that are not plain
        self._scratch = scratch_for(vocab_size)
        self._vocab_size = vocab_size

    def start(
        self, row: int, prompt: Int32, sampling: Sampling, committed: Int32 = NOTHING
    ) -> None:
        """Starts a row that is not in use.

        Args:
            prompt: ``int32[*]``, the ids of the prompt.
            sampling: The sampling rule. The ids of its biases must be within the vocabulary.
            committed: ``int32[*]``, the tokens with which the answer begins.
        """
        if sampling.plain:
            return  # `rules` has this rule for each row that `start` does not change
        rules, biases = self.rules, dict(sampling.logit_bias)
        self._samplings[row] = sampling
        for name in PARAMETERS:
            getattr(rules.parameters, name)[row] = getattr(sampling, name)
        rules.plain[row], rules.penalises[row] = False, sampling.penalises
        rules.biases[row] = len(biases)
        rules.bias_ids[row, : len(biases)] = list(biases)
        rules.bias_values[row, : len(biases)] = list(biases.values())
        if sampling.repetition_penalty != 1:
            hold_prompt(rules, row, prompt)
        self.observe(row, committed)
        self._look_ahead(row)

    def observe(self, row: int, tokens: Sequence[int] | Int32) -> None:
        """Appends tokens to a row's answer, whether sampled here or not."""
        if row not in self._samplings or not len(tokens):
            return
        rules = self.rules
        if rules.penalises[row]:
            hold_answer(rules, row, np.array(tokens, np.int32))
        rules.answered[row] += len(tokens)
        if rules.answered[row] - rules.first[row] > AHEAD:
            self._look_ahead(row)

    def finish(self, row: int) -> None:
        """Frees a row; afterwards it may be started again."""
        if self._samplings.pop(row, None):
            release(self.rules, row)
            make_plain(self.rules, row)

    def plain(self, rows: Int32) -> bool:
        """Whether each of ``int32[n]`` rows takes the token with the target's greatest logit."""
        return not self._samplings or bool(self.rules.plain[rows].all())

    def start_choice(
        self, logits: Tensor, rows: Int32, drafts: Drafts, allowed: Allowed | None
    ) -> Callable[[EmitLimits], Accepted]:
        """Starts to choose the tokens of a step by the rules that the rows have now.

        A row gets no token if a logit is NaN or positive infinity, or if no token is allowed. A
        plain row without a mask gets the result of `operations.greatest`.

        Args:
            logits: ``[M, V]`` of any floating dtype, on any device: for each row, the logits of its
                current token, then of its draft's nodes. A GPU may not have computed them yet.
            rows: ``int32[n]``.
            drafts: Drafts of these rows, in the same order, with at most ``MAX_NODES`` tokens
                each.
            allowed: Masks of the same places; None if every token is allowed everywhere.

        Returns:
            A function that waits for the device, and follows each row's draft with the tokens. On a
            CPU, it chooses them. It must be called before a rule or a row changes.

        Raises:
            ValueError: The number of logits differs from the vocabulary size.
        """
        if logits.shape[1] != self._vocab_size:
            raise ValueError(
                f"{logits.shape[1]} logits for a vocabulary of {self._vocab_size}; "
                "create the sampler with the vocabulary size of its target"
            )
        if not _has_kernels(logits.device):
            rules, scratch = self.rules, self._scratch
            return lambda limits: compiled.choose(
                logits.cpu(), rows, drafts, allowed, limits, rules, scratch
            )
        tokens = gpu_sampler.start(logits, rows, drafts, allowed, self.rules)
        return lambda limits: accept(tokens(), drafts, limits)

    def _look_ahead(self, row: int) -> None:
        """Draws random numbers for more positions than one step needs, as each call is slow."""
        rules, sampling = self.rules, self._samplings[row]
        rules.first[row] = begin = int(rules.answered[row])
        if sampling.temperature > 0:
            rules.numbers[row] = uniforms(sampling, begin, rules.numbers.shape[1])


def is_warm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the code for logits of this dtype and device is already compiled."""
    return (dtype, device.type) in _warm


def warm_up(dtype: torch.dtype, device: torch.device, vocab_size: int) -> None:
    """Compiles or loads the code for such logits, also for their log-probabilities."""
    sampler, one = Sampler(1, 2, vocab_size), np.zeros(1, np.int32)
    sampler.start(0, one, Sampling(temperature=1, repetition_penalty=2))
    sampler.observe(0, one)
    draft, logits = chains(one[None]), torch.zeros(2, vocab_size, dtype=dtype, device=device)
    limits = EmitLimits(one, np.ones(1, bool), np.zeros(vocab_size, bool))
    sampler.start_choice(logits, one, draft, None)(limits)
    token_logprobs(logits, np.zeros(1, np.int64), np.zeros(1, np.int64), [1])
    sampler.finish(0)
    _warm.add((dtype, device.type))
