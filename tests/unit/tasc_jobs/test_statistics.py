"""Tests statistics of texts and files against their definitions, and `tasc stats`."""

import json
import math
import random
import re
from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from importlib.resources import files
from itertools import chain, pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import assert_self_contained, refused, write_rows
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.statistics.corpus_counts import count_rows, partition_of, partitions_for, split
from tasc_jobs.statistics.distribution import CURVE_POINTS, distribution
from tasc_jobs.statistics.ngrams import MAX_BINS, PERCENTILES, NgramTotal, Units, row_lengths
from tasc_jobs.statistics.task_statistics import file_statistics
from tasc_runtime.errors import FileError
from tasc_text import TaskTokenizer, TokenizerError
from tasc_text.template import last_words

FREQUENCIES = st.lists(st.integers(1, 50), max_size=30)
LENGTHS = st.lists(st.integers(0, 400), min_size=1, max_size=60)

# A corpus's figures from their definitions: all n-grams in one list, and no shortcut.


def word_ngrams(texts, n, across_rows=False):
    rows = [" ".join(texts).split()] if across_rows else [text.split() for text in texts]
    return [tuple(words[i : i + n]) for words in rows for i in range(len(words) - n + 1)]


def figures(ngrams, vocabulary=None):
    """Returns figures by the names of ``Distribution``, without n and curve."""
    frequencies = sorted(Counter(ngrams).values(), reverse=True)
    total, size = len(ngrams), len(set(ngrams)) if vocabulary is None else vocabulary
    chances = [Fraction(f, total) for f in frequencies]
    shannon = -sum(p * math.log2(p) for p in chances)
    return {
        "ngrams": total,
        "unique_ngrams": len(frequencies),
        "vocabulary": size,
        "shannon_bits": shannon,
        "renyi2_bits": -math.log2(sum(p * p for p in chances)) if chances else 0,
        "normalised_entropy": shannon / math.log2(size) if size > 1 else 0,
        "typical_set_size": 2**shannon if chances else 0,
        "ngrams_for_80_percent": covering(chances, Fraction(4, 5)),
    }


def covering(chances, share):
    return next((k for k in range(len(chances) + 1) if sum(chances[:k]) >= share), 0)


