"""Arguments that all benchmarks share, and the end of a script that does not end itself."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import complete

from benchmarks.draft import bench_drafts
from benchmarks.engine import engine
from benchmarks.finetune import bench_ft
from benchmarks.neural import bench_neural
from benchmarks.requests import bench_requests
from support import eventually


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (bench_drafts.arguments, ["--tables", "nothing"]),
        (bench_ft.arguments, ["--data", ".", "--parts", "nothing"]),
        (bench_neural.arguments, ["--data", ".", "--parts", "nothing"]),
        (bench_neural.arguments, ["--data", ".", "--kinds", "nothing"]),
        (bench_neural.arguments, ["--data", ".", "--tasks", "nothing"]),
        (bench_requests.arguments, ["--parts", "nothing"]),
        (engine.arguments, ["--peers", "nothing"]),
        (engine.arguments, ["--tasks", "nothing"]),
    ],
)
def test_unknown_part_kind_task_or_peer_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Callable[[], Any],
    options: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    with pytest.raises(SystemExit) as ended:
        arguments()
    assert ended.value.code == 2
    assert f"argument {options[-2]}: nothing is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--smollm2"], "--smollm2 needs --data"),
        (["--peers", "vllm"], "--smollm2 is needed for vllm"),
        (["--peers", "llama-cpp"], "--smollm2 is needed for llama-cpp"),
        (["--tasks", "choices"], "--smollm2 is needed for choices"),
        (
            ["--smollm2", "--data", ".", "--peers", "ctranslate2"],
            "--smollm2 does not have ctranslate2",
        ),
        (["--sequences", "0"], "at least 1"),
    ],
)
def test_engine_benchmark_refuses_options_of_another_kind_of_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    with pytest.raises(SystemExit) as ended:
        engine.arguments()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_timed_out_command_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"]
    with pytest.raises(pytest.fail.Exception):
        complete(command, os.environ, 0.3)
    child = Path("/proc") / (tmp_path / "pid").read_text().strip() / "cmdline"
    eventually(lambda: not (child.exists() and child.read_bytes()))
