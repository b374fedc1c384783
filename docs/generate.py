"""Writes the reference pages that are made of the code: commands, settings, metrics
and fields of requests.

python docs/generate.py            # write docs/reference/{cli,settings,metrics,request-fields}.md
python docs/generate.py --check    # write nothing; exit code 1 if a page is stale
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

import typer
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tasc_draft import DraftSettings
from tasc_draft.settings import RANGES
from tasc_jobs.cli.main import all_commands
from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_runtime.engine_settings import DraftOverrides
from tasc_runtime.sampling_options import IGNORED_OF_PARTS, Body, ChatMessage
from tasc_serve.http.responses_api import ResponsesRequest
from tasc_serve.http.schemas import ChatRequest, CompletionRequest, HarmlessFields
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.settings import ServeSettings

REFERENCE: Final = Path(__file__).parent / "reference"
_GENERATED: Final = (
    "<!-- Written by docs/generate.py. Edit the code, then run `make docs-pages`. -->"
)

Command: TypeAlias = Any  # typer's own classes are private
Context: TypeAlias = Any


def commands(of: Command | None = None, *names: str) -> Iterator[tuple[str, Command]]:
    """Each command by its full name, `tasc` itself and its groups included, in help's order."""
    of = of or all_commands()
    names = (*names, str(of.name)) if names else ("tasc",)
    yield " ".join(names), of
    for each in getattr(of, "commands", {}).values():
        yield from commands(each, *names)


def cli_page() -> str:
    """The page of all commands and options."""
    found = dict(commands())
    lines = [
        "# Command line",
        _GENERATED,
        "Results go to stdout, progress and errors to stderr. The exit code is 0 if the command "
        "succeeded, 1 if it failed (the message says why and what to do), 2 if it was used "
        "wrongly, 130 after Ctrl-C and 143 after SIGTERM. A missing file or task is a failure; a "
        "value that an option does not take is wrong use. `tasc --version` prints the version, and "
        "`tasc --install-completion` adds shell completion.",
        "With `--json`, stdout has one JSON object on one line, and nothing else; `tasc replay`, "
        "`tasc worker` and `tasc refresh --every` write one for each result. If a command fails, "
        "stdout is empty, also with `--json`. Only `tasc doctor` prints what it found before it "
        "exits with 1.",
    ]
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, command in found.items():
        if name.count(" ") == 1:
            panels.setdefault(command.rich_help_panel, []).append((name, command.help))
    for panel, named in panels.items():
        rows = [(f"[`{name}`](#{name.replace(' ', '-')})", _first(text)) for name, text in named]
        lines += [f"**{panel}**", _table(("command", "purpose"), rows)]
    for name, command in found.items():
        if name == "tasc":
            continue
        lines.append(f"{'#' * (1 + name.count(' '))} {name}")
        lines += _paragraphs(command.help)
        if not hasattr(command, "commands"):
            lines += _command(name, command)
    return "\n\n".join(lines) + "\n"


def _command(name: str, command: Command) -> list[str]:
    with typer.Context(command, info_name=name) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        usage = re.sub(r"\{(\w+)\}|(\[[a-z]+\])", lambda m: (m[1] or m[2]).upper(), usage)
        lines = [f"`{name} {usage}`"]
        rows = [_option(each, context) for each in command.get_params(context) if not each.hidden]
    rows = [row for row in rows if row[0] != "`--help`"]
    if rows:
        lines.append(_table(("argument or option", "value", "default", "description"), rows))
    return lines + [_example(each) for each in _paragraphs(command.epilog or "")]


def _option(option: Any, context: Context) -> tuple[str, str, str, str]:
    names = [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else []
    value = "" if getattr(option, "is_flag", False) else _value(option, context)
    told = option.show_default
    if option.required:
        default = "required"
    elif isinstance(told, str):
        default = told
    elif not told or option.default is None:
        default = ""
    elif option.default is False and not option.secondary_opts:
        default = "off"
    elif option.secondary_opts:
        default = f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    else:
        default = f"`{option.default}`"
    text = _plain(option.help or "")
    if option.envvar:
        text += f" Environment variable: `{option.envvar}`."
    name = " ".join(f"`{each}`" for each in names) or f"`{option.display_name_raw.upper()}`"
    return name, ", ".join(filter(None, (value, _between(option.min, option.max)))), default, text


def _value(option: Any, context: Context) -> str:
    """What is typed for an option."""
    name: str = option.display_type(context).strip("<>").removesuffix(" range")
    inner = name.removeprefix("list[").removesuffix("]")
    kinds = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}
    several = ", repeatable" if inner != name else ""
    return kinds.get(inner, inner.replace("|", " or ")) + several


