"""vLLM as the engine of a task: our requests in, our outputs out, drafts by `TascProposer`.

`VllmEngine` steps vLLM's engine in this process, as `tasc_engine.Engine` steps its target. vLLM
chooses tokens; text, stop strings and the end of an answer are made by the same code as with our
engine. vLLM is imported by `open_engine` alone.
"""

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tasc_draft import SOURCES
from tasc_engine import EngineConfig, ModelSource, StepRecord
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.errors import GuideError, QueueFull
from tasc_engine.guided import Guidance, Guides, LabelSet, trial
from tasc_engine.guided.sandbox import Unsettled
from tasc_engine.lora.adapter_folder import settings_of
from tasc_engine.step.answer import AnswerBuilder
from tasc_protocol import PARAMETERS, FieldError, GuideSpec, Output, Request, TokenLogprob
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer

log = logging.getLogger(__name__)

_TESTED = ("0.32.", "0.33.")
_INDEX_VARIABLE = "TASC_VLLM_INDEX"  # vLLM hashes its settings, so they name no folder
_POLL_S = 0.5  # seconds between two looks of the proposer for a new index
_PAUSE_S = 0.001  # where a step had nothing to do, for example because a guide is being compiled
_STEP_TOKENS = 8192  # of prompts in a step, unless one row's chunk is longer
_KNOWN_GUIDES = 256
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, in vLLM
_LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to this
_NOT_DRAFTED = (
    "is set, which vLLM does not take together with drafts; leave it out, or serve the task with "
    "backend tasc, or with engine.max_draft_tokens 0"
)
_NEVER_PLAIN = (
    "needs rows without drafts, which vLLM on several devices cannot have; leave it out, or set "
    "engine.max_draft_tokens to 0"
)
_ANEW = (
    "another replica began this answer, and vLLM, which must start it anew, answers differently "
    "this time; send the request again"
)
_TOO_COLD = f"is above 0 and below {_LEAST_TEMPERATURE}; with vLLM, set 0 or a higher one"
_NO_LABELS = (
    "probabilities of labels need backend tasc, and this task has backend vllm; serve it with "
    "backend tasc, or generate answers with guided_choice"
)
_GUIDES = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
_SOURCE = SOURCES.index("vllm")
# Arguments of vLLM that follow from other settings.
_FOLLOW = {
    **dict.fromkeys(("model", "tokenizer", "dtype", "enable_lora"), "the task's record"),
    **dict.fromkeys(("speculative_config", "additional_config"), "the task's draft settings"),
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.rows",
    "max_num_batched_tokens": "engine.prefill_chunk",
    "long_prefill_token_threshold": "engine.prefill_chunk",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "enable_prefix_caching": "engine.prefix_cache_bytes",
}
# Arguments that this backend depends on.
_FIXED = {
    "structured_outputs_config": "guides are followed by the library of both engines",
    "per_request_spec_decode_metrics": "accepted draft tokens are counted by it",
    "stream_interval": "each step's tokens are sent",
    "data_parallel_size": "one engine steps in this process; set tasks[].replicas",
    "max_logprobs": "requests are limited by the protocol",
}


def require_servable(record: TaskRecord, settings: EngineSettings) -> None:
    """Raises ServiceError if vLLM cannot serve a task with these settings, and says why."""
    faults = {
        f"quantization {record.quantization}": record.quantization is not None,
        "dtype float64": record.dtype == "float64",
        "a neural drafter": record.neural is not None,
    }
    for fault in (name for name, found in faults.items() if found):
        raise ServiceError(
            f"task {record.name} has {fault}, which backend vllm does not support; set backend to "
            "tasc, or register the task without it"
        )
    if settings.device != "auto":
        raise ServiceError(
            f"device is {settings.device!r}; backend vllm takes auto alone, because its build "
            "decides: leave device out, and select GPUs by num_gpus or CUDA_VISIBLE_DEVICES"
        )
    for name in settings.vllm.keys() & _FOLLOW.keys():
        raise ServiceError(f"engine.vllm sets {name}, which follows from {_FOLLOW[name]}; set that")
    for name in settings.vllm.keys() & _FIXED.keys():
        raise ServiceError(f"engine.vllm sets {name}, but {_FIXED[name]}; leave it out")


