"""Tests what our requests become in vLLM, and vLLM's tokens here, without vLLM.

`Speaker` stands in for vLLM's engine: it has the members that `VllmEngine` uses, and says the
tokens of a tiny model, some at a time. tests/in_vllm has the tests with the real one.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec import structs

import tiny
from lora_folders import make_adapter
from support import refused
from tasc_draft import DraftIndex, DraftSettings
from tasc_draft.vllm import VllmDrafting
from tasc_engine import Engine, EngineConfig, ModelSource, QueueFull, StepRecord
from tasc_engine.errors import GuideError
from tasc_engine.guided.trial import make_matcher, make_tokens
from tasc_protocol import FieldError, GenerationResult, GuideSpec, Output, Request
from tasc_runtime.engine import vllm_backend
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.vllm_backend import (
    Statistics,
    VllmEngine,
    VllmGuides,
    arguments_of,
    logprob_of,
    require_servable,
    sampling_of,
)
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_serve import LLM
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import TaskTokenizer

SIZES = {"rows": 2, "max_model_len": 128, "dtype": "float64", "cost_aware": False}
CONFIG = EngineConfig(rows=2, max_model_len=128, max_waiting=3)
MOST = 4  # draft tokens
REQUEST = Request("a", (1, 2, 3), 16)


class RefusedByVllm(Exception):
    """Stands for vLLM's errors about requests, which are no ValueError."""


@dataclass
class Spoken:
    """A request in `Speaker`."""

    prompt: list[int]
    params: Any
    written: list[int] = field(default_factory=list)
    structured_output_request: Any = None
    spec_decode_metrics: Any = field(
        default_factory=lambda: SimpleNamespace(per_step_drafted=[], per_step_accepted=[])
    )


class Speaker:
    """vLLM's ``LLMEngine`` as far as `VllmEngine` uses it.

    Each step proposes `MOST` tokens for a row after its first token, and accepts up to two.
    """

    def __init__(self, model: Any, statistics: Statistics) -> None:
        self._model, self._statistics = model, statistics
        self.requests: dict[str, Spoken] = {}
        self.held: dict[str, Spoken] = {}  # by vLLM's own ids
        self.aborted: list[str] = []
        self.refused = ""
        self.renderer = SimpleNamespace(tokenizer=None)
        config = SimpleNamespace(get_vocab_size=lambda: int(model.config.vocab_size))
        self.model_config, self.model_executor = config, SimpleNamespace()
        self.vllm_config = SimpleNamespace(
            model_config=config, speculative_config=None, structured_outputs_config=None
        )
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=SimpleNamespace(requests=self.held))
        )

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any) -> str:
        if self.refused:
            raise RefusedByVllm(self.refused)
        self.requests[request_id] = Spoken(prompt["prompt_token_ids"], params)
        self.held[f"{request_id}-inner"] = self.requests[request_id]
        return f"{request_id}-inner"

    def abort_request(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def step(self) -> list[Any]:
        running = list(self.requests.items())[: CONFIG.rows]
        made = [self._said(*each) for each in running]
        for each in made:
            if each.finished:
                self.requests.pop(each.request_id)
        running_now = min(len(self.requests), CONFIG.rows)
        scheduler = SimpleNamespace(num_running_reqs=running_now, kv_cache_usage=0.5)
        prompts = SimpleNamespace(computed=3, cached_tokens=1)
        self._statistics.record(scheduler, SimpleNamespace(prompt_token_stats=prompts))
        return made

    def _said(self, request_id: str, row: Spoken) -> Any:
        params, accepted = row.params, min(len(row.written), 2)
        room = params.max_tokens - len(row.written)
        tokens = tiny.plain(self._model, [*row.prompt, *row.written], min(accepted + 1, room))
        if row.written:
            row.spec_decode_metrics.per_step_drafted.append(MOST)
            row.spec_decode_metrics.per_step_accepted.append(accepted)
        stops = (n for n, token in enumerate(tokens, 1) if token in params.stop_token_ids)
        reason = "stop" if (cut := next(stops, None)) else None
        row.written += (tokens := tokens[:cut])
        if reason is None and len(row.written) == params.max_tokens:
            reason = "length"
        found = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason=reason)
        return SimpleNamespace(
            request_id=request_id,
            outputs=[found],
            finished=reason is not None,
            prompt_logprobs=None,
            metrics=SimpleNamespace(scheduled_ts=1.0),
        )


