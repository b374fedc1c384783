"""Tests the values of a record from options, and a job's model, prompt and rows."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from chat_families import make_chat_tokenizer
from support import refused
from tasc_draft.settings import DraftSettings
from tasc_jobs.demo.tasks import demo_record
from tasc_jobs.errors import EmptyCorpusError, UsageError
from tasc_jobs.task_inputs import GenerationSettings, InputOptions, TaskInputs, read_files
from tasc_jobs.tasks import shown
from tasc_jobs.tasks.generation_defaults import GenerationDefaults
from tasc_jobs.tasks.options import TaskOptions
from tasc_jobs.tasks.values import CHAT, NEURAL, defaults, flat, given_values, option, record_of
from tasc_protocol import SamplingDefaults
from tasc_runtime import models
from tasc_runtime.data.rows import Fields
from tasc_runtime.sampling_options import guide_of
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import ChatTemplate, PromptTemplate

RECORD = TaskRecord("t", "org/model", "f", "{input}")
OTHER = TaskRecord(
    "t", "org/other", "g", "say {input}", "org/adapter", "v1", "bfloat16", ("\n", "."), 8, "c",
    DraftSettings("tasc", n_max=4), "nf4", SamplingDefaults(temperature=0.5, top_k=3), ("a", "b"),
    neural=NeuralDrafting("/drafter", "neural", "recent", 9, 3, 8, 31, 0.5),
)  # fmt: skip
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT_TEMPLATE = ChatTemplate(TURNS, (("eos_token", "."),), "be", (("a", "b"),))
CHATS = replace(OTHER, template="{input}", chat=CHAT_TEMPLATE)


def test_record_values_have_unique_names_and_round_trip() -> None:
    names = [f.name for f in fields(TaskRecord)]
    names += [f.name for part in (SamplingDefaults, DraftSettings) for f in fields(part)]
    names += [*NEURAL, *CHAT]
    assert len(set(names)) == len(names)
    assert sorted(NEURAL.values()) == sorted(f.name for f in fields(NeuralDrafting))
    assert sorted(CHAT.values()) == sorted(f.name for f in fields(ChatTemplate))
    assert set(flat(RECORD)) == set(names) - {"sampling", "draft", "neural", "chat"}
    assert set(defaults()) == set(flat(RECORD)) - {"name", "model", "fingerprint", "template"}
    assert [record_of(flat(record)) for record in (RECORD, OTHER, CHATS)] == [RECORD, OTHER, CHATS]
    needed = {"name": "t", "model": "org/model", "fingerprint": "f", "template": "{input}"}
    assert record_of(needed) == record_of({**needed, **defaults()}) == RECORD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"template": "x"}, "--template has"),
        ({"top_p": 2.0}, "--top-p is 2.0"),
        ({"n_max": 99}, "--draft n_max is 99"),
        ({"mixture": "x"}, "--mixture is 'x'"),
        ({"choices": ("a", "a")}, "--choices has 'a' twice"),
        ({"corpus": "a b"}, "task name 'a b'"),
        ({"adapters": (("a", "b"), ("a", "c"))}, "--adapters has 'a' twice"),
        ({"adapter": "a", "adapters": (("a", "b"),)}, "--adapter and adapters are set"),
        ({"drafter": "d", "proposer": "x"}, "--proposer is 'x'"),
        ({"drafter": "d", "draft_vocabulary": "x"}, "--draft-vocabulary is 'x'"),
        ({"drafter": "d", "draft_depth": 17}, "--draft-depth is 17"),
        ({"drafter": "d", "draft_width": 32}, "--draft-depth 5 and width 32"),
        ({"draft_nodes": 9}, "--draft-nodes is 9"),
        ({"system_prompt": "be"}, "--chat-template"),
        ({"few_shot": (("a", "b"),)}, "--chat-template"),
        ({"chat_template": TURNS, "template": "x {input}"}, "--template is"),
        ({"chat_template": TURNS, "system_prompt": "x" * 300_000}, "--system-prompt has"),
    ],
)
def test_refused_value_is_named_by_its_option(change: dict[str, Any], message: str) -> None:
    with refused(UsageError, message):
        record_of({**flat(RECORD), **change})


def test_every_value_has_an_option_and_is_set_if_given() -> None:
    taken = {f"--{f.name.replace('_', '-')}" for f in fields(TaskOptions)}
    set_by_jobs = ("chat_tokens", "label_temperature", "label_biases", "calibrated_for")
    given = [name for name in defaults() if name not in set_by_jobs]
    called = {option(name) for name in [*given, "model", "template"]}
    assert {name for name in called if not name.startswith("--draft ")} <= taken
    assert given_values(TaskOptions()) == {}
    options = TaskOptions(max_tokens=3, template=r"a\n{input}", stop=[r"\n", "x"], temperature=0.0)
    assert given_values(options) == {
        "max_tokens": 3, "template": "a\n{input}", "stop": ("\n", "x"), "temperature": 0.0,
    }  # fmt: skip
    given = {f.name: f.default for f in fields(DraftSettings)} | {"sources": "corpus, prompt"}
    pairs = [f"{name}={value}" for name, value in given.items()]
    found = given_values(TaskOptions(draft=pairs))
    assert DraftSettings(**found) == DraftSettings(sources=("corpus", "prompt"))
    assert {name: type(value) for name, value in found.items()} == {
        f.name: type(f.default) for f in fields(DraftSettings)
    }


def test_chat_template_replaces_the_format_string(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"input": "a", "output": "b"}\n')
    found = given_values(TaskOptions(chat_template="auto", system_prompt="be", few_shot=file))
    assert found == {
        "chat_template": "auto", "system_prompt": "be", "few_shot": (("a", "b"),),
        "template": "{input}",
    }  # fmt: skip
    with refused(UsageError, "--template", "--chat-template"):
        given_values(TaskOptions(chat_template="auto", template="{input}"))


def test_adapter_options_are_names_and_folders(tmp_path, monkeypatch) -> None:
    place = tmp_path / "fr=1"
    place.mkdir()
    monkeypatch.chdir(tmp_path)
    found = given_values(TaskOptions(model="./fr=1", adapter="org/adapter"))
    assert found == {"model": str(place), "adapter": "org/adapter"}
    found = given_values(TaskOptions(adapters=["fr=./fr=1", "de=org/adapter"]))
    adapters = (("fr", str(place)), ("de", "org/adapter"))
    assert found == {"adapters": adapters}
    words = shown.changes_in_words(shown.changes(RECORD, replace(RECORD, adapters=adapters[1:])))
    assert words == "adapters unset -> de=org/adapter"
    for wrong in ("fr", "=x", "fr="):
        with refused(UsageError, f"--adapters is '{wrong}'"):
            given_values(TaskOptions(adapters=[wrong]))


def test_labels_in_their_order_and_a_schema_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffone\r\n\n two \nthr\u2028ee".encode())
    found = given_values(TaskOptions(choice=["zero"], choices=path))
    assert found == {"choices": ("zero", "one", " two ", "thr\u2028ee")}
    path = tmp_path / "labels.json"
    path.write_text('["one", "two\\n"]')
    assert given_values(TaskOptions(choices=path)) == {"choices": ("one", "two\n")}
    path = tmp_path / "schema.json"
    path.write_text('{"type": "string"}')
    assert given_values(TaskOptions(schema=path)) == {"schema": '{"type": "string"}'}
    path.write_text(" " * 65_537)
    with refused(UsageError, f"--schema {path}", "65536"):
        given_values(TaskOptions(schema=path))
    with refused(UsageError, f"--schema {tmp_path}"):
        given_values(TaskOptions(schema=tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", b"", "has no labels"),
        ("l.txt", b"\n\n", "has no labels"),
        ("l.txt", b"good \ngood\nbad", "has 'good' several times"),
        ("l.txt", b"caf\xe9", "is not UTF-8"),
        ("l.txt", "one\ntwo\n".encode("utf-16"), "is UTF-16 text"),
        ("l.txt", "one\ntwo\n".encode("utf-16-le"), "is UTF-16-LE text"),
        ("l.json", '["one"]'.encode("utf-16"), "is UTF-16 text"),
        ("l.txt", b'[\n "one",\n "two"\n]\n', "is a JSON list"),
        ("l.json", b"{}", "is not a list of texts: "),
        ("l.json", b"[", "is not a list of texts: "),
        ("l.json", b"[1,2]", "is not a list of texts: 0 is 1: "),
        ("l.json", b'["a", ["a"]]', "is not a list of texts: 1 is ['a']: "),
        ("l.json", b'["\\udce6"]', "is not a list of texts: "),
        ("l.json", b"[" * 100_000, "is not a list of texts: "),
        ("l.txt", b"a" * 12_000_001, "is larger than 12000000 bytes"),
    ],
)
def test_invalid_label_file_is_named_in_the_error(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with refused(UsageError, f"--choices {path} {message}"):
        given_values(TaskOptions(choices=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TaskOptions(draft=["n_max"]), "--draft is 'n_max'"),
        (TaskOptions(draft=["nmax=3"]), "--draft is 'nmax=3'"),
        (TaskOptions(draft=["n_max=3.5"]), "--draft n_max is '3.5'"),
        (TaskOptions(draft=["min_prob=high"]), "--draft min_prob is 'high'"),
        (TaskOptions(draft=["n-max=3", "n_max=3"]), "n_max is given twice"),
        (TaskOptions(mixture="trie", draft=["mixture=trie"]), "mixture is given twice"),
    ],
)
def test_invalid_draft_setting_is_named_in_the_error(options: TaskOptions, message: str) -> None:
    with refused(UsageError, message):
        given_values(options)


def test_changes_of_a_task_are_the_values_that_differ() -> None:
    assert shown.changes(RECORD, RECORD) == {}
    found = shown.changes(RECORD, OTHER)
    assert found["n_max"] == (6, 4)
    assert found["temperature"] == (None, 0.5)
    assert record_of({**flat(RECORD), **{k: new for k, (_, new) in found.items()}}) == OTHER
    assert "top_p" not in shown.changes_in_words(found)
    new = replace(OTHER, choices=("b", "c", "d"), template="x" * 500 + "{input}")
    words = shown.changes_in_words(shown.changes(OTHER, new))
    assert ("+2 -1" in words, len(words) < 200) == (True, True)


def test_task_table_has_every_value_and_version() -> None:
    past = [shown.Past(1, {}), shown.Past(2, shown.changes(RECORD, CHATS))]
    past.append(shown.Past(3, shown.changes(CHATS, RECORD), same_as=1))
    lines = shown.table(CHATS, 2, past).splitlines()
    values = dict(line.split(maxsplit=1) for line in lines if line[:1].strip() and " " in line)
    assert (values.pop("version"), set(values)) == ("2 of 3", set(flat(CHATS)))
    assert values["stop"] == '["\\n", "."]'
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "3"]
    plain = shown.table(RECORD, 1, past[:1])
    assert ["drafter", "unset"] in [line.split() for line in plain.splitlines()]
    assert not any(name in plain for name in ("draft_depth", "system_prompt"))


DRAFT = DraftSettings(n_max=4)
FULL = TaskRecord("t", "org/model", "f", "say {input}", max_tokens=7, stop=(".",), draft=DRAFT)
SEVERAL = replace(FULL, adapters=(("a", "org/a"), ("b", "org/b")))


@pytest.mark.parametrize(
    ("options", "record", "wanted", "named"),
    [
        ({}, None, "source", "--model"),
        ({}, None, "template", "--template"),
        ({}, None, "tokenizer", "--tokenizer"),
        ({"model": "m", "dtype": "int4"}, None, "source", "int4"),
        ({"adapter": "a"}, FULL, "source", "--adapter a"),
        ({}, SEVERAL, "source", "a, b"),
        ({"system_prompt": "be"}, FULL, "template", "--chat-template"),
        ({"template": "{input}", "chat_template": "auto"}, FULL, "template", "--template"),
    ],
)
def test_missing_value_is_named_by_its_option(options, record, wanted, named):
    with refused(UsageError, named):
        getattr(TaskInputs(InputOptions(**options), record, ()), wanted)


@pytest.mark.parametrize(
    ("options", "record", "expected"),
    [
        ({}, FULL, (FULL.template, 7, (".",), FULL.draft)),
        ({"template": r"{input}\n", "max_tokens": 9}, FULL, ("{input}\n", 9, (".",), FULL.draft)),
        ({}, replace(FULL, choices=("a", "b")), (FULL.template, 7, (".",), FULL.draft)),
        ({"template": "{input}"}, None, ("{input}", TaskRecord.max_tokens, (), DraftSettings())),
    ],
)
def test_options_override_the_record(options, record, expected):
    template, *rest = expected
    found = TaskInputs(InputOptions(**options), record, ()).generation
    assert found == GenerationSettings(PromptTemplate(template), *rest, found.guide)
    assert found.guide == (record and guide_of(record))


def test_jobs_use_the_chat_template_of_options_or_record(tmp_path: Path) -> None:
    model, few = make_chat_tokenizer(tmp_path / "model", "qwen"), tmp_path / "few.jsonl"
    few.write_text('{"input": "a", "output": "b"}\n')
    named = InputOptions(model=str(model), chat_template="auto", system_prompt="be", few_shot=few)
    for record in (None, FULL):
        template = TaskInputs(named, record, ()).template
        turns = [f"<|im_start|>{turn}<|im_end|>\n" for turn in (
            "system\nbe", "user\na", "assistant\nb", "user\nhi",
        )]  # fmt: skip
        assert template.render("hi") == "".join(turns) + "<|im_start|>assistant\n"
    assert TaskInputs(InputOptions(), CHATS, ()).template == CHATS.chat
    changed = TaskInputs(InputOptions(system_prompt="do"), CHATS, ()).template
    assert changed.render("hi") == "doabhi"
    assert TaskInputs(InputOptions(system_prompt=""), CHATS, ()).template.render("hi") == "abhi"
    assert TaskInputs(InputOptions(template="{input}"), CHATS, ()).template.render("hi") == "hi"


def test_rows_without_a_store_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{i}", "a": "x"}}\n' for i in range(3)))
    options = InputOptions("t", files=[path], fields=Fields("q", "a"), limit=2)
    assert [row.input for row in TaskInputs.read(None, options).some_rows] == ["0", "1"]
    assert not TaskInputs.read(None, options, with_rows=False).rows
    with refused(EmptyCorpusError, path.name, "'input'"):
        read_files([path], Fields())
    with refused(EmptyCorpusError, "task t"):
        _ = TaskInputs.read(None, InputOptions("t")).some_rows


@pytest.mark.parametrize(
    ("settings", "options", "others"),
    [
        ({"eos_token_id": 2, "temperature": 0.7, "top_p": 0.9}, "", set()),
        ({"do_sample": False, "top_k": 20, "repetition_penalty": 1.0, "num_beams": 1}, "", set()),
        ({"repetition_penalty": 1.1}, "--repetition-penalty 1.1", set()),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
            "--temperature 0.7 --top-k 20 --top-p 0.8 --min-p 0.1",
            set(),
        ),
        ({"do_sample": True}, "--temperature 1.0 --top-k 50", set()),
        ({"do_sample": True, "top_k": 0}, "--temperature 1.0", set()),
        ({"stop_strings": ["a", "b"]}, "--stop a --stop b", set()),
        ({"stop_strings": "ab"}, "--stop ab", set()),
        ({"stop_strings": ["-x", "", 1, "a"]}, "--stop=-x --stop a", set()),
        ({"stop_strings": 5, "repetition_penalty": 0}, "", set()),
        ({"do_sample": True, "top_k": -1, "temperature": "hot", "top_p": 2}, "", set()),
        ({"no_repeat_ngram_size": 3, "num_beams": 4}, "", {"no_repeat_ngram_size", "num_beams"}),
        ({"suppress_tokens": [5], "typical_p": 0.2}, "", {"suppress_tokens"}),
    ],
)
def test_generation_settings_of_a_model_become_options(tmp_path, settings, options, others) -> None:
    """`generate` of transformers reads config.json where there is no generation_config.json."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps(settings))
        found = GenerationDefaults.of(tmp_path)
        assert (found.file, " ".join(found.options), {*found.others}) == (name, options, others)
        assert bool(found.in_words("a way out")) == bool(options or others)
        (tmp_path / "config.json").write_text('{"repetition_penalty": 9}')
    assert not found.without(found.values).options


