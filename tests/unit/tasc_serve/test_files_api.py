"""Files over HTTP: what is taken, what is refused, and that nothing is held in memory or left."""

import asyncio
from contextlib import suppress

import httpx
import pytest
from fake_backend import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_service import FORM, StorageService, line

from tasc_serve.http.multipart import FileForm, FormError
from tasc_store import StoreUnreachable


def test_a_file_is_taken_listed_shown_read_and_deleted() -> None:
    service = StorageService()
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
    deleted = service.ask("DELETE", place).json()
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
    assert error_of(service.ask("GET", place), 404)["code"] == "file_not_found"
    assert error_of(service.ask("GET", f"{place}/content"), 404)
    assert error_of(service.ask("DELETE", place), 404)


def test_fields_may_come_behind_the_file() -> None:
    service = StorageService()
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
        ({**FORM, "long": "x" * 2000}, "long"),
    ],
)
def test_a_form_that_says_what_cannot_be_is_refused_by_field(
    form: dict[str, str], field: str
) -> None:
    service = StorageService()
    files = {"file": ("in.jsonl", b"x")}
    error = error_of(service.ask("POST", "/v1/files", data=form, files=files), 400)
    assert error["param"] == field
    assert service.storage.files.kept == {}


def test_a_file_is_kept_as_long_as_the_form_says() -> None:
    service = StorageService()
    said = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    file = service.upload(line(), **said).json()
    assert file["expires_at"] - file["created_at"] == 7200


def test_what_is_no_form_with_a_file_is_refused() -> None:
    service = StorageService()
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
    assert service.storage.files.kept == {}


def test_a_form_that_breaks_off_leaves_nothing() -> None:
    service = StorageService()
    whole = httpx.Request("POST", "http://t/", data=FORM, files={"file": ("a", b"x" * 100)})
    raw = whole.read()
    headers = {"content-type": whole.headers["content-type"]}
    for end in range(0, len(raw) - 2, 7):
        error_of(service.ask("POST", "/v1/files", content=raw[:end], headers=headers), 400)
    assert service.storage.files.kept == {}


def test_a_file_that_is_too_large_is_refused_while_it_comes() -> None:
    service = StorageService(max_file_bytes=1_000_000)
    assert error_of(service.upload(b"x" * 1_000_001), 413)["param"] == "file"
    assert error_of(service.upload(b"x" * 3_000_000), 413)
    assert service.upload(b"x" * 1_000_000).status_code == 200
    last = service.storage.files.begun[1]
    assert last.size_bytes < 1_500_000


def test_no_more_of_a_file_is_held_than_a_step() -> None:
    service = StorageService()

    async def sent() -> httpx.Response:
        whole = httpx.Request(
            "POST", "http://t/", data=FORM, files={"file": ("a", b"x" * 3_000_000)}
        )
        raw = whole.read()

        async def parts():
            for i in range(0, len(raw), 65_536):
                yield raw[i : i + 65_536]

        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": whole.headers["content-type"]}
            return await client.post("/v1/files", content=parts(), headers=headers)

    assert asyncio.run(sent()).json()["bytes"] == 3_000_000
    assert service.storage.files.begun[0].largest <= 262_144 + 65_536


def test_files_are_bounded_and_the_way_out_is_said() -> None:
    service = StorageService(max_files=1)
    service.uploaded()
    response = service.upload(line())
    assert error_of(response, 429)["code"] == "too_many_files"
    assert "retry-after" in response.headers


def test_a_store_that_is_away_is_said_and_to_be_tried_again() -> None:
    service = StorageService()
    file = service.uploaded()
    service.storage.files.down = StoreUnreachable("no Redis answers at redis://10.0.0.7:6379")
    for method, path in (
        ("GET", "/v1/files"),
        ("GET", f"/v1/files/{file.id}"),
        ("GET", f"/v1/files/{file.id}/content"),
        ("DELETE", f"/v1/files/{file.id}"),
    ):
        response = service.ask(method, path)
        assert "10.0.0.7" not in str(error_of(response, 503)["message"])
        assert int(response.headers["retry-after"]) >= 1
    assert error_of(service.upload(line()), 503)
    service.storage.files.down = None
    assert service.ask("GET", f"/v1/files/{file.id}").status_code == 200


def test_pages_go_through_all_files_in_either_order() -> None:
    service = StorageService()
    ids = sorted(service.uploaded(line(i)).id for i in range(5))  # by their milliseconds
    seen: list[str] = []
    after = ""
    while True:
        page = service.ask("GET", f"/v1/files?limit=2&order=asc{after}").json()
        seen += [file["id"] for file in page["data"]]
        assert page["last_id"] == seen[-1]
        if not page["has_more"]:
            break
        after = f"&after={seen[-1]}"
    assert seen == ids
    newest = service.ask("GET", "/v1/files?limit=1&purpose=batch").json()
    assert newest["data"][0]["id"] == ids[-1]
    assert service.ask("GET", "/v1/files?purpose=batch_output").json()["data"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("page=2", "page")],
)
def test_a_query_that_says_what_cannot_be_is_refused(query: str, field: str) -> None:
    assert error_of(StorageService().ask("GET", f"/v1/files?{query}"), 400)["param"] == field


def test_a_name_of_a_file_is_only_ever_a_name() -> None:
    service = StorageService()
    files = {"file": ("../../etc/\x01pass" + "w" * 1000, b"x")}
    name = service.ask("POST", "/v1/files", data=FORM, files=files).json()["filename"]
    assert name.isprintable()
    assert "/" not in name
    assert len(name) <= 512


@settings(max_examples=200)
@given(st.binary(max_size=400), st.integers(1, 50))
def test_no_bytes_make_a_form_raise_anything_else(raw: bytes, step: int) -> None:
    held = bytearray()
    begin = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    for text in (raw, begin + raw):
        form = FileForm("multipart/form-data; boundary=x", held.extend)
        with suppress(FormError):
            for i in range(0, len(text), step):
                form.feed(text[i : i + step])
    assert len(held) <= len(raw) + len(begin)


@given(st.binary(max_size=2000), st.integers(1, 64))
def test_the_bytes_of_a_file_are_those_sent_however_they_are_cut(data: bytes, step: int) -> None:
    request = httpx.Request("POST", "http://t/", data=FORM, files={"file": ("naïve.jsonl", data)})
    raw, held = request.read(), bytearray()
    form = FileForm(request.headers["content-type"], held.extend)
    for i in range(0, len(raw), step):
        form.feed(raw[i : i + step])
    assert form.whole
    assert bytes(held) == data
    assert (form.fields, form.filename) == (FORM, "naïve.jsonl")
