"""Lists of things in Redis, a page at a time, in the order of their ids. It knows no thing."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import redis

from tasc_store.client import as_text

Item = TypeVar("Item")
_STEP = 200  # ids looked at by one command


@dataclass(frozen=True)
class Page(Generic[Item]):
    """Some of a list, and whether more comes behind."""

    items: tuple[Item, ...]
    has_more: bool


def new_id(prefix: str, now: float | None = None) -> str:
    """An id nobody can guess; those made later come later in the order of characters."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{prefix}-{milliseconds:011x}{secrets.token_hex(8)}"


def read_page(
    client: redis.Redis,
    key: str,
    load: Callable[[Sequence[str]], Sequence[Item | None]],
    *,
    after: str,
    limit: int,
    oldest_first: bool,
    wanted: Callable[[Item], bool],
) -> Page[Item]:
    """The things behind one id, which need not be there any more.

    Args:
        key: A sorted set of ids, all of one score.
        load: The things of some ids; None for one that is gone.
        after: Empty for the beginning.
    """
    found: list[Item] = []
    while len(found) <= limit:
        ids = _ids(client, key, after, oldest_first)
        if not ids:
            break
        after = ids[-1]
        found += [item for item in load(ids) if item is not None and wanted(item)]
    return Page(tuple(found[:limit]), len(found) > limit)


def _ids(client: redis.Redis, key: str, after: str, oldest_first: bool) -> list[str]:
    if oldest_first:
        low = f"({after}" if after else "-"
        return [as_text(i) for i in client.zrangebylex(key, low, "+", 0, _STEP)]
    high = f"({after}" if after else "+"
    return [as_text(i) for i in client.zrevrangebylex(key, high, "-", 0, _STEP)]
