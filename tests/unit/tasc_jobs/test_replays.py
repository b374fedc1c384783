"""Tests replays by name, their tokenizer and rows, and `tasc replay` on shipped rows."""

import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import assert_self_contained, refused, write_rows
from tasc_draft import BigramTable, Tokens
from tasc_jobs.demo.tasks import MODEL, data_file
from tasc_jobs.task_inputs import read_files
from tasc_jobs.tuning.replays import (
    PROPOSERS,
    Comparison,
    Measured,
    compare,
    named_proposers,
    prepare,
)
from tasc_runtime.data.local_corpus import TokenRows, encode, index_of
from tasc_runtime.data.rows import Fields
from tasc_text import PromptTemplate, TaskTokenizer, TokenizerError
from tasc_text.tokenizer import open_tokenizer
from tiny import END

N_MAX = PROPOSERS["corpus"].settings.n_max

# TASC-spec with the corpus alone, and its replay, in plain Python: slow, and plain to read.


@dataclass
class PlainReplay:
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    drafted_steps: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def plain_replay(outputs, answers, eos, budget):
    """Replay answers (without end-of-sequence) against chains drafted from outputs."""
    documents = [["SEP", *output, eos] for output in outputs]
    found = PlainReplay()
    for answer in answers:
        left, prefix = [*answer, eos], ["SEP"]
        while left:
            draft = chain(documents, prefix, eos, budget)
            kept = 0
            while kept < min(len(draft), len(left)) and draft[kept] == left[kept]:
                kept += 1
            found.steps += 1
            found.nodes += len(draft)
            found.drafted_steps += bool(draft)
            found.reached.update(range(len(draft)))
            found.accepted.update(range(kept))
            emitted, left = left[: kept + 1], left[kept + 1 :]
            found.tokens += len(emitted)
            prefix += emitted
    return found


def chain(documents: list[list], prefix: list, eos: int, budget: int) -> list[int]:
    draft: list[int] = []
    while len(draft) < budget and eos not in draft:
        draft.append(likeliest(documents, [*prefix, *draft]))
    return draft


def likeliest(documents: list[list], text: list) -> int:
    """Returns the most frequent token after the longest known context; ties go to the lower id."""
    for length in range(min(N_MAX - 1, len(text)), -1, -1):
        context = text[len(text) - length :]
        counts = Counter(
            document[at + length]
            for document in documents
            for at in range(len(document) - length)
            if document[at : at + length] == context and document[at + length] != "SEP"
        )
        if counts:
            return min(counts, key=lambda token: (-counts[token], token))
    raise AssertionError("an empty corpus says nothing")


def measured(*args: object, **kwargs: object) -> list[Measured]:
    comparison = Comparison(*args, **kwargs)
    return list(compare(comparison, prepare(comparison)))


def rows_of(outputs: list[list[int]]) -> TokenRows:
    return TokenRows(Tokens.of([[1, 2]] * len(outputs)), Tokens.of(outputs))


texts = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=7), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(train=texts, test=texts, budget=st.integers(1, 5))
def test_corpus_proposer_replays_like_the_reference(tokenizer, train, test, budget):
    corpus = [PROPOSERS["corpus"]]
    (found,) = measured(rows_of(train), rows_of(test), tokenizer, corpus, [budget])
    plain = plain_replay(train, test, tokenizer.eos_id, budget)
    got = found.replay
    assert (got.steps, got.tokens, got.nodes) == (plain.steps, plain.tokens, plain.nodes)
    assert got.drafted_steps == plain.drafted_steps > 0
    assert got.reached == [plain.reached[at] for at in range(len(plain.reached))]
    assert got.accepted == [plain.accepted[at] for at in range(len(plain.reached))]
    assert found.tokens_per_step_frozen == plain.tokens / plain.steps


def test_index_size_is_reported_per_indexed_output_token(tokenizer):
    rows = rows_of([[5, 6, 7], [5, 6, 8]] * 4)
    named = named_proposers(["mixed", "tasc", "trie"], bigrams=False)
    found = {m.proposer: m.figures() for m in measured(rows, rows, tokenizer, named, [4])}
    read = {name: figures["index_tokens_read"] for name, figures in found.items()}
    assert read == {"mixed": 8 * (3 + 2), "tasc": 8 * 3, "trie": 0}
    for figure in ("bytes_per_token", "corpus_bytes_per_token", "tokens_read_per_s"):
        assert found["trie"][f"index_{figure}"] is None
    mixed, tasc = found["mixed"], found["tasc"]
    assert mixed["index_bytes"] > tasc["index_bytes"]
    assert mixed["index_output_tokens"] == tasc["index_output_tokens"] == 8 * (3 + 2)
    same = "index_corpus_bytes_per_token"
    assert mixed[same] == tasc[same] == index_of(rows, tokenizer).corpus.nbytes / 40
    assert mixed["index_bytes_per_token"] == mixed["index_bytes"] / 40
    assert mixed["index_bytes_per_token"] > tasc["index_bytes_per_token"]


