"""Scripts of web pages may call the service where the settings name their origin."""

import json

import pytest
from fake_backend import CHAT, GOOD, FakeBackend, Service, answer, error_of
from prometheus_client import CollectorRegistry

from tasc_serve.http.api import create_api
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings

ORIGIN = "https://example.org"


def called(origins, method, path, body=None, **headers):
    """An answer of a service that pages of some origins may call."""
    service, backend = Service(FakeBackend()), FakeBackend(*answer("yes"))
    metrics = GatewayMetrics(CollectorRegistry())
    service.app = create_api(backend, LimitSettings(), metrics, cors_origins=origins)
    sent = {"content": json.dumps(body)} if "content-type" in headers else {"json": body}
    return service.ask(method, path, headers={"Origin": ORIGIN, **headers}, **sent)


ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("*",), "*"), ((ORIGIN,), ORIGIN), (("https://other.org",), None)],
)
def test_scripts_of_the_origins_in_the_settings_may_call(origins, allowed):
    for path, body in GOOD.items():
        for more, status in (({}, 200), ({"stream": True}, 200), ({"stop": 5}, 400)):
            response = called(origins, "POST", path, body | more)
            assert (response.status_code, response.headers.get(ALLOWED)) == (status, allowed)
    assert called(origins, "GET", "/v1/models").headers.get(ALLOWED) == allowed
    first = called(origins, "OPTIONS", CHAT, **ASKING)
    assert first.headers.get(ALLOWED) == allowed
    if allowed:
        assert first.status_code == 200
        assert first.headers["access-control-allow-headers"] == "authorization,content-type"
        assert response.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_what_browsers_send_for_any_page_without_asking_is_refused(kind):
    for path, body in GOOD.items():
        error_of(called((), "POST", path, body, **{"content-type": kind}), 415)
        json_too = {"content-type": "application/json; charset=utf-8"}
        assert called((), "POST", path, body, **json_too).status_code == 200
