"""Writes the result of a fine-tune: an adapter for transformers and PEFT, a merged model, a card.

The folder has ``adapter``, which `peft.AutoPeftModelForCausalLM` loads, and ``model``, the base
model with the adapter merged into its weights, which any engine serves. Everything is first written
to a temporary folder and then moved into place, ``finetune.json`` last, so a folder with this file
is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, GenerationConfig

from tasc_draft.files import flush
from tasc_runtime.models import keep_prompt
from tasc_text import Template
from tasc_text.ends import TOKENIZER, named_ends
from tasc_train.enrich.enrichment import RECORD
from tasc_train.errors import FinetuneError
from tasc_train.finetune.checkpoints import DISK_FULL, REPORT
from tasc_train.finetune.model import AddedVocabulary, add_rows
from tasc_train.finetune.training import memory_to


@dataclass(frozen=True)
class Report:
    """The content of the report and the model card of a fine-tune.

    Attributes:
        base: Hub name or path of the base model.
        revision: Revision of the base model on the Hugging Face Hub.
        data: Source and number of the rows.
        settings: Settings needed to reproduce the fine-tune.
        metrics: Measurements by name.
        run: A hash of all inputs and settings.
    """

    base: str
    revision: str | None
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    run: str


def card(report: Report, adapter: str, model: str) -> str:
    """Returns a model card in Markdown.

    Args:
        adapter, model: Names of the folders beside the card.
    """
    head = ["---", f"base_model: {report.base}", "library_name: peft", "---", ""]
    text = [
        f"# {Path(report.base).name}, fine-tuned by tasc-serve",
        "",
        "TASC-ft: new tokens for frequent n-grams of the task's outputs, their embeddings trained "
        "with a LoRA adapter.",
        f"`{adapter}` has the adapter and the tokenizer. `{model}` has the base model, with the "
        "adapter merged into its weights, and the tokenizer.",
    ]
    if report.revision:
        text.append(f"The base model has revision `{report.revision}`.")
    sections = {"Data": report.data, "Settings": report.settings, "Metrics": report.metrics}
    for title, rows in sections.items():
        text += ["", f"## {title}", "", "| | |", "|---|---|"]
        text += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([*head, *text, ""])


if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER, MODEL, CARD = "adapter", "model", "README.md"
_UNFINISHED = "result.unfinished"
_NAME_END = "tokenizer_config.json", "special_tokens_map.json"
_TOKENIZER_FILES = "tokenizer.json", *_NAME_END, "chat_template.jinja", RECORD


class Result:
    """Writes a result to a folder.

    Every method raises FinetuneError if the result cannot be written, the base cannot be read, or
    there is too little memory. In that case the files written so far are removed.

    Args:
        output: The output folder of `finetune`; it must exist.
        template: The prompt of the training, which is saved with the model and the adapter.
    """

    def __init__(self, output: Path, vocabulary: AddedVocabulary, template: Template) -> None:
        self._output, self._vocabulary, self._template = output, vocabulary, template
        self._unfinished = output / _UNFINISHED

    def write_adapter(self, model: "PeftModel", base: str, revision: str | None) -> None:
        """Write the adapter, after removing the unfinished files of an earlier run.

        Args:
            base: Hub name or path of the base model.
        """
        folder = self._unfinished / ADAPTER
        config: Any = model.peft_config["default"]
        config.base_model_name_or_path, config.revision = base, revision
        with self._room(f"write an adapter to {self._output}"):
            discard(self._output)
            folder.mkdir(parents=True)
            # The adapter has only the new rows of the embeddings, not the whole matrices.
            model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / CARD).unlink(missing_ok=True)  # PEFT writes a card without content
            _make_weights_readable(folder / "adapter_config.json")
            self._add_tokenizer_and_prompt(folder)

    def write_model(self, base: Path, report: Report) -> None:
        """Merge the adapter into the base model and publish the result.

        The adapter is read from its saved files, so that the model is the same as the one that
        users of the adapter load.

        Args:
            base: Folder of the base model.
        """
        content = {key: value for key, value in asdict(report).items() if value is not None}
        with self._room(f"merge the adapter into {base}"):
            self._save_model(self._merged(base), base)
            (self._unfinished / CARD).write_text(card(report, ADAPTER, MODEL), encoding="utf-8")
            (self._unfinished / REPORT).write_text(json.dumps(content, indent=1) + "\n")
            publish(self._unfinished, self._output)

    def _merged(self, base: Path) -> Any:
        from peft import PeftModel  # imports bitsandbytes; see `adapted`

        try:
            model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True)
        except (*DISK_FULL, ValueError) as error:
            raise FinetuneError(
                f"{base} cannot be read: {error}; repair it and run the same command again; no "
                "step is repeated"
            ) from error
        add_rows(model, self._vocabulary.tokenizer.vocab_size, self._vocabulary.parts)
        return PeftModel.from_pretrained(model, self._unfinished / ADAPTER).merge_and_unload()

    def _save_model(self, model: Any, base: Path) -> None:
        folder = self._unfinished / MODEL
        settings = folder / "generation_config.json"
        copied = (base / settings.name).is_file()
        if copied:  # transformers refuses to write some settings that it reads
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder)
        _make_weights_readable(folder / "config.json")
        if copied:
            shutil.copyfile(base / settings.name, settings)
        elif not settings.is_file():
            settings.write_text("{}")
        for file in (settings, folder / "config.json"):
            _change(file, eos_token_id=self._vocabulary.ends)
        self._add_tokenizer_and_prompt(folder)

    def _add_tokenizer_and_prompt(self, folder: Path) -> None:
        keep_prompt(folder, self._template)
        for name in _TOKENIZER_FILES:
            file = self._vocabulary.tokenizer.path.parent / name
            if file.is_file():
                shutil.copyfile(file, folder / name)
        tokenizer = self._vocabulary.tokenizer
        # An EOS token that is not special is not named, because transformers would make it special.
        special = tokenizer.eos_id in tokenizer.special_ids
        if special or not set(named_ends(folder).get(TOKENIZER, ())) <= {*tokenizer.eos_ids}:
            for name in _NAME_END:
                if (folder / name).is_file():
                    _change(folder / name, eos_token=self._vocabulary.end if special else None)

    @contextmanager
    def _room(self, action: str) -> Iterator[None]:
        """Remove unfinished files after an error, and explain lack of disk space or memory."""
        way_out = "free memory and run the same command again; no step is repeated"
        try:
            with memory_to(action, way_out):
                yield
        except Exception as error:
            discard(self._output)
            if not isinstance(error, DISK_FULL):
                raise
            raise FinetuneError(
                f"the model cannot be written to {self._output}: {error}; free disk space and run "
                "the same command again; no step is repeated"
            ) from error


def discard(output: Path) -> None:
    """Remove the files that a run has written to ``output`` and not yet moved into place."""
    shutil.rmtree(output / _UNFINISHED, ignore_errors=True)


def publish(unfinished: Path, output: Path) -> None:
    """Move the content of a folder into place; `REPORT` last, as it marks a complete result."""
    for folder, _, names in os.walk(unfinished):
        for name in names:
            flush(Path(folder, name))
        flush(Path(folder))
    for path in unfinished.iterdir():
        if path.name != REPORT:
            place = output / path.name
            if place.is_dir():  # moved by a run that was killed before its end
                shutil.rmtree(place)
            os.replace(path, place)
    flush(output)
    os.replace(unfinished / REPORT, output / REPORT)
    flush(output)
    unfinished.rmdir()


def _make_weights_readable(config: Path) -> None:
    """Gives weight files the permissions of the config, because safetensors restricts theirs."""
    for weights in config.parent.glob("*.safetensors"):
        shutil.copymode(config, weights)


def _change(file: Path, **changes: Any) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FinetuneError(
            f"{file.name} of the model or its tokenizer is damaged ({error}); repair it and run "
            "again"
        ) from error
    file.write_text(json.dumps(content | changes, indent=2) + "\n", encoding="utf-8")
