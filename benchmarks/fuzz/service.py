"""The service with tiny models that is attacked."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.fuzz.attacks import Surface
from benchmarks.fuzz.bodies import Endpoint
from benchmarks.serve.service import PROXIES, mark_processes, served, serving_ray

MAX_BODY_BYTES = 1 << 20
_LIMITS = {
    "max_tokens": 24, "max_total_tokens": 64, "max_body_bytes": MAX_BODY_BYTES,
    "max_queued_requests": 64, "request_timeout_s": 10, "guide_timeout_s": 2, "drain_timeout_s": 1,
}  # fmt: skip
# With variables by which a request makes it fail, or take for ever.
_TEMPLATE = """\
{%- for message in messages %}{{ message.role ~ ': ' ~ message.content ~ '\n' }}{% endfor %}
{%- if fail is defined %}{{ raise_exception(fail) }}{% endif %}
{%- if loop is defined %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A running service.

    Attributes:
        key: An API key of the service; None if it needs none.
        mark: The mark of its processes; None for a service that was not started here.
    """

    base: str
    key: str | None = None
    mark: str | None = None

    def json(self, path: str, content: object = None) -> dict[str, object]:
        """The answer to one request; raises urllib.error.HTTPError for an error."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        body = None if content is None else json.dumps(content).encode()
        with urlopen(Request(self.base + path, body, headers), timeout=60) as answer:
            found: dict[str, object] = json.load(answer)
        return found


@contextmanager
def running(folder: Path, proxy: str = PROXIES[0]) -> Iterator[Target]:
    """Run the service with two tasks, one with labels and a chat template, that need an API key."""
    mark = mark_processes()
    from serving import ALPHA, BETA, make_task

    from tasc_runtime.models import chat_template
    from tasc_store import ApiKeys, EmbeddedRedis, TaskStore, connect

    with EmbeddedRedis.start() as server, serving_ray(proxy):
        with connect(server.url) as client:
            alpha, beta = (make_task(folder / name, name).record for name in (ALPHA, BETA))
            TaskStore(client).put(alpha)
            chat = chat_template(folder / BETA, _TEMPLATE)
            labels = {"choices": ("yes", "no", "maybe so")}
            TaskStore(client).put(
                dataclasses.replace(beta, template="{input}", chat=chat, **labels)
            )
            key, _ = ApiKeys(client).create("fuzz")
        content = {
            "tasks": [{"name": name, "num_cpus": 0.1} for name in (ALPHA, BETA)],
            "http": {"port": 0, "gateway_num_cpus": 0.1},
            "engine": {"rows": 4, "max_model_len": 256, "prefill_chunk": 64, "cost_aware": False},
            "limits": _LIMITS,
            "auth": {"required": True},
            "cache_dir": str(folder / "cache"),
        }
        with served(content, server.url) as base:
            yield Target(base, key, mark)


def surface_of(target: Target) -> Surface:
    """The surface of the service by its own description."""
    told = target.json("/openapi.json")
    routes, endpoints = [], []
    for path, methods in told["paths"].items():  # type: ignore[attr-defined]
        for method, said in methods.items():
            routes.append((method.upper(), path))
            content = said.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                endpoints.append(Endpoint(path, content["application/json"]["schema"]))
    listed = target.json("/v1/models")["data"]
    tasks = [model["id"] for model in listed]  # type: ignore[attr-defined]
    return Surface(routes, endpoints, tasks, target.key, MAX_BODY_BYTES)
