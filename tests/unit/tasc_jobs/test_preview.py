"""Tests that a preview uses the engine's batch size, and drafts as in use."""

from pathlib import Path

import numpy as np

from support import SMALL, Silent, make_engine, make_proposer, replace, requests_of
from tasc_engine import StepRecord
from tasc_jobs.preview import preview
from tasc_text import TaskTokenizer


def test_preview_fills_the_batch_with_and_without_drafts(folder: Path) -> None:
    records: list[StepRecord] = []
    config = replace(SMALL, rows=40)
    engine = make_engine(folder, config, proposer=Silent(), on_step=records.append)
    for total in (90, 330):  # one part that is too small to be cut, and two of 165
        records.clear()
        found = preview(engine, requests_of([(5, 9, 1 + i % 20) for i in range(total)], 4))
        assert (found.rows, found.identical) == (total, total)
        assert found.plain.steps == found.drafted.steps == 4 * total
        full = [record for record in records if record.row_steps == config.rows]
        assert sum(record.row_steps for record in full) >= 2 * 4 * (total - 2 * config.rows)


def test_preview_does_not_learn_from_undrafted_answers(folder: Path) -> None:
    tokenizer = TaskTokenizer.from_folder(folder)
    prompts = [(5, 9, 1 + i) for i in range(6)]
    kept = []
    for measured in (True, False):
        proposer = make_proposer(tokenizer)
        engine = make_engine(folder, proposer=proposer)
        requests = requests_of(prompts, 8)
        if measured:
            preview(engine, requests)
        else:  # the first request is begun once more, to compile what it needs
            begun = [replace(request, max_tokens=2) for request in requests[:1]]
            [*engine.generate(begun), *engine.generate(requests)]
        kept.append(np.sort(proposer.memory.recent.tokens[0]))
    np.testing.assert_array_equal(*kept)
