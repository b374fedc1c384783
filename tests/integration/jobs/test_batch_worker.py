"""Batches from a client's upload to its download: real HTTP, Redis, Ray and a tiny model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from batch_jobs import WorkerRun, answers, asked, expected, line, record_of, request
from openai import OpenAI

from support import refused
from tasc_jobs.batch.work import JobProgress
from tasc_jobs.errors import ClusterError, JobError
from tasc_store import TaskStore
from tasc_store.batches.batch_store import Batch, BatchStore
from tasc_text import TaskTokenizer

pytestmark = [pytest.mark.redis, pytest.mark.ray]


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
def test_batch_answers_each_line_or_reports_its_error(
    openai: OpenAI, run: WorkerRun, served: str, folder: Path
) -> None:
    bad = bad_lines(served)
    lines = [
        line(served, "plain", "wake me at nine"),
        "\n",
        line(served, "naïve 東京", "wake me at nine"),
        *bad.values(),
        line(served, "label", "x", guided_choice=["alarm", "music"]),
        line(served, "three", "wake me", n=3, temperature=2.0),
        line(served, "told", "wake me", logprobs=True, metrics="summary"),
    ]
    batch = asked(openai, lines)
    assert (batch.status, batch.model) == ("validating", served)
    run.worker().run_waiting()
    done = openai.batches.retrieve(batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 5, 7)
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    good = answers(openai, done.output_file_id)
    assert list(good) == ["plain", "naïve 東京", "label", "three", "told"]
    assert all(each["error"] is None for each in good.values())
    body = good["plain"]["response"]["body"]
    (tokens,) = expected(folder, ["wake me at nine"])
    assert good["plain"]["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", served)
    text = body["choices"][0]["message"]["content"]
    assert text == TaskTokenizer.from_folder(folder).decode(tokens)
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
    assert ([e.status for e in run.ended], run.left()) == (["completed"], [])
    listed = {file.id for file in openai.files.list(purpose="batch_output")}
    assert {done.output_file_id, done.error_file_id} <= listed
    openai.files.delete(batch.input_file_id)


@pytest.mark.usefixtures("ray_cluster")
def test_batch_of_responses_requests_is_answered(
    openai: OpenAI, run: WorkerRun, served: str, folder: Path
) -> None:
    inputs = {"good": "wake me at nine", "long": "long " * 200}
    bodies = {name: {"model": served, "input": said} for name, said in inputs.items()}
    lines = [request(name, "/v1/responses", body) for name, body in bodies.items()]
    batch = asked(openai, lines, "/v1/responses")
    run.worker().run_waiting()
    done = openai.batches.retrieve(batch.id)
    body = answers(openai, done.output_file_id)["good"]["response"]["body"]
    (tokens,) = expected(folder, [inputs["good"]])
    assert (body["object"], "metrics" in body) == ("response", False)
    assert body["usage"]["output_tokens"] == len(tokens)
    assert body["output"][0]["content"][0]["text"] == TaskTokenizer.from_folder(folder).decode(
        tokens
    )
    error = answers(openai, done.error_file_id)["long"]["response"]["body"]["error"]
    assert error["param"] == "input"


@pytest.mark.slow("three jobs")
@pytest.mark.usefixtures("ray_cluster")
def test_line_has_the_same_answer_after_a_restart(
    openai: OpenAI, run: WorkerRun, served: str
) -> None:
    prompt = {"model": served, "prompt": "wake me", "temperature": 2.0, "max_tokens": 12}
    lines = [request(f"r{i}", "/v1/completions", prompt) for i in range(8)]
    lines += [request(f"s{i}", "/v1/completions", {**prompt, "seed": 5}) for i in range(3)]
    several = {**prompt, "prompt": ["wake me", "wake me"], "seed": 5, "n": 2}
    lines.append(request("several", "/v1/completions", several))
    lost: dict[int, object] = {}

    def lose(batch: Batch, progress: JobProgress) -> None:
        if progress.report.rows and not lost:
            file = run.settings.folder_of(batch) / "job" / "records.jsonl"
            for text in file.read_text().splitlines():
                record = json.loads(text)
                lost[record[0]] = record[4]
            file.unlink()
            raise JobError("the disk failed")

    first = asked(openai, lines, "/v1/completions")
    run.worker(on_progress=lose).run_waiting()
    assert lost
    found = answers(openai, openai.batches.retrieve(first.id).output_file_id)
    bodies = [each["response"]["body"] for each in found.values()]
    assert all(bodies[row] == body for row, body in lost.items())
    texts = {name: each["response"]["body"]["choices"][0]["text"] for name, each in found.items()}
    assert len({texts[f"r{i}"] for i in range(8)}) > 4
    assert len({texts[f"s{i}"] for i in range(3)}) == 1
    choices = found["several"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert (choices[0]["text"], len({choice["text"] for choice in choices})) == (texts["s0"], 4)
    second = asked(openai, lines, "/v1/completions")
    run.worker().run_waiting()
    again = answers(openai, openai.batches.retrieve(second.id).output_file_id)
    others = {name: each["response"]["body"]["choices"][0]["text"] for name, each in again.items()}
    assert others["s0"] == texts["s0"]
    assert others != texts


def test_invalid_file_fails_its_batch_and_names_the_line(
    openai: OpenAI, run: WorkerRun, served: str
) -> None:
    hi = line(served, "a", "hi")
    cases = {
        "duplicate_custom_id": [hi, line(served, "b", "hi"), hi],
        "too_many_lines": [line(served, f"r{i}", "hi") for i in range(10_001)],
    }
    batches = {code: asked(openai, lines) for code, lines in cases.items()}
    run.worker().run_waiting()
    for code, batch in batches.items():
        failed = openai.batches.retrieve(batch.id)
        assert failed.status == "failed", code
        (fault,) = failed.errors.data
        assert (fault.code, fault.line) == (code, len(cases[code]))
        assert str(fault.message).startswith(f"line {fault.line}: ")
        assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert run.left() == []


def test_deleted_task_fails_its_batch(openai: OpenAI, run: WorkerRun, served: str) -> None:
    batch = asked(openai, [line(served, "a", "hi")])
    TaskStore(run.client).delete(served)
    run.worker().run_waiting()
    failed = openai.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert [fault.code for fault in failed.errors.data] == ["model_not_found"]


@pytest.mark.slow("engines that fail")
@pytest.mark.usefixtures("ray_cluster")
def test_batch_whose_model_is_missing_waits_for_another_worker(
    openai: OpenAI, run: WorkerRun, served: str, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    TaskStore(run.client).put(replace(record_of(served, folder), model=str(model)))
    batch = asked(openai, [line(served, "a", "hi")])
    with refused(ClusterError, str(model)):
        run.worker(most_faults=1).run_for_ever()
    left = BatchStore(run.client).get(batch.id)
    assert (left.status, left.attempts) == ("in_progress", 0)
    shutil.copytree(folder, model)
    run.worker().run_waiting()
    assert openai.batches.retrieve(batch.id).status == "completed"
