"""Tests that the generated reference pages match the code and are complete."""

import ast
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import tasc_serve
from docs import generate
from support import parsed
from tasc_runtime.engine_settings import Section

ROOT = Path(__file__).parents[2]
_MAKERS = {"counter", "counters", "gauge", "gauges", "histogram", "histograms"}
_CLASSES = {"Counter", "Gauge", "Histogram"}


def page(name: str) -> str:
    return (generate.REFERENCE / name).read_text("utf-8")


def test_generated_pages_match_the_code():
    assert [path.name for path in generate.stale()] == [], "run `make docs-pages`"


def test_every_command_and_option_is_described_and_every_command_has_an_example():
    found = dict(generate.commands())
    assert len(found) > 20
    for name, command in found.items():
        assert command.help, name
        assert hasattr(command, "commands") or f"{name} " in f"{command.epilog} ", name
        undescribed = [p.name for p in command.params if not getattr(p, "help", None)]
        assert undescribed == [], name


def sections(of: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in of.__subclasses__():
        yield model
        yield from sections(model)


def test_every_setting_is_described():
    models = set(sections(Section))
    assert models == {model for _, model in generate.sections()}
    text = page("settings.md")
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            assert f"| `{name}` | " in text


def exported() -> Iterator[str]:
    """Names of all series that services make, read from the source."""
    for file in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called, first = node.func, node.args[0]
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in _MAKERS | _CLASSES and isinstance(first, ast.Constant):
                yield f"tasc_{first.value}" if name in _MAKERS else str(first.value)


def test_every_metric_is_described():
    text = page("metrics.md")
    names = list(exported())
    assert len(names) > 30
    for name in names:
        assert f"`{name}`" in text or f"`{name}_total`" in text, name
    for process in generate.PROCESSES:
        assert all(metric._documentation for metric in generate.metrics(process))


def test_every_public_name_is_described():
    text = page("python-api.md")
    for name in tasc_serve.__all__:
        public = [n for n in vars(getattr(tasc_serve, name)) if not n.startswith("_")]
        assert name in text
        assert [n for n in public if n not in text] == [], name
