"""Tests batches over HTTP: requests become records, and keys only see their own batches."""

import asyncio
import gzip
import json
from collections.abc import Callable

import pytest
import redis
from fake_backend import error_of
from starlette.requests import Request
from storage_service import StorageService, line

from tasc_serve.access.access_control import AccessControl
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_store import ApiKey
from tasc_store.batches.batch_store import BatchFault
from tasc_store.batches.files import FileLimits
from tasc_store.batches.leases import Counts, take_batch

pytestmark = pytest.mark.redis
Make = Callable[..., StorageService]


def test_batch_can_be_created_listed_and_cancelled_and_keeps_its_input_file(
    service: StorageService,
) -> None:
    file = service.uploaded()
    batch = service.create(file, metadata={"why": "tonight"}).json()
    assert batch["object"] == "batch"
    assert (batch["status"], batch["model"]) == ("validating", "greet")
    assert batch["input_file_id"] == file.id
    assert batch["metadata"] == {"why": "tonight"}
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    unset = ("errors", "output_file_id", "error_file_id", "in_progress_at", "completed_at")
    assert [batch[name] for name in unset] == [None] * 5
    assert service.ask("GET", f"/v1/batches/{batch['id']}").json() == batch
    listed = service.ask("GET", "/v1/batches").json()
    assert (listed["data"], listed["has_more"]) == ([batch], False)
    in_use = error_of(service.ask("DELETE", f"/v1/files/{file.id}"), 400)
    assert in_use["code"] == "file_in_use"
    cancelled = service.ask("POST", f"/v1/batches/{batch['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["cancelled_at"] is not None


def test_batch_creation_reads_only_the_first_line(service: StorageService) -> None:
    file = service.uploaded("\n" + line() + "no JSON at all\n")
    assert service.create(file).status_code == 200


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, None),
        ({"window": "24h"}, "window"),
    ],
)
def test_invalid_batch_field_is_refused_and_named(
    service: StorageService, said: dict[str, object], field: str | None
) -> None:
    error = error_of(service.create(service.uploaded(), **said), 400)
    assert field is None or error["param"] == field
    assert service.storage.batches.page().items == ()


@pytest.mark.parametrize(
    "text", ["x\n", "[]\n", "{}\n", '{"body": 5}\n', '{"body": {"model": 5}}', "[" * 9999]
)
def test_file_without_a_model_on_its_first_line_is_refused(
    service: StorageService, text: str
) -> None:
    error = error_of(service.create(service.uploaded(text)), 400)
    assert error["param"] == "input_file_id"


@pytest.mark.parametrize("before", ["\ufeff", "\ufeff\n"])
def test_byte_order_mark_is_skipped(service: StorageService, before: str) -> None:
    assert service.create(service.uploaded(before + line())).json()["model"] == "greet"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (line().encode("utf-16"), "UTF-16"),
        (line().encode("utf-16-le"), "UTF-16"),
        (json.dumps([json.loads(line())], indent=1).encode(), "JSON array"),
        (json.dumps(json.loads(line()), indent=1).encode(), "several lines"),
        (gzip.compress(line().encode()), "gzip"),
    ],
)
def test_error_of_another_file_format_names_the_format(
    service: StorageService, content: bytes, kind: str
) -> None:
    error = error_of(service.create(service.uploaded(content)), 400)
    assert error["param"] == "input_file_id"
    assert kind in error["message"]


