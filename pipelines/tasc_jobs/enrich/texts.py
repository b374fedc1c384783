"""Where the texts come from that a tokenizer is enriched by: files, or a corpus in Redis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.tuning.task_rows import from_corpus
from tasc_runtime.models import load_tokenizer
from tasc_runtime.rows import Fields, read_corpus
from tasc_store import CorpusRow, CorpusStore, TaskStore, connect
from tasc_text import TaskTokenizer
from tasc_text.tokenizer_file import open_tokenizer


@dataclass(frozen=True)
class TextSource:
    """A tokenizer, and what a task is asked and answers."""

    tokenizer: TaskTokenizer
    inputs: list[str]
    outputs: list[str]


def file_source(
    paths: Sequence[Path], tokenizer: Path | None, eos: str | None, fields: tuple[str, str]
) -> TextSource:
    """Rows of files, given as names of the input's and the output's field.

    Raises:
        UsageError: No tokenizer was named.
        TokenizerError: It cannot be read.
        FileError: A file of rows cannot be read.
        EmptyCorpusError: The files hold no rows.
    """
    if tokenizer is None:
        raise UsageError("files do not say which tokenizer to enrich; name one with --tokenizer")
    return _source(open_tokenizer(tokenizer, eos), _some_rows(paths, fields))


def corpus_source(url: str, task: str, tokenizer: Path | None, eos: str | None) -> TextSource:
    """Rows of a task's corpus; without a tokenizer named, that of the task's model.

    Raises:
        StoreError: Redis fails, or has no such task.
        EmptyCorpusError: The corpus has no rows.
        ServiceError: The model's tokenizer is not the one the task was registered with.
    """
    with connect(url) as client:
        record = TaskStore(client).get(task)
        corpus = CorpusStore(client, record.corpus_name)
        rows = list(from_corpus(corpus, len(corpus)))
    if not rows:
        raise EmptyCorpusError(
            f"the corpus of {record.corpus_name} has no rows; run `tasc ingest` first"
        )
    return _source(open_tokenizer(tokenizer, eos) if tokenizer else load_tokenizer(record), rows)


def outputs_of(paths: Sequence[Path], fields: tuple[str, str]) -> list[str]:
    """The outputs of files' rows.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: The files hold no rows.
    """
    return [row.output for row in _some_rows(paths, fields)]


def _some_rows(paths: Sequence[Path], fields: tuple[str, str]) -> list[CorpusRow]:
    rows = list(read_corpus(paths, Fields(*fields)))
    if not rows:
        fields_named = f"{fields[0]!r} and {fields[1]!r}"
        raise EmptyCorpusError(
            f"no rows in {', '.join(map(str, paths))} with fields {fields_named}; name other files "
            "or their fields with --input-field and --output-field"
        )
    return rows


def _source(tokenizer: TaskTokenizer, rows: Sequence[CorpusRow]) -> TextSource:
    return TextSource(tokenizer, [row.input for row in rows], [row.output for row in rows])
