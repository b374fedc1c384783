"""Tests files over HTTP: accepted and refused ones, bounded memory, and no left-over data."""

import asyncio
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
from fake_backend import FakeBackend, Service, error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_service import FORM, StorageService, line, raw_form

from support import eventually
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.http_errors import of_store
from tasc_store import StoreError, StoreFull, StoreUnreachable
from tasc_store.batches.files import StoredFile
from tasc_store.errors import FilesNotShared, StoreBusy

pytestmark = pytest.mark.redis
Make = Callable[..., StorageService]


def test_file_can_be_uploaded_listed_read_and_deleted(service: StorageService) -> None:
    text = "".join(line(i) for i in range(9))
    file = service.upload(text).json()
    assert file["object"] == "file"
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(text), "in.jsonl", "batch")
    assert file["expires_at"] == file["created_at"] + 604_800
    place = f"/v1/files/{file['id']}"
    assert service.ask("GET", place).json() == file
    listed = service.ask("GET", "/v1/files").json()
    assert (listed["object"], listed["data"], listed["has_more"]) == ("list", [file], False)
    content = service.ask("GET", f"{place}/content")
    assert content.text == text
    assert content.headers["content-length"] == str(len(text))
    for path, methods in (("/v1/files", "GET, HEAD, POST"), (place, "GET, HEAD, DELETE")):
        for method, status in (("OPTIONS", 204), ("PUT", 405)):
            found = service.ask(method, path)
            assert (found.status_code, found.headers["Allow"]) == (status, methods)
    deleted = service.ask("DELETE", place).json()
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
    assert error_of(service.ask("GET", place), 404)["code"] == "file_not_found"
    assert error_of(service.ask("GET", f"{place}/content"), 404)
    assert error_of(service.ask("DELETE", place), 404)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (StoreFull("of 10.0.0.1"), "full"),
        (StoreBusy("256 calls wait"), "256 calls wait"),
        (StoreUnreachable("at 10.0.0.1"), "reached"),
    ],
)
def test_store_errors_are_503_without_internal_addresses(error: StoreError, named: str) -> None:
    found = of_store(error)
    assert (found.status, named in found.message, "10.0.0.1" in found.message) == (503, True, False)


def test_web_page_forms_are_accepted_only_from_allowed_origins(service: StorageService) -> None:
    for origin, status in (("https://example.org", 403), ("http://[", 403), ("http://test", 200)):
        headers, files = {"Origin": origin}, {"file": ("in.jsonl", line().encode())}
        answer = service.ask("POST", "/v1/files", data=FORM, files=files, headers=headers)
        assert (answer.status_code, len(service.files)) == (status, int(status == 200))
        cancelled = service.ask("POST", "/v1/batches/b/cancel", headers=headers)
        assert cancelled.status_code == (404 if status == 200 else 403)


def test_form_fields_may_follow_the_file(service: StorageService) -> None:
    files = {"file": ("a.jsonl", b"x"), "purpose": (None, b"batch")}
    assert service.ask("POST", "/v1/files", files=files).status_code == 200


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({**FORM, "more": "1"}, "more"),
        ({**FORM, "expires_after[seconds]": "7200"}, "expires_after[anchor]"),
        (
            {**FORM, "expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
            "expires_after[seconds]",
        ),
        (
            {**FORM, "expires_after[anchor]": "created_at", "expires_after[seconds]": "1e9"},
            "expires_after[seconds]",
        ),
        ({**FORM, "long": "x" * 2000}, None),
    ],
)
def test_invalid_form_field_is_refused_and_named(service: StorageService, form, field) -> None:
    files = {"file": ("in.jsonl", b"x")}
    error = error_of(service.ask("POST", "/v1/files", data=form, files=files), 400)
    assert error["param"] == field
    assert service.files == ()


def test_form_sets_the_lifetime_of_its_file(service: StorageService) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    file = service.upload(line(), **fields).json()
    assert file["expires_at"] - file["created_at"] == 7200


