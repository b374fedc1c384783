"""Batches from a client's upload to its download: real HTTP, Redis, Ray and a tiny model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch
from batch_jobs import ENGINE, MAX_TOKENS, record_of
from batch_service import answers, asked, batch_service, line, request
from openai import APIStatusError, InternalServerError, OpenAI
from openai.types import Batch as OpenAIBatch
from openai.types import BatchError
from transformers import AutoModelForCausalLM

from tasc_jobs.batch.work import JobBusy, JobProgress
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker.batch_worker import BatchWorker, TaskBackoff
from tasc_jobs.worker.one_batch import Ended, OneBatch, WorkerSettings
from tasc_serve.settings import LimitSettings
from tasc_store import EmbeddedRedis, TaskRecord, TaskStore, connect
from tasc_store.batches.batch_store import Batch, BatchStore
from tasc_text import TaskTokenizer
from tiny import plain

pytestmark = [pytest.mark.redis, pytest.mark.ray]


class Run:
    """A worker of this process for one task's batches, and what it said."""

    def __init__(self, client: redis.Redis, url: str, task: str, work: Path) -> None:
        limits = LimitSettings(max_batch_lines=5000, max_choices=4)
        self.client, self.task = client, task
        self.settings = WorkerSettings(url, work, ENGINE, limits)
        self.ended: list[Ended] = []
        self.said: list[str] = []
        self.worker = self.made()

    def made(self, backoff: TaskBackoff | None = None, **told: Callable[..., None]) -> BatchWorker:
        return BatchWorker(
            self.client,
            self.settings,
            [self.task],
            poll_s=0.1,
            backoff=backoff or TaskBackoff(first_s=0.01),
            say=self.said.append,
            ended=self.ended.append,
            **told,
        )

    def left(self) -> list[Path]:
        return list(self.settings.folder.iterdir())


@pytest.fixture
def run(client: redis.Redis, redis_url: str, served: str, tmp_path: Path) -> Run:
    return Run(client, redis_url, served, tmp_path)


def said_by_the_model(folder: Path, prompt: str) -> tuple[str, list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = TaskTokenizer.from_folder(folder)
    tokens = plain(model, tokenizer.encode_prompt(prompt), MAX_TOKENS)
    return tokenizer.decode(tokens), tokens


def bad_lines(served: str) -> dict[str, str]:
    return {
        "typo": line(served, "typo", "x", max_tokns=5),
        "stream": line(served, "stream", "x", stream=True),
        "long": line(served, "long", "long " * 200),
        "many": line(served, "many", "x", n=5),
        "other": request("other", "/v1/completions", {"model": served, "prompt": "x"}),
        "method": line(served, "method", "x").replace('"POST"', '"GET"'),
        "unnamed": request("unnamed", "/v1/chat/completions", {"messages": []}),
    }


@pytest.mark.usefixtures("ray_cluster")
def test_a_batch_goes_from_upload_to_answers(
    openai: OpenAI, run: Run, served: str, folder: Path
) -> None:
    bad = bad_lines(served)
    batch = asked(
        openai,
        [
            line(served, "plain", "wake me at nine"),
            "\n",
            line(served, "naïve 東京", "wake me at nine"),
            *bad.values(),
            line(served, "label", "x", guided_choice=["alarm", "music"]),
            line(served, "three", "wake me", n=3, temperature=2.0),
            line(served, "told", "wake me", logprobs=True, metrics="summary"),
        ],
    )
    assert (batch.status, batch.model) == ("validating", served)
    run.worker.run_waiting()
    done = openai.batches.retrieve(batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (12, 5, 7)
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    good = answers(openai, done.output_file_id)
    assert list(good) == ["plain", "naïve 東京", "label", "three", "told"]
    assert all(each["error"] is None for each in good.values())
    body = good["plain"]["response"]["body"]
    text, tokens = said_by_the_model(folder, "say wake me at nine\n")
    assert good["plain"]["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", served)
    assert body["choices"][0]["message"]["content"] == text
    assert body["usage"]["completion_tokens"] == len(tokens)
    assert "metrics" not in body
    assert good["naïve 東京"]["response"]["body"]["choices"] == body["choices"]
    label = good["label"]["response"]["body"]["choices"][0]["message"]["content"]
    assert label in ("alarm", "music")
    three = good["three"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in three] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in three}) == 3
    told = good["told"]["response"]["body"]
    assert told["choices"][0]["logprobs"]["content"]
    assert told["metrics"] is not None
    wrong = answers(openai, done.error_file_id)
    assert set(wrong) == set(bad)
    params = {name: each["response"]["body"]["error"]["param"] for name, each in wrong.items()}
    assert params == {
        "typo": "max_tokns", "stream": "stream", "long": "messages.0.content", "many": "n",
        "other": "url", "method": "method", "unnamed": "model",
    }  # fmt: skip
    assert {each["response"]["status_code"] for each in wrong.values()} == {400}
    assert [e.status for e in run.ended] == ["completed"]
    assert run.left() == []
    listed = {file.id for file in openai.files.list(purpose="batch_output")}
    assert {done.output_file_id, done.error_file_id} <= listed
    openai.files.delete(batch.input_file_id)


