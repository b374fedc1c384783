"""Tests the container file as far as possible without a container engine."""

import fnmatch
import re
import tomllib
from pathlib import Path

import yaml

from tasc_serve.http import ray_proxy
from tasc_serve.settings import HttpSettings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"
Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """Instructions by stage; those before the first ``FROM`` are under ''."""
    text = re.sub(r"\\\n\s*", "", FILE.read_text("utf-8"))
    found: dict[str, list[Instruction]] = {"": []}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, rest = line.split(None, 1)
        if word == "FROM":
            found[rest.split(" AS ")[1]] = []
        list(found.values())[-1].append((word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [rest for found, rest in stages()[stage] if found == word]


def test_image_does_not_run_as_root_and_defaults_to_cpu():
    for target in ("cpu", "cuda"):
        assert stages()[target][-1] == ("USER", "10001:10001")
        assert of(target, "FROM")[0].startswith("runtime ")
    assert "--uid 10001" in " ".join(of("runtime", "RUN"))
    assert list(stages())[-1] == "cpu"


def test_base_image_is_pinned_to_the_projects_python_version():
    (python,) = of("", "ARG")
    assert re.fullmatch(r"PYTHON=3\.11\.\d+-slim-bookworm", python)
    assert of("base", "FROM") == ["python:${PYTHON} AS base"]


def test_stages_start_from_earlier_stages():
    names = list(stages())
    for index, name in enumerate(names[2:], 2):
        assert of(name, "FROM")[0].split()[0] in names[:index]


def test_image_contains_no_secrets():
    text = FILE.read_text("utf-8")
    declared = re.findall(r"^(?:ARG|ENV|\s{4})\s*(\w+)=", text, re.M)
    assert len(declared) >= 8
    assert [n for n in declared if re.search("PASSWORD|SECRET|TOKEN|KEY", n)] == []


def test_image_disables_usage_reports_and_requires_a_ray_token():
    environment = " ".join(of("runtime", "ENV"))
    never = ("RAY_USAGE_STATS_ENABLED=0", "OMP_WAIT_POLICY=PASSIVE", "RAY_AUTH_MODE=token")
    assert all(setting in environment for setting in never)
    assert len(of("runtime", "HEALTHCHECK")) == 1


def test_image_and_local_service_set_the_same_ray_serve_variables(tmp_path: Path):
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(of("runtime", "ENV"))))
    local = ray_proxy.environment(HttpSettings(), tmp_path)
    own = {name for name, value in local.items() if str(tmp_path) in value or "_PORT" in name}
    own.add("RAY_SERVE_HAPROXY_BINARY_PATH")
    assert environment.items() >= {n: v for n, v in local.items() if n not in own}.items()
    launcher = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts[launcher.name] == f"{ray_proxy.__name__}:main"


def test_page_for_two_hosts_sets_the_environment_variables_of_the_image():
    page = (ROOT / "docs" / "how-to" / "two-nodes.md").read_text("utf-8")
    ((_, lines),) = re.findall(r"cat > node.env\) <<(\w+)\n(.*?)\n\1\n", page, re.S)
    environment = dict(line.split("=", 1) for line in lines.splitlines())
    image = dict(re.findall(r"(\w+)=(\S+)", " ".join(of("runtime", "ENV"))))
    node = yaml.safe_load((FILE.parent / "compose.yaml").read_text("utf-8"))["x-node"]
    image["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = node["environment"][
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    ]
    del image["PYTHONUNBUFFERED"], image["RAY_SERVE_HAPROXY_BINARY_PATH"]
    own = {"RAY_SERVE_HAPROXY_BINARY_PATH", "RAY_AUTH_TOKEN", "REDIS_URL", "REDIS_PASSWORD"}
    assert {n: v for n, v in environment.items() if n not in own} == image
    assert environment.keys() >= own


def test_copied_files_exist_and_secrets_are_excluded_from_the_build():
    ignored = (FILE.parent / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    shown = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {
        source
        for stage in ("empty", "wheel")
        for line in of(stage, "COPY")
        for source in line.split()[:-1]
    }
    assert {name for name in copied if not name.startswith("services/")} == shown
    assert all((ROOT / name).exists() for name in copied)
    secrets = ["services/.env", "services/tasc_serve/__pycache__"]
    hidden = [line.removeprefix("**/") for line in ignored if line.startswith("**/")]
    assert all(any(fnmatch.fnmatch(Path(s).name, h) for h in hidden) for s in secrets)
