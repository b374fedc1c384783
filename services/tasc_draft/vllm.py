"""Drafts from a task's index in vLLM: a proposer for its speculative method ``custom_class``.

::

    vllm.LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "tasc_draft.vllm.TascProposer",
            "num_speculative_tokens": 16,
        },
        additional_config={"tasc": {"index": "index.tasc"}},
    )

vLLM names rows by their slots in the batch, and moves, removes and resumes rows without notice. A
row is therefore recognised by its tokens. This module needs vLLM only where vLLM calls it, and its
tests replay calls of vLLM 0.32. vLLM declares the interface experimental.
"""

import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import DraftError, Int32
from tasc_draft.files import cache_folder
from tasc_draft.index.draft_index import INDEX_FILE, DraftIndex, read_index
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.mixture.row_state import NONE, int32
from tasc_draft.settings import DraftSettings
from tasc_text import TaskTokenizer, open_tokenizer, resolve_folder

if TYPE_CHECKING:  # Redis is optional
    from tasc_store import Artifact
    from tasc_store.indexes import DraftIndexes

log = logging.getLogger(__name__)

_MOST_FAULTS = 3  # afterwards, nothing is drafted
_BLOCK = 32  # tokens that are compared at once
# These belong to `Pace`.
_KEPT = 0.95  # share of a step's weight that is left after the next step
_FEW_STEPS = 16  # steps before anything is concluded
_PLAIN_STEP = 64  # one step of so many has no drafts
_COMPARED_STEPS = 8  # drafted steps from one comparison with plain steps to the next
_MARGIN = 1.03  # plain steps must be faster by this factor to stop drafts
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps without drafts
_TRIAL_STEPS = 3  # drafted steps to compare where they are slower by a factor of two and more
_TRIAL_SHARE, _MOST_RARE = 0.02, 1024  # of the time, for drafts that may not pay; steps between
_OUTLIER = 8.0  # a step that takes so many times the usual time is left out
_MOST_PROB = 0.9  # above it, even nearly certain tokens would not be tried
_LEAST_PROB = 0.05  # of a drafted path, where tokens cost next to nothing


@dataclasses.dataclass(frozen=True)
class VllmDrafting:
    """The settings under ``tasc`` in vLLM's ``additional_config``.

    vLLM hashes these settings into the key of its compile cache, so they name no index version.

    Attributes:
        index: An index file, or a folder with an ``index.tasc``; a new version of the file is taken
            over between two steps.
        task: The name of a task whose current index in Redis is used, instead of ``index``.
        redis_url: The address of this Redis.
        rows: Number of rows that get drafts at the same time. Up to 32 are added for rows that may
            come back. Each takes eight bytes for each id of the vocabulary.
        row_tokens: Maximum tokens of a row, prompt and answer together; longer rows get no drafts.
        poll_s: Seconds between two looks for a new version of the index.
        draft: Fields of `DraftSettings` that replace those of the index.

    Raises:
        DraftError: A value is outside its range, or not exactly one index is named.
    """

    index: str | None = None
    task: str | None = None
    redis_url: str | None = None
    rows: int = 256
    row_tokens: int = 8192
    poll_s: float = 5.0
    draft: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.index is None) == (self.task is None) or bool(self.task) != bool(self.redis_url):
            raise DraftError(
                'additional_config must name one index: {"tasc": {"index": FILE_OR_FOLDER}} or '
                '{"tasc": {"task": NAME, "redis_url": URL}}'
            )
        if not isinstance(self.draft, Mapping):
            raise DraftError(f"tasc.draft is {self.draft!r}; it must be an object with fields")
        for name, kinds in (("rows", int), ("row_tokens", int), ("poll_s", int | float)):
            value = getattr(self, name)
            if not isinstance(value, kinds) or not value > 0:
                raise DraftError(f"tasc.{name} is {value!r}; it must be a number above 0")

    @classmethod
    def read(cls, additional_config: Any) -> "VllmDrafting":
        """Returns the settings in vLLM's ``additional_config``.

        Raises:
            DraftError: There are none, or a field is unknown or outside its range.
        """
        found = additional_config.get("tasc") if isinstance(additional_config, dict) else None
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(found, dict):
            found = {}
        if unknown := sorted(set(found) - set(known)):
            raise DraftError(
                f'additional_config has unknown fields in "tasc": {", ".join(unknown)}; known '
                f"fields are {', '.join(known)}"
            )
        return cls(**found)

    def settings(self, index: DraftIndex, most: int) -> DraftSettings:
        """The settings for drafts from an index, with at most ``most`` tokens of one row."""
        tuned = index.settings or DraftSettings()
        ours = {"num_speculative_tokens": most, "min_prob": _LEAST_PROB}
        fields = {**dataclasses.asdict(tuned), **ours, **self.draft}
        try:
            return DraftSettings(**fields)
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(DraftSettings))
            raise DraftError(f"tasc.draft: {error}; known fields are {known}") from error


