"""The options that say what a task is, once for all commands that take them."""

import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from tasc_draft.settings import MIXTURES, DraftSettings
from tasc_store import NeuralDrafting, TaskRecord

_DRAFT_KEYS = ", ".join(f.name for f in fields(DraftSettings))
_ANSWERS, _SAMPLING, _DRAFTING = "Answers", "Sampling defaults", "Drafting"
_NEURAL = "Drafting by a model"


def _option(help_: str, default: object, panel: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=help_, show_default=str(default), rich_help_panel=panel)


@dataclass(frozen=True)
class TaskOptions:
    """What was given on the command line; None where an option was not."""

    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name of the base model.")
    ] = None
    template: Annotated[
        str | None,
        typer.Option(help=r"Prompt with {input} where the row's input goes; \n is a line break."),
    ] = None
    adapter: Annotated[str | None, _option("LoRA adapter of PEFT, folder or name.", "none")] = None
    adapters: Annotated[
        list[str] | None,
        _option(
            "NAME=FOLDER, repeatable: LoRA adapters of which each request names one, or gets the "
            "first.",
            "none",
        ),
    ] = None
    revision: Annotated[str | None, _option("Revision of the model on the hub.", "main")] = None
    dtype: Annotated[
        str | None, _option("float32, bfloat16, float16, float64", TaskRecord.dtype)
    ] = None
    quantization: Annotated[str | None, _option("nf4 (4 bits) or int8 weights.", "none")] = None
    corpus: Annotated[str | None, _option("Draft from this task's corpus.", "its own")] = None
    max_tokens: Annotated[
        int | None,
        _option("Length limit of an answer, its end counted.", TaskRecord.max_tokens, _ANSWERS),
    ] = None
    stop: Annotated[
        list[str] | None,
        _option(r"Text that ends an answer; repeatable; \n is a line break.", "none", _ANSWERS),
    ] = None
    choice: Annotated[
        list[str] | None,
        _option("A label; repeatable. An answer is then one of the labels.", "none", _ANSWERS),
    ] = None
    choices: Annotated[
        Path | None,
        _option("File of labels: one a line in UTF-8, or a .json list.", "none", _ANSWERS),
    ] = None
    schema: Annotated[
        Path | None, _option("File with the JSON schema of every answer.", "none", _ANSWERS)
    ] = None
    regex: Annotated[
        str | None, _option("Expression that a whole answer matches.", "none", _ANSWERS)
    ] = None
    temperature: Annotated[
        float | None, _option("0 takes the likeliest token, to 100.", 0, _SAMPLING)
    ] = None
    top_p: Annotated[
        float | None, _option("Above 0, to 1: share of probability drawn from.", 1, _SAMPLING)
    ] = None
    top_k: Annotated[int | None, _option("Likeliest tokens drawn from; 0: all.", 0, _SAMPLING)] = (
        None
    )
    min_p: Annotated[
        float | None,
        _option("0 to 1: least probability, as a part of the greatest.", 0, _SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None, _option("Above 0, to 100; 1 is none.", 1, _SAMPLING)
    ] = None
    presence_penalty: Annotated[float | None, _option("-100 to 100.", 0, _SAMPLING)] = None
    frequency_penalty: Annotated[float | None, _option("-100 to 100.", 0, _SAMPLING)] = None
    mixture: Annotated[
        str | None,
        _option(
            f"{', '.join(MIXTURES)}; see `tasc replay --help`.", DraftSettings.mixture, _DRAFTING
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        _option(
            "Most draft tokens of a row's step; 0: no drafts.",
            DraftSettings.num_speculative_tokens,
            _DRAFTING,
        ),
    ] = None
    min_prob: Annotated[
        float | None, _option("0 to 1: no path less likely.", DraftSettings.min_prob, _DRAFTING)
    ] = None
    draft: Annotated[
        list[str] | None,
        _option(
            f"KEY=VALUE, repeatable, of any of these: {_DRAFT_KEYS}. What `tasc tune` "
            "found counts before.",
            "none",
            _DRAFTING,
        ),
    ] = None
    drafter: Annotated[
        str | None,
        _option("Draft by this, too: what `tasc train-drafter` made, folder or name.", "none",
                _NEURAL),
    ] = None  # fmt: skip
    proposer: Annotated[
        str | None,
        _option("hybrid, n-grams and the drafter in one tree, or neural, the drafter alone.",
                NeuralDrafting.proposer, _NEURAL),
    ] = None  # fmt: skip
    draft_vocabulary: Annotated[
        str | None,
        _option("full, ranked (`tasc rank-vocabulary`), recent, recent+ranked.",
                NeuralDrafting.vocabulary, _NEURAL),
    ] = None  # fmt: skip
    ranked_tokens: Annotated[
        int | None, _option("Tokens of the ranking.", NeuralDrafting.ranked_tokens, _NEURAL)
    ] = None
    draft_depth: Annotated[
        int | None, _option("Levels of the drafter's tree.", NeuralDrafting.depth, _NEURAL)
    ] = None
    draft_width: Annotated[
        int | None, _option("Nodes expanded of a level.", NeuralDrafting.width, _NEURAL)
    ] = None
    draft_nodes: Annotated[
        int | None, _option("Most draft tokens of the tree.", NeuralDrafting.nodes, _NEURAL)
    ] = None
    draft_sure: Annotated[
        float | None,
        _option("0 to 1: hybrid, below this probability of the n-grams the drafter is asked.",
                NeuralDrafting.sure, _NEURAL),
    ] = None  # fmt: skip


Command = Callable[..., None]


def spread(*, required: Collection[str] = (), defaults: bool) -> Callable[[Command], Command]:
    """Makes a command of one that takes `TaskOptions` as ``options``: an option for each field.

    Args:
        required: Fields that must be given.
        defaults: Whether help says what counts where an option is not given.
    """

    def spread_out(command: Command) -> Command:
        names = [f.name for f in fields(TaskOptions)]

        @wraps(command)
        def called(**values: Any) -> None:
            given = TaskOptions(**{name: values.pop(name) for name in names})
            command(options=given, **values)

        called.__signature__ = _spread(  # type: ignore[attr-defined]
            inspect.signature(command), required, defaults
        )
        return called

    return spread_out


def _spread(
    signature: inspect.Signature, required: Collection[str], defaults: bool
) -> inspect.Signature:
    parameters = []
    for parameter in signature.parameters.values():
        of_task = [_parameter(f, f.name in required, defaults) for f in fields(TaskOptions)]
        parameters += of_task if parameter.annotation is TaskOptions else [parameter]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    return signature.replace(parameters=keywords)


def _parameter(field: Any, required: bool, defaults: bool) -> inspect.Parameter:
    assert get_origin(field.type) is Annotated
    kind, option = get_args(field.type)
    said = copy(option)
    if not defaults:
        said.show_default = False
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind, said],
    )
