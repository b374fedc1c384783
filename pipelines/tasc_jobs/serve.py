"""Run the service from settings until told to end. It expects a Ray that is running."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tasc_jobs.runtime.progress import note
from tasc_serve import app
from tasc_serve.settings import ServeSettings


def logical_cpus(settings: ServeSettings) -> int:
    """Logical CPUs a Ray of our own needs for all replicas, gateways and Serve itself."""
    replicas = sum(task.replica_range[1] * task.num_cpus for task in settings.tasks)
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
    try:
        base = app.start(settings, redis_url, came_up, partial(say_of_task, say))
        say("every task answers")
        print(usage_of(base, settings.tasks[0].name, example), flush=True)
        wait()
    finally:
        with suppress(Exception):  # what brought us here is the error to show
            app.stop(settings.limits.drain_timeout_s)


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
