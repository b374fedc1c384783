"""Options that several commands share, the store that they select, and the output of results.

Related options are the fields of a dataclass, and `grouped` gives a command an option for each
field.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import typer
from typer.core import TyperCommand

from tasc_draft.files import data_folder
from tasc_jobs.errors import UsageError, require_writable
from tasc_jobs.hints import use_store
from tasc_runtime.errors import FileError
from tasc_store import EmbeddedRedis, TaskStore, connect, redact

if TYPE_CHECKING:
    from tasc_engine import ModelSource
    from tasc_jobs.report.document import ReportDocument
    from tasc_runtime.data.rows import Fields
    from tasc_runtime.engine_settings import EngineSettings
    from tasc_serve.settings import ServeSettings

Task = Annotated[str, typer.Argument(help="Name of the task.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of an answer.", show_default="the task's, or 256"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="Maximum tokens of prompt and answer; longer rows get no answer.",
        show_default="1024, or the model's maximum",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 ...")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float64; or auto, the fastest here.")
]
ModelDtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16, float64", show_default="the task's, or float32"),
]
Eos = Annotated[
    str | None, typer.Option(help="The token that ends an answer.", show_default="the tokenizer's")
]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
IdField = Annotated[str, typer.Option(help="Field with the id of the row.")]
InputField = Annotated[str, typer.Option(help="Field with the input of the row.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.", show_default="off")
]
Report = Annotated[
    Path | None,
    typer.Option(
        help="Also write the report, with plots, as one HTML file.", show_default="no file"
    ),
]

DataDir = Annotated[
    Path,
    typer.Option(
        envvar="TASC_DATA_DIR",
        help="Folder of the Redis server that the command starts, and of uploaded files.",
        show_default="tasc-serve in XDG_DATA_HOME, by default ~/.local/share",
    ),
]
_DATA_DIR = data_folder()

Command: TypeAlias = Callable[..., None]


class NamedTask(TyperCommand):
    """A command that explains how to create a task if it is called without one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name == "task" and not error.message:
                error.message = (
                    "`tasc task list` lists the tasks; `tasc task create --help` says how to make "
                    "one"
                )
            raise


@dataclass(frozen=True)
class StoreOptions:
    """The Redis that a command uses."""

    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            envvar="REDIS_URL",
            help="URL of a Redis server, version 6.2 or later.",
            show_default="a server on --data-dir",
        ),
    ] = None
    data_dir: DataDir = _DATA_DIR

    @contextmanager
    def open(self, task: str | None = None) -> Iterator[str]:
        """Yields the given URL after a check, or that of a server on ``data_dir`` for the block.

        Commands import torch and Ray inside the block. These imports take seconds, and an unknown
        task is reported before them.

        Raises:
            StoreError: Redis cannot be used, or it has neither a record nor a corpus of ``task``.
        """
        self._hint()
        if self.redis_url:
            _check_store(self.redis_url, task)
            yield self.redis_url
            return
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with EmbeddedRedis.start(self.data_dir) as server:
            _check_store(server.url, task)
            yield server.url

    def or_of(self, settings: "ServeSettings | None") -> "StoreOptions":
        """Returns the store of a settings file, unless an option or the environment gives one."""
        url = settings.store_url(self.redis_url) if settings else self.redis_url
        return StoreOptions(url, self.data_dir)

    def files_url(self, settings: "ServeSettings | None") -> str:
        """Returns the place of uploaded files: that of a settings file, or else ``data_dir``."""
        found = settings.files_url if settings else None
        return found or str((self.data_dir / "files").absolute())

    def open_if(self, needed: bool, task: str | None) -> AbstractContextManager[str | None]:
        """Returns `open`, or a context of None if no store is needed."""
        self._hint()
        return self.open(task) if needed else nullcontext()

    def _hint(self) -> None:
        """Makes hints include this store unless the defaults or the environment select it."""
        url, folder = self.redis_url, os.environ.get("TASC_DATA_DIR", StoreOptions.data_dir)
        use_store(
            redact(url) if url and url != os.environ.get("REDIS_URL") else None,
            self.data_dir if not url and self.data_dir != Path(folder) else None,
        )

    def in_words(self, url: str) -> str:
        """Describes the store without its login, and how other commands reach a local server."""
        if self.redis_url:
            return redact(url)
        return (
            f"our own Redis on {self.data_dir}; other commands reach it meanwhile with "
            f"REDIS_URL={url}"
        )


def _check_store(url: str, task: str | None) -> None:
    with connect(url) as client:
        if task is not None and not (tasks := TaskStore(client)).left(task):
            tasks.get(task)  # raises UnknownTask


def require_files(*paths: Path | None) -> None:
    """Raises FileError for a path that does not exist; called before slow imports."""
    for path in paths:
        if path is not None and not path.exists():
            raise FileError(f"there is no file or folder {path}; check the spelling of the path")


