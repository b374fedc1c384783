"""Tests that ``tasc task`` registers, shows, changes, rolls back and deletes tasks."""

import json
import os
import pty
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from chat_families import make_chat_tokenizer
from lora_folders import make_adapter
from support import write_rows
from tasc_command import InProcess
from tasc_runtime.models import chat_template, dtype_here, keep_prompt
from tasc_store import ArtifactStore, CorpusRow, CorpusStore, TaskStore
from tasc_text import PromptTemplate
from tiny import make_folder, make_model

pytestmark = pytest.mark.redis
Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli-tasks"))


@pytest.fixture
def store(client: redis.Redis) -> TaskStore:
    return TaskStore(client)


@pytest.fixture
def task(tasc_here: InProcess) -> Run:
    """``tasc task`` on the shared store."""
    return lambda *args, code=0: tasc_here.run("task", *args, code=code)


@pytest.fixture
def create(folder: Path, name: str) -> tuple[object, ...]:
    """Returns arguments that register a task."""
    return ("create", name, "--model", folder, "--template", "{input}")


def test_auto_dtype_is_resolved_by_the_tasks_quantization(task, create, store, name) -> None:
    task(*create, "--dtype", "auto")
    assert store.get(name).dtype == dtype_here("auto")
    task("set", name, "--quantization", "int8-dynamic", "--dtype", "float32")
    task("set", name, "--dtype", "auto", "--max-tokens", "9")
    assert (store.get(name).dtype, store.get(name).max_tokens) == ("float32", 9)


def test_task_uses_the_chat_template_of_its_model(task, store, tmp_path, name) -> None:
    model = make_chat_tokenizer(tmp_path / "model", "phi")
    make_model(model)
    few = tmp_path / "few.jsonl"
    write_rows(few, [{"input": "wake me", "output": "alarm"}])
    task(
        "create", name, "--model", model, "--chat-template", "auto", "--system-prompt", "Label it.",
        "--few-shot", few,
    )  # fmt: skip
    first = store.get(name)
    assert first.chat
    assert first.chat.render("play") == (
        "<|system|>\nLabel it.<|end|>\n<|user|>\nwake me<|end|>\n<|assistant|>\nalarm<|end|>\n"
        "<|user|>\nplay<|end|>\n<|assistant|>\n"
    )
    assert "system_prompt " in task("show", name)
    assert json.loads(task("show", name, "--json"))["record"]["chat"]["system"] == "Label it."
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1].content }}{{ eos_token }}")
    task("set", name, "--chat-template", file, "--unset", "few-shot")
    chat = store.get(name).chat
    assert (chat.render("play"), chat.system, chat.shots) == ("play<|end|>", "Label it.", ())
    task("set", name, "--template", "say {input}")
    assert (store.get(name).chat, store.get(name).template) == (None, "say {input}")
    assert "--chat-template" in task("set", name, "--system-prompt", "a", code=2)
    task("use", name, 1)
    assert store.get(name) == first
    loops = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    for wrong in ("{{ raise_exception('no') }}", loops, "{% if", ""):
        file.write_text(wrong)
        assert "--chat-template" in task("set", name, "--chat-template", file, code=2)
    assert store.get(name) == first


def test_task_of_a_fine_tuned_model_keeps_the_training_prompt(
    task, tasc_here, store, tmp_path, name
):
    folder = make_chat_tokenizer(tmp_path / "model", "phi")
    make_model(folder)
    trained = replace(chat_template(folder), system="Label it.", shots=(("wake me", "alarm"),))
    keep_prompt(folder, trained)
    model = ("create", name, "--replace", "--model", folder)
    for given, chat in (
        ((), trained),
        (("--chat-template", "auto"), trained),
        (("--system-prompt", "Be brief."), replace(trained, system="Be brief.")),
        (("--template", "say {input}"), None),
    ):
        task(*model, *given)
        assert store.get(name).chat == chat
        assert ("another prompt" in tasc_here.err) == (chat != trained)
    keep_prompt(folder, PromptTemplate(r"say \n {input}"))
    task(*model, "--max-tokens", 9)
    assert (store.get(name).chat, store.get(name).template) == (None, r"say \n {input}")
    assert "--chat-template" in task(*model, "--system-prompt", "Be brief.", code=2)


