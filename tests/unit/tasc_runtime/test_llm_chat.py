"""Tests that `LLM` with a chat template gives the answers of transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel

import tiny
from chat_families import make_chat_tokenizer
from support import refused
from tasc_protocol import FieldError, Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError
from tasc_runtime.llm import LLM
from tasc_runtime.models import chat_template, keep_prompt
from tasc_text import PromptTemplate

SIZES: dict[str, Any] = {"dtype": "float64", "rows": 2, "max_model_len": 256, "cost_aware": False}
SYSTEM = "Say what it is."
SHOTS = [("wake me up", "alarm"), ("play some jazz", "music")]
TALK = [
    {"role": "user", "content": "set an alarm"},
    {"role": "assistant", "content": "alarm"},
    {"role": "user", "content": "for two hours"},
]


class Chats:
    """A model with a template like Llama 3's, which starts with a token that ends no answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_chat_tokenizer(folder, "llama")
        self.model: PreTrainedModel = tiny.make_model(folder, "llama", seed=1)
        self.theirs: Any = AutoTokenizer.from_pretrained(folder)

    def says(self, messages: list[dict[str, str]], **options: Any) -> str:
        options = {"add_generation_prompt": True, **options}
        ids = self.theirs.apply_chat_template(messages, **options)["input_ids"]
        answer = tiny.plain(self.model, ids, 24)
        return str(self.theirs.decode(answer, skip_special_tokens=True))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    return Chats(tmp_path_factory.mktemp("llm-chat") / "model")


@pytest.fixture(scope="module")
def bare(chats: Chats) -> LLM:
    return LLM(chats.folder, chat_template="auto", max_tokens=24, **SIZES)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_conversations_have_the_answers_of_transformers(chats: Chats, bare: LLM) -> None:
    several = [TALK, [user(tiny.SENTENCES[0])], [{"role": "system", "content": SYSTEM}, *TALK]]
    found = bare.chat(several)
    assert [answer.text for answer in found] == [chats.says(talk) for talk in several]
    assert [answer.index for answer in found] == [0, 1, 2]
    assert bare.chat(TALK)[0].text == found[0].text
    assert bare.generate(tiny.SENTENCES[0])[0].text == found[1].text
    (open_end,) = bare.chat(TALK, add_generation_prompt=False)
    assert open_end.text == chats.says(TALK, add_generation_prompt=False)
    assert bare.chat([]) == []


def test_special_tokens_are_added_once_and_as_requested(chats: Chats, bare: LLM) -> None:
    plain = LLM(chats.folder, template="say {input}", max_tokens=1, **SIZES)
    rows = EngineSettings(rows=2, max_model_len=256, cost_aware=False)
    builder, bos = EngineBuilder(plain.record, 1, rows), chats.theirs.bos_token
    (mark,) = builder.tokenizer.encode_outputs([bos])[0]

    def prompt(text: str, add: bool | None, templated: bool) -> tuple[int, ...]:
        asked = Request("1", text, templated=templated, add_special_tokens=add)
        return builder.reader.request(asked).prompt

    for templated, begin in ((False, ""), (True, "say ")):
        for text, add, marked in (
            ("wake me", None, True),
            ("wake me", True, True),
            ("wake me", False, False),
            (f"{bos}wake me", None, True),
            (f"{bos}wake me", False, False),
        ):
            if templated and text.startswith(bos):
                continue  # there it is text, like all that is put into a template
            ids = tuple(builder.tokenizer.encode_outputs([begin + text])[0])
            expected = (mark, *ids) if marked and ids[0] != mark else ids
            assert prompt(text, add, templated) == expected, (text, add, templated)
    for llm, own in ((plain, True), (bare, False)):
        whole, added, without = (
            llm.generate("wake me", add_special_tokens=add, max_tokens=1)[0].prompt_tokens
            for add in (None, True, False)
        )
        # The chat template writes the beginning itself.
        assert (whole, without) == (added, added - own)


