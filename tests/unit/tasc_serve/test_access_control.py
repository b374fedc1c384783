"""Tests the access by keys, and the responses without a key, with a wrong one, or over a limit."""

from dataclasses import replace

import httpx
import pytest
from fake_backend import COMPLETIONS, GOOD, TASK, FakeBackend, Service, answer, error_of
from fastapi import APIRouter, Depends
from msgspec import structs

from tasc_serve.access.access_control import AccessControl, KnownKeys, Rates
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import AuthSettings, LimitSettings, ServedTask
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey, StoreUnreachable
from tasc_store.access import digest_of

SECRET, OTHER = f"tasc_{'s' * 43}", f"tasc_{'o' * 43}"
KEY = ApiKey("0" * 16, "a key")
OPEN = ("/healthz", "/health", "/readyz", "/metrics", "/sd", "/v1/tasks", "/openapi.json")


class Gated(Service):
    """The application behind access control with one key and a stopped clock."""

    def __init__(
        self,
        key: ApiKey | None,
        *script: object,
        limit: float | None = None,
        away: bool = False,
        required: bool = True,
    ) -> None:
        def find(digest: str) -> ApiKey | None:
            if away:
                raise StoreUnreachable("no Redis answers")
            return key if digest == digest_of(SECRET) else None

        calls = StoreCalls.of("API keys", LimitSettings())
        keys = KnownKeys(find, AuthSettings(), calls) if required else None
        tasks = [ServedTask(name=TASK, max_requests_per_s=limit)]

        def access(metrics: GatewayMetrics) -> AccessControl:
            self.access = AccessControl(metrics, keys, Rates(tasks, 1, 10, lambda: 0.0))
            return self.access

        super().__init__(FakeBackend(*(script or answer("one", "two"))), access=access)

    def post(
        self, path: str = COMPLETIONS, secret: str | None = SECRET, **fields: object
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return self.ask("POST", path, json=GOOD[path] | fields, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self.ask("GET", path, headers={"Authorization": f"Bearer {SECRET}"})

    def limited(self, what: str) -> float | None:
        labels = {"task": TASK, "limit": what}
        return self.registry.get_sample_value("tasc_rate_limited_total", labels)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("key", "secret"),
    [(KEY, None), (KEY, OTHER), (KEY, "none"), (replace(KEY, revoked=True), SECRET)],
)
def test_request_without_a_valid_key_is_refused(path, stream, key, secret) -> None:
    service = Gated(key)
    response = service.post(path, secret, stream=stream)
    error = error_of(response, 401)
    assert (error["code"], response.headers["WWW-Authenticate"]) == ("invalid_api_key", "Bearer")
    assert SECRET not in response.text
    assert OTHER not in response.text
    assert service.backend.calls == []
    assert service.counted("-", 401) == 1


def test_body_is_not_parsed_before_the_key_is_checked() -> None:
    response = Gated(KEY).ask("POST", COMPLETIONS, content=b"{" * 10_000_000)
    error_of(response, 401)


@pytest.mark.parametrize("path", OPEN)
def test_health_and_metrics_endpoints_need_no_key(path: str) -> None:
    assert Gated(KEY).ask("GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{TASK}"])
def test_model_list_requires_a_key(path: str) -> None:
    service = Gated(KEY)
    error_of(service.ask("GET", path), 401)
    assert service.get(path).status_code == 200


def test_key_for_other_tasks_can_neither_use_nor_see_a_task() -> None:
    service = Gated(replace(KEY, tasks=("theirs", "too")))
    for model in (TASK, "no such task"):
        error = error_of(service.post(model=model), 403)
        assert (error["code"], error["param"]) == ("model_not_allowed", "model")
        assert error["message"].endswith("it may use theirs, too")
        error_of(service.get(f"/v1/models/{model}"), 403)
    assert service.get("/v1/models").json()["data"] == []
    not_served = error_of(service.post(model="theirs"), 404)
    assert TASK not in not_served["message"]


