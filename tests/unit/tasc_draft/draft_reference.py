"""The published rules in plain Python: counters, tuples and lists. No code of the kernels.

A reference returns the tokens that may follow a path, and their probability by each source.
`draft_checks` checks which paths make the best draft.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasc_draft import DraftSettings
from tasc_draft.mixture.evidence import PLACES

END = -1
WIDEST = 8  # continuations of a corpus context that enter by themselves

Path = tuple[int, ...]
Followers = Mapping[Path, Mapping[int, int]]  # how often each token follows each context
Place = tuple[int, int]  # in the text, and how many tokens up to it agree with the path's end
Chances = dict[int, tuple[float, float]]  # each next token by the corpus, and by the prompt


def followers(outputs: Sequence[Sequence[int]], sep: int, eos: int, longest: int) -> Followers:
    """Returns followers of contexts of up to ``longest`` tokens of ``SEP output EOS``, then END."""
    found: defaultdict[Path, Counter[int]] = defaultdict(Counter)
    for output in outputs:
        text = (sep, *output, eos, END)
        for end in range(len(text)):
            for length in range(text[end] == END, min(longest, end) + 1):
                found[text[end - length : end]][text[end]] += 1
    return found


def places_of(text: Sequence[int], path: Path) -> list[Place]:
    """Returns earlier places of the end of ``text`` followed by ``path``, the newest first.

    A place is one that something follows. Where no place of a path goes on with its next token,
    every place of that token will do.
    """
    end = len(text) - 1

    def newest(token: int) -> list[int]:
        return [p for p in range(end - 1, -1, -1) if text[p] == token][:PLACES]

    found = [(p, agreeing(text, p)) for p in newest(text[end])]
    for token in path:
        on = [(p + 1, k + 1) for p, k in found if text[p + 1] == token and p + 1 < end]
        found = on or [(p, 1) for p in newest(token)]
    return found


def agreeing(text: Sequence[int], place: int) -> int:
    """Returns how many tokens up to ``place`` equal those at the text's end."""
    end = len(text) - 1
    return next((k for k in range(place + 1) if text[place - k] != text[end - k]), place + 1)


@dataclass(frozen=True)
class TascReference:
    """TASC-spec over the ``corpus``, of contexts of up to ``n_max - 1`` tokens."""

    settings: DraftSettings
    corpus: Followers
    sep: int

    def chances(self, prompt: Sequence[int], answer: Sequence[int], path: Path) -> Chances:
        weight = self.settings.corpus_weight
        context = self._longest_context((self.sep, *answer, *path)) if weight > 0 else ()
        known = self._in_prompt([*prompt, self.sep, *answer], path) if weight < 1 else Counter()
        if not context and not known:
            return self._most_frequent()
        weight = weight if context and known else float(bool(context))
        found = {}
        for token in {*self._entering(context), *known}:
            by_corpus = weight * self._share(context, token)
            by_prompt = (1 - weight) * known[token] / known.total() if known else 0.0
            found[token] = by_corpus, by_prompt
        return found

    def _longest_context(self, text: Path) -> Path:
        """Returns the longest context of a sufficiently frequent n-gram; empty if there is none."""
        for length in range(min(self.settings.n_max - 1, len(text)), 0, -1):
            if self._entering(text[-length:]):
                return text[-length:]
        return ()

    def _entering(self, context: Path) -> list[int]:
        """Returns the tokens that a context alone adds."""
        counts = self.corpus.get(context, {}) if context else {}
        ranked = sorted({*counts} - {END}, key=lambda token: (-counts[token], token))[:WIDEST]
        return [token for token in ranked if counts[token] >= self.settings.p_min]

    def _share(self, context: Path, token: int) -> float:
        counts = self.corpus.get(context, {}) if context else {}
        count = counts.get(token, 0)
        return count / sum(counts.values()) if count >= self.settings.p_min else 0.0

    def _in_prompt(self, text: Sequence[int], path: Path) -> Counter[int]:
        """Returns the followers at the places where the most tokens agree."""
        most = self.settings.n_max - 1
        places = [(p, min(k, most)) for p, k in places_of(text, path)]
        longest = max((k for _, k in places), default=0)
        return Counter(text[p + 1] for p, k in places if k == longest)

    def _most_frequent(self) -> Chances:
        counts = self.corpus.get((), {})
        usable = {t: c for t, c in counts.items() if t != self.sep}
        if not usable:
            return {}
        token = min(usable, key=lambda t: (-usable[t], t))
        return {token: (usable[token] / sum(counts.values()), 0.0)}


@dataclass(frozen=True)
class TrieReference:
    """The N-Gram Trie: the prompt's tokens after the longest matched prefix, by frequency."""

    settings: DraftSettings
    sep: int

    def chances(self, prompt: Sequence[int], answer: Sequence[int], path: Path) -> Chances:
        found = places_of([*prompt, self.sep, *answer], ())
        places = [(p, min(k, self.settings.prefix)) for p, k in found if p < len(prompt)]
        longest = max((k for p, k in places if p + 1 < len(prompt)), default=0)
        depth = len(path)
        if longest == 0 or longest + depth >= self.settings.n_max:
            return {}
        subtree = [tuple(prompt[p + 1 :]) for p, k in places if k >= longest]
        along = [after[depth:] for after in subtree if after[:depth] == path]
        counts = Counter(after[0] for after in along if after)
        return {token: (0.0, n / len(along)) for token, n in counts.items()}
