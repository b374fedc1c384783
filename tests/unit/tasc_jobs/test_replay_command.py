"""``tasc replay`` on slices of the shipped rows with the shipped tokenizer."""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from support import assert_self_contained
from tasc_jobs.demo.tasks import MODEL, data_file
from tasc_text import TaskTokenizer

TRAIN, TEST = 400, 30


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options that name a small training and a small test file, and the tokenizer."""
    folder = tmp_path_factory.mktemp("slices")
    options: list[object] = ["--tokenizer", MODEL]
    for split, rows in (("train", TRAIN), ("test", TEST)):
        with gzip.open(data_file("massive_en", split), "rt", encoding="utf-8") as lines:
            (folder / f"{split}.jsonl").write_text("".join(next(lines) for _ in range(rows)))
        options += [f"--{split}", folder / f"{split}.jsonl"]
    return options


@pytest.fixture
def lines(slices, tasc, capsys):
    """What ``--json`` prints for two budgets of three proposers, one name repeated."""
    names = ["--proposer", "mixed,tasc", "--proposer", "trie,tasc", "--budget", "8,4"]
    assert tasc("replay", *slices, *names, "--json") == 0
    out, err = capsys.readouterr()
    assert f"{(2 + 1 + 1) * 2 * TEST}/240 rows" in err
    return [json.loads(line) for line in out.splitlines()]


def test_there_is_a_line_for_each_proposer_and_budget(lines):
    expected = [(name, budget) for name in ("mixed", "tasc", "trie") for budget in (4, 8)]
    assert [(line["proposer"], line["budget"]) for line in lines] == expected
    assert {(line["rows"], line["train_rows"]) for line in lines} == {(TEST, TRAIN)}
    assert {line["end_of_sequence"] for line in lines} == {"<|endoftext|>"}
    assert not any(line["online"] for line in lines)


def test_the_figures_of_a_line_agree_with_each_other(lines, slices):
    with Path(str(slices[-1])).open() as file:
        outputs = [json.loads(row)["output"] for row in file]
    tokens = sum(len(o) + 1 for o in TaskTokenizer.from_folder(MODEL).encode_outputs(outputs))
    for line in lines:
        reached, accepted, steps = line["reached"], line["accepted"], line["steps"]
        assert line["tokens"] == tokens
        assert line["tokens_per_step"] == tokens / steps
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


def test_the_mixture_is_better_than_its_parts_and_only_it_learns(lines):
    by_name = {(line["proposer"], line["budget"]): line for line in lines}
    assert by_name["mixed", 8]["tokens_per_step"] > by_name["tasc", 8]["tokens_per_step"] > 1.5
    assert by_name["trie", 8]["tokens_per_step"] < 1.5
    for name in ("tasc", "trie"):
        line = by_name[name, 8]
        assert line["tokens_per_step_frozen"] == line["tokens_per_step"]
    assert by_name["mixed", 8]["tokens_per_step_frozen"] > 1.5


def test_people_get_tables_and_a_page_that_needs_no_network(slices, tmp_path, tasc, capsys):
    page = tmp_path / "report.html"
    options = [*slices, "--limit", 10, "--proposer", "tasc", "--online", "--report", page]
    assert tasc("replay", *options) == 0
    out = capsys.readouterr().out
    assert "Replay of 10 rows" in out
    assert "tokens/step" in out
    assert "Online: " in out
    assert "Bytes a token: for each token of the indexed outputs, SEP and EOS counted" in out
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    for title in ("Acceptance by position", "Tokens per step by budget"):
        assert title in html
    assert "Tokens per step is block efficiency" in html
    assert re.search(r"<td>\d+\.\d% \(\d+/\d+\)</td>", html)
    assert_self_contained(html)


def test_a_template_makes_other_prompts(slices, tasc, capsys):
    options = [*slices, "--limit", 5, "--proposer", "mixed", "--budget", 4, "--json"]
    assert tasc("replay", *options) == 0
    plain = json.loads(capsys.readouterr().out)
    assert tasc("replay", *options, "--template", r"intent and slots: {input}\n") == 0
    assert json.loads(capsys.readouterr().out)["index_tokens_read"] > plain["index_tokens_read"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--proposer", "fancy"], 1, "'fancy'"),
        (["--proposer", "bigrams"], 1, "--bigrams"),
        (["--bigrams", "nowhere.npz"], 1, "nowhere.npz"),
        (["--bigrams", __file__], 1, "`tasc model-bigrams`"),
        (["--test", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["--tokenizer", "nowhere"], 1, "tokenizer.json"),
        (["--eos", "zzzz"], 1, "'zzzz'"),
        (["--template", "no field"], 1, "{input}"),
        (["--report", "nowhere/report.html"], 1, "nowhere/report.html"),
        (["--output-field", "answer"], 1, "'answer'"),
        (["--budget", "4,none"], 2, "1 to 256"),
        (["--budget", "0"], 2, "1 to 256"),
        (["--limit", "0"], 2, "--limit"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    slices, tmp_path, monkeypatch, tasc, capsys, args, code, message
):
    monkeypatch.chdir(tmp_path)
    assert tasc("replay", *slices, *args) == code
    out, err = capsys.readouterr()
    assert message in re.sub(r"[\s│]+", " ", err)
    assert "Traceback" not in err
    assert not out
    assert not list(tmp_path.iterdir())