def test_rows_with_system_prompt_and_examples_equal_transformers(chats, tmp_path) -> None:
    before = [{"role": "system", "content": SYSTEM}]
    for asked, answered in SHOTS:
        before += [user(asked), {"role": "assistant", "content": answered}]
    expected = [chats.says([*before, user(text)]) for text in tiny.SENTENCES]
    outputs = [text[::-1] if n % 3 == 0 else text for n, text in enumerate(expected)]
    llm = LLM(
        chats.folder, chat_template="auto", system_prompt=SYSTEM, few_shot=SHOTS, max_tokens=24,
        corpus=list(zip(tiny.SENTENCES, outputs, strict=True)), cache_dir=tmp_path, **SIZES,
    )  # fmt: skip
    found = llm.generate(tiny.SENTENCES)
    assert [answer.text for answer in found] == expected
    accepted, drafted = (sum(getattr(a, n) for a in found) for n in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    llm.save(tmp_path / "saved")
    again = LLM.load(tmp_path / "saved")
    assert again.record == llm.record
    assert again.chat([user(tiny.SENTENCES[1])])[0].text == expected[1]


def test_examples_are_read_from_files_and_objects(chats: Chats, tmp_path: Path) -> None:
    rows = [{"input": asked, "output": answered} for asked, answered in SHOTS]
    (tmp_path / "shots.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for given in (str(tmp_path / "shots.jsonl"), tmp_path / "shots.jsonl", rows, SHOTS):
        llm = LLM(chats.folder, chat_template="auto", few_shot=given, **SIZES)
        assert llm.record.chat
        assert llm.record.chat.shots == tuple(SHOTS)
    for wrong, kind in (("gone.jsonl", FileError), ([("a",)], ValueError), (5, TypeError)):
        with pytest.raises(kind, match="few_shot"):
            LLM(chats.folder, chat_template="auto", few_shot=wrong, **SIZES)


def test_fine_tuned_model_uses_the_prompt_of_its_training(chats: Chats, tmp_path: Path) -> None:
    model = shutil.copytree(chats.folder, tmp_path / "model")
    trained = replace(chat_template(model), system=SYSTEM, shots=tuple(SHOTS))
    keep_prompt(model, trained)
    assert LLM(model, **SIZES).record.chat == trained
    other = LLM(model, chat_template="auto", system_prompt="Be brief.", **SIZES)
    assert other.record.chat == replace(trained, system="Be brief.")
    assert LLM(model, template="a {input}", **SIZES).record.chat is None
    bare = LLM(model, system_prompt="", few_shot=[], **SIZES)
    assert bare.record.chat == chat_template(model)
    assert LLM(model, few_shot=[], **SIZES).record.chat == replace(trained, shots=())
    keep_prompt(model, PromptTemplate("say {input}"))
    assert LLM(model, **SIZES).record.template == "say {input}"
    found = LLM(model, chat_template="auto", **SIZES).record
    assert (found.template, found.chat) == ("{input}", chat_template(model))


def test_prompt_in_a_hub_repository_is_ignored(chats, tmp_path, monkeypatch) -> None:
    """Only a local folder may set the prompt, as in `tasc task create`."""
    repository, commit = tmp_path / "models--team--tiny", "a" * 40
    snapshot = Path(shutil.copytree(chats.folder, repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    keep_prompt(snapshot, PromptTemplate("say {input}"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert LLM("team/tiny", **SIZES).record.template == "{input}"
    assert LLM(snapshot, **SIZES).record.template == "say {input}"


def test_invalid_conversation_or_option_is_named_in_the_error(chats: Chats, bare: LLM) -> None:
    for messages in ([{"role": "tool", "content": "a"}], [{"role": "user"}], [user("a"), "b"]):
        with pytest.raises(FieldError):
            bare.chat(messages)
    whole = [user("a")]
    for several, named in [
        (None, "messages is None"), ([5], "conversation 0 is 5"),
        ([whole, [{"role": "usr", "content": "a"}]], "conversation 1: messages.0.role is 'usr'"),
    ]:  # fmt: skip
        with refused(FieldError, named, field="messages"):
            bare.chat(several)  # type: ignore[arg-type]
    with refused(FieldError, "nonsense"):
        bare.chat([], nonsense=1)
    with refused(FieldError, field="chat_template_kwargs"):
        bare.chat(TALK, chat_template_kwargs={"messages": []})
    no_system = LLM(
        chats.folder, max_tokens=8, **SIZES,
        chat_template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ messages[-1].content }}",
    )  # fmt: skip
    with refused(FieldError, "no system"):
        no_system.chat([{"role": "system", "content": "a"}, user("b")])
    for wrong in ({"system_prompt": "a"}, {"template": "a {input}", "chat_template": "auto"}):
        with pytest.raises(ValueError, match="template"):
            LLM(chats.folder, **wrong, **SIZES)
