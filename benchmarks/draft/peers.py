"""Drafters of other projects behind the contract of our proposer, so that one replay measures all.

They are called through their public classes, on the same rows and with the same train outputs:

- prompt lookup of ``transformers``, which is always installed. It has no corpus.
- suffix decoding of ``arctic-inference`` (0.3.0: ``pip install arctic-inference`` builds it in
  minutes without a GPU and needs nothing else at run time). Its corpus is that of our drafter: each
  output stands between the document mark and end-of-sequence, and prompts end with the mark;
  without the mark it drafts less. The index is static, as ours is here: the answer of a row is
  forgotten with the row.

These did not install beside this package in the same environment:

- vLLM 0.33.0 and SGLang 0.5.23 pin torch 2.14 and numba 0.65, which our dependencies exclude.
  vLLM's n-gram drafter is prompt lookup and its suffix drafter is arctic-inference's; SGLang's is
  C++ that it compiles when it is first used, behind bindings of its own.
- draftretriever 0.1.1 (REST) installs, but its reader ends the process (index out of bounds in
  src/lib.rs) on an index that its own writer has just written.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.draft.tasks import Task
from tasc_draft import Drafts, Int32
from tasc_draft.drafts import Proposer

MATCH = 2  # tokens of prompt lookup's longest n-gram
TREE_DEPTH = 64  # tokens that suffix decoding looks back; its default

# The best settings of those tried on train slices of five tasks; the library's defaults as a tree;
# the same as a chain, which is how vLLM calls it.
SUFFIX: dict[str, dict[str, Any]] = {
    "suffix decoding, tree, tuned": {
        "use_tree_spec": True, "max_spec_factor": 4.0, "min_token_prob": 0.02,
    },
    "suffix decoding, tree": {"use_tree_spec": True},
    "suffix decoding, chain": {},
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A package with drafters.

    Attributes:
        package: The name to install.
        module: The module whose import must succeed.
        names: The names of its drafters.
        make: Makes the drafters from a task and the greatest number of draft tokens of a step.
    """

    package: str
    module: str
    names: tuple[str, ...]
    make: Callable[[Task, int], list[Proposer]]

    @property
    def version(self) -> str | None:
        """The installed version; None where the package is missing or cannot be imported."""
        try:
            importlib.import_module(self.module)
            return version(self.package)
        except (ImportError, PackageNotFoundError):
            return None


class PromptLookup:
    """``PromptLookupCandidateGenerator`` of transformers: a chain from the text of the row."""

    def __init__(self, task: Task, budget: int) -> None:
        # torch and transformers take seconds to import.
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self.max_depth = budget
        self._tensor, self._length = torch.tensor, 0
        self._text = torch.zeros((1, _capacity(task) + budget), dtype=torch.int64)
        self._generator = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor([task.eos_id]),
            num_output_tokens=budget,
            max_matching_ngram_size=MATCH,
            max_length=self._text.shape[1],
        )

    def start(self, row: int, prompt: Int32, labels: Any = None) -> None:
        self._length = 0
        self.observe(row, prompt)

    def propose(self, rows: Int32, budget: Int32, least: Any = None) -> Drafts:
        text: Any = self._text[:, : self._length]
        ids, _ = self._generator.get_candidates(text)
        tokens = ids[0, self._length :].tolist()
        return drafts(tokens, range(-1, len(tokens) - 1))

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        end = self._length + len(tokens)
        self._text[0, self._length : end] = self._tensor(tokens)
        self._length = end

    def finish(self, row: int) -> None:
        self._length = 0


class SuffixDecoding:
    """``SuffixDecodingCache`` of arctic-inference over a task's train outputs.

    Args:
        cache: The cache with the corpus in it (`suffix_cache`).
        how: Further arguments of its ``speculate``.
    """

    def __init__(self, cache: Any, sep: int, budget: int, **how: Any) -> None:
        self.max_depth = budget
        self._cache, self._sep = cache, np.array([sep], np.int32)
        self._how = {"max_spec_tokens": budget, **how}
        self._context = np.zeros(0, np.int32)

    def start(self, row: int, prompt: Int32, labels: Any = None) -> None:
        text = np.concatenate([prompt, self._sep])
        self._cache.start_request(row, text)
        self._context = text[-TREE_DEPTH:]

    def propose(self, rows: Int32, budget: Int32, least: Any = None) -> Drafts:
        found = self._cache.speculate(int(rows[0]), self._context, **self._how)
        return drafts(found.token_ids, found.parents)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        self._cache.add_active_response(row, tokens)
        self._context = np.concatenate([self._context, tokens])[-TREE_DEPTH:]

    def finish(self, row: int) -> None:
        self._cache.stop_request(row)
        self._cache.evict_cached_response(row)


def lookups(task: Task, budget: int) -> list[Proposer]:
    return [PromptLookup(task, budget)]


def suffixes(task: Task, budget: int) -> list[Proposer]:
    cache = suffix_cache(task)
    return [SuffixDecoding(cache, task.vocab_size, budget, **how) for how in SUFFIX.values()]


def suffix_cache(task: Task) -> Any:
    """A ``SuffixDecodingCache`` that holds ``SEP output EOS`` of each train output."""
    module = importlib.import_module("arctic_inference.suffix_decoding")
    cache, offsets = module.SuffixDecodingCache(TREE_DEPTH), task.outputs.offsets
    sep, eos = np.array([task.vocab_size], np.int32), np.array([task.eos_id], np.int32)
    for i in range(len(task.outputs)):
        output = task.outputs.ids[offsets[i] : offsets[i + 1]]
        name = f"train {i}"
        cache.start_request(name, sep)
        cache.add_active_response(name, np.concatenate([sep, output, eos]))
        cache.stop_request(name)
    return cache


def drafts(tokens: Sequence[int], parents: Sequence[int]) -> Drafts:
    """The draft of one row as our `Drafts`; parents come before their children."""
    n, depths = len(tokens), [0] * len(tokens)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    return Drafts(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int16),
        offsets=np.array([0, n], np.int32),
        logp=np.zeros(n, np.float32),
        source=np.zeros(n, np.int8),
    )


def _capacity(task: Task) -> int:
    return max(len(prompt) + len(answer) for prompt, answer in task.test) + 1


PEERS = (
    Peer("transformers", "transformers", ("prompt lookup",), lookups),
    Peer("arctic-inference", "arctic_inference.suffix_decoding", tuple(SUFFIX), suffixes),
)
