"""A drafter's cached layers say what a plain forward over each path says, however it was fed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from neural_drafters import decoder_of, exact, model_of
from tasc_engine import UnsupportedModel
from tasc_engine.drafting.neural.drafters import Backbone
from tasc_engine.model.operations import TensorOperations
from tiny import make_folder

VOCAB = 60
ROWS, CAPACITY, WIDTH, LEVELS = 3, 40, 4, 3


@pytest.fixture(scope="module", params=["qwen2", "llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return exact(model_of(make_folder(tmp_path_factory.mktemp(request.param), request.param)))


@torch.inference_mode()
def plainly(model: Any, path: list[int], base: int) -> Tensor:
    """What the head reads of a path's last token, which stands at ``base + len(path) - 1``."""
    positions = torch.arange(base, base + len(path))[None]
    return model.model(torch.tensor([path]), position_ids=positions).last_hidden_state[0, -1]


class Rows:
    """Rows of a backbone with the paths they hold, and what must be said of them."""

    def __init__(self, model: Any, capacity: int = CAPACITY, seed: int = 0) -> None:
        self.model, self.random = model, random.Random(seed)
        self.backbone = Backbone(decoder_of(model, capacity), ROWS, capacity)
        self.trunks: list[list[int]] = [[] for _ in range(ROWS)]
        self.bases = [0, 5, 2]
        self.compared = 0
        self.before = (torch.zeros(0), torch.zeros(0))

    def ids(self, n: int) -> list[int]:
        return self.random.choices(range(VOCAB), k=n)

    @torch.inference_mode()
    def feed(self, parts: dict[int, list[int]]) -> None:
        rows = np.array(list(parts), np.int32)
        starts = np.array([len(self.trunks[row]) for row in parts], np.int32)
        sizes = np.array([len(part) for part in parts.values()], np.int32)
        ids = torch.tensor([token for part in parts.values() for token in part])
        inputs = self.backbone.decoder.embed(ids)
        found = self.backbone.trunk(inputs, rows, self.of(self.bases, rows), starts, sizes)
        for row, part in parts.items():
            self.trunks[row] += part
        self.compare(found, [(row, self.trunks[row]) for row in parts])

    @torch.inference_mode()
    def draft(self, rows: list[int], width: int = WIDTH, levels: int = LEVELS) -> None:
        """Levels of random nodes below random nodes of the level above."""
        own = np.array(rows, np.int32)
        trunks = np.array([len(self.trunks[row]) for row in rows], np.int32)
        paths: list[list[list[int]]] = [[[]] for _ in rows]
        seen = [[0] for _ in rows]
        for level in range(1, levels + 1):
            parents = [self.random.choices(range(len(each)), k=width) for each in paths]
            bits = range(width * (level - 1), width * level)
            seen = [
                [was[p] | 1 << bit for p, bit in zip(of, bits, strict=True)]
                for was, of in zip(seen, parents, strict=True)
            ]
            paths = [
                [[*each[p], *self.ids(1)] for p in of]
                for each, of in zip(paths, parents, strict=True)
            ]
            tokens = torch.tensor([[path[-1] for path in each] for each in paths])
            found = self.backbone.level(
                self.backbone.decoder.embed(tokens), torch.tensor(seen), own,
                self.of(self.bases, own), trunks, level,
            )  # fmt: skip
            whole = [
                (row, self.trunks[row] + path)
                for row, each in zip(rows, paths, strict=True)
                for path in each
            ]
            self.compare(found.flatten(0, 1), whole)

    def compare(self, found: Tensor, whole: list[tuple[int, list[int]]]) -> None:
        expected = [plainly(self.model, path, self.bases[row]) for row, path in whole]
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-9)
        assert torch.equal(*self.before), "what was said is written over"
        self.before = found, found.clone()
        self.compared += len(whole)

    @staticmethod
    def of(values: list[int], rows: np.ndarray) -> np.ndarray:
        return np.array(values, np.int32)[rows]


def test_chunks_and_levels_say_what_a_plain_forward_says(model: Any) -> None:
    """Rows of other lengths, fed by turns, each draft written over by what comes next."""
    rows = Rows(model)
    rows.feed({0: rows.ids(1), 2: rows.ids(9)})
    rows.draft([2, 0])
    rows.feed({1: rows.ids(6), 2: rows.ids(2)})
    rows.draft([0, 1, 2])
    for _ in range(6):
        fed = rows.random.sample(range(ROWS), rows.random.randint(1, ROWS))
        rows.feed({row: rows.ids(rows.random.randint(1, 4)) for row in fed})
        rows.draft(rows.random.sample(range(ROWS), rows.random.randint(1, ROWS)), levels=2)
    assert len({len(trunk) for trunk in rows.trunks}) == ROWS
    assert rows.compared > 100


def test_the_last_input_may_be_fed_again(model: Any) -> None:
    rows = Rows(model)
    rows.feed({0: rows.ids(7), 1: rows.ids(3)})
    rows.draft([0, 1])
    last = rows.trunks[0].pop()
    rows.feed({0: [last]})
    rows.draft([1, 0])


def test_a_row_that_begins_again_sees_nothing_of_its_past(model: Any) -> None:
    rows = Rows(model)
    rows.feed({0: rows.ids(20), 1: rows.ids(8)})
    rows.draft([0])
    rows.trunks[0], rows.bases[0] = [], 3
    rows.feed({0: rows.ids(2)})
    rows.draft([0, 1])


def test_long_rows_and_wide_levels_say_what_a_plain_forward_says(tmp_path: Path) -> None:
    """So much work for a row that torch's own attention does it."""
    rows = Rows(exact(model_of(make_folder(tmp_path, "llama"))), capacity=500)
    rows.feed({0: rows.ids(3), 1: rows.ids(460)})
    rows.draft([1, 0], width=30, levels=2)


def test_a_row_that_is_full_reads_no_position_beyond_its_last(model: Any) -> None:
    """Beside a row with room for more levels; the nodes beyond its end are drafted by nobody."""
    rows = Rows(model)
    decoder = rows.backbone.decoder
    turns = torch.zeros(CAPACITY, 2, decoder.head_dim, dtype=torch.float64)
    turns[:, 0] = 1.0
    decoder.operations = TensorOperations(
        turns, decoder.heads, decoder.kv_heads, torch.nn.functional.silu
    )  # it looks positions up by an operation that minds its bounds
    own, bases = np.array([0, 1], np.int32), np.zeros(2, np.int32)
    sizes = np.array([CAPACITY, 5], np.int32)
    with torch.inference_mode():
        inputs = decoder.embed(torch.tensor(rows.ids(CAPACITY + 5)))
        rows.backbone.trunk(inputs, own, bases, bases, sizes)
        nodes = decoder.embed(torch.tensor([[1], [2]]))
        tree = torch.ones(2, 1, dtype=torch.long)
        found = rows.backbone.level(nodes.clone(), tree, own, bases, sizes, 1)
        alone = rows.backbone.level(nodes[1:], tree[1:], own[1:], bases[1:], sizes[1:], 1)
    torch.testing.assert_close(found[1:], alone, rtol=0, atol=1e-12)


def test_a_drafter_that_looks_back_over_a_window_is_refused(tmp_path: Path) -> None:
    decoder = decoder_of(model_of(make_folder(tmp_path, "mistral")), CAPACITY)
    with pytest.raises(UnsupportedModel):
        Backbone(decoder, ROWS, CAPACITY)
