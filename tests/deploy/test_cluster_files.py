"""Tests the settings and the Serve config of a cluster with our schema and Ray's schema."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from support import FakeClock, refused
from tasc_runtime.errors import SettingsError
from tasc_serve.app import NAME, Deployed, app
from tasc_serve.settings import ServeSettings, load_settings
from tasc_store import StoreUnreachable, UnknownTask

DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS = DEPLOY / "serve-cluster.yaml"


@pytest.fixture
def config() -> Any:
    return yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text("utf-8"))


@pytest.fixture
def settings() -> ServeSettings:
    return load_settings(SETTINGS)


def test_ray_accepts_the_config_with_our_builder_and_settings_file(config):
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert (application.name, application.route_prefix) == (NAME, "/")
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    assert getattr(import_module(module), name) is app
    assert Deployed.model_validate(application["args"]).settings.name == SETTINGS.name


def test_ray_request_timeout_exceeds_the_service_timeout(config, settings):
    limits = settings.limits
    longest_s = max(limits.request_timeout_s, limits.upload_timeout_s)
    assert config["http_options"]["request_timeout_s"] == 2 * longest_s  # as `tasc serve` has it


def test_cluster_requires_keys_and_has_two_replicas_and_gateways(settings):
    assert settings.auth.required
    assert min(settings.http.gateways, *(task.replicas for task in settings.tasks)) >= 2


def test_ray_head_exits_if_its_dashboard_cannot_start():
    """Otherwise Ray continues without it, and nothing can be deployed."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert "--include-dashboard=true" in compose["services"]["ray-head"]["command"]
    file = DEPLOY / "kubernetes" / "ray-service.yaml"
    service, *_ = yaml.safe_load_all(file.read_text("utf-8"))
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert head["include-dashboard"] == "true"


@pytest.fixture
def digests(monkeypatch):
    """The answers of the store: first errors, then digests. The last answer is repeated."""
    answers = [{"massive_en": "digest", "pos_ewt": "digest"}]

    def newest(settings, redis_url):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setenv("REDIS_URL", "redis://unused")
    monkeypatch.setattr("tasc_serve.app.newest_digests", newest)
    return answers


def test_application_waits_for_redis_and_has_a_deployment_for_each_task(
    monkeypatch, digests, settings
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    digests[:0] = [StoreUnreachable("no Redis"), UnknownTask("no task"), UnknownTask("no task")]
    built = app(Deployed(settings=SETTINGS))
    assert (len(digests), built._bound_deployment.name) == (1, "gateway")
    assert set(built._bound_deployment.init_args[2]) == {task.name for task in settings.tasks}


def test_application_fails_if_its_tasks_remain_unregistered(monkeypatch, digests):
    clock = FakeClock()
    monkeypatch.setattr("time.monotonic", clock)
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(clock, "now", clock.now + 60))
    digests[:] = [UnknownTask("no task")]
    with pytest.raises(UnknownTask):
        app(Deployed(settings=SETTINGS))


def test_missing_redis_url_is_named_in_the_error(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    with refused(SettingsError, "REDIS_URL"):
        app(Deployed(settings=SETTINGS))


def test_unknown_argument_is_refused():
    with refused(ValueError, "setings"):
        Deployed.model_validate({"setings": "/etc/tasc/serve-cluster.yaml"})