# A row.
#   length: number of tokens of its text, up to the first end-of-sequence of the last step; 0: free
#   begin: number of tokens of the prompt
#   seen: number of tokens that vLLM's row had in the last step, also after an end-of-sequence
#   step: number of the last step in which the row was in the batch
ROW = np.dtype(int32("length", "begin", "seen", "step"), align=True)


@borrowing
def _equal(a: Any, b: Any, n: int) -> bool:
    """Whether the first n values are equal, compared from the end, where rows differ."""
    end = n
    while end > 0:
        begin, different = max(end - _BLOCK, 0), 0
        for i in range(begin, end):
            different |= a[i] ^ b[i]
        if different:
            return False
        end = begin
    return True


@borrowing
def _is_end(token: int, is_eos: Any) -> bool:
    return 0 <= token < len(is_eos) and is_eos[token]


@borrowing
def _missed(row: Any, text: Any, tokens: Any, end: int, fresh: int, is_eos: Any) -> int:
    """Number of tokens that a row lacks before those of this step; NONE: it is not the slot's row.

    A row lacks tokens if vLLM left out steps. A row that has ended must not lack any, because the
    next prompt of a conversation may contain it.
    """
    missed = end - fresh - row.seen
    if missed > 0 and _is_end(text[row.length - 1], is_eos):
        return NONE
    return missed if missed >= 0 and _equal(text, tokens, row.length) else NONE


@borrowing
def _find(
    rows: Any,
    texts: Any,
    row_of: Any,
    step: int,
    fresh: Any,
    ends: Any,
    tokens: Any,
    is_eos: Any,
    absent: Any,
) -> tuple[int, int]:
    """Find the row of each slot, at first the one of the last step, then among the absent rows.

    Returns the number of absent rows, and of tokens of steps that vLLM left out; see `follow`.
    """
    n, away, skipped = len(fresh), 0, 0
    for i in range(n):
        r = row_of[i]
        if r == NONE:
            continue
        if fresh[i] > 0 and _missed(rows[r], texts[r], tokens[i], ends[i], fresh[i], is_eos) == 0:
            rows[r].step = step
        else:
            row_of[i] = NONE
    row_of[n:] = NONE
    for r in range(len(rows)):
        if rows[r].length > 0 and rows[r].step != step:
            absent[away] = r
            away += 1
    for i in range(n):
        if row_of[i] != NONE or fresh[i] == 0:
            continue
        best, least = NONE, 0
        for j in range(away):
            r = absent[j]
            missed = _missed(rows[r], texts[r], tokens[i], ends[i], fresh[i], is_eos)
            if missed != NONE and (best == NONE or missed < least):
                best, least = j, missed
        if best != NONE:
            row_of[i] = absent[best]
            skipped += least
            rows[row_of[i]].step = step
            away -= 1
            absent[best] = absent[away]
    return away, skipped


