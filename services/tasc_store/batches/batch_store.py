"""Batches in Redis: what is to be answered, how far it is, and what came of it.

It does not know what a line of a batch asks for; what a worker does with one is in `batch_leases`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

import redis

from tasc_store import keys
from tasc_store.batches import batch_scripts
from tasc_store.client import as_text, translated, url_of
from tasc_store.errors import BatchEnded, BatchesFull, LinesFull, UnknownBatch, UnknownFile
from tasc_store.pages import Page, new_id, read_page

Status = Literal[
    "validating", "in_progress", "finalizing", "completed",
    "failed", "expired", "cancelling", "cancelled",
]  # fmt: skip
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
TIMES: Final = (
    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip
_NUMBERS: Final = (
    "created_at", "expires_at", "output_ttl_s", "total", "completed", "failed", "attempts",
)  # fmt: skip
# A worker may begin shortly before the deadline, and has the input to read then.
_BEHIND_DEADLINE_S: Final = 3600


@dataclass(frozen=True)
class BatchFault:
    """Why a batch failed, or one reason of several.

    Attributes:
        line: Of the input file, from 1.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class NewBatch:
    """What is asked for.

    Attributes:
        window: The time it may take, in the asker's words; ``window_s`` in seconds.
        model: The task that all its lines name.
        kept_s: How long its record is kept behind its end, in seconds.
        output_ttl_s: How long its files are, in seconds.
    """

    input_file_id: str
    endpoint: str
    window: str
    window_s: float
    model: str
    kept_s: float
    output_ttl_s: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True)
class Batch:
    """A batch as it is now.

    Attributes:
        at: When it came to a status, in seconds since the epoch, for those it came to.
        total: Lines of its file; 0 until they have been read.
        attempts: How often a worker has taken it since something was done.
    """

    id: str
    endpoint: str
    input_file_id: str
    window: str
    created_at: int
    expires_at: int
    status: Status
    model: str
    output_ttl_s: int
    metadata: dict[str, str]
    owner: str
    at: dict[str, int]
    total: int = 0
    completed: int = 0
    failed: int = 0
    attempts: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchFault, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class BatchStore:
    """All batches. Every method raises `StoreError` (see `translated`) when Redis fails."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._url = url_of(client)
        self._create = client.register_script(batch_scripts.CREATE)
        self._cancel = client.register_script(batch_scripts.CANCEL)
        self._sweep = client.register_script(batch_scripts.SWEEP)

    def create(self, new: NewBatch, most: int, most_lines: int | None = None) -> Batch:
        """Ask for a batch; its input file stays until it has ended.

        Args:
            most_lines: Of the owner's batches that have not ended, this one counted; None: any.

        Raises:
            UnknownFile: The input file is gone.
            BatchesFull: There are ``most`` already, or half as many of the same owner.
            LinesFull: The owner's would have more lines than ``most_lines``.
        """
        now = time.time()
        id_, deadline = new_id("batch", now), int(now + new.window_s)
        fields = _fields(new, id_, int(now), deadline)
        flat = [part for pair in fields.items() for part in pair]
        stays = deadline + _BEHIND_DEADLINE_S
        with translated(self._url):
            bounds = (most, -1 if most_lines is None else most_lines)
            values = [int(now), *bounds, new.input_file_id, deadline, stays, id_, new.owner, *flat]
            done = int(self._create([keys.SHARED], values))
        if done == -3:
            raise LinesFull(
                f"the batches of this key that have not ended would have more than {most_lines} "
                "lines together; wait until one has ended, cancel one, or send fewer lines"
            )
        if done == -2:
            raise BatchesFull(
                f"this key has half of the {most} batches that are kept, and may have no more; "
                "wait until its oldest is forgotten"
            )
        if done < 0:
            raise BatchesFull(
                f"there are {most} batches, as many as are kept; wait until the oldest is forgotten"
            )
        if not done:
            raise UnknownFile(f"there is no file {new.input_file_id[:64]!r}; upload it again")
        return self.get(id_)

    def get(self, id_: str) -> Batch:
        """Raises UnknownBatch."""
        self._swept()
        (found,) = self._load([id_])
        if found is None:
            raise UnknownBatch(f"there is no batch {id_[:64]!r}; ended ones are forgotten in time")
        return found

    def page(
        self,
        *,
        after: str = "",
        limit: int = 20,
        wanted: Callable[[Batch], bool] = lambda batch: True,
    ) -> Page[Batch]:
        """Batches behind the one with the id ``after``, the newest first."""
        self._swept()
        with translated(self._url):
            return read_page(
                self._client, keys.shared_key("batches"), self._load,
                after=after, limit=limit, oldest_first=False, wanted=wanted,
            )  # fmt: skip

    def cancel(self, id_: str) -> Batch:
        """Have a batch end with what is done; cancelling twice is cancelling once.

        Raises:
            UnknownBatch: There is none of that id.
            BatchEnded: It has ended otherwise, or its answers are being written.
        """
        with translated(self._url):
            done = int(self._cancel([keys.SHARED], [int(time.time()), id_]))
        batch = self.get(id_)
        if done < 0:
            raise BatchEnded(f"batch {id_} is {batch.status}; there is nothing to cancel any more")
        return batch

    def _swept(self) -> None:
        with translated(self._url):
            self._sweep([keys.SHARED], [int(time.time())])

    def _load(self, ids: Sequence[str]) -> list[Batch | None]:
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for id_ in ids:
                pipe.hgetall(keys.shared_key("batch", id_))
            return [_parsed(found) for found in pipe.execute()]


def _fields(new: NewBatch, id_: str, now: int, deadline: int) -> dict[str, str | int]:
    return {
        "id": id_,
        "endpoint": new.endpoint,
        "input_file_id": new.input_file_id,
        "window": new.window,
        "created_at": now,
        "expires_at": deadline,
        "status": "validating",
        "model": new.model,
        "output_ttl_s": int(new.output_ttl_s),
        "kept_s": int(new.kept_s),
        "metadata": json.dumps(dict(new.metadata), ensure_ascii=False),
        "owner": new.owner,
        "total": 0,
        "completed": 0,
        "failed": 0,
        "attempts": 0,
    }


def _parsed(found: Mapping[bytes | str, bytes | str]) -> Batch | None:
    if not found:
        return None
    values = {as_text(k): as_text(v) for k, v in found.items()}
    number = {name: int(values[name]) for name in _NUMBERS}
    return Batch(
        id=values["id"],
        endpoint=values["endpoint"],
        input_file_id=values["input_file_id"],
        window=values["window"],
        status=values["status"],  # type: ignore[arg-type]  # only our scripts write it
        model=values["model"],
        owner=values["owner"],
        metadata=json.loads(values["metadata"]),
        at={name: int(values[f"{name}_at"]) for name in TIMES if f"{name}_at" in values},
        output_file_id=values.get("output_file_id"),
        error_file_id=values.get("error_file_id"),
        errors=tuple(BatchFault(**fault) for fault in json.loads(values.get("errors", "[]"))),
        **number,
    )


def errors_json(errors: Sequence[BatchFault]) -> str:
    return json.dumps([asdict(fault) for fault in errors], ensure_ascii=False)
