"""A folder belongs to one run: only one process writes in it, and nothing else is written over."""

import errno
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

import finetuning
from tasc_jobs.finetune.claim import LOCK, Kind, claimed
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.finished import FINETUNE
from tasc_jobs.finetune.job import CHECKPOINT, finetune


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> finetuning.Bench:
    return finetuning.make(tmp_path_factory.mktemp("bench"), "qwen2")


HOLDS = """
import sys
from pathlib import Path
from tasc_jobs.finetune.claim import claimed
from tasc_jobs.finetune.finished import FINETUNE
with claimed(Path(sys.argv[1]), FINETUNE):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_dead(
    bench: finetuning.Bench, tmp_path: Path
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(FinetuneError, match=f"another process trains in {tmp_path}; wait"):
            finetune(bench.job(tmp_path, epochs=1))
        assert not (tmp_path / CHECKPOINT).exists()
    finally:
        first.kill()
        first.communicate()
    finetune(bench.job(tmp_path, epochs=1))


def test_a_folder_is_held_for_the_whole_run_and_free_behind_it(
    bench: finetuning.Bench, tmp_path: Path
) -> None:
    seen: list[str] = []

    def try_it(stage: str, done: int, total: int | None) -> None:
        with (
            pytest.raises(FinetuneError, match="another process trains"),
            claimed(tmp_path, FINETUNE),
        ):
            pass
        seen.append(stage)

    finetune(bench.job(tmp_path, epochs=1), try_it)
    assert seen == ["train"] * 4 + ["write"] * 2
    with claimed(tmp_path, FINETUNE):
        pass


def test_a_crews_next_first_worker_waits_for_the_one_that_dies(tmp_path: Path) -> None:
    left = ExitStack()
    left.enter_context(claimed(tmp_path, FINETUNE))
    timer = threading.Timer(0.3, left.close)
    timer.start()
    with claimed(tmp_path, FINETUNE, wait_s=60):
        timer.join()


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FinetuneError, match="file/out cannot be written to"),
        claimed(tmp_path / "file" / "out", FINETUNE),
    ):
        pass


def test_a_folder_of_something_else_is_left_alone(bench: finetuning.Bench, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(
        FinetuneError, match=f"{tmp_path} has README.md of something else, which a fine-tune"
    ):
        finetune(bench.job(tmp_path, epochs=1))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_folder_of_another_kind_of_run_is_left_alone(tmp_path: Path) -> None:
    with claimed(tmp_path, FINETUNE):
        pass
    drafter = Kind("a drafter's training", ())
    said = "is the output of a fine-tune; name another for a drafter's training"
    with pytest.raises(FinetuneError, match=said), claimed(tmp_path, drafter):
        pass
    with claimed(tmp_path, FINETUNE):
        pass


def test_other_files_in_a_folder_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("")
    with claimed(tmp_path, FINETUNE):
        assert {path.name for path in tmp_path.iterdir()} == {"train.log", LOCK}


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    said = f"file system of {tmp_path} has no locks .*another"
    with pytest.raises(FinetuneError, match=said), claimed(tmp_path, FINETUNE):
        pass
