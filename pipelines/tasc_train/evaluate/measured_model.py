"""Loads a model into its own engine, and times its answers with and without drafts."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from tasc_draft import DraftIndex, DraftSettings
from tasc_engine import EngineError, GenerationResult, ModelSource, Request
from tasc_engine.model.loading import max_positions
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import GenerationSettings
from tasc_protocol import GuideSpec, LabelScores, Scoring
from tasc_runtime.data.local_corpus import learnt_index
from tasc_runtime.engine.builder import DEFAULT_MODEL_LEN
from tasc_runtime.llm import LLM
from tasc_store import CorpusRow

_NO_DRAFTS = DraftSettings(num_speculative_tokens=0, neighbours=0, recent_tokens=0)
WARM_UP_ROWS = 32


@dataclass(frozen=True)
class Setup:
    """Settings of the engine.

    Attributes:
        rows: b, the number of rows decoded together.
        max_model_len: Maximum tokens of a row, prompt included; None is 1024. The number of
            positions of the model is used if it is lower.
        threads: CPU threads.
    """

    rows: int = 8
    max_model_len: int | None = None
    threads: int = 1


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids; ``row`` is the index of its input."""

    row: int
    ids: tuple[int, ...]


class MeasuredModel:
    """A model loaded into its own engine for measurements.

    The prefix cache is off, because otherwise all runs but the first would find cached prompts.

    Raises:
        JobError: The model cannot be loaded, or its tokenizer has more ids than the model.
    """

    def __init__(self, source: ModelSource, generation: GenerationSettings, setup: Setup) -> None:
        self._generation = generation
        try:
            longest = max_positions(source.folder)
            self._llm = LLM(
                source.folder,
                adapter=source.adapter,
                dtype=source.dtype,
                quantization=source.quantization,
                device=source.device,
                rows=setup.rows,
                max_model_len=min(setup.max_model_len or DEFAULT_MODEL_LEN, longest),
                prefix_cache_bytes=0,
                cost_aware=False,
                torch_threads=setup.threads,
            )
        except (EngineError, OSError, ValueError) as error:
            raise JobError(f"cannot load {source.folder}: {error}") from error
        self.tokenizer, self._engine = self._llm.tokenizer, self._llm.engine
        self.config = self._engine.config
        if self.tokenizer.vocab_size > self._engine.vocab_size:
            raise JobError(
                f"the tokenizer of {source.folder} has {self.tokenizer.vocab_size} ids, but the "
                f"model has only {self._engine.vocab_size}; use a model that `tasc finetune` made "
                "with this tokenizer"
            )
        self.draft_from(None)

    def index(self, rows: Sequence[CorpusRow]) -> DraftIndex:
        """Builds a draft index of a task's rows. The index's weights are learnt on some rows."""
        template, settings = self._generation.template, self._generation.draft
        return learnt_index(rows, self.tokenizer, template, settings)

    def draft_from(self, index: DraftIndex | None) -> None:
        """Drafts from this index (None: no drafts), and forgets what earlier answers taught."""
        self._llm.draft_from(index, self._generation.draft if index else _NO_DRAFTS)

    def prompts(self, inputs: Sequence[str], labels: GuideSpec | None = None) -> list[Prompt]:
        """Returns the prompts of the inputs, except prompts that leave no room for an answer.

        Args:
            labels: Labels that must also have room to be scored behind each prompt.

        Raises:
            GuideError: The labels cannot be scored.
        """
        longest = self._engine.longest - (self._engine.scoring_tokens(labels) if labels else 1)
        encode = self._generation.template.encode
        found = (Prompt(i, tuple(encode(self.tokenizer, text))) for i, text in enumerate(inputs))
        return [prompt for prompt in found if len(prompt.ids) <= longest]

    def answers(
        self, prompts: Sequence[Prompt], *, draft: bool = False, logprobs: bool = False
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Yields ``(row, answer)`` as answers finish; decoding is greedy.

        Raises:
            JobError: The engine ended an answer with an error.
        """
        if logprobs:
            self._engine.compile_rules()
        base = Request(
            "",
            (0,),
            1,
            stop=self._generation.stop,
            draft=draft,
            guide=self._generation.guide,
            logprobs=0 if logprobs else None,
        )
        return self._results(prompts, self._generation.max_tokens, base)

    def scores(
        self, prompts: Sequence[Prompt], labels: GuideSpec
    ) -> Iterator[tuple[int, LabelScores]]:
        """Yields ``(row, exact scores of all labels)`` as rows finish.

        Raises:
            JobError: The engine could not score the labels of a row.
        """
        scoring = Scoring(labels.end, exact=True)
        base = Request("", (0,), 1, draft=False, guide=labels, scoring=scoring)
        for row, result in self._results(prompts, self._engine.scoring_tokens(labels), base):
            assert result.scores is not None  # it has no error
            yield row, result.scores

    def exact_lengths(self, prompts: Sequence[Prompt], tokens: int) -> Iterator[GenerationResult]:
        """Yields answers of exactly ``tokens`` tokens, or as many as fit, without drafts."""
        base = Request("", (0,), 1, draft=False, ignore_eos=True)
        return (result for _, result in self._results(prompts, tokens, base))

    def _results(
        self, prompts: Sequence[Prompt], tokens: int, base: Request
    ) -> Iterator[tuple[int, GenerationResult]]:
        longest = self._engine.longest
        requests = (
            structs.replace(
                base, id=str(p.row), prompt=p.ids, max_tokens=min(tokens, longest - len(p.ids))
            )
            for p in prompts
        )
        for result in self._engine.generate(requests):
            if result.finish_reason == "error":
                raise JobError(f"row {result.id} was not answered: {result.error}")
            yield int(result.id), result


@dataclass(frozen=True)
class Run:
    """One run: each prompt is answered once.

    Attributes:
        texts: Answers, in the order of the prompts.
        tokens: Number of tokens of all answers, with end-of-sequence tokens.
        steps: Number of forward passes that could emit a token for a row, summed over the rows.
        seconds: Time from the first request to the last answer.
    """

    texts: tuple[str, ...]
    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Side:
    """Summary of the repeated runs with drafts, or of the runs without drafts.

    Attributes:
        answers: Answers of the first run.
        ms_per_answer: Milliseconds of a run, divided by its number of answers.
    """

    answers: tuple[str, ...]
    tokens_per_answer: float
    steps_per_answer: float
    ms_per_answer: Spread

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Side":
        rows = len(runs[0].texts)
        return cls(
            runs[0].texts,
            statistics.median(run.tokens for run in runs) / rows,
            statistics.median(run.steps for run in runs) / rows,
            Spread.of([1000 * run.seconds / rows for run in runs]),
        )


def measure(
    measured: MeasuredModel,
    prompts: Sequence[Prompt],
    index: DraftIndex | None,
    repeats: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> dict[str, Side]:
    """Returns the sides ``plain`` and, with an index, ``drafted``, timed after a warm-up.

    The order of the sides alternates between repeats, so that neither always runs on the warmer
    machine. Each drafted run starts without anything learnt from the answers of earlier runs.

    Raises:
        JobError: The engine ended an answer with an error.
    """
    drafts: dict[str, DraftIndex | None] = {"plain": None}
    if index is not None:
        drafts["drafted"] = index
    for each in drafts.values():
        answer(measured, prompts[:WARM_UP_ROWS], each)
    runs: dict[str, list[Run]] = {side: [] for side in drafts}
    for turn in range(repeats):
        for side in sorted(drafts, reverse=turn % 2 == 0):
            runs[side].append(answer(measured, prompts, drafts[side], progress))
    return {side: Side.of(found) for side, found in runs.items()}


def answer(
    measured: MeasuredModel,
    prompts: Sequence[Prompt],
    index: DraftIndex | None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Run:
    """Submits all prompts at once, and times the run."""
    measured.draft_from(index)
    texts: dict[int, str] = {}
    tokens = steps = 0
    began = time.perf_counter()
    for row, result in measured.answers(prompts, draft=index is not None):
        texts[row] = result.text
        tokens += len(result.tokens)
        steps += result.acceptance.steps
        progress(1)
    seconds = time.perf_counter() - began
    return Run(tuple(texts[p.row] for p in prompts), tokens, steps, seconds)
