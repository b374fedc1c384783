"""Runs the service from settings until it is stopped, and applies new records of its tasks.

Ray must be running.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from ray.serve.schema import ApplicationStatus

from tasc_jobs.hints import command
from tasc_jobs.tasks.model_folders import BaseModel
from tasc_runtime.engine.versions import (
    RecordFollower,
    engine_digest,
    fixed_changes,
    newest_version,
)
from tasc_runtime.models import load_tokenizer
from tasc_runtime.progress import note
from tasc_serve import app
from tasc_serve.settings import ServeSettings
from tasc_serve.store_calls import RepeatedCall
from tasc_store import TaskRecord, TaskStore, connect

_JOIN_S = 1.0  # the thread may still wait for Redis, but deploys nothing


def logical_cpus(settings: ServeSettings) -> int:
    """Returns the logical CPUs that a local Ray needs for replicas, gateways and Serve itself."""
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
    """Start the service, print its address, and run it until ``wait`` returns or raises.

    Args:
        say: Called with a message for each part that has started, or is slow to start.

    Raises:
        ServiceError: The service does not start.
    """
    wanted = {task.name: task.replica_range[0] for task in settings.tasks}

    def came_up(deployment: str, running: int) -> None:
        replicas = wanted.get(deployment)
        part = "HTTP gateway" if replicas is None else f"task {deployment}"
        say(f"{part}: {running} of {replicas or settings.http.gateways} replicas up")

    say("starting the service ...")
    update = partial(app.update, settings, redis_url)
    try:
        with connect(redis_url) as client:
            store = TaskStore(client)
            for name in wanted:
                own, limit = newest_version(store, name)[0].max_tokens, settings.limits.max_tokens
                if own > limit:
                    say(
                        f"task {name}: answers have up to {own} tokens by default, but a request "
                        f"can ask for at most {limit} (limits.max_tokens)"
                    )
            updates = RecordUpdates(
                store,
                wanted,
                update,
                settings.poll_interval_s,
                say,
                rollout=app.rollout,
                slow_s=settings.limits.start_timeout_s,
            )
            base = app.start(
                settings, redis_url, updates.digests, came_up, partial(say_of_task, say)
            )
            say("every task answers")
            keyed = settings.auth.required
            print(usage_of(base, settings.tasks[0].name, example, keyed), flush=True)
            with updates:
                wait()
    finally:
        with suppress(Exception):  # an earlier error must not be replaced
            app.stop(settings.limits.drain_timeout_s)


class RecordUpdates:
    """Updates a running service if a task's newest record needs new replicas.

    In a `with` block, a thread reads the records every ``poll_s`` seconds. Changes that running
    replicas apply by themselves need no update. A record that fails the checks of ``tasc task
    create`` is logged, and its task is not updated until a later version, or the same version in a
    later check, succeeds. Other tasks are still updated. No update begins after the block.

    Args:
        tasks: Names of the tasks that are served.
        update: Deploys the service again with the given `engine_digest` of each task; returns at
            once.
        again_s: Seconds until a refused version is checked again, in case its files were repaired.
        rollout: Returns Serve's status of the application and an explanation. Called repeatedly
            after an update until the update has ended. If None, the end of updates is not checked.
        slow_s: An update that has not ended after this many seconds is logged.

    Attributes:
        digests: By task, the `engine_digest` of the record that is deployed.
    """

    def __init__(
        self,
        store: TaskStore,
        tasks: Iterable[str],
        update: Callable[[Mapping[str, str]], None],
        poll_s: float,
        say: Callable[[str], None] = note,
        again_s: float = 60.0,
        rollout: Callable[[], tuple[ApplicationStatus, str]] | None = None,
        slow_s: float = 300.0,
    ) -> None:
        self._update, self._say, self._poll_s = update, say, poll_s
        self._rollout, self._slow_s = rollout, slow_s
        self._served = {task: newest_version(store, task) for task in tasks}
        self._newest = dict(self._served)
        self._followers = [
            RecordFollower(
                store,
                task,
                found,
                self._check,
                partial(self._version, task),
                self._report,
                again_s,
                command,
            )
            for task, found in self._served.items()
        ]
        self._updating: _Update | None = None
        self._ended = threading.Event()
        self._deploying = threading.Lock()

    def _version(self, task: str) -> int:
        return self._newest[task][1]

    @property
    def digests(self) -> dict[str, str]:
        return {name: engine_digest(record) for name, (record, _) in self._served.items()}

    def __enter__(self) -> Self:
        self._polling = RepeatedCall(
            "the update of the service", self.poll, self._poll_s, report=self._report
        )
        return self

    def __exit__(self, *error: object) -> None:
        with self._deploying:
            self._ended.set()
        self._polling.close(_JOIN_S)

    def poll(self) -> None:
        """Read all records once, and update the service if one of them requires it.

        Raises:
            Exception: ``update`` or ``rollout`` raised it; the next call tries again.
        """
        for follower in self._followers:
            follower.poll()
        newer = {
            name: found
            for name, found in self._newest.items()
            if fixed_changes(self._served[name][0], found[0])
        }
        if newer:
            self._deploy(newer)
        elif self._updating:
            self._follow(self._updating)
        self._served |= self._newest

    def _check(self, record: TaskRecord, version: int) -> None:
        """Raises an error if replicas of a new version could not start."""
        if fixed_changes(self._served[record.name][0], record):
            # Imported here because it loads numba, and most services never get a new version.
            from tasc_jobs.tasks.register import check_record

            check_record(record, BaseModel.open(record.model, record.revision))
            load_tokenizer(record)
        self._newest[record.name] = record, version

    def _deploy(self, newer: Mapping[str, tuple[TaskRecord, int]]) -> None:
        digests = self.digests | {name: engine_digest(r) for name, (r, _) in newer.items()}
        with self._deploying:  # so that nothing is deployed while the service stops
            if self._ended.is_set():
                return
            self._update(digests)
        for name, (record, version) in newer.items():
            changes = ", ".join(fixed_changes(self._served[name][0], record))
            self._report(
                f"task {name}: version {version} changes {changes}; its replicas are replaced by a "
                "rolling update"
            )
        # An update that has not ended becomes a part of the new update.
        tasks = dict(self._updating.tasks) if self._updating else {}
        for name, (_, version) in newer.items():
            before = tasks[name][0] if name in tasks else self._served[name][1]
            tasks[name] = before, version
        if self._rollout:
            self._updating = _Update(tasks, time.monotonic() + self._slow_s)

    def _follow(self, update: "_Update") -> None:
        """Log the end of an update. A failed update is still followed, because Serve retries it."""
        assert self._rollout
        status, reasons = self._rollout()
        if status == ApplicationStatus.RUNNING:
            self._updating = None
            for name, (_, version) in update.tasks.items():
                self._report(f"task {name}: the rolling update to version {version} is complete")
            return
        failed = status == ApplicationStatus.DEPLOY_FAILED
        if update.reported or not (failed or time.monotonic() > update.slow_at):
            return
        update.reported = True
        end = "failed" if failed else f"is not complete after {self._slow_s:g} s"
        for name, (before, version) in update.tasks.items():
            self._report(
                f"task {name}: the rolling update to version {version} {end}: {reasons}; fix the "
                f"cause, or go back with `{command('task', 'use', name, before)}`"
            )

    def _report(self, text: str) -> None:
        if not self._ended.is_set():  # later errors only mean that the service was stopped
            self._say(text)


@dataclass
class _Update:
    """A rolling update that has not ended, with the old and the new version of each task."""

    tasks: dict[str, tuple[int, int]]
    slow_at: float
    reported: bool = False


def say_of_task(say: Callable[[str], None], task: str, text: str) -> None:
    """Prints a message of a task's replica as one line during the start."""
    say(f"task {task}: {text}")


def usage_of(base: str, task: str, example: str, keyed: bool = False) -> str:
    """Returns examples of a request to a running service, for curl and for Python.

    Args:
        keyed: Whether requests need an API key; if so, the first example creates a key.
    """
    message = f'{{"role": "user", "content": "{example}"}}'
    make, header, imported, key = "", "", "", '"none"'
    if keyed:
        make = f"""# requests need an API key (auth.required); set the service's REDIS_URL, then:
export TASC_KEY=$(tasc key create me --tasks {task})

"""
        header = """ \\
  -H "Authorization: Bearer $TASC_KEY\""""
        imported, key = "import os\n", 'os.environ["TASC_KEY"]'
    return f"""serving on {base} (Ctrl-C ends it)

{make}curl -s {base}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{{"model": "{task}", "messages": [{message}]}}'

{imported}from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key={key})
answer = client.chat.completions.create(model="{task}", messages=[{message}])
print(answer.choices[0].message.content)
"""
