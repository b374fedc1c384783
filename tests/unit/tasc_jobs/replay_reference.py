"""TASC-spec with the corpus alone, and its replay, in plain Python: slow, and plain to read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PlainReplay:
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    drafted_steps: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def replay(
    outputs: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    eos: int,
    budget: int,
    n_max: int,
) -> PlainReplay:
    """Replay answers (without end-of-sequence) against chains drafted from outputs."""
    documents = [["SEP", *output, eos] for output in outputs]
    found = PlainReplay()
    for answer in answers:
        left, said = [*answer, eos], ["SEP"]
        while left:
            draft = _chain(documents, said, eos, budget, n_max)
            kept = 0
            while kept < min(len(draft), len(left)) and draft[kept] == left[kept]:
                kept += 1
            found.steps += 1
            found.nodes += len(draft)
            found.drafted_steps += bool(draft)
            found.reached.update(range(len(draft)))
            found.accepted.update(range(kept))
            emitted, left = left[: kept + 1], left[kept + 1 :]
            found.tokens += len(emitted)
            said += emitted
    return found


def _chain(documents: list[list], said: list, eos: int, budget: int, n_max: int) -> list[int]:
    draft: list[int] = []
    while len(draft) < budget and eos not in draft:
        draft.append(_likeliest(documents, [*said, *draft], n_max))
    return draft


def _likeliest(documents: list[list], text: list, n_max: int) -> int:
    """The commonest token behind the longest known context, the lower id of two as common."""
    for length in range(min(n_max - 1, len(text)), -1, -1):
        context = text[len(text) - length :]
        counts = Counter(
            document[at + length]
            for document in documents
            for at in range(len(document) - length)
            if document[at : at + length] == context and document[at + length] != "SEP"
        )
        if counts:
            return min(counts, key=lambda token: (-counts[token], token))
    raise AssertionError("an empty corpus says nothing")
