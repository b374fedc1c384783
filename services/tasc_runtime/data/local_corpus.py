"""A task's corpus in this process: rows of any origin, their token ids, and a draft index."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

import tasc_draft
import tasc_text
from tasc_draft import (
    DraftError,
    DraftIndex,
    DraftSettings,
    Int32,
    Tokens,
    build_index,
    build_learnt_index,
    read_index,
    write_index,
)
from tasc_draft.compiled import digest_of
from tasc_draft.files import cache_folder
from tasc_draft.replaying import answers
from tasc_runtime.data.row_texts import MESSAGES, RowTexts, is_chat
from tasc_runtime.data.rows import SUFFIXES, BadRow, Fields, read_corpus
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer, Template

log = logging.getLogger(__name__)

PROMPT_TOKENS = 3000  # number of last tokens to which a prompt is cut
_BATCH = 1000
_KEPT_S = 30 * 86_400.0
# Files, a table (pandas, Polars, Arrow, `datasets.Dataset`), pairs of input and output, or objects.
Corpus: TypeAlias = Any


def rows_of(corpus: Corpus, fields: Fields = Fields()) -> Iterator[CorpusRow]:
    """Yields rows of a corpus, in order. Outside files, the key of a row is its number.

    Args:
        corpus: One or several files of rows, a table with the columns of ``fields`` (pandas,
            Polars, Arrow, ``datasets.Dataset``), pairs of input and output, or objects with the
            fields. Values that are not texts are read by `RowTexts`.

    Raises:
        FileError: A file cannot be read, or one of its lines is not a row.
        TypeError: The corpus is none of these.
        ValueError: A column is missing, a row does not give two texts, or its output is blank.
    """
    paths = [corpus] if isinstance(corpus, str | Path) else corpus
    if isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths):
        yield from read_corpus([Path(p).expanduser() for p in paths], fields, _refuse)
        return
    no_rows = isinstance(corpus, bytes | Mapping) or hasattr(type(corpus), "collect")  # lazy table
    columns = None if no_rows else _columns(corpus, fields)
    if columns is None and (no_rows or not isinstance(corpus, Iterable)):
        parts = f" with {', '.join(map(str, corpus))}" if isinstance(corpus, Mapping) else ""
        raise TypeError(
            f"corpus is of type {type(corpus).__name__}{parts:.80}; give files "
            f"({', '.join(SUFFIXES)}), a table in memory with columns {fields.input!r} and "
            f"{fields.output!r}, such as one split of a data set, or pairs of input and output"
        )
    texts = RowTexts("the corpus")
    rows = corpus if columns is None else zip(*columns, strict=True)
    for number, row in enumerate(rows):
        yield _row(number, row, fields, texts)


def _refuse(bad: BadRow) -> None:
    raise FileError(f"{bad.file}, line {bad.line}: {bad.reason}; correct the line or leave it out")


def _columns(table: Any, fields: Fields) -> tuple[Iterable[Any], Iterable[Any]] | None:
    """The columns of input and output; None if ``table`` is not a table."""
    names = getattr(table, "column_names", None)  # Arrow's
    names = getattr(table, "columns", None) if names is None else names  # pandas'
    if names is None or callable(names):  # in Ray, `columns` is a method
        return None
    found = []
    for name in (fields.input, fields.output):
        if name not in names and MESSAGES not in names:
            known = ", ".join(map(str, names))
            raise ValueError(f"the table has no column {name!r}; it has {known}")
        found.append(_listed(table[name if name in names else MESSAGES]))
    return found[0], found[1]


def _listed(column: Any) -> Iterable[Any]:
    """Returns a column's values as Python objects; the column is of Arrow, pandas or Polars."""
    for method in ("to_pylist", "to_list"):
        if hasattr(column, method):
            return cast(Iterable[Any], getattr(column, method)())
    return cast(Iterable[Any], column)


def _row(number: int, given: Any, fields: Fields, texts: RowTexts) -> CorpusRow:
    row = {MESSAGES: given} if is_chat(given) else given
    if isinstance(row, Sequence) and not isinstance(row, str | bytes) and len(row) == 2:
        row = dict(zip((fields.input, fields.output), map(_plain, given), strict=True))
    try:
        if not isinstance(row, Mapping):
            raise ValueError("it is neither a pair nor an object")
        return CorpusRow(
            str(number), texts.input(row, fields.input), texts.output(row, fields.output)
        )
    except ValueError as error:
        raise ValueError(
            f"row {number} is {given!r:.80} ({error}); give two texts, an input and an output, or "
            f"an object with the fields {fields.input!r} and {fields.output!r}"
        ) from error


