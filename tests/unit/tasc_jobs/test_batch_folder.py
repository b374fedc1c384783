"""A job's folder keeps every finished row, for one process and one input at a time."""

import json
import resource
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.batch.folder import JobFolder, require_same
from tasc_jobs.batch.generate import write_files
from tasc_jobs.batch.work import JobBusy, JobChanged, JobUnreadable, Record
from tasc_jobs.errors import JobError
from tasc_runtime.errors import FileError


def records(first: int, stop: int) -> list[Record]:
    return [
        Record(i, f"r{i}", i + 1, None, {"text": f"ü{i}\ud83d"}, None, 2, 1)
        if i % 3
        else Record(i, f"r{i}", i + 1, "a", None, "bad", 0, 0)
        for i in range(first, stop)
    ]


def test_records_are_read_in_order_with_their_sums(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with JobFolder.held(path) as folder:
        assert folder.begun() is None
        assert folder.resume() == (0, set())
        begun = folder.begin({"rows": (1, 2)}, 3, None)
        for part in (records(4, 6), records(1, 3), records(0, 1), records(8, 11)):
            folder.add(part)
    with JobFolder.held(path) as folder:
        assert folder.begun() == begun
        assert begun.pins == {"rows": [1, 2]}
        assert folder.resume() == (3, {4, 5, 8, 9, 10})
        assert list(folder.records()) == [*records(0, 3), *records(4, 6), *records(8, 11)]
        totals = folder.totals
        assert (totals.rows, totals.errors, totals.tokens, totals.steps) == (8, 2, 12, 6)
        assert totals.first_error == "row 1: bad"


@given(st.integers(0, 400), st.binary(max_size=20))
def test_rows_behind_a_damaged_record_are_to_be_answered_again(cut: int, junk: bytes) -> None:
    with TemporaryDirectory() as path, JobFolder.held(Path(path)) as folder:
        folder.add(records(0, 8))
        (file,) = folder.path.glob("records*")
        whole = file.read_bytes()
        file.write_bytes(whole[:cut] + junk.replace(b"\n", b"") + (b"\n" if junk else b""))
        first, behind = folder.resume()
        assert behind == set()
        assert first >= whole[:cut].count(b"\n")
        folder.add(records(first, 8))
        assert list(folder.records()) == records(0, 8)
        assert folder.resume() == (8, set())


@pytest.mark.parametrize("damaged", range(5))
def test_a_record_damaged_before_the_end_leaves_no_short_output(
    tmp_path: Path, damaged: int
) -> None:
    output, reject = tmp_path / "out.jsonl", tmp_path / "reject.jsonl"
    output.write_text("before")
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add([*records(1, 5), *records(0, 1)])
        (file,) = folder.path.glob("records*")
        lines = file.read_bytes().splitlines(keepends=True)
        lines[damaged] = b"\0" * (len(lines[damaged]) - 1) + b"\n"
        file.write_bytes(b"".join(lines))
        with pytest.raises(JobError) as damage:
            write_files(output, reject, folder.records(whole=True), True)
        assert all(word in str(damage.value) for word in (str(file), "0 of 5", "run the job again"))
        assert output.read_text() == "before"
        assert not reject.exists()
        first, behind = folder.resume()
        assert (first, len(behind)) == (0, damaged)
        folder.add([record for record in records(0, 5) if record.ordinal not in behind])
        assert list(folder.records(whole=True)) == records(0, 5)


def test_a_disk_that_is_full_in_mid_record_loses_that_record_alone(tmp_path: Path) -> None:
    """A limit of the file's size stands for the disk: a part of the record is written."""
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add(records(0, 3))
        (file,) = folder.path.glob("records*")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
        try:
            with pytest.raises(OSError):  # noqa: PT011
                folder.add(records(3, 4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not file.read_bytes().endswith(b"\n")
        assert folder.resume() == (3, set())
        folder.add(records(3, 5))
        assert list(folder.records(whole=True)) == records(0, 5)


def test_a_job_that_is_done_keeps_its_report_alone(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add(records(0, 4))
        begun = folder.begin({"a": 1}, 2, None)
        folder.add(records(0, 4))
        folder.end(begun, {"rows": 4})
        content = json.loads((folder.path / "job.json").read_text())
        assert (content["record_version"], content["report"]) == (2, {"rows": 4})
        assert sorted(p.name for p in folder.path.iterdir()) == ["job.json", "lock"]
        assert folder.resume() == (0, set())
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
        with pytest.raises(JobBusy), JobFolder.held(path):
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
    with pytest.raises(JobChanged) as changed:
        require_same(begun, {"seed": 1, "input": 3, "same": [1]}, folder.path)
    message = str(changed.value)
    assert all(name in message for name in ("input", "seed", "--restart"))
    assert "same was" not in message
    assert "x" * 60 not in message


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}', '{"format": 2, "x": 1}'])
def test_a_folder_that_cannot_be_read_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(JobUnreadable) as refusal:
        JobFolder(tmp_path).begun()
    assert "--restart" in str(refusal.value)


def test_a_place_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileError), JobFolder.held(tmp_path / "no" / "job"):
        pass
