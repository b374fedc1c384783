"""Tests the peers of the engine benchmark: names, reasons for absence, weights, and answers."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engine import engine, fresh, sides
from benchmarks.engine.loop import Job
from benchmarks.engine.to_gguf import interleaved, renamed
from tiny import make_model, make_tokenizer, plain

FOLDER = Path(engine.__file__).parent
SMOLLM2_PEERS = (*engine.VLLM_PEERS, *engine.OTHER_PEERS)
JOB = Job(folder="", task="t", prompts=[], max_tokens=4, eos=[2], threads=1, dtype="bfloat16")


@pytest.mark.parametrize("peer", SMOLLM2_PEERS)
def test_each_peer_has_a_side_and_its_weights_and_drafts(
    peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fresh, "started", lambda *given: given)
    options: Any = SimpleNamespace(sequences=(1, 8))
    _, job, settings, *_ = fresh.start(peer, JOB, options, tmp_path, ExitStack())
    assert (FOLDER / f"side_{sides.kind_of(peer).replace('-', '_')}.py").is_file()
    assert job.drafts == (peer.partition("-")[2] if peer.startswith("vllm") else "")
    int8 = peer.endswith("-int8") or peer in ("llama-cpp", "onnx-genai")
    assert bool(job.quantization) == int8
    assert {int(setting.split()[1]) for setting in settings} == {1, 8}
    drafted = ("vllm-ngram", "vllm-suffix", "vllm-tasc")
    assert any(setting.startswith("plain") for setting in settings) == (peer not in drafted)


def test_peers_are_left_out_where_the_rows_need_guides_or_sampling(tmp_path: Path) -> None:
    options: Any = SimpleNamespace(sequences=(8,))
    for job in (replace(JOB, labels=["a"]), replace(JOB, temperature=1.0)):
        with pytest.raises(sides.SideFailed, match="llama-cpp"):
            fresh.start("llama-cpp", job, options, tmp_path, ExitStack())


def test_failed_installation_is_told_with_the_last_error_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sides, "ENVIRONMENTS", tmp_path)
    log = "ERROR: first\nCollecting x\nERROR: Failed building wheel\n  hint\n"
    (tmp_path / "llama-cpp.log").write_text(log)

    def begin(peer: str) -> sides.Side:
        return sides.started(peer, JOB, ("plain 8",), tmp_path, ExitStack())

    names = ("llama-cpp", "onnx-genai", "vllm-ngram")
    found, left_out = sides.started_of({name: (lambda name=name: begin(name)) for name in names})
    assert not found
    assert left_out["llama-cpp"] == "llama-cpp did not install: ERROR: Failed building wheel"
    assert "did not install" not in left_out["onnx-genai"] + left_out["vllm-ngram"]
    assert "make bench-env" in left_out["onnx-genai"]
    assert "make test-vllm" in left_out["vllm-ngram"]


def test_interleaved_rotary_pairs_give_the_scores_of_halves() -> None:
    heads, width, hidden, places = 3, 8, 16, 5
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, heads * width, hidden))
    states = rng.normal(size=(places, hidden))
    angles = np.arange(places)[:, None] / 100.0 ** (np.arange(width // 2) / (width // 2))

    def rotated(weight: Any, pairs: Any) -> Any:
        of_heads = (states @ weight.T).reshape(places, heads, width).swapaxes(0, 1)
        a, b = of_heads[..., pairs[0]], of_heads[..., pairs[1]]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    half = np.arange(width // 2)
    q, k = (rotated(w, (half, half + width // 2)) for w in (query, key))
    q2, k2 = (rotated(interleaved(w, heads), (2 * half, 2 * half + 1)) for w in (query, key))
    expected = q @ k.swapaxes(1, 2)
    assert q2 @ k2.swapaxes(1, 2) == pytest.approx(expected)
    assert rotated(query, (2 * half, 2 * half + 1)) @ k2.swapaxes(1, 2) != pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.12.self_attn.o_proj.weight", "blk.12.attn_output.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    ],
)
def test_parameters_get_their_names_in_gguf(name: str, expected: str) -> None:
    assert renamed(name) == expected


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError):
        renamed("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.slow("each starts an engine of its own environment")
@pytest.mark.parametrize("peer", ["ctranslate2", "onnx-genai", "llama-cpp"])
def test_installed_peer_answers_like_transformers_in_any_batch(peer: str, tmp_path: Path) -> None:
    """In float32; q8_0 may differ in a row, and a batch of unequal prompts in none from one row."""
    if sides.version_of(peer) is None:
        pytest.skip(f"{peer} is not installed; `make bench-env`")
    make_tokenizer(tmp_path / "model")
    model = make_model(tmp_path / "model", "llama", torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 300, n).tolist() for n in (3, 17, 9, 30, 6, 12, 25)]
    eos = model.config.eos_token_id
    job = Job(str(tmp_path / "model"), "t", prompts, 16, eos, 1, "float32")
    expected = [job.whole(plain(model, prompt, 16)) for prompt in prompts]
    with ExitStack() as stack:
        side = sides.started(peer, job, ("plain 1", "plain 3"), tmp_path, stack)
        for setting in side.settings:
            ran, _ = side.run(setting, range(len(prompts)))
            equal = sum(a == b for a, b in zip(ran.answers, expected, strict=True))
            assert equal >= len(prompts) - (peer == "llama-cpp")
            assert ran.seconds > 0
            assert len(ran.latency) == len(prompts)
