"""A process that counts like a replica, a gateway and a worker, until its standard input ends.

Every step is the same, so the ratios a dashboard should show are known: 5 of 9 draft tokens are
accepted, 16 tokens come from 8 row-steps, drafting takes a quarter of the time of verifying. Of
each 4 classifications, 2 have one label, 1 has another, and 1 has none; the corpus has as many
rows of the one as of the other.
"""

import math
import select
import sys
import time

import numpy as np
from msgspec import structs
from prometheus_client import CollectorRegistry

from tasc_draft.drafts import SOURCES
from tasc_engine.stats import StepRecord
from tasc_protocol import Acceptance, GenerationResult, LabelScores, Timings
from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.discovery import MetricsPort
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_store import Artifact, connect
from tasc_store.batches.leases import Waiting

DRAFTED = np.zeros((len(SOURCES), 3), np.int64)
ACCEPTED = np.zeros_like(DRAFTED)
DRAFTED[:2, :2] = [[4, 2], [2, 1]]  # by the corpus, by the prompt
ACCEPTED[:2, :2] = [[3, 1], [1, 0]]
STEP = StepRecord(
    row_steps=8, drafts=6, drafted=DRAFTED, reached=DRAFTED, accepted=ACCEPTED, bonus_tokens=8,
    prompt_tokens=20, cached_tokens=100, draft_seconds=0.001, verify_seconds=0.004, paused=True,
    cost_error=0.125, shared_tokens=60, draft_failures=1, forced_tokens=3, guide_seconds=0.0005,
)  # fmt: skip
DAY_S = 86400
RESULT = GenerationResult("r", (1, 2), "", "stop", 20, Timings(0.001, 0.006, 0.015))


def classified(label: str, confidence: float, steps: int) -> GenerationResult:
    """The result of a classification; without a label it is an abstention."""
    logprobs = (math.log(confidence), math.log(1 - confidence))
    scores = LabelScores((label or "first", "second"), (0, 1), logprobs, 0.0, 0.0, 2)
    acceptance = Acceptance((0,) * steps, (0,) * steps)
    return structs.replace(RESULT, text=label, acceptance=acceptance, scores=scores)


CLASSIFIED = (
    classified("alarm", 0.85, 2),
    classified("alarm", 0.85, 2),
    classified("music", 0.75, 4),
    classified("", 0.55, 4),
)


class Replica:
    """The series of a replica; its index is a day old, with a forecast of 2.5 tokens per step."""

    def __init__(self, registry: CollectorRegistry, task: str) -> None:
        own = {"task": task, "model_name": "tiny"}
        self.engine = ReplicaMetrics(
            registry, **own, proposer="mixed", record_version=lambda: 3, load=lambda: (3, 2, 0.25)
        )
        self.neural = NeuralMetrics(registry, own)
        built = time.time() - DAY_S
        for version, size in ((6, 1000), (7, 4096)):
            artifact = Artifact(task, "f", version, size, "0", 1, 1, built, forecast=2.5)
            self.engine.set_index(artifact, size)
        self.engine.set_labels({"alarm": 400, "music": 400})
        self.neural.off("slow")

    def feed(self) -> None:
        self.engine.observe_step(STEP)
        for result in (RESULT, RESULT, *CLASSIFIED):
            self.engine.observe_result(result)
        self.engine.observe_inter_token(0.004, 2)
        for mismatch in (None, "near_tie", "real"):
            self.engine.observe_check(mismatch)
        self.engine.not_checked["old"].inc()
        self.engine.collected.inc(3)
        self.engine.not_collected["full"].inc()
        self.neural.sizes([500] * 8)


class Gateway:
    """The series of a gateway with two replicas of a task."""

    def __init__(self, registry: CollectorRegistry, task: str) -> None:
        self.task = task
        self.metrics = GatewayMetrics(registry)
        self.metrics.set_replicas(task, 2)
        self.metrics.set_batches({task: Waiting(4, 90.0)})

    def feed(self) -> None:
        for code in (200, 200, 429, 503, 504):
            self.metrics.observe_http(self.task, code, 0.018)
            self.metrics.proxy_seconds(self.task).observe(0.001)
            self.metrics.replica_seconds(self.task).observe(0.016)
        self.metrics.observe_http(None, 404, 0.001)
        self.metrics.limited(self.task, "key").inc()
        self.metrics.failovers(self.task, "died").inc()
        self.metrics.failover_seconds(self.task).observe(0.2)
        self.metrics.failovers_refused(self.task).inc()
        self.metrics.ignored(self.task).inc()


class BatchWorker:
    """The series of a worker in the middle of a batch."""

    def __init__(self, registry: CollectorRegistry, task: str) -> None:
        self.task, self.batches = task, BatchMetrics(registry)
        self.batches.begun(task)
        self.batches.running(task).set(16)

    def feed(self) -> None:
        self.batches.done(self.task, completed=9, failed=1, tokens=120)
        self.batches.engine_failures(self.task).inc()
        self.batches.ended(self.task, "completed").inc()


def main(redis_url: str, task: str) -> None:
    registry = CollectorRegistry()
    fed = (Replica(registry, task), Gateway(registry, task), BatchWorker(registry, task))
    with connect(redis_url) as client, MetricsPort(client, registry, host="127.0.0.1", ttl_s=10):
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            for process in fed:
                process.feed()


if __name__ == "__main__":
    main(*sys.argv[1:])