@pytest.fixture(scope="module")
def ours(folder: Path) -> LLM:
    return LLM(folder, **SIZES)


@dataclass
class Stage:
    """An engine on a `Speaker`, and the records of its steps."""

    engine: VllmEngine
    speaker: Speaker
    records: list[StepRecord]

    def result(self, request: Request) -> GenerationResult:
        (result,) = self.engine.generate([request])
        return result


@pytest.fixture
def stage(ours: LLM, tiny_model: Any) -> Stage:
    return staged(ours, tiny_model)


@pytest.fixture(scope="module")
def tiny_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()


def staged(ours: LLM, model: Any, drafted: int = MOST, runner: Any = None) -> Stage:
    def make(fields: Mapping[str, Any], guide: Any) -> Any:
        if fields.get("presence_penalty", 0) > 2:
            raise RefusedByVllm("presence_penalty must be in [-2, 2]")
        return SimpleNamespace(**fields, guide=guide, verify=lambda *args: None)

    statistics, records = Statistics(), list[StepRecord]()
    speaker = Speaker(model, statistics)
    if runner:
        worker = SimpleNamespace(model_runner=runner)
        speaker.model_executor = SimpleNamespace(driver_worker=worker)
    adapters = {"one": "LoRA"}
    engine = VllmEngine(
        speaker,
        ours.tokenizer,
        CONFIG,
        make,
        RefusedByVllm,
        adapters,
        statistics,
        records.append,
        drafted,
    )
    return Stage(engine, speaker, records)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ignore_eos": True},
        {"stop": ("e",)},
        {"stop": ("e",), "include_stop_str_in_output": True},
        {"stop": ("never said",)},
        {"max_tokens": 1},
    ],
    ids=str,
)
def test_answers_are_those_of_our_engine(ours: LLM, stage: Stage, more: dict[str, Any]) -> None:
    for number, sentence in enumerate(tiny.SENTENCES):
        prompt = tuple(ours.tokenizer.encode_prompt(sentence))
        more = {"max_tokens": 24, **more}
        asked = structs.replace(REQUEST, id=str(number), prompt=prompt, **more)
        (expected,) = ours.engine.generate([asked])
        found = stage.result(asked)
        same = ("tokens", "text", "finish_reason", "prompt_tokens")
        assert [getattr(found, n) for n in same] == [getattr(expected, n) for n in same]
        assert not stage.speaker.requests


def test_steps_are_counted_by_position(stage: Stage) -> None:
    results = list(stage.engine.generate([structs.replace(REQUEST, id=i) for i in "abc"]))
    records = stage.records
    assert sum(r.emitted_tokens for r in records) == sum(len(r.tokens) for r in results)
    assert sum(r.row_steps for r in records) == sum(r.acceptance.steps for r in results)
    drafted, accepted = (sum(getattr(r, n) for r in records) for n in ("drafted", "accepted"))
    assert drafted.sum() == sum(sum(r.acceptance.drafted) for r in results)
    assert accepted.sum() == sum(sum(r.acceptance.accepted) for r in results)
    assert set(drafted.sum(0)) == {sum(r.drafts for r in records)}
    assert accepted.sum(0)[2:].sum() == 0 < accepted.sum(0)[1] <= accepted.sum(0)[0]


@pytest.mark.parametrize("fails", [False, True])
def test_failed_guide_is_an_error_and_not_the_end_of_an_answer(
    ours: LLM, stage: Stage, fails: bool
) -> None:
    """vLLM ends such an answer with the end of sequence, like a whole one."""
    stage.engine.submit(structs.replace(REQUEST, guide=GuideSpec("regex", text="[ab]+")))
    grammar = LLMatcher.grammar_from_regex("[ab]+")
    backend, size = ours.tokenizer.backend.to_str(), ours.engine.vocab_size
    matcher = make_matcher(make_tokens(backend, size, ours.tokenizer.eos_id), grammar)
    assert matcher.consume_token(ours.tokenizer.encode_prompt("c" if fails else "a")[-1]) != fails
    guided = SimpleNamespace(grammar=SimpleNamespace(ll_matcher=matcher))
    stage.speaker.held["a-inner"].structured_output_request = guided
    outputs = list[Output]()
    while stage.engine.running or stage.engine.waiting:
        outputs += stage.engine.step()
    result = outputs[-1].result
    assert result
    assert (result.finish_reason == "error") == fails
    assert bool(result.error) == fails


