"""Put the service together as one Ray Serve application, start it and update it.

Ray must be initialised; who started Ray stops it. Ray's own tools (``serve deploy``, ``serve run``,
KubeRay) import `app`: they listen where their file says, so that the settings' ``http.host`` and
``http.port`` mean nothing there.

A task's replicas are bound to a digest of what their engine is built of. Deploying again after that
has changed has Serve replace the task's replicas by a rolling update, while others stay.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingPolicy, HTTPOptions, RequestRouterConfig
from ray.serve.schema import ApplicationStatus, LoggingConfig

from tasc_runtime.engine.versions import engine_digest
from tasc_runtime.errors import ServiceError, SettingsError
from tasc_serve.gateway import Gateway
from tasc_serve.replica.start_notes import start_notes
from tasc_serve.routing.autoscaling import replicas_needed
from tasc_serve.routing.replica_router import ChosenReplicaRouter
from tasc_serve.settings import ServedTask, ServeSettings, load_settings, require_free
from tasc_store import StoreUnreachable, TaskStore, UnknownTask, connect
from tasc_store.embedded import free_port

NAME = "tasc"
# An import path, so that replicas alone import torch and transformers, which takes seconds and
# hundreds of megabytes.
_REPLICA = "tasc_serve.replica.replica.TaskReplica"
_DRAIN_MARGIN_S = 5.0
_STORE_LOOK_S = 1.0
# A replica that ends waits this long, and again while it has requests. Gateways may still choose a
# task's replica meanwhile: they hear of its end later than it does.
_DRAIN_CHECK_S = 0.5
_LOOKS = 3  # at how busy replicas are, in the time whose mean counts; Serve's own default
_ROUTER: Any = ChosenReplicaRouter  # Ray's types name no class here, its documents do
_ROUTED = RequestRouterConfig(request_router_class=_ROUTER)
log = logging.getLogger(__name__)
_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


# What this process deploys first replaces whatever ran before: settings and code may differ.
_PROCESS = uuid.uuid4().hex

Digests = Mapping[str, str]


def newest_digests(settings: ServeSettings, redis_url: str) -> dict[str, str]:
    """The `engine_digest` of each task's newest record.

    Raises:
        UnknownTask: There is no such task.
        StoreError: Redis cannot be reached.
        ValueError: A record is unreadable.
    """
    with connect(redis_url) as client:
        store = TaskStore(client)
        return {task.name: engine_digest(store.get(task.name)) for task in settings.tasks}


def build(settings: ServeSettings, redis_url: str, digests: Digests) -> serve.Application:
    """The application: one deployment per task, and the gateway in front of them.

    Args:
        digests: Of each task, the `engine_digest` of the record that its replicas serve.
    """
    replicas = {
        task.name: _versioned(_replica(settings, task), digests[task.name]).bind(
            settings, redis_url, task, digests[task.name]
        )
        for task in settings.tasks
    }
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        num_replicas=settings.http.gateways,
        **_at_most(settings.http.max_gateways_per_node),
        ray_actor_options={"num_cpus": settings.http.gateway_num_cpus},
        # Queues of replicas are bounded; this is a coarse guard of what does not generate.
        max_ongoing_requests=2 * settings.capacity,
        max_queued_requests=settings.capacity,
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_S,
        health_check_period_s=2,
    )
    return _versioned(gateway).bind(settings, redis_url, replicas)


def listen(settings: ServeSettings) -> str:
    """Start Ray Serve and its proxies; returns the base URL at which the application will answer.

    Raises:
        ServiceError: The port is taken.
    """
    host, port = settings.http.host, settings.http.port or free_port(settings.http.host)
    require_free(host, port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    longest_s = max(settings.limits.request_timeout_s, settings.limits.upload_timeout_s)
    # Ours ends a request first; this one only frees what Ray itself still holds.
    options = HTTPOptions(host=host, port=port, request_timeout_s=2 * longest_s)
    serve.start(http_options=options, logging_config=_LOGGING)
    return f"http://{host}:{port}"


def start(
    settings: ServeSettings,
    redis_url: str,
    digests: Digests | None = None,
    on_running: Callable[[str, int], None] = lambda deployment, running: None,
    on_note: Callable[[str, str], None] = lambda task, note: None,
    base: str | None = None,
) -> str:
    """Run the application on the Ray this process is connected to; returns its base URL.

    Returns once every task answers.

    Args:
        digests: See `build`; unset: those of the newest records.
        on_running: Called with a deployment (a task's name or ``gateway``) and how many of its
            replicas run, whenever there are more.
        on_note: Called with a task and a note of what takes its replica long, on another thread.
        base: What `listen` returned; unset: it is called.

    Raises:
        ServiceError: The port is taken, or a deployment does not come up.
        StoreError: Redis cannot be reached.
    """
    base = base or listen(settings)
    digests = newest_digests(settings, redis_url) if digests is None else digests
    tasks = {task.name for task in settings.tasks}
    with start_notes(redis_url, tasks, on_note):
        update(settings, redis_url, digests)
        _wait_until_ready(base, tasks, settings.limits.start_timeout_s, Arrivals(on_running))
    return base


def update(settings: ServeSettings, redis_url: str, digests: Digests) -> None:
    """Deploy the application. Replicas whose digest has changed are replaced one after the other.

    Returns at once: what runs goes on to answer until its successor does.
    """
    application = build(settings, redis_url, digests)
    serve.run_many(
        [serve.RunTarget(application, name=NAME, logging_config=_LOGGING)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def rollout() -> tuple[ApplicationStatus, str]:
    """Serve's status of the application, and what it says of deployments that are not healthy."""
    status = serve.status().applications.get(NAME)
    if status is None:
        return ApplicationStatus.NOT_STARTED, "no application"
    return status.status, _reasons(status)


def stop(drain_timeout_s: float = 0) -> None:
    """End the application: gateways take no more requests and end what they have, then all stop.

    Args:
        drain_timeout_s: How long gateways may take for it.
    """
    try:
        gateways: Any = serve.get_deployment_handle("gateway", NAME)
        if not gateways.is_initialized:  # no event loop runs here: its calls need one of their own
            gateways._init(_run_router_in_separate_loop=True)
        limit_s = drain_timeout_s + _DRAIN_MARGIN_S
        gateways.broadcast("drain", drain_timeout_s).results(timeout_s=limit_s)
    except Exception as error:  # gateways that do not answer are stopped like the others
        log.warning("the gateways were not drained: %r", error)
    serve.delete(NAME)


def _replica(settings: ServeSettings, task: ServedTask) -> Any:
    deployment: Any = serve.deployment(
        name=task.name,
        **_replicas_of(settings, task),
        ray_actor_options={"num_cpus": task.num_cpus, "num_gpus": task.num_gpus},
        # Calls do not count here, gateways' connections do; a rolling update doubles the gateways.
        max_ongoing_requests=4 * settings.http.gateways + 16,
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_S,
        health_check_period_s=2,
        request_router_config=_ROUTED,
        max_surge_percent=task.max_surge_percent,
    )
    return deployment(_REPLICA)


def _versioned(deployment: Any, digest: str = "") -> Any:
    """A deployment whose replicas Serve keeps where it is deployed again with the same digest.

    Without a version Serve replaces all replicas of an application each time. It has the option for
    its own deployments alone; for an application that is deployed by a config file it is ignored,
    and the config's ``args`` count.
    """
    return deployment.options(version=f"{_PROCESS}-{digest}", _internal=True)


def _replicas_of(settings: ServeSettings, task: ServedTask) -> dict[str, Any]:
    """How many there are: always so many, or as many as their requests call for; and where."""
    spread, scaling = _at_most(task.max_replicas_per_node), task.autoscaling
    if scaling is None:
        return {"num_replicas": task.replicas, **spread}
    config = scaling.model_dump(exclude={"target_ongoing_requests", "look_back_period_s"}) | {
        "target_ongoing_requests": scaling.target_ongoing_requests or settings.engine.rows,
        "look_back_period_s": scaling.look_back_period_s,
        "metrics_interval_s": scaling.look_back_period_s / _LOOKS,
        "policy": AutoscalingPolicy(policy_function=replicas_needed),
    }
    return {"autoscaling_config": config, **spread}


def _at_most(per_node: int | None) -> dict[str, Any]:
    return {} if per_node is None else {"max_replicas_per_node": per_node}


class Arrivals:
    """Tells of replicas that run now and did not when it looked before."""

    def __init__(self, on_running: Callable[[str, int], None]) -> None:
        self._on_running = on_running
        self._seen: dict[str, int] = {}

    def look(self, deployments: Mapping[str, Any]) -> None:
        """At what Serve says of each deployment."""
        for name, found in deployments.items():
            running = found.replica_states.get("RUNNING", 0)
            if running > self._seen.get(name, 0):
                self._seen[name] = running
                self._on_running(name, running)


def _wait_until_ready(base: str, tasks: set[str], timeout_s: float, arrivals: Arrivals) -> None:
    deadline = time.monotonic() + timeout_s
    # One client, since making one takes 20 ms. A connection that is kept would be answered by an
    # HAProxy that has been replaced.
    one_use = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=base, timeout=10, limits=one_use) as client:
        while True:
            ready = _ready(client) == tasks
            status = serve.status().applications.get(NAME)
            if status:
                arrivals.look(status.deployments)
            if ready:
                return
            if status and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise ServiceError(f"the service did not come up: {_reasons(status)}")
            if time.monotonic() > deadline:
                why = _reasons(status) if status else "no application"
                raise ServiceError(f"the service was not ready within {timeout_s:g} s: {why}")
            time.sleep(0.1)


