"""Checks whether a model folder works on this machine, and measures its speed.

Settings and the headers of weight files are checked first, without torch. The model is loaded only
if these checks succeed. Where `tasc task create` or loading has a check, this module calls it.
"""

import gc
import logging
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from logging.handlers import BufferingHandler
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasc_engine.errors import EngineError, UnsupportedModel
from tasc_engine.model.folder import float_shapes, require_weights, weight_files
from tasc_jobs.errors import UsageError
from tasc_jobs.task_inputs import device_here
from tasc_jobs.tasks.generation_defaults import GenerationDefaults
from tasc_jobs.tasks.model_folders import BaseModel, check_adapter, model_settings
from tasc_runtime.data.rows import check_file, read_raw_rows
from tasc_runtime.errors import ServiceError
from tasc_runtime.models import AUTO, dtype_here
from tasc_text import TaskTokenizer, resolve_folder
from tasc_text.ends import CONFIG, GENERATION, TOKENIZER, named_ends, read_json
from tasc_text.tokenizer import FILE, open_to_encode

if TYPE_CHECKING:
    from tasc_engine.batch_engine import BatchEngine
    from tasc_engine.kv.device_memory import DeviceMemory
    from tasc_runtime.llm import LLM, Completions

Level = Literal["ok", "warn", "fail"]
STEPS = 20
MOST_COMPARED = 256  # inputs
# Weights to compare, by name, with the first one: keyword arguments of `LLM`.
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-dynamic": {"dtype": "float32", "quantization": "int8-dynamic"},
}
_GB = 1e9
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Flags of processors in /proc/cpuinfo, by dtype.
_FLAGS = {"bfloat16": r"bf16\b", "float16": r"fp16\b|\bfphp\b"}
CGROUP = Path("/sys/fs/cgroup")  # the cgroup of this process in a container


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``text`` ends with the solution if there is one.

    Attributes:
        figures: The numbers in the text, for programs.
    """

    subject: str
    level: Level
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Examination:
    """The inputs of an examination.

    Attributes:
        model: Folder or hub name.
        adapter: Folder or hub name of a LoRA adapter that is merged into the model.
        rows: b, the number of rows decoded together.
        context: Maximum tokens of a row, prompt and answer together; None means 1024, or the
            model's maximum if that is smaller.
        threads: CPU threads.
        backend: The engine that runs the model, ``tasc`` or ``vllm``.
        compare: A file of inputs that the model answers in each of `KINDS` that the device has, to
            compare speeds and answers; None for no comparison.
    """

    model: str
    adapter: str | None = None
    rows: int = 8
    context: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    backend: str = "tasc"
    compare: Path | None = None


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    model: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether no check failed."""
        return all(finding.level != "fail" for finding in self.findings)

    @property
    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "works": self.works}

    @property
    def in_words(self) -> str:
        """The findings as text, one line each."""
        width = max(len(finding.subject) for finding in self.findings)
        return "\n".join(
            f"{f.level:4}  {f.subject:{width}}  {' '.join(f.text.split())}" for f in self.findings
        )


def examine(asked: Examination) -> Report:
    """Check a model, load it if the checks succeed, and time steps without drafts.

    The weights of a model on the hub are downloaded only if its settings are supported.

    Raises:
        UsageError: The dtype does not exist, the device cannot be used, or the file to compare with
            has no inputs.
    """
    if asked.dtype != AUTO and asked.dtype not in _BYTES:
        raise UsageError(f"--dtype is {asked.dtype}; choose one of {', '.join(_BYTES)}")
    if asked.compare and asked.backend != "tasc":
        raise UsageError("--compare is for --backend tasc; leave one of them out")
    inputs = _inputs(asked.compare) if asked.compare else []
    found = list(_files(asked))
    asked = replace(asked, dtype=dtype_here(asked.dtype, device=asked.device))
    if all(finding.level != "fail" for finding in found):
        found += _trial(asked, inputs)
    return Report(asked.model, tuple(found))


def _files(asked: Examination) -> Iterator[Finding]:
    """Yields the findings that need no torch."""
    try:
        base = BaseModel.read(asked.model)
        folder = resolve_folder(asked.model)  # downloads the weights of a model on the hub
        require_weights(folder)
        numbers = sum(map(prod, float_shapes(folder).values()))
    except (ValueError, OSError, UnsupportedModel) as error:
        yield Finding("model", "fail", str(error))
        return
    text = f"{numbers / 1e6:,.1f} million parameters in {len(weight_files(folder))} files"
    yield Finding("model", "ok", text, {"parameters": numbers})
    yield _tokenizer(base)
    yield from _ends(folder)
    defaults = GenerationDefaults.of(folder)
    if text := defaults.in_words(f"give it {shlex.join(defaults.options)}"):
        yield Finding("generation defaults", "warn", text)
    if asked.adapter is not None:
        yield _adapter(asked.adapter, base)


