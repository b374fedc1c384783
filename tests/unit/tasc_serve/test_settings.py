"""Tests that an invalid settings file is refused with the name of the field."""

from pkgutil import resolve_name

import pytest

from support import refused
from tasc_runtime.errors import SettingsError
from tasc_serve import app
from tasc_serve.replica.replica import TaskReplica
from tasc_serve.settings import ServeSettings, load_settings

TASK = "tasks: [{name: a}]\n"


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "serve.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_settings_need_one_task_and_keep_given_values(written):
    assert [t.name for t in load_settings(written(TASK)).tasks] == ["a"]
    full = (
        "tasks: [{name: a, draft: {n_max: 4, min_prob: 0.5}}]\nlimits: {max_queued_requests: 0}\n"
    )
    settings = load_settings(written(full))
    assert settings.tasks[0].draft.model_dump(exclude_none=True) == {"n_max": 4, "min_prob": 0.5}
    assert settings.limits.max_queued_requests == 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (TASK + "unheard_of: 1\n", ["unheard_of"]),
        (TASK + "engine: {row: 8}\n", ["engine.row"]),
        (TASK + "engine: {rows: 0}\n", ["engine.rows", "1"]),
        (TASK + "limits: {request_timeout_s: 0}\n", ["limits.request_timeout_s"]),
        (
            TASK + "limits: {max_batch_lines: 900000}\n",
            ["limits", "500000", "max_open_batch_lines to 900000"],
        ),
        (TASK + "http: {port: 65536}\n", ["http.port", "65535"]),
        (TASK + "metrics: {ttl_s: often}\n", ["metrics.ttl_s"]),
        ("tasks: [{name: a}, {name: b}, {name: a}]\n", ["task a ", "twice"]),
        ("tasks: [{name: a, draft: {depth: 3}}]\n", ["tasks.0.draft.depth"]),
        ("tasks: [{name: a, draft: {n_max: 99}}]\n", ["tasks.0.draft", "n_max is 99", "16"]),
        ("tasks: [{replicas: 1}]\n", ["tasks.0.name"]),
        ("tasks: []\n", ["tasks"]),
        ("http: {port: 1}\n", ["tasks"]),
        ("- tasks\n", ["file", "dictionary"]),
        ("", ["file", "dictionary"]),
        ("tasks: [\n", ["YAML"]),
        (b"tasks: \xff\n", ["YAML"]),
    ],
)
def test_invalid_setting_is_refused_and_named(written, content, named):
    path = written(content)
    with refused(SettingsError, str(path), *named):
        load_settings(path)


def test_missing_settings_file_is_refused_and_named(tmp_path):
    with refused(SettingsError, "absent"):
        load_settings(tmp_path / "absent.yaml")


def test_choices_and_prompts_are_limited_to_the_capacity_of_a_replica(written):
    few = load_settings(written(TASK + "engine: {rows: 2}\nlimits: {max_queued_requests: 3}\n"))
    assert (few.limits.max_choices, few.gateway_limits.max_choices) == (16, 5)
    assert (few.limits.max_prompts, few.gateway_limits.max_prompts) == (256, 5)
    usual = load_settings(written(TASK)).gateway_limits
    assert (usual.max_choices, usual.max_prompts) == (16, 256)


FILE, OTHER = "redis://:of-file@a:1/0", "redis://:of-environment@b:2/0"


@pytest.mark.parametrize(
    ("of_file", "named", "used"),
    [(FILE, None, FILE), (FILE, OTHER, OTHER), (None, OTHER, OTHER), (OTHER, OTHER, OTHER)],
)
def test_named_store_overrides_the_store_of_the_file_with_a_warning(caplog, of_file, named, used):
    settings = ServeSettings.model_validate({"tasks": [{"name": "a"}], "redis_url": of_file})
    assert settings.store_url(named) == used
    assert ("a:1" in caplog.text and "b:2" in caplog.text) == (of_file == FILE and named == OTHER)
    assert "of-file" not in caplog.text
    assert "of-environment" not in caplog.text


def test_settings_limit_replicas_and_gateways_per_node() -> None:
    """Serve has no public way to read these limits of an application before its deployment."""
    tasks = [{"name": "few", "max_replicas_per_node": 2}, {"name": "any"}]
    http = {"gateways": 2, "max_gateways_per_node": 1}
    settings = ServeSettings.model_validate({"tasks": tasks, "http": http})
    gateway = app.build(settings, "redis://test", {"few": "1", "any": "2"})._bound_deployment
    tasks = {name: each._bound_deployment for name, each in gateway.init_args[2].items()}
    found = {n: d._replica_config.max_replicas_per_node for n, d in tasks.items()}
    assert found == {"few": 2, "any": None}
    assert gateway._replica_config.max_replicas_per_node == 1
    assert {resolve_name(d.func_or_class) for d in tasks.values()} == {TaskReplica}


def test_engine_of_a_task_is_merged_with_the_engine_of_the_service(written):
    """A task may leave the service's backend, or add arguments to it."""
    vllm = "{backend: vllm, rows: 4, vllm: {enforce_eager: true}}"
    tasks = (
        "  - {name: usual}\n"
        "  - {name: more, engine: {vllm: {tensor_parallel_size: 2}}}\n"
        "  - {name: ours, engine: {backend: tasc}}\n"
    )
    settings = load_settings(written(f"tasks:\n{tasks}engine: {vllm}\n"))
    found = [settings.engine_of(task) for task in settings.tasks]
    assert [(each.backend, each.vllm, each.rows) for each in found] == [
        ("vllm", {"enforce_eager": True}, 4),
        ("vllm", {"tensor_parallel_size": 2}, 4),
        ("tasc", {}, 4),
    ]
    for own in ("{vllm: {enforce_eager: true}}", "{backend: tasc, vllm: {enforce_eager: true}}"):
        task = f"tasks: [{{name: lone, engine: {own}}}]\n"
        with refused(SettingsError, "task lone", "vllm has enforce_eager", "backend is tasc"):
            load_settings(written(task))
