"""Tests `LLM`: the engine from Python, its corpora, its folder, and the end of calls."""

import json
import math
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lora_folders import WEIGHTS, cut, make_adapter
from support import eventually, failing_where, refused
from tasc_draft import DraftIndex, DraftSettings
from tasc_engine import EngineError, Request
from tasc_protocol import FieldError
from tasc_runtime.data.saved_task import SavedTask
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError, ServiceError
from tasc_runtime.llm import Completion
from tasc_serve import LLM
from tasc_store import IndexRefused, NeuralDrafting
from tasc_text import TextError
from tiny import END, SENTENCES, make_folder

TEMPLATE = "say: {input}\n"
SIZES = {"dtype": "float64", "rows": 2, "max_model_len": 128, "cost_aware": False}
INPUTS = [f"{sentence} {number}" for number in range(3) for sentence in SENTENCES]


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, template=TEMPLATE, max_tokens=24, **SIZES)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[str]:
    return [answer.text for answer in plain.generate(INPUTS, draft=False)]


@pytest.fixture(scope="module")
def pairs(expected: list[str]) -> list[tuple[str, str]]:
    """Returns the model's answers, and every third time another text, so some drafts fail."""
    texts = [text[::-1] if n % 3 == 0 else text for n, text in enumerate(expected)]
    return list(zip(INPUTS, texts, strict=True))