def _plain(value: Any) -> Any:
    """Converts a numpy value to a Python object; pandas keeps numpy arrays in columns."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class TokenRows:
    """Prompts, cut to their last 3,000 tokens, and whole outputs without end-of-sequence."""

    prompts: Tokens
    outputs: Tokens

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def tokens(self) -> int:
        return len(self.prompts.ids) + len(self.outputs.ids)

    def take(self, rows: NDArray[np.int64]) -> "TokenRows":
        return TokenRows(self.prompts.take(rows), self.outputs.take(rows))

    def answers(self, eos_id: int) -> list[tuple[Int32, Int32]]:
        """Prompt and answer of each row; the answer is cut to 512 tokens, plus end-of-sequence."""
        return answers(self.prompts, self.outputs, eos_id)


def encode(rows: Iterable[CorpusRow], tokenizer: TaskTokenizer, template: Template) -> TokenRows:
    """Encodes rows; prompts equal the prompts of requests with the same inputs."""
    prompts: list[Tokens] = []
    outputs: list[Tokens] = []
    rest = iter(rows)
    while batch := list(islice(rest, _BATCH)):
        encoded = template.encode_rows(tokenizer, [row.input for row in batch])
        prompts.append(Tokens.of([ids[-PROMPT_TOKENS:] for ids in encoded]))
        outputs.append(Tokens.of(tokenizer.encode_outputs([row.output for row in batch])))
    return TokenRows(_joined(prompts), _joined(outputs))


def _joined(parts: list[Tokens]) -> Tokens:
    if not parts:
        return Tokens.of([])
    return Tokens(
        np.concatenate([p.ids for p in parts]), np.concatenate([p.lengths for p in parts])
    )


def index_of(
    rows: TokenRows, tokenizer: TaskTokenizer, *, prompts: bool = True, max_bytes: int | None = None
) -> DraftIndex:
    """Builds the draft index of rows, without weights and optionally without their prompts.

    Args:
        max_bytes: Maximum bytes of the corpus part, if there is a cap.
    """
    return build_index(
        rows.outputs,
        rows.prompts if prompts else None,
        max_bytes=max_bytes,
        **tokenizer.index_facts,
    )


def learnt_index(
    rows: Iterable[CorpusRow],
    tokenizer: TaskTokenizer,
    template: Template,
    settings: DraftSettings,
) -> DraftIndex:
    """Builds the draft index of rows, with weights learnt on some of them.

    Args:
        settings: Settings of the proposer that will draft from the index.
    """
    found = encode(rows, tokenizer, template)
    facts = tokenizer.index_facts
    return build_learnt_index(found.outputs, found.prompts, settings=settings, **facts)


def local_index(
    rows: Sequence[CorpusRow],
    tokenizer: TaskTokenizer,
    template: Template,
    settings: DraftSettings,
    folder: Path | None = None,
) -> DraftIndex:
    """Returns `learnt_index`, which is built once for the same content.

    Args:
        folder: Folder where indexes are kept for a month after their last use; unset: in
            `cache_folder`. If the folder cannot be written, this is logged and nothing is kept.

    Raises:
        ValueError: There are no rows.
    """
    if not rows:
        raise ValueError("the corpus has no rows; give at least one, or leave corpus out")
    folder = cache_folder() / "local-indexes" if folder is None else folder
    path = folder / f"{_digest(rows, tokenizer, template, settings)}.tasc"
    if path.is_file():
        try:
            index = read_index(path)
            index.check_integrity()
            os.utime(path)
            return index
        except (DraftError, OSError) as error:
            log.warning("%s cannot be used (%s); it is built again", path, error)
    index = learnt_index(rows, tokenizer, template, settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_index(index, path)
        _remove_unused(folder)
    except OSError as error:
        log.warning("the index is not kept for the next start: %s", error)
    return index


def _digest(
    rows: Iterable[CorpusRow],
    tokenizer: TaskTokenizer,
    template: Template,
    settings: DraftSettings,
) -> str:
    """A digest of all that affects the index: program, weights, tokenizer, template and rows."""
    drafts, texts, own = (
        Path(p).parent for p in (tasc_draft.__file__, tasc_text.__file__, __file__)
    )
    facts = [
        digest_of(drafts, texts, own),
        tokenizer.fingerprint,
        template.identity,
        asdict(settings),
    ]
    found = hashlib.sha256(json.dumps(facts).encode())
    for weights in sorted(drafts.rglob("*.npz")):
        found.update(weights.read_bytes())
    for row in rows:
        found.update(json.dumps([row.input, row.output]).encode())
    return found.hexdigest()[:32]


def _remove_unused(folder: Path) -> None:
    """Removes indexes that no process has opened for a month, but no other files."""
    for other in folder.glob(f"{'[0-9a-f]' * 32}.tasc"):
        with suppress(OSError):  # another process may have removed it
            if time.time() - other.stat().st_mtime > _KEPT_S:
                other.unlink()