def test_upload_body_must_be_a_form_with_exactly_one_file(service: StorageService) -> None:
    for request in (
        {"json": {"purpose": "batch"}},
        {"data": FORM},
        {"content": b"--x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        {"content": b"nothing", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        {"files": {"purpose": (None, b"batch")}},
        {"files": {"file": ("empty.jsonl", b""), "purpose": (None, b"batch")}},
        {"files": [("file", ("a", b"x")), ("file", ("b", b"y"))]},
    ):
        error_of(service.ask("POST", "/v1/files", **request), 400)
    assert service.files == ()


def test_truncated_form_stores_no_file(service: StorageService) -> None:
    raw, headers = raw_form(data=FORM, files={"file": ("a", b"x" * 100)})
    for end in range(0, len(raw) - 2, 7):
        error_of(service.send(raw[:end], headers), 400)
    assert service.files == ()


def sized_form(size: int) -> tuple[AsyncIterator[bytes], dict[str, str], list[int]]:
    """Returns a form with a file of ``size`` MiB in parts, its headers, and the parts sent."""
    (begin, end), sent = raw_form(data=FORM, files={"file": ("a", b"|")})[0].split(b"|"), [0]
    boundary = begin.partition(b"\r\n")[0].removeprefix(b"--").decode()

    async def parts() -> AsyncIterator[bytes]:
        yield begin
        for _ in range(16 * size):
            sent[0] += 1
            yield b"x" * 65_536
        yield end

    return parts(), {"content-type": f"multipart/form-data; boundary={boundary}"}, sent


def test_too_large_upload_is_refused_before_its_end(make_service: Make) -> None:
    service = make_service(max_file_bytes=1_000_000)
    assert error_of(service.upload(b"x" * 1_000_001), 413)["param"] == "file"
    assert service.upload(b"x" * 1_000_000).status_code == 200
    body, headers, sent = sized_form(100)
    error_of(service.send(body, headers), 413)
    assert sent[0] < 20
    assert len(service.files) == 1


def test_large_upload_is_not_held_in_memory(service: StorageService) -> None:
    body, headers, _ = sized_form(48)
    tracemalloc.start()
    response = service.send(body, headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.json()["bytes"] == 48 << 20
    assert peak < 24 << 20


def test_stopped_application_makes_no_store_calls(service: StorageService) -> None:

    async def serve_and_end() -> None:
        async with service.app.router.lifespan_context(service.app):
            pass

    assert service.ask("GET", "/v1/files").status_code == 200
    asyncio.run(serve_and_end())
    error_of(service.ask("GET", "/v1/files"), 503)


def test_error_of_a_full_disk_names_its_folder(
    service: StorageService, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    response = service.upload(b"x" * (2 << 20))
    assert "TMPDIR" in str(error_of(response, 503)["message"])
    assert int(response.headers["retry-after"]) >= 1
    assert service.files == ()


class Disk:
    """A file whose writes call a function first."""

    def __init__(self, path: Path, first: Callable[[], None]) -> None:
        self._file, self._first = path.open("wb"), first

    def write(self, data: bytes) -> None:
        self._first()
        self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def with_disk(service: StorageService, first: Callable[[], None]) -> StorageService:
    """Makes the service write files through `Disk`."""
    service.storage.files.require_shared()
    (folder,) = service.folder.iterdir()
    service.storage.files.open = lambda id_, mode: Disk(folder / id_, first)
    return service


def test_upload_that_fails_halfway_leaves_no_bytes(make_service: Make) -> None:
    writes: list[list[Path]] = []

    def fails_later() -> None:
        writes.append(service.stored)
        if len(writes) > 2:
            raise OSError(5, "disk failure")

    service = with_disk(make_service(), fails_later)
    error_of(service.upload(bytes(4 << 20)), 503)
    assert [len(stored) for stored in writes] == [1, 1, 1]
    eventually(lambda: service.stored == [])
    assert service.files == ()


def test_upload_that_is_stored_too_slowly_is_refused_and_leaves_no_bytes(make_service) -> None:
    began: list[float] = []

    def slow() -> None:
        began.append(time.time())
        time.sleep(0.2)

    service = with_disk(make_service(upload_timeout_s=0.5), slow)
    assert "0.5 s" in str(error_of(service.upload(bytes(50 << 20)), 503)["message"])
    eventually(lambda: service.stored == [] and time.time() > began[-1] + 0.3)
    assert (service.files, len(began) < 50) == ((), True)


def test_file_list_pages_through_all_files_in_either_order(service: StorageService) -> None:
    ids = sorted(service.uploaded(line(i)).id for i in range(3))  # by their milliseconds
    page = service.ask("GET", "/v1/files?limit=2&order=asc").json()
    rest = service.ask("GET", f"/v1/files?limit=2&order=asc&after={page['last_id']}").json()
    assert [file["id"] for file in page["data"] + rest["data"]] == ids
    assert (page["has_more"], rest["has_more"]) == (True, False)
    newest = service.ask("GET", "/v1/files?limit=1&purpose=batch").json()
    assert newest["data"][0]["id"] == ids[-1]
    assert service.ask("GET", "/v1/files?purpose=batch_output").json()["data"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("page=2", "page")],
)
def test_invalid_query_parameter_is_refused_and_named(make_service, query, field) -> None:
    assert error_of(make_service().ask("GET", f"/v1/files?{query}"), 400)["param"] == field


def test_file_name_has_no_path_and_is_printable(service: StorageService) -> None:
    files = {"file": ("../../etc/\x01pass" + "w" * 1000, b"x")}
    name = service.ask("POST", "/v1/files", data=FORM, files=files).json()["filename"]
    assert name.isprintable()
    assert "/" not in name
    assert len(name) <= 512


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.booleans())
def test_invalid_form_is_always_refused_with_400(make_service, raw, begun) -> None:
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    error_of(make_service().send(begin + raw if begun else raw, headers), 400)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=2000), st.integers(20, 400))
def test_file_has_the_uploaded_bytes_for_any_split_of_the_upload(service, data, step) -> None:
    raw, headers = raw_form(data=FORM, files={"file": ("naïve.jsonl", data)})

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(raw), step):
            yield raw[i : i + step]

    file = service.send(parts(), headers).json()
    assert (file["filename"], file["bytes"]) == ("naïve.jsonl", len(data))
    assert service.ask("GET", f"/v1/files/{file['id']}/content").content == data