@pytest.fixture(scope="module")
def llm(folder: Path, pairs: Any, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    cache = tmp_path_factory.mktemp("cache")
    return LLM(folder, corpus=pairs, template=TEMPLATE, max_tokens=24, cache_dir=cache, **SIZES)


def test_indexes_and_costs_are_in_the_xdg_cache_folder(folder, pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    LLM(folder, corpus=pairs, **{**SIZES, "cost_aware": True}, cost_seconds=0.01)
    kept = tmp_path / "cache" / "tasc-serve"
    assert list(kept.glob("local-indexes/*.tasc"))
    assert list(kept.glob("costs/*.json"))
    assert not (tmp_path / "home").exists()


def test_corpus_saves_steps_and_changes_no_answer(llm: LLM, expected: list[str]) -> None:
    answers = llm.generate(INPUTS)
    assert [answer.text for answer in answers] == expected
    assert [answer.index for answer in answers] == list(range(len(INPUTS)))
    accepted, drafted = (sum(getattr(a, n) for a in answers) for n in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    assert sum(answer.steps for answer in answers) < sum(len(answer.tokens) for answer in answers)
    assert all(0 <= answer.acceptance <= 1 for answer in answers)
    summary = llm.summary()
    assert summary.answers == len(INPUTS)
    assert summary.tokens == sum(len(answer.tokens) for answer in answers)
    assert summary.accepted == accepted == sum(summary.accepted_by_source.values())
    assert summary.plain_steps == summary.tokens  # nothing is guided
    assert f"{summary.plain_steps / len(INPUTS):.2f}" in str(summary)


def test_stream_yields_the_answer_in_pieces(llm: LLM, expected: list[str]) -> None:
    pieces = list(llm.stream(INPUTS[1]))
    assert len(pieces) > 1
    assert "".join(pieces) == expected[1]


def test_second_call_is_refused_until_the_stream_is_closed(llm, expected: list[str]) -> None:
    stream = llm.stream(INPUTS[0], ignore_eos=True)
    assert next(stream)
    with pytest.raises(RuntimeError):
        llm.generate(INPUTS[0])
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate(INPUTS[0])[0].text == expected[0]


def test_generate_and_stream_return_no_other_request_of_the_engine(llm, expected) -> None:
    for ask in (llm.generate, llm.stream):
        llm.engine.submit(Request("a", (1, 2, 3), 1))
        texts = [piece if isinstance(piece, str) else piece.text for piece in ask(INPUTS[0])]
        assert "".join(texts) == expected[0]
        assert not llm.engine.waiting + llm.engine.running


def test_every_kind_of_corpus_gives_the_same_index(folder: Path, pairs: Any, tmp_path) -> None:
    rows = [{"input": i, "output": o} for i, o in pairs]
    table, cache = pa.Table.from_pylist(rows), tmp_path / "cache"
    pq.write_table(table, tmp_path / "all.parquet")
    whole, *halves = (tmp_path / f"{name}.jsonl" for name in ("whole", "a", "b"))
    for file, part in ((whole, rows), (halves[0], rows[:9]), (halves[1], rows[9:])):
        file.write_text("\n".join(map(json.dumps, part)))
    files = whole, str(tmp_path / "all.parquet"), halves
    for corpus in (pairs, rows, iter(rows), *files, pd.DataFrame(rows), table, *table.to_batches()):
        LLM(folder, corpus=corpus, template=TEMPLATE, cache_dir=str(cache), **SIZES)
        assert len(list(cache.iterdir())) == 1  # named by content: all are the first
    others = {"corpus": pairs[1:], "template": "{input}", "draft": DraftSettings(n_max=4)}
    for n, (name, value) in enumerate(others.items()):
        differs = {"corpus": pairs, "template": TEMPLATE, name: value}
        LLM(folder, **differs, cache_dir=cache, **SIZES)
        assert len(list(cache.iterdir())) == n + 2


def test_damaged_index_is_rebuilt(folder: Path, pairs: Any, tmp_path: Path) -> None:
    made = LLM(folder, corpus=pairs, template=TEMPLATE, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    again = LLM(folder, corpus=pairs, template=TEMPLATE, cache_dir=tmp_path, **SIZES)
    assert again.generate(INPUTS[2])[0].drafted == made.generate(INPUTS[2])[0].drafted > 0


def test_only_old_indexes_are_removed_from_the_cache(llm, folder, pairs, tmp_path) -> None:
    llm.save(tmp_path)
    old = tmp_path / f"{'0' * 32}.tasc"
    old.touch()
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    LLM(folder, corpus=pairs, template=TEMPLATE, cache_dir=tmp_path, **SIZES)
    assert not old.exists()
    LLM.load(tmp_path)


def test_invalid_corpus_is_refused(folder: Path, tmp_path: Path) -> None:
    pairs = (
        [("a", "b"), ("c", " ")],
        [("a", "b"), ("c", None)],
        [("a", "b"), ("c", math.nan)],
        [b"ab"],
        [("a", "b", "c")],
        [{"input": "a"}],
        [],
    )
    kinds = {int: TypeError, dict: TypeError, str: FileError}
    columns = {"input": ["a"], "output": ["b"]}
    splits = {"train": pa.table(columns)}
    for corpus in (*pairs, pa.table({"input": ["a"]}), 7, columns, splits, "absent.jsonl"):
        with pytest.raises(kinds.get(type(corpus), ValueError)):
            LLM(folder, corpus=corpus, **SIZES)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "output": "b"}\n{"input": "a"}\n')
    with refused(FileError, "line 2"):
        LLM(folder, corpus=file, **SIZES)


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"model": "./nowhere"}, TextError, "./nowhere"),
        ({"adapter": "./nowhere"}, TextError, "./nowhere"),
        ({"template": "say it"}, ValueError, "{input}"),
        ({"device": "cuda:99"}, ValueError, "cuda:99"),
        ({"device": "gpu"}, ValueError, "'gpu'"),
        ({"dtype": "int4"}, ValueError, "int4"),
        ({"rows": 0}, ValueError, "rows is 0"),
        ({"adaptor": "a"}, ValueError, "did you mean adapter?"),
        ({"tensor_parallel_size": 2}, ValueError, "known are adapter"),
        ({"choices": ["a"], "regex": "a"}, ValueError, "regex"),
        ({"choices": 5}, ValueError, "choices is 5"),
        ({"choices": "labels.txt"}, ValueError, "choices is 'labels.txt'"),
        ({"stop": 5}, ValueError, "stop is 5"),
        ({"adapters": ["a"]}, ValueError, "adapters is ['a']"),
        ({"draft": {"n_max": 3}}, ValueError, "draft is {'n_max': 3}"),
        ({"chat_template": "{{ messages }}", "few_shot": [("a",)]}, ValueError, "few_shot"),
        ({"draft": DraftSettings(n_max=3), "corpus": "absent.jsonl"}, FileError, "absent.jsonl"),
    ],
    ids=str,
)
def test_invalid_argument_is_named_in_the_error(
    folder: Path, options: Any, kind: Any, named: str
) -> None:
    with refused(kind, named):
        LLM(**{"model": folder, **SIZES, **options})


