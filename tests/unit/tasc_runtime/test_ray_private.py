"""Tests that the installed Ray has the private parts that `ray_private` depends on."""

import inspect
from dataclasses import fields
from pathlib import Path

import ray
from ray import serve
from ray._private import ray_constants, services, worker
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve.handle import DeploymentHandle

from tasc_runtime import ray_private


def test_installed_ray_version_is_the_version_of_the_private_parts() -> None:
    """After an upgrade, check each part of `ray_private` before you change the version there."""
    assert ray.__version__ == ray_private.CHECKED


def test_deployment_version_can_be_set_to_keep_replicas() -> None:
    deployment = serve.deployment(lambda: None, name="any")
    assert ray_private.versioned(deployment, "7").version == "7"


def test_ray_handles_have_the_options_that_we_set() -> None:
    assert "_by_reference" in {field.name for field in fields(DynamicHandleOptions)}
    names = {field.name for field in fields(InitHandleOptions)}
    assert "_run_router_in_separate_loop" in names
    assert isinstance(DeploymentHandle.is_initialized, property)


def test_local_ray_has_the_parts_that_we_replace() -> None:
    before = ray_constants.ENABLE_RAY_CLUSTER, worker.print_to_stdstream
    with ray_private.loopback_only() as variables, ray_private.messages_to_stderr():
        assert services.get_node_ip_address() == "127.0.0.1"
        assert variables == {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
        assert worker.print_to_stdstream is not before[1]
    assert (ray_constants.ENABLE_RAY_CLUSTER, worker.print_to_stdstream) == before


def test_haproxy_configuration_has_each_line_that_we_change() -> None:
    config = (
        HAPROXY_CONFIG_TEMPLATE.replace("{{ config.frontend_host }}", "10.0.0.3")
        .replace("{{ config.frontend_port }}", "8000")
        .replace("{{ config.log_target }}", "127.0.0.1:514")
        .replace("{{ config.error_file_path }}", "rays.http")
    )
    changed = ray_private.haproxy_config(config, Path("page"), "x-arrival")
    for line, left in {
        "frontend prometheus\n": False,
        "listen stats\n": False,
        "option splice-request\n": False,
        "option splice-response\n": False,
        "log 127.0.0.1:514 local0 info\n": False,
        "return status 404": False,
        "rays.http": False,
        "errorfile 502 page\n": True,
        "errorfile 503 page\n": True,
        "errorfile 504 page\n": True,
        "return status 503 errorfile page\n": True,
        "    http-request set-header x-arrival %[date(0,us)]\n": True,
    }.items():
        assert left or line in config, line
        assert (line in changed) == left, line
