"""Whether a model can do what a task's record asks of it: its tokenizer, its length, its guide.

The record's own rules hold already. No weights are read.
"""

from collections.abc import Callable

from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.adapter import check_adapter
from tasc_jobs.tasks.base_model import BaseModel
from tasc_jobs.tasks.drafter import check_drafter
from tasc_runtime.sampling_options import guide_of
from tasc_store import TaskRecord
from tasc_text import PromptTemplate, resolve_folder

_TEXT = "a"  # in every vocabulary
_CUT = "\ufffd"  # what decoders write for bytes that are no character


def check_record(record: TaskRecord, model: BaseModel) -> None:
    """Every check there is, the quick ones first.

    Raises:
        UsageError: The model cannot do it; the message names option, value, limit and way out.
    """
    for check in _CHECKS:
        check(record, model)


def _check_template(record: TaskRecord, model: BaseModel) -> None:
    _require_unicode("--template", record.template)
    prompt = model.tokenizer.encode_prompt(PromptTemplate(record.template).render(_TEXT))
    if not prompt:
        raise UsageError(
            f"--template {record.template!r} gives no tokens of this tokenizer; put words in it"
        )
    if model.positions is not None and len(prompt) >= model.positions:
        raise UsageError(
            f"--template has {len(prompt)} tokens without its input, the model was made for "
            f"{model.positions} positions; shorten it"
        )


def _check_quantization(record: TaskRecord, model: BaseModel) -> None:
    if record.quantization and model.quantized:
        raise UsageError(
            f"--quantization is {record.quantization}, and {model.folder} is quantised already; "
            "leave it out, or name the model in full"
        )


def _check_length(record: TaskRecord, model: BaseModel) -> None:
    most = model.positions
    if most is not None and record.max_tokens >= most:
        raise UsageError(
            f"--max-tokens is {record.max_tokens}, the model was made for {most} positions, the "
            f"prompt's included; give less than {most}"
        )


def _check_stops(record: TaskRecord, model: BaseModel) -> None:
    for stop in record.stop:
        _require_unicode("--stop", stop)
        if _CUT in stop:
            raise UsageError(f"--stop {stop!r} was cut inside a character; give whole characters")
        # Inside a text: at its begin decoders drop a blank.
        (ids,) = model.tokenizer.encode_outputs([_TEXT + stop + _TEXT])
        if stop not in (text := model.tokenizer.decode(ids)):
            raise UsageError(
                f"--stop {stop!r} is never in an answer: this tokenizer makes "
                f"{text.removeprefix(_TEXT).removesuffix(_TEXT)!r} of it; give text, and for a "
                "special token nothing: those that end an answer are in generation_config.json"
            )


def _check_labels(record: TaskRecord, model: BaseModel) -> None:
    """What a label is in tokens, its guide checks."""
    for label in record.choices:
        if stop := next((s for s in record.stop if s in label), None):
            raise UsageError(
                f"--choice {label!r} holds the stop string {stop!r}, which would cut it; leave one "
                "of them out"
            )


def _check_adapters(record: TaskRecord, model: BaseModel) -> None:
    given = [(f"--adapters {name}={place}", place) for name, place in record.adapters]
    if record.adapter is not None:
        given.append((f"--adapter {record.adapter}", record.adapter))
    for said, place in given:
        try:
            check_adapter(resolve_folder(place), model.folder)
        except (ValueError, OSError) as error:
            raise UsageError(f"{said}: {error}") from error


def _check_guide(record: TaskRecord, model: BaseModel) -> None:
    guide = guide_of(record)
    if guide is None:
        return
    from tasc_engine.guided import Guides

    option = {"choice": "--choices", "json_schema": "--schema"}.get(guide.spec.kind, "--regex")
    try:
        Guides(model.tokenizer, model.vocab_size).of(guide.spec, record.max_tokens)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


_CHECKS: tuple[Callable[[TaskRecord, BaseModel], None], ...] = (
    _check_quantization,
    _check_length,
    _check_template,
    _check_stops,
    _check_adapters,
    check_drafter,
    _check_labels,
    _check_guide,
)


def _require_unicode(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{option} {text!r} holds bytes that are no character; write whole ones, in UTF-8"
        ) from None
