"""Parts of a text sorted by Ray tasks make the whole, also when a worker dies on the way."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import WorkerCrashedError

from killable import pids
from tasc_draft import Tokens
from tasc_draft.index.corpus_build import Documents, assemble, distinct
from tasc_draft.index.corpus_sort import sort_part
from tasc_jobs.index.build import sorted_parts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
VOCABULARY = 50


def documents_of(rows: int, tokens: int) -> Documents:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, rows * tokens).astype(np.int32)
    return distinct(Tokens(ids, np.full(rows, tokens)), vocab_size=VOCABULARY, eos_id=0)


def same(documents: Documents, parts: list) -> bool:
    """Whether parts make the index of all documents sorted at once."""
    whole = [sort_part(documents.text, documents.offsets, documents.counts)]
    found, expected = (
        assemble(documents, each, fingerprint="f" * 32, vocab_size=VOCABULARY).view
        for each in (parts, whole)
    )
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def killer(folder: Path, enough: Callable[[list[int]], bool]) -> Iterator[list[int]]:
    """Kills workers that sort while the block runs, until there were enough; yields who they were.

    Only before any part is written: behind that a worker may be done with its own.
    """
    killed: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set() and not enough(killed):
            for pid in pids("ray::sort_part_file"):
                if not list(folder.glob("*/order-*")) and not enough(killed):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("parts", [None, 1, 2, 5, 40])
def test_parts_make_the_whole_however_many(tmp_path: Path, parts: int | None) -> None:
    documents = documents_of(30, 12)
    told: list[tuple[int, int]] = []
    found = sorted_parts(documents, tmp_path, parts, lambda *each: told.append(each))
    assert len(found) == (parts or 1)
    assert told == [(done, len(found)) for done in range(len(found) + 1)]
    assert same(documents, found)
    assert list(tmp_path.iterdir()) == []


def test_parts_without_a_gram_are_parts_too(tmp_path: Path) -> None:
    ids = np.zeros(400, np.int32)  # nearly every gram is the same, so splitters are
    documents = distinct(Tokens(ids, np.array([400])), vocab_size=VOCABULARY, eos_id=1)
    found = sorted_parts(documents, tmp_path, 8)
    assert 0 in [len(order) for order, _ in found]
    assert same(documents, found)


def test_a_part_whose_worker_is_killed_is_sorted_again(tmp_path: Path) -> None:
    documents = documents_of(1500, 1000)
    with killer(tmp_path, lambda killed: len(killed) == 1) as killed:
        found = sorted_parts(documents, tmp_path, 2)
    assert len(killed) == 1
    assert same(documents, found)


@pytest.mark.slow("kills workers until Ray gives up")
def test_workers_that_die_again_and_again_are_an_error_and_nothing_hangs(tmp_path: Path) -> None:
    documents = documents_of(1500, 1000)
    with (
        killer(tmp_path, lambda killed: False) as killed,
        pytest.raises(WorkerCrashedError),
    ):
        sorted_parts(documents, tmp_path, 2)
    assert len(killed) >= 4