def test_batch_for_an_unknown_model_is_refused(service: StorageService) -> None:
    error = error_of(service.create(service.uploaded(line(model="nobody"))), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_batch_output_file_is_refused_as_batch_input(service: StorageService) -> None:
    upload = service.storage.files.begin()
    upload.write(line().encode())
    output = upload.keep(FileLimits(9, 9999), "out.jsonl", "batch_output", 3600)
    assert error_of(service.create(output), 400)["param"] == "input_file_id"


@pytest.mark.parametrize(
    ("limits", "code", "then"),
    [
        ({"max_batches": 1}, "too_many_batches", 429),  # ended batches are kept
        ({"max_batch_lines": 2, "max_open_batch_lines": 3}, "too_many_batch_lines", 200),
    ],
)
def test_batch_beyond_a_limit_is_refused_with_429(make_service, limits, code, then) -> None:
    service = make_service(**limits)
    file = service.uploaded(line(0) + line(1))
    first = service.create(file)
    response = service.create(file)
    assert (first.status_code, error_of(response, 429)["code"]) == (200, code)
    assert "retry-after" in response.headers
    service.ask("POST", f"/v1/batches/{first.json()['id']}/cancel")
    assert service.create(file).status_code == then


def test_batch_is_refused_without_file_quota_for_its_answers(make_service: Make) -> None:
    service = make_service(max_files=2)
    first, second = service.uploaded(), service.uploaded()
    refused = error_of(service.create(first), 429)
    assert refused["code"] == "too_many_files"
    service.ask("DELETE", f"/v1/files/{second.id}")
    assert service.create(first).status_code == 200


def test_ended_batch_shows_its_errors_and_cannot_be_cancelled(
    service: StorageService, client: redis.Redis
) -> None:
    id_ = service.create(service.uploaded()).json()["id"]
    fault = BatchFault("duplicate_custom_id", "line 3 repeats r1", 3, "custom_id")
    lease = take_batch(client, 60.0)
    assert lease
    lease.finish("failed", Counts(0), {}, (fault,))
    assert error_of(service.ask("POST", f"/v1/batches/{id_}/cancel"), 400)["code"] == "batch_ended"
    shown = service.ask("GET", f"/v1/batches/{id_}").json()
    assert shown["failed_at"] >= shown["created_at"]
    assert shown["errors"]["object"] == "list"
    assert shown["errors"]["data"] == [
        {"code": fault.code, "message": fault.message, "line": 3, "param": "custom_id"}
    ]


def test_batch_list_has_the_newest_first(service: StorageService) -> None:
    file = service.uploaded()
    ids = [service.create(file).json()["id"] for _ in range(5)]
    page = service.ask("GET", "/v1/batches?limit=3").json()
    assert [batch["id"] for batch in page["data"]] == ids[:1:-1]
    assert page["has_more"]
    rest = service.ask("GET", f"/v1/batches?limit=3&after={page['last_id']}").json()
    assert [batch["id"] for batch in rest["data"]] == ids[1::-1]
    assert not rest["has_more"]
    assert error_of(service.ask("GET", "/v1/batches?limit=101"), 400)["param"] == "limit"


class TwoKeys(AccessControl):
    """Keys by name: the first may use one task, the second all."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        super().__init__(metrics)
        self.known = {
            "ann": ApiKey("a" * 16, "ann", tasks=("greet",)),
            "bob": ApiKey("b" * 16, "bob"),
        }

    async def key_of(self, request: Request) -> ApiKey | None:
        await asyncio.sleep(0)
        return self.known[request.headers["authorization"]]


def test_key_sees_only_its_own_files_batches_and_tasks(
    make_service: Make,
) -> None:
    service = make_service(access=TwoKeys)
    ann, bob = {"authorization": "ann"}, {"authorization": "bob"}

    def upload(key: dict[str, str], text: str) -> str:
        request = {"data": {"purpose": "batch"}, "files": {"file": ("a", text.encode())}}
        return service.ask("POST", "/v1/files", headers=key, **request).json()["id"]

    def create(key: dict[str, str], file: str) -> object:
        body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file}
        return service.ask("POST", "/v1/batches", headers=key, json=body)

    hers, other = upload(ann, line()), upload(ann, line(model="other"))
    batch = create(ann, hers).json()["id"]
    assert error_of(create(ann, other), 403)["code"] == "model_not_allowed"
    nowhere = upload(ann, line(model="nobody"))
    assert error_of(create(ann, nowhere), 403)["code"] == "model_not_allowed", "as if it were there"
    assert error_of(create(bob, hers), 400)["param"] == "input_file_id"
    assert create(bob, upload(bob, line(model="other"))).status_code == 200
    for method, path in (
        ("GET", f"/v1/files/{hers}"),
        ("GET", f"/v1/files/{hers}/content"),
        ("DELETE", f"/v1/files/{hers}"),
        ("GET", f"/v1/batches/{batch}"),
        ("POST", f"/v1/batches/{batch}/cancel"),
    ):
        error_of(service.ask(method, path, headers=bob), 404)
    assert len(service.ask("GET", "/v1/files", headers=bob).json()["data"]) == 1
    assert len(service.ask("GET", "/v1/batches", headers=ann).json()["data"]) == 1
    assert service.ask("GET", f"/v1/batches/{batch}", headers=ann).json()["status"] == "validating"