def _ready(client: httpx.Client) -> set[str]:
    """The tasks that answer; none while the proxy has no route yet."""
    try:
        response = client.get("/readyz")
    except httpx.HTTPError:
        return set()
    return set(response.json()["tasks"]) if response.status_code == 200 else set()


def _reasons(status: Any) -> str:
    """What Serve says of deployments that are not healthy."""
    reasons = [
        f"{name}: {found.message or found.status.value}"
        for name, found in status.deployments.items()
        if found.status.value != "HEALTHY"
    ]
    return "; ".join(reasons) or status.message or str(status.status)


class Deployed(BaseModel):
    """``args`` of an application in Ray's Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: Path = Field(description="the settings file, at the same path on every node")
    revision: str = Field(
        "", description="change it to deploy again: Serve ignores a config that has not changed"
    )


def app(args: Deployed) -> serve.Application:
    """The application of the settings file that ``args`` name.

    Raises:
        SettingsError: The file is at fault, or neither it nor ``REDIS_URL`` says where Redis is.
        StoreError: Redis cannot be reached, or has no such task, for ``limits.start_timeout_s``.
    """
    settings = load_settings(args.settings)
    redis_url = settings.store_url(os.environ.get("REDIS_URL"))
    if not redis_url:
        raise SettingsError(
            f"{args.settings} has no redis_url and REDIS_URL is not set; set one of them, since a"
            " Redis server of our own would be on one node only"
        )
    return build(settings, redis_url, _digests_once_there(settings, redis_url))


def _digests_once_there(settings: ServeSettings, redis_url: str) -> dict[str, str]:
    """`newest_digests`, once Redis answers and has the tasks.

    On Kubernetes all starts at once, and Serve builds an application whose build failed only when
    its config changes.
    """
    said, deadline = "", time.monotonic() + settings.limits.start_timeout_s
    while True:
        try:
            return newest_digests(settings, redis_url)
        except (StoreUnreachable, UnknownTask) as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != said:
                said = str(error)
                log.warning("the application is built once its tasks are there: %s", said)
        time.sleep(_STORE_LOOK_S)