@pytest.mark.parametrize("key", [KEY, replace(KEY, tasks=(TASK,))])
def test_key_for_a_task_can_use_and_see_the_task(key: ApiKey) -> None:
    service = Gated(key)
    asked = [service.post(path, stream=stream) for path in GOOD for stream in (False, True)]
    assert {response.status_code for response in asked} == {200}
    (model,) = service.get("/v1/models").json()["data"]
    assert model["id"] == TASK


def test_keys_are_ignored_if_the_service_requires_no_keys() -> None:
    service = Gated(KEY, required=False, away=True)
    assert {service.post(secret=s).status_code for s in (None, SECRET, OTHER)} == {200}


def test_unavailable_key_store_is_503_with_retry_after() -> None:
    response = Gated(KEY, away=True).post()
    error_of(response, 503)
    assert response.headers["Retry-After"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_requests_per_key_are_limited_and_headers_show_the_limit(stream: bool) -> None:
    service = Gated(replace(KEY, requests_per_minute=2))
    left = [service.post(stream=stream) for _ in range(3)]
    assert [r.status_code for r in left] == [200, 200, 429]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in left] == ["1", "0", "0"]
    assert [r.headers["x-ratelimit-reset-requests"] for r in left] == ["30s", "1m0s", "1m0s"]
    assert {r.headers["x-ratelimit-limit-requests"] for r in left} == {"2"}
    assert left[2].headers["Retry-After"] == "30"
    assert error_of(left[2], 429)["code"] == "rate_limit_exceeded"
    assert (service.limited("key"), service.limited("task")) == (1, None)
    assert len(service.backend.calls) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_of_a_list_counts_as_a_request(stream: bool) -> None:
    service = Gated(replace(KEY, requests_per_minute=6))
    left = [service.post(prompt=["hi"] * count, n=2, stream=stream) for count in (4, 3, 2)]
    assert [r.status_code for r in left] == [200, 429, 200]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in left] == ["2", "2", "0"]
    assert left[1].headers["Retry-After"] == "10"
    assert len(service.backend.calls) == 2 * (4 + 2)


def test_too_long_prompt_list_costs_as_much_as_the_longest_valid_list() -> None:
    service = Gated(replace(KEY, requests_per_minute=600))
    response = service.post(prompt=["hi"] * 10_000)
    error_of(response, 400)
    left = service.access.admit(replace(KEY, requests_per_minute=600), TASK).headers
    assert left["x-ratelimit-remaining-requests"] == str(600 - 256 - 1)


def test_requests_to_a_task_are_limited_across_all_clients() -> None:
    service = Gated(KEY, limit=0.25, required=False)
    assert [service.post(secret=None).status_code for _ in range(3)] == [200, 429, 429]
    assert service.post().headers["Retry-After"] == "4"
    assert service.limited("task") == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_of_whole_and_streamed_answers_are_counted(stream: bool, n: int) -> None:
    service = Gated(replace(KEY, tokens_per_minute=60))
    assert service.post(stream=stream, n=n).headers["x-ratelimit-remaining-tokens"] == "60"
    left = service.access.admit(replace(KEY, tokens_per_minute=60), TASK).headers
    assert left["x-ratelimit-remaining-tokens"] == str(60 - 4 * n)  # the script has four


def test_tokens_of_an_answer_abandoned_by_its_client_are_counted() -> None:
    pieces = [structs.replace(output, tokens=(1, 2)) for output in answer("one", "two")[:1]]
    service = Gated(replace(KEY, tokens_per_minute=60), *pieces, RuntimeError("cut"))
    assert service.post(stream=True).status_code == 200
    left = service.access.admit(replace(KEY, tokens_per_minute=60), TASK).headers
    assert left["x-ratelimit-remaining-tokens"] == "58"


def test_failed_request_counts_against_the_limit() -> None:
    service = Gated(replace(KEY, requests_per_minute=1))
    error_of(service.post(max_tokens=10**6), 400)
    error_of(service.post(), 429)


def test_additional_router_can_require_keys() -> None:
    service = Gated(KEY)
    router = APIRouter(dependencies=[Depends(service.access.key_of)])
    router.get("/v1/things")(lambda: {"things": []})
    service.app.include_router(router)
    error_of(service.ask("GET", "/v1/things"), 401)
    assert service.get("/v1/things").json() == {"things": []}
