"""Tests that the index job gives the same bytes at any parallelism, with real Redis and Ray."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
from tokenizers import Tokenizer, processors

import support
from support import refused
from tasc_draft import BigramTable, DraftError, DraftIndex, Tokens, build_index, read_index
from tasc_draft.index.bigrams import write_bigrams
from tasc_draft.index.draft_index import write_index
from tasc_draft.replaying import EPOCHS, held_out, learn_weights
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.index.build import STAGES, build_and_publish
from tasc_runtime.models import chat_template
from tasc_store import ArtifactStore, CorpusRow, CorpusStore, TaskRecord
from tasc_text import PromptTemplate, TaskTokenizer
from tiny import END, SENTENCES, make_tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
WORDS = SENTENCES[0].split() + SENTENCES[1].split()
TAGS = {word: ("DET", "NOUN", "VERB", "ADP")[i % 4] for i, word in enumerate(WORDS)}


def sentence(i: int) -> list[str]:
    return [WORDS[(i * k + i // 7) % len(WORDS)] for k in range(1, 4 + i % 5)]


PHRASES = [sentence(i) for i in range(300)]
TAGGED = [" ".join(TAGS[word] for word in phrase) for phrase in PHRASES]
ROWS = [CorpusRow(f"k{i}", " ".join(phrase), TAGGED[i]) for i, phrase in enumerate(PHRASES)]


def record_of(folder: Path, task: str, **changes: object) -> TaskRecord:
    return support.record_of(folder, task, "tag {input}\n", **changes)


@pytest.fixture
def filled(client: redis.Redis, task: str) -> str:
    CorpusStore(client, task).append(ROWS)
    return task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tokenizer that adds a token before prompts, but not before outputs."""
    folder = tmp_path / "model"
    make_tokenizer(folder, [row.input + row.output for row in ROWS])
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(path)
    return folder


def in_one_process(
    folder: Path, record: TaskRecord, rows: list[CorpusRow], max_bytes: int | None = None
) -> DraftIndex:
    """Returns the index of rows, built without the job's code."""
    tokenizer = TaskTokenizer.from_folder(folder)
    rendered = record.chat or PromptTemplate(record.template)
    outputs = Tokens.of(tokenizer.encode_outputs([row.output for row in rows]))
    prompts = Tokens.of([rendered.encode(tokenizer, row.input) for row in rows])
    how = {
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.backend.token_to_id(END),
        "word_starts": tokenizer.word_starts,
        "canonical": tokenizer.canonical,
        "max_bytes": max_bytes,
    }
    kept, held = held_out(len(rows))
    weights = learn_weights(
        build_index(outputs.take(kept), prompts.take(kept), **how),
        prompts.take(held),
        outputs.take(held),
        eos_id=how["eos_id"],
        settings=dataclasses.replace(record.draft, recent_tokens=0),
    )
    return dataclasses.replace(build_index(outputs, prompts, **how), weights=weights)


def bytes_of(store: ArtifactStore, version: int, folder: Path) -> bytes:
    path = folder / str(version)
    store.download(store.get(version), path)
    return path.read_bytes()


def test_index_prompts_use_the_tasks_chat_template(client, redis_url, filled, folder, tmp_path):
    source = "{{ eos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    chat = replace(chat_template(folder, source), system="Tag it.")
    record = replace(record_of(folder, filled), template="{input}", chat=chat)
    write_index(in_one_process(folder, record, ROWS), tmp_path / "expected")
    artifact, _ = build_and_publish(redis_url, record, parallelism=2)
    store = ArtifactStore(client, filled, record.fingerprint)
    found = bytes_of(store, artifact.version, tmp_path)
    assert found == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("capped", [False, True])
def test_index_file_is_equal_at_any_parallelism(
    client: redis.Redis, redis_url: str, filled: str, folder: Path, tmp_path: Path, capped: bool
) -> None:
    record = record_of(folder, filled)
    expected, cap = in_one_process(folder, record, ROWS), None
    assert None not in (expected.inputs, expected.aligned, expected.weights)
    if capped:
        cap = expected.corpus.nbytes // 3
        expected = in_one_process(folder, record, ROWS, cap)
        assert 0 < expected.corpus.documents < len(ROWS)
    write_index(expected, tmp_path / "expected")
    store = ArtifactStore(client, filled, record.fingerprint)
    for ranges in (None, 1, 2, 5):
        artifact, built = build_and_publish(redis_url, record, parallelism=ranges, max_bytes=cap)
        assert built.corpus.nbytes <= (cap or expected.corpus.nbytes)
        assert (artifact.corpus_rows, store.current()) == (len(ROWS), artifact)
        built.check_integrity()
        found = bytes_of(store, artifact.version, tmp_path)
        assert found == (tmp_path / "expected").read_bytes(), ranges
    read_index(tmp_path / str(artifact.version)).check_integrity()


