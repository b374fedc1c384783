"""Tests requests of load balancers and Prometheus, files and batches, and a settings file."""

import json
from dataclasses import replace
from functools import partial

import httpx
import pytest
import yaml
from ray import serve
from serving import ALPHA, BETA, Ask, Samples

from support import DEADLINE_S, eventually
from tasc_serve.app import Deployed, app

pytestmark = [pytest.mark.ray, pytest.mark.redis]
get = partial(httpx.get, timeout=DEADLINE_S)


def test_each_process_is_listed_once_with_its_own_metrics(service):
    def targets():
        (group,) = get(f"{service.base}/sd").json()
        return group["targets"]

    eventually(lambda: len(targets()) == 4)  # one that was killed stays listed for 3 s
    texts = [get(f"http://{target}/metrics").text for target in targets()]
    seen = [
        tuple(t for t in (ALPHA, BETA) if Samples(text).sum("tasc_draft_index_info", task=t) == 1)
        for text in texts
    ]
    assert sorted(seen) == [(), (ALPHA,), (BETA,), (BETA,)], "a gateway, and each replica"
    (gateway,) = (text for text, tasks in zip(texts, seen, strict=True) if not tasks)
    assert "tasc_http_request_duration_seconds" in gateway
    service.answer(Ask(ALPHA, "turn on the light"))
    for place in ("proxy", "replica"):
        assert service.metrics().sum(f"tasc_http_{place}_seconds_count", task=ALPHA) > 0


def test_error_of_an_unknown_path_has_openai_format(service):
    response = get(f"{service.base}/v2/models")
    assert (response.status_code, set(response.json())) == (404, {"error"})


def test_files_and_batches_go_through_the_proxy(service, client):
    body = {"model": ALPHA, "messages": [{"role": "user", "content": "hi " * 1000}]}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(2000)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    assert len(text) > 6_000_000  # several pieces
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    assert file.bytes == len(text)
    assert client.files.content(file.id).text == text
    endpoint = "/v1/chat/completions"
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    assert batch.id in {each.id for each in client.batches.list()}
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(file.id).deleted


@pytest.mark.slow("a second application")
def test_application_built_from_a_settings_file_answers(service, tmp_path, monkeypatch):
    written = service.settings.model_dump(mode="json") | {"redis_url": None}
    written["tasks"] = [task for task in written["tasks"] if task["name"] == ALPHA]
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(written), "utf-8")
    monkeypatch.setenv("REDIS_URL", service.redis_url)
    serve.run(app(Deployed(settings=path)), name="deployed", route_prefix="/deployed")
    try:
        second = replace(service, base=f"{service.base}/deployed")
        ask = Ask(ALPHA, "turn on the light")
        assert second.answer(ask) == service.expected(ask)
    finally:
        serve.delete("deployed")