@pytest.mark.slow("three jobs")
@pytest.mark.usefixtures("ray_cluster")
def test_a_line_that_is_answered_again_is_answered_alike_and_like_no_other(
    openai: OpenAI, run: Run, served: str, client: redis.Redis
) -> None:
    prompt = {"model": served, "prompt": "wake me", "temperature": 2.0, "max_tokens": 12}
    lines = [request(f"r{i}", "/v1/completions", prompt) for i in range(8)]
    lines += [request(f"s{i}", "/v1/completions", {**prompt, "seed": 5}) for i in range(3)]
    lost: dict[int, object] = {}

    def lose(batch: Batch, progress: JobProgress) -> None:
        """All that is answered, once."""
        if progress.done and not lost:
            file = run.settings.folder_of(batch) / "job" / "records.jsonl"
            for text in file.read_text().splitlines():
                record = json.loads(text)
                lost[record[0]] = record[4]
            file.unlink()
            raise JobError("the disk failed")

    first = asked(openai, lines, "/v1/completions")
    run.made(told=lose).run_waiting()
    assert lost
    found = answers(openai, openai.batches.retrieve(first.id).output_file_id)
    bodies = [each["response"]["body"] for each in found.values()]
    assert all(bodies[row] == body for row, body in lost.items())
    texts = {name: each["response"]["body"]["choices"][0]["text"] for name, each in found.items()}
    assert len({texts[f"r{i}"] for i in range(8)}) > 4
    assert len({texts[f"s{i}"] for i in range(3)}) == 1
    second = asked(openai, lines, "/v1/completions")
    run.worker.run_waiting()
    again = answers(openai, openai.batches.retrieve(second.id).output_file_id)
    others = {name: each["response"]["body"]["choices"][0]["text"] for name, each in again.items()}
    assert others["s0"] == texts["s0"]
    assert others != texts


def faults(batch: OpenAIBatch) -> list[BatchError]:
    assert batch.errors is not None
    return list(batch.errors.data or ())


def test_a_file_that_is_no_batch_fails_and_says_where(
    openai: OpenAI, run: Run, served: str
) -> None:
    hi = line(served, "a", "hi")
    cases = {
        "invalid_json_line": [hi, "{no json\n"],
        "duplicate_custom_id": [hi, line(served, "b", "hi"), hi],
        "missing_custom_id": [hi, '{"custom_id": 5}\n'],
        "mismatched_model": [hi, line("another", "b", "hi")],
        "too_many_lines": [line(served, f"r{i}", "hi") for i in range(5001)],
    }
    batches = {code: asked(openai, lines) for code, lines in cases.items()}
    run.worker.run_waiting()
    for code, batch in batches.items():
        failed = openai.batches.retrieve(batch.id)
        assert failed.status == "failed", code
        (fault,) = faults(failed)
        assert fault.code == code
        number = {"duplicate_custom_id": 3, "too_many_lines": 5001}.get(code, 2)
        assert fault.line == number
        assert str(fault.message).startswith(f"line {number}: ")
        assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert run.left() == []


