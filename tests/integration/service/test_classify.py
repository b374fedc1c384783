"""Classifications over HTTP are those of `LLM.classify`."""

import httpx
import pytest
from serving import ADAPTERS, ALPHA, BETA, MODEL_LEN, TEXT

import tiny
from tasc_runtime.llm import LLM

pytestmark = [pytest.mark.ray, pytest.mark.redis]

LABELS = ["alarm", "alarm set", "music", "play music", "time: nine"]
SIZES = {"max_model_len": MODEL_LEN, "device": "cpu", "cost_aware": False}


def classify(service, task, **body):
    return httpx.post(f"{service.base}/v1/classify", json={"model": task, **body}, timeout=60)


@pytest.mark.parametrize("task", [ALPHA, BETA])
@pytest.mark.parametrize("exact", [False, True])
def test_classifications_equal_those_of_llm_classify(service, task, exact):
    adapters = [None] if task == ALPHA else [*ADAPTERS]
    llm = LLM.from_task(task, service.redis_url, **SIZES)
    for adapter in adapters:
        texts = [*tiny.SENTENCES]
        own = llm.classify(texts, LABELS, exact=exact, adapter=adapter)
        body = {"input": texts, "labels": LABELS, "exact": exact, "adapter": adapter}
        found = classify(service, task, **body).raise_for_status().json()
        assert [entry["index"] for entry in found["data"]] == list(range(len(texts)))
        assert [entry["label"] for entry in found["data"]] == [one.label for one in own]
        for entry, one in zip(found["data"], own, strict=True):
            listed = {each["label"]: each["probability"] for each in entry["probabilities"]}
            assert listed == pytest.approx(dict(one.probabilities), abs=1e-6)
            in_order = [one.probabilities.get(label, 0.0) for label in LABELS]
            assert entry["probs"] == pytest.approx(in_order, abs=1e-6)
            assert entry["num_classes"] == len(LABELS)
            assert entry["unseen_mass"] <= 0.001
            assert not entry["calibrated"]
        assert found["usage"]["prompt_tokens"] == sum(one.prompt_tokens for one in own)


def test_one_text_with_few_labels_and_a_label_that_is_not_sure(service):
    body = {"input": TEXT, "labels": LABELS, "top_k": 2, "abstain_below": 1.0}
    (entry,) = classify(service, ALPHA, **body).raise_for_status().json()["data"]
    assert entry["label"] is None
    assert len(entry["probs"]) == len(entry["probabilities"]) == 2
    (sure,) = classify(service, ALPHA, **body | {"abstain_below": 0}).json()["data"]
    assert sure["label"] == entry["probabilities"][0]["label"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": TEXT}, 400, "labels"),  # the task has no choices
        ({"input": TEXT, "labels": []}, 400, "labels"),
        ({"input": [], "labels": LABELS}, 400, "input"),
        ({"input": TEXT, "labels": ["alarm", "alarm"]}, 400, "labels"),
        ({"input": TEXT, "labels": LABELS, "tolerance": 1}, 400, "tolerance"),
        ({"input": TEXT, "labels": LABELS, "stream": True}, 400, "stream"),
        ({"input": TEXT, "labels": LABELS, "multi": True}, 400, "multi"),
        ({"input": TEXT, "labels": LABELS, "top_k": 0}, 400, "top_k"),
        ({"input": [TEXT] * 12, "labels": [*map(str, range(18_000))]}, 400, "top_k"),
        ({"input": TEXT, "labels": LABELS, "adapter": "none"}, 400, "adapter"),
        ({"input": [TEXT, TEXT * 90], "labels": LABELS}, 400, "input.1"),
    ],
)
def test_wrong_requests_are_refused_by_field(service, body, status, param):
    answer = classify(service, ALPHA, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