def test_streamed_texts_and_a_cancelled_request(ours: LLM, stage: Stage) -> None:
    engine, whole = stage.engine, stage.result(REQUEST)
    engine.submit(structs.replace(REQUEST, id="b", stream=True))
    engine.submit(structs.replace(REQUEST, id="c"))
    texts, outputs = "", engine.step()
    assert engine.cancel("c")
    assert not engine.cancel("c")
    while engine.running or engine.waiting:
        outputs += engine.step()
    assert {output.id for output in outputs if output.tokens} == {"b", "c"}
    texts = "".join(output.text for output in outputs if output.id == "b")
    assert texts == whole.text
    assert "c" in stage.speaker.aborted
    assert not [output for output in outputs if output.id == "c" and output.result]


def test_only_rows_that_must_be_plain_get_no_drafts(ours: LLM, tiny_model: Any) -> None:
    """The slots are those of vLLM's batch, which names requests by its own ids."""
    plain = list[frozenset[int]]()
    drafter = SimpleNamespace(plain_slots=frozenset())

    def propose(sampled: Sequence[Any]) -> list[list[int]]:
        plain.append(drafter.plain_slots)
        return [[7] for _ in sampled]

    drafter.propose = propose
    batch = SimpleNamespace(req_ids=[])
    runner = SimpleNamespace(drafter=drafter, input_batch=batch)
    engine = staged(ours, tiny_model, runner=runner).engine
    engine.submit(REQUEST)
    engine.submit(structs.replace(REQUEST, id="plain", draft=False))
    engine.submit(structs.replace(REQUEST, id="least", min_tokens=2))
    batch.req_ids = ["plain-inner", "a-inner", "gone-inner", "least-inner"]
    assert runner.drafter.propose([[1]] * 4) == [[7]] * 4
    engine.cancel("plain")
    batch.req_ids = ["least-inner", "a-inner"]
    for _ in range(3):
        runner.drafter.propose([[1]] * 2)
        engine.step()
    # vLLM repeats three tokens of another engine, and counts them towards min_tokens.
    engine.cancel_all()
    whole = staged(ours, tiny_model).result(REQUEST).tokens
    counted = {"frequency_penalty": 0.5}
    again = structs.replace(
        REQUEST, id="b", committed_ids=whole[:3], min_tokens=2, parameters=counted
    )
    engine.submit(again)
    batch.req_ids = ["b-inner"]
    for _ in range(3):
        runner.drafter.propose([[1]])
        engine.step()
    assert plain == [{0, 3}, {0}, {0}, frozenset(), {0}, {0}, frozenset()]


def test_engine_without_users_is_freed_while_vllms_runner_lives(ours: LLM, tiny_model: Any) -> None:
    drafter = SimpleNamespace(propose=lambda sampled: [], plain_slots=frozenset())
    runner = SimpleNamespace(drafter=drafter, input_batch=SimpleNamespace(req_ids=[]))
    made = weakref.ref(staged(ours, tiny_model, runner=runner).engine)
    gc.collect()
    assert made() is None


def test_queue_is_bounded_and_ids_differ(stage: Stage) -> None:
    for n in range(CONFIG.rows + CONFIG.max_waiting):
        stage.engine.submit(structs.replace(REQUEST, id=str(n)))
    with refused(QueueFull, "already waiting"):
        stage.engine.submit(REQUEST)
    stage.engine.cancel_all()
    stage.engine.submit(REQUEST)
    with refused(ValueError, "being answered"):
        stage.engine.submit(REQUEST)


