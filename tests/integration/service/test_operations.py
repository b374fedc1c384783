"""What load balancers and Prometheus ask."""

from functools import partial

import httpx
import pytest
from serving import ALPHA, BETA, Samples

from support import DEADLINE_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.redis]
get = partial(httpx.get, timeout=DEADLINE_S)


def test_health_and_readiness(service):
    assert get(f"{service.base}/healthz").json() == {"status": "ok"}
    ready = get(f"{service.base}/readyz")
    assert (ready.status_code, ready.json()["tasks"]) == (200, [ALPHA, BETA])


def test_each_process_is_listed_once_and_serves_its_own_series(service):
    def targets():
        (group,) = get(f"{service.base}/sd").json()
        return group["targets"]

    eventually(lambda: len(targets()) == 4)  # one that was killed stays listed for 3 s
    texts = [get(f"http://{target}/metrics").text for target in targets()]
    seen = [
        tuple(t for t in (ALPHA, BETA) if Samples(text).sum("tasc_draft_index_info", task=t) == 1)
        for text in texts
    ]
    assert sorted(seen) == [(), (ALPHA,), (BETA,), (BETA,)], "a gateway, and each replica"
    (gateway,) = (text for text, tasks in zip(texts, seen, strict=True) if not tasks)
    assert "tasc_http_request_duration_seconds" in gateway


def test_an_unknown_path_has_our_shape_not_rays(service):
    response = get(f"{service.base}/v2/models")
    assert (response.status_code, set(response.json())) == (404, {"error"})
