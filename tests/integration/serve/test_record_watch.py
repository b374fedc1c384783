"""Tests that a running replica applies a new version of its task, or reports that it cannot.

The replica lives in this process and needs Redis only.
"""

import asyncio
import uuid
from dataclasses import replace

import pytest
from serving import running_replica

import tiny
from support import completed, eventually, refused, streamed
from tasc_protocol import Output, Request, SamplingDefaults
from tasc_runtime.engine.versions import MAX_KNOWN, Records
from tasc_runtime.protocol import Refusal
from tasc_store import TaskStore

pytestmark = [pytest.mark.redis, pytest.mark.anyio]
PROMPT = tiny.SENTENCES[0]


@pytest.fixture
def store(client):
    return TaskStore(client)


@pytest.fixture
def record(store, made):
    """The same model under a name that only this test uses, with two versions."""
    record = replace(made.record, name=f"record-{uuid.uuid4().hex}", corpus=None, max_tokens=9)
    store.put(replace(record, max_tokens=8))
    store.put(record)
    return record


@pytest.fixture
def replica(redis_url, record, tmp_path):
    with running_replica(redis_url, record.name, tmp_path, rows=2) as running:
        yield running


def status(replica):
    return replica.state().status


def answer(replica, **values):
    values = {"prompt": PROMPT, "templated": True, **values}
    return asyncio.run(completed(replica, Request(uuid.uuid4().hex, **values)))


def until_served(replica, version):
    eventually(lambda: status(replica).record_version == version)


def test_settings_that_keep_the_weights_apply_to_the_next_request(replica, record, store):
    plain = answer(replica).result
    assert len(plain.tokens) == 9
    for change, holds in (
        ({"max_tokens": 5}, lambda r: len(r.tokens) == 5),
        ({"choices": ("yes, always", "no")}, lambda r: r.text in ("yes, always", "no")),
        ({"regex": "[0-9]{3}"}, lambda r: r.text.isdigit() and len(r.text) == 3),
        ({"sampling": SamplingDefaults(temperature=5.0)}, lambda r: len(r.tokens) <= 9),
    ):
        version = store.put(replace(record, **change))
        until_served(replica, version)
        found = answer(replica)
        assert isinstance(found, Output), found
        assert holds(found.result), change
    texts = {answer(replica, seed=seed).result.text for seed in range(4)}
    assert len(texts) > 1, "answers are drawn now"
    stop = plain.text[2]
    until_served(replica, store.put(replace(record, stop=(stop,))))
    assert answer(replica).result.text == plain.text.split(stop)[0]


def test_request_uses_the_record_version_that_it_names(replica, record, store):
    eventually(lambda: status(replica).older_record_versions == (1,))
    version = store.put(replace(record, max_tokens=5))
    until_served(replica, version)
    assert status(replica).older_record_versions == (1, 2)
    assert len(answer(replica, record_version=1).result.tokens) == 8
    assert len(answer(replica, record_version=2).result.tokens) == 9
    assert len(answer(replica, record_version=version).result.tokens) == 5
    refusal = answer(replica, record_version=version + 1)
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "changed"


async def test_stream_keeps_the_record_version_that_it_started_with(replica, record, store):
    call = Request("1", PROMPT, templated=True, stream=True, seed=1)
    versions = []
    async for piece in streamed(replica, call):
        if not versions:
            until_served(replica, store.put(replace(record, max_tokens=7)))
        versions.append(piece.record_version)
    assert (set(versions), len(piece.result.tokens)) == ({2}, 9)


async def test_concurrent_requests_with_one_id_are_both_answered(replica):
    call = Request("retried", PROMPT, templated=True)
    first, second = await asyncio.gather(completed(replica, call), completed(replica, call))
    assert first.result.tokens == second.result.tokens


async def test_new_stream_begins_with_an_acknowledgement_but_a_resumed_stream_does_not(replica):
    async def pieces(**values):
        call = Request(uuid.uuid4().hex, PROMPT, templated=True, stream=True, **values)
        return [piece.tokens async for piece in streamed(replica, call)]

    alone, several = [await pieces(prompts=prompts) for prompts in (1, 2)]
    assert alone[0] == several[0] == ()
    assert sum(several, ()) == sum(alone, ())
    for prompts in (1, 2):
        resumed = await pieces(prompts=prompts, committed_ids=alone[1])
        assert resumed[0]
        assert alone[1] + sum(resumed, ()) == sum(alone, ())


def test_number_of_known_record_versions_is_limited(record):
    records = Records(record, 1)
    for version in range(2, 30):
        records.add(replace(record, max_tokens=version), version)
    assert records.newest[1] == 29
    assert records.older == tuple(range(30 - MAX_KNOWN, 29))
    with refused(ValueError, "1"):
        records.of(1)
    with refused(ValueError, "model", "dtype"):
        records.add(replace(record, model="m", dtype="float32"), 30)
    records.add(replace(record, max_tokens=99), 25)
    assert records.newest[1] == 29, "what is remembered late is no newer"
