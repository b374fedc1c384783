"""Tests that commands, options, files, classes, fields, endpoints and ports on pages exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from inspect import signature
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from documents import ROOT, document, documents
from prometheus_client import CollectorRegistry

from support import parsed
from tasc_jobs.cli.main import all_commands
from tasc_runtime.llm import LLM, Classification, Completion, Summary
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.http.schemas import ChatRequest, CompletionRequest, HarmlessFields
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings, ServeSettings

DOCS = ROOT / "docs"
PAGES = [page.path for page in documents()]
SEPARATORS = ("&&", "|", "&", ";", ">", "2>&1")
SPAN = re.compile(r"`([^`\n]+)`")
GROUP: Any = all_commands()

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return document(page).prose


def test_every_page_is_linked_from_an_index():
    indexes = (DOCS / "index.md", DOCS / "decisions" / "index.md")
    found = {(page.parent / link).resolve() for page in indexes for link in document(page).links}
    assert set(DOCS.rglob("*.md")) <= found | {indexes[0]}


def invocations(page: Path) -> Iterator[list[str]]:
    """Arguments of each `tasc` in shell blocks."""
    for block in (block for block in document(page).blocks if block.language == "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for _, command in groupby(words, lambda word: word in SEPARATORS):
                # variables, and the container that the page on compose calls
                called = list(dropwhile(lambda word: re.match(r"\w+=|tools$", word), command))
                if called[:1] == ["tasc"]:
                    yield called[1:]


@pages
def test_commands_accept_the_options_that_pages_show(page):
    for words in invocations(page):
        if words[0].startswith("-"):
            assert set(words) <= own_options(GROUP)
            continue
        group, name = GROUP, words.pop(0)
        command = group.commands[name]
        if hasattr(command, "commands"):
            group, name = command, words.pop(0)
            command = group.commands[name]
        assert command.make_context(name, words).params, (name, words)


def own_options(command: Any) -> set[str]:
    names = (name for p in command.params for name in (*p.opts, *p.secondary_opts))
    return {*names, "--help"}


def options(command: Any) -> set[str]:
    """Returns the options of a command and of its subcommands."""
    below = (options(each) for each in getattr(command, "commands", {}).values())
    return own_options(command).union(*below)


@pages
def test_commands_and_options_in_prose_exist(page):
    spans = SPAN.findall(prose(page))
    named = {m[1] for span in spans if (m := re.match(r"tasc ([a-z][a-z-]*)", span))}
    assert named <= set(GROUP.commands)
    others = {"reference", "deploy", "kubernetes.md"}
    if others & {*page.parts} or page.parent == ROOT:
        return  # these pages also have options of other programs
    shown = {m for span in spans for m in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}
    assert shown <= options(GROUP)


def classes() -> set[str]:
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]
    trees = map(parsed, files)
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def test_modules_and_classes_of_the_request_page_exist():
    spans = set(SPAN.findall(prose(DOCS / "concepts" / "request-and-corpus.md")))
    named = {span for span in spans if re.fullmatch(r"[A-Z]\w+", span)}
    modules = {span for span in spans if re.fullmatch(r"tasc_\w+(\.\w+)+", span)}
    assert len(named) >= 25
    assert modules
    assert named <= classes()
    for module in modules:
        path = ROOT / "services" / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module


@pages
def test_files_that_pages_name_exist(page):
    tops = "services|pipelines|benchmarks|deploy|dashboards|tests"
    for span in SPAN.findall(prose(page)):
        for name in re.findall(rf"(?:^|\s)((?:{tops})/[\w-][\w./-]*)", span):
            assert (ROOT / name).exists(), name


@cache
def sources() -> str:
    """Our programs and deploy files, and the modules of Ray that define variables and ports."""
    ours = [
        *(path for top in ("services", "pipelines") for path in (ROOT / top).rglob("*.py")),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".md"),
    ]
    spec = find_spec("ray")
    assert spec is not None
    ray = Path((spec.submodule_search_locations or [""])[0])
    ours.append(ROOT / "tests" / "conftest.py")
    names = ("_private/*.py", "_common/tls_utils.py", "serve/_private/constants.py")
    names += ("autoscaler/_private/constants.py", "dashboard/consts.py", "scripts/scripts.py")
    files = [*ours, *(path for name in names for path in ray.glob(name))]
    return "\n".join(path.read_text("utf-8") for path in files)


@pages
def test_environment_variables_that_pages_name_are_read(page):
    named = set(re.findall(r"\b(?:TASC|RAY)_[A-Z0-9_]*[A-Z0-9]\b", page.read_text("utf-8")))
    assert named <= set(re.findall(r"\w+", sources()))


def test_table_of_ports_is_complete():
    column = "\n".join(row[0] for row in rows(ROOT / "deploy" / "README.md", "Ports"))
    named = {int(port) for port in re.findall(r"\b\d{4,5}\b", column)}
    assert len(named) > 15
    assert {str(port) for port in named} <= set(re.findall(r"\d+", sources()))
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
    mappings = [at for each in compose["services"].values() for at in each.get("ports", ())]
    assert {int(at.split(":")[1]) for at in mappings} <= named


def number(text: str) -> float:
    """Parses numbers such as ``1,024``, ``64 KiB`` or ``10 s``."""
    amount, _, unit = text.replace(",", "").partition(" ")
    return float(amount) * {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def test_defaults_in_pages_equal_the_defaults_of_the_settings():
    stated = [
        pair for page in PAGES for pair in re.findall(r"`(\w+\.\w+)` \(([\d.,]+)\)", prose(page))
    ]
    for first, second, *_ in rows(DOCS / "reference" / "http-api.md", "Limits"):
        limits = [span for span in SPAN.findall(first) if span.startswith("limits.")]
        stated += zip(limits, re.split(", ", second) if limits else (), strict=True)
    assert len(stated) >= 11
    for name, value in stated:
        section, field = name.split(".")
        model: Any = ServeSettings.model_fields[section].annotation
        assert number(value) == model.model_fields[field].default, name


def test_load_balancer_defaults_equal_the_defaults_on_its_page():
    config = (ROOT / "deploy" / "haproxy.cfg").read_text("utf-8")
    page = (DOCS / "concepts" / "security.md").read_text("utf-8")
    stated = re.findall(r"`(TASC_\w+)`, ([\d,]+(?: s)?) \|", page)
    assert len(stated) == 5
    for name, value in stated:
        (default,) = re.findall(rf"presetenv {name} (\d+)s?$", config, re.M)
        assert number(value) == float(default), name


def rows(page: Path, heading: str) -> list[list[str]]:
    """Returns the cells of the table under a heading, without its head."""
    _, _, rest = page.read_text("utf-8").partition(f"\n## {heading}\n")
    part = rest.partition("\n## ")[0]
    cells = [line[2:-2].split(" | ") for line in re.findall(r"^\| .* \|$", part, re.M)]
    assert len(cells) > 1
    return cells[1:]


def first_column(page: Path, heading: str) -> set[str]:
    """Returns the code spans in the first column of the table under a heading."""
    return {span for row in rows(page, heading) for span in SPAN.findall(row[0])}


def test_reference_names_every_field_of_a_request():
    named = first_column(DOCS / "reference" / "http-api.md", "Fields of a request")
    named = {name.partition(".")[0] for name in named}
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert named == known - {*HarmlessFields.model_fields}


def test_error_codes_that_the_reference_names_exist():
    cells = [row[1] for row in rows(DOCS / "reference" / "http-api.md", "Errors")]
    codes = {span for cell in cells for span in SPAN.findall(cell) if span.isidentifier()}
    assert len(codes) > 15
    assert codes <= set(re.findall(r"\"(\w+)\"", sources()))


def test_monitoring_page_names_every_alert_and_no_page_names_unknown_alerts():
    rules = yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text("utf-8"))
    alerts = {
        rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert first_column(DOCS / "how-to" / "watch.md", "Alerts") == alerts
    named = {span for page in PAGES for span in SPAN.findall(prose(page))}
    assert {name for name in named if re.fullmatch(r"Tasc[A-Z]\w+", name)} <= alerts | classes()


def test_reference_names_every_endpoint():
    text = (DOCS / "reference" / "http-api.md").read_text("utf-8").partition("\n## ")[0]
    spans = [span for line in text.splitlines() for span in SPAN.findall(line)]
    named = {path for span in spans for path in re.findall(r"/[\w/{}.]+", span)}
    storage = BatchStorage(redis.Redis(), "/nowhere")  # is not used
    metrics = GatewayMetrics(CollectorRegistry())
    unused: Any = None
    paths = create_api(unused, LimitSettings(), metrics, storage=storage).openapi()["paths"]
    there = {re.sub(r"\{\w+\}", "{id}", path) for path in paths}
    named = {re.sub(r"\{\w+\}", "{id}", path) for path in named}
    assert named - {"/openapi.json"} == there


def test_reference_names_every_argument_method_and_field_of_the_python_api():
    page = DOCS / "reference" / "python-api.md"
    arguments = {name for name, p in signature(LLM).parameters.items() if p.kind != p.VAR_KEYWORD}
    shown = first_column(page, "`LLM(model, *, ...)`")
    assert {name for name in shown if name.isidentifier()} == arguments
    methods = {re.match(r"(?:LLM\.)?(\w+)", name)[1] for name in first_column(page, "Methods")}
    assert methods == {name for name in vars(LLM) if not name.startswith("_")}
    assert first_column(page, "`Completion`") == public(Completion)
    assert first_column(page, "`Classification`") == public(Classification)
    summary = page.read_text("utf-8").partition("\n## `Summary`\n")[2].partition("\n## ")[0]
    assert set(SPAN.findall(summary)) == public(Summary)


def public(kind: type) -> set[str]:
    """Fields and properties of a dataclass."""
    properties = {name for name, member in vars(kind).items() if isinstance(member, property)}
    return {field.name for field in fields(kind)} | properties