@pytest.mark.parametrize("max_bytes", [None, 4000])
def test_index_stages_are_reported_in_order_until_complete(
    client: redis.Redis, redis_url: str, filled: str, folder: Path, max_bytes: int | None
) -> None:
    record = record_of(folder, filled)
    store = ArtifactStore(client, filled, record.fingerprint)
    reported: dict[str, list[tuple[int, int | None]]] = {}
    current = []

    def watch(stage: str, done: int, total: int | None) -> None:
        reported.setdefault(stage, []).append((done, total))
        current.append(store.current())

    build_and_publish(redis_url, record, parallelism=3, max_bytes=max_bytes, progress=watch)
    rounds = reported.pop("prune", [])  # as many as it takes
    assert rounds == [(i, None) for i in range(len(rounds))]
    assert (len(rounds) > 1) == bool(max_bytes)
    assert list(reported) == [stage for stage in STAGES if stage != "prune"]
    for steps in reported.values():
        (total,) = {total for _, total in steps}
        assert (steps[0][0], steps[-1][0]) == (0, total)
        assert steps == sorted(steps)
    assert reported["tokenise"][-1][0] == len(ROWS)
    assert ([done for done, _ in reported["sort"]], reported["learn"][-1][0]) == (
        [0, 1, 2, 3],
        EPOCHS,
    )
    assert [version for version in current if version] == [store.current()]


def test_row_without_an_input_has_the_bare_template_as_its_prompt(
    client, redis_url, task, folder, tmp_path
) -> None:
    rows = [replace(row, input=row.input if i % 3 else "") for i, row in enumerate(ROWS)]
    CorpusStore(client, task).append(rows)
    record = record_of(folder, task)
    _, index = build_and_publish(redis_url, record)
    for name, found in (("expected", in_one_process(folder, record, rows)), ("found", index)):
        write_index(found, tmp_path / name)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


def test_index_of_a_corpus_without_inputs_or_with_few_rows_lacks_parts(
    client: redis.Redis, redis_url: str, task: str, folder: Path
) -> None:
    CorpusStore(client, task).append([dataclasses.replace(row, input="") for row in ROWS])
    _, index = build_and_publish(redis_url, record_of(folder, task))
    assert index.corpus.documents == len(ROWS)
    assert (index.inputs, index.aligned, index.weights) == (None, None, None)
    CorpusStore(client, f"{task}-small").append(ROWS[:199])
    _, small = build_and_publish(redis_url, record_of(folder, f"{task}-small"))
    assert small.weights is None
    assert small.inputs is not None


def test_bigrams_of_another_tokenizer_are_refused(redis_url, filled, folder, tmp_path):
    tokenizer, record = TaskTokenizer.from_folder(folder), record_of(folder, filled)
    path, size = tmp_path / "bigrams.npz", tokenizer.vocab_size
    tokens = np.arange(size, dtype=np.int32)[:, None]
    for fingerprint in ("0" * 32, tokenizer.fingerprint):
        table = BigramTable("m", fingerprint, size, tokens, np.zeros((size, 1), np.float32))
        write_bigrams(table, path)
        if fingerprint != tokenizer.fingerprint:
            with refused(DraftError, fingerprint):  # before the corpus is read
                build_and_publish(redis_url, replace(record, corpus="none"), bigrams=path)
    _, index = build_and_publish(redis_url, record, bigrams=path)
    assert np.array_equal(index.bigrams.tokens, tokens)
    index.check_integrity()


def test_one_corpus_serves_two_tokenizers(client, redis_url, filled, tmp_path):
    make_tokenizer(tmp_path / "a", size=300)
    make_tokenizer(tmp_path / "b", size=330)
    first = record_of(tmp_path / "a", filled)
    second = record_of(tmp_path / "b", "other", corpus=filled)
    assert first.fingerprint != second.fingerprint
    indexes = [build_and_publish(redis_url, r)[1] for r in (first, second)]
    assert [i.fingerprint for i in indexes] == [first.fingerprint, second.fingerprint]
    for record in (first, second):
        store = ArtifactStore(client, filled, record.fingerprint)
        assert store.current() is not None
        assert len(store.other_fingerprints()) == 1


def test_empty_corpus_publishes_nothing(client, redis_url, task, folder):
    record = record_of(folder, task)
    with pytest.raises(EmptyCorpusError):
        build_and_publish(redis_url, record)
    assert ArtifactStore(client, task, record.fingerprint).current() is None
