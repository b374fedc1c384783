"""The ``tasc`` command from rows to answers, and as a process that leaves nothing behind."""

import json
import re
import signal
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import httpx
import pytest

from killable import pids
from listeners import Listener, listeners
from support import DEADLINE_S, read_rows, write_rows
from tasc_command import Command, InProcess
from tasc_serve import app
from tiny import SENTENCES, make_folder

pytestmark = [pytest.mark.redis, pytest.mark.ray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli"))


def corpus(path: Path) -> Path:
    rows = [{"id": i, "input": f"say {i}", "output": SENTENCES[i % 3]} for i in range(60)]
    return write_rows(path, [*rows, "broken"])


def create(tasc: InProcess | Command, folder: Path) -> None:
    tasc.run(
        "task", "create", "t", "--model", folder, "--template", r"say {input}\n",
        "--dtype", "float64", "--max-tokens", 10,
    )  # fmt: skip


@pytest.mark.usefixtures("ray_cluster")
def test_commands_lead_from_ingested_rows_to_answers(in_process, folder, tmp_path) -> None:
    tasc, run = in_process, in_process.run
    train = corpus(tmp_path / "train.jsonl")
    rejects = tmp_path / "rejects.jsonl"
    create(tasc, folder)
    for added in (60, 0):
        out = json.loads(run("ingest", "t", train, "--reject", rejects, "--json"))
        assert (out["added"], out["known"], out["rejected"]) == (added, 60 - added, 1)
    assert json.loads(rejects.read_text())["line"] == 61
    from_file = json.loads(run("stats", "--train", train, "--json"))
    from_redis = json.loads(run("stats", "t", "--json"))
    assert "statistics t: count: 60/60 rows" in tasc.err
    for side in ("input", "output"):
        assert from_file[side] == from_redis[side]
        assert from_file[side]["bigram_entropy_bits"] > 0
        assert from_file[side]["bigrams_for_80_percent"] > 0
    built = json.loads(run("build-index", "t", "--json"))
    assert (built["version"], built["corpus_rows"], built["rows"]) == (1, 60, 60)
    assert (built["distinct_outputs"], built["part_bytes"].keys()) == (3, {"corpus", "inputs"})
    assert built["bytes_per_token"] > built["corpus_bytes_per_token"]
    assert built["corpus_bytes_per_token"] == built["part_bytes"]["corpus"] / built["tokens"]
    assert built["seconds"]["tokenise"] > 0
    assert "kept" not in run("build-index", "t")
    size = built["part_bytes"]["corpus"]
    capped = json.loads(run("build-index", "t", "--max-bytes", size - 1, "--json"))
    assert capped["part_bytes"]["corpus"] < size
    assert 0 < capped["rows"] < capped["corpus_rows"] == 60
    output = tmp_path / "out.jsonl"
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"id": "a", "input": "one"}\n\n{"id": 7, "input": "two"}\n{"input": "one"}\n'
    )
    page, price = tmp_path / "job.html", ("--price-per-hour", 3600)
    command = ["generate", "t", "--input", source, "--output", output, "--report", page, *price]
    report = json.loads(run(*command, "--json"))
    assert (report["rows"], report["errors"], report["repeats"]) == (3, 0, 1)
    assert report == json.loads((tmp_path / "job.json").read_text())
    assert report["rows_per_second"] == pytest.approx(3 / report["seconds"], rel=1e-3)
    assert report["price"] == pytest.approx(3600 * report["engine_hours"], abs=0.1)
    assert [rows for _, rows, _ in report["samples"]][:: len(report["samples"]) - 1] == [0, 3]
    assert "3 rows in 0:0" in page.read_text("utf-8")
    answers = read_rows(output)
    assert [a["id"] for a in answers] == ["a", "7", "4"]
    # A finished job takes no time, and its answers are not decoded again.
    assert len(run(*command, "--no-dedupe").splitlines()) == 1
    assert "--no-dedupe: an earlier start copied 1 answers" in tasc.err
    assert report["first_error"] is None
    assert all(a["index_version"] == capped["version"] == 3 for a in answers)


@pytest.mark.usefixtures("ray_cluster")
def test_command_fails_if_no_row_is_usable(in_process, folder, tmp_path) -> None:
    """The last line of the error has the first reason and the file with all reasons."""
    create(in_process, folder)
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"text": i} for i in range(3)])
    lines, rejects = tmp_path / "lines.jsonl", tmp_path / "out.jsonl.rejected.jsonl"

    def failed(*command: object) -> str:
        return in_process.run(*command, code=1).splitlines()[-1]

    last = failed("ingest", "t", wrong, "--reject", lines)
    assert all(part in last for part in ("no rows", "3 lines", "line 1: ", str(lines)))
    last = failed("generate", "t", "--input", wrong, "--output", tmp_path / "out.jsonl")
    assert all(part in last for part in ("none of 3 rows", "row 1: ", str(rejects)))
    assert not (tmp_path / "out.jsonl").exists()
    assert len(read_rows(rejects)) == 3
    wrong.write_text("\n")
    assert "no rows" in failed("ingest", "t", wrong, "--reject", lines)
    # A tenth of the rows may have no answer, and at least ten.
    for good, bad, name in ((1, 11, "few"), (150, 17, "many")):
        rows = [*({"text": 1} for _ in range(bad)), *({"input": str(i)} for i in range(good))]
        write_rows(wrong, rows)
        last = failed("generate", "t", "--input", wrong, "--output", tmp_path / f"{name}.jsonl")
        assert f"{bad} of " in last
        assert f"at most {max(10, len(rows) // 10)} " in last
        assert "--max-errors" in last


