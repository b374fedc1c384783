"""Tokenizer folders and hub names: fingerprints, ends of answers, refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from support import refused
from tasc_text import TaskTokenizer, TextError, TokenizerError, resolve_folder
from tasc_text.formats import other_format
from tiny import END, SENTENCES, make_tokenizer

CONFIGS = ("generation_config.json", "config.json", "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def resave(folder: Path, change: Callable[[Tokenizer], object]) -> TaskTokenizer:
    """The tokenizer of a copy of the folder, changed."""
    other = shutil.copytree(folder, folder.with_name("other"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(other / "tokenizer.json"))
    return TaskTokenizer.from_folder(other)


def test_padding_and_truncation_do_not_change_the_fingerprint(folder: Path) -> None:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.enable_padding(length=50)
        tokenizer.enable_truncation(3)

    one, other = TaskTokenizer.from_folder(folder), resave(folder, change)
    assert json.loads(other.path.read_text())["padding"]
    assert one.fingerprint == other.fingerprint
    assert len(one.fingerprint) == 32
    int(one.fingerprint, 16)
    # The settings do not act either.
    assert other.encode_prompt(SENTENCES[0]) == one.encode_prompt(SENTENCES[0])
    assert other.encode_outputs(SENTENCES) == one.encode_outputs(SENTENCES)


def test_vocabulary_and_end_of_sequence_change_the_fingerprint(folder: Path) -> None:
    """The vocabulary's size is one above the largest id."""
    one = TaskTokenizer.from_folder(folder)
    other = resave(folder, lambda t: t.add_tokens(["a task token"]))
    assert other.backend.id_to_token(one.vocab_size) == "a task token"
    assert other.vocab_size == one.vocab_size + 1
    ends = TaskTokenizer(one.path, [*one.eos_ids, 7])
    assert len({each.fingerprint for each in (one, other, ends)}) == 3


def test_eos_token_of_the_tokenizer_precedes_eos_tokens_of_other_files(folder: Path) -> None:
    write(folder, "generation_config.json", eos_token_id=[3, 0])
    write(folder, "config.json", eos_token_id=5)
    assert TaskTokenizer.from_folder(folder).eos_ids == (0, 3, 5)
    assert TaskTokenizer.from_folder(folder).eos_id == 0
    (folder / "tokenizer_config.json").unlink()
    assert TaskTokenizer.from_folder(folder).eos_ids == (3, 0, 5)
    (folder / "generation_config.json").unlink()
    assert TaskTokenizer.from_folder(folder).eos_ids == (5,)
    write(folder, "config.json", text_config={"eos_token_id": [7]})
    assert TaskTokenizer.from_folder(folder).eos_ids == (7,)
    write(folder, "special_tokens_map.json", eos_token={"content": END})
    write(folder, "config.json", eos_token_id=None)
    assert TaskTokenizer.from_folder(folder).eos_ids == (0,)


TURNS = "{% for m in messages %}<|role|>{{ m.role }}:{{ m.content }}"


@pytest.mark.parametrize(
    ("suffix", "ends"),
    [
        ("<|turn|>\n{% endfor %}", ["<|turn|>", END]),  # Gemma 3, Phi-3
        (" {{ eos_token }}{% endfor %}", [END]),  # Llama 2
        ("\n{% endfor %}<|role|>assistant:", ["<|role|>", END]),
        ("{% endfor %}", [END]),
        ("\nend<|turn|>{% endfor %}", [END]),
        ("{% endfor %}{{ raise_exception('no answers') }}<|turn|>", [END]),
        ("{% endfor <|turn|>", [END]),
    ],
)
@pytest.mark.parametrize("place", ["file", "settings", "named"])
def test_turn_end_of_the_chat_template_is_the_first_eos_token(folder, suffix, ends, place) -> None:
    folder = resave(folder, lambda t: t.add_special_tokens(["<|role|>", "<|turn|>"])).path.parent
    source = TURNS + suffix
    if place == "file":
        (folder / "chat_template.jinja").write_text(source)
    else:
        named = [{"name": "tool", "template": ""}, {"name": "default", "template": source}]
        template = named if place == "named" else source
        write(folder, "tokenizer_config.json", eos_token=END, chat_template=template)
    tokenizer = TaskTokenizer.from_folder(folder)
    assert [*map(tokenizer.backend.id_to_token, tokenizer.eos_ids)] == ends


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role == 'user' %}<|role|>{{ m.content }}<|turn|>{% endfor %}",
        TURNS.replace("m.content", "m.content|upper") + "<|turn|>{% endfor %}",
        TURNS.replace("m.content", "m.content|replace('-', ' ')") + "<|turn|>{% endfor %}",
    ],
)
def test_chat_template_that_changes_answers_gives_no_eos_token(folder, source):
    folder = resave(folder, lambda t: t.add_special_tokens(["<|role|>", "<|turn|>"])).path.parent
    write(folder, "tokenizer_config.json", eos_token=END, chat_template=source)
    tokenizer = TaskTokenizer.from_folder(folder)
    assert [*map(tokenizer.backend.id_to_token, tokenizer.eos_ids)] == [END]


