"""Builds the service as one Ray Serve application, starts it and updates it.

Ray must be initialised; the code that started Ray must also stop it. Ray's own tools (``serve
deploy``, ``serve run``, KubeRay) import `app`. These tools listen at the address in their own
config file, so the settings' ``http.host`` and ``http.port`` have no effect.

Each replica is bound to a digest of the record fields that its engine is built from. If a task's
digest has changed at the next deployment, Serve replaces the task's replicas by a rolling update.
The replicas of other tasks are kept.
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
from tasc_runtime.ray_private import callable_without_loop, versioned
from tasc_serve.gateway import Gateway
from tasc_serve.replica.start_notes import start_notes
from tasc_serve.routing.autoscaling import replicas_needed
from tasc_serve.routing.replica_router import ChosenReplicaRouter
from tasc_serve.settings import ServedTask, ServeSettings, load_settings, require_free
from tasc_store import StoreUnreachable, TaskStore, UnknownTask, connect
from tasc_store.embedded import free_port

NAME = "tasc"
# An import path, so that only replicas import torch and transformers, which takes seconds and
# hundreds of megabytes.
_REPLICA = "tasc_serve.replica.replica.TaskReplica"
_DRAIN_MARGIN_S = 5.0
_STORE_LOOK_S = 1.0
# A stopping replica waits this long, repeatedly while it has requests. Gateways learn later that
# the replica stops, so they may still choose it in the meantime.
_DRAIN_CHECK_S = 0.5
_LOOKS = 3  # load samples in the averaging period; Serve's default
_ROUTER: Any = ChosenReplicaRouter  # Ray's types allow no class here, but its docs do
_ROUTED = RequestRouterConfig(request_router_class=_ROUTER)
log = logging.getLogger(__name__)
_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


# The first deployment by this process replaces all earlier replicas, as settings and code may
# differ.
_PROCESS = uuid.uuid4().hex

Digests = Mapping[str, str]


def newest_digests(settings: ServeSettings, redis_url: str) -> dict[str, str]:
    """Returns the `engine_digest` of each task's newest record.

    Raises:
        UnknownTask: A task does not exist.
        StoreError: Redis cannot be reached.
        ValueError: A record is unreadable.
    """
    with connect(redis_url) as client:
        store = TaskStore(client)
        return {task.name: engine_digest(store.get(task.name)) for task in settings.tasks}


def build(settings: ServeSettings, redis_url: str, digests: Digests) -> serve.Application:
    """Builds the application: one deployment per task, and the gateway in front of them.

    Args:
        digests: For each task, the `engine_digest` of the record that its replicas serve.
    """
    replicas = {
        task.name: _versioned(_replica(settings, task), digests[task.name]).bind(
            settings, redis_url, task, digests[task.name]
        )
        for task in settings.tasks
    }
    spread: Any = settings.http.max_gateways_per_node  # Ray's types forget None
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        num_replicas=settings.http.gateways,
        max_replicas_per_node=spread,
        ray_actor_options={"num_cpus": settings.http.gateway_num_cpus},
        # Replicas have bounded queues; this coarse limit is for requests that do not generate.
        max_ongoing_requests=2 * settings.capacity,
        max_queued_requests=settings.capacity,
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_S,
        health_check_period_s=2,
    )
    return _versioned(gateway).bind(settings, redis_url, replicas)


def listen(settings: ServeSettings) -> str:
    """Starts Ray Serve and its proxies; returns the base URL of the application.

    Raises:
        ServiceError: The port is taken.
    """
    host, port = settings.http.host, settings.http.port or free_port(settings.http.host)
    require_free(host, port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    longest_s = max(settings.limits.request_timeout_s, settings.limits.upload_timeout_s)
    # Our own timeout ends a request first; this one only frees Ray's resources.
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
    """Runs the application on the connected Ray cluster; returns its base URL.

    Returns once every task answers.

    Args:
        digests: See `build`; unset: the digests of the newest records.
        on_running: Called with a deployment (a task's name or ``gateway``) and its number of
            running replicas, whenever it increases.
        on_note: Called on another thread with a task and a note about slow work of its replica.
        base: The result of `listen`; unset: `listen` is called.

    Raises:
        ServiceError: The port is taken, or a deployment does not come up.
        StoreError: Redis cannot be reached.
    """
    base = base or listen(settings)
    digests = newest_digests(settings, redis_url) if digests is None else digests
    tasks = {task.name for task in settings.tasks}
    with start_notes(redis_url, tasks, on_note):
        update(settings, redis_url, digests)
        _wait_until_ready(base, tasks, settings.limits.start_timeout_s, on_running)
    return base


def update(settings: ServeSettings, redis_url: str, digests: Digests) -> None:
    """Deploys the application. Replicas with a changed digest are replaced one by one.

    Returns at once; old replicas answer until their successors do.
    """
    application = build(settings, redis_url, digests)
    serve.run_many(
        [serve.RunTarget(application, name=NAME, logging_config=_LOGGING)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def rollout() -> tuple[ApplicationStatus, str]:
    """Serve's status of the application, and its messages about unhealthy deployments."""
    status = serve.status().applications.get(NAME)
    if status is None:
        return ApplicationStatus.NOT_STARTED, "no application"
    return status.status, _reasons(status)


def stop(drain_timeout_s: float = 0) -> None:
    """Stops the application, after gateways have completed their requests.

    Args:
        drain_timeout_s: Maximum seconds to wait for these requests.
    """
    try:
        gateways = callable_without_loop(serve.get_deployment_handle("gateway", NAME))
        limit_s = drain_timeout_s + _DRAIN_MARGIN_S
        gateways.broadcast("drain", drain_timeout_s).results(timeout_s=limit_s)
    except Exception as error:  # gateways that do not answer are also stopped
        log.warning("the gateways were not drained: %r", error)
    serve.delete(NAME)


def _replica(settings: ServeSettings, task: ServedTask) -> Any:
    deployment: Any = serve.deployment(
        name=task.name,
        **_replicas_of(settings, task),
        ray_actor_options={
            "num_cpus": task.num_cpus,
            "num_gpus": task.num_gpus,
            "runtime_env": settings.engine_of(task).runtime_env,
        },
        # Limits gateways' connections, not calls; a rolling update doubles the number of gateways.
        max_ongoing_requests=4 * settings.http.gateways + 16,
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_S,
        health_check_period_s=2,
        request_router_config=_ROUTED,
        max_surge_percent=task.max_surge_percent,
    )
    return deployment(_REPLICA)


def _versioned(deployment: Any, digest: str = "") -> Any:
    """A deployment whose replicas Serve keeps if it is deployed again with the same digest."""
    return versioned(deployment, f"{_PROCESS}-{digest}")


def _replicas_of(settings: ServeSettings, task: ServedTask) -> dict[str, Any]:
    """Options for the number of replicas, fixed or by load, and for their placement."""
    spread, scaling = {"max_replicas_per_node": task.max_replicas_per_node}, task.autoscaling
    if scaling is None:
        return {"num_replicas": task.replicas, **spread}
    config = scaling.model_dump() | {
        "target_ongoing_requests": scaling.target_ongoing_requests or settings.engine_of(task).rows,
        "metrics_interval_s": scaling.look_back_period_s / _LOOKS,
        "policy": AutoscalingPolicy(policy_function=replicas_needed),
    }
    return {"autoscaling_config": config, **spread}


def report_arrivals(
    deployments: Mapping[str, Any], known: dict[str, int], on_running: Callable[[str, int], None]
) -> None:
    """Reports deployments that have more running replicas than in ``known``, and updates ``known``.

    Args:
        deployments: Serve's status of each deployment, by name.
        known: The last reported number of running replicas, by deployment.
        on_running: See `start`.
    """
    for name, found in deployments.items():
        running = found.replica_states.get("RUNNING", 0)
        if running > known.get(name, 0):
            known[name] = running
            on_running(name, running)


def _wait_until_ready(
    base: str, tasks: set[str], timeout_s: float, on_running: Callable[[str, int], None]
) -> None:
    deadline, known = time.monotonic() + timeout_s, dict[str, int]()
    # One client, since creating one takes 20 ms. A connection that is kept open would stay with an
    # HAProxy that was replaced.
    one_use = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=base, timeout=10, limits=one_use) as client:
        while True:
            ready = _ready(client) == tasks
            status = serve.status().applications.get(NAME)
            if status:
                report_arrivals(status.deployments, known, on_running)
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
    """Serve's messages about unhealthy deployments."""
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
    """Builds the application from the settings file in ``args``.

    Raises:
        SettingsError: The file is invalid, or neither the file nor ``REDIS_URL`` names Redis.
        StoreError: Redis is still unreachable, or a task is still missing, after
            ``limits.start_timeout_s``.
    """
    settings = load_settings(args.settings)
    redis_url = settings.store_url(os.environ.get("REDIS_URL"))
    if not redis_url:
        raise SettingsError(
            f"{args.settings} has no redis_url and REDIS_URL is not set; set one of them, since"
            " an embedded Redis server would run on one node only"
        )
    return build(settings, redis_url, _digests_once_there(settings, redis_url))


def _digests_once_there(settings: ServeSettings, redis_url: str) -> dict[str, str]:
    """Returns `newest_digests`, after Redis answers and has the tasks.

    On Kubernetes, all services start at once, and Serve rebuilds a failed application only when its
    config changes.
    """
    fault, deadline = "", time.monotonic() + settings.limits.start_timeout_s
    while True:
        try:
            return newest_digests(settings, redis_url)
        except (StoreUnreachable, UnknownTask) as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != fault:
                fault = str(error)
                log.warning("waiting for Redis and the tasks, to build the application: %s", fault)
        time.sleep(_STORE_LOOK_S)
