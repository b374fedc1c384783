"""A checked connection to Redis, and the library's errors as this package's errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry

from tasc_store.errors import (
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooOld,
    StoreUnreachable,
)
from tasc_store.keys import WRITE_PROBE

OLDEST = (6, 2)
# With the library's ten retries a silent host would take a minute to be called silent.
_RETRIES = 2

_LOGIN = re.compile(r"^([a-zA-Z]+://)?.*@", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"([?&]\w*password=)[^&]*")


def redact(url: str) -> str:
    """The URL without its user name and password, fit for messages and logs."""
    return _QUERY_PASSWORD.sub(r"\1***", _LOGIN.sub(r"\1***@", url))


def url_of(client: redis.Redis) -> str:
    """Where a client connects to, as a URL without login."""
    settings = client.connection_pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    secure = issubclass(client.connection_pool.connection_class, redis.SSLConnection)
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return f"redis{'s' * secure}://{host}:{port}/{settings.get('db') or 0}"


def as_text(value: bytes | str) -> str:
    """A reply as text, whether or not the client decodes replies."""
    return value.decode() if isinstance(value, bytes) else value


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client whose server answers, is new enough and takes writes.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: Longest wait for a connection or a reply, in seconds; tried three times.

    Raises:
        StoreUnreachable: The URL cannot be read, nobody answers there, or the login is refused.
        StoreTooOld: The server is older than Redis 6.2.
        StoreReadOnly: The server refuses writes.
        StoreError: Anything else the server answers to ``PING``, ``INFO`` and ``UNLINK``.
    """
    client = _client(url, timeout_s)
    try:
        with translated(url):
            client.ping()
            require_version(str(client.info("server")["redis_version"]), url)
            client.unlink(WRITE_PROBE)
    except StoreError:
        client.close()
        raise
    return client


def require_version(version: str, url: str) -> None:
    """Raises StoreTooOld if the server at the URL, of this version, lacks commands we use."""
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise StoreTooOld(
            f"Redis at {redact(url)} is version {version}; tasc needs "
            f"{'.'.join(map(str, OLDEST))} or newer: upgrade it or use another URL"
        )


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns what the Redis library raises in the block into this package's errors.

    Raises:
        StoreUnreachable: The server is gone, silent, still loading, or refuses the login.
        StoreFull: The server is at its ``maxmemory``.
        StoreReadOnly: The server is a replica or cannot save.
        StoreError: Any other error of the server or the library.
    """
    try:
        yield
    except RedisError as error:
        raise _explained(redact(url), error) from error


def _client(url: str, timeout_s: float) -> redis.Redis:
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialWithJitterBackoff(), _RETRIES),
        )
        client.connection_pool.make_connection()  # makes an object, no connection: reads options
    except (TypeError, ValueError):
        # Not chained: the library's message can quote a part of the password.
        raise StoreUnreachable(
            f"{redact(url)} is no Redis URL; write redis://[user:password@]host:port/db, with"
            " special characters of the password percent-encoded"
        ) from None
    return client


def _explained(shown: str, error: RedisError) -> StoreError:
    text = str(error)
    if isinstance(error, AuthenticationError):
        return StoreUnreachable(
            f"Redis at {shown} refuses the login ({text}); correct user and password in the URL"
        )
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return StoreUnreachable(
            f"no Redis answers at {shown} ({text}); start it, or correct the URL (REDIS_URL)"
        )
    # By text, since inside a Lua script the server hides the error's code.
    if "when used memory" in text:
        return StoreFull(
            f"Redis at {shown} is full ({text}); raise its maxmemory or prune old index versions"
        )
    if "read only replica" in text:
        return StoreReadOnly(f"Redis at {shown} is a read-only replica; use the primary's URL")
    if "MISCONF" in text:
        return StoreReadOnly(f"Redis at {shown} refuses writes, see to its disk: {text}")
    if isinstance(error, NoPermissionError):
        return StoreError(f"Redis at {shown} forbids a command; widen the user's ACL: {text}")
    return StoreError(f"Redis at {shown} answers: {text}")
