"""The target's own answers, on which a drafter is trained, and the file that stores them.

A resumed run makes only the missing answers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from tasc_draft.files import whole_file
from tasc_engine import ModelSource
from tasc_engine.drafting.neural.card import target_fingerprint
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import GenerationSettings
from tasc_runtime.data.rows import check_file, json_line, read_raw_rows
from tasc_runtime.engine_settings import fault_of
from tasc_runtime.errors import FileError
from tasc_runtime.progress import StageProgress
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer, Template
from tasc_train.evaluate.measured_model import MeasuredModel, Setup
from tasc_train.finetune.examples import Example

ANSWERS, _INPUTS = "answers.jsonl", "asked.json"
_MIN_TOKENS = 3  # of a row, because an EAGLE head first predicts the third token


@dataclass(frozen=True)
class TargetAnswer:
    """An answer of the target.

    Attributes:
        ids: Token ids of the answer, with end-of-sequence if the target generated one; None if only
            the text is known.
    """

    id: str
    input: str
    output: str
    ids: Annotated[tuple[StrictInt, ...], Field(min_length=1)] | None = None


def make_answers(
    folder: Path,
    rows: Sequence[CorpusRow],
    source: ModelSource,
    generation: GenerationSettings,
    setup: Setup,
    progress: StageProgress,
) -> list[TargetAnswer]:
    """Returns greedy answers to the rows' inputs, in the order of the rows.

    Rows whose prompts leave no room for an answer are left out.

    Args:
        folder: Folder of ``answers.jsonl``, to which each new answer is appended. Answers that it
            already has are not made again.

    Raises:
        JobError: The target cannot be loaded, or the answers in the folder were made by another
            target or with other settings.
        FileError: The answers in the folder cannot be read.
    """
    file = folder / ANSWERS
    _pin(folder, source, generation)
    found = {
        (a.id, a.input): a
        for a in (read_answers(_without_partial_line(file)) if file.exists() else ())
    }
    left = [row for row in rows if (row.key, row.input) not in found]
    known = len(rows) - len(left)
    progress("answer", known, len(rows))
    if left:
        measured = MeasuredModel(source, generation, setup)
        measured.draft_from(measured.index(rows))
        for done, answer in enumerate(_appended(file, _answered(measured, left)), known + 1):
            found[answer.id, answer.input] = answer
            progress("answer", done, len(rows))
    return [found[row.key, row.input] for row in rows if (row.key, row.input) in found]


def read_answers(path: Path) -> list[TargetAnswer]:
    """Reads a file of answers.

    Raises:
        FileError: A line, named in the message, is not an answer, or the file cannot be read.
    """
    found: list[TargetAnswer] = []
    parser = TypeAdapter(TargetAnswer)
    check_file(path)
    try:
        for record in read_raw_rows(path):
            try:
                found.append(parser.validate_python(record.value))
            except ValidationError as error:
                why = record.reason or fault_of(error)
                raise FileError(
                    f"line {record.line} of {path} is not an answer: {why}; remove the line"
                ) from error
    except OSError as error:
        raise FileError(f"cannot read answers from {path}: {error}") from error
    return found


def examples_of(
    answers: Sequence[TargetAnswer],
    tokenizer: TaskTokenizer,
    template: Template,
    max_length: int,
) -> tuple[list[Example], int]:
    """Returns the usable answers as examples, and the number of unusable answers.

    An answer is unusable if it and its prompt have too few or too many tokens, or if the prompt has
    none.

    Raises:
        FileError: An answer has a token id that the tokenizer does not have.
    """
    found = []
    for answer in answers:
        prompt = template.encode(tokenizer, answer.input)
        ids = answer.ids or (*tokenizer.encode_outputs([answer.output])[0], tokenizer.eos_id)
        if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise FileError(
                f"the answer {answer.id} has token ids from {min(ids)} to {max(ids)}, but the "
                f"tokenizer has {tokenizer.vocab_size} tokens; use answers of this target"
            )
        found.append(Example((*prompt, *ids), len(prompt)))
    kept = [e for e in found if e.prompt and _MIN_TOKENS <= len(e.ids) <= max_length]
    return kept, len(found) - len(kept)


def _answered(measured: MeasuredModel, rows: Sequence[CorpusRow]) -> Iterator[TargetAnswer]:
    prompts = measured.prompts([row.input for row in rows])
    for at, result in measured.answers(prompts, draft=True):
        yield TargetAnswer(rows[at].key, rows[at].input, result.text, result.tokens)


def _appended(file: Path, answers: Iterator[TargetAnswer]) -> Iterator[TargetAnswer]:
    """Yields the answers after appending each to the file."""
    with file.open("ab") as out:
        for answer in answers:
            out.write(json_line(asdict(answer)))
            out.flush()
            yield answer


def _without_partial_line(file: Path) -> Path:
    """Removes an unfinished last line of a killed run, and returns the file."""
    whole = file.read_bytes().rfind(b"\n") + 1
    with file.open("r+b") as stream:
        stream.truncate(whole)
    return file


def _pin(folder: Path, source: ModelSource, generation: GenerationSettings) -> None:
    """Records in the folder the inputs that determine answers, or compares them with the record."""
    inputs = {
        "target": target_fingerprint(source.folder, source.adapter),
        "template": generation.template.identity,
        "max_tokens": generation.max_tokens,
        "stop": list(generation.stop),
    }
    pinned = folder / _INPUTS
    folder.mkdir(parents=True, exist_ok=True)
    if not pinned.exists():
        with whole_file(pinned) as out:
            out.write(json_line(inputs))
    pins = json.loads(pinned.read_text(encoding="utf-8"))
    if changed := [name for name in inputs if pins.get(name) != inputs[name]]:
        raise JobError(
            f"{folder / ANSWERS} was made with another {', '.join(changed)}; choose another output"
        )