@borrowing
def _append(
    rows: Any,
    texts: Any,
    row_of: Any,
    fresh: Any,
    ends: Any,
    tokens: Any,
    is_eos: Any,
    added: Any,
    offsets: Any,
) -> None:
    """Append each slot's new tokens to its row; see `follow`."""
    n, capacity, at = len(fresh), texts.shape[1], 0
    for i in range(n):
        offsets[i] = at
        r = row_of[i]
        if r == NONE:
            continue
        end = rows[r].length
        while end < ends[i] and end < capacity:
            token = tokens[i, end]
            texts[r, end] = token
            added[at] = token
            end, at = end + 1, at + 1
            # A row that goes on after an end ignores ends.
            if end > ends[i] - fresh[i] and _is_end(token, is_eos):
                break
        rows[r].length, rows[r].seen = end, ends[i]
    offsets[n] = at


@borrowing
def follow(
    rows: Any,
    texts: Any,
    row_of: Any,
    step: int,
    fresh: Any,
    ends: Any,
    tokens: Any,
    is_eos: Any,
    added: Any,
    offsets: Any,
    absent: Any,
) -> tuple[int, int, int]:
    """Find the rows of a batch's slots, and append their new tokens.

    Args:
        rows: ``ROW[r]``.
        texts: ``int32[r, capacity]``.
        row_of: ``int32[slots]``, the row of each slot in the last step; updated. A slot whose
            prompt is incomplete, or that begins a row, has NONE.
        fresh: ``int32[n]``, number of tokens that the target emitted for each slot in this step.
        ends: ``int32[>=n]``, number of tokens of each slot, with these.
        tokens: ``int32[>=n, m]``, the tokens of each slot.
        is_eos: ``bool[ids]``.
        added: ``int32[*]``, filled with the tokens that each slot's row did not have yet, up to an
            end-of-sequence.
        offsets: ``int32[n + 1]``, filled with the places where each slot's tokens begin.
        absent: ``int32[r]``, filled with the rows that are not in the batch. Rows that ended come
            first; the others may come back.

    Returns:
        The number of absent rows that ended, of absent rows, and of tokens of steps that vLLM left
        out.
    """
    away, skipped = _find(rows, texts, row_of, step, fresh, ends, tokens, is_eos, absent)
    ended = 0
    for j in range(away):
        r = absent[j]
        if _is_end(texts[r, rows[r].length - 1], is_eos):
            absent[j], absent[ended] = absent[ended], r
            ended += 1
    _append(rows, texts, row_of, fresh, ends, tokens, is_eos, added, offsets)
    return ended, away, skipped


