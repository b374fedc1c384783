"""Tests that a model's bigrams equal those of transformers, and the jobs that run a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from support import refused
from tasc_draft.index.bigrams import read_bigrams
from tasc_engine import ModelSource, UnsupportedModel
from tasc_engine.model.loading import load_model
from tasc_jobs.errors import JobError
from tasc_jobs.index.model_bigrams import make_bigrams, model_bigrams
from tasc_jobs.task_inputs import named_source
from tasc_text import TaskTokenizer, TextError
from tiny import ARCHITECTURES, make_folder

TOP = 5


def size_of(folder: Path) -> int:
    return TaskTokenizer.from_folder(folder).vocab_size


@pytest.fixture
def asked(folder: Path, everything: bool, seed: int) -> range:
    """The tokens that are computed one by one: all, or some that change each day."""
    size = size_of(folder)
    return range(size) if everything else range(seed % 9, size, 9)


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(ModelSource(folder, dtype="float64"))


@torch.inference_mode()
def one_by_one(model, asked: range, vocab_size: int) -> tuple[list[list[int]], np.ndarray]:
    """Runs a forward pass for each token, and a softmax in float64."""
    tokens, logp = [], []
    for token in asked:
        scores = model(input_ids=torch.tensor([[token]])).logits[0, -1].double().log_softmax(-1)
        order = sorted(range(vocab_size), key=lambda t: -scores[t])[:TOP]
        tokens.append(order)
        logp.append([float(scores[t]) for t in order])
    return tokens, np.array(logp)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bigrams_equal_bigrams_computed_with_transformers(architecture, tmp_path, asked) -> None:
    folder = make_folder(tmp_path, architecture)
    own, size = load_model(ModelSource(folder, dtype="float64")), size_of(folder)
    tokens, logp = model_bigrams(own, size, top=TOP)
    assert len(tokens) == len(logp) == size
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    expected, chances = one_by_one(model, asked, size)
    assert tokens[asked].tolist() == expected
    np.testing.assert_allclose(logp[asked], chances, atol=1e-5)
    assert (tokens.dtype, logp.dtype) == (np.int32, np.float32)
    assert len({tuple(line) for line in expected}) > 10


def test_bigrams_of_an_adapted_model_equal_bigrams_of_the_merged_model(
    folder, tmp_path, asked
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    lora = LoraConfig(r=4, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    sources = [ModelSource(folder, a, dtype="float64") for a in (tmp_path / "adapter", None)]
    tuned, plain = (
        model_bigrams(load_model(source), size_of(folder), top=TOP)[0][asked].tolist()
        for source in sources
    )
    assert tuned == one_by_one(adapted, asked, size_of(folder))[0]
    assert tuned != plain


def test_bigrams_depend_on_neither_batch_size_nor_padding_of_the_vocabulary(folder, model) -> None:
    size = size_of(folder)
    whole = model_bigrams(model, size)
    done: list[int] = []
    parts = model_bigrams(model, size, max_logits=100 * size, progress=done.append)
    np.testing.assert_array_equal(parts[0], whole[0])
    np.testing.assert_allclose(parts[1], whole[1], atol=1e-6)
    assert (whole[0].shape, sum(done)) == ((size, 8), size)
    assert max(done) == 100 < size
    size = size_of(folder)
    all_tokens, all_logp = model_bigrams(model, size, top=size)
    tokens, logp = model_bigrams(model, size - 20, top=TOP)
    assert all_tokens[:, :TOP].max() >= size - 20 > tokens.max()
    for few, many, line, chances in zip(tokens, all_tokens, logp, all_logp, strict=False):
        kept = np.flatnonzero(many < size - 20)[:TOP]
        np.testing.assert_array_equal(few, many[kept])
        np.testing.assert_allclose(line, chances[kept], atol=1e-6)  # still over all ids


def test_too_many_ids_and_nan_weights_are_refused(folder: Path, model: Any) -> None:
    size = size_of(folder)
    for top in (0, size + 1):
        with refused(ValueError, "top", str(top), str(size)):
            model_bigrams(model, size, top=top)
    with pytest.raises(UnsupportedModel):
        model_bigrams(model, size + 1)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    with pytest.raises(UnsupportedModel):
        model_bigrams(model, size)


def test_bigram_file_holds_the_models_bigrams(folder, tokenizer, tmp_path, tasc):
    output, size = tmp_path / "table.npz", tokenizer.vocab_size
    out = tasc.run("model-bigrams", folder, "--output", output, "--top", 4, "--json")
    report, table = json.loads(out.splitlines()[-1]), read_bigrams(output, tokenizer.fingerprint)
    tokens, logp = model_bigrams(load_model(ModelSource(folder)), size, top=4)
    np.testing.assert_array_equal(table.tokens, tokens)
    np.testing.assert_allclose(table.logp, logp, atol=1e-5)
    assert table.model == report["model"] == str(folder)
    assert (report["vocab_size"], report["top"]) == tokens.shape == (size, 4)
    assert (report["file"], report["bytes"]) == (str(output), output.stat().st_size)
    assert report["fingerprint"] == tokenizer.fingerprint
    assert f"{size}/{size} tokens" in tasc.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--output", "nowhere/table.npz"], 2, "nowhere/table.npz"),
        (["--output", "t", "--dtype", "float8"], 2, "float8"),
        (["--output", "t", "--device", "cuda:99"], 2, "cuda:99"),
        (["--output", "t", "--top", "9999"], 1, "9999"),
        ([], 2, "--output"),
    ],
)
def test_invalid_bigram_command_is_refused_and_writes_nothing(
    folder, tmp_path, monkeypatch, tasc, args, code, message
):
    monkeypatch.chdir(tmp_path)
    assert message in tasc.run("model-bigrams", folder, *args, code=code)
    assert not list(tmp_path.iterdir())


def source(folder: Path, dtype: str = "float32") -> ModelSource:
    return named_source(str(folder), None, dtype, "cpu")


def test_unsupported_model_is_named_in_the_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "more"})
    path.write_text(json.dumps(content))
    with refused(JobError, str(folder)):
        make_bigrams(source(folder), tmp_path / "t")
    with refused(TextError, "/nowhere"):
        source(Path("/nowhere"))
