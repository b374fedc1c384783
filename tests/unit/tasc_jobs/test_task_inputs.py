"""A job's model, prompt and rows: options count, a task's record says the rest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import refused
from tasc_draft import DraftSettings
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.task_inputs import GenerationSettings, InputOptions, TaskInputs, read_files
from tasc_runtime.data.rows import Fields
from tasc_store import TaskRecord
from tasc_text import PromptTemplate

RECORD = TaskRecord(
    "t", "org/model", "f", "say {input}", max_tokens=7, stop=(".",), draft=DraftSettings(n_max=4)
)
SEVERAL = replace(RECORD, adapters=(("a", "org/a"), ("b", "org/b")))


@pytest.mark.parametrize(
    ("options", "record", "wanted", "named"),
    [
        ({}, None, "source", "--model"),
        ({}, None, "template", "--template"),
        ({}, None, "tokenizer", "--tokenizer"),
        ({"model": "m", "dtype": "int4"}, None, "source", "int4"),
        ({"adapter": "a"}, RECORD, "source", "--adapter a"),
        ({}, SEVERAL, "source", "a, b"),
    ],
)
def test_what_neither_options_nor_the_record_say_is_named(
    options: dict[str, Any], record: TaskRecord | None, wanted: str, named: str
) -> None:
    with refused(UsageError, named):
        getattr(TaskInputs(InputOptions(**options), record, ()), wanted)


@pytest.mark.parametrize(
    ("options", "record", "expected"),
    [
        ({}, RECORD, (RECORD.template, 7, (".",), RECORD.draft)),
        (
            {"template": r"{input}\n", "max_tokens": 9},
            RECORD,
            ("{input}\n", 9, (".",), RECORD.draft),
        ),
        ({"template": "{input}"}, None, ("{input}", TaskRecord.max_tokens, (), DraftSettings())),
    ],
)
def test_options_count_before_the_record(
    options: dict[str, Any], record: TaskRecord | None, expected: tuple[Any, ...]
) -> None:
    template, *rest = expected
    found = TaskInputs(InputOptions(**options), record, ()).generation
    assert found == GenerationSettings(PromptTemplate(template), *rest)


def test_without_a_store_rows_are_those_of_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{i}", "a": "x"}}\n' for i in range(3)))
    options = InputOptions("t", files=[path], fields=Fields("q", "a"), limit=2)
    assert [row.input for row in TaskInputs.read(None, options).some_rows] == ["0", "1"]
    assert not TaskInputs.read(None, options, with_rows=False).rows
    with refused(EmptyCorpusError, path.name, "'input'"):
        read_files([path], Fields())
    with refused(EmptyCorpusError, "task t"):
        _ = TaskInputs.read(None, InputOptions("t")).some_rows
