"""`tasc rank-vocabulary` over a real Redis: exact counts, versioned, also in a file."""

import json
from collections import Counter

import pytest

from support import refused, write_rows
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import EmptyCorpusError
from tasc_runtime.engine.drafters import current_ranking
from tasc_runtime.errors import FileError
from tasc_store import ArtifactStore, CorpusRow, CorpusStore, UnknownTask
from tasc_store.artifacts import VOCABULARY
from tasc_text import TaskTokenizer
from tasc_train.drafter.rank_vocabulary import STAGES, Choice, RankJob, rank_and_publish

pytestmark = pytest.mark.redis

WORDS = ["turn", "on", "the", "light", "naïve", "日本"]
ANSWERS = [" ".join(WORDS[: 1 + i % 6]) for i in range(300)]


@pytest.fixture
def filled(client, task) -> str:
    """A corpus in which a service answered every third row."""
    keys = [f"served:{task}:{i}" if i % 3 == 0 else f"row:{i}" for i in range(len(ANSWERS))]
    rows = [CorpusRow(key, "", answer) for key, answer in zip(keys, ANSWERS, strict=True)]
    CorpusStore(client, task).append(rows)
    return task


def counted(answers: list[str]) -> dict[int, int]:
    tokenizer = TaskTokenizer.from_folder(MODEL)
    found = Counter(i for ids in tokenizer.encode_outputs(answers) for i in ids)
    found[tokenizer.eos_id] += len(answers)
    return dict(found)


def as_counts(ranking: Ranking) -> dict[int, int]:
    return dict(zip(ranking.ids.tolist(), ranking.counts.tolist(), strict=True))


def test_corpora_are_counted_and_each_ranking_has_a_version(redis_url, client, filled):
    fingerprint = TaskTokenizer.from_folder(MODEL).fingerprint
    store = ArtifactStore(client, filled, fingerprint, kind=VOCABULARY)
    assert current_ranking(store) is None
    wanted = [("raw", ANSWERS), ("target", ANSWERS[::3])]
    for version, (origin, answers) in enumerate(wanted, 1):
        calls = []
        job = RankJob(filled, origin, MODEL)
        artifact, ranking = rank_and_publish(
            redis_url, job, lambda *to, calls=calls: calls.append(to)
        )
        assert as_counts(ranking) == counted(answers)
        assert (ranking.rows, ranking.corpus_rows) == (len(answers), 300)
        assert (artifact.version, artifact.corpus_rows) == (version, 300)
        assert list(dict.fromkeys(stage for stage, _, _ in calls)) == list(STAGES)
        assert ("count", 300, 300) in calls
        stored = current_ranking(store)
        assert (as_counts(stored), stored.origin) == (counted(answers), origin)
    assert store.versions() == [1, 2]
    CorpusStore(client, f"{filled}x").append([CorpusRow("a", "", "on")])
    with pytest.raises(EmptyCorpusError):
        rank_and_publish(redis_url, RankJob(f"{filled}x", "target", MODEL))
    job = RankJob(filled, "raw", MODEL, choice=Choice(top_k=4))
    _, cut = rank_and_publish(redis_url, job)
    assert (len(cut.ids), cut.total) == (4, sum(counted(ANSWERS).values()))


def test_answers_in_a_file_are_counted(redis_url, client, task, tmp_path, in_process):
    output = tmp_path / "ranked.npz"
    rows = [*({"text": text} for text in ANSWERS), {"text": ""}, {"other": "on"}]
    answers = write_rows(tmp_path / "answers.jsonl", rows)
    args = ["rank-vocabulary", task, "--from", "draft", "--tokenizer", MODEL, "--answers", answers]
    args += ["--redis-url", redis_url]
    found = json.loads(in_process.run(*args, "--top-p", 0.9, "--output", output, "--json"))
    read = Ranking.load(output, found["fingerprint"])
    assert (found["kept"], found["rows"], found["corpus_rows"]) == (len(read.ids), 300, 0)
    assert 0.9 <= found["coverage"] == read.coverage < 1
    assert as_counts(read).items() < counted(ANSWERS).items()
    store = ArtifactStore(client, task, found["fingerprint"], kind=VOCABULARY)
    assert as_counts(current_ranking(store)) == as_counts(read)
    assert ArtifactStore(client, task, found["fingerprint"]).current() is None  # that is no index
    assert "version 2 of the vocabulary" in in_process.run(*args)
    size = found["vocab_size"]
    assert f"choose 1 to {size}" in in_process.run(*args, "--top-k", size + 1, code=1)
    assert "--output is" in in_process.run(*args, "--output", tmp_path / "no" / "f", code=2)
    long = "n" * 250  # the name of the temporary file cannot be longer
    assert "version 3 is current" in in_process.run(*args, "--output", tmp_path / long, code=1)
    with pytest.raises(UnknownTask):
        rank_and_publish(redis_url, RankJob(task, "raw"))
    with refused(FileError, "nowhere.jsonl"):
        job = RankJob(task, "draft", MODEL, tmp_path / "nowhere.jsonl")
        rank_and_publish(redis_url, job)
