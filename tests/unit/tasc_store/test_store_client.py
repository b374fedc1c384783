"""Tests URLs in messages, and the requirements of URLs and versions, without a server."""

import pytest
import redis

from support import refused
from tasc_store import StoreTooOld, StoreUnreachable, connect, open_url, redact
from tasc_store.client import require_version, url_of

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"rediss://:{SECRET}@host",
        f"redis://{SECRET}@host",
        f"redis://user:pa/{SECRET}@x@host:1/0",
        f"user:{SECRET}@host:6379",
        f"unix://user@/run/redis.sock?db=1&password={SECRET}",
        f"rediss://host?ssl_password={SECRET}&db=1",
    ],
)
def test_secrets_in_urls_are_redacted(url: str) -> None:
    shown = redact(url)
    assert SECRET not in shown
    assert "***" in shown


def test_url_without_a_secret_is_unchanged() -> None:
    assert redact("redis://host:6379/0?db=3") == "redis://host:6379/0?db=3"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://u:{SECRET}@host:1234/5", "redis://host:1234/5"),
        (f"rediss://u:{SECRET}@host", "rediss://host:6379/0"),
        (f"unix:///run/redis.sock?password={SECRET}", "unix:///run/redis.sock"),
    ],
)
def test_displayed_url_of_a_client_has_no_login(url: str, shown: str) -> None:
    with redis.Redis.from_url(url) as client:
        assert url_of(client) == shown


@pytest.mark.parametrize(
    "url",
    [f"http://u:{SECRET}@host", f"redis://:{SECRET}/x@host:port", "redis://host?no_such_option=1"],
)
def test_error_of_an_invalid_url_shows_a_valid_url(url: str) -> None:
    with refused(StoreUnreachable, "redis://") as caught:
        connect(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.15", "10.0", "255.255.255"])
def test_new_servers_are_accepted(version: str) -> None:
    require_version(version, "redis://host")


@pytest.mark.parametrize("version", ["5.0.14", "6.0.16", "2.8"])
def test_old_servers_are_refused_by_version_and_url(version: str) -> None:
    with refused(StoreTooOld, "***@host", version, "6.2"):
        require_version(version, f"redis://:{SECRET}@host")


def test_url_argument_precedes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://environment")
    with open_url("redis://given") as given, open_url(None) as environment:
        assert (given, environment) == ("redis://given", "redis://environment")
