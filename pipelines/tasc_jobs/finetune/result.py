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

from tasc_draft.whole_file import flush
from tasc_engine.drafting.neural.files import as_readable_as
from tasc_jobs.enrich.enrichment import RECORD
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.checkpoints import DISK_FULL, REPORT
from tasc_jobs.finetune.model import AddedVocabulary, add_rows
from tasc_jobs.finetune.training import memory_to
from tasc_runtime.models import keep_prompt
from tasc_text import Template
from tasc_text.ends import TOKENIZER, named_ends


@dataclass(frozen=True)
class Made:
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


def card(made: Made, adapter: str, model: str) -> str:
    """Returns a model card in Markdown.

    Args:
        adapter, model: Names of the folders beside the card.
    """
    head = ["---", f"base_model: {made.base}", "library_name: peft", "---", ""]
    text = [
        f"# {Path(made.base).name}, fine-tuned by tasc-serve",
        "",
        "TASC-ft: new tokens for frequent n-grams of the task's outputs, their embeddings trained "
        "with a LoRA adapter.",
        f"`{adapter}` is the adapter, with the tokenizer; `{model}` has it in its weights.",
    ]
    if made.revision:
        text.append(f"It was trained on revision `{made.revision}` of its base.")
    sections = {"Data": made.data, "Settings": made.settings, "Metrics": made.metrics}
    for title, rows in sections.items():
        text += ["", f"## {title}", "", "| | |", "|---|---|"]
        text += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([*head, *text, ""])


if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER, MODEL, CARD = "adapter", "model", "README.md"
_BEGUN = "result.begun"
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
        self._begun = output / _BEGUN

    def begin(self, model: "PeftModel", base: str, revision: str | None) -> None:
        """Write the adapter, after removing the unfinished files of an earlier run.

        Args:
            base: Hub name or path of the base model.
        """
        folder = self._begun / ADAPTER
        config: Any = model.peft_config["default"]
        config.base_model_name_or_path, config.revision = base, revision
        with self._room(f"write an adapter to {self._output}"):
            discard(self._output)
            folder.mkdir(parents=True)
            # The adapter has only the new rows of the embeddings, not the whole matrices.
            model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / CARD).unlink(missing_ok=True)  # PEFT's unfilled card
            as_readable_as(folder / "adapter_config.json")
            self._add_tokenizer_and_prompt(folder)

    def end(self, base: Path, made: Made) -> None:
        """Merge the adapter into the base model and publish the result.

        The adapter is read from its saved files, so that the model is the same as the one that
        users of the adapter load.

        Args:
            base: Folder of the base model.
        """
        report = {key: value for key, value in asdict(made).items() if value is not None}
        with self._room(f"put the adapter into {base}"):
            self._write_model(self._merged(base), base)
            (self._begun / CARD).write_text(card(made, ADAPTER, MODEL), encoding="utf-8")
            (self._begun / REPORT).write_text(json.dumps(report, indent=1) + "\n")
            publish(self._begun, self._output)

    def _merged(self, base: Path) -> Any:
        from peft import PeftModel  # imports bitsandbytes, which is silenced by now

        try:
            model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True)
        except (*DISK_FULL, ValueError) as error:
            raise FinetuneError(
                f"{base} cannot be read any more: {error}; mend it and run the same command again, "
                "nothing is trained twice"
            ) from error
        add_rows(model, self._vocabulary.tokenizer.vocab_size, self._vocabulary.parts)
        return PeftModel.from_pretrained(model, self._begun / ADAPTER).merge_and_unload()

    def _write_model(self, whole: Any, base: Path) -> None:
        folder = self._begun / MODEL
        settings = folder / "generation_config.json"
        copied = (base / settings.name).is_file()
        if copied:  # transformers refuses to write some settings that it reads
            whole.generation_config = GenerationConfig()
        whole.save_pretrained(folder)
        as_readable_as(folder / "config.json")
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
        special = tokenizer.eos_id in tokenizer.special_ids  # else transformers makes it special
        if special or not set(named_ends(folder).get(TOKENIZER, ())) <= {*tokenizer.eos_ids}:
            for name in _NAME_END:
                if (folder / name).is_file():
                    _change(folder / name, eos_token=self._vocabulary.end if special else None)

    @contextmanager
    def _room(self, do: str) -> Iterator[None]:
        """Remove unfinished files after an error, and explain lack of disk space or memory."""
        way_out = "free some and run the same command again, nothing is trained twice"
        try:
            with memory_to(do, way_out):
                yield
        except Exception as error:
            discard(self._output)
            if not isinstance(error, DISK_FULL):
                raise
            raise FinetuneError(
                f"the model cannot be written to {self._output}: {error}; make room and run again, "
                "it goes on from its last checkpoint"
            ) from error


def discard(output: Path) -> None:
    """Remove the files that a run has written to ``output`` and not yet moved into place."""
    shutil.rmtree(output / _BEGUN, ignore_errors=True)


def publish(begun: Path, output: Path) -> None:
    """Move the content of ``begun`` into place, `REPORT` last, as it marks a complete result."""
    for folder, _, names in os.walk(begun):
        for name in names:
            flush(Path(folder, name))
        flush(Path(folder))
    for path in begun.iterdir():
        if path.name != REPORT:
            there = output / path.name
            if there.is_dir():  # from a run that was killed after this line
                shutil.rmtree(there)
            os.replace(path, there)
    flush(output)
    os.replace(begun / REPORT, output / REPORT)
    flush(output)
    begun.rmdir()


def _change(file: Path, **changes: Any) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FinetuneError(
            f"{file.name} of the model or its tokenizer is damaged ({error}); mend it and run again"
        ) from error
    file.write_text(json.dumps(content | changes, indent=2) + "\n", encoding="utf-8")
