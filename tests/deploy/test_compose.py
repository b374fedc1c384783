"""Tests the compose file as far as possible without a container engine."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from tasc_serve.settings import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w${}:.-]*")
GIVEN = {"REDIS_PASSWORD": "r", "RAY_AUTH_TOKEN": "t", "GRAFANA_PASSWORD": "g"}


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Build(Shape):
    context: Path
    dockerfile: Path
    target: Literal["cpu", "cuda"]


class Health(Shape):
    test: list[str] = Field(default_factory=list)
    interval: str = ""
    timeout: str = ""
    retries: int = 0
    start_period: str = ""
    disable: bool = False


class Needs(Shape):
    condition: Literal["service_healthy"]


class Service(Shape):
    """The fields that one of our services may have."""

    image: str
    user: str = Field(pattern=r"[1-9]\d*:[1-9]\d*")
    restart: Literal["unless-stopped", "on-failure", "no"]
    cap_drop: list[Literal["ALL"]] = Field(min_length=1)
    security_opt: list[Literal["no-new-privileges:true"]] = Field(min_length=1)
    healthcheck: Health
    logging: dict[str, Any]
    build: Build | None = None
    init: bool = False
    entrypoint: list[str] = Field(default_factory=list)
    command: list[str] | str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    volumes: list[str] = Field(default_factory=list)
    ports: list[str] = Field(default_factory=list)
    depends_on: dict[str, Needs] = Field(default_factory=dict)
    hostname: str = ""
    network_mode: str = ""
    profiles: list[str] = Field(default_factory=list)
    shm_size: str = ""
    stop_grace_period: str = ""


class Compose(BaseModel):
    model_config = ConfigDict(extra="ignore")  # the x- parts are merged into services already

    name: str
    services: dict[str, Service]
    volumes: dict[str, None]


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
def compose(text) -> Compose:
    return Compose.model_validate(yaml.safe_load(filled(text)))


def test_the_services_are_the_ones_meant(compose):
    wanted = "redis ray-head ray-worker service batches tools balancer prometheus grafana"
    assert list(compose.services) == wanted.split()


def test_docker_accepts_both_files(text, tmp_path: Path):
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True)
    if shutil.which("docker") is None or plugin.returncode != 0:
        pytest.skip("docker has no compose plugin here")
    secrets = tmp_path / "secrets.env"
    secrets.write_text("".join(f"{name}={value}\n" for name, value in GIVEN.items()))
    files = [f"-f{DEPLOY / name}" for name in ("compose.yaml", "compose.cuda.yaml")]
    command = ["docker", "compose", *files, "--env-file", str(secrets), "config", "-q"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_images_are_pinned_by_tag(compose):
    images = [service.image for service in compose.services.values()]
    assert [image for image in images if not PINNED.fullmatch(image)] == []


def test_what_is_mounted_is_there_and_read_only(compose):
    mounts = [v for service in compose.services.values() for v in service.volumes]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) >= 12
    for mount in files:
        source, _, mode = mount.split(":")
        assert (DEPLOY / source).exists(), mount
        assert mode == "ro", mount
    assert {m.split(":")[0] for m in mounts if not m.startswith(".")} == set(compose.volumes)


def test_ports_are_published_once_and_on_loopback_only(compose):
    published = [port for service in compose.services.values() for port in service.ports]
    assert all(port.startswith("127.0.0.1:") for port in published)
    outside = [port.split(":")[1] for port in published]
    assert sorted(outside) == ["3000", "8080", "8265", "9090"]


def test_rays_store_does_not_take_the_port_of_redis(compose):
    head, worker = (str(compose.services[name].command) for name in ("ray-head", "ray-worker"))
    assert "--port=6380" in shlex.split(head)
    assert "--address=ray-head:6380" in shlex.split(worker)
    redis_port = re.search(r"^port (\d+)$", (DEPLOY / "redis.conf").read_text("utf-8"), re.M)
    assert redis_port is not None
    assert redis_port[1] == "6379"
    assert "@redis:6379/0" in compose.services["ray-worker"].environment["REDIS_URL"]


def test_the_replicas_of_the_settings_fit_into_one_worker(compose):
    settings = load_settings(DEPLOY / "serve-cluster.yaml")
    (cpus,) = re.findall(r"--num-cpus=(\d+)", str(compose.services["ray-worker"].command))
    needed = sum(task.replicas * task.num_cpus for task in settings.tasks)
    needed += settings.http.gateways * settings.http.gateway_num_cpus
    assert int(cpus) >= needed


def test_every_service_that_lasts_or_that_others_need_is_watched(compose):
    needed = {name for service in compose.services.values() for name in service.depends_on}
    for name, service in compose.services.items():
        lasts = service.restart == "unless-stopped" and name != "batches"
        assert bool(service.healthcheck.test) == lasts, name
        assert service.healthcheck.disable != lasts, name
        assert lasts or name not in needed, name


def test_secrets_come_from_the_environment_file_alone(text):
    example = (DEPLOY / "example.env").read_text("utf-8")
    values = dict(line.split("=", 1) for line in example.splitlines() if "=" in line[:30])
    assert {name for name, value in values.items() if not value} == set(GIVEN)
    required = {m[1] for m in VARIABLE.finditer(text) if m[2] == ":?"}
    assert required == set(GIVEN)
    assert {m[1] for m in VARIABLE.finditer(text)} == set(values)
    assert ".env" in (ROOT / ".gitignore").read_text("utf-8").split()


def test_redis_can_be_full(compose):
    started = compose.services["redis"].entrypoint
    assert re.fullmatch(r"[1-9]\d*gb", started[started.index("--maxmemory") + 1])


def test_a_stopped_node_has_time_to_finish(compose):
    drain = yaml.safe_load((DEPLOY / "serve-cluster.yaml").read_text("utf-8"))["limits"]
    for name in ("ray-head", "ray-worker"):
        node = compose.services[name]
        rays = int(node.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert int(node.stop_grace_period.removesuffix("s")) > rays > drain["drain_timeout_s"]


def test_grafana_finds_prometheus_and_the_dashboards(compose):
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    # Prometheus shares the load balancer's network, and has no other port.
    assert source["url"] == "http://balancer:9090"
    assert compose.services["prometheus"].network_mode == "service:balancer"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    mounted = dict(v.split(":")[1::-1] for v in compose.services["grafana"].volumes)
    folder = DEPLOY / mounted[provider["options"]["path"]]
    assert len(list(folder.glob("*.json"))) >= 2


def test_gpus_are_given_to_the_workers(compose):
    added = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text("utf-8"))["services"]
    assert set(added) == {"ray-worker"}
    assert set(added) <= set(compose.services)
