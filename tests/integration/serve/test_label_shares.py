"""A replica exports how often the corpus of its draft index has each label of the task.

The replica lives in this process and needs Redis only.
"""

import asyncio
import tempfile
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from serving import Samples, publish, running_replica

import tiny
from support import completed, eventually, index_of
from tasc_draft import write_index
from tasc_protocol import GuideSpec, Request, Scoring
from tasc_store import TaskStore

pytestmark = pytest.mark.redis
LABELS = ("alarm", "alarm set", "music", "time")
OUTPUTS = ["alarm"] * 7 + ["alarm set"] * 4 + ["music, loud"] * 3 + ["alarm, late"] * 2 + ["x, y"]


def indexed(task, outputs):
    encoded = task.tokenizer.encode_outputs(outputs)
    prompts = [task.prompt(tiny.SENTENCES[i % 3], chat=True) for i in range(len(outputs))]
    return index_of(task.tokenizer, encoded, prompts)


def exported(replica):
    return Samples(generate_latest(replica.registry).decode())


def rows(replica):
    """Returns the exported rows of each label that has any."""
    found = exported(replica)
    labels = (*LABELS, "x", "x, y", "other")
    each = {label: found.sum("tasc_corpus_label_rows", label=label) for label in labels}
    return {label: count for label, count in each.items() if count}


def classify(replica, guide=None):
    request = Request(
        uuid.uuid4().hex, tiny.SENTENCES[0], templated=True, guide=guide, scoring=Scoring()
    )
    return asyncio.run(completed(replica, request)).result.text


def test_rows_follow_the_index_and_the_record(client, redis_url, task, store, tmp_path):
    record, tasks = replace(task.record, choices=LABELS), TaskStore(client)
    tasks.put(record)
    publish(store, indexed(task, OUTPUTS), corpus_rows=len(OUTPUTS))
    with running_replica(redis_url, record.name, tmp_path) as replica:
        eventually(lambda: rows(replica) == {"alarm": 7, "alarm set": 4})  # ends of outputs
        tasks.put(replace(record, label_end=","))
        eventually(lambda: rows(replica) == {"alarm": 2, "music": 3})
        more = ["time, nine", *OUTPUTS, "time, ten"]
        publish(store, indexed(task, more), corpus_rows=len(more))
        eventually(lambda: rows(replica) == {"alarm": 2, "music": 3, "time": 2})
        tasks.put(replace(record, label_end=""))
        whole = Counter(output.split(",")[0] for output in OUTPUTS if "x" not in output)
        eventually(lambda: rows(replica) == {**whole, "time": 2})
        label = classify(replica)
        classify(replica, GuideSpec("labels", LABELS, field="labels", end=""))
        found = exported(replica)
        assert found.sum("tasc_classifications_total", label=label) == 1
        assert found.sum("tasc_classifications_total", label="from_request") == 1
        tasks.put(replace(record, choices=("x, y", "x"), label_end=None))
        eventually(lambda: rows(replica) == {"x, y": 1})
        tasks.put(replace(record, choices=()))
        eventually(lambda: not rows(replica))


def test_index_without_all_rows_of_the_corpus_gives_no_rows(
    client, redis_url, task, store, tmp_path
):
    TaskStore(client).put(replace(task.record, choices=LABELS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        write_index(indexed(task, OUTPUTS), path)
        whole, cut = (store.publish(path, len(OUTPUTS) + more).version for more in (0, 1))
    store.announce(cut)
    with running_replica(redis_url, task.record.name, tmp_path) as replica:
        assert not rows(replica)
        store.announce(whole)
        eventually(lambda: rows(replica) == {"alarm": 7, "alarm set": 4})
