"""Tests that a saved enriched tokenizer has the same ids and EOS tokens in transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from enrich_tokenizers import MAKERS, OUTPUTS
from tokenizers import processors
from transformers import AutoTokenizer

import tiny
from support import refused
from tasc_runtime.errors import FileError
from tasc_text import TaskTokenizer
from tasc_text.tokenizer import open_tokenizer
from tasc_train.enrich.enrichment import enrich_and_save, save
from tasc_train.enrich.ngram_selection import EnrichSettings, enrich
from tasc_train.errors import FamilyError

SETTINGS = EnrichSettings(20)
OTHER = "<|im_end|>"
# The settings of Phi-3, Llama 2 and Gemma on the Hub, for the tokenizers of these tests.
PHI = {
    "add_bos_token": False, "add_eos_token": False, "bos_token": "<s>", "eos_token": tiny.END,
    "clean_up_tokenization_spaces": False, "legacy": False, "model_max_length": 4096,
    "padding_side": "left", "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer",
    "chat_template": "{{ messages[0].content }}", "unk_token": "<unk>",
    "use_default_system_prompt": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-3": ("phi-3", PHI),
    "llama-2": ("phi-3", {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False,
                      "normalized": False, "rstrip": False, "single_word": False},
        "eos_token": {"__type": "AddedToken", "content": tiny.END, "lstrip": False,
                      "normalized": False, "rstrip": False, "single_word": False},
        "unk_token": "<unk>", "legacy": False,
    }),
    "gemma": ("gemma", {
        "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<s>",
        "eos_token": tiny.END, "unk_token": "<unk>", "pad_token": "<unk>", "mask_token": "<unk>",
    }),
    "gpt2": ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "bos_token": tiny.END,
                      "eos_token": tiny.END, "unk_token": tiny.END, "model_max_length": 1024}),
    "neox": ("neox", {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False,
                      "bos_token": tiny.END, "eos_token": tiny.END, "unk_token": tiny.END,
                      "pad_token": tiny.END}),
    "bare": ("gpt2", {}),
}  # fmt: skip


def folder_of(folder: Path, maker: str, config: dict[str, Any]) -> Path:
    folder.mkdir()
    tokenizer = MAKERS[maker]()
    if "<s>" in str(config):
        tokenizer.add_special_tokens(["<s>"])
    if config.get("add_bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> TaskTokenizer:
    return open_tokenizer(folder_of(tmp_path / "base", *CONFIGS[request.param]), tiny.END)


def test_transformers_encodes_with_the_new_tokens(base: TaskTokenizer, tmp_path: Path) -> None:
    found = enrich(base, OUTPUTS, SETTINGS)
    saved = save(found, SETTINGS, base, tmp_path / "enriched", OUTPUTS)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "enriched")
    for text in OUTPUTS[:8]:
        ids = saved.backend.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == base.decode(base.backend.encode(text).ids)
    assert loaded.eos_token == tiny.END
    record = json.loads((tmp_path / "enriched" / "enrichment.json").read_text())
    assert [token["id"] for token in record["tokens"]] == [t.id for t in found.tokens]
    assert TaskTokenizer.from_folder(tmp_path / "enriched").fingerprint == saved.fingerprint


@pytest.mark.parametrize("base", [name for name in CONFIGS if name != "bare"], indirect=True)
def test_transformers_reads_other_settings_and_texts_like_the_base(
    base: TaskTokenizer, tmp_path: Path
) -> None:
    before = AutoTokenizer.from_pretrained(base.path.parent)
    save(enrich(base, OUTPUTS, SETTINGS), SETTINGS, base, tmp_path / "enriched", OUTPUTS)
    after = AutoTokenizer.from_pretrained(tmp_path / "enriched")
    for name in ("special_tokens_map", "padding_side", "chat_template", "model_max_length",
                 "model_input_names", "clean_up_tokenization_spaces"):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name
    for text in ("zebra", "", "Z é日"):
        assert after.encode(text) == before.encode(text) == base.encode_prompt(text)


def test_settings_that_hide_new_tokens_are_refused_and_leave_no_files(tmp_path: Path) -> None:
    config = {**CONFIGS["gpt2"][1], "extra_special_tokens": ["play"]}
    base = open_tokenizer(folder_of(tmp_path / "base", "gpt2", config), tiny.END)
    broken = {**CONFIGS["gpt2"][1], "added_tokens_decoder": {"0": 3}}
    for content, kind, named in (
        (json.dumps(config), FamilyError, "intent: play_music"),
        (json.dumps(broken), FamilyError, "transformers"),
        ("{", FileError, "tokenizer_config.json"),
    ):
        (tmp_path / "base" / "tokenizer_config.json").write_text(content)
        with refused(kind, named):
            enrich_and_save(base, OUTPUTS, SETTINGS, tmp_path / "enriched")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def ends_folder(folder: Path, **files: dict[str, Any]) -> Path:
    """Makes a tokenizer with two special tokens; its settings name one as EOS."""
    tiny.make_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = TaskTokenizer.from_folder(folder).backend
    tokenizer.add_special_tokens([OTHER])
    tokenizer.save(str(path))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def enriched_ends(base: TaskTokenizer, output: Path) -> TaskTokenizer:
    enrich_and_save(base, OUTPUTS, SETTINGS, output)
    return TaskTokenizer.from_folder(output)


def test_eos_tokens_of_generation_config_are_kept(tmp_path: Path) -> None:
    ids = [320, 0]
    folder = ends_folder(
        tmp_path / "base", generation_config={"eos_token_id": ids, "temperature": 0.6},
        special_tokens_map={"eos_token": tiny.END},
    )  # fmt: skip
    base = open_tokenizer(folder)
    assert base.backend.token_to_id(OTHER) == 320
    found = enriched_ends(base, tmp_path / "enriched")
    assert found.eos_ids == base.eos_ids == (0, 320)
    # The EOS of the tokenizer's settings is one of these, because chat templates may use it.
    assert AutoTokenizer.from_pretrained(tmp_path / "enriched").eos_token == tiny.END


@pytest.mark.parametrize("by_map", [False, True])
def test_eos_token_of_the_option_is_kept(tmp_path: Path, by_map: bool) -> None:
    files = {"special_tokens_map": {"eos_token": tiny.END, "pad_token": tiny.END}} if by_map else {}
    folder = ends_folder(tmp_path / "base", generation_config={"eos_token_id": 0}, **files)
    base = open_tokenizer(folder, OTHER)
    assert enriched_ends(base, tmp_path / "enriched").eos_ids == base.eos_ids == (320,)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "enriched")
    assert (loaded.eos_token, loaded.pad_token) == (OTHER, tiny.END if by_map else None)


def test_eos_token_that_is_not_special_does_not_become_special(tmp_path: Path) -> None:
    base = open_tokenizer(ends_folder(tmp_path / "base"), "}")
    assert enriched_ends(base, tmp_path / "enriched").eos_ids == base.eos_ids
    shutil.rmtree(tmp_path / "enriched")
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    assert enriched_ends(base, tmp_path / "enriched").eos_ids == base.eos_ids