def test_earlier_answers_are_a_draft_source_only_with_online(tokenizer):
    given = rows_of([[9]]), rows_of([[5, 6, 7, 8]] * 10), tokenizer, [PROPOSERS["mixed"]], [8]
    offline, online = (measured(*given, online=way)[0] for way in (False, True))
    assert online.replay.tokens_per_step > 1.5 * offline.replay.tokens_per_step


def test_bigram_proposer_drafts_from_its_table(tokenizer):
    size = tokenizer.vocab_size
    after = (np.arange(size, dtype=np.int32)[:, None] + 1) % size
    table = BigramTable("m", tokenizer.fingerprint, size, after, np.zeros((size, 1), np.float32))
    test = rows_of([[10, 11, 12, 13, 14, 15]])
    named = named_proposers(["bigrams"], bigrams=True)
    (found,) = measured(rows_of([[9]]), test, tokenizer, named, [4], bigrams=table)
    # 10: there is no token before it. 11 to 14 drafted, 15 on top. The end: 16 was drafted.
    assert found.replay.accepted == [1, 1, 1, 1]
    assert (found.replay.steps, found.replay.drafted_steps, found.replay.tokens) == (3, 2, 7)


def test_replay_rows_are_rendered_and_truncated(tokenizer, tmp_path):
    long = {"input": "wake me " * 2000, "output": "set an alarm " * 400}
    path = write_rows(tmp_path / "rows.jsonl", [long, {"input": "a", "output": "b"}, "bad"])
    read = read_files([path], Fields())
    assert (len(read.rows), read.refused) == (2, 1)
    assert len(read_files([path], Fields(), limit=1).rows) == 1
    found = encode(read.rows, tokenizer, PromptTemplate("say {input}\n"))
    assert found.prompts.lengths[0] == 3000
    whole = tokenizer.encode_prompt("say " + "wake me " * 2000 + "\n")
    assert found.prompts.ids[:3000].tolist() == whole[-3000:]
    assert found.prompts.ids[3000:].tolist() == tokenizer.encode_prompt("say a\n")
    (_, answer), _ = found.answers(tokenizer.eos_id)
    assert (len(answer), answer[-1]) == (513, tokenizer.eos_id)


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
def test_end_of_sequence_of_a_bare_tokenizer_is_its_usual_special_token(folder, tmp_path, name):
    path = bare(folder, tmp_path / "t", name)
    for place in (path, path / "tokenizer.json"):
        tokenizer = open_tokenizer(place)
        assert tokenizer.backend.id_to_token(tokenizer.eos_id) == name


def test_given_end_of_sequence_overrides_the_tokenizers_settings(folder, tokenizer):
    assert open_tokenizer(folder).eos_ids == tokenizer.eos_ids
    asked = open_tokenizer(folder, "a")
    assert asked.backend.id_to_token(asked.eos_id) == "a"


def test_error_of_an_unusable_tokenizer_has_cause_and_remedy(folder, tmp_path):
    damaged = bare(folder, tmp_path / "damaged", "</s>")
    (damaged / "config.json").write_text("{")
    for asked, named in (
        ((bare(folder, tmp_path / "other", "<mark>"),), ("--eos", "<mark>")),
        ((bare(folder, tmp_path / "plain", "</s>", special=False),), ("none",)),
        ((folder, "zzzz"), ("'zzzz'",)),
        ((tmp_path,), (str(tmp_path),)),
        ((damaged,), ("config.json",)),
    ):
        with refused(TokenizerError, *named):
            open_tokenizer(*asked)


