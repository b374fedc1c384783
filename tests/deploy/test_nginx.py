"""Tests what differs between the shipped nginx and HAProxy files, with a real nginx."""

import subprocess

from haproxy_process import get, post


def test_nginx_accepts_the_shipped_file_without_a_warning(nginx_command):
    checked = subprocess.run([*nginx_command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr


def test_operator_paths_and_large_bodies_get_openai_errors(nginx_balancer, nginx_ports):
    for path in ("/v1/tasks", "/sd", "/metrics", "/-/healthz"):
        refused = get(nginx_balancer + path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, None)
        assert get(f"http://127.0.0.1:{nginx_ports[1]}{path}").text in ("gateway0", "gateway1")
    large = post(nginx_balancer + "/v1/completions", content=bytes(5 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert post(nginx_balancer + "/v1/files", content=bytes(5 << 20)).status_code == 200
