"""The neural proposer: a drafter on the target's device, batched over rows of any length.

The proposer keeps each row's tokens and counts how many of them the drafter has read. To draft, the
drafter reads the new tokens and grows a tree after them. A `Vocabulary` selects the tokens that may
be drafted. Answers do not depend on the proposer.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_draft.labels import LabelTrie
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.drafting.neural.tree import Beam, Frontier, NeuralSettings
from tasc_engine.drafting.neural.vocabulary import Vocabulary
from tasc_engine.drafting.safe_proposer import DraftLimit
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest

_WARM_UP = 4  # tokens of the warm-up prompt


class NeuralProposer:
    """Drafts with a model; see `tasc_draft.Proposer`.

    The proposer allocates `cache_bytes` of the device's memory when it is created. For each row,
    this memory holds the keys and values of ``capacity`` tokens and of a draft's nodes and, for an
    EAGLE head, the target's hidden states.

    Args:
        rows: Number of rows; row numbers start at 0.
        capacity: Maximum number of tokens of one row, prompt and answer together.
        eos_ids: Ids that end a path.
        chunk: Maximum number of tokens of one row that a forward reads; before the first draft of
            a row, the drafter reads the prompt.
        limit: When to switch the proposer off; None for never.
        on_drafted: Called after a step with the rows that have drafts.

    Raises:
        ValueError: A length or an id is out of range.
    """

    def __init__(
        self,
        drafter: Eagle | Independent,
        vocabulary: Vocabulary,
        settings: NeuralSettings,
        *,
        rows: int,
        capacity: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        chunk: int = 256,
        limit: DraftLimit | None = None,
        on_drafted: Callable[[Int32], None] = lambda rows: None,
    ) -> None:
        self.settings, self.vocabulary = settings, vocabulary
        self.hidden_state_request = HiddenStateRequest(drafter.needs_hidden, vocabulary.needs_top)
        self._drafter, self.backbone = drafter, drafter.backbone
        self.device = self.backbone.decoder.embedding.device
        self._texts = np.zeros((rows, capacity), np.int32)
        self._lengths, self._bases, self._taken, self._known = np.zeros((4, rows), np.int32)
        self.vocab_size, self._chunk = vocab_size, chunk
        self.limit, self._on_drafted = limit, on_drafted
        self._is_eos = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_eos[list(eos_ids)] = True
        self._is_eos = self._is_eos.to(self.device)
        embedding = self.backbone.decoder.embedding
        shape = (rows, capacity, embedding.shape[1])
        self._hidden = embedding.new_zeros(shape) if drafter.needs_hidden else None
        self._warm_up()

    @property
    def max_depth(self) -> int:
        return self.settings.depth

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a row's tree."""
        return self.settings.nodes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the drafter's keys and values, and of the hidden states that it reads."""
        hidden = 0 if self._hidden is None else self._hidden.nbytes
        return self.backbone.cache_bytes + hidden

    def start(self, row: int, prompt: Int32, labels: LabelTrie | None = None) -> None:
        if self._lengths[row]:
            raise ValueError(f"row {row} is in use; finish the row before starting it again")
        self._bases[row] = self._taken[row] = self._known[row] = 0
        self._append(row, prompt)
        self.vocabulary.start(row, prompt)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        """Appends tokens that the target emitted, and its hidden states as a `RowHiddenStates`."""
        self._append(row, tokens)
        states = hidden if isinstance(hidden, RowHiddenStates) else RowHiddenStates(0, None, None)
        if self._drafter.needs_hidden and states.hidden is not None:
            self._keep(row, states.begin, states.hidden)
        self.vocabulary.observe(row, tokens, states.top)

    def finish(self, row: int) -> None:
        self._lengths[row] = 0
        self.vocabulary.finish(row)

    @torch.inference_mode()
    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        ready = self._ready(rows, budget)
        if not ready.any():
            return Drafts.empty(len(rows))
        asked = rows[ready]
        on_device = torch.from_numpy(asked.astype(np.int64)).to(self.device)
        self.vocabulary.prepare()
        hidden = self._take_in(asked)
        beam = Beam(self.settings.width)
        levels = min(self.settings.depth, int(budget[ready].max()))
        for level in range(1, levels + 1):
            frontier = beam.grow(*self._likeliest(hidden, on_device), self._is_eos)
            self.vocabulary.drafted(on_device, frontier.tokens)
            if level < levels:
                hidden = self._expand(asked, frontier, hidden, level)
        found = beam.drafts(self.settings.nodes, budget[ready], min_probs)
        self._on_drafted(asked[found.sizes > 0])
        return found if ready.all() else _spread(found, ready)

    def _ready(self, rows: Int32, budget: Int32) -> NDArray[np.bool_]:
        """Whether each row can get a draft; EAGLE needs the states of all tokens but the last."""
        there = (rows >= 0) & (rows < len(self._lengths))
        asked = np.where(there, rows, 0)
        ready: NDArray[np.bool_] = there & (budget > 0) & (self._lengths[asked] > 0)
        if self._drafter.needs_hidden:
            ready &= self._known[asked] == self._lengths[asked] - 1
            ready &= self._known[asked] > self._bases[asked]
        return ready

    def _take_in(self, rows: Int32) -> Tensor:
        """Reads each row's new tokens; returns ``[R, 1, D]``, hidden states at the last one."""
        ends = self._lengths[rows] - int(self._drafter.needs_hidden) - self._bases[rows]
        # If a repeated call finds no new token, the last input is read again.
        context_lens = np.minimum(self._taken[rows], ends - 1)
        while (long := ends - context_lens > self._chunk).any():
            self._run(rows[long], context_lens[long], np.full(long.sum(), self._chunk, np.int32))
            context_lens[long] += self._chunk
        return self._run(rows, context_lens, ends - context_lens)[:, None]

    def _run(self, rows: Int32, context_lens: Int32, sizes: Int32) -> Tensor:
        """Reads ``sizes`` inputs of each row; returns hidden states ``[R, D]`` at the last ones."""
        late = int(self._drafter.needs_hidden)
        parts, hidden_states = [], []
        lists = rows.tolist(), context_lens.tolist(), sizes.tolist()
        for row, start, size in zip(*lists, strict=True):
            begin = int(self._bases[row]) + start
            parts.append(self._texts[row, begin + late : begin + late + size])
            if self._hidden is not None:
                hidden_states.append(self._hidden[row, begin : begin + size])
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self.device)
        inputs = self._drafter.inputs(ids, torch.cat(hidden_states) if hidden_states else None)
        hidden = self.backbone.trunk(inputs, rows, self._bases[rows], context_lens, sizes)
        self._taken[rows] = context_lens + sizes
        return hidden

    def _likeliest(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the likeliest tokens after each node, both ``[R, P, C]``."""
        logits = self.vocabulary.logits(hidden, rows).float()
        count = min(self.settings.width, logits.shape[-1])
        # `log_softmax` gives NaN if no token may be drafted.
        logp = logits.log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf)
        logp, slots = logp.topk(count, -1)
        return logp, self.vocabulary.ids_of(slots.flatten(1), rows).view_as(slots)

    def _expand(self, rows: Int32, nodes: Frontier, above: Tensor, level: int) -> Tensor:
        """Returns hidden states ``[R, W, D]`` at a level's nodes.

        Args:
            above: The hidden states at the nodes of the previous level.
        """
        width = above.shape[-1]
        parent_hidden = above.gather(1, nodes.above[..., None].expand(-1, -1, width))
        inputs = self._drafter.inputs(nodes.tokens, parent_hidden)
        return self.backbone.level(
            inputs, nodes.tree, rows, self._bases[rows], self._taken[rows], level
        )

    def _append(self, row: int, tokens: Int32) -> None:
        begin, end = int(self._lengths[row]), int(self._lengths[row]) + len(tokens)
        if end > self._texts.shape[1]:
            raise ValueError(
                f"row {row} has {begin} tokens, and {len(tokens)} more exceed its capacity of "
                f"{self._texts.shape[1]}; create the proposer with a greater capacity"
            )
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(
                f"ids run from {tokens.min()} to {tokens.max()}, but the vocabulary has "
                f"{self.vocab_size} tokens; tokenise with the target's own tokenizer"
            )
        self._texts[row, begin:end] = tokens
        self._lengths[row] = end

    def _keep(self, row: int, begin: int, hidden: Tensor) -> None:
        """Keeps hidden states from position ``begin`` on; tokens of a copied prefix have none."""
        assert self._hidden is not None, "the drafter reads hidden states"
        if begin != self._known[row]:
            self._bases[row], self._taken[row] = begin, 0
        self._hidden[row, begin : begin + len(hidden)] = hidden
        self._known[row] = begin + len(hidden)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Allocates memory and compiles the code of a draft before the first request."""
        if self._texts.shape[1] < _WARM_UP + 2:
            return
        self.start(0, np.zeros(_WARM_UP, np.int32))
        hidden = None if self._hidden is None else self._hidden[0, :_WARM_UP].clone()
        count = self.hidden_state_request.top
        top = torch.zeros((_WARM_UP, count), dtype=torch.long, device=self.device)
        self.observe(0, np.zeros(1, np.int32), RowHiddenStates(0, hidden, top if count else None))
        self.propose(np.zeros(1, np.int32), np.full(1, self.settings.nodes, np.int32))
        self.finish(0)


def _spread(found: Drafts, ready: NDArray[np.bool_]) -> Drafts:
    """Extends drafts of some rows to all rows; the other rows get empty drafts."""
    sizes = np.zeros(len(ready), np.int32)
    sizes[ready] = np.diff(found.offsets)
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)))
    return Drafts(found.tokens, found.parents, found.depths, offsets, found.logp, found.source)
