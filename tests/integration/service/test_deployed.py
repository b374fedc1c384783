"""The application as ``serve deploy`` builds it, on a Ray that runs already."""

from pathlib import Path

import pytest
import yaml
from ray import serve
from serving import ALPHA, Ask, Service

from tasc_serve.app import Deployed, app

pytestmark = [pytest.mark.ray, pytest.mark.redis]


@pytest.mark.slow("a second application")
def test_an_application_built_from_its_settings_file_answers(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = service.settings.model_dump(mode="json") | {"redis_url": None}
    written["tasks"] = [task for task in written["tasks"] if task["name"] == ALPHA]
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(written), "utf-8")
    monkeypatch.setenv("REDIS_URL", service.redis_url)
    serve.run(app(Deployed(settings=path)), name="deployed", route_prefix="/deployed")
    try:
        second = Service(
            f"{service.base}/deployed", service.redis_url, service.settings, service.tasks
        )
        ask = Ask(ALPHA, "turn on the light")
        assert second.answer(ask) == service.expected(ask)
    finally:
        serve.delete("deployed")
