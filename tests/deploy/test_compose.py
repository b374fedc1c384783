"""Tests the compose file as far as possible without a container engine."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasc_serve.settings import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w${}:.-]*")
GIVEN = {"REDIS_PASSWORD": "r", "RAY_AUTH_TOKEN": "t", "GRAFANA_PASSWORD": "g"}


# The fields that our services may have; a typo is none of them.
FIELDS = {
    *("image", "user", "restart", "cap_drop", "security_opt", "healthcheck", "logging", "build"),
    *("init", "entrypoint", "command", "environment", "volumes", "ports", "depends_on", "hostname"),
    *("network_mode", "profiles", "shm_size", "stop_grace_period"),
}
HEALTH_FIELDS = {"test", "interval", "timeout", "retries", "start_period", "disable"}


def filled(text: str) -> str:
    """Returns the file with its variables replaced, as compose does it."""

    def value(found: re.Match[str]) -> str:
        name, operator, other = found.groups()
        if operator == ":-":
            return other
        assert operator == ":?", f"{name} has neither a default nor a message"
        return GIVEN[name]

    return VARIABLE.sub(value, text)


@pytest.fixture(scope="module")
def text() -> str:
    return (DEPLOY / "compose.yaml").read_text("utf-8")


@pytest.fixture(scope="module")
def compose(text) -> dict[str, Any]:
    return yaml.safe_load(filled(text))


@pytest.fixture(scope="module")
def services(compose) -> dict[str, Any]:
    return compose["services"]


def test_services_have_only_known_fields(services):
    wanted = "redis ray-head ray-worker service batches tools balancer prometheus grafana"
    assert list(services) == wanted.split()
    for name, service in services.items():
        assert service.keys() <= FIELDS, name
        assert service["healthcheck"].keys() <= HEALTH_FIELDS, name
        assert service.get("build", {"target": "cpu"})["target"] in ("cpu", "cuda"), name
        needs = service.get("depends_on", {}).values()
        assert all(need == {"condition": "service_healthy"} for need in needs), name


def test_no_service_runs_as_root_or_gains_privileges(services):
    for name, service in services.items():
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] in ("unless-stopped", "on-failure", "no"), name


def test_docker_accepts_both_compose_files(text, tmp_path: Path):
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True)
    if shutil.which("docker") is None or plugin.returncode != 0:
        pytest.skip("docker has no compose plugin here")
    secrets = tmp_path / "secrets.env"
    secrets.write_text("".join(f"{name}={value}\n" for name, value in GIVEN.items()))
    files = [f"-f{DEPLOY / name}" for name in ("compose.yaml", "compose.cuda.yaml")]
    command = ["docker", "compose", *files, "--env-file", str(secrets), "config", "-q"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_images_are_pinned_by_tag(services):
    images = [service["image"] for service in services.values()]
    assert [image for image in images if not PINNED.fullmatch(image)] == []


def test_mounted_files_exist_and_are_read_only(services, compose):
    mounts = [v for service in services.values() for v in service.get("volumes", ())]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) >= 12
    for mount in files:
        source, _, mode = mount.split(":")
        assert (DEPLOY / source).exists(), mount
        assert mode == "ro", mount
    assert {m.split(":")[0] for m in mounts if not m.startswith(".")} == set(compose["volumes"])


def test_ports_are_published_once_and_only_on_loopback(services):
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    outside = [port.split(":")[1] for port in published]
    assert sorted(outside) == ["3000", "8080", "8265", "9090"]


def test_ray_and_redis_have_different_ports(services):
    head, worker = (services[name]["command"] for name in ("ray-head", "ray-worker"))
    assert "--port=6380" in shlex.split(head)
    assert "--address=ray-head:6380" in shlex.split(worker)
    redis_port = re.search(r"^port (\d+)$", (DEPLOY / "redis.conf").read_text("utf-8"), re.M)
    assert redis_port is not None
    assert redis_port[1] == "6379"
    assert "@redis:6379/0" in services["ray-worker"]["environment"]["REDIS_URL"]


def test_configured_replicas_fit_into_one_worker(services):
    settings = load_settings(DEPLOY / "serve-cluster.yaml")
    (cpus,) = re.findall(r"--num-cpus=(\d+)", services["ray-worker"]["command"])
    needed = sum(task.replicas * task.num_cpus for task in settings.tasks)
    needed += settings.http.gateways * settings.http.gateway_num_cpus
    assert int(cpus) >= needed


def test_long_running_services_and_dependencies_have_health_checks(services):
    needed = {name for service in services.values() for name in service.get("depends_on", ())}
    for name, service in services.items():
        lasts, health = service["restart"] == "unless-stopped" and name != "batches", "healthcheck"
        assert bool(service[health].get("test")) == lasts, name
        assert service[health].get("disable", False) != lasts, name
        assert lasts or name not in needed, name


def test_secrets_come_only_from_the_environment_file(text):
    example = (DEPLOY / "example.env").read_text("utf-8")
    values = dict(line.split("=", 1) for line in example.splitlines() if "=" in line[:30])
    assert {name for name, value in values.items() if not value} == set(GIVEN)
    required = {m[1] for m in VARIABLE.finditer(text) if m[2] == ":?"}
    assert required == set(GIVEN)
    assert {m[1] for m in VARIABLE.finditer(text)} == set(values)
    assert ".env" in (ROOT / ".gitignore").read_text("utf-8").split()


def test_redis_has_a_memory_limit(services):
    started = services["redis"]["entrypoint"]
    assert re.fullmatch(r"[1-9]\d*gb", started[started.index("--maxmemory") + 1])


def test_stopped_node_has_time_to_drain(services):
    drain = yaml.safe_load((DEPLOY / "serve-cluster.yaml").read_text("utf-8"))["limits"]
    for name in ("ray-head", "ray-worker"):
        node = services[name]
        rays = int(node["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert int(node["stop_grace_period"].removesuffix("s")) > rays > drain["drain_timeout_s"]


def test_grafana_finds_prometheus_and_the_dashboards(services):
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    # Prometheus shares the load balancer's network, and has no other port.
    assert source["url"] == "http://balancer:9090"
    assert services["prometheus"]["network_mode"] == "service:balancer"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    mounted = dict(v.split(":")[1::-1] for v in services["grafana"]["volumes"])
    folder = DEPLOY / mounted[provider["options"]["path"]]
    assert len(list(folder.glob("*.json"))) >= 2


def test_gpus_are_assigned_to_the_workers(services):
    added = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text("utf-8"))["services"]
    assert set(added) == {"ray-worker"}
    assert set(added) <= set(services)