def test_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    names = ("narrow", "deep", "shallow", "odd")
    narrow, deep, shallow, odd = (make_adapter(folder, tmp_path / name) for name in names)
    cut(narrow)
    tensors = load_file(deep / WEIGHTS)
    first = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    save_file(first, shallow / WEIGHTS)
    third = {name.replace("layers.0", "layers.2"): tensor.clone() for name, tensor in first.items()}
    save_file(tensors | third, deep / WEIGHTS)
    other = make_folder(tmp_path / "other", "gpt_neox")
    for model, adapter in ((folder, narrow), (folder, deep), (folder, shallow), (other, odd)):
        with refused(EngineError, str(adapter)):
            LLM(model, adapter=adapter, **SIZES)
        if adapter != shallow:
            with refused(EngineError, "adapter a"):
                LLM(model, adapters={"a": adapter}, **SIZES)


def test_saved_folder_gives_the_same_answers_and_drafts(llm: LLM, tmp_path: Path) -> None:
    llm.save(tmp_path / "task")
    loaded = LLM.load(tmp_path / "task", rows=1)
    assert loaded.record == llm.record
    found, before = loaded.generate(INPUTS[1]), llm.generate(INPUTS[1])
    assert found[0].text == before[0].text
    assert found[0].accepted > 0


def test_invalid_saved_folder_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"format": 2}', '{"format": 1}', "[" * 200_000):
        (tmp_path / "llm.json").write_text(content)
        with refused(ServiceError, "llm.json"):
            LLM.load(tmp_path)


def test_saved_task_that_needs_a_ranking_from_a_store_is_refused(llm: LLM, tmp_path: Path) -> None:
    record = replace(llm.record, neural=NeuralDrafting("drafter", vocabulary="ranked"))
    SavedTask(record, EngineSettings(), llm.index).write(tmp_path)
    with refused(ServiceError, str(tmp_path), "from_task"):
        LLM.load(tmp_path)


def test_error_of_a_wrong_keyword_names_the_keyword(llm: LLM, tmp_path: Path) -> None:
    llm.save(tmp_path)
    with refused(ValueError, "rowz", "mean rows?"):
        LLM.load(tmp_path, rowz=3)
    with refused(ValueError, "template", "known are rows"):  # the saved task has its own
        LLM.load(tmp_path, template="{input}")
    (tmp_path / "index.tasc").unlink()
    with refused(ServiceError, "llm.json"):
        LLM.load(tmp_path)


def test_draft_settings_in_use_are_saved(folder: Path, pairs: Any, tmp_path: Path) -> None:
    settings = DraftSettings(num_speculative_tokens=3)
    llm = LLM(folder, corpus=pairs, cache_dir=tmp_path / "cache", **SIZES)
    for index in (None, llm.index, replace(llm.index, settings=DraftSettings())):
        llm.draft_from(index, settings)
        assert llm.record.draft == settings
        llm.save(tmp_path / "task")
        assert LLM.load(tmp_path / "task").record.draft == settings
    llm.draft_from(None)
    assert llm.record.draft == DraftSettings()


