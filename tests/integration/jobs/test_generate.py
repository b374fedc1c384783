"""Tests that a batch job gives each good row once, in order, and a reason for other rows."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from batch_jobs import ENGINE, expected, record_of, rows

from support import failing, read_rows, write_rows
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.generate import dry_run, generate
from tasc_jobs.batch.inputs import Source, job_folder
from tasc_jobs.batch.work import JobChanged, JobStalled, TooManyErrors
from tasc_jobs.index.build import build_and_publish
from tasc_protocol import GuideSpec, Request
from tasc_store import CorpusRow, CorpusStore, TaskStore, UnknownTask
from tasc_text import TaskTokenizer

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_every_row_is_answered_once_in_order_like_transformers(
    client: redis.Redis, redis_url: str, served: str, folder: Path, tmp_path: Path
) -> None:
    inputs = [row["input"] for row in rows(30)]
    right = expected(folder, inputs)
    texts = map(TaskTokenizer.from_folder(folder).decode, right[:20])
    store = CorpusStore(client, served)
    store.append([CorpusRow(f"k{i}", inputs[i], text) for i, text in enumerate(texts)])
    artifact, _ = build_and_publish(redis_url, TaskStore(client).get(served))
    source = Source.of(write_rows(tmp_path / "in.jsonl", rows(30)))
    drafted = generate(redis_url, served, source, tmp_path / "out.jsonl", engine=ENGINE)
    assert drafted.block_efficiency > 1
    assert (drafted.rows, drafted.errors) == (30, 0)
    out = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in out] == [f"r{i}" for i in range(30)]
    assert [row["tokens"] for row in out] == right
    assert {row["index_version"] for row in out} == {artifact.version}
    assert {(row["model"], row["adapter"]) for row in out} == {(str(folder), None)}
    assert not (tmp_path / "out.jsonl.rejected.jsonl").exists()

    # The same inputs out of the corpus; rows that come later are none of the job's.
    output = tmp_path / "corpus.parquet"
    corpus = Source.of(f"redis:{served}", keep_columns=True)
    stop, asked = failing(InterruptedError()), Request(logprobs=1)
    with pytest.raises(InterruptedError):
        generate(redis_url, served, corpus, output, engine=ENGINE, asked=asked, progress=stop)
    store.append([CorpusRow("later", "wake me", "x")])
    generate(redis_url, served, corpus, output, engine=ENGINE, asked=asked)
    table = pq.read_table(output)
    assert table.column("input").to_pylist() == inputs[:20]
    for token in (token for row in table["logprobs"].to_pylist() for token in row):
        assert [top["token"] for top in token["top_logprobs"]] == [token["token"]]
    assert table.column("id").to_pylist() == [f"k{i}" for i in range(20)]
    assert table.column("tokens").to_pylist() == right[:20]


def test_rejected_rows_have_line_id_and_reason(redis_url: str, served: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", [{"id": "a", "input": "hi"}, {"id": "b"}, [1]])
    table = pa.table({"id": ["c", "a"], "input": ["long " * 200, "again"]})
    pq.write_table(table, tmp_path / "in" / "b.parquet")
    output, reject = tmp_path / "out.jsonl", tmp_path / "no.jsonl"

    def run(**more: object) -> object:
        more |= {"engine": ENGINE, "draft": False, "reject": reject}
        return generate(redis_url, served, Source.of(tmp_path / "in"), output, **more)

    with pytest.raises(UnknownTask):
        generate(redis_url, "no-such-task", Source.of(tmp_path / "in"), output)
    with pytest.raises(TooManyErrors):
        run(max_errors=2)
    assert not output.exists()
    assert len(read_rows(reject)) >= 3
    report = run(max_errors=4)
    assert (report.rows, report.errors, report.stopped) == (5, 4, False)
    assert report.first_error == "row 2: no field 'input'"
    assert [row["id"] for row in read_rows(output)] == ["a"]
    found = read_rows(reject)
    assert [(r["file"], r["line"], r["id"]) for r in found] == [
        ("a.jsonl", 2, "b"),
        ("a.jsonl", 3, "a.jsonl:3"),
        ("b.parquet", 1, "c"),
        ("b.parquet", 2, "a"),
    ]
    assert "a row holds 64" in found[2]["reason"]
    assert found[3]["reason"] == "id 'a' is also in line 1 of a.jsonl"


@pytest.mark.slow("five jobs")
def test_stopped_job_resumes_only_with_the_same_input_and_settings(
    client: redis.Redis, redis_url: str, served: str, folder: Path, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows(1500))
    output = tmp_path / "out.jsonl"
    done: list[int] = []

    def run(**more: object) -> object:
        return generate(redis_url, served, Source.of(source), output, engine=ENGINE, **more)

    with pytest.raises(JobStalled):
        run(stall_s=0.2)
    stopped = run(progress=lambda f: done.append(f.report.rows), should_stop=lambda: any(done))
    assert stopped.stopped
    assert not output.exists()
    with pytest.raises(JobChanged):
        run(asked=Request(parameters={"temperature": 0.5}))
    write_rows(source, rows(1501))
    with pytest.raises(JobChanged):
        run()
    TaskStore(client).put(record_of(served, folder, stop=("x",)))
    write_rows(source, rows(1500))
    whole = run()  # with the task's version at its start
    assert (whole.rows, whole.stopped) == (1500, False)
    assert whole.resumed >= done[-1] > 0
    begun = JobFolder(job_folder(output)).begun()
    assert (begun.record_version, begun.report["rows"]) == (1, 1500)
    write_rows(source, rows(8))
    assert (run(restart=True).rows, len(read_rows(output))) == (8, 8)


@pytest.mark.slow("three jobs")
def test_job_options_replace_the_guide_and_sampling_of_the_task(
    redis_url: str, served: str, tmp_path: Path
) -> None:
    source = Source.of(write_rows(tmp_path / "in.jsonl", [{"input": "wake me"} for _ in range(12)]))
    labels = ("alarm", "weather", "music")
    guide = GuideSpec("choice", labels, field="--choices")

    def answers(name: str, **asked: object) -> list[str]:
        how = Request(**asked)
        generate(redis_url, served, source, tmp_path / name, engine=ENGINE, asked=how)
        return [row["text"] for row in read_rows(tmp_path / name)]

    greedy = answers("greedy.jsonl", guide=guide)
    assert len(set(greedy)) == 1
    assert set(greedy) <= set(labels)
    warm = {"temperature": 2.0}
    sampled = answers("sampled.jsonl", parameters=warm, seed=3)
    assert len(set(sampled)) > 3  # random numbers of each row are its own
    assert answers("again.jsonl", parameters=warm, seed=3) == sampled


@pytest.mark.slow("an engine of its own")
def test_dry_run_times_rows_with_and_without_drafts_and_writes_nothing(
    client, redis_url, served, tmp_path
):
    inputs = [{"input": row["input"]} for row in (*rows(30), *rows(10))]
    source = Source.of(write_rows(tmp_path / "in.jsonl", [[1], *inputs]))
    before, output = client.dbsize(), tmp_path / "out.jsonl"
    found = dry_run(redis_url, served, source, output, engine=ENGINE, max_errors=0)
    preview = found.preview
    assert (preview.rows, preview.refused, preview.identical) == (20, 0, 20)
    assert (found.total, found.compared, found.repeats) == (41, 40, 10)
    plain, drafted = found.cost(draft=False), found.cost(draft=True)
    assert plain.tokens == plain.steps == drafted.tokens > drafted.steps
    assert drafted.seconds > 0
    assert ([path.name for path in tmp_path.iterdir()], client.dbsize()) == (["in.jsonl"], before)
