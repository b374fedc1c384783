import re
from pathlib import Path

import yaml
from pydantic import BaseModel

from tasc_draft.settings import DraftSettings
from tasc_runtime.engine_settings import DraftOverrides
from tasc_serve.settings import AutoscalingSettings, ServedTask, ServeSettings, load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_settings_file_loads_and_has_the_two_shipped_tasks():
    settings = load_settings(DEPLOY / "serve.yaml")
    assert [task.name for task in settings.tasks] == ["massive_en", "pos_ewt"]
    assert settings.redis_url == "redis://127.0.0.1:6379/0"


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Returns the fields of a model that are models themselves."""
    kinds = ((name, field.annotation) for name, field in model.model_fields.items())
    return {name: k for name, k in kinds if isinstance(k, type) and issubclass(k, BaseModel)}


def test_settings_file_shows_every_setting():
    written = yaml.safe_load((DEPLOY / "serve.yaml").read_text("utf-8"))
    for model, values in ((ServeSettings, written), (ServedTask, written["tasks"][1])):
        assert set(values) == set(model.model_fields)
        assert len(sections(model)) >= 3
        for name, section in sections(model).items():
            assert set(values[name]) == set(section.model_fields), name


DOTTED = re.compile(
    r"(?<![\w./])(http|engine|limits|auth|failover|connection|metrics|collect|shadow|autoscaling)"
    r"\.(?!md\b|py\b)([a-z]\w+)(?![\w.(])"  # no names of files
)


def test_documents_rules_and_dashboards_name_existing_settings():
    known = sections(ServeSettings) | sections(ServedTask) | {"autoscaling": AutoscalingSettings}
    root = DEPLOY.parent
    files = [root / "README.md", *DEPLOY.rglob("*.md"), *DEPLOY.glob("rules*.yml")]
    files += [*(root / "docs").rglob("*.md"), *(root / "dashboards").glob("*.json")]
    named = {pair for file in files for pair in DOTTED.findall(file.read_text("utf-8"))}
    assert len(named) > 20
    assert {pair for pair in named if pair[1] not in known[pair[0]].model_fields} == set()


def test_settings_file_shows_the_defaults():
    settings = load_settings(DEPLOY / "serve.yaml")
    least = ServeSettings(tasks=(ServedTask(name="massive_en"), ServedTask(name="pos_ewt")))
    shown = settings.tasks[1].draft
    assert DraftSettings(**shown.model_dump()) == DraftSettings()
    plain = settings.tasks[1].model_copy(update={"draft": DraftOverrides()})
    changes = {"redis_url": None, "tasks": (settings.tasks[0], plain)}
    assert settings.model_copy(update=changes) == least
    text = (DEPLOY / "serve.yaml").read_text("utf-8")
    stated = re.findall(r": (\S+) +# default ([\w.]*\w)", text)
    assert len(stated) >= 20
    differ = [pair for pair in stated if yaml.safe_load(pair[0]) != yaml.safe_load(pair[1])]
    assert differ == []


def test_second_service_needs_only_another_port_in_the_settings_file():
    text = (DEPLOY / "serve.yaml").read_text("utf-8")
    assert text.count("port: 8000") == 1
    page = DEPLOY.parent / "docs" / "how-to" / "load-balancer.md"
    assert "sed 's/port: 8000/port: 8001/'" in page.read_text("utf-8")
    ports = {f"TASC_GATEWAY{i} 127.0.0.1:{8000 + i}" for i in (0, 1)}
    balanced = (DEPLOY / "haproxy.cfg").read_text("utf-8")
    assert all(port in balanced for port in ports)


def test_load_balancer_timeouts_exceed_the_service_timeouts():
    balancer = (DEPLOY / "haproxy.cfg").read_text("utf-8")
    waits = re.findall(r"timeout (server|client) (\d+)s", balancer)
    assert {side for side, _ in waits} == {"server", "client"}
    limit = load_settings(DEPLOY / "serve.yaml").limits.request_timeout_s
    assert min(int(seconds) for _, seconds in waits) > limit