@pytest.mark.parametrize("token", [END, {"content": END, "special": True}])
def test_eos_token_of_the_tokenizer_is_a_string_or_a_dict(folder: Path, token: object) -> None:
    tokenizer = resave(folder, lambda t: t.add_special_tokens(["<|other|>"]))
    folder = tokenizer.path.parent
    write(folder, "tokenizer_config.json", eos_token=token)
    assert TaskTokenizer.from_folder(folder).eos_ids == tokenizer.eos_ids == (0,)
    write(folder, "tokenizer_config.json", eos_token="<|other|>")
    assert TaskTokenizer.from_folder(folder).eos_ids == (tokenizer.vocab_size - 1,)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer_config.json", b"{}", "eos_token_id"),
        ("tokenizer_config.json", b'{"eos_token": null}', "eos_token_id"),
        ("tokenizer_config.json", b'{"eos_token": "<|nowhere|>"}', "eos_token_id"),
        *((name, b'{"eos_token_id": ', name) for name in CONFIGS),
    ],
)
def test_settings_without_an_eos_token_are_refused(folder, name, content, named):
    (folder / name).write_bytes(content)
    with refused(TokenizerError, named):
        TaskTokenizer.from_folder(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe\x00", b"[1]"])
def test_invalid_tokenizer_file_is_refused_and_named(folder: Path, content: bytes) -> None:
    write(folder, "config.json", eos_token_id=0)
    (folder / "tokenizer.json").write_bytes(content)
    with refused(TokenizerError, "tokenizer.json"):
        TaskTokenizer.from_folder(folder)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with refused(TokenizerError, "tokenizer.json"):
        TaskTokenizer.from_folder(tmp_path)


def test_prompts_have_special_tokens_but_outputs_do_not(folder: Path) -> None:
    def begin_with_mark(tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken("<|begin|>", special=True)])
        mark = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", mark)]
        )

    plain = TaskTokenizer.from_folder(folder).encode_outputs(SENTENCES)
    tokenizer = resave(folder, begin_with_mark)
    mark = tokenizer.vocab_size - 1
    assert tokenizer.encode_outputs(SENTENCES) == plain
    assert [tokenizer.encode_prompt(s) for s in SENTENCES] == [[mark, *ids] for ids in plain]


@pytest.mark.parametrize("front", ["<|begin|> ", ""])
def test_prompt_has_no_appended_eos_token_and_one_bos_token(folder, front) -> None:
    def append_end(tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens(["<|begin|>"])
        special = [(token, tokenizer.token_to_id(token)) for token in ("<|begin|>", END)]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(f"{front}$A {END}", None, special),
            ]
        )

    tokenizer = resave(folder, append_end)
    mark = [tokenizer.vocab_size - 1]
    plain = tokenizer.encode_outputs(SENTENCES)
    expected = [[*mark * bool(front), *ids] for ids in plain]
    assert tokenizer.backend.encode(SENTENCES[0]).ids == [*expected[0], 0]
    assert [tokenizer.encode_prompt(text) for text in SENTENCES] == expected
    assert [tokenizer.encode_prompt(text, False) for text in SENTENCES] == plain
    rendered = [f"<|begin|>{text}" for text in SENTENCES]
    assert [tokenizer.encode_prompt(text) for text in rendered] == [[*mark, *ids] for ids in plain]
    # An end that the prompt itself has stays.
    assert tokenizer.encode_prompt(f"{SENTENCES[0]}{END}") == [*expected[0], 0]
    assert tokenizer.encode_prompt("") == mark * bool(front)
    assert tokenizer.appended_ends == (0,)


def test_outputs_decode_to_their_text_without_the_eos_token(tokenizer: TaskTokenizer) -> None:
    texts = ["ab a", "", "東 🙂\nb"]
    outputs = tokenizer.encode_outputs(texts)
    assert [tokenizer.decode([*ids, tokenizer.eos_id]) for ids in outputs] == texts
    assert tokenizer.encode_outputs([]) == []


