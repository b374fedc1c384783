"""Tests the Kubernetes files, as kustomize combines them, with Kubernetes's own schemas."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from tasc_serve.settings import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
JOBS = ["build-index", "generate"]
KUBERNETES = "1.29.0"  # the oldest that kustomization.yaml names
OPERATORS = {"PodMonitor", "ScrapeConfig", "RayService", "RayJob"}  # kinds of operators
Object = dict[str, Any]
# The fields of KubeRay's objects that our files use; a typo is none of them.
SERVICE = {
    *("serveConfigV2", "excludeHeadPodFromServeSvc", "rayClusterDeletionDelaySeconds"),
    "rayClusterConfig",
}
JOB = {
    *("entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes"),
    *("ttlSecondsAfterFinished", "submitterPodTemplate", "rayClusterSpec"),
}
CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
SCALING = {"enableInTreeAutoscaling", "autoscalerOptions"}
HEAD = {"rayStartParams", "template"}
WORKERS = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


@cache
def built(folder: str = "") -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH; its `kustomize` puts the files together")
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "deprecated" not in made.stderr
    return list(yaml.safe_load_all(made.stdout))


def one(kind: str, name: str, folder: str = "") -> Object:
    (found,) = (o for o in built(folder) if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def everything() -> list[Object]:
    return [*built(), *(o for job in JOBS for o in built(f"kubernetes/jobs/{job}"))]


def templates() -> dict[str, Object]:
    """Pod templates by their place in the files."""
    found: dict[str, Object] = {}

    def walk(at: str, value: Any) -> None:
        if isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                found[at] = value
            for key, inside in value.items():
                walk(f"{at}/{key}", inside)
        elif isinstance(value, list):
            for index, inside in enumerate(value):
                walk(f"{at}/{index}", inside)

    for thing in everything():
        walk(f"{thing['kind']}/{thing['metadata']['name']}", thing)
    return found


def containers() -> list[tuple[str, Object]]:
    return [(at, c) for at, t in templates().items() for c in t["spec"]["containers"]]


def test_built_in_objects_satisfy_the_kubernetes_schemas():
    validate = pytest.importorskip("kubernetes_validate").validate
    own = [o for o in everything() if o["kind"] not in OPERATORS]
    assert len(own) >= 16
    for thing in own:
        validate(thing, KUBERNETES, strict=True)


def test_ray_pods_satisfy_the_kubernetes_schemas():
    validate = pytest.importorskip("kubernetes_validate").validate
    pods = {at: t for at, t in templates().items() if at.startswith("Ray")}
    assert len(pods) == 2 + 2 * 3
    for at, template in pods.items():
        validate({"apiVersion": "v1", "kind": "Pod", **template}, KUBERNETES, strict=True)
        assert template["metadata"]["labels"]["component"] == "ray", at


def test_ray_service_contains_the_serve_config():
    config = yaml.safe_load(one("RayService", "tasc")["spec"]["serveConfigV2"])
    assert config == yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text("utf-8"))
    ServeDeploySchema.model_validate(config)


def test_configured_replicas_fit_into_the_minimum_number_of_workers():
    settings = load_settings(DEPLOY / "serve-cluster.yaml")
    (workers,) = one("RayService", "tasc")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    needed = sum(task.replicas * task.num_cpus for task in settings.tasks)
    needed += settings.http.gateways * settings.http.gateway_num_cpus
    assert workers["minReplicas"] * int(workers["rayStartParams"]["num-cpus"]) >= needed


def test_clusters_use_the_installed_ray_version_and_require_a_ray_token():
    service = one("RayService", "tasc")["spec"]
    assert service.keys() == SERVICE
    clusters = [service["rayClusterConfig"]]
    assert clusters[0].keys() == CLUSTER | SCALING
    for job in JOBS:
        spec = one("RayJob", job, f"kubernetes/jobs/{job}")["spec"]
        assert spec.keys() == JOB
        assert (spec["submissionMode"], spec["shutdownAfterJobFinishes"]) == ("K8sJobMode", True)
        assert spec["rayClusterSpec"].keys() == CLUSTER
        clusters.append(spec["rayClusterSpec"])
    for cluster in clusters:
        assert cluster["rayVersion"] == ray.__version__
        assert cluster["authOptions"] == {"mode": "token", "secretName": "tasc-ray"}
        assert cluster["headGroupSpec"].keys() == HEAD
        assert all(workers.keys() == WORKERS for workers in cluster["workerGroupSpecs"])


def test_settings_are_mounted_at_the_path_in_the_serve_config():
    (application,) = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())["applications"]
    path = Path(application["args"]["settings"])
    nodes = [(at, t["spec"]) for at, t in templates().items() if at.startswith("RayService")]
    assert len(nodes) == 2
    for at, spec in nodes:
        (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "settings")
        (volume,) = (v for v in spec["volumes"] if v["name"] == "settings")
        data = one("ConfigMap", volume["configMap"]["name"])["data"]
        assert mount["mountPath"] == str(path.parent), at
        assert data[path.name] == (DEPLOY / path.name).read_text("utf-8")


def test_config_maps_and_claims_of_pods_exist():
    made = {(o["kind"], o["metadata"]["name"]) for o in built()}
    named = set()
    for template in templates().values():
        for volume in template["spec"].get("volumes", []):
            if "configMap" in volume:
                named.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                named.add(("PersistentVolumeClaim", claim))
    assert len(named) == 5
    assert named <= made


def test_services_select_pods_with_the_service_port():
    services = [o for o in built() if o["kind"] == "Service"]
    assert len(services) == 4
    for service in services:
        # KubeRay adds this one to the pods it makes.
        wanted = {k: v for k, v in service["spec"]["selector"].items() if "ray.io" not in k}
        ports = [
            {p["name"] for c in t["spec"]["containers"] for p in c["ports"]}
            for t in templates().values()
            if wanted.items() <= t["metadata"].get("labels", {}).items()
        ]
        assert ports, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in names for names in ports)


def test_no_container_runs_as_root_or_gains_privileges():
    assert len(containers()) == 3 + 2 + 2 * 3
    for at, template in templates().items():
        user = template["spec"]["securityContext"]
        assert user["runAsNonRoot"] is True, at
        assert user["runAsUser"] > 0, at
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}, at
    for at, container in containers():
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, at
        assert security["capabilities"] == {"drop": ["ALL"]}, at


def test_containers_have_resource_limits_and_pinned_images():
    for at, container in containers():
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), at
        assert "memory" in container["resources"]["limits"], at
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w-]*", container["image"]), at


def test_redis_memory_limit_is_below_the_container_limit():
    (container,) = one("StatefulSet", "redis")["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    full = re.fullmatch(r"(\d+)gb", command[command.index("--maxmemory") + 1])
    killed = re.fullmatch(r"(\d+)Gi", container["resources"]["limits"]["memory"])
    assert full
    assert killed
    assert int(full[1]) <= 2 / 3 * int(killed[1])


def test_long_running_containers_have_probes():
    # The batch worker proves that it is alive by its lease in Redis.
    lasting = [
        (at, c) for at, c in containers() if not at.startswith(("RayJob", "Deployment/batches"))
    ]
    assert len(lasting) == 4
    for at, container in lasting:
        assert {"livenessProbe", "readinessProbe"} <= set(container), at


def test_stopped_pod_has_time_to_drain():
    settings = yaml.safe_load((DEPLOY / "serve-cluster.yaml").read_text("utf-8"))
    drain = settings["limits"]["drain_timeout_s"]
    (waits,) = re.findall(r"timeout server (\d+)s", (DEPLOY / "haproxy.cfg").read_text("utf-8"))
    for at, template in templates().items():
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        if at.startswith("RayService"):
            given = {e["name"]: e.get("value") for e in template["spec"]["containers"][0]["env"]}
            assert grace > int(given["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) > drain
        if at == "Deployment/balancer/spec/template":
            assert grace > int(waits)


def test_secrets_are_references_and_a_page_shows_how_to_create_secrets():
    assert [o for o in everything() if o["kind"] == "Secret"] == []
    page = (DEPLOY.parent / "docs" / "how-to" / "kubernetes.md").read_text("utf-8")
    keys = {
        (e["valueFrom"]["secretKeyRef"]["name"], e["valueFrom"]["secretKeyRef"]["key"])
        for _, container in containers()
        for e in container.get("env", [])
        if "secretKeyRef" in e.get("valueFrom", {})
    }
    assert keys == {("tasc", "redis-url"), ("tasc", "redis-password")}
    for name, key in (*keys, ("tasc-ray", "auth_token")):
        assert re.search(rf"create secret generic {name} (?:.|\\\n)*--from-literal={key}=", page)
    assert "create secret tls tasc-tls" in page


def test_load_balancer_addresses_name_existing_services():
    (container,) = one("Deployment", "balancer")["spec"]["template"]["spec"]["containers"]
    variables = {e["name"]: e["value"] for e in container["env"]}
    config = (DEPLOY / "haproxy.cfg").read_text("utf-8")
    assert all(name in config for name in variables)
    service, namespace, rest = variables["TASC_GATEWAYS"].split(".", 2)
    assert one("Service", service)["metadata"]["namespace"] == namespace
    assert rest == "svc.cluster.local:8000"
    sd = one("ScrapeConfig", "tasc")["spec"]["httpSDConfigs"][0]["url"]
    assert sd == "http://tasc-operators.tasc.svc.cluster.local:8081/sd"
    assert one("Service", "tasc-operators")["spec"]["ports"][0]["port"] == 8081