def test_a_task_that_is_gone_fails_its_batch(
    openai: OpenAI, run: Run, served: str, client: redis.Redis
) -> None:
    batch = asked(openai, [line(served, "a", "hi")])
    TaskStore(client).delete(served)
    run.worker.run_waiting()
    failed = openai.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert [fault.code for fault in faults(failed)] == ["model_not_found"]


@pytest.mark.usefixtures("ray_cluster")
def test_a_batch_that_can_never_be_answered_fails_after_some_attempts(
    openai: OpenAI, run: Run, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(one: OneBatch) -> Ended:
        raise JobError("no engine can be built")

    monkeypatch.setattr(OneBatch, "run", fails)
    batch = asked(openai, [line(served, "a", "hi")])
    run.worker.run_waiting()
    failed = openai.batches.retrieve(batch.id)
    assert failed.status == "failed"
    (fault,) = faults(failed)
    assert (fault.code, fault.message) == ("worker_failed", "no engine can be built")
    assert sum("no engine" in text for text in run.said) == 5


@pytest.mark.slow("engines that fail")
@pytest.mark.usefixtures("ray_cluster")
def test_a_model_that_is_not_here_fails_no_batch_and_it_goes_on_where_it_is(
    openai: OpenAI, run: Run, served: str, client: redis.Redis, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    TaskStore(client).put(replace(record_of(served, folder), model=str(model)))
    batch = asked(openai, [line(served, "a", "hi")])
    with pytest.raises(ClusterError) as ended:
        run.made(TaskBackoff(1)).run_for_ever()
    assert str(model) in str(ended.value)
    left = BatchStore(client).get(batch.id)
    assert (left.status, left.attempts) == ("in_progress", 0)
    shutil.copytree(folder, model)
    run.worker.run_waiting()
    assert openai.batches.retrieve(batch.id).status == "completed"


def test_a_batch_that_another_process_works_on_is_left_to_it_however_long(
    openai: OpenAI, run: Run, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def busy(one: OneBatch) -> Ended:
        attempts.append(one.batch.attempts)
        if len(attempts) < 8:
            raise JobBusy("another process works on the job")
        return one.failed("done", "at last")

    monkeypatch.setattr(OneBatch, "run", busy)
    batch = asked(openai, [line(served, "a", "hi")])
    run.worker.run_waiting()
    assert attempts == [1] * 8
    assert openai.batches.retrieve(batch.id).status == "failed"


def test_a_batch_that_waits_is_cancelled_at_once_and_its_file_can_go(
    openai: OpenAI, run: Run, served: str
) -> None:
    batch = asked(openai, [line(served, "a", "hi")])
    with pytest.raises(APIStatusError) as refused:
        openai.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    assert openai.batches.cancel(batch.id).status == "cancelled"
    run.worker.run_waiting()
    assert run.ended == []
    assert openai.files.delete(batch.input_file_id).deleted


def test_a_service_whose_redis_is_gone_says_so_in_openais_words() -> None:
    with EmbeddedRedis.start() as server, connect(server.url) as client:
        TaskStore(client).put(TaskRecord("t", "m", "f" * 32, "{input}"))
        with batch_service(client) as openai:
            batch = asked(openai, [line("t", "a", "hi")])
            server.close()
            for ask in (
                lambda: openai.batches.retrieve(batch.id),
                lambda: asked(openai, [line("t", "a", "hi")]),
                lambda: openai.files.content(batch.input_file_id),
            ):
                with pytest.raises(InternalServerError) as failed:
                    ask()
                assert failed.value.status_code == 503
                assert failed.value.code == "service_unavailable"
                assert int(failed.value.response.headers["retry-after"]) >= 1


def test_the_client_pages_through_files_and_batches(openai: OpenAI, served: str) -> None:
    ids = [asked(openai, [line(served, "a", "hi")]).id for _ in range(5)]
    found = []
    for batch in openai.batches.list(limit=2):
        found.append(batch.id)
        if ids[0] in found:
            break
    assert [id_ for id_ in found if id_ in ids] == ids[::-1]
    files = [file.id for file in openai.files.list(limit=3, purpose="batch", order="desc")]
    assert len(set(files)) == len(files) >= 5
    for id_ in ids:
        openai.batches.cancel(id_)
