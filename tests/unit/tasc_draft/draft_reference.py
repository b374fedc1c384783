"""TASC-spec in plain Python: dictionaries, tuples and lists. It shares no code with the kernels."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasc_draft import CorpusIndex, Documents, Drafts, DraftSettings, TascProposer, build_index

VOCAB = 5
SEP = VOCAB
EOS = 0
OCCURRENCES = 128

Ngram = tuple[int, ...]
Guess = tuple[int, float, str]  # token, log-probability of the path, source
Continuations = tuple[Mapping[int, int], int]  # counts of the next token, and their whole


def ngram_counts(documents: Sequence[Sequence[int]], n_max: int, p_min: int) -> dict[Ngram, int]:
    counts: Counter[Ngram] = Counter({(): 0})
    for document in documents:
        text = (SEP, *document, EOS)
        counts[()] += len(text)
        for n in range(1, n_max + 1):
            counts.update(text[i : i + n] for i in range(len(text) - n + 1))
    return {gram: count for gram, count in counts.items() if gram == () or count >= p_min}


def children_of(counts: Mapping[Ngram, int]) -> dict[Ngram, dict[int, int]]:
    children: defaultdict[Ngram, dict[int, int]] = defaultdict(dict)
    for gram, count in counts.items():
        if gram:
            children[gram[:-1]][gram[-1]] = count
    return dict(children)


@dataclass(frozen=True)
class Reference:
    """The paper's rule over one corpus; a draft is made anew from the whole prompt and answer."""

    settings: DraftSettings
    counts: Mapping[Ngram, int]
    eos_ids: Collection[int] = (EOS,)

    def draft(self, prompt: Sequence[int], answer: Sequence[int], budget: int) -> list[Guess]:
        children, guesses, path = children_of(self.counts), [], 1.0
        while len(guesses) < min(budget, self.settings.num_speculative_tokens):
            drafted = [token for token, _, _ in guesses]
            guess = self._guess(children, prompt, answer, drafted)
            if guess is None or (path := path * guess[1]) < self.settings.min_prob:
                break
            guesses.append((guess[0], math.log(path), guess[2]))
            if guess[0] in self.eos_ids:
                break
        return guesses

    def _guess(
        self,
        children: Mapping[Ngram, Mapping[int, int]],
        prompt: Sequence[int],
        answer: Sequence[int],
        drafted: Sequence[int],
    ) -> Guess | None:
        weight = self.settings.corpus_weight
        none: Continuations = ({}, 0)
        corpus = self._corpus(children, (SEP, *answer, *drafted)) if weight > 0 else none
        known = self._prompt([*prompt, *answer], drafted) if weight < 1 else none
        if not corpus[0] and not known[0]:
            return self._most_frequent(children)
        weight = weight if corpus[0] and known[0] else float(bool(corpus[0]))
        return mixture(corpus, known, weight)

    def _corpus(self, children: Mapping[Ngram, Mapping[int, int]], text: Ngram) -> Continuations:
        for length in range(min(self.settings.n_max - 1, len(text)), 0, -1):
            context = text[-length:]
            if context in children:
                return children[context], self.counts[context]
        return {}, 0

    def _prompt(self, committed: Sequence[int], drafted: Sequence[int]) -> Continuations:
        text = [*committed, *drafted]
        places = [p for p in range(len(committed) - 2, -1, -1) if text[p] == text[-1]]
        lengths = {p: self._agreeing(text, p) for p in places[:OCCURRENCES]}
        longest = max(lengths.values(), default=0)
        found = Counter(text[p + 1] for p, length in lengths.items() if length == longest)
        return found, found.total()

    def _agreeing(self, text: Sequence[int], place: int) -> int:
        """How many tokens up to ``place`` are those at the text's end, at most n_max - 1."""
        most = min(self.settings.n_max - 1, place + 1)
        end = len(text) - 1
        return next((k for k in range(most) if text[place - k] != text[end - k]), most)

    def _most_frequent(self, children: Mapping[Ngram, Mapping[int, int]]) -> Guess | None:
        usable = {t: c for t, c in children.get((), {}).items() if t != SEP}
        if not usable:
            return None
        token = min(usable, key=lambda t: (-usable[t], t))
        return token, usable[token] / self.counts[()], "corpus"


def mixture(corpus: Continuations, prompt: Continuations, weight: float) -> Guess:
    """The likeliest token of lambda * p_corpus + (1 - lambda) * p_prompt, least id on ties."""
    best: Guess = (-1, -1.0, "")
    for token in sorted({*corpus[0], *prompt[0]}):
        parts = [
            weight_of * source[0].get(token, 0) / source[1] if source[1] else 0.0
            for weight_of, source in ((weight, corpus), (1.0 - weight, prompt))
        ]
        if sum(parts) > best[1]:
            best = token, sum(parts), "prompt" if parts[1] > parts[0] else "corpus"
    return best


def make_index(
    documents: Sequence[Sequence[int]], n_max: int = 6, p_min: int = 1, eos_id: int = EOS
) -> CorpusIndex:
    return build_index(
        Documents.of(documents),
        fingerprint="f" * 32,
        vocab_size=VOCAB,
        eos_id=eos_id,
        n_max=n_max,
        p_min=p_min,
    )


def make_proposer(
    index: CorpusIndex,
    settings: DraftSettings,
    rows: int = 3,
    capacity: int = 64,
    eos_ids: Sequence[int] = (EOS,),
) -> TascProposer:
    # The target's vocabulary is larger than the tokenizer's, as in models with padded embeddings.
    return TascProposer(
        settings,
        rows=rows,
        capacity=capacity,
        vocab_size=VOCAB + 2,
        eos_ids=eos_ids,
        index=index,
    )


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def guesses(drafts: Drafts, place: int = 0) -> list[Guess]:
    """One row's draft in the reference's form; holds it to being a chain on the way."""
    begin, end = drafts.offsets[place : place + 2]
    depth = end - begin
    assert drafts.parents[begin:end].tolist() == list(range(-1, depth - 1))
    assert drafts.depths[begin:end].tolist() == list(range(1, depth + 1))
    sources = [("corpus", "prompt")[s] for s in drafts.source[begin:end]]
    tokens, logp = drafts.tokens[begin:end].tolist(), drafts.logp[begin:end].tolist()
    return list(zip(tokens, logp, sources, strict=True))


def propose(proposer: TascProposer, row: int, budget: int = 64) -> list[Guess]:
    return guesses(proposer.propose(ids([row]), ids([budget])))


def same(found: Sequence[Guess], expected: Sequence[Guess]) -> bool:
    """Equal but for the float32 of ``logp``."""
    return [(t, s) for t, _, s in found] == [(t, s) for t, _, s in expected] and np.allclose(
        [p for _, p, _ in found], [p for _, p, _ in expected], rtol=1e-6, atol=1e-6
    )