@pytest.mark.parametrize(
    ("flags", "quantization", "dtype"),
    [
        ("fpu avx512_bf16 amx_tile", None, "bfloat16"),
        ("fpu avx2", None, "float32"),
        ("fpu avx512_bf16", "int8-dynamic", "float32"),
        ("fpu avx512_bf16", "int8-dynamic-float-head", "float32"),
        ("fpu avx512_bf16", "nf4", "bfloat16"),
    ],
)
def test_auto_dtype_is_resolved_for_this_processor(
    flags: str, quantization: str | None, dtype: str, tmp_path: Path, monkeypatch: Any
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(models, "PROCESSOR", processor)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert models.dtype_here("auto", quantization) == dtype
    assert models.dtype_here("float16", quantization) == "float16"
    processor.unlink()
    assert models.dtype_here("auto") == "float32"


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ("avx2 avx512_vnni avx512_bf16", {"dtype": "float32", "quantization": "int8-dynamic"}),
        ("avx2 avx_vnni", {"dtype": "float32"}),
        ("avx2 avx512_bf16", {"dtype": "bfloat16"}),
        ("avx2", {"dtype": "float32"}),
    ],
)
def test_demo_runs_in_what_this_processor_multiplies_fastest(
    flags: str, numbers: dict[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(models, "PROCESSOR", processor)
    assert models.fastest_on_cpu() == numbers
    record = demo_record("massive_en", **numbers)
    assert (record.dtype, record.quantization) == (numbers["dtype"], numbers.get("quantization"))