def test_mismatched_index_and_unknown_record_fields_are_refused(llm, plain, tmp_path):
    llm.save(tmp_path / "task")
    plain.save(tmp_path / "other")
    index, other = (tmp_path / name / "index.tasc" for name in ("task", "other"))
    whole = index.read_bytes()
    index.write_bytes(other.read_bytes())
    with refused(ServiceError, "index.tasc"):
        LLM.load(tmp_path / "task")
    index.write_bytes(whole)
    file = tmp_path / "task" / "llm.json"
    saved = json.loads(file.read_text())
    for changed, named in (
        ({"record": saved["record"] | {"colour": 1}}, "colour"),
        ({"record": saved["record"] | {"template": "say"}}, "template"),
        ({"engine": {"colour": 1}}, "colour"),
        ({"engine": {"rows": "many"}}, "rows is 'many'"),
    ):
        file.write_text(json.dumps(saved | changed))
        with refused(ServiceError, "version", named) as error:
            LLM.load(tmp_path / "task")
        assert "\n" not in str(error.value)
    with refused(ServiceError, "absent"):
        LLM.load(tmp_path / "absent")


def test_choices_differ_and_repeat_with_the_seed(plain: LLM) -> None:
    asked = {"inputs": INPUTS[:2], "n": 3, "temperature": 1.5, "seed": 7}
    found, again = ([a.text for a in plain.generate(**asked)] for _ in range(2))
    assert len(found) == 6
    assert len(set(found)) > 2
    assert again == found


def test_request_options_are_accepted(plain: LLM) -> None:
    labels = ["play music", "set an alarm"]
    (answer,) = plain.generate(INPUTS[0], guided_choice=labels, logprobs=1)
    assert answer.text in labels
    assert b"".join(token.utf8 for token in answer.logprobs).decode() == answer.text
    (label,) = plain.generate(INPUTS[0], guided_choice=labels, max_tokens=2)
    assert (len(label.tokens), label.finish_reason) == (2, "length")
    assert label.text
    assert any(whole.startswith(label.text) for whole in labels)
    (cut,) = plain.generate(INPUTS[0], max_tokens=3)
    assert (len(cut.tokens), cut.finish_reason) == (3, "length")
    (biased,) = plain.generate(INPUTS[0], logit_bias={5: 100.0}, max_tokens=2)
    assert biased.tokens == (5, 5)


@pytest.mark.parametrize("whose", ["call", "task", "chat"])
def test_guide_is_compiled_once_for_all_inputs(folder, plain, monkeypatch, whose) -> None:
    labels = ["play music", "set an alarm"]
    llm = LLM(folder, choices=labels, max_tokens=24, **SIZES) if whose == "task" else plain
    asked = {} if whose == "task" else {"guided_choice": labels}
    specs, honest = [], llm.engine.guides.of
    monkeypatch.setattr(llm.engine.guides, "of", lambda s: specs.append(s) or honest(s))
    if whose == "chat":
        found = llm.chat([[{"role": "user", "content": text}] for text in INPUTS], **asked)
    else:
        found = llm.generate(INPUTS, **asked)
    assert {answer.text for answer in found} <= set(labels)
    assert len(specs) == 1 + len(INPUTS)
    assert len({id(spec) for spec in specs}) == 1


def test_any_iterable_of_texts_or_token_ids_is_accepted(plain, expected: list[str]) -> None:
    ids = [plain.tokenizer.encode_prompt(TEMPLATE.replace("{input}", i)) for i in INPUTS[:2]]
    arrays = [[kind(one) for one in ids] for kind in (np.array, torch.tensor)]
    texts = pa.array(INPUTS[:2]), pa.chunked_array([INPUTS[:2]]), pd.Series(INPUTS[:2])
    for inputs in (INPUTS[:2], iter(INPUTS[:2]), ids, *arrays, *texts):
        assert [answer.text for answer in plain.generate(inputs)] == expected[:2]  # type: ignore[arg-type]
    for one in (INPUTS[0], ids[0], np.array(ids[0]), torch.tensor([ids[0]])):
        assert [answer.text for answer in plain.generate(one)] == expected[:1]  # type: ignore[arg-type]
    assert plain.generate([]) == []


