"""Names of Redis keys, and checks of the task names and fingerprints in them.

The braces are literal: a Redis Cluster hashes the text between them, so that all keys of one task
share a slot and one Lua script may use several of them.
"""

import re

ALL_TASKS = "tasc:tasks"
API_KEYS = "tasc:api-keys"
# Keys of files and batches, which belong to no task. Task names cannot contain an @.
SHARED = "tasc:{@batches}"
# Commands on this key test write access; they leave no data.
WRITE_PROBE = "tasc:write-probe"

_TASK = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
_FINGERPRINT = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")


def task_key(task: str, *parts: str | int) -> str:
    """``tasc:{task}:part:part``, the braces included."""
    return ":".join((f"tasc:{{{task}}}", *map(str, parts)))


def shared_key(*parts: str | int) -> str:
    """``tasc:{@batches}:part:part``, the braces included."""
    return ":".join((SHARED, *map(str, parts)))


def checked_task(name: str) -> str:
    """Returns the name.

    Raises:
        ValueError: The name is not allowed in a key or a file name.
    """
    return _checked(_TASK, "task name", name, 64)


def checked_fingerprint(fingerprint: str) -> str:
    """Returns the tokenizer fingerprint.

    Raises:
        ValueError: The fingerprint is not allowed in a key or a file name.
    """
    return _checked(_FINGERPRINT, "tokenizer fingerprint", fingerprint, 128)


def _checked(pattern: re.Pattern[str], kind: str, value: str, longest: int) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(
            f"{kind} {value!r} is not allowed; use 1 to {longest} of the characters a-z A-Z 0-9 . _"
            " -, and begin with a letter or digit"
        )
    return value