TRAIN, TEST = 400, 30


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options with a small training file, a small test file and the tokenizer."""
    folder = tmp_path_factory.mktemp("slices")
    options: list[object] = ["--tokenizer", MODEL]
    for split, rows in (("train", TRAIN), ("test", TEST)):
        with gzip.open(data_file("massive_en", split), "rt", encoding="utf-8") as lines:
            (folder / f"{split}.jsonl").write_text("".join(next(lines) for _ in range(rows)))
        options += [f"--{split}", folder / f"{split}.jsonl"]
    return options


@pytest.fixture
def lines(slices, tasc):
    """The output of ``--json`` for two budgets of three proposers, with one name repeated."""
    names = ["--proposer", "mixed,tasc", "--proposer", "trie,tasc", "--budget", "8,4"]
    out = tasc.run("replay", *slices, *names, "--json")
    assert f"{(2 + 1 + 1) * 2 * TEST}/240 rows" in tasc.err
    return [json.loads(line) for line in out.splitlines()]


def test_replay_figures_are_consistent_and_only_the_mixture_learns(lines, slices):
    expected = [(name, budget) for name in ("mixed", "tasc", "trie") for budget in (4, 8)]
    assert [(line["proposer"], line["budget"]) for line in lines] == expected
    assert {(line["rows"], line["train_rows"]) for line in lines} == {(TEST, TRAIN)}
    assert {line["end_of_sequence"] for line in lines} == {"<|endoftext|>"}
    assert not any(line["online"] for line in lines)
    with Path(str(slices[-1])).open() as file:
        outputs = [json.loads(row)["output"] for row in file]
    tokens = sum(len(o) + 1 for o in TaskTokenizer.from_folder(MODEL).encode_outputs(outputs))
    for line in lines:
        reached, accepted, steps = line["reached"], line["accepted"], line["steps"]
        assert (line["tokens"], line["tokens_per_step"]) == (tokens, tokens / steps)
        assert len(reached) == len(accepted) == len(line["acceptance"]) <= line["budget"]
        assert all(a <= r for a, r in zip(accepted, reached, strict=True))
        assert line["acceptance"] == [a / r for a, r in zip(accepted, reached, strict=True)]
        assert all(left >= right for left, right in pairwise(reached))
        assert reached[0] == line["drafted_steps"] <= steps
        assert line["coverage"] == line["drafted_steps"] / steps
        assert sum(reached) <= line["nodes"] <= line["budget"] * steps
        # Each step adds one token, but for the last of a row where the draft reached its end.
        assert steps + sum(accepted) - TEST <= tokens <= steps + sum(accepted)
        assert line["draft_us_p50"] <= line["draft_us_p99"]
    by_name = {(line["proposer"], line["budget"]): line for line in lines}
    assert by_name["mixed", 8]["tokens_per_step"] > by_name["tasc", 8]["tokens_per_step"] > 1.5
    assert by_name["trie", 8]["tokens_per_step"] < 1.5
    for name in ("tasc", "trie"):
        line = by_name[name, 8]
        assert line["tokens_per_step_frozen"] == line["tokens_per_step"]
    assert by_name["mixed", 8]["tokens_per_step_frozen"] > 1.5


def test_replay_prints_tables_and_writes_a_self_contained_page(slices, tmp_path, tasc):
    page = tmp_path / "report.html"
    options = [*slices, "--limit", 10, "--proposer", "tasc", "--online", "--report", page]
    out = tasc.run("replay", *options)
    for part in ("Replay of 10 rows", "tokens/step", "--online", "Bytes per token"):
        assert part in out
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    assert re.search(r"<td>\d+\.\d% \(\d+/\d+\)</td>", html)
    assert_self_contained(html)


def test_template_changes_the_prompts_of_a_replay(slices, tasc):
    options = [*slices, "--limit", 5, "--proposer", "mixed", "--budget", 4, "--json"]
    plain, longer = (
        json.loads(tasc.run("replay", *options, *more))["index_tokens_read"]
        for more in ((), ("--template", r"intent and slots: {input}\n"))
    )
    assert longer > plain


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--proposer", "fancy"], 1, "'fancy'"),
        (["--proposer", "bigrams"], 1, "--bigrams"),
        (["--bigrams", "nowhere.npz"], 1, "nowhere.npz"),
        (["--system-prompt", "x"], 2, "--chat-template"),
        (["--bigrams", __file__], 1, "`tasc model-bigrams`"),
        (["--test", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["--tokenizer", "nowhere"], 1, "tokenizer.json"),
        (["--eos", "zzzz"], 1, "'zzzz'"),
        (["--template", "no field"], 1, "{input}"),
        (["--report", "nowhere/report.html"], 2, "nowhere/report.html"),
        (["--output-field", "answer"], 1, "'answer'"),
        (["--budget", "4,none"], 2, "1 to 256"),
        (["--budget", "0"], 2, "1 to 256"),
        (["--limit", "0"], 2, "--limit"),
    ],
)
def test_invalid_options_are_refused_and_named(
    slices, tmp_path, monkeypatch, tasc, args, code, message
):
    monkeypatch.chdir(tmp_path)
    err = tasc.run("replay", *slices, *args, code=code)
    assert message in re.sub(r"[\s│]+", " ", err)
    assert not tasc.out
    assert not list(tmp_path.iterdir())
