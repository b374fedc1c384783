"""All memory of a proposer: rows, local texts, nodes and output of a step, allocated once.

Compiled code gets it as one address with fields by name, the `Box`, instead of fifty arrays.
Numba's own structref counts references with atomic operations each time a field is named, which
takes longer than drafting itself. A box borrows its arrays: whoever made it keeps them alive.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import NGRAM_SOURCES, Drafts
from tasc_draft.errors import DraftError
from tasc_draft.index.aligned import AlignedView
from tasc_draft.index.bigrams import BigramView
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.inputs import nearest_scratch
from tasc_draft.index.weights import Weights
from tasc_draft.mixture import external_tree as guests
from tasc_draft.mixture.candidates import (
    GROWTH,
    MIXED,
    NODE,
    SCRATCH,
    TASC,
    TRIE,
    Learnt,
    Out,
    Words,
)
from tasc_draft.mixture.contexts import MOST
from tasc_draft.mixture.occurrences import Found, LocalTexts
from tasc_draft.mixture.row_state import ROW
from tasc_draft.mixture.tree import ENTRY, room
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Int32


class BoxType(types.Type):
    """Of a box: the names and numba types of its fields."""

    def __init__(self, names: tuple[str, ...], payload: Any) -> None:
        self.names, self.payload = names, payload
        super().__init__(name=f"Box({', '.join(names)}; {payload})")


class Box:
    """Arrays and tuples of arrays, by name, for compiled code alone.

    Args:
        fields: What each name stands for; kept, so that the arrays live as long as the box.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = tuple(fields.values())
        self._memory = np.zeros(_size(self._fields) // 8, np.uint64)
        self.address = self._memory.ctypes.data
        _fill(self.address, self._fields)
        self.numba_type = BoxType(tuple(fields), _payload(self._fields))


def _payload(fields: tuple[Any, ...]) -> Any:
    kinds = [typeof_impl(field, None) for field in fields]
    return types.Tuple(kinds)  # type: ignore[attr-defined]


@typeof_impl.register(Box)
def _type_of(box: Box, context: Any) -> BoxType:
    return box.numba_type


register_model(BoxType)(models.OpaqueModel)


@unbox(BoxType)
def _address_of(kind: BoxType, box: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(box, "address")
    value = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(value, is_error=c.pyapi.c_api_error())


@infer_getattr
class _Fields(AttributeTemplate):
    key = BoxType

    def generic_resolve(self, box: BoxType, name: str) -> Any:
        return box.payload[box.names.index(name)] if name in box.names else None


@lower_getattr_generic(BoxType)
def _field(context: Any, builder: Any, box: BoxType, address: Any, name: str) -> Any:
    i = box.names.index(name)
    where = builder.bitcast(address, context.get_value_type(box.payload).as_pointer())
    value = builder.extract_value(builder.load(where), i)
    return impl_ret_borrowed(context, builder, box.payload[i], value)


@intrinsic
def _store(_: Any, address: Any, fields: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], context.get_value_type(fields).as_pointer())
        builder.store(args[1], where)
        return context.get_dummy_value()

    return types.void(types.uintp, fields), lower


@intrinsic
def _size_of(_: Any, fields: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_abi_sizeof(context.get_value_type(fields))
        return context.get_constant(types.intp, size)

    return types.intp(fields), lower


@borrowing
def _fill(address: int, fields: Any) -> None:
    _store(address, fields)


@borrowing
def _size(fields: Any) -> int:
    return int(_size_of(fields))


RULES = {"mixed": MIXED, "tasc": TASC, "trie": TRIE}
_MOST_VIEWS = 4096
# What share of its path's probability the best child of a node is thought to have until the node is
# looked into. Below 1 fewer leaves are looked into in vain; at 0.7 as many tokens are accepted. The
# published rules draft the likeliest paths to the letter: there it is 1.
OPTIMISTIC_CHILD_PROB = 0.7
WORDS = 1024  # words of a prompt that an answer's words can go along with


class Memory:
    """See `NgramProposer` for the arguments; ``budget`` is the most draft tokens of a step."""

    def __init__(
        self,
        settings: DraftSettings,
        rows: int,
        capacity: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        index: DraftIndex,
        budget: int,
        branching: bool,
    ) -> None:
        mixed = settings.mixture == "mixed"
        ids = max(vocab_size, index.corpus.vocab_size) + 1
        near = settings.neighbour_tokens if mixed else 0
        self.settings = settings
        self.rows = np.zeros(rows, ROW)
        self.texts = np.zeros((rows, capacity + 1), np.int32)
        self.own = LocalTexts.empty(rows, capacity + 1, ids)
        self.near = LocalTexts.empty(rows, near, ids if mixed else 0)
        self.near_weight = np.zeros((rows, near), np.float32)
        self.recent = LocalTexts.empty(1, settings.recent_tokens if mixed else 0, ids)
        words = WORDS if mixed else 0
        self.words = Words(np.zeros((rows, words), np.uint32), np.zeros((rows, words), np.int32))
        self.nodes = np.zeros(budget + rows, NODE)
        self.heap = np.zeros(room(budget + rows), ENTRY)
        self.scratch = np.zeros(1, SCRATCH)
        self.out = _out(rows, budget)
        self._views: dict[tuple[int, int], Drafts] = {}
        self.is_eos = np.zeros(ids, bool)
        self.is_eos[[e for e in eos_ids if 0 <= e < ids]] = True
        trust = guests.first_trust()
        self.trust = trust, np.ones_like(trust)  # of a guest, whatever the index
        self.growth = np.zeros(1, GROWTH)
        for name, value in {
            "rule": RULES[settings.mixture], "n_max": settings.n_max, "p_min": settings.p_min,
            "corpus_weight": settings.corpus_weight, "prefix": settings.prefix,
            "most": settings.num_speculative_tokens,
            "branching": branching, "min_prob": settings.min_prob,
            "hope": OPTIMISTIC_CHILD_PROB if mixed else 1.0,
            "rate": settings.learning_rate if mixed else 0.0, "vocab_size": vocab_size,
            "sep": index.corpus.vocab_size,
            "asked": [name in settings.sources for name in NGRAM_SOURCES],
        }.items():  # fmt: skip
            self.growth[name] = value

    @property
    def nbytes(self) -> int:
        parts = (*self.own, *self.near, *self.recent, *self.words, *self.out)
        own = (self.rows, self.texts, self.near_weight, self.nodes, self.heap)
        return sum(array.nbytes for array in (*parts, *own))

    def learnt(self, index: DraftIndex) -> Learnt:
        """A copy of an index's weights, to go on learning from."""
        values = (index.weights or Weights.initial()).values
        return Learnt(values.copy(), np.ones_like(values), *self.trust)

    def state(self, index: DraftIndex, learnt: Learnt) -> Any:
        """The box that compiled code takes.

        Raises:
            DraftError: The index is sorted by too few tokens for the contexts that rows keep.
        """
        if index.corpus.depth <= MOST:
            raise DraftError(
                f"the index is sorted by {index.corpus.depth} tokens, contexts have up to {MOST}; "
                f"build it with a depth above {MOST}"
            )
        corpus, aligned, bigrams = index.corpus, index.aligned, index.bigrams
        self.growth["depth"] = corpus.depth
        self.growth["head"] = aligned.head if aligned else 0
        ids = np.arange(len(self.is_eos) + 1)
        starts = np.searchsorted(corpus.text[corpus.order], ids).astype(np.int32)
        return Box(
            rows=self.rows,
            nodes=self.nodes,
            heap=self.heap,
            growth=self.growth,
            scratch=self.scratch,
            texts=self.texts,
            own=self.own,
            canonical=self._canonical(index),
            near=self.near,
            near_weight=self.near_weight,
            recent=self.recent,
            words=self.words,
            corpus=corpus.view,
            starts=starts,
            aligned=aligned.view if aligned else _no_aligned(),
            word_starts=_frozen(index.word_starts if aligned else np.zeros(0, bool)),
            bigrams=bigrams.view if bigrams else _no_bigrams(),
            learnt=learnt,
            out=self.out,
            is_eos=self.is_eos,
        )

    def _canonical(self, index: DraftIndex) -> Int32:
        """Each id's canonical one; each its own for the published rules."""
        canonical = np.arange(len(self.is_eos), dtype=np.int32)
        if index.canonical is not None and self.settings.mixture == "mixed":
            canonical[: len(index.canonical)] = index.canonical
        return canonical

    def search(self, index: DraftIndex) -> tuple[Any, Any, Found] | None:
        """What a search for neighbours takes; None when there are none to find."""
        asked = self.settings.mixture == "mixed" and "neighbours" in self.settings.sources
        if index.inputs is None or not asked or not len(self.near.tokens[0]):
            return None
        if not self.settings.neighbours:
            return None
        found = Found.empty(self.settings.neighbours)
        return index.inputs.view, nearest_scratch(index.inputs), found

    def drafts(self, n: int, rows: int) -> Drafts:
        """The first n tokens of the output, for so many rows."""
        # Views of the same arrays each time, so those of a size are made once.
        found = self._views.get((n, rows))
        if found is None:
            out = self.out
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[n, rows] = Drafts(
                out.tokens[:n],
                out.parents[:n],
                out.depths[:n],
                out.offsets[: rows + 1],
                out.logp[:n],
                out.source[:n],
            )
        return found


def _out(rows: int, budget: int) -> Out:
    return Out(
        tokens=np.zeros(budget, np.int32),
        parents=np.zeros(budget, np.int32),
        depths=np.zeros(budget, np.int16),
        offsets=np.zeros(rows + 1, np.int32),
        logp=np.zeros(budget, np.float32),
        source=np.zeros(budget, np.int8),
    )


def _no_aligned() -> AlignedView:
    none, zero = _frozen(np.zeros(0, np.int32)), _frozen(np.zeros(1, np.int32))
    return AlignedView(zero, _frozen(np.zeros(0, np.uint32)), zero, none, none, none)


def _no_bigrams() -> BigramView:
    return BigramView(_frozen(np.zeros((0, 1), np.int32)), _frozen(np.zeros((0, 1), np.float32)))


def _frozen(array: Any) -> Any:
    """Read-only like an index's, so that compiled code sees one array type for both."""
    array.setflags(write=False)
    return array