class Pace:
    """Learns from vLLM's steps with about equally many rows which drafts pay.

    A step's time is linear in its number of verified tokens and of prompt tokens, by least squares
    with decaying weights. A draft token of probability p gains p tokens and costs the time of a
    verified token, in which the batch emits ``seconds * rate`` tokens: it pays if p is above this
    product. Probabilities are corrected by the share of accepted tokens, since the index may be of
    another task.

    Whether drafts pay at all is measured, too, because a step with any draft may have costs of its
    own: vLLM samples another way then. Now and then a step has no drafts. While such steps are
    faster, drafts are tried again after pauses that become longer, and are the longer, the slower
    steps with drafts are, so that trials take a small share of the time.

    Attributes:
        min_prob: The least probability that pays; 0 while too few steps are known.
    """

    def __init__(self) -> None:
        self.min_prob = self._usual = 0.0
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self._emitted, self._elapsed = np.zeros(2), np.zeros(2)  # without and with drafts
        self._known = [0, 0]  # steps without and with drafts
        self._accepted = self._predicted = 1.0
        self._step = self._seen = self._pause = self._compared = 0
        self._next_pause = _SHORTEST_PAUSE

    def add(
        self, elapsed: float, rows: int, prompt: int, emitted: int, drafted: int, predicted: float
    ) -> None:
        """Adds a step.

        Args:
            elapsed: Seconds since the step before.
            rows: Number of rows that went on.
            prompt: Number of prompt tokens of the rows that began.
            emitted: Number of tokens that the rows that went on emitted.
            drafted: Number of draft tokens that were verified.
            predicted: Sum of their probabilities.
        """
        self._usual = self._usual or elapsed
        if elapsed > _OUTLIER * self._usual:  # the process or the machine was stopped
            self._usual *= 1.1
            return
        self._usual += 0.1 * (elapsed - self._usual)
        seen = np.array((1.0, rows + drafted, prompt))
        self._squares = _KEPT * self._squares + np.outer(seen, seen)
        self._products = _KEPT * self._products + elapsed * seen
        steps, tokens, squared = self._squares[0, 0], self._squares[0, 1], self._squares[1, 1]
        token_s = prompt_s = 0.0
        # Where all steps are alike, a token's time is unknown.
        self._seen += 1
        if self._seen >= _FEW_STEPS and steps * squared > 1.01 * tokens * tokens:
            ridge = np.diag(1e-6 * self._squares.diagonal() + 1e-9)
            found = np.linalg.solve(self._squares + ridge, self._products)
            token_s, prompt_s = np.maximum(found[1:], 0.0).tolist()
        which = int(drafted > 0)
        self._known[which] += 1
        self._emitted[which] = _KEPT * self._emitted[which] + emitted
        own = max(elapsed - prompt_s * prompt, 0.1 * elapsed)
        self._elapsed[which] = _KEPT * self._elapsed[which] + own
        if drafted:
            self._accepted = _KEPT * self._accepted + emitted - rows
            self._predicted = _KEPT * self._predicted + predicted
        else:  # the share is forgotten where nothing is drafted, so that drafts are tried again
            self._accepted += 0.02 * (self._predicted - self._accepted)
        right = max(self._accepted, 0.0) / max(self._predicted, 1e-9)
        rate = float(self._emitted.sum() / max(self._elapsed.sum(), 1e-9))
        self.min_prob = min(token_s * rate / max(right, 1e-3), _MOST_PROB)

    def begun_anew(self) -> "Pace":
        """A pace with the same times of steps, which has drawn no conclusion on drafts."""
        pace = deepcopy(self)
        pace._pause = pace._compared = 0
        pace._known, pace._next_pause = [0, 0], _SHORTEST_PAUSE
        pace._emitted *= 0.1  # the rates of another size of the batch are a first guess
        pace._elapsed *= 0.1
        return pace

    def drafts_next(self) -> bool:
        """Whether the next step should have drafts; call it once for each step."""
        self._step += 1
        if self._pause:
            self._pause -= 1
            return False
        plain, drafted = self._known
        without, with_drafts = (self._emitted / np.maximum(self._elapsed, 1e-9)).tolist()
        slower = without / max(with_drafts, 1e-9)
        steps = _TRIAL_STEPS if slower > 2 else _COMPARED_STEPS
        if plain >= _FEW_STEPS // 4 and drafted >= self._compared + steps:
            trial, self._compared = drafted - self._compared, drafted
            if slower > _MARGIN:
                rarely = int(min(trial * (slower - 1) / _TRIAL_SHARE, _MOST_RARE))
                self._pause = max(self._next_pause, rarely)
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
                self._emitted[1] = self._elapsed[1] = self._known[1] = self._compared = 0
                return False
            if drafted >= 2 * _FEW_STEPS:
                self._next_pause = _SHORTEST_PAUSE
        rare = _PLAIN_STEP if plain >= _FEW_STEPS // 4 else _PLAIN_STEP // 4
        return self._step % rare != 0


class Paces(dict[int, Pace]):
    """A pace for each size of the batch; a new one begins with the times that the nearest knows."""

    def __missing__(self, size: int) -> Pace:
        known = [each for each in self if each]  # an empty batch teaches nothing
        nearest = min(known, key=lambda each: abs(each - size), default=None)
        self[size] = Pace() if nearest is None else self[nearest].begun_anew()
        return self[size]


