"""The options of `tasc task create` and `tasc task set`."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tasc_draft.settings import MIXTURES, DraftSettings
from tasc_store import NeuralDrafting, TaskRecord

_DRAFT_KEYS = ", ".join(f.name for f in fields(DraftSettings))


def _option(help_: str, default: object, *, panel: str | None = None) -> Any:
    return typer.Option(help=help_, show_default=str(default), rich_help_panel=panel)


_answers = partial(_option, panel="Answers")
_sampling = partial(_option, panel="Sampling defaults")
_drafting = partial(_option, panel="Drafting")
_neural = partial(_option, panel="Drafting by a model")


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
        int | None, _answers("Length limit of an answer, its end counted.", TaskRecord.max_tokens)
    ] = None
    stop: Annotated[
        list[str] | None,
        _answers(r"Text that ends an answer; repeatable; \n is a line break.", "none"),
    ] = None
    choice: Annotated[
        list[str] | None,
        _answers("A label; repeatable. An answer is then one of the labels.", "none"),
    ] = None
    choices: Annotated[
        Path | None, _answers("File of labels: one a line in UTF-8, or a .json list.", "none")
    ] = None
    schema: Annotated[
        Path | None, _answers("File with the JSON schema of every answer.", "none")
    ] = None
    regex: Annotated[str | None, _answers("Expression that a whole answer matches.", "none")] = None
    temperature: Annotated[float | None, _sampling("0 takes the likeliest token, to 100.", 0)] = (
        None
    )
    top_p: Annotated[
        float | None, _sampling("Above 0, to 1: share of probability drawn from.", 1)
    ] = None
    top_k: Annotated[int | None, _sampling("Likeliest tokens drawn from; 0: all.", 0)] = None
    min_p: Annotated[
        float | None, _sampling("0 to 1: least probability, as a part of the greatest.", 0)
    ] = None
    repetition_penalty: Annotated[float | None, _sampling("Above 0, to 100; 1 is none.", 1)] = None
    presence_penalty: Annotated[float | None, _sampling("-100 to 100.", 0)] = None
    frequency_penalty: Annotated[float | None, _sampling("-100 to 100.", 0)] = None
    mixture: Annotated[
        str | None,
        _drafting(f"{', '.join(MIXTURES)}; see `tasc replay --help`.", DraftSettings.mixture),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        _drafting(
            "Most draft tokens of a row's step; 0: no drafts.", DraftSettings.num_speculative_tokens
        ),
    ] = None
    min_prob: Annotated[
        float | None, _drafting("0 to 1: no path less likely.", DraftSettings.min_prob)
    ] = None
    draft: Annotated[
        list[str] | None,
        _drafting(
            f"KEY=VALUE, repeatable, of any of these: {_DRAFT_KEYS}. What `tasc tune` "
            "found counts before.",
            "none",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        _neural("Draft by this, too: what `tasc train-drafter` made, folder or name.", "none"),
    ] = None
    proposer: Annotated[
        str | None,
        _neural(
            "hybrid, n-grams and the drafter in one tree, or neural, the drafter alone.",
            NeuralDrafting.proposer,
        ),
    ] = None
    draft_vocabulary: Annotated[
        str | None,
        _neural(
            "full, ranked (`tasc rank-vocabulary`), recent, recent+ranked.",
            NeuralDrafting.vocabulary,
        ),
    ] = None
    ranked_tokens: Annotated[
        int | None, _neural("Tokens of the ranking.", NeuralDrafting.ranked_tokens)
    ] = None
    draft_depth: Annotated[
        int | None, _neural("Levels of the drafter's tree.", NeuralDrafting.depth)
    ] = None
    draft_width: Annotated[
        int | None, _neural("Nodes expanded of a level.", NeuralDrafting.width)
    ] = None
    draft_nodes: Annotated[
        int | None, _neural("Most draft tokens of the tree.", NeuralDrafting.nodes)
    ] = None
    draft_sure: Annotated[
        float | None,
        _neural(
            "0 to 1: hybrid, below this probability of the n-grams the drafter is asked.",
            NeuralDrafting.sure,
        ),
    ] = None