@pytest.mark.parametrize(
    ("inputs", "named"),
    [(5, "5"), (None, "None"), (b"ab", "b'ab'"), (["a", 5], "input 1 is 5"), ([1, "a"], "input 0"),
     ([["a"]], "input 0 has 'a'"), ([1, True, 2], "True"),
     ([{"role": "user"}], "input 0"), ([1.5], "input 0 is 1.5"), ({"prompt": "a"}, "'prompt'"),
     (torch.tensor(5), "5"), ([[1, -1]], "-1"), ([[1, 10**6]], "1000000"), ([10**30], "10000"),
     ("a\ud800", "input 0"), (pd.DataFrame({"a": ["b"]}), "table"), (pd.DataFrame([[5]]), "table"),
     (pa.table({"a": ["b"]}), "table")],
)  # fmt: skip
def test_invalid_input_is_named_in_the_error(plain: LLM, inputs: Any, named: str) -> None:
    with refused(FieldError, named):
        plain.generate(inputs)
    with pytest.raises(FieldError):
        plain.stream(inputs)


def test_changed_index_drops_drafts_from_earlier_answers(llm: LLM, expected: Any) -> None:
    index = llm.index
    for other in (None, index):
        llm.draft_from(other)
        runs = []
        for _ in range(2):
            llm.draft_from(other)
            assert [answer.text for answer in llm.generate(INPUTS)] == expected
            runs.append(llm.summary())
        assert runs[0].accepted_by_source == runs[1].accepted_by_source
        assert ("corpus" in runs[0].accepted_by_source) == (other is index)


def test_unsuitable_index_is_refused_and_changes_nothing(llm: LLM, expected: Any) -> None:
    index = llm.index
    of_another = DraftIndex.empty("0" * 32, index.vocab_size)
    for given, kind in (
        ((of_another,), IndexRefused),
        ((5,), ValueError),
        ((None, {}), ValueError),
    ):
        with pytest.raises(kind):
            llm.draft_from(*given)
    assert llm.index is index
    assert [answer.text for answer in llm.generate(INPUTS)] == expected