class TascProposer:
    """Drafts chains for vLLM from a task's index.

    Args:
        vllm_config: vLLM's configuration, with `VllmDrafting` in its ``additional_config``.

    Attributes:
        source: The place of the index.
        plain_slots: Slots of the batch that get no drafts in the next `propose`.

    Raises:
        DraftError: The settings are invalid, or the index is damaged or for another tokenizer.
            vLLM then does not start. If Redis does not answer, drafts come from prompts and
            answers alone until it does.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._given = given = VllmDrafting.read(vllm_config.additional_config)
        model = vllm_config.model_config
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._vocab_size = int(model.get_vocab_size())
        slots = int(vllm_config.scheduler_config.max_num_seqs)
        drafted = min(slots, given.rows)
        number = drafted + NgramProposer.spare_lanes(drafted)  # for rows that are out of the batch
        capacity = min(int(model.max_model_len), given.row_tokens)
        self.source = source_of(given, model.tokenizer, model.tokenizer_revision)
        self.plain_slots = frozenset[int]()
        self._rows = np.zeros(number, ROW)
        self._texts = np.zeros((number, capacity), np.int32)
        self._row_of = np.full(slots, NONE, np.int32)
        self._absent = np.zeros(number, np.int32)
        self._added = np.zeros(number * capacity, np.int32)
        self._free = list(range(number))[::-1]
        self._step = self._faults = 0
        self._is_broken = False
        self._paces = Paces()  # by the bits of the number of rows
        self._began_at = 0.0
        # The last draft of each row: its number of tokens, and the sum of their probabilities.
        self._drafted: NDArray[Any] = np.zeros(number, np.int64)
        self._predicted: NDArray[Any] = np.zeros(number)
        self._last_ends = np.zeros(slots, np.int32)
        self._min_probs = np.zeros(number * self._most, np.float32)
        self._proposer = self._made(self.source.first())
        self._is_eos = self._proposer.memory.is_eos
        self._next: tuple[DraftIndex, NgramProposer | None] | None = None
        self._closed = threading.Event()
        none = np.zeros(0, np.int32)
        self._propose([], none, none.reshape(0, 1))  # compiles, or loads compiled code
        watched = weakref.ref(self), self._closed, given.poll_s
        threading.Thread(target=_watch, args=watched, name="tasc-index", daemon=True).start()

    @property
    def index(self) -> DraftIndex:
        """The index in use."""
        return self._proposer.index

    def close(self) -> None:
        """Stops looking for new versions of the index."""
        self._closed.set()

    def load_model(self, model: Any) -> None:
        """Mends the sampling of drafts on a CPU. vLLM calls it after it has loaded the target."""
        mend_sampling(sys.modules.get("vllm.v1.sample.rejection_sampler"))

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Int32,
        token_ids_cpu: Int32,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for all slots of a batch. A fault is logged, and gives empty drafts.

        Args:
            sampled_token_ids: The tokens that the target emitted for each slot in this step; none
                for a slot whose prompt is incomplete.
            num_tokens_no_spec: ``int32[slots]``, number of tokens of each slot, with these.
            token_ids_cpu: ``int32[slots, max_model_len]``, the tokens of each slot.
            slot_mappings: Not used.

        Returns:
            A chain of up to ``num_speculative_tokens`` ids for each slot.
        """
        if self._faults < _MOST_FAULTS:
            try:
                return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                self._faults += 1
                is_last = self._faults == _MOST_FAULTS
                after = "off until vLLM starts again" if is_last else "started anew"
                log.exception("a step is not drafted, and drafting is %s", after)
                self._is_broken = True
        return [[] for _ in sampled_token_ids]

    def _propose(
        self, sampled: Sequence[Sequence[int]], ends: Int32, ids: Int32
    ) -> list[list[int]]:
        began_at = time.perf_counter()
        n, slots_of = len(sampled), len(self._row_of)
        # Compiled code checks no bounds.
        fits = n <= min(slots_of, len(ends), len(ids))
        fits = fits and all(array.dtype == np.int32 for array in (ends, ids))
        if not fits or (n > 0 and ends[:n].max() > ids.shape[1]):
            raise DraftError(
                f"a batch has {n} slots of {slots_of}, rows of {ids.shape[1]} tokens, and types "
                f"{ends.dtype} and {ids.dtype}; this version of vLLM differs from 0.32"
            )
        is_same = self._renew()
        self._step += 1
        fresh, offsets = np.fromiter(map(len, sampled), np.int32, n), np.empty(n + 1, np.int32)
        rows, texts, row_of, is_eos = self._rows, self._texts, self._row_of, self._is_eos
        added, absent = self._added, self._absent
        over, away, skipped = follow(
            rows, texts, row_of, self._step, fresh, ends, ids, is_eos, added, offsets, absent
        )
        slots, parked = row_of[:n], absent[over:away].tolist()
        if is_same and skipped == 0 and fresh.all():  # else it was no single, whole step
            self._learn_pace(began_at - self._began_at, fresh, slots, ends[:n])
        self._last_ends[:n] = ends[:n]
        for row in absent[:over].tolist():
            self._finish(row)
        self._proposer.observe_rows(slots, added, offsets)
        for i in np.flatnonzero((slots == NONE) & (fresh > 0)).tolist():
            slots[i] = self._begin(ids[i, : ends[i]], int(fresh[i]), parked)
        drafted = np.flatnonzero(slots != NONE)
        chosen = slots[drafted]
        lengths = rows["length"][chosen]
        budget = np.minimum(self._most, texts.shape[1] - lengths).astype(np.int32)
        pace = self._paces[n.bit_length()]
        budget[is_eos[texts[chosen, lengths - 1]]] = 0  # these rows have ended
        if not pace.drafts_next():
            budget[:] = 0
        if self.plain_slots:
            budget[np.isin(drafted, list(self.plain_slots))] = 0
        self._min_probs[:] = pace.min_prob
        drafts = self._proposer.propose(chosen, budget, self._min_probs)
        tokens, bounds = drafts.tokens.tolist(), drafts.offsets.tolist()
        owners, places = np.repeat(chosen, drafts.sizes), len(rows)
        self._drafted = np.bincount(owners, minlength=places)
        self._predicted = np.bincount(owners, np.exp(drafts.logp), places)
        chains: list[list[int]] = [[] for _ in range(n)]
        for i, begin, end in zip(drafted.tolist(), bounds, bounds[1:], strict=False):
            chains[i] = tokens[begin:end]
        self._began_at = began_at
        return chains

    def _learn_pace(self, seconds: float, fresh: Int32, slots: Int32, ends: Int32) -> None:
        """Learns from the step that has ended.

        Args:
            seconds: From the beginning of the drafts for this step to its end.
        """
        n, found = len(fresh), slots != NONE
        # Slots without a row hold rows that are too long, or had no place, or begin now.
        old = found | (ends - fresh == self._last_ends[:n])
        if self._began_at and old.any():
            went, begun = slots[found], ~old
            pace = self._paces[n.bit_length()]
            pace.add(
                seconds,
                rows=int(old.sum()),
                prompt=int((ends - fresh)[begun].sum()),
                emitted=int(fresh[old].sum()),
                drafted=int(self._drafted[went].sum()),
                predicted=float(self._predicted[went].sum()),
            )

    def _begin(self, ids: Int32, fresh: int, parked: list[int]) -> int:
        """Begins a row; returns NONE if it is too long, or no row is free.

        Args:
            parked: Rows that are out of the batch, and may be given up.
        """
        rows, length, begin = self._rows, len(ids), len(ids) - fresh
        if length > self._texts.shape[1] or ids.min() < 0 or ids.max() >= len(self._is_eos):
            return NONE
        if not self._free:
            if not parked:
                return NONE
            oldest = min(parked, key=lambda row: int(rows[row]["step"]))
            parked.remove(oldest)
            self._finish(oldest)
        row = self._free[-1]
        for at in range(begin, length):
            if self._is_eos[ids[at]]:
                length = at + 1
                break
        self._proposer.start(row, ids[:begin])
        self._proposer.observe(row, ids[begin:length])
        self._free.pop()
        self._texts[row, :length] = ids[:length]
        rows[row] = length, begin, len(ids), self._step
        return row

    def _finish(self, row: int) -> None:
        self._rows[row]["length"] = 0
        self._free.append(row)
        self._proposer.finish(row)

    def _renew(self) -> bool:
        """Switches to a new index, or to a new proposer after a fault.

        Returns:
            Whether nothing changed.
        """
        found = self._next
        if found:  # otherwise, the other thread may be setting it
            self._next = None
        if self._is_broken:
            self._rows[:], self._row_of[:] = 0, NONE
            self._free = list(range(len(self._rows)))[::-1]
            self._proposer, self._is_broken = self._made(found[0] if found else self.index), False
        elif found and (proposer := found[1]):
            for row in np.flatnonzero(self._rows["length"]).tolist():
                (length, begin, _, _), text = self._rows[row].tolist(), self._texts[row]
                proposer.start(row, text[:begin])
                proposer.observe(row, text[begin:length])
            self._proposer = proposer
        elif found:
            try:
                self._proposer.set_index(found[0])
            except DraftError as error:  # it changes nothing then
                log.warning("no new draft index is used, the last one stays: %s", error)
        return not found and self._step > 0

    def load_newer(self) -> None:
        """Loads a new version of the index, for `_renew`."""
        if self._next:  # not in use yet
            return
        if index := self.source.newer():
            settings = self._given.settings(index, self._most)
            same = settings == self._proposer.settings
            self._next = index, None if same else self._made(index)

    def _made(self, index: DraftIndex) -> NgramProposer:
        rows, capacity = self._texts.shape
        return NgramProposer(
            self._given.settings(index, self._most),
            rows=rows,
            capacity=capacity,
            vocab_size=self._vocab_size,
            eos_ids=self.source.tokenizer.eos_ids,
            index=index,
            branching=False,
        )


