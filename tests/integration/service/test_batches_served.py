"""Files and batches through the running service: the gateway on Ray Serve, its proxy, Redis."""

import json

import httpx
import pytest
from serving import ALPHA, Service

pytestmark = [pytest.mark.redis, pytest.mark.ray]


def test_files_and_batches_go_through_the_proxy(service: Service) -> None:
    body = {"model": ALPHA, "messages": [{"role": "user", "content": "hi " * 1000}]}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(2000)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    assert len(text) > 6_000_000  # several pieces
    with service.client() as openai:
        file = openai.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        assert file.bytes == len(text)
        assert openai.files.content(file.id).text == text
        batch = openai.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"why": "tonight"},
        )
        assert (batch.status, batch.model) == ("validating", ALPHA)
        assert batch.id in {each.id for each in openai.batches.list()}
        assert openai.batches.cancel(batch.id).status == "cancelled"
        assert openai.files.delete(file.id).deleted
    response = httpx.get(f"{service.base}/v1/files/{file.id}", timeout=30)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "file_not_found"
