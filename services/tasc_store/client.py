"""Connects to Redis with checks, and converts the library's errors to this package's."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar, cast

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import Script
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)
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
# With the library's ten retries, an unresponsive host would be reported only after a minute.
_RETRIES = 2
_Result = TypeVar("_Result")

# Parts of servers' error messages. Before Redis 7, errors in Lua scripts have no error code.
_FULL = "when used memory"
_REPLICA = "read only replica"
_CUT_OFF = "Link with MASTER is down"
_TOO_FEW_REPLICAS = "Not enough good replicas"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_NOT_PRIMARY = (_REPLICA, _CUT_OFF, _TOO_FEW_REPLICAS)
_OF_CLUSTER = (AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError)

_LOGIN = re.compile(r"^([a-zA-Z]+://)?.*@", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"([?&]\w*password=)[^&]*")


def redact(url: str) -> str:
    """The URL without its user name and password, for messages and logs."""
    return _QUERY_PASSWORD.sub(r"\1***", _LOGIN.sub(r"\1***@", url))


def url_of(client: redis.Redis) -> str:
    """The address of a client's server, as a URL without login."""
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
    """Returns a client whose server answers, is new enough and accepts writes.

    The client follows a failover behind one address: if the server is no longer the primary, the
    client drops its idle connections and repeats the call on a new connection.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: Maximum wait for a connection or a reply, in seconds; tried three times.

    Raises:
        StoreUnreachable: The URL is invalid, no server answers, or the login is refused.
        StoreTooOld: The server is older than Redis 6.2.
        StoreReadOnly: The server refuses writes.
        StoreError: Any other error of the server for ``PING``, ``INFO`` and ``UNLINK``.
    """
    client = _client(url, timeout_s)
    try:
        client.ping()
        require_version(str(client.info("server")["redis_version"]), url)
        client.unlink(WRITE_PROBE)
    except StoreError:
        client.close()
        raise
    return client


def require_version(version: str, url: str) -> None:
    """Raises StoreTooOld if a server of this version lacks commands that this package uses."""
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise StoreTooOld(
            f"Redis at {redact(url)} is version {version}; tasc needs "
            f"{'.'.join(map(str, OLDEST))} or newer: upgrade it or use another URL"
        )


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Converts errors of the Redis library in the block to this package's errors.

    Raises:
        StoreUnreachable: The server is unreachable, does not answer, is still loading, is a replica
            without its primary, or refuses the login.
        StoreFull: The server is at its ``maxmemory``.
        StoreReadOnly: The server is a replica, cannot save, or has too few replicas.
        StoreError: Any other error of the server or the library.
    """
    try:
        yield
    except NoScriptError:  # on this error, the library loads the script and repeats the call
        raise
    except RedisError as error:
        raise _explained(redact(url), error) from error


class _Script(Script):
    def __init__(self, client: redis.Redis, script: Any) -> None:
        super().__init__(client, script)
        self._client = client

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except NoScriptError as error:  # the server changed after the library loaded the script
            raise _explained(redact(url_of(self._client)), error) from error


class StoreClient(redis.Redis):
    """A client whose commands, scripts and transactions raise `StoreError`, see `translated`.

    Attributes:
        url: The URL for messages; empty: the address of the server is used.
    """

    url = ""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with translated(self.url or url_of(self)):
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def register_script(self, script: Any) -> _Script:
        return _Script(self, script)

    def transaction(self, *args: Any, **options: Any) -> Any:
        with translated(self.url or url_of(self)):
            return super().transaction(*args, **options)


class _NotPrimary(redis.ConnectionError):
    """The server of a connection is no longer the primary."""


class _Reconnecting(Retry):
    """Retries on a new connection, even if the server is no longer the primary.

    After a failover, another server answers at the same address. Idle connections are closed too,
    because the former primary would still return old values. A connection in use is closed at its
    next refused write.
    """

    def __init__(self) -> None:
        super().__init__(ExponentialWithJitterBackoff(), _RETRIES)
        self.drop_idle: Callable[[], object] = lambda: None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # each connection copies its Retry, but all connections share one pool

    def call_with_retry(self, do: Callable[[], _Result], *args: Any, **options: Any) -> _Result:
        def tried() -> _Result:
            try:
                return do()
            except ResponseError as error:
                if not any(text in str(error) for text in _NOT_PRIMARY):
                    raise
                self.drop_idle()
                raise _NotPrimary(str(error)) from error

        result: _Result = super().call_with_retry(tried, *args, **options)
        return result


def _client(url: str, timeout_s: float) -> StoreClient:
    retry = _Reconnecting()
    try:
        timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        client = cast(StoreClient, StoreClient.from_url(url, retry=retry, **timeouts))
        client.connection_pool.make_connection()  # does not connect, but checks the options
    except (TypeError, ValueError):
        # Not chained: the library's message can quote a part of the password.
        raise StoreUnreachable(
            f"{redact(url)} is not a Redis URL; write redis://[user:password@]host:port/db, with"
            " special characters of the password percent-encoded"
        ) from None
    client.url = redact(url)
    retry.drop_idle = partial(client.connection_pool.disconnect, inuse_connections=False)
    return client


def _explained(shown: str, error: RedisError) -> StoreError:
    text = str(error)
    if isinstance(error, AuthenticationError):
        return StoreUnreachable(
            f"Redis at {shown} refuses the login ({text}); correct user and password in the URL"
        )
    if _FULL in text:
        return StoreFull(
            f"Redis at {shown} is full ({text}); raise its maxmemory or prune old index versions"
        )
    if _REPLICA in text:
        return StoreReadOnly(f"Redis at {shown} is a read-only replica; use the primary's URL")
    if _TOO_FEW_REPLICAS in text:
        return StoreReadOnly(
            f"Redis at {shown} refuses writes, since it has fewer replicas than its"
            " min-replicas-to-write; repair the replicas, or lower this setting"
        )
    if "MISCONF" in text:
        return StoreReadOnly(f"Redis at {shown} refuses writes; check its disk: {text}")
    if _CUT_OFF in text:
        return StoreUnreachable(
            f"Redis at {shown} is a replica that has lost its primary; use the primary's URL"
        )
    if isinstance(error, BusyLoadingError):
        return StoreUnreachable(f"Redis at {shown} is still loading its data; wait and try again")
    if _UNTRUSTED in text:
        return StoreUnreachable(
            f"the certificate of Redis at {shown} is not trusted ({text}); name the file of its"
            " authority in the URL: ?ssl_ca_certs=/path/ca.pem"
        )
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return StoreUnreachable(
            f"no Redis answers at {shown} ({text}); start it, or correct the URL (REDIS_URL)"
        )
    if isinstance(error, _OF_CLUSTER):
        return StoreError(
            f"Redis at {shown} is a node of a Redis Cluster ({text}); use a server with cluster"
            " mode off, which has all keys"
        )
    if isinstance(error, NoPermissionError):
        return StoreError(f"Redis at {shown} forbids a command; widen the user's ACL: {text}")
    return StoreError(f"Redis at {shown} answers: {text}")