ENDPOINTS = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/batch-1"),
    ("POST", "/v1/batches/batch-1/cancel"),
]
BODIES = {
    "/v1/files": {"data": FORM, "files": {"file": ("in.jsonl", b"x")}},
    "/v1/batches": {
        "json": {
            "input_file_id": "file-1",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
    },
}


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_unreachable_store_is_503_with_retry_after(down, method, path):
    response = down.ask(method, path, **(BODIES.get(path, {}) if method == "POST" else {}))
    error = error_of(response, 503)
    assert error["code"] == "service_unavailable"
    assert "127.0.0.1" not in str(error["message"])
    assert int(response.headers["retry-after"]) >= 1


def test_gateway_with_files_url_set_to_an_unshared_folder_does_not_start(
    make_service: Make, client: redis.Redis, tmp_path: Path
) -> None:
    make_service().uploaded()
    with pytest.raises(FilesNotShared):
        BatchStorage.open(client, str(tmp_path / "other"))


def test_gateway_with_an_unshared_default_folder_refuses_file_requests(
    make_service: Make, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_service()
    file = first.uploaded()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    second = Service(FakeBackend(), storage=BatchStorage.open(client, None))
    error = error_of(second.ask("GET", f"/v1/files/{file.id}/content"), 501)
    assert error["code"] == "files_not_shared"
    assert str(tmp_path) not in error["message"]
    error_of(second.ask("DELETE", f"/v1/files/{file.id}"), 501)
    files = {"file": ("in.jsonl", line().encode())}
    error_of(second.ask("POST", "/v1/files", data=FORM, files=files), 501)
    assert first.files == (file,)


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_stopping_gateway_refuses_requests_and_closes_connections(
    service: StorageService, method, path
):
    service.in_flight.open = False
    response = service.ask(method, path)
    assert "being stopped" in str(error_of(response, 503)["message"])
    assert response.headers["connection"] == "close"


def test_drain_waits_for_a_running_upload(service: StorageService) -> None:
    raw, headers = raw_form(data=FORM, files={"file": ("a", line().encode())})
    left = []

    async def parts() -> AsyncIterator[bytes]:
        yield raw[:50]
        left.append(await service.in_flight.drain(0))
        yield raw[50:]

    assert service.send(parts(), headers).status_code == 200
    assert left == [1]


def test_drain_waits_for_the_last_byte_of_a_download(make_service: Make) -> None:
    service, text = make_service(), line() * 200_000
    file = service.uploaded(text)
    blocks, inside = service.storage.files.blocks, []

    def seen(file: StoredFile) -> Iterator[bytes]:
        for block in blocks(file):
            inside.append(service.in_flight.inside)
            yield block
        inside.append(service.in_flight.inside)

    service.storage.files.blocks = seen
    assert service.ask("GET", f"/v1/files/{file.id}/content").text == text
    assert len(inside) > 2
    assert set(inside) == {1}
