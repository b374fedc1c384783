"""A process that counts like a replica and a gateway, until its standard input ends.

Every step is the same, so the ratios a dashboard should show are known: 5 of 9 draft tokens are
accepted, 16 tokens come from 8 row-steps, drafting takes a quarter of the time of verifying.
"""

import select
import sys

import numpy as np
from prometheus_client import CollectorRegistry

from tasc_draft.sources import SOURCES
from tasc_engine.request import GenerationResult, Timings
from tasc_engine.stats import StepRecord
from tasc_serve.discovery import MetricsPort
from tasc_serve.gateway_metrics import GatewayMetrics
from tasc_serve.metrics import ReplicaMetrics
from tasc_store import connect

DRAFTED = np.zeros((len(SOURCES), 3), np.int64)
ACCEPTED = np.zeros_like(DRAFTED)
DRAFTED[:2, :2] = [[4, 2], [2, 1]]  # by the corpus, by the prompt
ACCEPTED[:2, :2] = [[3, 1], [1, 0]]
STEP = StepRecord(
    row_steps=8,
    drafts=6,
    drafted=DRAFTED,
    reached=DRAFTED,
    accepted=ACCEPTED,
    bonus_tokens=8,
    prompt_tokens=20,
    cached_tokens=100,
    draft_seconds=0.001,
    verify_seconds=0.004,
    paused=True,
    shared_tokens=60,
    draft_failures=1,
    forced_tokens=3,
    guide_seconds=0.0005,
)
RESULT = GenerationResult("r", (1, 2), "", "stop", 20, Timings(0.001, 0.006, 0.015))


def feed(replica: ReplicaMetrics, gateway: GatewayMetrics, task: str) -> None:
    replica.observe_step(STEP)
    replica.observe_result(RESULT)
    replica.observe_inter_token(0.004, 2)
    gateway.observe_http(task, 200, 0.018)
    gateway.observe_http(None, 404, 0.001)


def main(redis_url: str, task: str) -> None:
    registry = CollectorRegistry()
    replica = ReplicaMetrics(registry, task=task, model_name="tiny", proposer="mixed")
    gateway = GatewayMetrics(registry)
    replica.set_load(3, 2, 0.25)
    replica.set_index(6, 1000)
    replica.set_index(7, 4096)
    with (
        connect(redis_url) as client,
        MetricsPort(client, registry, host="127.0.0.1", ttl_s=10),
    ):
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            feed(replica, gateway, task)


if __name__ == "__main__":
    main(*sys.argv[1:])