def test_generation_settings_of_the_model_are_offered_as_options(
    tasc_here: InProcess, store: TaskStore, folder: Path, tmp_path: Path, name: str
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    (model / "generation_config.json").write_text(json.dumps(settings))
    create = ("task", "create", name, "--model", model, "--template", "{input}", "--top-k", 5)
    tasc_here.run(*create)
    command = tasc_here.err.partition("`tasc ")[2].partition("`")[0]
    tasc_here.run(*shlex.split(command))
    assert store.get(name).sampling.given == {
        "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1,
    }  # fmt: skip
    chosen = ("--temperature", 0, "--repetition-penalty", 1)
    tasc_here.run(*create, *chosen, "--replace")
    assert "tasc task set" not in tasc_here.err


def test_task_is_created_changed_and_rolled_back(task, store, folder, name) -> None:
    out = task(
        "create", name, "--model", folder, "--template", r"say {input}\n", "--stop", r"\n",
        "--max-tokens", 40, "--temperature", 0.5, "--mixture", "trie", "--draft", "n_max=5",
    )  # fmt: skip
    assert out == f"{name} version 1\n"
    first = store.get(name)
    assert (first.template, first.stop, first.max_tokens) == ("say {input}\n", ("\n",), 40)
    assert (first.sampling.temperature, first.draft.mixture, first.draft.n_max) == (0.5, "trie", 5)
    out = task("set", name, "--top-p", 0.9, "--unset", "temperature", "--unset", "stop")
    assert "version 2" in out
    assert all(change in out for change in ("temperature 0.5 -> unset", "top_p unset -> 0.9"))
    assert "no changes" in task("set", name, "--top-p", 0.9)
    assert "version 3" in task("use", name, 1)
    assert store.get(name) == first
    task("use", name, 3)
    assert store.versions(name) == [1, 2, 3]
    task("set", name, "--unset", "draft", "--unset", "max-tokens")
    last = store.get(name)
    assert (last.max_tokens, last.draft.mixture, last.draft.n_max) == (256, "mixed", 6)


def test_each_change_can_be_printed_as_one_json_object(task, store, create, name) -> None:
    made = json.loads(task(*create, "--choice=yes", "--json"))
    assert (made["name"], made["version"], made["index"]) == (name, 1, None)
    assert (made["record"]["choices"], made["longest_label"]) == (["yes"], 3)
    changed = json.loads(task("set", name, "--max-tokens", 9, "--json"))
    assert (changed["version"], changed["changed"]) == (2, {"max_tokens": [256, 9]})
    used = json.loads(task("use", name, 1, "--json"))
    assert (used["version"], used["same_as"]) == (3, 1)
    assert json.loads(task("delete", name, "--yes", "--json"))["name"] == name
    assert name not in store.names()


def shown(text: str) -> dict[str, str]:
    """The settings that `tasc task show` prints above the versions."""
    lines = text.partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_adapters_are_registered_shown_replaced_and_unset(
    task: Run, store: TaskStore, create: tuple[object, ...], folder: Path, name: str, tmp_path: Path
) -> None:
    place = make_adapter(folder, tmp_path / "lora")
    task(*create, "--adapters", f"z={place}", "--adapters", f"a={place}")
    assert store.get(name).adapters == (("z", str(place)), ("a", str(place)))
    assert shown(task("show", name))["adapters"] == f"z={place}, a={place}"
    assert f"{name}\t{folder}\tz, a\t1" in task("list").splitlines()
    assert "--adapters b=" in task("set", name, "--adapters", f"b={folder}", code=2)
    assert "--adapter and adapters are set" in task("set", name, "--adapter", place, code=2)
    task("set", name, "--adapters", f"b={place}")
    assert store.get(name).adapter_names == ("b",)
    task("set", name, "--unset", "adapters", "--adapter", place)
    assert (store.get(name).adapters, store.get(name).adapter) == ((), str(place))


def test_existing_task_is_replaced_only_with_the_replace_option(task, store, create, name) -> None:
    task(*create, "--max-tokens", 5)
    assert "--replace" in task(*create, code=2)
    assert store.versions(name) == [1]
    assert task(*create, "--replace") == f"{name} version 2\n"
    assert store.get(name).max_tokens == 256


def test_refused_change_leaves_the_task_unchanged(task, store, create, name) -> None:
    task(*create, "--choice", "yes")
    for args, message in (
        ((), "nothing to change"),
        (("--max-tokens", 1), "--choices"),
        (("--unset", "model"), "--unset 'model'"),
        (("--top-k", 1, "--unset", "sampling"), "top_k: given as an option and in --unset"),
    ):
        assert message in task("set", name, *args, code=2)
    assert store.versions(name) == [1]
    assert "no task 'other-" in task("set", "other-" + name, "--top-k", 1, code=1)


def test_task_is_deleted_only_after_confirmation(
    task: Run, tasc_here: InProcess, monkeypatch: pytest.MonkeyPatch, store: TaskStore,
    client: redis.Redis, create: tuple[object, ...], folder: Path, name: str,
) -> None:  # fmt: skip
    task(*create)
    CorpusStore(client, name).append([CorpusRow("k", "in", "out")])
    artifacts = ArtifactStore(client, name, store.get(name).fingerprint)
    artifacts.announce(artifacts.publish(folder / "config.json", 1).version)
    task("create", f"{name}.b", "--model", folder, "--template", "{input}", "--corpus", name)
    what = f"task {name} (version 1, 1 corpus rows) and its draft indexes"

    assert "give --yes" in task("delete", name, code=2)
    assert f"{name}.b draft from the corpus of task {name}" in task("delete", name, "--yes", code=1)
    assert task("delete", f"{name}.b", "--yes").startswith("deleted task")
    for answer, code in (("n", 1), ("y", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        with os.fdopen(theirs) as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stdin", terminal)
            task("delete", name, code=code)
        os.close(ours)
        assert f"Delete {what}?" in tasc_here.err
        assert ("nothing was deleted" in tasc_here.err) == bool(code)
        assert tasc_here.out == ("" if code else f"deleted {what}\n")
        assert (name in store.names()) == bool(code)
    assert client.keys(f"tasc:{{{name}}}:*") == []


def test_unreadable_task_is_listed_as_unreadable(task, store, client, create, name) -> None:
    task(*create)
    client.rpush(f"tasc:{{{name}}}:records", "[]")
    (line,) = (line for line in task("list").splitlines() if line.startswith(name))
    assert f"the record of task {name} cannot be read" in line
    listed = {task["name"]: task for task in json.loads(task("list", "--json"))["tasks"]}
    assert "cannot be read" in listed[name]["unreadable"]
    task("delete", name, "--yes")
    assert name not in store.names()


def test_generate_refuses_invalid_options_before_it_starts(tasc_here, task, create, tmp_path, name):
    task(*create)
    source = write_rows(tmp_path / "in.jsonl", [{"input": "a"}])
    (tmp_path / "empty").touch()
    for args, message in (
        (("--temperature", 101), "--temperature is 101.0"),
        (("--top-p", 0, "--temperature", 1), "--top-p is 0"),
        (("--regex", ""), "--regex is empty"),
        (("--adapter", "gone"), "--adapter is 'gone'"),
        (("--schema", tmp_path / "empty"), "--schema is empty"),
        (("--input", tmp_path / "nowhere.jsonl"), "--input: "),
        (("--output", tmp_path), f"--output: {tmp_path} is the input"),
    ):
        base = ("generate", name, "--input", source, "--output", tmp_path / "out")
        err = tasc_here.run(*base, *args, code=2)
        assert message in err
        assert err.startswith("tasc: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
