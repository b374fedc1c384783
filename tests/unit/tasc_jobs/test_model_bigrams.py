"""A model's bigrams are what transformers says of each token asked by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from support import refused
from tasc_engine import ModelSource, UnsupportedModel
from tasc_engine.model.loading import load_model
from tasc_jobs.index.model_bigrams import model_bigrams
from tasc_text import TaskTokenizer
from tiny import ARCHITECTURES, make_folder

TOP = 5


def vocabulary(folder: Path) -> int:
    return TaskTokenizer.from_folder(folder).vocab_size


@pytest.fixture
def asked(folder: Path, everything: bool, seed: int) -> range:
    """Tokens that are asked one by one: all, or some that change each day."""
    size = vocabulary(folder)
    return range(size) if everything else range(seed % 9, size, 9)


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(ModelSource(folder, dtype="float64"))


@torch.inference_mode()
def one_by_one(model, asked: range, vocab_size: int) -> tuple[list[list[int]], np.ndarray]:
    """A forward for each token, and a softmax in float64."""
    tokens, logp = [], []
    for token in asked:
        scores = model(input_ids=torch.tensor([[token]])).logits[0, -1].double().log_softmax(-1)
        order = sorted(range(vocab_size), key=lambda t: -scores[t])[:TOP]
        tokens.append(order)
        logp.append([float(scores[t]) for t in order])
    return tokens, np.array(logp)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_the_models_own(architecture: str, tmp_path: Path, asked: range) -> None:
    folder = make_folder(tmp_path, architecture)
    tokens, logp = model_bigrams(
        load_model(ModelSource(folder, dtype="float64")), vocabulary(folder), top=TOP
    )
    assert len(tokens) == len(logp) == vocabulary(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    expected, chances = one_by_one(model, asked, vocabulary(folder))
    assert tokens[asked].tolist() == expected
    np.testing.assert_allclose(logp[asked], chances, atol=1e-5)
    assert (tokens.dtype, logp.dtype) == (np.int32, np.float32)
    assert len({tuple(line) for line in expected}) > 10


def test_an_adapter_is_merged(folder: Path, tmp_path: Path, asked: range) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    lora = LoraConfig(r=4, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    sources = [ModelSource(folder, a, dtype="float64") for a in (tmp_path / "adapter", None)]
    tuned, plain = (
        model_bigrams(load_model(source), vocabulary(folder), top=TOP)[0][asked].tolist()
        for source in sources
    )
    assert tuned == one_by_one(adapted, asked, vocabulary(folder))[0]
    assert tuned != plain


def test_the_size_of_a_batch_changes_nothing_and_progress_adds_up(folder: Path, model: Any) -> None:
    size = vocabulary(folder)
    whole = model_bigrams(model, size)
    done: list[int] = []
    parts = model_bigrams(model, size, max_logits=100 * size, progress=done.append)
    np.testing.assert_array_equal(parts[0], whole[0])
    np.testing.assert_allclose(parts[1], whole[1], atol=1e-6)
    assert whole[0].shape == (size, 8)
    assert sum(done) == size
    assert max(done) == 100 < size


def test_ids_beyond_the_tokenizers_are_neither_asked_for_nor_listed(
    folder: Path, model: Any
) -> None:
    size = vocabulary(folder)
    all_tokens, all_logp = model_bigrams(model, size, top=size)
    tokens, logp = model_bigrams(model, size - 20, top=TOP)
    assert all_tokens[:, :TOP].max() >= size - 20 > tokens.max()
    for few, many, line, chances in zip(tokens, all_tokens, logp, all_logp, strict=False):
        kept = np.flatnonzero(many < size - 20)[:TOP]
        np.testing.assert_array_equal(few, many[kept])
        np.testing.assert_allclose(line, chances[kept], atol=1e-6)  # still over all ids


@pytest.mark.parametrize("top", [0, 321])
def test_more_next_tokens_than_there_are_are_refused(folder: Path, model: Any, top: int) -> None:
    size = vocabulary(folder)
    assert top not in range(1, size + 1)
    with refused(ValueError, "top", str(top), str(size)):
        model_bigrams(model, size, top=top)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path, model: Any) -> None:
    size = vocabulary(folder)
    with pytest.raises(UnsupportedModel):
        model_bigrams(model, size + 1)


def test_a_model_that_gives_no_numbers_is_refused(folder: Path) -> None:
    model = load_model(ModelSource(folder, dtype="float16"))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    with pytest.raises(UnsupportedModel):
        model_bigrams(model, vocabulary(folder))