def percentiles(lengths):
    """Returns percentiles by nearest rank: the smallest length that p % of rows do not exceed."""
    rising = sorted(lengths)
    return {str(p): rising[max(-(-p * len(rising) // 100), 1) - 1] for p in PERCENTILES}


@given(FREQUENCIES, st.none() | st.integers(30, 100))
@example([], None)
@example([4, 1], None)  # exactly 80 percent is enough
@example([7] * 30, 900)
def test_distribution_figures_equal_their_definitions(frequencies, vocabulary):
    ngrams = [n for n, frequency in enumerate(frequencies) for _ in range(frequency)]
    found = asdict(distribution(Counter(frequencies), 3, vocabulary))
    assert (found.pop("n"), bool(found.pop("curve"))) == (3, bool(ngrams))
    assert found == pytest.approx(figures(ngrams, vocabulary), abs=1e-9)


@pytest.mark.parametrize("unique", [1, 2, 63, 64, 65, 5_000])
def test_coverage_curve_has_few_points_from_first_to_last_rank(unique):
    frequencies = random.Random(unique).choices(range(1, 1_000), k=unique)
    frequent_first = sorted(frequencies, reverse=True)
    curve = distribution(Counter(frequencies), 1).curve
    assert (curve[0].rank, curve[-1].rank, curve[-1].coverage) == (1, unique, 1.0)
    assert min(unique, CURVE_POINTS // 2) <= len(curve) <= CURVE_POINTS
    assert all(left.rank < right.rank for left, right in pairwise(curve))
    for point in curve:
        assert point.count == frequent_first[point.rank - 1]
        covered = sum(frequent_first[: point.rank])
        assert point.coverage == pytest.approx(covered / sum(frequencies))


@given(LENGTHS)
def test_percentiles_are_by_nearest_rank_and_bins_are_few_and_equal(lengths):
    found = row_lengths(Counter(lengths))
    assert found.percentiles == percentiles(lengths)
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))
    bins = row_lengths(Counter(lengths)).histogram
    assert 1 <= len(bins) <= MAX_BINS
    assert (bins[0].first, bins[-1].last) == (min(lengths), max(lengths))
    assert all(left.last + 1 == right.first for left, right in pairwise(bins))
    widths = [each.last - each.first + 1 for each in bins]
    assert len({*widths[:-1]}) <= 1
    assert widths[-1] <= widths[0]
    assert [each.rows for each in bins] == [
        sum(each.first <= length <= each.last for length in lengths) for each in bins
    ]


def counts_in(total):
    return {row["ngram"]: row["count"] for row in total.ngrams().to_pylist()}


TEXTS = st.lists(st.text("abä \t\n\u00a0", max_size=8), max_size=12)


@given(TEXTS, st.integers(1, 5))
def test_rows_are_counted_as_one_running_text(texts, n):
    total, before = NgramTotal(), ""
    for text in texts:
        running = pa.array([[*before.split(), *text.split()]], pa.list_(pa.large_string()))
        total.add_rows(running, n, pa.array([len(text.split())]))
        before = last_words(f"{before} {text}", n - 1)
    ngrams = Counter(" ".join(each) for each in word_ngrams(texts, n, across_rows=True))
    assert counts_in(total) == ngrams
    found = total.histogram()
    assert found.frequencies == Counter(ngrams.values())
    assert found.lengths == total.lengths == Counter(len(text.split()) for text in texts)
    assert (found.rows, found.symbols) == (len(texts), len(" ".join(texts).split()))


def test_partitions_of_ngrams_are_stable_and_balanced():
    # Two processes, or two releases on one cluster, must agree; figures of CRC-32.
    assert [partition_of("ein Wort", n) for n in (1, 7, 1000)] == [0, 2, 865]
    assert [partition_of("ä 日本", n) for n in (1, 7, 1000)] == [0, 2, 702]
    rows = pa.table({"input": [" ".join(map(str, range(10_000)))], "output": [""]})
    table = count_rows(Units(1), 8, rows)
    sizes = [part.num_rows for part in split(table, 8)[1:]]
    assert sum(sizes) == 10_002  # with the whole input and the whole output
    assert max(sizes) < 1.1 * min(sizes)


def test_number_of_partitions_grows_with_bytes_and_not_with_many_ranges():
    assert [partitions_for(12 << 20, ranges) for ranges in (1, 3, 8, 250)] == [1, 3, 8, 8]
    sizes = 512, 513, 1024, 32_000  # with few ranges, too, as memory grows with a partition
    assert [partitions_for(size << 20, 3) for size in sizes] == [8, 9, 16, 256]


DATA = Path(str(files("tasc_jobs.demo"))) / "data"


def bits_and_ngrams(side):
    return round(side.words.ngrams.shannon_bits, 2), side.words.ngrams.ngrams_for_80_percent


def random_rows(seed, count=120):
    """Inputs and outputs of a few words, some of them empty inputs, with odd white space."""
    rng = random.Random(seed)
    words, spaces = [*"abcdefg", "naïve", "日本", "'s"], [" ", "  ", "\n", "\u00a0"]

    def text(least):
        return rng.choice(spaces).join(rng.choices(words, k=rng.randrange(least, 9)))

    return [(text(0), text(1)) for _ in range(count)]


def write(path, rows):
    path = path.with_suffix(".jsonl")
    return write_rows(path, ({"input": i, "output": o} for i, o in rows))


def assert_unit(found, ngrams, lengths, vocabulary=None):
    expected = figures(ngrams, vocabulary)
    assert {name: getattr(found.ngrams, name) for name in expected} == pytest.approx(expected)
    assert (found.count, found.lengths.percentiles) == (sum(lengths), percentiles(lengths))


def test_shipped_rows_have_the_figures_of_the_paper():
    across = Units(across_rows=True)
    found = file_statistics([DATA / "pos_ewt.train.jsonl.gz"], across)
    assert bits_and_ngrams(found.input) == (15.53, 65_288)
    assert bits_and_ngrams(found.output) == (6.57, 63)
    assert (found.input.rows, found.input.words.count, found.rejected) == (12_544, 204_577, 0)
    # The paper spells these outputs in another way (9.74 bits, 774), so only ours are pinned.
    found = file_statistics([DATA / "massive_en.train.jsonl.gz"], across)
    assert bits_and_ngrams(found.input) == (13.40, 15_943)
    assert bits_and_ngrams(found.output) == (9.02, 840)


def test_ngrams_within_rows_and_whole_outputs_are_counted(tmp_path, tasc):
    labels = ["yes"] * 6 + ["no"] * 3 + ["maybe"]
    path = write(
        tmp_path / "labels", [(f"is it {n} here", label) for n, label in enumerate(labels)]
    )
    found = file_statistics([path])
    assert found.output.words.ngrams.ngrams == 0
    assert found.output.texts.unique_ngrams == 3
    assert (found.output.different_share, found.output.most_frequent_share) == (0.3, 0.6)
    assert found.output.texts.shannon_bits == pytest.approx(figures(labels)["shannon_bits"])
    assert (found.input.different_share, found.input.most_frequent_share) == (1.0, 0.1)
    assert found.input.words.ngrams.ngrams == 30
    assert file_statistics([path], Units(across_rows=True)).output.words.ngrams.ngrams == 9
    out = tasc.run("stats", "--train", path)
    assert "Different outputs: 3 in 10 rows (30.0%)" in out
    assert "Entropy of word 2-grams" not in out
    assert "No output has word 2-grams" in out
    across = json.loads(tasc.run("stats", "--train", path, "--across-rows", "--json"))
    assert across["output"]["bigrams"] == 9


def test_several_files_are_counted_as_one_text_with_progress_per_row(tmp_path):
    pairs = [(text, text) for text in ("a b", "c", "d e")]
    parts = [write(tmp_path / str(i), part) for i, part in enumerate((pairs[:2], pairs[2:]))]
    across = Units(across_rows=True)
    found = file_statistics(parts, across)
    assert found == file_statistics([write(tmp_path / "whole", pairs)], across)
    assert found.output.words.ngrams.ngrams == 4
    path, reported = tmp_path / "rows.jsonl", []
    path.write_text('{"input": "a b", "output": "c"}\nno json\n{"input": "d", "output": "e"}\n')
    found = file_statistics([path, path], progress=lambda *progress: reported.append(progress))
    assert reported == [("count", rows, None) for rows in (1, 2, 3, 4)]
    assert (found.input.rows, found.input.words.count, found.rejected) == (4, 6, 2)


@pytest.mark.parametrize("across_rows", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_random_rows_have_the_figures_of_the_definitions(tmp_path, n, across_rows):
    rows = random_rows(n)
    units = Units.of(n, MODEL, across_rows=across_rows)
    found = file_statistics([write(tmp_path / "rows.jsonl", rows)], units)
    tokenizer = TaskTokenizer.from_folder(MODEL)
    size = len(tokenizer.backend.get_vocab(with_added_tokens=True))
    for side, texts in zip((found.input, found.output), zip(*rows, strict=True), strict=True):
        lengths = [len(text.split()) for text in texts]
        assert_unit(side.words, word_ngrams(texts, n, across_rows), lengths)
        expected = figures(texts)
        assert {name: getattr(side.texts, name) for name in expected} == pytest.approx(expected)
        ids = tokenizer.encode_outputs(texts)
        assert_unit(side.tokens, [*chain(*ids)], [len(each) for each in ids], size)


def test_statistics_without_a_tokenizer_have_no_tokens(tmp_path):
    found = file_statistics([write(tmp_path / "rows.jsonl", [("a b", "c d"), ("", "c d")])])
    assert found.output.tokens is None
    of = found.as_json["output"]
    assert {name: of[name] for name in list(of)[:6]} == {
        "rows": 2,
        "words": 4,
        "bigrams": 2,
        "unique_bigrams": 1,
        "bigram_entropy_bits": of["word_ngrams"]["shannon_bits"],
        "bigrams_for_80_percent": 1,
    }
    assert (list(of)[6:8], found.as_json["rejected"]) == (["word_ngrams", "word_lengths"], 0)
    shares = ("different_texts", "different_share", "most_frequent_share")
    assert [of[name] for name in shares] == [1, 0.5, 1.0]


def test_missing_tokenizers_and_empty_files_are_errors(tmp_path):
    with pytest.raises(TokenizerError):
        Units.of(2, tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("no json\n")
    with pytest.raises(EmptyCorpusError):
        file_statistics([path])
    with refused(FileError, "absent.jsonl"):
        file_statistics([path, tmp_path / "absent.jsonl"])


ROWS = ['{"input": "turn on the light", "output": "intent: on"}', '{"input": "", "output": "off"}']


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*ROWS * 20, "no row"]) + "\n")
    return path


@pytest.mark.parametrize(("tokenizer", "plots"), [([], 5), (["--tokenizer", MODEL], 7)])
def test_statistics_page_is_self_contained(train, tmp_path, tasc, tokenizer, plots):
    page = tmp_path / "report.html"
    tasc.run("stats", "--train", train, *tokenizer, "--report", page)
    assert f"report: {page}" in tasc.err
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == plots
    assert ("Frequency of tokens" in html) == bool(tokenizer)
    assert_self_contained(html)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--tokenizer", "nowhere"], 1, "tokenizer.json"),
        (["--report", "nowhere/report.html"], 2, "nowhere/report.html"),
        (["--n", "0"], 2, "--n"),
        (["--n", "17"], 2, "--n"),
        (["task"], 2, "--train"),
    ],
)
def test_invalid_options_are_refused_and_named(train, tasc, args, code, message):
    err = tasc.run("stats", "--train", train, *args, code=code)
    assert message in re.sub(r"[\s│]+", " ", err)
    assert not tasc.out
