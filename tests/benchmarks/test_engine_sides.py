"""Tests the peers of the engine benchmark: names, reasons for absence, weights, and answers."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.engine import engine, fresh, sides
from benchmarks.engine.loop import Job, Ran
from benchmarks.engine.steps import Ceiling
from benchmarks.engine.to_gguf import interleaved, renamed
from tasc_text import TaskTokenizer
from tiny import END, make_tokenizer, plain

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


def test_table_has_sides_that_count_no_steps_and_tells_who_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = Ran([[1, 2]], 0.5, latency=[0.5])
    measured = sides.Measured("ctranslate2-int8", "plain 8", [ran], 100.0)
    top = Ceiling(10, 20, 1e9, 1e9, 8)
    left_out = {"llama-cpp": "llama-cpp did not install: no compiler"}
    fresh.show(fresh.Fresh("massive_en", (measured,), top, {}, True, left_out))
    shown = capsys.readouterr().out
    assert "ctranslate2-int8 plain b=8" in shown
    assert "llama-cpp did not install: no compiler" in shown


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
@pytest.mark.parametrize(
    ("peer", "most"), [("ctranslate2", 0), ("onnx-genai", 0), ("llama-cpp", 4)]
)
def test_installed_peer_answers_like_transformers_in_any_batch(
    peer: str, most: int, tmp_path: Path
) -> None:
    """In float32 all rows are equal; of random weights, q8_0 changes ``most`` rows."""
    if sides.version_of(peer) is None:
        pytest.skip(f"{peer} is not installed; `make bench-env`")
    model, rng = small_llama(tmp_path / "model"), np.random.default_rng(0)
    prompts = [rng.integers(5, 300, n).tolist() for n in (3, 17, 9, 30, 6, 12, 25)]
    job = Job(str(tmp_path / "model"), "t", prompts, 16, [0], 1, "float32", batch=3)
    expected = [job.whole(plain(model, prompt, 16)) for prompt in prompts]
    with ExitStack() as stack:
        side = sides.started(peer, job, ("plain 1", "plain 3"), tmp_path, stack)
        for setting in side.settings:
            ran, _ = side.run(setting, range(len(prompts)))
            equal = sum(a == b for a, b in zip(ran.answers, expected, strict=True))
            assert equal >= len(prompts) - most
            assert ran.seconds > 0
            assert len(ran.latency) == len(prompts)


def small_llama(folder: Path) -> PreTrainedModel:
    """A model of random weights, with the shapes and the special tokens that all peers take."""
    make_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    own = {"bos_token": END, "unk_token": END}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    config = LlamaConfig(
        vocab_size=TaskTokenizer.from_folder(folder).vocab_size, hidden_size=64,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return model
