"""Run the service from settings until told to end, and follow its tasks' records meanwhile.

It expects a Ray that is running.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Self

from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_jobs.tasks.register import check_record
from tasc_runtime.engine.versions import engine_digest, fixed_changes, newest_version
from tasc_runtime.errors import ServiceError
from tasc_runtime.models import load_tokenizer
from tasc_runtime.progress import note
from tasc_serve import app
from tasc_serve.settings import ServeSettings
from tasc_store import TaskRecord, TaskStore, connect


def logical_cpus(settings: ServeSettings) -> int:
    """Logical CPUs a Ray of our own needs for all replicas, gateways and Serve itself."""
    replicas = sum(
        (task.replica_range[1] + task.surge_replicas) * task.num_cpus for task in settings.tasks
    )
    return max(4, math.ceil(replicas + settings.http.gateways * settings.http.gateway_num_cpus) + 1)


def run_service(
    settings: ServeSettings,
    redis_url: str,
    wait: Callable[[], None],
    example: str = "the input of a row",
    say: Callable[[str], None] = note,
) -> None:
    """Start the service, say where it answers, and keep it until ``wait`` returns or is broken off.

    Args:
        say: Told, in words, of each part that comes up, and of what takes long until then.

    Raises:
        ServiceError: It does not come up.
    """
    wanted = {task.name: task.replica_range[0] for task in settings.tasks}

    def came_up(deployment: str, running: int) -> None:
        of = wanted.get(deployment)
        part = "HTTP gateway" if of is None else f"task {deployment}"
        say(f"{part}: {running} of {of or settings.http.gateways} replicas up")

    say("starting the service ...")
    update = partial(app.update, settings, redis_url)
    try:
        with connect(redis_url) as client:
            store = TaskStore(client)
            updates = RecordUpdates(store, wanted, update, settings.poll_interval_s, say)
            base = app.start(
                settings, redis_url, updates.digests, came_up, partial(say_of_task, say)
            )
            say("every task answers")
            print(usage_of(base, settings.tasks[0].name, example), flush=True)
            with updates:
                wait()
    finally:
        with suppress(Exception):  # what brought us here is the error to show
            app.stop(settings.limits.drain_timeout_s)


class RecordUpdates:
    """Updates a running service where a task's newest record needs other replicas.

    In a `with` block, a thread looks at the records every ``poll_s``. Changes that running replicas
    take by themselves need no update. A record that the checks of ``tasc task create`` refuse is
    logged, and the service stays as it is; later versions are looked at, and this one again.

    Args:
        tasks: Names of the tasks that are served.
        update: Deploys the service again by the `engine_digest` of each task; returns at once.
        again_s: Time until a refused version is checked again: its files may have been mended.

    Attributes:
        digests: Of each task, the `engine_digest` of the record that is deployed.
    """

    def __init__(
        self,
        store: TaskStore,
        tasks: Iterable[str],
        update: Callable[[Mapping[str, str]], None],
        poll_s: float,
        say: Callable[[str], None] = note,
        again_s: float = 60.0,
    ) -> None:
        self._store, self._update, self._say = store, update, say
        self._poll_s, self._again_s = poll_s, again_s
        self._served = {task: newest_version(store, task) for task in tasks}
        self._refused: dict[str, tuple[int, float]] = {}
        self._failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="record-updates", daemon=True)

    @property
    def digests(self) -> dict[str, str]:
        return {name: engine_digest(record) for name, (record, _) in self._served.items()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(10 + 2 * self._poll_s)

    def _run(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                self.look()
                self._failing = False
            except Exception as error:  # whatever it is, later versions must still be seen
                if not self._failing:
                    self._say(f"the tasks' records cannot be followed now: {error}")
                self._failing = True

    def look(self) -> None:
        """Look at all records once, and update the service if one of them needs that.

        Raises:
            StoreError: Redis fails.
            Exception: What ``update`` raises; the next look tries again.
        """
        newer = {name: found for name in self._served if (found := self._newer(name))}
        if not newer:
            return
        self._update(self.digests | {name: engine_digest(r) for name, (r, _) in newer.items()})
        for name, (record, version) in newer.items():
            changes = ", ".join(fixed_changes(self._served[name][0], record))
            self._say(
                f"task {name}: version {version} changes {changes}; its replicas are replaced by a "
                "rolling update"
            )
        self._served |= newer

    def _newer(self, name: str) -> tuple[TaskRecord, int] | None:
        """A task's newest record and its number, where that needs other replicas and fits."""
        version = self._store.versions(name)[-1]
        served, now = self._served[name]
        refused, again = self._refused.get(name, (0, 0.0))
        if version == now or (version == refused and time.monotonic() < again):
            return None
        try:
            record = self._store.get(name, version)
            if fixed_changes(served, record):
                check_record(record, BaseModel.open(record.model, record.revision))
                load_tokenizer(record)
                return record, version
            self._served[name] = record, version
        except (UsageError, ServiceError, ValueError) as error:
            if version != refused:
                self._say(
                    f"task {name}: version {version} cannot be used, version {now} stays in use: "
                    f"{error}; put it right, or go back with `tasc task use {name} {now}`"
                )
            self._refused[name] = version, time.monotonic() + self._again_s
        return None


def say_of_task(say: Callable[[str], None], task: str, text: str) -> None:
    """What a task's replica tells people who wait, as one line of the start."""
    say(f"task {task}: {text}")


def usage_of(base: str, task: str, example: str) -> str:
    """How to ask a running service something, as a curl line and as Python."""
    message = f'{{"role": "user", "content": "{example}"}}'
    return f"""serving on {base} (Ctrl-C ends it)

curl -s {base}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{task}", "messages": [{message}]}}'

from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key="none")
answer = client.chat.completions.create(model="{task}", messages=[{message}])
print(answer.choices[0].message.content)
"""
