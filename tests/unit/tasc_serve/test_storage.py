"""Calls of the storage: silent ones, and those that a drain waits for."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from fake_backend import error_of
from storage_service import FORM, StorageService, line, raw_form

from tasc_store.batches.files import StoredFile

pytestmark = pytest.mark.redis
Make = Callable[..., StorageService]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("GET", "/v1/files/file-1/content"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/batch-1"),
        ("POST", "/v1/batches/batch-1/cancel"),
    ],
)
def test_a_stopping_gateway_sends_everybody_to_another(
    make_service: Make, method: str, path: str
) -> None:
    service = make_service()
    service.in_flight.open = False
    response = service.ask(method, path)
    assert "being stopped" in str(error_of(response, 503)["message"])
    assert response.headers["connection"] == "close"
    assert service.in_flight.inside == 0


def test_a_drain_waits_for_an_upload_that_has_begun(make_service: Make) -> None:
    service = make_service()
    raw, headers = raw_form(data=FORM, files={"file": ("a", line().encode())})
    left = []

    async def parts() -> AsyncIterator[bytes]:
        yield raw[:50]
        left.append(await service.in_flight.drain(0))
        yield raw[50:]

    assert service.send(parts(), headers).status_code == 200
    assert left == [1]
    assert service.in_flight.inside == 0


def test_a_drain_waits_for_a_download_until_its_last_byte(make_service: Make) -> None:
    service = make_service(chunk_bytes=10)
    file = service.uploaded()
    blocks, inside = service.storage.files.blocks, []

    def seen(file: StoredFile) -> Iterator[bytes]:
        for block in blocks(file):
            inside.append(service.in_flight.inside)
            yield block
        inside.append(service.in_flight.inside)

    service.storage.files.blocks = seen
    assert service.ask("GET", f"/v1/files/{file.id}/content").text == line()
    assert len(inside) > 2
    assert set(inside) == {1}
    assert service.in_flight.inside == 0


def test_what_is_refused_has_left(make_service: Make) -> None:
    service = make_service()
    error_of(service.ask("GET", "/v1/files/file-1"), 404)
    error_of(service.ask("POST", "/v1/batches", json={}), 400)
    assert service.in_flight.inside == 0
