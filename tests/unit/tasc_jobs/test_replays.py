"""Replays by name, and the tokenizer and rows they stand on."""

import json
from pathlib import Path

import numpy as np
import pytest
import replay_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from support import refused
from tasc_draft import BigramTable, Tokens
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import read_files
from tasc_jobs.tuning.replays import (
    PROPOSERS,
    Comparison,
    Measured,
    compare,
    index_of,
    named_proposers,
    prepare,
)
from tasc_runtime.data.local_corpus import TokenRows, encode
from tasc_runtime.data.rows import Fields
from tasc_text import PromptTemplate, TaskTokenizer, TokenizerError
from tasc_text.tokenizer import open_tokenizer
from tiny import END, make_tokenizer

N_MAX = PROPOSERS["corpus"].settings.n_max


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def measured(*args: object, **kwargs: object) -> list[Measured]:
    comparison = Comparison(*args, **kwargs)
    return list(compare(comparison, prepare(comparison)))


def rows_of(outputs: list[list[int]]) -> TokenRows:
    return TokenRows(Tokens.of([[1, 2]] * len(outputs)), Tokens.of(outputs))


texts = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=7), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(train=texts, test=texts, budget=st.integers(1, 5))
def test_the_corpus_proposer_replays_as_plain_python_does(folder, train, test, budget):
    tokenizer = TaskTokenizer.from_folder(folder)
    corpus = [PROPOSERS["corpus"]]
    (found,) = measured(rows_of(train), rows_of(test), tokenizer, corpus, [budget])
    plain = replay_reference.replay(train, test, tokenizer.eos_id, budget, N_MAX)
    got = found.replay
    assert (got.steps, got.tokens, got.nodes) == (plain.steps, plain.tokens, plain.nodes)
    assert got.drafted_steps == plain.drafted_steps > 0
    assert got.reached == [plain.reached[at] for at in range(len(plain.reached))]
    assert got.accepted == [plain.accepted[at] for at in range(len(plain.reached))]
    assert found.tokens_per_step_frozen == plain.tokens / plain.steps


def test_a_proposers_index_costs_what_it_reads(folder):
    rows = rows_of([[5, 6, 7], [5, 6, 8]] * 4)
    tokenizer = TaskTokenizer.from_folder(folder)
    named = named_proposers(["mixed", "tasc", "trie"], bigrams=False)
    found = {m.proposer: m.figures() for m in measured(rows, rows, tokenizer, named, [4])}
    read = {name: figures["index_tokens_read"] for name, figures in found.items()}
    assert read == {"mixed": 8 * (3 + 2), "tasc": 8 * 3, "trie": 0}
    assert found["mixed"]["index_bytes"] > found["tasc"]["index_bytes"]
    for per_token in ("index_bytes_per_token", "index_corpus_bytes_per_token"):
        assert found["trie"][per_token] is None
    assert found["trie"]["index_tokens_read_per_s"] is None


def test_bytes_a_token_are_of_the_outputs_with_their_marks_whoever_reads_prompts(folder):
    rows = rows_of([[5, 6, 7], [5, 6, 8]] * 4)
    tokenizer = TaskTokenizer.from_folder(folder)
    named = named_proposers(["mixed", "tasc"], bigrams=False)
    mixed, tasc = (m.figures() for m in measured(rows, rows, tokenizer, named, [4]))
    assert mixed["index_output_tokens"] == tasc["index_output_tokens"] == 8 * (3 + 2)
    same = "index_corpus_bytes_per_token"
    assert mixed[same] == tasc[same] == index_of(rows, tokenizer).corpus.nbytes / 40
    assert mixed["index_bytes_per_token"] == mixed["index_bytes"] / 40
    assert mixed["index_bytes_per_token"] > tasc["index_bytes_per_token"]


def test_answers_of_before_are_drafted_from_only_online(folder):
    train, test = rows_of([[9]]), rows_of([[5, 6, 7, 8]] * 10)
    tokenizer = TaskTokenizer.from_folder(folder)
    mixed = [PROPOSERS["mixed"]]
    offline, online = (
        measured(train, test, tokenizer, mixed, [8], online=way)[0] for way in (False, True)
    )
    assert online.replay.tokens_per_step > 1.5 * offline.replay.tokens_per_step


