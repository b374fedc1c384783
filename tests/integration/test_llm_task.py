"""`LLM.from_task`: a registered task and its announced index, answered in this process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM
from tasc_store import ArtifactStore, TaskStore, UnknownTask, connect
from tiny import SENTENCES, make_folder

pytestmark = pytest.mark.redis
SIZES = {"rows": 2, "max_model_len": 128, "cost_aware": False}


def test_a_registered_task_answers_and_drafts_from_its_index(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "model")
    plain = LLM(folder, dtype="float64", max_tokens=24, **SIZES)
    expected = [answer.text for answer in plain.generate(SENTENCES, draft=False)]
    pairs = list(zip(SENTENCES, expected, strict=True))
    local = LLM(folder, corpus=pairs, dtype="float64", max_tokens=24, cache_dir=tmp_path, **SIZES)
    local.save(tmp_path / "saved")
    record = replace(local.record, name="of-a-store")
    with connect(redis_url) as client:
        TaskStore(client).put(record)
        store = ArtifactStore(client, record.corpus_name, record.fingerprint)
        store.announce(store.publish(tmp_path / "saved" / "index.tasc", len(pairs)).version)
    with pytest.raises(UnknownTask):
        LLM.from_task("of-nobody", redis_url, **SIZES)
    monkeypatch.delenv("REDIS_URL", raising=False)
    with pytest.raises(ServiceError):
        LLM.from_task("of-a-store", **SIZES)
    monkeypatch.setenv("REDIS_URL", redis_url)
    task = LLM.from_task("of-a-store", **SIZES)
    assert [answer.text for answer in task.generate(SENTENCES)] == expected
    assert task.summary().accepted_by_source["corpus"] > 0