def _watch(proposer: weakref.ref[TascProposer], closed: threading.Event, poll_s: float) -> None:
    """Loads new versions of the index until the proposer is closed, or nobody else holds it."""
    reported = ""
    while not closed.wait(poll_s):
        if (found := proposer()) is None:
            return
        try:
            found.load_newer()
            reported = ""
        except Exception as error:
            if str(error) != reported:
                log.warning("no new draft index is used, the last one stays: %s", error)
                reported = str(error)
        del found


def mend_sampling(sampler: Any) -> None:
    """Mends three faults of vLLM 0.32 on a CPU without Triton, where a request samples with drafts.

    The values of ``temperature``, ``top_k`` and ``top_p`` for each draft token are not written, so
    that the tokens of all rows of the batch are arbitrary. ``top_k`` without ``top_p`` ends vLLM in
    a step without drafts. Such a step also draws random numbers for the whole vocabulary of each
    row, which nothing uses and which takes a fifth of the step's time.

    Args:
        sampler: vLLM's module ``rejection_sampler``; None if vLLM did not load it.
    """
    if sampler is None or hasattr(sampler, "mended_by_tasc"):
        return
    expand = getattr(sampler, "expand_batch_to_tokens", None)
    cut = getattr(sampler, "apply_top_k_top_p", None)
    choose = getattr(sampler, "rejection_sample", None)
    if expand is None or cut is None or choose is None:  # another version, which may have no fault
        return

    def expanded(x: Any, ends: Any, n: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        if x.device.type != "cpu":
            return expand(x, ends, n, replace_from, replace_to)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)

    sampler.expand_batch_to_tokens = expanded

    def cut_(logits: Any, *values: Any, **named: Any) -> Any:
        return cut(logits, *values, **named) if len(logits) else logits

    sampler.apply_top_k_top_p = cut_

    def chosen(
        draft_ids: Any, counts: Any, most: int, ends: Any, probs: Any, logits: Any, last: Any,
        *values: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if len(draft_ids) or last.device.type != "cpu":
            return choose(draft_ids, counts, most, ends, probs, logits, last, *values, **named)
        found = ends.new_full((len(counts), most + 1), -1)  # no token, in vLLM
        found[:, 0] = last[:, 0]
        return found

    sampler.rejection_sample = chosen
    sampler.mended_by_tasc = True


class FileSource:
    """An index in a file, which another process may replace.

    Args:
        place: The file, or a folder with an ``index.tasc``; ``$NAME`` is a variable of the
            environment.
        tokenizer: The target's tokenizer.
    """

    def __init__(self, place: str, tokenizer: TaskTokenizer) -> None:
        path = Path(os.path.expandvars(place)).expanduser()
        self.path, self.tokenizer = path / INDEX_FILE if path.is_dir() else path, tokenizer
        self._state: tuple[int, ...] = ()

    def first(self) -> DraftIndex:
        """Reads the index.

        Raises:
            DraftError: There is no file, or it is damaged or for another tokenizer.
        """
        if not self.path.is_file():
            raise DraftError(
                f"there is no index {self.path}; make one with `tasc-draft index ROWS --model "
                "MODEL --to FOLDER` or `tasc index export TASK --to FOLDER`"
            )
        return self._read()

    def newer(self) -> DraftIndex | None:
        """Reads the index if its file was replaced; else returns None."""
        return self._read() if self._state != self._found() else None

    def _found(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> DraftIndex:
        self._state = self._found()  # also if it is refused, so that it is read once
        index = read_index(self.path, mapped=False)  # the file may be overwritten in place
        index.check_integrity()
        ours = self.tokenizer.fingerprint, self.tokenizer.vocab_size
        if (index.fingerprint, index.vocab_size) != ours:
            raise DraftError(
                f"{self.path} was built with tokenizer {index.fingerprint} of {index.vocab_size} "
                f"ids, but the model has tokenizer {ours[0]} of {ours[1]} ids; build the index "
                f"with the tokenizer in {self.tokenizer.path.parent}"
            )
        return index


class StoreSource:
    """The current index of a task in Redis.

    Args:
        tokenizer: The target's tokenizer.
    """

    def __init__(self, task: str, redis_url: str, tokenizer: TaskTokenizer) -> None:
        self._task, self._url, self.tokenizer = task, redis_url, tokenizer
        self._indexes: DraftIndexes | None = None
        self._used: Artifact | None = None

    def first(self) -> DraftIndex:
        """Fetches the index. Returns an empty one if Redis does not answer or has none.

        Raises:
            DraftError: The task does not exist.
        """
        from tasc_store import StoreUnreachable, UnknownTask

        try:
            if index := self.newer():
                return index
            log.warning("task %s has no index yet; drafts come from prompts", self._task)
        except UnknownTask as error:
            raise DraftError(str(error)) from error
        except StoreUnreachable as error:
            log.warning("drafts come from prompts until Redis answers: %s", error)
        return DraftIndex.empty(self.tokenizer.fingerprint, self.tokenizer.vocab_size)

    def newer(self) -> DraftIndex | None:
        """Fetches the index if another version became current; else returns None."""
        if self._indexes is None:
            self._indexes = self._connected()
        current = self._indexes.store.current()
        if current is None or current == self._used:
            return None
        index = self._indexes.fetch(current)
        self._used = current
        return index

    def _connected(self) -> "DraftIndexes":
        from tasc_store import ArtifactCache, ArtifactStore, TaskStore, connect
        from tasc_store.indexes import DraftIndexes

        client, folder = connect(self._url), cache_folder() / "indexes"
        corpus = TaskStore(client).get(self._task).corpus_name
        store = ArtifactStore(client, corpus, self.tokenizer.fingerprint)
        return DraftIndexes(self._task, store, ArtifactCache(folder), self.tokenizer)


def source_of(
    given: VllmDrafting, tokenizer: str, revision: str | None = None
) -> FileSource | StoreSource:
    """Returns the place of an index, and loads the tokenizer.

    Args:
        tokenizer: A folder with a ``tokenizer.json``, or a name on the Hugging Face hub.
    """
    loaded = open_tokenizer(resolve_folder(tokenizer, revision, weights=False))
    if given.task and given.redis_url:
        return StoreSource(given.task, given.redis_url, loaded)
    return FileSource(given.index or "", loaded)