def _tokenizer(base: BaseModel) -> Finding:
    tokenizer, size = base.tokenizer, base.vocab_size
    text = f"{tokenizer.vocab_size} ids, end of sequence {tokenizer.eos_ids}"
    ends = max(tokenizer.eos_ids) < size
    if ends and tokenizer.vocab_size <= size:
        return Finding("tokenizer", "ok", text)
    text += (
        f", but the model has {size} ids: prompts and answers with larger ids fail; resize the "
        "embeddings (resize_token_embeddings) and train them, or use the model's own tokenizer"
    )
    only_added = tokenizer.backend.get_vocab_size(with_added_tokens=False) <= size
    return Finding("tokenizer", "warn" if ends and only_added else "fail", text)


def _ends(folder: Path) -> Iterator[Finding]:
    """Yields findings if files disagree on EOS tokens, or the tokenizer appends one to prompts."""
    named, tokenizer = named_ends(folder), TaskTokenizer.from_folder(folder)

    def shown(ids: tuple[int, ...]) -> str:
        return " and ".join(f"{id_} ({tokenizer.backend.id_to_token(id_)!r})" for id_ in ids)

    ends = tokenizer.eos_ids
    used = next((named[name] for name in (GENERATION, CONFIG) if name in named), ends)
    if {*ends} != {*used}:  # transformers uses `used`
        files = "; ".join(f"{name}: {shown(ids)}" for name, ids in named.items())
        text = (
            f"files disagree about the tokens that end an answer ({files}); each of these tokens "
            f"ends answers, and drafts end with {shown(ends[:1])}: remove wrong tokens, and list "
            f"the right ones as eos_token_id in {GENERATION}"
        )
        yield Finding("end of answers", "warn", text)
    flag = read_json(folder / TOKENIZER).get("add_eos_token") is True
    if tokenizer.appended_ends or flag:
        place = f"the post_processor of {FILE}" if tokenizer.appended_ends else TOKENIZER
        text = (
            f"the tokenizer appends {shown(tokenizer.appended_ends or ends[:1])} to texts, as "
            f"{place} says; prompts are encoded without this token here, but other programs may "
            f"append it: load the tokenizer with add_eos_token=False and save it again"
        )
        yield Finding("end of prompts", "warn", text)


def _adapter(adapter: str, base: BaseModel) -> Finding:
    try:
        folder = resolve_folder(adapter)
        check_adapter(folder, base.folder)
        if not (folder / FILE).is_file():
            return Finding("adapter", "ok", "its shapes are those of the model")
        own, ours = open_to_encode(folder), open_to_encode(base.folder)
    except (ValueError, OSError) as error:
        return Finding("adapter", "fail", str(error))
    if own.backend.get_vocab() == ours.backend.get_vocab():
        ends = {id_ for ids in named_ends(folder).values() for id_ in ids}
        if unknown := sorted(ends.difference(base.tokenizer.eos_ids)):
            text = (
                f"it was saved with a tokenizer that ends answers with {unknown[0]} "
                f"({own.backend.id_to_token(unknown[0])!r}), which no file of the model names: "
                f"add this token to eos_token_id in {GENERATION} of the model"
            )
            return Finding("adapter", "warn", text)
        return Finding("adapter", "ok", "its shapes and its tokenizer are those of the model")
    text = (
        f"it was saved with a tokenizer of {own.vocab_size} ids, but the model's tokenizer has "
        f"{ours.vocab_size} ids and other tokens; name the model that the adapter was trained on"
    )
    return Finding("adapter", "fail" if own.vocab_size > base.vocab_size else "warn", text)


def _inputs(path: Path) -> list[str]:
    """The first inputs of a file, at most `MOST_COMPARED`."""
    check_file(path, ("input",))
    texts = list[str]()
    for row in islice(read_raw_rows(path, ("input",)), MOST_COMPARED):
        text = row.value.get("input") if isinstance(row.value, dict) else None
        if not isinstance(text, str):
            raise UsageError(
                f"--compare {path}, line {row.line}: {row.reason or 'its input is not a text'}; "
                'each line needs {"input": "..."}'
            )
        texts.append(text)
    if not texts:
        raise UsageError(f"--compare {path} has no rows; give some inputs of the task")
    return texts


