"""The command `tasc doctor`: whether a model will work here, before anything is started."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import AsJson, ModelOptions, Threads, grouped, print_result

Rows = Annotated[int, typer.Option(min=1, max=4096, help="b, the number of rows decoded together.")]
Backend = Annotated[
    str, typer.Option(help="The engine that runs it: tasc, or vllm where vLLM is installed.")
]
Compare = Annotated[
    Path | None,
    typer.Option(
        help="Rows with inputs: answer them in float32, bfloat16 and int8, and compare.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="Maximum tokens of prompt and answer (`max_model_len` of the service).",
        show_default="1024, or the model's maximum",
    ),
]


@grouped()
def doctor(
    *,
    named: ModelOptions,
    rows: Rows = 8,
    context: Context = None,
    threads: Threads = 1,
    backend: Backend = "tasc",
    compare: Compare = None,
    as_json: AsJson = False,
) -> None:
    """Check whether MODEL works on this machine, and measure its speed, before you start anything.

    Each finding is one line: ok, warn or fail, and what to do about it. The exit code is 1 if
    something will fail. Nothing is registered or served.
    """
    from tasc_jobs.doctor import Examination, examine

    asked = Examination(
        **vars(named),
        rows=rows,
        context=context,
        threads=threads,
        backend=backend,
        compare=compare,
    )
    report = examine(asked)
    print_result(report.as_json, report.in_words, as_json)
    if not report.works:
        raise typer.Exit(1)
