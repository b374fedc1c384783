"""The options of `tasc task create` and `tasc task set`; other commands share some of them."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasc_draft.settings import MIXTURES, DraftSettings
from tasc_protocol import PARAMETERS
from tasc_store import NeuralDrafting, TaskRecord

_DRAFT_KEYS = ", ".join(f.name for f in fields(DraftSettings))


def _option(help_: str, default: object, *, panel: str | None = None) -> Any:
    return typer.Option(help=help_, show_default=str(default), rich_help_panel=panel)


_answers = partial(_option, panel="Answers")
_sampling = partial(_option, panel="Sampling")
_drafting = partial(_option, panel="Drafting")
_neural = partial(_option, panel="Drafting by a model")


@dataclass(frozen=True)
class PromptOptions:
    """Options of the prompt; None if an option was not given."""

    template: Annotated[
        str | None,
        _option(
            r"Prompt with {input} where the row's input goes; \n is a line break.", "that of --from"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _option(
            "auto for the model's own chat template, or a file with one; in place of --template.",
            "none",
        ),
    ] = None
    system_prompt: Annotated[
        str | None,
        _option("System prompt for conversations without one; needs a chat template.", "none"),
    ] = None
    few_shot: Annotated[
        Path | None,
        _option("File of rows that every prompt has as examples; needs a chat template.", "none"),
    ] = None


@dataclass(frozen=True)
class SamplingFlags:
    """Options of how tokens are chosen; None if an option was not given."""

    if TYPE_CHECKING:

        def __init__(self, **values: float | None) -> None: ...

    else:
        __annotations__ = {
            name: Annotated[
                (int if one.is_integer else float) | None,
                _sampling(one.option_help, f"{one.default:g}"),
            ]
            for name, one in PARAMETERS.items()
        }
        vars().update(dict.fromkeys(PARAMETERS))

    @property
    def parameters(self) -> dict[str, int | float]:
        """The values that were given, by name."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class AnswerOptions(SamplingFlags):
    """Options of constraints on answers and of how tokens are chosen; None if not given."""

    choices: Annotated[
        Path | None,
        _answers(
            "File of labels, UTF-8, one per line or a .json list. An answer is one of them.", "none"
        ),
    ] = None
    schema: Annotated[
        Path | None, _answers("File with the JSON schema of every answer.", "none")
    ] = None
    regex: Annotated[
        str | None, _answers("Regular expression that the whole answer matches.", "none")
    ] = None


@dataclass(frozen=True)
class TaskOptions(AnswerOptions, PromptOptions):
    """All options of a task; None if an option was not given."""

    model: Annotated[
        str | None, _option("Folder or Hugging Face name of the base model.", "that of --from")
    ] = None
    adapter: Annotated[str | None, _option("LoRA adapter of PEFT, folder or name.", "none")] = None
    adapters: Annotated[
        list[str] | None,
        _option(
            "NAME=FOLDER, repeatable: LoRA adapters. A request names one of them; otherwise "
            "it gets the first.",
            "none",
        ),
    ] = None
    revision: Annotated[str | None, _option("Revision of the model on the hub.", "main")] = None
    dtype: Annotated[
        str | None,
        _option(
            "float32, bfloat16, float16, float64; or auto, the fastest of this machine, which the "
            "task keeps.",
            TaskRecord.dtype,
        ),
    ] = None
    quantization: Annotated[
        str | None,
        _option(
            "nf4 (4 bits) or int8 weights; or int8-dynamic, exact int8 products on a CPU, or "
            "int8-dynamic-float-head, with a float32 LM head.",
            "none",
        ),
    ] = None
    allow_special_tokens_in_input: Annotated[
        bool | None,
        typer.Option(
            "--allow-special-tokens-in-input",
            help="Read special tokens such as <|im_end|> in inputs as tokens, not as text.",
            show_default="no",
        ),
    ] = None
    corpus: Annotated[str | None, _option("Task whose corpus to draft from.", "its own")] = None
    max_tokens: Annotated[
        int | None,
        _answers("Maximum tokens of an answer, end-of-sequence included.", TaskRecord.max_tokens),
    ] = None
    stop: Annotated[
        list[str] | None,
        _answers(r"Text that ends an answer; repeatable; \n is a line break.", "none"),
    ] = None
    choice: Annotated[
        list[str] | None,
        _answers("A label; repeatable. An answer is then one of the labels.", "none"),
    ] = None
    label_end: Annotated[
        str | None,
        _answers(
            "Text behind each label when probabilities of labels are asked for; for models whose "
            "answers go on there.",
            "end of sequence",
        ),
    ] = None
    abstain_below: Annotated[
        float | None,
        _answers(
            "Probability of the likeliest label below which a classification has no label.", "0"
        ),
    ] = None
    abstain_label: Annotated[
        str | None, _answers("Label of a classification below --abstain-below.", "none")
    ] = None
    mixture: Annotated[
        str | None,
        _drafting(f"{', '.join(MIXTURES)}; see `tasc replay --help`.", DraftSettings.mixture),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        _drafting(
            "Maximum draft tokens of a row in a step; 0: no drafts.",
            DraftSettings.num_speculative_tokens,
        ),
    ] = None
    min_prob: Annotated[
        float | None,
        _drafting("0 to 1: minimum probability of a drafted path.", DraftSettings.min_prob),
    ] = None
    draft: Annotated[
        list[str] | None,
        _drafting(
            f"KEY=VALUE, repeatable, for any of these: {_DRAFT_KEYS}. Settings that "
            "`tasc tune` found have priority.",
            "none",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        _neural("Neural drafter from `tasc train-drafter`: folder or name.", "none"),
    ] = None
    proposer: Annotated[
        str | None,
        _neural(
            "hybrid: n-grams and the drafter in one tree; neural: the drafter alone.",
            NeuralDrafting.proposer,
        ),
    ] = None
    draft_vocabulary: Annotated[
        str | None,
        _neural(
            "Tokens that the drafter can draft: full, ranked (`tasc rank-vocabulary`), recent, "
            "recent+ranked.",
            NeuralDrafting.vocabulary,
        ),
    ] = None
    ranked_tokens: Annotated[
        int | None, _neural("Number of ranked tokens.", NeuralDrafting.ranked_tokens)
    ] = None
    draft_depth: Annotated[
        int | None, _neural("Depth of the drafter's tree.", NeuralDrafting.depth)
    ] = None
    draft_width: Annotated[
        int | None, _neural("Number of nodes to expand per level.", NeuralDrafting.width)
    ] = None
    draft_nodes: Annotated[
        int | None, _neural("Maximum draft tokens in the tree.", NeuralDrafting.nodes)
    ] = None
    draft_sure: Annotated[
        float | None,
        _neural(
            "0 to 1: hybrid uses the drafter if the n-grams' best token is less likely than this.",
            NeuralDrafting.sure,
        ),
    ] = None