def test_broken_off_answer_continues_or_is_repeated(stage: Stage) -> None:
    whole = stage.result(REQUEST)
    begun = structs.replace(REQUEST, committed_ids=whole.tokens[:5])
    counted = {"frequency_penalty": 0.5}
    for more, sent in (
        ({}, 8),
        ({"parameters": {"temperature": 1.0}}, 8),
        ({"parameters": counted}, 3),
    ):
        request = structs.replace(begun, **more)
        stage.engine.submit(request)
        assert len(stage.speaker.requests["a"].prompt) == sent
        stage.engine.cancel_all()
    for request in (begun, structs.replace(begun, parameters=counted)):
        found = stage.result(request)
        assert (found.tokens, found.text, found.committed) == (whole.tokens, whole.text, 5)
    wrong = (*whole.tokens[:4], (whole.tokens[4] + 1) % 300)
    found = stage.result(structs.replace(begun, committed_ids=wrong, parameters=counted))
    assert found.finish_reason == "error"
    assert "start it anew" in (found.error or "")
    assert not stage.speaker.requests


def test_sampled_answer_that_must_be_repeated_is_refused_with_drafts(
    ours: LLM, tiny_model: Any
) -> None:
    sampled = {"temperature": 1.0, "presence_penalty": 0.5}
    request = structs.replace(REQUEST, parameters=sampled, committed_ids=(4, 5))
    drafting = staged(ours, tiny_model)
    with refused(ValueError, "another replica began this answer", "send the request again"):
        drafting.engine.submit(request)
    assert not drafting.speaker.requests
    drafting.engine.submit(structs.replace(request, committed_ids=()))
    staged(ours, tiny_model, drafted=0).engine.submit(request)
    runner = SimpleNamespace(drafter=SimpleNamespace(propose=list))
    plain = structs.replace(request, draft=False)
    staged(ours, tiny_model, runner=runner).engine.submit(plain)


