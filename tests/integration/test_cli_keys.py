"""``tasc key``: made and shown once, listed without secrets, revoked."""

import json
from collections.abc import Callable

import pytest

from tasc_store import ApiKeys, connect
from tasc_store.access import digest_of

pytestmark = pytest.mark.redis
Run = Callable[..., str]


@pytest.fixture
def run(run: Run, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``tasc key`` on the shared store."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    return lambda *args, code=0: run("key", *args, code=code)


def test_a_key_is_made_listed_and_revoked(run: Run, redis_url: str, name: str) -> None:
    made = run("create", name, "--tasks", "one, two", "--requests-per-minute", 60)
    secret = made.strip()
    assert made == f"{secret}\n"
    keys = ApiKeys(connect(redis_url))
    key = keys.find(digest_of(secret))
    assert (key.name, key.tasks, key.requests_per_minute) == (name, ("one", "two"), 60)
    text = run("list")
    (line,) = (row for row in text.splitlines() if name in row)
    assert line.split("\t")[:5] == [key.id, name, "one,two", "60", "-"]
    assert line.endswith("\topen")
    assert secret not in text
    revoked = json.loads(run("revoke", key.id, "--json"))
    assert (revoked["id"], revoked["revoked"]) == (key.id, True)
    assert keys.find(digest_of(secret)).revoked
    listed = json.loads(run("list", "--json"))["keys"]
    assert [k["revoked"] for k in listed if k["name"] == name] == [True]
    assert secret not in json.dumps(listed)


def test_json_has_the_key_once_and_its_record(run: Run, redis_url: str) -> None:
    made = json.loads(run("create", "for json", "--tokens-per-minute", 7, "--json"))
    key = ApiKeys(connect(redis_url)).find(digest_of(made.pop("key")))
    assert (made["id"], made["tokens_per_minute"], made["tasks"]) == (key.id, 7, [])


def test_what_cannot_be_is_said_in_one_line(run: Run) -> None:
    assert "no key 0000000000000000" in run("revoke", "0" * 16, code=1)
    assert "task name 'no name'" in run("create", "x", "--tasks", "no name", code=1)
    assert "requests-per-minute" in run("create", "x", "--requests-per-minute", 0, code=2)