def _trial(asked: Examination, inputs: Sequence[str]) -> Iterator[Finding]:
    """Yields the findings that need torch: memory, loading and speed."""
    import torch

    from tasc_engine import Engine
    from tasc_engine.kv.device_memory import memory_of
    from tasc_engine.model.loading import max_positions
    from tasc_runtime.engine.builder import DEFAULT_MODEL_LEN
    from tasc_runtime.llm import LLM

    device = device_here(asked.device)
    try:
        folder = resolve_folder(asked.model)
        yield from _dtype(asked.dtype, device)
        length = asked.context or min(DEFAULT_MODEL_LEN, max_positions(folder))
        memory = memory_finding(asked, folder, length, device, memory_of(torch.device(device)))
        yield memory
        if memory.level == "fail":
            return
        make = partial(
            LLM,
            asked.model,
            adapter=asked.adapter,
            device=device if asked.backend == "tasc" else "auto",
            backend=asked.backend,
            rows=asked.rows,
            max_model_len=length,
            prefix_cache_bytes=0,
            cost_aware=False,
            torch_threads=asked.threads,
        )
        with _warnings() as warned:
            llm = make(dtype=asked.dtype)
        yield from (Finding("load", "warn", record.getMessage()) for record in warned.buffer)
        if isinstance(llm.engine, Engine):
            code = "this project's forward" if llm.engine.lean else "the code of transformers"
            text = f"run by {code}; logits with the cache of {length} tokens are those of the model"
        else:
            text = f"run by vLLM, rows of up to {length} tokens"
        yield Finding("load", "ok", text)
        for rows in sorted({1, asked.rows}):
            yield _speed(llm.engine, rows, device)
        del llm
        _free()
        if inputs:
            yield from _comparison(make, asked, inputs, device)
    except Exception as error:  # any error of a library is a finding
        yield Finding("load", "fail", str(error) or type(error).__name__)


def _free() -> None:
    """Frees the memory of models that are no longer used; engines refer to themselves."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _comparison(
    make: "Callable[..., LLM]", asked: Examination, inputs: Sequence[str], device: str
) -> Iterator[Finding]:
    """Yields the speed of each kind of weights, and how many answers equal those of the first.

    Raises:
        KeyboardInterrupt: The answers were interrupted.
    """
    first, reference, speeds, rows = list[str](), "", dict[str, float](), asked.rows
    for name, given in KINDS.items():
        try:
            with _warnings() as warned:
                figures, found = _answered(make(**given), inputs, rows, device)
        except (ValueError, EngineError, ServiceError) as error:
            yield Finding(name, "warn", f"not possible here: {error}")
            continue
        finally:
            _free()
        if found.interrupted:
            raise KeyboardInterrupt
        answers = [answer.text for answer in found]
        if not speeds:
            first, reference = answers, name
        speeds[name] = figures["tokens_per_s"]
        equal = sum(a == b for a, b in zip(answers, first, strict=True))
        figures |= {"answers": len(answers), "equal": equal}
        text = (
            f"b = {rows}: {figures['tokens_per_s']:,.0f} tokens/s without drafts; {equal} of "
            f"{len(answers)} greedy answers are those of {reference}"
        )
        level: Level = "warn" if warned.buffer else "ok"
        yield Finding(
            name, level, "; ".join([text, *(r.getMessage() for r in warned.buffer)]), figures
        )
    if not speeds:
        return
    fastest = max(speeds, key=lambda name: speeds[name])
    option = "--quantization" if fastest == "int8-dynamic" else "--dtype"
    text = f"{fastest}; give `tasc task create` {option} {fastest} if its answers are good enough"
    yield Finding("fastest", "ok", text)


def _answered(
    llm: "LLM", inputs: Sequence[str], rows: int, device: str
) -> tuple[dict[str, float], "Completions"]:
    """The figures of steps of so many rows, and the greedy answers without drafts."""
    figures = dict(_speed(llm.engine, rows, device).figures)
    return figures, llm.generate(inputs, draft=False, progress=False)


@contextmanager
def _warnings() -> Iterator[BufferingHandler]:
    """Collects the engine's warnings in the block."""
    warned, log = BufferingHandler(99), logging.getLogger("tasc_engine")
    warned.setLevel(logging.WARNING)
    log.addHandler(warned)
    try:
        yield warned
    finally:
        log.removeHandler(warned)


def _dtype(dtype: str, device: str) -> Iterator[Finding]:
    flag = _FLAGS.get(dtype)
    if device == "cpu" and flag and not re.search(flag, Path("/proc/cpuinfo").read_text()):
        text = f"this processor has no instructions for {dtype}; --dtype float32 is faster"
        yield Finding("dtype", "warn", text)


