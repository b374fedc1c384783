import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from gateway_stub import CONFIG, eventually


def answered(balancer: str, path: str = "/v1/completions", times: int = 8) -> list[str]:
    answers = [httpx.post(balancer + path) for _ in range(times)]
    assert {a.status_code for a in answers} == {200}
    return [a.text for a in answers]


def test_haproxy_accepts_the_shipped_file_without_a_warning(haproxy):
    checked = subprocess.run([haproxy, "-c", "-f", str(CONFIG)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr + checked.stdout


def test_requests_are_shared_between_the_gateways(balancer):
    answers = answered(balancer)
    assert {answers.count(name) for name in ("gateway0", "gateway1")} == {4}


def test_a_busy_gateway_gets_no_more_while_the_other_is_idle(balancer, gateways):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answered, balancer, "/slow", 1)
        eventually(lambda: any(g.posts for g in gateways))
        busy, idle = sorted(gateways, key=lambda g: len(g.posts), reverse=True)
        assert answered(balancer) == [idle.name] * 8
        busy.release.set()
        assert slow.result() == [busy.name]


def test_no_request_is_lost_when_a_gateway_stops(balancer, gateways):
    assert set(answered(balancer)) == {"gateway0", "gateway1"}
    gateways[0].stop()
    assert answered(balancer) == ["gateway1"] * 8


def test_a_request_that_reached_a_gateway_is_not_sent_again(balancer, gateways):
    assert httpx.post(balancer + "/die").status_code == 502
    assert sum(len(g.posts) for g in gateways) == 1


def test_a_draining_gateway_finishes_what_it_has_and_gets_nothing_new(balancer, gateways):
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(answered, balancer, "/slow", 1)
        eventually(lambda: any(g.posts for g in gateways))
        draining, other = sorted(gateways, key=lambda g: len(g.posts), reverse=True)
        draining.ready = False
        probes = draining.probes
        eventually(lambda: draining.probes >= probes + 5)
        # Were it still in, its one open request would soon be the least.
        later = [pool.submit(answered, balancer, "/slow", 1) for _ in range(3)]
        eventually(lambda: len(other.posts) == 3)
        draining.release.set()
        assert first.result() == [draining.name]
        other.release.set()
        assert [request.result() for request in later] == [[other.name]] * 3


def test_with_no_gateway_ready_the_answer_is_503(balancer, gateways):
    for gateway in gateways:
        gateway.ready = False
    eventually(lambda: httpx.post(balancer).status_code == 503)


def test_a_request_keeps_its_id_or_is_given_one(balancer, gateways, tmp_path: Path):
    kept = httpx.post(balancer, headers={"X-Request-ID": "mine-1"}).headers["X-Request-ID"]
    made = httpx.post(balancer).headers["X-Request-ID"]
    assert kept == "mine-1"
    assert uuid.UUID(made)
    assert sorted(i for g in gateways for i in g.posts) == sorted([kept, made])
    log = tmp_path / "haproxy.log"
    eventually(lambda: all(f"id={i}" in log.read_text() for i in (kept, made)))