def _example(paragraph: str) -> str:
    """A paragraph of an epilog; the command in it becomes code."""
    return re.sub(r"(^|: )((?:\w+=\$\()?tasc [a-z].*)$", r"\1`\2`", paragraph)


def settings_page() -> str:
    """The page of the service's settings file."""
    lines = [
        "# Settings",
        _GENERATED,
        "`tasc serve --config FILE` reads these settings from a YAML file. Only `tasks` is "
        "required: `tasks: [{name: my-task}]` is a whole file. Unknown fields are refused. "
        "[deploy/serve.yaml](../../deploy/serve.yaml) shows every field with its default.",
        "Files that can be made again, which are draft indexes, measured step costs and compiled "
        "code, are in the folder `tasc-serve` of `XDG_CACHE_HOME`, by default `~/.cache`. The data "
        "of a Redis server that `tasc` starts is in `tasc-serve` of `XDG_DATA_HOME`, by default "
        "`~/.local/share`, unless `--data-dir` or `TASC_DATA_DIR` names a folder. Nothing is "
        "written to `XDG_CONFIG_HOME` or `XDG_STATE_HOME`. The variables count where a process "
        "runs: on a cluster, set them for Ray on each node.",
    ]
    for path, model in sections():
        if path == "tasks[].engine":  # the fields of `engine`
            continue
        lines.append(f"## {path or 'Top level'}")
        lines += _paragraphs(model.__doc__ or "")
        rows = [_field(model, name, field) for name, field in model.model_fields.items()]
        lines.append(_table(("field", "type", "default", "limits", "description"), rows))
    return "\n\n".join(lines) + "\n"


def sections(
    model: type[BaseModel] = ServeSettings, path: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section of the settings file by its path, from the top."""
    yield path, model
    for name, field in model.model_fields.items():
        kinds = _members(field.annotation)
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is not None:
            many = "[]" if get_origin(field.annotation) is tuple else ""
            yield from sections(inner, f"{path}.{name}{many}".strip("."))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The classes in an annotation, those of a union and of a tuple included."""
    if get_origin(annotation) in (Union, UnionType, tuple):
        return tuple(m for each in get_args(annotation) for m in _members(each))
    return (annotation,)


def _field(model: type[BaseModel], name: str, field: FieldInfo) -> tuple[str, str, str, str, str]:
    kind, text = _kind(field.annotation), _plain(field.description or "")
    if model is DraftOverrides:
        default = f"the task's, or `{getattr(DraftSettings, name)}`"
        return f"`{name}`", kind, default, _between(*RANGES.get(name, (None, None))), text
    return f"`{name}`", kind, _default(field.default), _between(*_bounds(field)), text


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value in (None, (), {}):
        return "unset"
    if isinstance(value, BaseModel):
        return "its own defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _kind(annotation: Any) -> str:
    """A type as a settings file has it."""
    members = [m for m in _members(annotation) if m not in (NoneType, Ellipsis)]
    if get_origin(members[0]) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(members[0]))
    if isinstance(members[0], type) and issubclass(members[0], BaseModel):
        return "list of sections" if get_origin(annotation) is tuple else "section"
    if get_origin(members[0]) is dict:
        return "fields"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
    return names[members[0]] + (", a list" if get_origin(annotation) is tuple else "")


def _bounds(field: FieldInfo) -> tuple[str | None, str | None]:
    least = most = None
    for limit in field.metadata:
        if (above := getattr(limit, "gt", None)) is not None:
            least = f"above {above}"
        if (at_least := getattr(limit, "ge", None)) is not None:
            least = str(at_least)
        if (at_most := getattr(limit, "le", None)) is not None:
            most = f"{at_most:.0f}" if isinstance(at_most, float) else str(at_most)
    return least, most


def _between(least: object, most: object) -> str:
    if least is None and most is None:
        return ""
    if most is None:
        return str(least) if str(least).startswith("above") else f"{least} or more"
    return f"{least} to {most}" if least is not None else f"at most {most}"


