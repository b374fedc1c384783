"""Put the service together as one Ray Serve application, and start it.

It expects Ray to be initialised; who started Ray stops it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.schema import ApplicationStatus, LoggingConfig

from tasc_runtime.errors import ServiceError
from tasc_serve.gateway import Gateway
from tasc_serve.ports import free_port, require_free
from tasc_serve.replica.replica import TaskReplica
from tasc_serve.replica.start_notes import heard
from tasc_serve.routing.replica_router import ChosenReplicaRouter
from tasc_serve.settings import ServedTask, ServeSettings

NAME = "tasc"
_DRAIN_MARGIN_S = 5.0
_LOOKS = 3  # at how busy replicas are, in the time whose mean counts; Serve's own default
_ROUTER: Any = ChosenReplicaRouter  # Ray's types name no class here, its documents do
_ROUTED = RequestRouterConfig(request_router_class=_ROUTER)
log = logging.getLogger(__name__)
_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


def build(settings: ServeSettings, redis_url: str) -> serve.Application:
    """The application: one deployment per task, and the gateway in front of them."""
    replicas = {
        task.name: _replica(settings, task).bind(settings, redis_url, task)
        for task in settings.tasks
    }
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        num_replicas=settings.http.gateways,
        **_at_most(settings.http.max_gateways_per_node),
        ray_actor_options={"num_cpus": settings.http.gateway_num_cpus},
        # Our own bounded queue decides; this is a coarse guard above it.
        max_ongoing_requests=2 * _all_places(settings),
        max_queued_requests=_all_places(settings),
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        health_check_period_s=2,
    )
    return gateway.bind(settings, redis_url, replicas)


def start(
    settings: ServeSettings,
    redis_url: str,
    came_up: Callable[[str, int], None] = lambda deployment, running: None,
    told: Callable[[str, str], None] = lambda task, note: None,
) -> str:
    """Run the application on the Ray this process is connected to; returns its base URL.

    Returns once every task answers.

    Args:
        came_up: Told a deployment, a task's name or ``gateway``, and how many of its replicas run,
            whenever there are more.
        told: Told a task and what a replica of it says takes long, on a thread of its own.

    Raises:
        ServiceError: The port is taken, or a deployment does not come up.
        StoreError: Redis cannot be reached.
    """
    host, port = settings.http.host, settings.http.port or free_port(settings.http.host)
    require_free(host, port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    limits = settings.limits
    longest_s = max(limits.request_timeout_s, limits.upload_timeout_s)
    # Ours ends a request first; this one only frees what Ray itself still holds.
    options = HTTPOptions(host=host, port=port, request_timeout_s=2 * longest_s)
    serve.start(http_options=options, logging_config=_LOGGING)
    target = serve.RunTarget(build(settings, redis_url), name=NAME, logging_config=_LOGGING)
    base = f"http://{host}:{port}"
    tasks = {task.name for task in settings.tasks}
    with heard(redis_url, tasks, told):
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_ready(base, tasks, limits.start_timeout_s, Arrivals(came_up))
    return base


def stop(drain_timeout_s: float = 0) -> None:
    """End the application: gateways take no more requests and end what they have, then all stop.

    Args:
        drain_timeout_s: How long gateways may take for it.
    """
    try:
        gateways: Any = serve.get_deployment_handle("gateway", NAME)
        limit_s = drain_timeout_s + _DRAIN_MARGIN_S
        gateways.broadcast("drain", drain_timeout_s).results(timeout_s=limit_s)
    except Exception as error:  # gateways that do not answer are stopped like the others
        log.warning("the gateways were not drained: %r", error)
    serve.delete(NAME)


def _replica(settings: ServeSettings, task: ServedTask) -> Any:
    return serve.deployment(
        TaskReplica,
        name=task.name,
        **_replicas_of(settings, task),
        ray_actor_options={"num_cpus": task.num_cpus, "num_gpus": task.num_gpus},
        max_ongoing_requests=2 * _places(settings),
        graceful_shutdown_timeout_s=settings.limits.drain_timeout_s,
        health_check_period_s=2,
        request_router_config=_ROUTED,
    )


def _replicas_of(settings: ServeSettings, task: ServedTask) -> dict[str, Any]:
    """How many there are: always so many, or as many as their requests call for; and where."""
    spread, scaling = _at_most(task.max_replicas_per_node), task.autoscaling
    if scaling is None:
        return {"num_replicas": task.replicas, **spread}
    config = scaling.model_dump(exclude={"target_requests", "look_back_s"}) | {
        "target_ongoing_requests": scaling.target_requests or settings.engine.rows,
        "look_back_period_s": scaling.look_back_s,
        "metrics_interval_s": scaling.look_back_s / _LOOKS,
    }
    return {"autoscaling_config": config, **spread}


def _at_most(per_node: int | None) -> dict[str, Any]:
    return {} if per_node is None else {"max_replicas_per_node": per_node}


def _places(settings: ServeSettings) -> int:
    return settings.engine.rows + settings.limits.max_queued


def _all_places(settings: ServeSettings) -> int:
    """Of all replicas that there may be."""
    return _places(settings) * sum(task.replica_range[1] for task in settings.tasks)


class Arrivals:
    """Tells of replicas that run now and did not when it looked before."""

    def __init__(self, came_up: Callable[[str, int], None]) -> None:
        self._came_up = came_up
        self._seen: dict[str, int] = {}

    def look(self, deployments: Mapping[str, Any]) -> None:
        """At what Serve says of each deployment."""
        for name, found in deployments.items():
            running = found.replica_states.get("RUNNING", 0)
            if running > self._seen.get(name, 0):
                self._seen[name] = running
                self._came_up(name, running)


def _wait_until_ready(base: str, tasks: set[str], timeout_s: float, arrivals: Arrivals) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        ready = _ready(base) == tasks
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


def _ready(base: str) -> set[str]:
    """The tasks that answer; none while the proxy has no route yet."""
    try:
        response = httpx.get(f"{base}/readyz", timeout=10)
    except httpx.HTTPError:
        return set()
    return set(response.json()["tasks"]) if response.status_code == 200 else set()


def _reasons(status: Any) -> str:
    """What Serve says of deployments that are not healthy."""
    said = [
        f"{name}: {found.message or found.status.value}"
        for name, found in status.deployments.items()
        if found.status.value != "HEALTHY"
    ]
    return "; ".join(said) or status.message or str(status.status)