def assert_each_part_is_reported(lines: list[str], tasc: Command) -> None:
    """The parts are in order with rising seconds, and other commands can use the store's URL."""
    found = [re.fullmatch(r" *(\d+\.\d) s  (.*)\n", line) for line in lines]
    assert all(found), lines
    parts = [match[2].split(":")[0] for match in found]
    assert parts[1:5] == ["store", "starting Ray ...", "Ray", "starting the service ..."]
    assert sorted(parts[5:]) == ["HTTP gateway", "task t", "task t"]
    (measuring, up) = (match[2] for match in found if match[2].startswith("task t"))
    assert measuring.startswith("task t: measuring")
    assert up == "task t: 1 of 1 replicas up"
    seconds = [float(match[1]) for match in found]
    assert seconds == sorted(seconds)
    (url,) = re.findall(r"REDIS_URL=(redis://127\.0\.0\.1:\d+/0)$", lines[1].strip())
    assert tasc.run("task", "list", "--redis-url", url).splitlines()[1].startswith("t\t")


def answers(base: str) -> bool:
    body = {"model": "t", "prompt": "say", "max_tokens": 4}
    return httpx.post(f"{base}/v1/completions", json=body, timeout=DEADLINE_S).is_success


@pytest.mark.slow("starts a Ray and a service of its own")
@pytest.mark.parametrize(
    ("signum", "proxy"), [(signal.SIGINT, "haproxy"), (signal.SIGTERM, "python")]
)
def test_stopped_service_leaves_no_process(tasc, folder, tmp_path, signum, proxy) -> None:
    tasc.run("task", "create", "t", "--model", folder, "--template", "{input}")
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"tasks: [{{name: t}}]\nhttp: {{port: 0, proxy: {proxy}}}\nengine: {{max_model_len: 64}}\n"
    )
    # As in the image, where it is set before the command imports Ray Serve.
    tasc.env["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "0"
    with tasc.start("serve", "--config", config) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = list(takewhile(lambda line: "every task answers" not in line, process.stderr))
        line = process.stdout.readline()
        assert line.startswith("serving on http://"), tasc.finish(process)
        ready = httpx.get(f"{line.split()[2]}/readyz", timeout=DEADLINE_S)
        assert ready.json()["tasks"] == ["t"]
        assert len(tasc.processes()) > 5
        assert_each_part_is_reported(lines, tasc)
        base = line.split()[2]
        assert answers(base)
        opened = listeners({*pids("bin/haproxy", process.pid)})
        ours = [Listener(int(base.rpartition(":")[2]), loopback=True)]
        assert opened == (ours if proxy == "haproxy" else [])
        process.send_signal(signum)
        _, err = tasc.finish(process)
    assert process.returncode == 128 + signum, err
    assert "Error" not in err
    tasc.wait_until_gone()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["build-index", "t", "--max-bytes", "87"], 1, "takes 88"),
        (["stats"], 2, "TASK"),
        (["task", "create", "t", "--model", "/", "--template", "{input}"], 2, "tokenizer.json"),
        (["stats", "t", "--redis-url", "redis://:secret@127.0.0.1:1/0"], 1, "127.0.0.1:1"),
    ],
)
def test_command_error_is_one_line_without_secrets(run, args, code, message) -> None:
    err = run(*args, code=code)
    assert message in err
    assert "secret" not in err


@pytest.mark.parametrize("command", [("serve",), ("worker", "--once")])
def test_store_option_precedes_the_environment_which_precedes_the_file(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("redis_url: redis://127.0.0.1:1/3\ntasks: [{name: t}]\nhttp: {port: 0}\n")
    given = (*command, "--config", config)
    assert "no Redis answers at redis://127.0.0.1:1/3 " in run(*given, code=1)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/2")
    assert "no Redis answers at redis://127.0.0.1:1/2 " in run(*given, code=1)
    deployed = app.Deployed(settings=config)
    monkeypatch.setattr(app, "build", lambda settings, url, digests: url)
    monkeypatch.setattr(app, "newest_digests", lambda settings, url: {})
    assert app.app(deployed) == "redis://127.0.0.1:1/2"
    asked = ("--redis-url", "redis://127.0.0.1:1/1")
    assert "no Redis answers at redis://127.0.0.1:1/1 " in run(*given, *asked, code=1)
    monkeypatch.delenv("REDIS_URL")
    assert app.app(deployed) == "redis://127.0.0.1:1/3"


def test_failed_process_prints_its_error_and_returns_its_code(tasc: Command) -> None:
    err = tasc.run("serve", "--config", "nowhere.yaml", code=1)
    assert "nowhere.yaml" in err