def test_next_call_works_after_an_error(llm, expected, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        failing_where(
            patch, llm.tokenizer, "decode", OSError("the disk is gone"), lambda n, *_: n == 5
        )
        with pytest.raises(OSError, match="disk"):
            llm.generate(INPUTS)
    assert [answer.text for answer in llm.generate(INPUTS)] == expected


def test_truncation_keeps_the_last_tokens_of_a_prompt(plain: LLM) -> None:
    ids = list(range(3, 123))
    for most, kept in ((5, ids[-5:]), (-1, ids[-104:]), (500, ids), (0, ids)):
        (found,) = plain.generate(ids, truncate_prompt_tokens=most)
        (expected,) = plain.generate(kept)
        assert (found.tokens, found.prompt_tokens) == (expected.tokens, len(kept))


@pytest.mark.parametrize("where", ["call", "task"])
def test_stop_string_that_is_a_token_ends_an_answer(folder, tmp_path, where):
    other = Path(shutil.copytree(folder, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    spare = [tokenizer.id_to_token(300), tokenizer.id_to_token(301)]
    tokenizer.add_special_tokens(spare[:1])
    tokenizer.add_tokens(spare[1:])
    tokenizer.save(str(other / "tokenizer.json"))

    def answer(token: int, stop: list[str], **options: Any) -> Completion:
        options |= {"ignore_eos": True, "logit_bias": {token: 100.0}}
        own = {"stop": stop} if where == "task" else {}
        llm = LLM(other, template=TEMPLATE, max_tokens=9, **own, **SIZES)
        return llm.generate("a", **options, **({} if own else {"stop": stop}))[0]

    for token, text in ((0, END), (300, spare[0]), (301, spare[1])):
        found = answer(token, ["x", text])
        assert (found.tokens, found.text, found.finish_reason) == ((token,), "", "stop")
        late = answer(token, [text], min_tokens=9)
        assert len(late.tokens) == 9
    for stop in (f"{END}\n", f"\n{spare[0]}"):
        with refused(FieldError, "special", "stop_token_ids", field="stop"):
            if where == "call":
                answer(0, ["x", stop])
            else:  # it fails at once and not at the first call
                LLM(other, template=TEMPLATE, stop=["x", stop], **SIZES)


@pytest.mark.parametrize(("named", "ends"), [(True, [5, 0]), (True, 5), (False, [5, 0])])
def test_every_end_of_sequence_of_the_model_ends_guided_answers(folder, tmp_path, named, ends):
    """A settings file may list several ends, or an end that the model does not write."""
    other = Path(shutil.copytree(folder, tmp_path / "model"))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if not named:
        (other / "tokenizer_config.json").unlink()
    llm = LLM(other, template=TEMPLATE, max_tokens=48, **SIZES)
    first = llm.tokenizer.eos_id
    assert first == (0 if named else 5)
    asked: dict[str, Any] = {"logit_bias": {0: 100.0}}  # it ends as soon as it may
    for guide, texts, end in (
        ({"guided_choice": ["red", "red and blue"]}, {"red"}, 0),
        ({"guided_regex": "intent:( x)*"}, {"intent:"}, 0),
        ({"guided_choice": ["green", "blue"]}, {"green", "blue"}, first),
        ({}, {""}, 0),
    ):
        answers = llm.generate(INPUTS, **asked, **guide, draft=False)
        assert {(a.finish_reason, a.tokens[-1]) for a in answers} == {("stop", end)}
        assert {a.text for a in answers} <= texts
        again = llm.generate(INPUTS, **asked, **guide)
        assert [a.tokens for a in again] == [a.tokens for a in answers]
        scored = llm.generate(INPUTS, **asked, **guide, logprobs=0)
        assert [a.tokens for a in scored] == [a.tokens for a in answers]
        assert all(len(a.logprobs) == len(a.tokens) - 1 for a in scored)
        assert "".join(llm.stream(INPUTS[0], **asked, **guide)) == answers[0].text


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"echo": True}, "echo", "text + answer.text"),
        ({"stream": True}, "stream", "LLM.stream"),
        ({"temperature": 9}, "temperature", "9"),
        ({"guided_regex": ""}, "guided_regex", "guided_regex"),
        ({"adapter": "other"}, "adapter", "input 0"),
        ({"min_tokens": 25}, "min_tokens", "24"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ],
)
def test_invalid_option_is_named_in_the_error(options, field, named, plain) -> None:
    with refused(FieldError, named, field=field):
        plain.generate("a", **options)


def test_invalid_input_of_a_list_is_named_and_nothing_is_answered(plain: LLM) -> None:
    before = plain.summary().answers
    for inputs in ([INPUTS[0], "word " * 200], [[1, 2], []]):
        with refused(FieldError, "input 1"):
            plain.generate(inputs)  # type: ignore[arg-type]
    assert plain.summary().answers == before


def test_ctrl_c_returns_the_finished_answers(plain, expected, capsys) -> None:
    before = plain.summary().answers
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it

    def press() -> None:
        eventually(lambda: plain.summary().answers >= before + 5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    answers = plain.generate([INPUTS[0]] * 5000, progress=True, max_tokens=8)
    thread.join()
    after = signal.signal(signal.SIGINT, handler)
    assert answers.interrupted
    assert 5 <= len(answers) < 5000
    assert f"{len(answers)} of 5000 answers" in capsys.readouterr().err
    assert len({answer.text for answer in answers}) == 1
    assert after is signal.default_int_handler
    assert [a.text for a in plain.generate(INPUTS)] == expected


def test_auto_dtype_is_kept_by_a_saved_task(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "tasc_runtime.llm.dtype_here", lambda dtype, quantization, device: "float16"
    )
    LLM(folder, **SIZES | {"dtype": "auto"}).save(tmp_path / "saved")
    assert SavedTask.read(tmp_path / "saved").record.dtype == "float16"