class _Collectors(CollectorRegistry):
    """A registry that tells what was registered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[MetricWrapperBase] = []

    def register(self, collector: Collector) -> None:
        if isinstance(collector, MetricWrapperBase):  # another one only reads what others show
            self.metrics.append(collector)
        super().register(collector)


def _replica(registry: CollectorRegistry) -> None:
    ReplicaMetrics(registry, task="", model_name="", proposer="")
    NeuralMetrics(registry, {"task": "", "model_name": "", "proposer": ""})


# Who serves the metrics, and what makes them.
PROCESSES: Final[Mapping[str, Callable[[CollectorRegistry], object]]] = {
    "Replica": _replica,
    "Gateway": GatewayMetrics,
    "Batch worker": BatchMetrics,
}


def metrics(process: str) -> Iterator[MetricWrapperBase]:
    """The metrics of a process of `PROCESSES`."""
    registry = _Collectors()
    PROCESSES[process](registry)
    return iter(registry.metrics)


def metrics_page() -> str:
    """The page of all Prometheus metrics."""
    lines = [
        "# Metrics",
        _GENERATED,
        "Each process serves its metrics on its own port. `/sd` of the service lists the "
        "ports for Prometheus, and `/metrics` shows the sum of all processes for people to read. A "
        "histogram has the series `_bucket`, `_sum` and `_count`.",
    ]
    for process in PROCESSES:
        rows = [_metric(each) for each in metrics(process)]
        lines += [f"## {process}", _table(("name", "type", "labels", "description"), rows)]
    return "\n\n".join(lines) + "\n"


def _metric(metric: MetricWrapperBase) -> tuple[str, str, str, str]:
    kind, name = str(metric._type), metric._name
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    exported = f"{name}_total" if kind == "counter" else name
    return f"`{exported}`", kind, labels, metric._documentation


# The body of each endpoint.
BODIES: Final[Mapping[str, type[HarmlessFields]]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
}


def fields_page() -> str:
    """The page of what endpoints do with each field of a request."""
    names: dict[str, None] = {}
    for model in BODIES.values():
        names |= dict.fromkeys([*model.model_fields, *model.unsupported])
    rows = [
        (f"`{name}`", *(_treatment(model, name) for model in BODIES.values()))
        for name in sorted(names)
    ]
    lines = [
        "# Fields of requests",
        _GENERATED,
        "What each endpoint does with the fields of OpenAI's API, of vLLM's, and its own. A field "
        "is **used** as [HTTP API](http-api.md#fields-of-a-request) says; or *ignored*, since "
        "nothing here could change by it; or refused with the code `unsupported_parameter`, except "
        "for values that ask for nothing. `null` is always taken. Any other field is refused with "
        "the code `unknown_parameter`.",
        _table(("field", *BODIES), rows),
        "## Fields of messages",
        "Clients may send answers back as their library keeps them. Fields of messages:",
        _table(("field", "messages"), _message_fields()),
        "Parts of a message have `type` and `text`. "
        f"{_listed(sorted(IGNORED_OF_PARTS))} are *ignored* in them.",
    ]
    return "\n\n".join(lines) + "\n"


def _message_fields() -> Iterable[tuple[str, str]]:
    known = {*ChatMessage.model_fields, *ChatMessage.unsupported, *ChatMessage.ignored}
    for name in sorted(known):
        ignored = name in ChatMessage.ignored
        yield f"`{name}`", "*ignored*" if ignored else _treatment(ChatMessage, name)


def _listed(names: Sequence[str]) -> str:
    *most, last = [f"`{name}`" for name in names]
    return f"{', '.join(most)} and {last}"


def _treatment(model: type[Body], name: str) -> str:
    if field := model.model_fields.get(name):
        unused = name in HarmlessFields.model_fields or field.description == "not used"
        return "*ignored*" if unused else "**used**"
    if name not in model.unsupported:
        return ""
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in model.unsupported[name])
    return f"refused, except {neutral}" if neutral else "refused"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |".replace("  |", " |") for line in cells)


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring or of help; one that is a command becomes a code block."""
    found = [" ".join(each.split()) for each in text.strip().split("\n\n")]
    return [_plain(each) for each in found if each]


def _plain(text: str) -> str:
    """Help without the backslashes that its markup needs; a reader's brackets stay brackets."""
    return " ".join(text.replace("\\[", "[").replace("``", "`").split())


def _first(text: str) -> str:
    return _paragraphs(text)[0]


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "request-fields.md": fields_page,
}


def stale() -> list[Path]:
    """Pages that are not what the code says."""
    pages = {REFERENCE / name: make for name, make in PAGES.items()}
    return [p for p, make in pages.items() if not p.exists() or p.read_text("utf-8") != make()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if found := stale():
            sys.exit(f"stale: {', '.join(map(str, found))}; run `make docs-pages`")
        return
    for page in stale():
        page.write_text(PAGES[page.name](), "utf-8")
        print(f"wrote {page}", file=sys.stderr)


if __name__ == "__main__":
    main()