def arguments_of(
    source: ModelSource,
    config: EngineConfig,
    settings: EngineSettings,
    drafted: int,
    positions: int,
    min_prob: float | None = None,
) -> dict[str, Any]:
    """Returns the fields of vLLM's ``EngineArgs``.

    Args:
        drafted: Maximum number of draft tokens of a row in a step; 0 for no drafts.
        positions: Maximum number of tokens of a row that the model supports.
        min_prob: Minimum probability of a draft; unset: the proposer learns it.
    """
    # Where a row has less room than a draft, vLLM drafts for no row.
    length = min(config.max_model_len + drafted, positions)
    chunk = min(config.prefill_chunk, length)
    found: dict[str, Any] = {
        "model": str(source.folder),
        "tokenizer": str(source.folder),
        "dtype": source.dtype,
        "max_model_len": length,
        "max_num_seqs": config.rows,
        "max_num_batched_tokens": max(
            chunk, min(config.rows * chunk, _STEP_TOKENS), config.rows * (drafted + 1)
        ),
        "long_prefill_token_threshold": chunk,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "gpu_memory_utilization": config.gpu_memory_share * config.gpu_part,
        "enable_prefix_caching": config.prefix_cache_bytes > 0,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # the request has all values
        "structured_outputs_config": {"backend": "guidance"},  # the library of our engine
    }
    if drafted:
        found["speculative_config"] = {
            "method": "custom_class",
            "model": "tasc_draft.vllm.TascProposer",
            "num_speculative_tokens": drafted,
        }
        own = {"index": f"${_INDEX_VARIABLE}", "rows": config.rows, "row_tokens": length}
        floor = {} if min_prob is None else {"draft": {"min_prob": min_prob}}
        found["additional_config"] = {"tasc": {**own, "poll_s": _POLL_S, **floor}}
        found["per_request_spec_decode_metrics"] = "detailed"
    if folders := _adapters_of(source).values():
        ranks = (settings_of(folder) for folder in folders)
        most = max(max(s.get("r", 8), *s.get("rank_pattern", {}).values(), 1) for s in ranks)
        found |= {
            "enable_lora": True,
            "max_lora_rank": next((rank for rank in _RANKS if rank >= most), most),
            "max_loras": min(len(folders), config.rows),
            "max_cpu_loras": len(folders),
        }
    return found | settings.vllm


def _adapters_of(source: ModelSource) -> dict[str, Path]:
    """The adapters by name; an adapter of all requests has the name of no adapter."""
    return {"": source.adapter} if source.adapter else dict(source.adapters)


def starts_anew(request: Request) -> bool:
    """Whether vLLM must repeat the tokens that another engine has committed.

    It continues a text where the next token depends on the tokens before it alone, but not on the
    state of a guide, or on which of them are the answer's.
    """
    rule = request.sampling
    counted = rule.presence_penalty or rule.frequency_penalty
    return bool(request.committed_ids) and bool(counted or request.guide)


