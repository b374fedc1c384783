"""Which n-grams of a task's outputs become tokens: TASC-ft's Algorithm 1 (TASC, section 4.1).

It takes the n-gram that would save most tokens, count times length less one, adds it unless its
prefix collision score is too high, encodes the outputs again, and so on.

The score counts tokens that encoding would no longer reach. The paper's formula counts tokens that
begin with the n-gram; its example, ('in', 'the') beside 'therapy', counts tokens that begin with
its last constituent. Both are here; the second is the default.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasc_jobs.enrich.growing_tokenizer import GrowingTokenizer
from tasc_jobs.enrich.ngrams import LiveNgramCounts, TokenisedOutputs
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_text import TaskTokenizer

Rule = Literal["suffix", "whole"]
_LEAST_COUNT = 2  # an n-gram seen once says nothing of outputs to come
_DROPPED = 0.05  # share of the tokens that may go in a round


class Collisions:
    """Scores n-grams by the tokens that occur in a corpus.

    Args:
        text_of: A token's bytes.
    """

    def __init__(self, text_of: Callable[[int], bytes], rule: Rule) -> None:
        self._text_of, self._rule = text_of, rule
        self._ids: dict[bytes, list[int]] = {}
        self._texts: list[bytes] = []  # sorted
        self._known: set[int] = set()

    def score(self, ngram: Sequence[int], occurrences: NDArray[np.int64]) -> float:
        """Share of token occurrences whose text is longer than the n-gram's, or its last token's,
        and begins with it.

        Args:
            occurrences: ``int64[ids]``, of each token in the corpus.
        """
        for id_ in np.flatnonzero(occurrences):
            self._learn(int(id_))
        parts = ngram[-1:] if self._rule == "suffix" else ngram
        begin = b"".join(map(self._text_of, parts))
        if not begin:
            return 0.0
        colliding = 0
        for text in self._texts[bisect_left(self._texts, begin) :]:
            if not text.startswith(begin):
                break
            if text != begin:
                colliding += sum(int(occurrences[id_]) for id_ in self._ids[text])
        return colliding / int(occurrences.sum())

    def _learn(self, id_: int) -> None:
        if id_ in self._known:
            return
        self._known.add(id_)
        text = self._text_of(id_)
        if text not in self._ids:
            insort(self._texts, text)
        self._ids.setdefault(text, []).append(id_)


@dataclass(frozen=True)
class EnrichSettings:
    """What may become a token.

    Attributes:
        budget: Most new tokens.
        n_max: Most tokens that one new token stands for, those added before it counted as one.
        pcs: An n-gram with a prefix collision score of this or more is left out; 1 leaves out none.
            It trades length for words whose beginnings stay what they were, and little of it: with
            a budget of 500, test outputs of massive_en got 6.41 x shorter at 0.02 (26 left
            out), 6.39 to 6.45 x at 0.005 to 1 (38 to none); of clinc150 6.47 x, 6.43 to 6.50 x.
        pcs_rule: See `Collisions`.
        discount: Occurrences of an n-gram that count for nothing; 1 is what leaving one output out
            says of those to come. The paper's algorithm has 0.
        rounds: See `refined`; the paper's algorithm has 0.
    """

    budget: int
    n_max: int = 4
    pcs: float = 1.0
    pcs_rule: Rule = "suffix"
    discount: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.pcs <= 1:
            raise ValueError(
                f"pcs is {self.pcs}; it must be above 0, which would leave out every n-gram, and "
                "at most 1, which leaves out none"
            )

    @property
    def refining(self) -> "EnrichSettings":
        """The same, chosen better than by the paper's algorithm where rows to come are like these.

        An n-gram counts as often as one output less would have it, and idle tokens make room.
        """
        return replace(self, discount=1, rounds=4)


@dataclass(frozen=True)
class NewToken:
    """A token that was added.

    Attributes:
        content: As the vocabulary has it.
        parts: Ids of the tokens that it stands for, new ones among them; 2 to ``n_max``, or more
            where `refined` took out tokens that were parts.
        count: Of the n-gram in the outputs, when it was added.
        collisions: Its prefix collision score then.
        length: Tokens of all outputs once it is there.
        renyi2_bits: Their Renyi entropy of order 2 then.
    """

    id: int
    content: str
    parts: tuple[int, ...]
    count: int
    collisions: float
    length: int
    renyi2_bits: float


@dataclass(frozen=True)
class Enriched:
    """A tokenizer with a task's n-grams.

    Attributes:
        length: Tokens of all outputs before.
        renyi2_bits: Their Renyi entropy of order 2 before.
        collided: N-grams left out for their prefix collision score.
        unwritable: N-grams left out because no token can be written so.
        left: Tokens of all outputs with the new tokens.
        used: How often each new token occurs in the outputs once all of them are there.
    """

    tokenizer: Tokenizer = field(repr=False)
    tokens: tuple[NewToken, ...]
    length: int
    renyi2_bits: float
    collided: int
    unwritable: int
    left: int
    used: tuple[int, ...]


def enrich(
    tokenizer: TaskTokenizer,
    outputs: Sequence[str],
    settings: EnrichSettings,
    progress: Callable[[int, int], None] = lambda done, most: None,
    given: Sequence[NewToken] = (),
) -> Enriched:
    """Add n-grams of ``outputs`` to a tokenizer; fewer than the budget where there are no more.

    Args:
        progress: Told the tokens added and the budget.
        given: Tokens of an earlier run to begin with, whatever their rewards are now; ids of their
            parts are those that tokens have here.

    Raises:
        FamilyError: Texts would not come back unchanged from such a tokenizer.
    """
    growing = GrowingTokenizer(tokenizer.backend)
    texts = _Texts(tokenizer)
    for token in given:
        id_ = growing.add(token.content)
        assert id_ == token.id, "given tokens follow the tokenizer's own, without gaps"
        texts.new[id_] = texts.joined(token.parts)
    most_ids = tokenizer.vocab_size + settings.budget
    corpus = TokenisedOutputs(outputs, growing, most_ids)
    counts = LiveNgramCounts(settings.n_max, most_ids)
    rows = corpus.tokens
    counts.add(rows.ids, rows.offsets, corpus.weights)
    scores = Collisions(texts.of, settings.pcs_rule)
    length, renyi = corpus.length, renyi2_bits(corpus.frequencies)
    tokens, collided, unwritable = list(given), 0, 0
    least = _LEAST_COUNT, settings.discount
    while len(tokens) < settings.budget and (best := counts.best(*least)):
        slot, count, _ = best
        counts.exclude(slot)
        ngram = counts.ngram(slot)
        content = growing.content(text := texts.joined(ngram))
        if content is None:
            unwritable += 1
            continue
        score = scores.score(ngram, corpus.occurrences) if settings.pcs < 1 else 0.0
        if score >= settings.pcs:
            collided += 1
            continue
        id_ = growing.add(content)
        texts.new[id_] = text
        change = corpus.changed(content)
        counts.add(change.before.ids, change.before.offsets, -change.weights)
        counts.add(change.after.ids, change.after.offsets, change.weights)
        after = renyi2_bits(corpus.frequencies)
        tokens.append(NewToken(id_, content, ngram, count, score, corpus.length, after))
        progress(len(tokens), settings.budget)
    used = tuple(int(corpus.occurrences[token.id]) for token in tokens)
    return Enriched(
        growing.backend, tuple(tokens), length, renyi, collided, unwritable, corpus.length, used
    )


@dataclass
class _Texts:
    """What tokens, old and new, add to a text."""

    tokenizer: TaskTokenizer
    new: dict[int, bytes] = field(default_factory=dict)

    def of(self, id_: int) -> bytes:
        found = self.new.get(id_)
        return self.tokenizer.token_bytes(id_) if found is None else found

    def joined(self, ngram: Sequence[int]) -> bytes:
        return b"".join(map(self.of, ngram))


def refined(
    tokenizer: TaskTokenizer,
    outputs: Sequence[str],
    settings: EnrichSettings,
    progress: Callable[[int, int], None] = lambda done, most: None,
) -> Enriched:
    """The best of the choices of ``settings.rounds``, and of `enrich`'s own before them.

    Figures of kept tokens are those of the round that added them. Raises what `enrich` does.
    """
    best = found = _first(tokenizer, outputs, settings, progress)
    length, entropy = found.length, found.renyi2_bits
    for _ in range(settings.rounds if found.tokens else 0):
        kept = without(found, _idle(found), tokenizer.vocab_size)
        if len(kept) == len(found.tokens):
            break
        found = enrich(tokenizer, outputs, settings, progress, kept)
        if expected(found, settings) >= expected(best, settings):
            break
        best = found
    return replace(best, length=length, renyi2_bits=entropy)


def expected(found: Enriched, settings: EnrichSettings) -> int:
    """Tokens of as many outputs to come: ``discount`` occurrences of each new token were luck."""
    return found.left + settings.discount * sum(len(t.parts) - 1 for t in found.tokens)


def _first(
    tokenizer: TaskTokenizer,
    outputs: Sequence[str],
    settings: EnrichSettings,
    progress: Callable[[int, int], None],
) -> Enriched:
    """The better of a choice with the discount and one without it.

    An n-gram that collides early is never considered again, so a small difference may grow.
    """
    found = enrich(tokenizer, outputs, settings, progress)
    if not settings.discount:
        return found
    plain = enrich(tokenizer, outputs, replace(settings, discount=0), progress)
    return min(found, plain, key=lambda each: expected(each, settings))


def without(found: Enriched, dropped: set[int], first_id: int) -> list[NewToken]:
    """The tokens that are not dropped, with ids from ``first_id`` on.

    Where a dropped token was a part of another one, its own parts take its place.
    """
    stands_for, kept = dict[int, tuple[int, ...]](), list[NewToken]()
    for token in found.tokens:
        parts = tuple(id_ for part in token.parts for id_ in stands_for.get(part, (part,)))
        if token.id in dropped:
            stands_for[token.id] = parts
        else:
            new_id = first_id + len(kept)
            stands_for[token.id] = (new_id,)
            kept.append(replace(token, id=new_id, parts=parts))
    return kept


def _idle(found: Enriched) -> set[int]:
    """Tokens that occur least, and those that do not occur at all."""
    most = int(len(found.tokens) * _DROPPED)
    rare = sorted(zip(found.used, (token.id for token in found.tokens), strict=True))
    return {id_ for at, (used, id_) in enumerate(rare) if used == 0 or at < most}
