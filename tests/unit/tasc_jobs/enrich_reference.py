"""Algorithm 1 as one would write it down: everything counted anew at every step. For tests only."""

from collections import Counter
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from tasc_jobs.enrich.ngram_selection import EnrichSettings
from tasc_text import TaskTokenizer


def naive(
    base: TaskTokenizer, outputs: Sequence[str], settings: EnrichSettings
) -> list[tuple[str, tuple[int, ...], int]]:
    """Content, parts and count of each new token; not for tokenizers that write a mark in front."""
    tokenizer = Tokenizer.from_str(base.backend.to_str())
    texts: dict[int, bytes] = {}
    used: set[tuple[int, ...]] = set()
    found: list[tuple[str, tuple[int, ...], int]] = []

    def text(id_: int) -> bytes:
        return texts[id_] if id_ in texts else base.token_bytes(id_)

    while len(found) < settings.budget:
        rows = [e.ids for e in tokenizer.encode_batch(list(outputs), add_special_tokens=False)]
        counts = _counts(rows, settings.n_max, base.special_ids)
        left = {ngram: count for ngram, count in counts.items() if ngram not in used and count > 1}
        if not left:
            break
        best = min(
            left, key=lambda ngram: (-(left[ngram] - settings.discount) * (len(ngram) - 1), ngram)
        )
        used.add(best)
        try:
            content = b"".join(map(text, best)).decode()
        except UnicodeDecodeError:
            continue
        if tokenizer.token_to_id(content) is not None or not content.isascii():
            continue
        parts = best[-1:] if settings.pcs_rule == "suffix" else best
        begin = b"".join(map(text, parts))
        tokens = [text(id_) for row in rows for id_ in row if id_ not in base.special_ids]
        colliding = sum(t.startswith(begin) and t != begin for t in tokens)
        if colliding / len(tokens) >= settings.pcs:
            continue
        tokenizer.add_tokens([AddedToken(content, special=False, normalized=True)])
        id_ = tokenizer.token_to_id(content)
        assert id_ is not None
        texts[id_] = content.encode()
        found.append((content, best, left[best]))
    return found


def _counts(
    rows: Sequence[Sequence[int]], n_max: int, special: frozenset[int]
) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        for n in range(2, n_max + 1):
            for start in range(len(row) - n + 1):
                ngram = tuple(row[start : start + n])
                if not special.intersection(ngram):
                    counts[ngram] += 1
    return counts