def sampling_of(request: Request, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of vLLM's ``SamplingParams``, without a guide's.

    vLLM makes no text, and all ends of an answer are stop tokens, so that `AnswerBuilder` ends
    answers as it does with our engine.

    Args:
        eos_ids: The ends of sequence that the model knows.
    """
    rule = request.sampling
    begun = 0 if starts_anew(request) else len(request.committed_ids)
    ends = () if request.ignore_eos else eos_ids
    return {name: getattr(rule, name) for name in PARAMETERS} | {
        # vLLM keeps seeds as int64.
        "seed": _seed(request) & (2**63 - 1) if rule.temperature else None,
        "logit_bias": dict(rule.logit_bias) or None,
        "max_tokens": request.answer_limit - begun,
        "min_tokens": max(request.min_tokens - begun, 0),
        "stop_token_ids": list(dict.fromkeys((*request.stop_token_ids, *ends))),
        "ignore_eos": True,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.logprobs if request.wants_prompt_logprobs else None,
        "detokenize": False,
    }


def _seed(request: Request) -> int:
    """A seed of its own for each answer to a request, and for the rest of a broken-off answer."""
    begun = 0 if starts_anew(request) else len(request.committed_ids)
    place = request.prompt_index, request.choice_index, begun
    if not any(place):
        return request.seed
    text = ".".join(map(str, (request.seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def logprob_of(token: int, found: Mapping[int, Any], count: int) -> TokenLogprob:
    """Converts vLLM's log-probabilities of one position.

    Args:
        found: Values with ``logprob`` and ``rank``, by token.
        count: Number of the likeliest tokens to report.
    """
    ranked = sorted((one.rank, id_, one.logprob) for id_, one in found.items() if one.rank)
    top = tuple((id_, logprob) for rank, id_, logprob in ranked if rank <= count)
    return TokenLogprob(token, found[token].logprob, top)


class VllmGuides:
    """Checks guides on the calling thread, within the limits of our engine; vLLM compiles them.

    Args:
        check: Raises ValueError if vLLM refuses the fields of a guide.
    """

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        vocab_size: int,
        check: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self._tokenizer, self._check = tokenizer, check
        self._ours = Guides(tokenizer, vocab_size)
        self._known: dict[GuideSpec, dict[str, Any] | GuideError] = {}

    def of(self, spec: GuideSpec) -> None:
        self.fields(spec)

    def labels(self, spec: GuideSpec) -> LabelSet:
        raise GuideError(_NO_LABELS)

    def prepare(self, spec: GuideSpec) -> None:
        if spec.kind == "labels":
            raise GuideError(_NO_LABELS)
        self.fields(spec)

    def fields(self, spec: GuideSpec) -> dict[str, Any]:
        """Returns the fields of vLLM's ``StructuredOutputsParams``.

        Raises:
            GuideError: vLLM cannot follow the guide, or compiling it takes too much time or memory.
        """
        if (found := self._known.get(spec)) is None:
            try:
                self._ours.of(spec)
                found = self._made(spec)
                self._check(found)
            except Unsettled:
                raise
            except ValueError as error:
                found = GuideError(str(error))
            if len(self._known) >= _KNOWN_GUIDES:
                del self._known[next(iter(self._known))]
            self._known[spec] = found
        if isinstance(found, GuideError):
            raise GuideError(str(found))
        return found

    def known(self, spec: GuideSpec) -> bool:
        return spec in self._known

    def _made(self, spec: GuideSpec) -> dict[str, Any]:
        if spec.kind != "choice":
            return {_GUIDES[spec.kind]: spec.text}
        # vLLM's own choices may be spelled by any tokens; these are the tokenizer's, as in drafts.
        ids = self._tokenizer.encode_outputs(spec.choices)
        lines = (" ".join(f"<[{id_}]>" for id_ in tokens) for tokens in ids)
        return {"grammar": "start: " + " | ".join(lines)}


@dataclass(eq=False)
class _Row:
    """A request in vLLM.

    Attributes:
        inner: vLLM's own id of the request.
        held: vLLM's scheduled request.
        repeated: Tokens of another engine that vLLM must repeat before new ones follow.
        counted: Number of steps with drafts that were counted.
    """

    request: Request
    inner: str
    held: Any
    answer: AnswerBuilder
    repeated: list[int]
    counted: int = 0

    def is_plain(self) -> bool:
        """Whether the row must not be drafted now.

        With drafts, vLLM may pass over an end that min_tokens has just allowed.
        """
        made = len(self.answer.tokens) - len(self.repeated)  # by vLLM
        return not self.request.draft or made < self.request.min_tokens

    def next_draft(self) -> tuple[int, int]:
        """The number of tokens drafted and accepted in the step that has just ended."""
        counts = self.held.spec_decode_metrics  # None without drafts
        if counts is None or len(counts.per_step_drafted) == self.counted:
            return 0, 0
        self.counted = len(counts.per_step_drafted)
        return counts.per_step_drafted[-1], counts.per_step_accepted[-1]

    def guide_error(self) -> str:
        """Why the guide failed, for example at a limit of its size; empty if it did not.

        vLLM then allows only the end of sequence, as at the end of a whole answer.
        """
        guided = self.held.structured_output_request
        matcher = getattr(guided.grammar, "ll_matcher", None) if guided else None
        return trial.reason(matcher) if matcher else ""


@dataclass
class Statistics:
    """The figures of vLLM's last step; vLLM calls `record` as that of a stat logger."""

    scheduler: Any = None
    iteration: Any = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **more: Any) -> None:
        if scheduler_stats is not None:
            self.scheduler = scheduler_stats
        self.iteration = iteration_stats

    def log(self) -> None:
        """Does nothing."""

    log_engine_initialized = log


