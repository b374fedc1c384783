"""A job's folder holds whole parts in order, for one process and one input at a time."""

import json
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tasc_jobs.batch.errors import JobBusy, JobChanged
from tasc_jobs.batch.folder import JobFolder, require_same
from tasc_jobs.batch.work import Record, Totals
from tasc_jobs.errors import JobError
from tasc_runtime.errors import FileError


def records(first: int, stop: int) -> list[Record]:
    return [
        Record(i, f"r{i}", i + 1, None, {"text": f"ü{i}"}, None, 2, 1)
        if i % 3
        else Record(i, f"r{i}", i + 1, "a", None, "bad", 0, 0)
        for i in range(first, stop)
    ]


def test_parts_are_read_in_order_with_what_they_add_up_to(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with JobFolder.held(path) as folder:
        assert folder.begun() is None
        begun = folder.begin({"rows": (1, 2)}, 3, None)
        folder.add(records(0, 4))
        folder.add(records(4, 11))
    with JobFolder.held(path) as folder:
        assert folder.begun() == begun
        assert begun.pins == {"rows": [1, 2]}
        assert folder.resume() == 11
        assert list(folder.records()) == records(0, 11)
        assert folder.totals == Totals.of(records(0, 11))
        assert folder.totals == Totals(11, 4, 14, 7, "row 1: bad")


def test_of_a_part_that_was_not_finished_and_of_those_behind_a_gap_nothing_is_left(
    tmp_path: Path,
) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        folder.begin({}, 1, 1)
        for first in (0, 4, 8):
            folder.add(records(first, first + 4))
        (middle,) = folder.path.glob("part-000000000004-*")
        middle.rename(middle.with_name(middle.name + ".partial"))
        assert folder.resume() == 4
        assert list(folder.records()) == records(0, 4)
        assert not list(folder.path.glob("*.partial"))


def test_a_job_that_is_done_keeps_its_report_and_no_parts(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add(records(0, 4))
        folder.end(folder.begin({}, 1, 1), {"rows": 4})
        found = folder.begun()
        assert found is not None
        assert found.report == {"rows": 4}
        assert sorted(p.name for p in folder.path.iterdir()) == ["job.json", "lock"]
        folder.discard()
        assert folder.begun() is None


def hold(path: Path, told: Connection) -> None:
    with JobFolder.held(path):
        told.send("held")
        signal.pause()


def test_a_second_process_is_kept_out_as_long_as_the_first_lives(tmp_path: Path) -> None:
    """The first is a fork: it has imported already what takes a new process seconds."""
    path, forks = tmp_path / "job", get_context("fork")
    heard, told = forks.Pipe()
    first = forks.Process(target=hold, args=(path, told))
    first.start()
    try:
        assert heard.poll(300)
        refused = pytest.raises(JobBusy, match="another process works on the job in")
        with refused, JobFolder.held(path):
            pass
    finally:
        first.kill()
        first.join()
    with JobFolder.held(path):
        pass


def test_changed_pins_are_named_with_the_way_out(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        begun = folder.begin({"seed": 0, "input": ["x" * 100], "same": (1,)}, 1, 1)
    require_same(begun, {"seed": 0, "input": ["x" * 100], "same": (1,)}, folder.path)
    with pytest.raises(
        JobChanged, match=r'input was \["xxx.*\.\.\., is 3; seed was 0, is 1\. .*--restart'
    ):
        require_same(begun, {"seed": 1, "input": 3, "same": [1]}, folder.path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 2}', '{"format": 1, "x": 1}'])
def test_a_folder_that_cannot_be_read_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(JobError, match=r"job\.json cannot be read .*--restart begins anew"):
        JobFolder(tmp_path).begun()


def test_a_part_that_was_cut_is_named(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path) as folder:
        folder.add(records(0, 4))
        (part,) = tmp_path.glob("part-*")
        part.write_text(part.read_text()[:-5])
        with pytest.raises(JobError, match=r"part-0.* is damaged .* delete it"):
            list(folder.records())


def test_a_place_that_is_none_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(FileError, match="no place for the job's state"),
        JobFolder.held(tmp_path / "no" / "job"),
    ):
        pass


def test_the_report_of_a_job_is_json(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path) as folder:
        folder.end(folder.begin({"a": 1}, 2, None), {"rows": 1})
    content = json.loads((tmp_path / "job.json").read_text())
    assert (content["format"], content["record_version"], content["report"]) == (1, 2, {"rows": 1})