def test_bigrams_draft_what_the_table_says(folder):
    tokenizer = TaskTokenizer.from_folder(folder)
    size = tokenizer.vocab_size
    after = (np.arange(size, dtype=np.int32)[:, None] + 1) % size
    table = BigramTable("m", tokenizer.fingerprint, size, after, np.zeros((size, 1), np.float32))
    test = rows_of([[10, 11, 12, 13, 14, 15]])
    named = named_proposers(["bigrams"], bigrams=True)
    (found,) = measured(rows_of([[9]]), test, tokenizer, named, [4], bigrams=table)
    # 10: nothing was said yet. 11 to 14 drafted, 15 on top. The end: 16 was drafted.
    assert found.replay.accepted == [1, 1, 1, 1]
    assert (found.replay.steps, found.replay.drafted_steps, found.replay.tokens) == (3, 2, 7)


def test_unknown_proposers_are_named_and_repeated_ones_taken_once():
    assert [p.name for p in named_proposers(["trie", "mixed", "trie"], False)] == ["trie", "mixed"]
    with refused(JobError, "'fancy'", "mixed"):
        named_proposers(["mixed", "fancy"], False)
    with refused(JobError, "--bigrams"):
        named_proposers(["bigrams"], False)


def test_rows_are_cut_and_rendered_as_a_replay_needs_them(folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    long = {"input": "wake me " * 2000, "output": "set an alarm " * 400}
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (long, {"input": "a", "output": "b"})) + "bad\n"
    )
    tokenizer = TaskTokenizer.from_folder(folder)
    read = read_files([path], Fields())
    assert (len(read.rows), read.refused) == (2, 1)
    assert len(read_files([path], Fields(), limit=1).rows) == 1
    found = encode(read.rows, tokenizer, PromptTemplate("say {input}\n"))
    assert found.prompts.lengths[0] == 3000
    whole = tokenizer.encode_prompt("say " + "wake me " * 2000 + "\n")
    assert found.prompts.ids[:3000].tolist() == whole[-3000:]
    assert found.prompts.ids[3000:].tolist() == tokenizer.encode_prompt("say a\n")
    (_, answer), _ = found.answers(tokenizer.eos_id)
    assert len(answer) == 513
    assert answer[-1] == tokenizer.eos_id


def bare(folder: Path, path: Path, name: str, special: bool = True) -> Path:
    """The tokenizer without settings beside it, its end-of-sequence token renamed."""
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["content"], token["special"] = name, special
    content["model"]["vocab"] = {
        (name if piece == END else piece): id_ for piece, id_ in content["model"]["vocab"].items()
    }
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<eos>", "<|im_end|>"])
def test_the_end_of_sequence_of_a_bare_tokenizer_is_its_usual_special_token(folder, tmp_path, name):
    path = bare(folder, tmp_path / "t", name)
    for place in (path, path / "tokenizer.json"):
        tokenizer = open_tokenizer(place)
        assert tokenizer.backend.id_to_token(tokenizer.eos_id) == name


def test_the_settings_beside_a_tokenizer_come_first_and_what_is_asked_for_before_them(folder):
    assert open_tokenizer(folder).eos_ids == TaskTokenizer.from_folder(folder).eos_ids
    asked = open_tokenizer(folder, "a")
    assert asked.backend.id_to_token(asked.eos_id) == "a"


def test_a_tokenizer_that_cannot_be_used_says_why_and_how_otherwise(folder, tmp_path):
    with refused(TokenizerError, "--eos", "<mark>"):
        open_tokenizer(bare(folder, tmp_path / "other", "<mark>"))
    with refused(TokenizerError, "none"):
        open_tokenizer(bare(folder, tmp_path / "plain", "</s>", special=False))
    with refused(TokenizerError, "'zzzz'"):
        open_tokenizer(folder, "zzzz")
    with refused(TokenizerError, str(tmp_path)):
        open_tokenizer(tmp_path)
    damaged = bare(folder, tmp_path / "damaged", "</s>")
    (damaged / "config.json").write_text("{")
    with refused(TokenizerError, "config.json"):
        open_tokenizer(damaged)
