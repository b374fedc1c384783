"""Commands suggested in messages, complete enough to be pasted into a shell."""

import shlex
from pathlib import Path

_store: list[str] = []


def use_store(redis_url: str | None, data_dir: Path | None) -> None:
    """Set the store of all later hints.

    Args:
        redis_url, data_dir: The values of this command, without a login; None if the next command
            gets the same values from its defaults or the environment.
    """
    _store.clear()
    if redis_url is not None:
        _store.extend(("--redis-url", redis_url))
    elif data_dir is not None:
        _store.extend(("--data-dir", str(data_dir)))


def command(*words: object) -> str:
    """Returns a `tasc` command that uses this command's store, quoted for a shell."""
    return shlex.join(["tasc", *map(str, words), *_store])