class VllmEngine(BatchEngine):
    """Answers requests by vLLM.

    Args:
        llm: vLLM's ``LLMEngine``, whose scheduler runs in this process.
        make: Makes vLLM's parameters from `sampling_of` and a guide's fields.
        refusal: The class of vLLM's errors about requests.
        adapters: vLLM's ``LoRARequest`` of each adapter, by name; see `open_engine`.
        statistics: One of vLLM's stat loggers.
        on_step: Called with each step's record, on the engine's thread.
        drafted: Maximum number of draft tokens of a row; 0 for no drafts.
    """

    guides: VllmGuides
    overlaps = False
    rules_compiled = True

    def __init__(
        self,
        llm: Any,
        tokenizer: TaskTokenizer,
        config: EngineConfig,
        make: Callable[[dict[str, Any], dict[str, Any] | None], Any],
        refusal: type[Exception],
        adapters: Mapping[str, Any],
        statistics: Statistics,
        on_step: Callable[[StepRecord], None],
        drafted: int,
    ) -> None:
        self.config, self._llm, self._tokenizer = config, llm, tokenizer
        self._make, self._refusal = make, refusal
        self._adapters, self._statistics = adapters, statistics
        self._on_step, self._drafted = on_step, drafted
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self.guides = VllmGuides(tokenizer, self._vocab_size, self._check_guide)
        self._eos_ids = tuple(e for e in tokenizer.eos_ids if e < self._vocab_size)
        self._rows: dict[str, _Row] = {}
        self._outputs: list[Output] = []
        self._running, self._draft_seconds = 0, 0.0
        # With one device, the proposer is in this process; else its times are unknown.
        runner = getattr(getattr(llm.model_executor, "driver_worker", None), "model_runner", None)
        self._runner = runner
        self._propose = getattr(getattr(runner, "drafter", None), "propose", None)
        if runner and self._propose:
            held: Any = weakref.proxy(self)  # so that an engine without users ends, and vLLM too
            runner.drafter.propose = partial(VllmEngine._timed_drafts, held)

    @property
    def running(self) -> int:
        return min(self._running, len(self._rows))

    @property
    def waiting(self) -> int:
        return len(self._rows) - self.running

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    @property
    def kv_usage(self) -> float:
        scheduler = self._statistics.scheduler
        return scheduler.kv_cache_usage if scheduler and self._rows else 0.0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def longest(self) -> int:
        return self.config.max_model_len

    def compile_rules(self) -> None:
        """Does nothing, as vLLM has nothing to compile."""

    def scoring_tokens(self, guide: GuideSpec) -> int:
        raise FieldError("labels", _NO_LABELS)

    def require_adapter(self, name: str | None) -> None:
        if name is not None and name not in self._adapters:
            known = ", ".join(filter(None, self._adapters)) or "none"
            raise ValueError(f"adapter is {name!r}; the task has {known}")

    def require_fit(self, request: Request) -> None:
        """Checks a request, also for fields that vLLM refuses; see `BatchEngine`."""
        super().require_fit(request)
        rule = request.sampling
        drafts, cannot = self._drafted > 0, self._drafted > 0 and self._propose is None
        faults = {
            "min_p": (drafts and rule.min_p and rule.temperature, _NOT_DRAFTED),
            "logit_bias": (drafts and rule.logit_bias, _NOT_DRAFTED),
            "draft": (cannot and not request.draft, _NEVER_PLAIN),
            "min_tokens": (cannot and request.min_tokens, _NEVER_PLAIN),
            "temperature": (0 < rule.temperature < _LEAST_TEMPERATURE, _TOO_COLD),
        }
        for name, (found, why) in faults.items():
            if found:
                raise FieldError(name, f"{name} {why}")
        try:
            with self._refusals():
                self._make(sampling_of(request, self._eos_ids), None)
        except ValueError as error:
            # Not every error of vLLM's has the name as a field.
            named = getattr(error.__cause__, "parameter", None)
            mentioned = (name for name in PARAMETERS if name in str(error))
            field = named if named in PARAMETERS else next(mentioned, "parameters")
            raise FieldError(field, str(error)) from error

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises ValueError if vLLM refuses a request."""
        try:
            yield
        except self._refusal as error:
            raise ValueError(f"vLLM refuses it: {error}") from error

    def submit(self, request: Request, guide: Guidance | None = None) -> None:
        self.require_fit(request)
        if request.id in self._rows:
            raise ValueError(f"request {request.id} is being answered; ids must differ")
        if len(self._rows) >= self.config.max_waiting + self.config.rows:
            raise QueueFull(f"{self.waiting} requests are already waiting; try again later")
        # Other drafts change what is sampled.
        drafts = self._drafted > 0 and request.draft
        if drafts and request.sampling.temperature and starts_anew(request):
            raise ValueError(_ANEW)
        repeated = list(request.committed_ids) if starts_anew(request) else []
        prompt = request.prompt_ids if repeated else (*request.prompt_ids, *request.committed_ids)
        guide_fields = self.guides.fields(request.guide) if request.guide else None
        with self._refusals():
            inner = self._llm.add_request(
                request.id,
                {"type": "token", "prompt_token_ids": list(prompt)},
                self._make(sampling_of(request, self._eos_ids), guide_fields),
                lora_request=self._adapters.get(request.adapter or ""),
            )
        try:
            held = self._llm.engine_core.engine_core.scheduler.requests[inner]
        except Exception:  # no row would answer it
            self._llm.abort_request([request.id])
            raise
        builder = AnswerBuilder(request, self._tokenizer)
        self._rows[request.id] = _Row(request, inner, held, builder, repeated)

    def cancel(self, request_id: str) -> bool:
        self._outputs = [output for output in self._outputs if output.id != request_id]
        if self._rows.pop(request_id, None) is None:
            return False
        self._llm.abort_request([request_id])
        return True

    def cancel_all(self) -> None:
        for request_id in list(self._rows):
            self.cancel(request_id)
        self._outputs.clear()

    def holds(self, request_id: str) -> bool:
        return request_id in self._rows

    def launch(self) -> None:
        """Runs a whole step."""
        if not self._rows:
            return
        began, self._draft_seconds, self._statistics.iteration = time.perf_counter(), 0.0, None
        made = self._llm.step()
        seconds = time.perf_counter() - began
        if scheduler := self._statistics.scheduler:
            self._running = scheduler.num_running_reqs
        taken: list[tuple[str, int, int, int]] = []
        rows = ((self._rows.get(each.request_id), each) for each in made)
        outputs = [self._take(row, each, taken) for row, each in rows if row]
        # Steps that repeat tokens have none that are new.
        self._outputs += [output for output in outputs if output.tokens or output.result]
        if not made and seconds < _PAUSE_S:
            time.sleep(_PAUSE_S)
        self._record(taken, seconds)

    def collect(self) -> None:
        """Does nothing, as `launch` runs a whole step."""

    def outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, row: _Row, output: Any, taken: list[tuple[str, int, int, int]]) -> Output:
        """Adds a step's tokens to an answer; returns its next output.

        Args:
            taken: Gets the request's id, and its numbers of emitted, drafted and accepted tokens.
        """
        (made,) = output.outputs
        answer, request = row.answer, row.request
        if output.metrics and not answer.admitted:
            answer.admitted = output.metrics.scheduled_ts
        if output.prompt_logprobs and request.logprobs is not None:
            scored = zip(request.prompt_ids[1:], output.prompt_logprobs[1:], strict=True)
            answer.logprobs += [logprob_of(*each, request.logprobs) for each in scored]
        tokens, fault = list(made.token_ids), ""
        logprobs = [
            logprob_of(token, found, request.logprobs or 0)
            for token, found in zip(tokens, made.logprobs or (), strict=False)
        ]
        drafted, accepted = row.next_draft()
        if row.repeated and tokens:
            known = len(row.repeated[: len(tokens)])
            if tokens[:known] != row.repeated[:known]:
                fault = _ANEW
            tokens, logprobs, row.repeated = tokens[known:], logprobs[known:], row.repeated[known:]
        used = answer.emit(tokens, logprobs) if tokens and not fault else 0
        kept = min(accepted, used)
        answer.count_draft(drafted, kept)
        taken.append((request.id, used, drafted, kept))
        reason = answer.finish_reason() if used else None
        if output.finished and not (reason or fault):
            reason = "stop" if made.finish_reason == "stop" else None
            fault = "" if reason else f"vLLM ended the answer: {made.finish_reason}"
        if reason:
            fault = row.guide_error()
        if reason or fault:
            del self._rows[request.id]
            if not output.finished:
                self._llm.abort_request([request.id])
        return answer.failed(fault) if fault else answer.output(reason)

    def _record(self, taken: list[tuple[str, int, int, int]], seconds: float) -> None:
        """Publishes a step's record; see `_take`."""
        iteration = self._statistics.iteration
        scored = iteration.prompt_token_stats if iteration else None
        emitted = {id_: used for id_, used, _, _ in taken}
        drafted, accepted = np.zeros((2, len(SOURCES), max(self._drafted, 1)), np.int64)
        for _, _, width, kept in taken:
            drafted[_SOURCE, :width] += 1
            accepted[_SOURCE, :kept] += 1
        running = [row for row in self._rows.values() if row.answer.admitted]
        self._on_step(
            StepRecord(
                row_steps=len(taken),
                drafts=sum(width > 0 for _, _, width, _ in taken),
                drafted=drafted,
                reached=drafted,
                accepted=accepted,
                bonus_tokens=sum(emitted.values()) - int(accepted.sum()),
                prompt_tokens=scored.computed if scored else 0,
                shared_tokens=scored.cached_tokens if scored else 0,
                cached_tokens=sum(
                    len(row.request.prompt_ids) + len(row.answer.tokens) for row in running
                ),
                draft_seconds=self._draft_seconds,
                verify_seconds=seconds - self._draft_seconds,
                requests=tuple(emitted),
                emitted=emitted,
            )
        )

    def _timed_drafts(self, sampled: Sequence[Any], *args: Any, **more: Any) -> list[list[int]]:
        """Makes the drafts of a step; none for rows that must not be drafted."""
        assert self._runner
        assert self._propose
        began = time.perf_counter()
        plain = {row.inner for row in self._rows.values() if row.is_plain()}
        slots = enumerate(self._runner.input_batch.req_ids)
        self._runner.drafter.plain_slots = frozenset(i for i, id_ in slots if id_ in plain)
        try:
            drafts: list[list[int]] = self._propose(sampled, *args, **more)
            return drafts
        finally:
            self._draft_seconds += time.perf_counter() - began

    def _check_guide(self, fields: dict[str, Any]) -> None:
        """Raises ValueError if vLLM refuses a guide."""
        config = self._llm.vllm_config
        with self._refusals():
            self._make({"max_tokens": 1}, fields).verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                self._llm.renderer.tokenizer,
            )


