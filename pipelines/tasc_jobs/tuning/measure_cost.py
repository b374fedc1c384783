"""What a model's verify forwards cost on this machine, for `tasc forecast` and `tasc tune`.

It loads the target as a replica does and times it; it needs no corpus, no Redis and no Ray.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasc_engine import EngineConfig, EngineError, Target
from tasc_engine.model.loading import DTYPES, max_positions
from tasc_engine.step.cost import StepCosts, measure
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import named_source


@dataclass(frozen=True)
class CostJob:
    """What to measure.

    Attributes:
        model: Folder or hub name.
        adapter: PEFT adapter to merge, folder or hub name.
        dtype: float32, bfloat16, float16 or float64.
        device: A torch device; ``auto`` is a GPU if there is one.
        rows: b; half of it and so on down to 1 are measured as well.
        max_model_len: Tokens of a row; costs are measured at a short and at a long context.
        threads: CPU threads.
        seconds: Most time to take, loading not counted.
    """

    model: str
    adapter: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    rows: int = 8
    max_model_len: int = 1024
    threads: int = 1
    seconds: float = 60.0


def measure_cost(
    job: CostJob, progress: Callable[[int, int], None] = lambda done, of: None
) -> StepCosts:
    """Time forwards of a model.

    Raises:
        JobError: The dtype is none of those named, or the model cannot be loaded.
    """
    if job.dtype not in DTYPES:
        raise JobError(f"dtype is {job.dtype}; choose one of {', '.join(DTYPES)}")
    source = named_source(job.model, job.adapter, job.dtype, job.device)
    torch.set_num_threads(job.threads)
    try:
        length = min(job.max_model_len, max_positions(source.folder))
        target = Target.load(source, EngineConfig(rows=job.rows, max_model_len=length))
    except (EngineError, OSError, ValueError) as error:
        raise JobError(f"cannot load {job.model}: {error}") from error
    return measure(target, source.folder.name, job.seconds, progress)


def in_words(costs: StepCosts) -> str:
    """A line for each batch and context: milliseconds by draft tokens a row."""
    lines = [f"{costs.model} in {costs.dtype} on {costs.device}; milliseconds of a forward"]
    for rows, context in dict.fromkeys((c.rows, c.context) for c in costs.costs):
        own = [c for c in costs.costs if (c.rows, c.context) == (rows, context)]
        found = ", ".join(f"{c.tokens // rows - 1}: {c.seconds * 1e3:.2f}" for c in own)
        lines.append(f"b = {rows:3}, context {context:5}; by draft tokens a row  {found}")
    return "\n".join(lines)