def test_sampling_parameters_are_vllms() -> None:
    request = structs.replace(
        REQUEST,
        parameters={"temperature": 0.5, "top_k": 7},
        stop_token_ids=(9,),
        min_tokens=6,
        committed_ids=(4, 5),
        seed=2**64 - 1,
        logprobs=2,
        echo=True,
    )
    found = sampling_of(request, (0, 9))
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.5, 7, 1.0)
    assert (found["max_tokens"], found["min_tokens"]) == (14, 4)
    assert (found["stop_token_ids"], found["ignore_eos"], found["detokenize"]) == (
        [9, 0],
        True,
        False,
    )
    assert (found["logprobs"], found["prompt_logprobs"]) == (2, None)  # the prompt's were sent
    assert sampling_of(structs.replace(request, ignore_eos=True), (0,))["stop_token_ids"] == [9]
    whole = structs.replace(request, committed_ids=())
    assert sampling_of(whole, (0,))["prompt_logprobs"] == 2
    seeds = {
        sampling_of(structs.replace(whole, **place), ())["seed"]
        for place in ({}, {"choice_index": 1}, {"prompt_index": 1}, {"committed_ids": (4,)})
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    small = structs.replace(whole, seed=7)
    assert sampling_of(small, ())["seed"] == 7
    counted = {"temperature": 0.5, "frequency_penalty": 0.5}
    anew = structs.replace(small, committed_ids=(4, 5), parameters=counted)
    assert sampling_of(anew, ())["seed"] == 7
    assert sampling_of(REQUEST, ())["seed"] is None


def test_logprobs_are_the_likeliest_in_order() -> None:
    found = {
        3: SimpleNamespace(logprob=-4.0, rank=9),
        1: SimpleNamespace(logprob=-0.1, rank=1),
        2: SimpleNamespace(logprob=-2.0, rank=2),
    }
    one = logprob_of(3, found, 2)
    assert (one.token, one.logprob, one.top) == (3, -4.0, ((1, -0.1), (2, -2.0)))
    assert logprob_of(1, {1: found[1]}, 0).top == ()


def test_guides_are_checked_once_and_choices_spelled_by_the_tokenizer(ours: LLM) -> None:
    checked: list[dict[str, Any]] = []

    def check(fields: dict[str, Any]) -> None:
        checked.append(fields)
        if "json" in fields:
            raise ValueError("no such type")

    guides = VllmGuides(ours.tokenizer, 320, check)
    choices = GuideSpec("choice", ("yes", "no"))
    assert not guides.known(choices)
    fields = guides.fields(choices)
    (yes,), (no,) = ([ids] for ids in ours.tokenizer.encode_outputs(("yes", "no")))
    spelled = [" ".join(f"<[{id_}]>" for id_ in ids) for ids in (yes, no)]
    assert fields == {"grammar": f"start: {spelled[0]} | {spelled[1]}"}
    assert guides.fields(GuideSpec("regex", text="[a-c]")) == {"regex": "[a-c]"}
    lark = 'start: "x"'
    assert guides.fields(GuideSpec("grammar", text=lark)) == {"grammar": lark}
    for _ in range(2):
        with refused(GuideError, "unknown name"):
            guides.of(GuideSpec("grammar", text="start: X"))
    schema = GuideSpec("json_schema", text="{}")
    for _ in range(2):
        with refused(GuideError, "no such type"):
            guides.of(schema)
    guides.of(choices)
    assert guides.known(choices)
    assert len(checked) == 4
    with refused(GuideError, "has no tokens"):
        guides.of(GuideSpec("choice", ("",)))


@pytest.mark.parametrize(
    ("name", "more", "drafted"),
    [
        ("min_p", {"parameters": {"min_p": 0.1, "temperature": 1.0}}, True),
        ("logit_bias", {"logit_bias": ((1, 1.0),)}, True),
        ("draft", {"draft": False}, True),
        ("min_tokens", {"min_tokens": 2}, True),
        ("temperature", {"parameters": {"temperature": 0.001}}, False),
        ("presence_penalty", {"parameters": {"presence_penalty": 3.0}}, False),
    ],
)
def test_request_that_vllm_cannot_answer_is_refused_by_name(
    ours: LLM, tiny_model: Any, name: str, more: dict[str, Any], drafted: bool
) -> None:
    request = structs.replace(REQUEST, **more)
    with pytest.raises(FieldError, match=name) as error:
        staged(ours, tiny_model).engine.submit(request)
    assert error.value.field == name
    plain = staged(ours, tiny_model, drafted=0).engine
    if drafted:
        plain.submit(request)
    else:
        with refused(FieldError, name):
            plain.submit(request)


def test_unknown_adapter_and_other_refusals_are_errors_of_the_request(
    stage: Stage,
) -> None:
    stage.engine.submit(structs.replace(REQUEST, adapter="one"))
    with refused(ValueError, "two", "the task has one"):
        stage.engine.submit(structs.replace(REQUEST, id="b", adapter="two"))
    stage.speaker.refused = "too odd"
    with refused(ValueError, "vLLM refuses it", "too odd"):
        stage.engine.submit(structs.replace(REQUEST, id="b"))
    assert not stage.engine.holds("b")


def test_request_that_is_not_found_in_vllm_is_aborted(stage: Stage) -> None:
    stage.speaker.engine_core.engine_core.scheduler.requests = {}
    with pytest.raises(KeyError):
        stage.engine.submit(REQUEST)
    assert stage.speaker.aborted == ["a"]
    assert not stage.engine.holds("a")


@pytest.fixture
def record(folder: Path) -> TaskRecord:
    fingerprint = TaskTokenizer.from_folder(folder).fingerprint
    return TaskRecord("t", str(folder), fingerprint, "{input}")


@pytest.mark.parametrize(
    ("fault", "record_has", "settings"),
    [
        ("nf4", {"quantization": "nf4"}, {}),
        ("float64", {"dtype": "float64"}, {}),
        ("neural", {"neural": NeuralDrafting("./drafter")}, {}),
        ("device", {}, {"device": "cuda:1"}),
        ("engine.rows", {}, {"vllm": {"max_num_seqs": 3}}),
        ("each step's tokens are sent", {}, {"vllm": {"stream_interval": 3}}),
        ("tasks[].replicas", {}, {"vllm": {"data_parallel_size": 2}}),
    ],
)
def test_task_that_vllm_cannot_serve_is_refused(
    record: TaskRecord, fault: str, record_has: dict[str, Any], settings: dict[str, Any]
) -> None:
    require_servable(record, EngineSettings(backend="vllm"))
    with refused(ServiceError, fault):
        require_servable(replace(record, **record_has), EngineSettings(backend="vllm", **settings))


def test_arguments_are_those_of_the_settings(folder: Path, tmp_path: Path) -> None:
    places = [make_adapter(folder, tmp_path / name, r=r) for name, r in (("x", 4), ("y", 12))]
    source = ModelSource(
        folder, None, "bfloat16", "cpu", None, tuple(zip("xy", places, strict=True))
    )
    settings = EngineSettings(backend="vllm", vllm={"enforce_eager": True})
    found = partial(arguments_of, source, CONFIG, settings)
    drafted = found(16, 2048)
    assert (drafted["dtype"], drafted["max_num_seqs"], drafted["enforce_eager"]) == (
        "bfloat16",
        2,
        True,
    )
    assert drafted["max_model_len"] == 128 + 16  # so that the last tokens are drafted, too
    short = found(16, 130)
    assert short["max_model_len"] == short["long_prefill_token_threshold"] == 130
    assert drafted["max_num_batched_tokens"] == 2 * 144
    many = replace(CONFIG, rows=1024)
    large = arguments_of(source, many, settings, 0, 2048)
    assert large["max_num_batched_tokens"] == 8192
    large = arguments_of(source, many, settings, 16, 2048)
    assert large["max_num_batched_tokens"] == 1024 * 17
    assert drafted["speculative_config"]["num_speculative_tokens"] == 16
    assert str(folder) not in str(drafted["additional_config"])  # it enters vLLM's cache key
    assert (drafted["max_lora_rank"], drafted["max_loras"]) == (16, 2)
    plain = arguments_of(replace(source, adapters=()), CONFIG, settings, 0, 2048)
    assert not plain.keys() & {"speculative_config", "additional_config", "enable_lora"}


@pytest.mark.parametrize(
    ("recorded", "overridden", "passed"),
    [(None, None, None), (0.9, None, 0.9), (None, 0.2, 0.2), (0.9, 0.4, 0.4)],
)
def test_min_prob_that_someone_has_set_limits_drafts_in_vllm(
    record: TaskRecord,
    monkeypatch: Any,
    recorded: float | None,
    overridden: float | None,
    passed: float | None,
) -> None:
    given = list[Any]()

    def not_opened(*args: Any) -> None:
        given.extend(args)
        raise ServiceError("not opened")

    monkeypatch.setattr(vllm_backend, "open_engine", not_opened)
    if recorded:
        record = replace(record, draft=DraftSettings(min_prob=recorded))
    settings, draft = EngineSettings(backend="vllm"), DraftOverrides(min_prob=overridden)
    with refused(ServiceError, "not opened"):
        EngineBuilder(record, 1, settings, draft=draft)
    _, source, tokenizer, config, _, _, drafted, positions, min_prob, _ = given
    assert min_prob == passed
    arguments = arguments_of(source, config, settings, drafted, positions, min_prob)
    index = DraftIndex.empty(tokenizer.fingerprint, tokenizer.vocab_size)
    tuned = replace(index, settings=DraftSettings(min_prob=0.3))
    used = VllmDrafting.read(arguments["additional_config"]).settings(tuned, 16)
    assert used.min_prob == (0.05 if passed is None else passed)


def test_without_vllm_the_error_says_what_to_install(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(vllm_backend, "find_spec", lambda name: None)
    with refused(ServiceError, "vLLM is not installed", "engine.python"):
        LLM(folder, backend="vllm", rows=2)
    assert isinstance(LLM(folder, **SIZES).engine, Engine)


def test_settings_of_vllm_need_its_backend() -> None:
    with refused(ValueError, "enforce_eager", "backend"):
        EngineSettings(vllm={"enforce_eager": True})
    assert EngineSettings(python="/opt/vllm/bin/python").runtime_env == {
        "py_executable": "/opt/vllm/bin/python"
    }
    assert EngineSettings().runtime_env == {}