def memory_finding(
    asked: Examination, folder: Path, length: int, device: str, gpu: "DeviceMemory | None"
) -> Finding:
    """Compares weights and KV cache with free memory; on a CPU, loading may take the weights twice.

    Args:
        length: Maximum tokens of a row.
        gpu: The memory of the device; None for a CPU.
    """
    size, config = _BYTES[asked.dtype], model_settings(folder / CONFIG)
    weights = sum(path.stat().st_size for path in weight_files(folder))
    if not config.get("quantization_config"):
        weights = size * sum(map(prod, float_shapes(folder).values()))
    each = _kv_bytes(config, size)
    kv, free = each * (asked.rows * length + 1), _free_bytes() if gpu is None else gpu.free
    text = (
        f"{weights / _GB:.2f} GB of weights and {kv / _GB:.2f} GB of KV cache for {asked.rows} "
        f"rows of {length} tokens; {free / _GB:.1f} GB are free on {device}"
    )
    figures = {"weights_bytes": weights, "kv_bytes": kv, "free_bytes": free}
    if gpu is not None:
        return _gpu_memory(text, figures, asked.rows, each * (length + 1), gpu)
    if weights + kv > free:
        text += ": lower --rows or --context, or use a smaller --dtype or --quantization of a task"
        return Finding("memory", "fail", text, figures)
    if 2 * weights + kv > free:
        text += "; loading may need the memory of the weights twice: close other programs"
        return Finding("memory", "warn", text, figures)
    return Finding("memory", "ok", text, figures)


def _gpu_memory(
    text: str, figures: Mapping[str, float], rows: int, row: int, gpu: "DeviceMemory"
) -> Finding:
    """Compares the KV cache with what is left for it beside the weights.

    Args:
        text, figures: The beginning of the finding, with ``weights_bytes`` and ``kv_bytes``.
        row: Bytes of one row of the maximum length.
    """
    from tasc_engine.config import EngineConfig
    from tasc_engine.kv.device_memory import DeviceMemory, room_for_cache

    weights = int(figures["weights_bytes"])
    loaded = DeviceMemory(gpu.total, max(gpu.free - weights, 0), gpu.used + weights)
    room = room_for_cache(loaded, EngineConfig()).nbytes
    text += f", {room / _GB:.2f} GB of it for the cache beside the weights"
    figures = {**figures, "room_bytes": room}
    if row > room:
        text += (
            f", but one row takes {row / _GB:.2f} GB: lower --context, use a smaller --dtype or "
            "--quantization of a task, or free memory of the GPU"
        )
        return Finding("memory", "fail", text, figures)
    if figures["kv_bytes"] > room:
        text += (
            f": {room // row} rows of that length fit at a time, and requests wait while there "
            f"are more of the {rows}; lower --rows or --context"
        )
        return Finding("memory", "warn", text, figures)
    return Finding("memory", "ok", text, figures)


def _kv_bytes(config: dict[str, Any], size: int) -> int:
    """Returns the KV cache bytes of one token in all layers; 0 if the settings lack the sizes."""

    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    heads = first("num_attention_heads", "n_head")
    width = first("head_dim") or first("hidden_size", "n_embd") // max(heads, 1)
    kv_heads = first("num_key_value_heads") or heads
    return first("num_hidden_layers", "n_layer") * 2 * kv_heads * width * size


def _free_bytes() -> int:
    """Returns the free memory of this machine and its container."""
    free = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    limits = [1024 * int(free[1])] if free else []
    limit = CGROUP / "memory.max"
    if limit.is_file() and (allowed := limit.read_text().strip()).isdecimal():
        used = int((CGROUP / "memory.current").read_text())
        given_back = re.search(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.M)
        limits.append(int(allowed) - used + (int(given_back[1]) if given_back else 0))
    return min(limits)


def _speed(engine: "BatchEngine", rows: int, device: str) -> Finding:
    from tasc_engine import Request

    prompt = tuple(range(1, 5))
    tokens = min(STEPS + 1, engine.longest - len(prompt))
    for row in range(rows):
        request = Request(str(row), prompt, tokens, draft=False, ignore_eos=True)
        engine.submit(request)
    seconds = list[float]()
    while engine.running or engine.waiting:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[1:])  # the first step reads the prompts
    text = (
        f"b = {rows}: {1e3 * step:.2f} ms a step, {rows / step:,.0f} tokens/s on {device} without "
        "drafts, at a short context"
    )
    return Finding("speed", "ok", text, {"rows": rows, "step_s": step, "tokens_per_s": rows / step})
