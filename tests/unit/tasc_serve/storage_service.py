"""The application over files and batches in a real Redis; it gets one request at a time."""

import json
from collections.abc import AsyncIterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import redis
from fake_backend import FakeBackend, Service

from tasc_serve.http.batches.files_api import BatchStorage
from tasc_store.batches.files import StoredFile

FORM = {"purpose": "batch"}


def line(i: int = 0, model: str = "greet", **fields: object) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": f"hi {i}"}]}
    request = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": body, **fields}) + "\n"


def raw_form(**request: object) -> tuple[bytes, dict[str, str]]:
    """Returns the bytes of a form and its headers."""
    whole = httpx.Request("POST", "http://t/", **request)
    return whole.read(), {"content-type": whole.headers["content-type"]}


class StorageService(Service):
    def __init__(self, client: redis.Redis, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.storage = BatchStorage(client, str(folder))
        super().__init__(FakeBackend(), storage=self.storage, **options)

    @property
    def stored(self) -> list[Path]:
        """The files on disk."""
        return sorted(self.folder.glob("*/file-*"))

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return self.storage.files.page().items

    def send(
        self, body: bytes | AsyncIterable[bytes], headers: Mapping[str, str]
    ) -> httpx.Response:
        """Upload a form given as bytes."""
        return self.ask("POST", "/v1/files", content=body, headers=headers)

    def upload(self, text: str | bytes, **form: str) -> httpx.Response:
        files = {"file": ("in.jsonl", text if isinstance(text, bytes) else text.encode())}
        return self.ask("POST", "/v1/files", data={**FORM, **form}, files=files)

    def uploaded(self, text: str | bytes | None = None) -> StoredFile:
        response = self.upload(text or line())
        assert response.status_code == 200, response.text
        return self.storage.files.get(response.json()["id"])

    def create(self, file: StoredFile, **fields: object) -> httpx.Response:
        body = {
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        return self.ask("POST", "/v1/batches", json={**body, **fields})
