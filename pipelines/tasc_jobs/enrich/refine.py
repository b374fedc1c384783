"""A better choice of tokens than the greedy one: those that hardly occur make room for others.

A token that was worth most when it was added may hardly occur once longer ones have its text. Such
tokens are dropped, the algorithm fills their places, and so on while outputs get shorter. The paper
stops at the first choice (TASC, section 4.1). It knows no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings, NewToken, enrich
from tasc_text import TaskTokenizer

_DROPPED = 0.05  # share of the tokens that may go in a round


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
    """With the discount and without: an n-gram that collides too early is never asked again, so
    that a small difference may become a great one."""
    found = enrich(tokenizer, outputs, settings, progress)
    if not settings.discount:
        return found
    plain = enrich(tokenizer, outputs, replace(settings, discount=0), progress)
    return min(found, plain, key=lambda each: expected(each, settings))


def without(found: Enriched, dropped: set[int], first_id: int) -> list[NewToken]:
    """The other tokens, with ids from ``first_id`` on; what is dropped gives its parts to those
    that it was a part of.
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