@dataclass(frozen=True)
class PoolOptions:
    """Options of the engines of a batch job."""

    actors: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of each engine.")] = 0.0
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="b, the number of rows that an engine decodes together.",
            show_default="8",
        ),
    ] = None
    max_model_len: MaxModelLen = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="tasc: this project's engine; vllm: vLLM, in an environment that has it.",
            show_default="tasc",
        ),
    ] = None
    vllm: Annotated[
        str | None,
        typer.Option(
            help="With --backend vllm: fields of vLLM's EngineArgs as a JSON object, such as "
            "'{\"tensor_parallel_size\": 2}'.",
            show_default="none",
        ),
    ] = None
    python: Annotated[
        str | None,
        typer.Option(
            help="Python interpreter of another environment, in which engines run.",
            show_default="the one of this command",
        ),
    ] = None

    def engine(self, settings: "EngineSettings") -> "EngineSettings":
        """Returns the settings, with the given options in place of their values.

        Raises:
            UsageError: An option has a wrong value.
        """
        from pydantic import ValidationError

        from tasc_runtime.engine_settings import EngineSettings, fault_of

        names = ("rows", "max_model_len", "backend", "python")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.vllm is not None:
            try:
                given["vllm"] = json.loads(self.vllm)
            except ValueError as error:
                raise UsageError(f"--vllm is not JSON: {error}") from error
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return EngineSettings(**(settings.model_dump() | given))
        except ValidationError as error:
            name, _, fault = fault_of(error).partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {fault}") from error


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that is not from a task."""

    model: Annotated[str, typer.Argument(help="Folder or Hugging Face name of the base model.")]
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter, folder or name.")] = None
    dtype: Dtype = "float32"
    device: Device = "auto"

    @property
    def source(self) -> "ModelSource":
        from tasc_jobs.task_inputs import named_source

        return named_source(self.model, self.adapter, self.dtype, self.device)


@dataclass(frozen=True)
class RowOptions:
    """The fields of rows in files."""

    input_field: InputField = "input"
    output_field: Annotated[str, typer.Option(help="Field with the output of the row.")] = "output"

    @property
    def fields(self) -> "Fields":
        from tasc_runtime.data.rows import Fields

        return Fields(self.input_field, self.output_field)


@dataclass(frozen=True)
class TrainOptions(RowOptions):
    """Files of rows that take the place of a task's corpus."""

    train: Annotated[
        list[Path] | None,
        typer.Option(
            help="Use the rows of this file; repeatable.", show_default="the task's corpus"
        ),
    ] = None

    @property
    def files(self) -> list[Path]:
        return self.train or []

    def require_either(self, task: str | None) -> None:
        """Raises BadParameter unless either a task or files are given."""
        if (task is None) == (not self.train):
            raise typer.BadParameter("name either a TASK or --train FILE")


@dataclass(frozen=True)
class RowIdOptions(RowOptions):
    """The fields of rows in files, including their ids."""

    id_field: IdField = "id"

    @property
    def fields(self) -> "Fields":
        from tasc_runtime.data.rows import Fields

        return Fields(self.input_field, self.output_field, self.id_field)


def grouped(shown: Mapping[type, str | bool] = {}) -> Callable[[Command], Command]:
    """Gives a command an option for each field of its parameters that are dataclasses.

    Args:
        shown: Texts that the help shows in place of some groups' defaults; False shows nothing.
    """

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command).parameters.values()
        annotations = {parameter.name: parameter.annotation for parameter in parameters}
        groups = {
            name: kind
            for name, kind in annotations.items()
            if isinstance(kind, type) and is_dataclass(kind)
        }

        @wraps(command)
        def called(**values: Any) -> None:
            made = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group)})
                for name, group in groups.items()
            }
            command(**values, **made)

        options = []
        for parameter in parameters:
            if group := groups.get(parameter.name):
                options += [_option(f, shown.get(group)) for f in fields(group)]
            else:
                options.append(parameter)
        called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return called

    return decorate


def _option(field: "Field[Any]", shown: str | bool | None) -> inspect.Parameter:
    kind, option = get_args(field.type)
    if is_dataclass(option) and not isinstance(option, type):
        option = typer.Option(**asdict(option))  # from a module that does not import typer
    if shown is not None:
        option = copy(option)
        option.show_default = shown
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def numbers(option: str, texts: Sequence[str], minimum: int, maximum: int) -> tuple[int, ...]:
    """Parses integers with commas between them; returns each once, in increasing order.

    Raises:
        BadParameter: A value is not an integer in this range.
    """
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not all(part.isdecimal() and minimum <= int(part) <= maximum for part in parts):
        given = ",".join(parts)
        raise typer.BadParameter(
            f"{option} is {given!r}; give numbers from {minimum} to {maximum}, for example 4,8"
        )
    return tuple(sorted({int(part) for part in parts}))


def check_report(report: Path | None) -> None:
    """Raises UsageError if the report cannot be written. Call this before anything slow begins."""
    if report:
        require_writable("--report", report)


def show(
    page: "ReportDocument", figures: dict[str, Any] | None, report: Path | None, as_json: bool
) -> None:
    """Print the page, or with ``as_json`` its figures, and write the page if that was requested.

    Args:
        figures: Figures for JSON; None if they were already printed.
    """
    from tasc_jobs.report.document import show as show_in_terminal
    from tasc_runtime.progress import note

    if not as_json:
        show_in_terminal(page)
    elif figures is not None:
        print(json.dumps(figures), flush=True)
    if report:
        from tasc_jobs.report.web_page import write_html

        write_html(page, report)
        note(f"report: {report}")


def print_result(content: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(content) if as_json else text, flush=True)
