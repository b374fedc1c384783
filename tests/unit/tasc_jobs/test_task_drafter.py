"""A drafter that cannot draft for a task's model is refused when the task is registered."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from support import refused
from tasc_engine.drafting.neural.card import CARD, DrafterCard, target_fingerprint
from tasc_engine.drafting.neural.files import save_drafter
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.layout import MOST_NODES
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_jobs.tasks.register import check_record
from tasc_store import NeuralDrafting, TaskRecord


@pytest.fixture(scope="module")
def model(folder: Path) -> BaseModel:
    return BaseModel.open(str(folder), None)


@pytest.fixture(scope="module")
def drafter(folder: Path, model: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An independent one."""
    place = tmp_path_factory.mktemp("drafter")
    copy = AutoModelForCausalLM.from_pretrained(folder)
    save_drafter(place, copy, DrafterCard("independent", model.tokenizer.fingerprint))
    return place


def with_card(drafter: Path, to: Path, **card: Any) -> Path:
    save_drafter(to, AutoModelForCausalLM.from_pretrained(drafter), DrafterCard(**card))
    return to


def check(model: BaseModel, drafter: Path | str, **how: Any) -> None:
    record = TaskRecord("t", str(model.folder), model.tokenizer.fingerprint, "say {input}\n")
    check_record(replace(record, neural=NeuralDrafting(str(drafter), **how)), model)


def test_a_drafter_of_this_tokenizer_or_target_passes(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    check(model, drafter)
    check(model, drafter, vocabulary="ranked", ranked_tokens=model.tokenizer.vocab_size)
    own = target_fingerprint(model.folder)
    ours = model.tokenizer.fingerprint
    check(model, with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target=own))


def test_another_tokenizer_s_drafter_is_refused_with_both_fingerprints(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    other = with_card(drafter, tmp_path / "d", kind="independent", tokenizer="f" * 32)
    ours = model.tokenizer.fingerprint
    with refused(UsageError, f"--drafter {other}", "f" * 32, ours):
        check(model, other)


def test_another_target_s_head_is_refused_with_both_fingerprints(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    ours, own = model.tokenizer.fingerprint, target_fingerprint(model.folder)
    other = with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target="e" * 64)
    with refused(UsageError, "--drafter", "e" * 64, own):
        check(model, other)


def test_a_target_whose_weights_are_not_here_is_compared_when_it_is_served(
    model: BaseModel, drafter: Path, tmp_path: Path
) -> None:
    ours = model.tokenizer.fingerprint
    other = with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target="e" * 64)
    bare = tmp_path / "bare"
    shutil.copytree(model.folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    check(BaseModel.open(str(bare), None), other)


LOOK = """
import sys
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_jobs.tasks.register import check_record
from tasc_store import NeuralDrafting, TaskRecord
model = BaseModel.open(sys.argv[1], None)
record = TaskRecord("t", sys.argv[1], model.tokenizer.fingerprint, "say {input}\\n")
check_record(record, model)
check_record(TaskRecord(**{**vars(record), "neural": NeuralDrafting(sys.argv[2])}), model)
heavy = {"torch", "transformers"} & set(sys.modules)
print(heavy, "tasc_engine.drafting.neural.card" in sys.modules)
"""


def test_a_head_is_looked_at_without_torch(model: BaseModel, drafter: Path, tmp_path: Path) -> None:
    ours, own = model.tokenizer.fingerprint, target_fingerprint(model.folder)
    head = with_card(drafter, tmp_path / "e", kind="eagle", tokenizer=ours, target=own)
    command = [sys.executable, "-c", LOOK, str(model.folder), str(head)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set() True\n"


def test_a_place_without_a_folder_is_said_to_be_no_drafter(model: BaseModel) -> None:
    with refused(UsageError, "--drafter", "./nowhere", "`tasc train-drafter`"):
        check(model, "./nowhere")


def test_a_folder_without_a_drafter_and_too_many_ranked_tokens_are_named(
    model: BaseModel, drafter: Path
) -> None:
    with refused(UsageError, "--drafter", CARD, "`tasc train-drafter`"):
        check(model, model.folder)
    size = model.tokenizer.vocab_size
    with refused(UsageError, "--ranked-tokens", str(size)):
        check(model, drafter, vocabulary="recent+ranked")


@pytest.mark.parametrize("tree", [(16, 4, MOST_NODES), (2, 32, 1), (1, 32, MOST_NODES)])
def test_the_largest_trees_of_a_record_are_trees_of_the_engine(tree: tuple[int, int, int]) -> None:
    own = NeuralDrafting("d", "neural", "full", 1, *tree)
    made = NeuralSettings(own.depth, own.width, own.nodes)
    assert (made.depth, made.width, made.nodes) == tree
    depth, width, nodes = tree
    for over in ((17, 1, nodes), (1, 33, nodes), (1, 1, MOST_NODES + 1), (17, width, depth)):
        with refused(ValueError, "is"):
            NeuralDrafting("d", "neural", "full", 1, *over)
        with refused(ValueError, "is"):
            NeuralSettings(*over)