def open_engine(
    record: TaskRecord,
    source: ModelSource,
    tokenizer: TaskTokenizer,
    config: EngineConfig,
    settings: EngineSettings,
    folder: Path,
    drafted: int,
    positions: int,
    min_prob: float | None,
    on_step: Callable[[StepRecord], None],
) -> VllmEngine:
    """Starts vLLM in this process.

    Args:
        folder: The folder of the `IndexFile`.
        drafted: Maximum number of draft tokens of a row; 0 for no drafts.
        positions: Maximum number of tokens of a row that the model supports.
        min_prob: Minimum probability of a draft; unset: the proposer learns it.

    Raises:
        ServiceError: vLLM is missing, or refuses the model, an adapter or an argument.
    """
    require_servable(record, settings)
    if find_spec("vllm") is None:
        raise ServiceError(
            "backend is vllm, but vLLM is not installed in this environment; install it beside "
            "tasc-serve (docs/how-to/vllm.md), or set engine.python to an environment that has it"
        )
    # The scheduler and, on one device, the model run in this process. Each has to be set before
    # vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ[_INDEX_VARIABLE] = str(folder)
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine, SamplingParams, __version__
    from vllm.exceptions import VLLMClientError
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if not __version__.startswith(_TESTED):
        log.warning("vLLM %s is untested here; 0.32 and 0.33 are tested", __version__)

    def make(fields: dict[str, Any], guide: dict[str, Any] | None) -> Any:
        outputs = StructuredOutputsParams(**guide) if guide else None
        kind = RequestOutputKind.DELTA
        return SamplingParams(**fields, structured_outputs=outputs, output_kind=kind)

    statistics = Statistics()
    try:
        arguments = arguments_of(source, config, settings, drafted, positions, min_prob)
        made = EngineArgs(**arguments).create_engine_config()
        if current_platform.is_cpu() and config.kv_cache_bytes is None:
            made.cache_config.kv_cache_memory_bytes = _cache_bytes(made, config)
        llm = LLMEngine.from_vllm_config(made, stat_loggers=[lambda *_: statistics])
        named = enumerate(_adapters_of(source).items(), 1)
        adapters = {name: LoRARequest(name or "adapter", i, str(at)) for i, (name, at) in named}
        for adapter in adapters.values():
            llm.add_lora(adapter)
    except Exception as error:  # vLLM's errors have no common class
        raise ServiceError(f"vLLM cannot serve task {record.name}: {error}") from error
    return VllmEngine(
        llm, tokenizer, config, make, VLLMClientError, adapters, statistics, on_step, drafted
    )


def _cache_bytes(vllm_config: Any, config: EngineConfig) -> int:
    """Bytes of keys and values of all rows at their maximum length, and of shared prefixes."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    each = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    block = vllm_config.cache_config.block_size
    blocks = config.rows * (-(-model.max_model_len // block) + 1)
    return int(each * block * blocks) + config.prefix_cache_bytes
