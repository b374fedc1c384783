"""Measure what gateway, routing and HTTP add to the engine, and the requests per second.

    python benchmarks/serve/bench_gateway.py
    python benchmarks/serve/bench_gateway.py --no-haproxy --seconds 20

A service with two replicas runs on this machine, by default in Ray Serve's HAProxy and throughput
modes. Overhead: one client asks the same questions of the service and of an engine in its own
process, in turn; the difference is the time of HTTP, gateway and routing. Throughput: 32 clients
ask for one token each. Both are measured with a tiny random model, then with the demo's. The
ceiling is the rate of one engine that answers one request after the other. Tables go to stdout,
progress to stderr; the last line of stdout is one JSON object.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    ROOT,
    finish,
    git_revision,
    in_turn,
    listed,
    parser_of,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)
from benchmarks.serve.service import served, use_haproxy

DEMO = ROOT / "pipelines" / "tasc_jobs" / "demo"
REPLICAS = 2
_WARM_UP = 20  # questions


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=15.0, help="of each throughput measurement (15)")
    add("--pairs", type=int, default=200, help="questions of the overhead measurement (200)")
    add("--clients", type=int, default=32, help="of the throughput measurement (32)")
    add(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Ray Serve's HAProxy and throughput modes",
    )
    add("--models", type=listed, default=("tiny", "demo"), help="with commas between (tiny,demo)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    use_one_thread()
    use_test_helpers("serving")
    found: dict[str, Any] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="tasc-gateway-") as folder:
            to_stderr(f"{model}: starting a service of {REPLICAS} replicas ...")
            with running(Path(folder), model, options.haproxy) as (base, worker):
                found[model] = measured(base, worker, model, options)
        show(model, found[model])
    finish({**found, "haproxy": options.haproxy, "git": git_revision()})


@contextmanager
def running(folder: Path, model: str, haproxy: bool) -> Iterator[tuple[str, Any]]:
    """Run a service; yields its URL, and a worker for the same task in this process."""
    if haproxy:
        use_haproxy(folder)
    from tasc_jobs.ray_local import local_ray
    from tasc_runtime.engine.builder import EngineBuilder
    from tasc_runtime.engine_settings import EngineSettings
    from tasc_store import EmbeddedRedis, TaskStore, connect

    engine = {"rows": 8, "max_model_len": 256, "cost_aware": False}
    settings = {
        "tasks": [{"name": model, "replicas": REPLICAS, "num_cpus": 0.1}],
        "http": {"port": 0, "gateways": 2, "gateway_num_cpus": 0.1},
        "engine": engine,
        "cache_dir": str(folder / "cache"),
    }
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis.start())
        with connect(server.url) as client:
            TaskStore(client).put(record_of(folder, model))
        stack.enter_context(local_ray(num_cpus=4, object_store_mb=100))
        base = stack.enter_context(served(settings, server.url))
        yield base, EngineBuilder.of_task(connect(server.url), model, EngineSettings(**engine))


def record_of(folder: Path, model: str) -> Any:
    """The record of a task with a tiny random model or with the demo's."""
    from serving import ALPHA, make_task

    from tasc_store import TaskRecord
    from tasc_text import TaskTokenizer

    if model == "tiny":
        return dataclasses.replace(make_task(folder / "model", ALPHA).record, name=model)
    base = DEMO / "tasc-demo-7m"
    return TaskRecord(
        name=model,
        model=str(base),
        adapter=str(DEMO / "adapters" / "massive_en"),
        fingerprint=TaskTokenizer.from_folder(base).fingerprint,
        template="intent and slots: {input}\n",
    )


def measured(base: str, worker: Any, model: str, options: argparse.Namespace) -> dict[str, Any]:
    to_stderr(f"{model}: overhead ...")
    overhead, alone = overheads(base, worker, model, options.pairs)
    to_stderr(f"{model}: throughput ...")
    rate, errors, latencies = throughput(base, model, options.clients, options.seconds)
    return {
        "overhead_p50_ms": percentile(overhead, 50),
        "overhead_p99_ms": percentile(overhead, 99),
        "engine_p50_ms": percentile(alone, 50),
        "requests_per_second": round(rate, 1),
        "ceiling_requests_per_second": round(1e3 / statistics.mean(alone), 1),
        "errors": errors,
        "latency_p50_ms": percentile(latencies, 50),
        "latency_p99_ms": percentile(latencies, 99),
    }


def overheads(base: str, worker: Any, model: str, pairs: int) -> tuple[list[float], list[float]]:
    """Milliseconds that the service takes longer than the engine, and those of the engine."""
    import httpx

    from tasc_runtime.protocol import Call

    body = {"model": model, "prompt": "wake me up at nine am", "max_tokens": 1}
    call = Call("q", body["prompt"], templated=False, max_tokens=1)  # type: ignore[arg-type]
    with httpx.Client(timeout=60) as client:

        def over_http() -> None:
            client.post(f"{base}/v1/completions", json=body).raise_for_status()

        def direct() -> None:
            list(worker.engine.generate([worker.request(call)]))

        runs = {step: lambda step=step: milliseconds(step) for step in (direct, over_http)}
        times = in_turn(runs, pairs + _WARM_UP)
    alone = times[direct][_WARM_UP:]
    return [a - b for a, b in zip(times[over_http][_WARM_UP:], alone, strict=True)], alone


def throughput(
    base: str, model: str, clients: int, seconds: float
) -> tuple[float, int, list[float]]:
    """Requests per second, the number of errors, and the milliseconds of each answer."""
    import httpx

    latencies: list[float] = []
    errors: list[int] = []
    stop = threading.Event()
    body = {"model": model, "prompt": "wake me up at nine am", "max_tokens": 1, "metrics": "none"}

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                began = time.perf_counter()
                answer = client.post(f"{base}/v1/completions", json=body)
                if answer.status_code == 200:
                    latencies.append((time.perf_counter() - began) * 1e3)
                else:
                    errors.append(answer.status_code)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    warm, began = len(latencies), time.perf_counter()
    time.sleep(seconds)
    rate = (len(latencies) - warm) / (time.perf_counter() - began)
    stop.set()
    for thread in threads:
        thread.join()
    return rate, len(errors), latencies[warm:]


def milliseconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def percentile(values: list[float], of: int) -> float:
    return round(sorted(values)[min(len(values) * of // 100, len(values) - 1)], 2)


def show(model: str, found: dict[str, Any]) -> None:
    print(
        f"{model}: over the engine alone p50 {found['overhead_p50_ms']} ms, p99 "
        f"{found['overhead_p99_ms']} ms (engine {found['engine_p50_ms']} ms); "
        f"{found['requests_per_second']} requests/s of one token (one engine alone "
        f"{found['ceiling_requests_per_second']}), {found['errors']} errors, "
        f"p50 {found['latency_p50_ms']} ms, p99 {found['latency_p99_ms']} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
