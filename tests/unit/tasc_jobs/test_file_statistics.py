"""Statistics of the files we ship: the paper's Table 1, and what else files can hold."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tasc_jobs.errors import EmptyCorpusError, FileError
from tasc_jobs.statistics import file_statistics

DATA = Path(str(files("tasc_jobs.demo"))) / "data"


def figures(side):
    return round(side.bigram_entropy_bits, 2), side.bigrams_for_80_percent


def test_pos_tagging_has_the_papers_figures():
    found = file_statistics([DATA / "pos_ewt.train.jsonl.gz"])
    assert figures(found.input) == (15.53, 65_288)
    assert figures(found.output) == (6.57, 63)
    assert (found.input.rows, found.input.words, found.rejected) == (12_544, 204_577, 0)


def test_intents_and_slots_have_the_papers_input_figures():
    # The paper spells the outputs in another way (9.74 bits, 774), so only ours are pinned.
    found = file_statistics([DATA / "massive_en.train.jsonl.gz"])
    assert figures(found.input) == (13.40, 15_943)
    assert figures(found.output) == (9.02, 840)


def test_several_files_are_one_running_text(tmp_path):
    whole, first, second = (tmp_path / f"{name}.jsonl" for name in ("whole", "first", "second"))
    lines = [f'{{"input": "{text}", "output": "{text}"}}\n' for text in ("a b", "c", "d e")]
    whole.write_text("".join(lines))
    first.write_text("".join(lines[:2]))
    second.write_text(lines[2])
    found = file_statistics([first, second])
    assert found == file_statistics([whole])
    assert found.output.bigrams == 4


def test_who_waits_is_told_of_every_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a b", "output": "c"}\nno json\n{"input": "d", "output": "e"}\n')
    told = []
    file_statistics([path, path], progress=lambda *progress: told.append(progress))
    assert told == [("count", rows, None) for rows in (1, 2, 3, 4)]


def test_refused_lines_are_counted_and_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a b", "output": "c"}\nno json\n')
    found = file_statistics([path])
    assert (found.input.rows, found.input.words, found.rejected) == (1, 2, 1)


def test_files_without_a_row_or_without_being_there_are_errors(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("no json\n")
    with pytest.raises(EmptyCorpusError, match="1 lines were refused"):
        file_statistics([path])
    with pytest.raises(FileError, match=r"absent\.jsonl"):
        file_statistics([path, tmp_path / "absent.jsonl"])


def test_files_need_neither_ray_nor_torch():
    imports = "import sys, tasc_jobs.statistics, tasc_jobs.ingest"
    code = f"{imports}; print({{'ray', 'torch'}} & {{*sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