def test_byte_tokens_are_detected(byte_level, byte_fallback):
    assert (byte_level.byte_ids, byte_fallback.byte_ids) == (set(), {*range(3, 259)})


@pytest.mark.parametrize("text", ["ab a", "a\n中 東b", "naïve é", "\N{REPLACEMENT CHARACTER}a"])
def test_token_bytes_join_to_the_text(tokenizer, text):
    (ids,) = tokenizer.encode_outputs([text])
    found = [tokenizer.token_bytes(id_) for id_ in ids]
    assert b"".join(found).decode().removeprefix(" ") == text
    assert any(not utf8.isascii() and len(utf8) == 1 for utf8 in found) or text.isascii()


def test_special_tokens_have_their_spelling_as_bytes_and_unused_ids_none(tokenizer):
    written = tokenizer.backend.id_to_token(tokenizer.eos_id)
    assert tokenizer.eos_id in tokenizer.special_ids
    assert tokenizer.token_bytes(tokenizer.eos_id) == written.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


COMMIT, OTHER = "a" * 40, "b" * 40
CODE = """
import sys
from tasc_text import TextError, resolve_folder
try:
    print(resolve_folder(sys.argv[1], sys.argv[2] or None, weights=False))
except TextError as error:
    print("TextError:", error)
"""


def resolve_offline(home: Path, model: str, revision: str = "", **environment: str) -> str:
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)} | environment
    left = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, model, revision],
        env={**left, **settings}, cwd=home, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The hub's cache with two commits of one model; ``main`` is the first of them."""
    model = tmp_path / "hub" / "models--team--tiny"
    for commit in (COMMIT, OTHER):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return model


def test_folder_resolves_to_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = (tmp_path / "model").resolve()
    for name in ("model", "./model", str(tmp_path / "model"), "~/model"):
        assert resolve_folder(name, "any-revision") == expected


def test_cached_name_resolves_offline_and_a_local_folder_has_precedence(cache, tmp_path):
    assert resolve_offline(tmp_path, "team/tiny") == str(cache / "snapshots" / COMMIT)
    assert resolve_offline(tmp_path, "team/tiny", OTHER) == str(cache / "snapshots" / OTHER)
    assert "TextError: model 'team/tiny'" in resolve_offline(tmp_path, "team/tiny", "c" * 40)
    (tmp_path / "team" / "tiny").mkdir(parents=True)
    assert resolve_offline(tmp_path, "team/tiny") == str(tmp_path / "team" / "tiny")


@pytest.mark.parametrize(
    "environment", [{}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_unavailable_hub_name_is_refused_with_a_solution(tmp_path, environment):
    message = resolve_offline(tmp_path, "team/missing", **environment)
    assert message.startswith("TextError: model 'team/missing' ")
    assert message.endswith("check the spelling, or name a local folder")


@pytest.mark.parametrize(
    "name",
    ["no/such/folder", "a b", "/nowhere/at/all", "./nowhere", "../nowhere", "~/nowhere/at/all"],
)
def test_invalid_hub_name_is_refused(name: str) -> None:
    with refused(TextError, name):
        resolve_folder(name)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "tiny.Q4.gguf",
            ("gguf_file='tiny.Q4.gguf'", "save_pretrained('tiny.Q4')", "AutoTokenizer"),
        ),
        ("model.safetensors", ("name its folder",)),
        ("pytorch_model.bin", ("may run code", "save_pretrained")),
        ("model.pt", ("may run code", "save_pretrained")),
        ("model.onnx", ("ONNX", "made from")),
        ("openvino_model.xml", ("OpenVINO", "made from")),
        ("model.tar.gz", ("unpack",)),
        ("config.json", ("folder",)),
    ],
)
def test_file_in_place_of_a_folder_is_refused_with_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: tuple[str, ...]
) -> None:
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / name), name):  # the second could be a name on the hub
        for refusal in (resolve_folder, lambda path: TaskTokenizer.from_folder(Path(path))):
            with refused(TextError, name, *named) as caught:
                refusal(path)
            assert "\n" not in str(caught.value)


def test_other_weight_formats_are_reported_if_there_are_no_safetensors(
    tmp_path: Path,
) -> None:
    for name in ("pytorch_model.bin", "tf_model.h5", "model.onnx", "a.gguf"):
        (tmp_path / name).touch()
        assert other_format(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert other_format(tmp_path) is None
