"""Statistics of the files we ship: the paper's Table 1, and what else files can hold."""

import json
import random
from importlib.resources import files
from itertools import chain
from pathlib import Path

import pytest
from statistics_reference import figures as expected_figures
from statistics_reference import percentiles, word_ngrams

from support import refused
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.statistics.ngrams import Units
from tasc_jobs.statistics.task_statistics import file_statistics
from tasc_runtime.errors import FileError
from tasc_text import TaskTokenizer, TokenizerError

DATA = Path(str(files("tasc_jobs.demo"))) / "data"


def figures(side):
    return round(side.words.ngrams.shannon_bits, 2), side.words.ngrams.ngrams_for_80_percent


def random_rows(seed, count=120):
    """Inputs and outputs of a few words, some of them empty inputs, with odd white space."""
    rng = random.Random(seed)
    words = [*"abcdefg", "naïve", "日本", "'s"]

    def text(least):
        return rng.choice([" ", "  ", "\n", "\u00a0"]).join(
            rng.choices(words, k=rng.randrange(least, 9))
        )

    return [(text(0), text(1)) for _ in range(count)]


def write(path, rows):
    path.write_text("".join(json.dumps({"input": i, "output": o}) + "\n" for i, o in rows))
    return path


def assert_unit(found, ngrams, lengths, vocabulary=None):
    expected = expected_figures(ngrams, vocabulary)
    assert {name: getattr(found.ngrams, name) for name in expected} == pytest.approx(expected)
    assert (found.count, found.lengths.percentiles) == (sum(lengths), percentiles(lengths))


def test_pos_tagging_has_the_papers_figures():
    found = file_statistics([DATA / "pos_ewt.train.jsonl.gz"])
    assert figures(found.input) == (15.53, 65_288)
    assert figures(found.output) == (6.57, 63)
    assert (found.input.rows, found.input.words.count, found.rejected) == (12_544, 204_577, 0)


def test_intents_and_slots_have_the_papers_input_figures():
    # The paper spells the outputs in another way (9.74 bits, 774), so only ours are pinned.
    found = file_statistics([DATA / "massive_en.train.jsonl.gz"])
    assert figures(found.input) == (13.40, 15_943)
    assert figures(found.output) == (9.02, 840)


def test_several_files_are_one_running_text(tmp_path):
    whole, first, second = (tmp_path / f"{name}.jsonl" for name in ("whole", "first", "second"))
    lines = [f'{{"input": "{text}", "output": "{text}"}}\n' for text in ("a b", "c", "d e")]
    whole.write_text("".join(lines))
    first.write_text("".join(lines[:2]))
    second.write_text(lines[2])
    found = file_statistics([first, second])
    assert found == file_statistics([whole])
    assert found.output.words.ngrams.ngrams == 4


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_words_and_tokens_of_random_rows_have_the_figures_of_the_definitions(tmp_path, n):
    rows = random_rows(n)
    found = file_statistics([write(tmp_path / "rows.jsonl", rows)], Units.of(n, MODEL))
    tokenizer = TaskTokenizer.from_folder(MODEL)
    size = len(tokenizer.backend.get_vocab(with_added_tokens=True))
    for side, texts in zip((found.input, found.output), zip(*rows, strict=True), strict=True):
        lengths = [len(text.split()) for text in texts]
        assert_unit(side.words, word_ngrams(texts, n), lengths)
        ids = tokenizer.encode_outputs(texts)
        assert_unit(side.tokens, [*chain(*ids)], [len(each) for each in ids], size)


def test_without_a_tokenizer_there_are_no_tokens_and_json_keeps_its_names(tmp_path):
    found = file_statistics([write(tmp_path / "rows.jsonl", [("a b", "c d"), ("", "c d")])])
    assert found.output.tokens is None
    of = found.as_json["output"]
    assert {name: of[name] for name in list(of)[:6]} == {
        "rows": 2,
        "words": 4,
        "bigrams": 3,
        "unique_bigrams": 2,
        "bigram_entropy_bits": of["word_ngrams"]["shannon_bits"],
        "bigrams_for_80_percent": 2,
    }
    assert list(of)[6:] == ["word_ngrams", "word_lengths"]
    assert found.as_json["rejected"] == 0


def test_json_of_other_ngrams_names_no_bigrams_and_has_tokens_where_asked(tmp_path):
    path = write(tmp_path / "rows.jsonl", random_rows(0))
    of = json.loads(json.dumps(file_statistics([path], Units.of(3, MODEL)).as_json))["output"]
    assert list(of) == [
        *("rows", "words", "word_ngrams", "word_lengths"),
        *("tokens", "token_ngrams", "token_lengths"),
    ]
    assert (of["word_ngrams"]["n"], of["token_ngrams"]["n"]) == (3, 1)
    assert set(of["token_ngrams"]["curve"][0]) == {"rank", "count", "coverage"}
    assert set(of["token_lengths"]["histogram"][0]) == {"first", "last", "rows"}


def test_a_tokenizer_that_is_not_there_is_an_error_before_any_row_is_read(tmp_path):
    with pytest.raises(TokenizerError):
        Units.of(2, tmp_path)


def test_who_waits_is_told_of_every_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a b", "output": "c"}\nno json\n{"input": "d", "output": "e"}\n')
    told = []
    file_statistics([path, path], progress=lambda *progress: told.append(progress))
    assert told == [("count", rows, None) for rows in (1, 2, 3, 4)]


def test_refused_lines_are_counted_and_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a b", "output": "c"}\nno json\n')
    found = file_statistics([path])
    assert (found.input.rows, found.input.words.count, found.rejected) == (1, 2, 1)


def test_files_without_a_row_or_without_being_there_are_errors(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("no json\n")
    with pytest.raises(EmptyCorpusError):
        file_statistics([path])
    with refused(FileError, "absent.jsonl"):
        file_statistics([path, tmp_path / "absent.jsonl"])
