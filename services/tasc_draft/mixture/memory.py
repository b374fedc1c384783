"""All memory of a proposer: rows, local texts, nodes and output of a step, allocated once.

Compiled code gets this memory as one address with named fields, the `Box`, instead of fifty arrays.
numba's own structref counts references with atomic operations at each access. These operations
would take longer than drafting itself.
"""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numba.core import types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox

from tasc_draft.compiled import borrowing, read_only
from tasc_draft.drafts import NGRAM_SOURCES, DraftError, Drafts, Int32
from tasc_draft.index.aligned import AlignedView
from tasc_draft.index.bigrams import BigramView
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.inputs import InputIndex, nearest_scratch
from tasc_draft.index.weights import Weights
from tasc_draft.mixture.evidence import (
    GROWTH,
    MIXED,
    NODE,
    SCRATCH,
    TASC,
    TRIE,
    Learnt,
    Words,
)
from tasc_draft.mixture.external_tree import initial_trust
from tasc_draft.mixture.row_state import MAX_CONTEXT, ROW, LocalTexts
from tasc_draft.mixture.tree import ENTRY, heap_size
from tasc_draft.settings import DraftSettings


class BoxType(types.Type):
    """The type of a box: names and numba types of its fields."""

    def __init__(self, names: tuple[str, ...], payload: Any) -> None:
        self.names, self.payload = names, payload
        super().__init__(name=f"Box({', '.join(names)}; {payload})")


class Box:
    """Arrays and tuples of arrays, by name, for compiled code.

    Args:
        fields: The value of each name. The box keeps references, so the arrays live as long as the
            box.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = tuple(fields.values())
        self._memory = np.zeros(_size(self._fields) // 8, np.uint64)
        self.address = self._memory.ctypes.data
        _fill(self.address, self._fields)
        kinds = [typeof_impl(field, None) for field in self._fields]
        payload = types.Tuple(kinds)  # type: ignore[attr-defined]
        self._numba_type_ = BoxType(tuple(fields), payload)  # numba reads this


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
_MAX_VIEWS = 4096
# Until a node is expanded, its best child is assumed to have this probability. Below 1, fewer nodes
# are expanded in vain; at 0.7 as many tokens are accepted as at 1. The published rules use 1, so
# that they always draft the likeliest paths.
OPTIMISTIC_CHILD_PROB = 0.7
WORDS = 1024  # maximum words of a prompt that answers are aligned with


# The arrays of `Drafts` that compiled code writes.
Out: Any = namedtuple("Out", [field.name for field in fields(Drafts)])  # type: ignore[misc]


class Memory:
    """The arrays of a proposer.

    See `NgramProposer` for the arguments; ``budget`` is the maximum number of draft tokens of a
    step.
    """

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
        self.heap = np.zeros(heap_size(budget + rows), ENTRY)
        self.scratch = np.zeros(1, SCRATCH)
        none = vars(Drafts.empty(rows))
        made = {name: np.zeros(budget, array.dtype) for name, array in none.items()}
        self.out = Out(**made | {"offsets": none["offsets"]})
        self._views: dict[tuple[int, int], Drafts] = {}
        self.is_eos = np.zeros(ids, bool)
        self.is_eos[[e for e in eos_ids if 0 <= e < ids]] = True
        trust = initial_trust()
        self.trust = trust, np.ones_like(trust)  # does not depend on the index
        self.growth = np.zeros(1, GROWTH)
        for name in ("n_max", "p_min", "corpus_weight", "prefix", "min_prob"):
            self.growth[name] = getattr(settings, name)
        self.growth["rule"] = RULES[settings.mixture]
        self.growth["max_tokens"] = settings.num_speculative_tokens
        self.growth["branching"] = branching
        self.growth["child_chance"] = OPTIMISTIC_CHILD_PROB if mixed else 1.0
        self.growth["rate"] = settings.learning_rate if mixed else 0.0
        self.growth["vocab_size"] = vocab_size
        self.growth["sep"] = index.corpus.vocab_size
        self.growth["enabled"] = [name in settings.sources for name in NGRAM_SOURCES]

    @property
    def nbytes(self) -> int:
        parts = (*self.own, *self.near, *self.recent, *self.words, *self.out)
        own = (self.rows, self.texts, self.near_weight, self.nodes, self.heap)
        return sum(array.nbytes for array in (*parts, *own))

    def learnt(self, index: DraftIndex) -> Learnt:
        """A copy of an index's weights that learning continues from."""
        values = (index.weights or Weights.initial()).values
        return Learnt(values.copy(), np.ones_like(values), *self.trust)

    def state(self, index: DraftIndex, learnt: Learnt) -> Any:
        """The box for compiled code.

        Raises:
            DraftError: The index's depth is not above MAX_CONTEXT.
        """
        if index.corpus.depth <= MAX_CONTEXT:
            raise DraftError(
                f"the index has a depth of {index.corpus.depth} tokens, but contexts have up to "
                f"{MAX_CONTEXT} tokens; build the index with a depth above {MAX_CONTEXT}"
            )
        corpus, aligned, bigrams = index.corpus, index.aligned, index.bigrams
        inputs, found = self._search(index)
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
            word_starts=read_only(index.word_starts if aligned else np.zeros(0, bool)),
            bigrams=bigrams.view if bigrams else _no_bigrams(),
            offsets=corpus.offsets,
            inputs=inputs.view,
            search=nearest_scratch(inputs),
            found=found,
            similarity=found.astype(np.float32),
            learnt=learnt,
            out=self.out,
            is_eos=self.is_eos,
        )

    def _canonical(self, index: DraftIndex) -> Int32:
        """Each id's canonical id; for the published rules, the id itself."""
        canonical = np.arange(len(self.is_eos), dtype=np.int32)
        if index.canonical is not None and self.settings.mixture == "mixed":
            canonical[: len(index.canonical)] = index.canonical
        return canonical

    def _search(self, index: DraftIndex) -> tuple[InputIndex, Int32]:
        """Prompts among which neighbours are searched for, and memory for the neighbours found.

        The memory is empty if settings or index exclude a search.
        """
        enabled = self.settings.mixture == "mixed" and "neighbours" in self.settings.sources
        if index.inputs is None or not (enabled and self.settings.neighbour_tokens):
            return InputIndex.empty(), np.zeros(0, np.int32)
        return index.inputs, np.zeros(self.settings.neighbours, np.int32)

    def drafts(self, n: int, rows: int) -> Drafts:
        """The first n tokens of the output as drafts of ``rows`` rows."""
        # The arrays are always the same, so the views of each size are made once.
        found = self._views.get((n, rows))
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            ends = dict.fromkeys(Out._fields, n) | {"offsets": rows + 1}
            views = {name: getattr(self.out, name)[:end] for name, end in ends.items()}
            found = self._views[n, rows] = Drafts(**views)
        return found


def _no_aligned() -> Any:
    none, zero = read_only(np.zeros(0, np.int32)), read_only(np.zeros(1, np.int32))
    return AlignedView(zero, read_only(np.zeros(0, np.uint32)), zero, none, none, none)


def _no_bigrams() -> Any:
    none = np.zeros((0, 1))
    return BigramView(read_only(none.astype(np.int32)), read_only(none.astype(np.float32)))
