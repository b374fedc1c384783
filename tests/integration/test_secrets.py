"""Tests that logs, answers, metrics and errors have no passwords, API keys or tokens."""

import asyncio
import logging
from pathlib import Path

import pytest
import redis
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from support import asgi, eventually, free_port, refused
from tasc_protocol import Output, Request
from tasc_runtime.errors import SettingsError
from tasc_runtime.protocol import Refusal, TaskStatus
from tasc_serve.access.access_control import AccessControl
from tasc_serve.http.api import create_api
from tasc_serve.metrics.discovery import MetricsPort, live_targets
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import ServeSettings, load_settings
from tasc_store import ApiKeys, EmbeddedRedis, StoreError, StoreUnreachable, connect

pytestmark = pytest.mark.redis
PASSWORD, TOKEN = "p4ssw0rd-of-redis", "t0ken-of-ray"
TASK = "greet"
GETS = ("/metrics", "/openapi.json", "/sd", "/v1/tasks", "/v1/models", "/readyz", "/nothing")


class Broken:
    """A backend that always fails, with Redis's reason if Redis is unavailable."""

    def __init__(self, client: redis.Redis, url: str) -> None:
        self._client, self._url = client, url
        self.tasks = (TASK,)

    def router(self, task: str) -> "Broken":
        return self

    async def complete(self, call: Request) -> Output | Refusal:
        await asyncio.to_thread(connect, self._url, timeout_s=1)
        raise RuntimeError("broken")

    @property
    def store_fault(self) -> str | None:
        try:
            live_targets(self._client)
        except StoreError as error:
            return str(error)
        return None

    async def settled(self) -> None:
        pass

    def status(self, task: str) -> TaskStatus | None:
        return TaskStatus(task, 1, "model", None, "f" * 32, 512, 8, 3, 100, 4096)

    async def metrics(self) -> list[str]:
        return []

    def metrics_targets(self) -> list[str]:
        return live_targets(self._client)


@pytest.fixture
def server(server: EmbeddedRedis) -> EmbeddedRedis:
    with connect(server.url) as client:
        client.config_set("requirepass", PASSWORD)
    return server


def with_password(server: EmbeddedRedis, password: str) -> str:
    return server.url.replace("redis://", f"redis://default:{password}@")


def test_gateway_output_has_no_secret(server, caplog, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    url = with_password(server, PASSWORD)
    settings = ServeSettings.model_validate(
        {
            "redis_url": url,
            "tasks": [{"name": TASK}],
            "auth": {"required": True, "cache_ttl_s": 0.01},
        }
    )
    client, registry = connect(url, timeout_s=1), CollectorRegistry()
    unknown = f"tasc_{'u' * 43}"
    known, key = ApiKeys(client).create("known", tasks=(TASK,), requests_per_minute=2)
    metrics = GatewayMetrics(registry)
    access = AccessControl.of(settings, client, metrics)
    output = [repr(settings), repr(key), str(access.__dict__)]

    def ask_all(app: FastAPI) -> list[int]:
        codes = []
        for secret in (known, known, known, unknown, f"{known} {TOKEN}"):
            headers = {"Authorization": f"Bearer {secret}"}
            body = {"model": TASK, "prompt": "hi"}
            asked = [("POST", "/v1/completions"), *(("GET", path) for path in GETS)]
            for method, path in asked:
                answered = asgi(app, method, path, json=body, headers=headers)
                output.append(f"{answered.headers} {answered.text}")
                codes.append(answered.status_code)
        return codes

    with MetricsPort(client, registry, host="127.0.0.1", ttl_s=1):
        app = create_api(Broken(client, url), settings.limits, metrics, access=access)
        codes = ask_all(app)
        assert {200, 401, 404, 429, 500} <= set(codes)
        ApiKeys(client).revoke(key.id)
        headers = {"Authorization": f"Bearer {known}"}
        eventually(lambda: asgi(app, "GET", "/v1/models", headers=headers).status_code == 401)
        server.close()
        assert 503 in ask_all(app)
        assert "no Redis answers at redis://" in asgi(app, "GET", "/readyz").text
    output.append(generate_latest(registry).decode())
    assert "Traceback" in caplog.text
    assert "API keys: Redis fails" in caplog.text
    output.append(caplog.text)
    for secret in (PASSWORD, TOKEN, known, unknown):
        assert secret not in "\n".join(output)


def assert_hidden(error: BaseException | None) -> None:
    """Asserts that an error and its causes do not have the password."""
    while error is not None:
        assert PASSWORD not in f"{error!s} {error!r}"
        error = error.__cause__


def test_store_errors_hide_the_password(server: EmbeddedRedis) -> None:
    place = f"127.0.0.1:{free_port()}/0"
    for url, named in {
        f"redis://user:{PASSWORD}@{place}": f"***@{place}",
        f"redis://user:{PASSWORD}@127.0.0.1:port/0": "",
        with_password(server, f"{PASSWORD}-wrong"): "",
        server.url: "",
    }.items():
        with refused(StoreUnreachable, named) as caught:
            connect(url, timeout_s=0.2)
        assert_hidden(caught.value)
    connect(with_password(server, PASSWORD)).close()


@pytest.mark.parametrize(
    "text",
    [
        "redis_url: redis://:{0}@host: 6379\ntasks: [{{name: a}}]",
        "redis_url: [{0}\ntasks: ]",
        "redis_url: {0}\x01",
        "redis_url: [{0}]\ntasks: [{{name: a}}]",
        "redis_url: redis://:{0}@host\ntasks: [{{name: a}}, {{name: a}}]",
        "redis_url: redis://:{0}@host\ntasks: [{{name: a}}]\nnothing: {0}",
        "auth: {0}\ntasks: [{{name: a}}]",
    ],
)
def test_settings_errors_hide_values(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text.format(PASSWORD))
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert_hidden(caught.value)
