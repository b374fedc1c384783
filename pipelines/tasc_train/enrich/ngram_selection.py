"""Selects the n-grams of a task's outputs that become tokens: Algorithm 1 of TASC, section 4.1.

Each iteration takes the n-gram that would save the most tokens, ``count * (length - 1)``, adds it
unless its prefix collision score is too high, and encodes the outputs again.

The score estimates how many occurrences of other tokens the new token would make unreachable. The
paper's formula counts tokens that start with the n-gram (rule ``whole``). The paper's example,
('in', 'the') and 'therapy', counts tokens that start with the last token of the n-gram (rule
``suffix``, the default).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasc_jobs.errors import UsageError
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_text import TaskTokenizer
from tasc_train.enrich.growing_tokenizer import GrowingTokenizer
from tasc_train.enrich.ngrams import LiveNgramCounts, TokenisedOutputs

Rule = Literal["suffix", "whole"]
_MIN_COUNT = 2  # an n-gram that occurs once does not predict future outputs
_DROPPED = 0.05  # fraction of the new tokens that a round removes, besides all unused ones


class Collisions:
    """Computes prefix collision scores of n-grams against the tokens of a corpus.

    Args:
        text_of: Returns the bytes of a token.
        rule: Whether the whole n-gram or only its last token (``suffix``) is compared.
    """

    def __init__(self, text_of: Callable[[int], bytes], rule: Rule) -> None:
        self._text_of, self._rule = text_of, rule
        self._ids: dict[bytes, list[int]] = {}
        self._texts: list[bytes] = []  # sorted
        self._known: set[int] = set()

    def score(self, ngram: Sequence[int], occurrences: NDArray[np.int64]) -> float:
        """Returns the fraction of token occurrences that collide with an n-gram.

        A token collides if its text starts with the n-gram's text and is longer. The rule
        ``suffix`` compares it with the text of the n-gram's last token instead.

        Args:
            occurrences: ``int64[ids]``, the number of occurrences of each token in the corpus.
        """
        for id_ in np.flatnonzero(occurrences):
            self._add_token(int(id_))
        parts = ngram[-1:] if self._rule == "suffix" else ngram
        prefix = b"".join(map(self._text_of, parts))
        if not prefix:
            return 0.0
        colliding = 0
        for text in self._texts[bisect_left(self._texts, prefix) :]:
            if not text.startswith(prefix):
                break
            if text != prefix:
                colliding += sum(int(occurrences[id_]) for id_ in self._ids[text])
        return colliding / int(occurrences.sum())

    def _add_token(self, id_: int) -> None:
        if id_ in self._known:
            return
        self._known.add(id_)
        text = self._text_of(id_)
        if text not in self._ids:
            insort(self._texts, text)
        self._ids.setdefault(text, []).append(id_)


@dataclass(frozen=True)
class EnrichSettings:
    """The rules for which n-grams become tokens.

    Attributes:
        budget: Maximum number of new tokens.
        n_max: Maximum number of parts of a new token; a token added earlier counts as one part.
        pcs: Threshold of the prefix collision score. N-grams with this score or a higher one are
            left out; 1 keeps all. A low threshold preserves how other words are tokenised and costs
            little length: with a budget of 500, test outputs of massive_en became 6.41 x shorter at
            0.02 (26 n-grams left out), and 6.39 to 6.45 x at 0.005 to 1 (38 to none left out). Test
            outputs of clinc150 became 6.47 x shorter at 0.02, and 6.43 to 6.50 x at 0.005 to 1.
        pcs_rule: See `Collisions`.
        discount: Number subtracted from the count of each n-gram. 1 is the leave-one-out estimate
            of the count in future outputs. The paper's algorithm uses 0.
        rounds: Number of refinement rounds, see `refined`. The paper's algorithm uses 0.
    """

    budget: int
    n_max: int = 4
    pcs: float = 1.0
    pcs_rule: Rule = "suffix"
    discount: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.pcs <= 1:
            raise UsageError(
                f"--pcs is {self.pcs:g}; it must be above 0 and at most 1 (0 would leave out every "
                "n-gram, and 1 leaves out none)"
            )

    @property
    def refining(self) -> "EnrichSettings":
        """These settings with a discount and refinement rounds.

        They select better tokens than the paper's algorithm if future rows resemble the given
        ones: counts are leave-one-out estimates, and rarely used tokens are replaced.
        """
        return replace(self, discount=1, rounds=4)


@dataclass(frozen=True)
class NewToken:
    """A token that was added. Its fields are saved in ``enrichment.json``.

    Attributes:
        content: The token as written in the vocabulary.
        parts: Ids of the tokens that it replaces, which may be new tokens, too. There are 2 to
            ``n_max`` parts, or more if `refined` removed tokens that were parts.
        count: Occurrences of the n-gram in the outputs when the token was added.
        collisions: Prefix collision score of the n-gram when the token was added.
        length: Total number of tokens of all outputs after the addition. The name is part of the
            saved format.
        renyi2_bits: Renyi entropy of order 2 of the outputs' tokens after the addition.
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
    """A tokenizer with the selected n-grams as new tokens.

    Attributes:
        tokens: The new tokens, in the order of addition.
        length: Total number of tokens of all outputs without the new tokens.
        renyi2_bits: Renyi entropy of order 2 of the outputs' tokens without the new tokens.
        collided: Number of n-grams left out because of their prefix collision score.
        unwritable: Number of n-grams left out because the vocabulary cannot represent their text.
        left: Total number of tokens of all outputs with the new tokens.
        used: Occurrences of each new token in the outputs, after all tokens were added.
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
    progress: Callable[[int, int], None] = lambda done, budget: None,
    given: Sequence[NewToken] = (),
) -> Enriched:
    """Add n-grams of ``outputs`` to a tokenizer, up to the budget.

    Adds fewer tokens than the budget if no other n-gram would shorten the outputs.

    Args:
        progress: Called with the number of tokens added and the budget.
        given: Tokens of an earlier run that are added first, without being scored again. Their
            ids must follow those of ``tokenizer`` without gaps.

    Raises:
        FamilyError: The tokenizer could not decode texts back unchanged.
    """
    growing = GrowingTokenizer(tokenizer.backend)
    texts = _Texts(tokenizer)
    for token in given:
        id_ = growing.add(token.content)
        assert id_ == token.id, (
            "ids of given tokens must follow those of the tokenizer without gaps"
        )
        texts.new[id_] = texts.joined(token.parts)
    max_ids = tokenizer.vocab_size + settings.budget
    corpus = TokenisedOutputs(outputs, growing, max_ids)
    counts = LiveNgramCounts(settings.n_max, max_ids)
    rows = corpus.tokens
    counts.add(rows.ids, rows.offsets, corpus.weights)
    scores = Collisions(texts.of, settings.pcs_rule)
    length, renyi = corpus.length, renyi2_bits(corpus.frequencies)
    tokens, collided, unwritable = list(given), 0, 0
    while len(tokens) < settings.budget and (best := counts.best(_MIN_COUNT, settings.discount)):
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
    """The bytes of tokens, both of the base tokenizer and new ones."""

    tokenizer: TaskTokenizer
    new: dict[int, bytes] = field(default_factory=dict)

    def of(self, id_: int) -> bytes:
        text = self.new.get(id_)
        return self.tokenizer.token_bytes(id_) if text is None else text

    def joined(self, ngram: Sequence[int]) -> bytes:
        return b"".join(map(self.of, ngram))


def refined(
    tokenizer: TaskTokenizer,
    outputs: Sequence[str],
    settings: EnrichSettings,
    progress: Callable[[int, int], None] = lambda done, budget: None,
) -> Enriched:
    """Runs `enrich`, then improves the selection in up to ``settings.rounds`` rounds.

    Each round replaces unused and rarely used tokens. The best selection by `expected` is
    returned. The figures of a kept token are from the round that added it.

    Raises:
        FamilyError: See `enrich`.
    """
    best = current = _initial(tokenizer, outputs, settings, progress)
    length, entropy = current.length, current.renyi2_bits
    for _ in range(settings.rounds if current.tokens else 0):
        kept = without(current, _rarely_used(current), tokenizer.vocab_size)
        if len(kept) == len(current.tokens):
            break
        current = enrich(tokenizer, outputs, settings, progress, kept)
        if expected(current, settings) >= expected(best, settings):
            break
        best = current
    return replace(best, length=length, renyi2_bits=entropy)


def expected(enriched: Enriched, settings: EnrichSettings) -> int:
    """Estimates the number of tokens of the same number of future outputs.

    Assumes that each new token occurs ``settings.discount`` times less in them.
    """
    return enriched.left + settings.discount * sum(len(t.parts) - 1 for t in enriched.tokens)


def _initial(
    tokenizer: TaskTokenizer,
    outputs: Sequence[str],
    settings: EnrichSettings,
    progress: Callable[[int, int], None],
) -> Enriched:
    """Returns the better of the selections with and without the discount.

    The selection without the discount may be better, because small differences early in the greedy
    search may have large effects: an n-gram that collides is never considered again.
    """
    discounted = enrich(tokenizer, outputs, settings, progress)
    if not settings.discount:
        return discounted
    plain = enrich(tokenizer, outputs, replace(settings, discount=0), progress)
    return min(discounted, plain, key=lambda each: expected(each, settings))


def without(enriched: Enriched, dropped: set[int], first_id: int) -> list[NewToken]:
    """Returns the tokens that are not dropped, with new ids starting at ``first_id``.

    If a dropped token is a part of another token, it is replaced by its parts.
    """
    replacements, kept = dict[int, tuple[int, ...]](), list[NewToken]()
    for token in enriched.tokens:
        parts = tuple(id_ for part in token.parts for id_ in replacements.get(part, (part,)))
        if token.id in dropped:
            replacements[token.id] = parts
        else:
            new_id = first_id + len(kept)
            replacements[token.id] = (new_id,)
            kept.append(replace(token, id=new_id, parts=parts))
    return kept


def _rarely_used(enriched: Enriched) -> set[int]:
    """Returns the ids of the least frequent new tokens and of those that never occur."""
    limit = int(len(enriched.tokens) * _DROPPED)
    by_use = sorted(zip(enriched.used, (token.id for token in enriched.tokens), strict=True))
    return {id_ for at, (used, id_) in enumerate(by_use) if used == 0 or at < limit}
