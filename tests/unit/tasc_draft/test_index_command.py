"""Tests of `tasc-draft index`, which makes an index from a file of rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tasc_draft import read_index
from tasc_draft.__main__ import main
from tasc_draft.index.draft_index import INDEX_FILE
from tasc_jobs.demo.tasks import MODEL
from tasc_text import open_tokenizer
from tiny import make_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def indexed(tmp_path: Path, model: Path, text: str, *options: str, name: str = "rows") -> Any:
    file = tmp_path / name
    data = text.encode()
    file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    main(["index", str(file), "--model", str(model), "--to", str(tmp_path / "to"), *options])
    return read_index(tmp_path / "to" / INDEX_FILE)


def prompts_of(index: Any) -> int:
    return len(index.inputs.documents)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_index_of_prompts_and_outputs_has_the_rows(tmp_path, capsys, name):
    rows = [{"prompt": f"intent: wake me at {n}\n", "output": f"alarm {n}"} for n in range(9)]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    index = indexed(tmp_path, MODEL, text, "--json", name=name)
    tokenizer = open_tokenizer(MODEL)
    assert (index.fingerprint, index.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)
    assert prompts_of(index) == 9
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == 9
    assert printed["size_bytes"] == Path(printed["path"]).stat().st_size


def test_inputs_and_messages_are_rendered_as_chats(tmp_path, chat_model):
    """All rows say the same, so that both files make the same index."""
    turns = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"we sat {n}"}]
        for n in range(5)
    ]
    talks = [[*t, {"role": "assistant", "content": f"mat {n}"}] for n, t in enumerate(turns)]
    chats = "\n".join(json.dumps({"messages": talk}) for talk in talks)
    pairs = "\n".join(json.dumps({"input": f"we sat {n}", "output": f"mat {n}"}) for n in range(5))
    tokenizer, rendered = AutoTokenizer.from_pretrained(chat_model), []
    for turn in turns:
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        rendered.append({"prompt": text, "output": f"mat {len(rendered)}"})
    raw = "\n".join(map(json.dumps, rendered))
    files = [
        (indexed(tmp_path, chat_model, text, *options), (tmp_path / "to" / INDEX_FILE).read_bytes())
        for text, options in ((chats, ()), (pairs, ("--system", "Be brief.")), (raw, ()))
    ]
    assert files[0][1] == files[1][1] == files[2][1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["has no rows"]),
        ("[1]\n", ["line 1", "no JSON object"]),
        ('{"prompt": "a", "output": "b"}\n{"prompt"', ["line 2", "is not JSON"]),
        ('{"question": "a", "output": "b"}', ["line 1", "question", "input or prompt"]),
        ('{"prompt": "a", "output": 1}', ["line 1", "output"]),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', ["assistant"]),
        ('{"input": "a", "output": "b"}', ["no chat template", "prompt"]),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, capsys, text, named):
    with pytest.raises(SystemExit) as stopped:
        indexed(tmp_path, MODEL, text)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    for part in named:
        assert part in message


def test_missing_model_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        indexed(tmp_path, tmp_path / "none", '{"prompt": "a", "output": "b"}')
    assert stopped.value.code == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
