"""Every row of every drafted step is counted, and the device is asked seldom."""

import numpy as np
import torch

from tasc_engine.neural.active import STEPS, ActiveSizes
from tasc_engine.neural.vocabulary import RankedVocabulary


def test_sizes_of_all_rows_are_told_once_in_so_many_steps() -> None:
    vocabulary = RankedVocabulary(torch.zeros(9, 4), np.array([1, 5, 7], np.int32))
    told: list[list[int]] = []
    sizes = ActiveSizes(vocabulary, torch.device("cpu"), told.append)
    for step in range(2 * STEPS + 3):
        sizes.drafted(np.arange(step % 3, dtype=np.int32))
    rows = [sum(step % 3 for step in range(n * STEPS, (n + 1) * STEPS)) for n in range(2)]
    assert told == [[3] * n for n in rows]
