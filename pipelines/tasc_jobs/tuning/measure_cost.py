"""Measures a model's verification forward passes, for `tasc forecast` and `tasc tune`.

It loads the target like a replica and measures its time on this machine. It needs no corpus, no
Redis and no Ray.
"""

from collections.abc import Callable

import torch

from tasc_engine import EngineConfig, EngineError, ModelSource, Target
from tasc_engine.model.loading import max_positions
from tasc_engine.step.cost import StepCosts, measure
from tasc_jobs.errors import JobError


def measure_cost(
    source: ModelSource,
    rows: int,
    max_model_len: int,
    threads: int = 1,
    seconds: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> StepCosts:
    """Measure the time of forward passes of a model.

    Args:
        rows: b, the number of rows; half of it and so on down to 1 are measured as well.
        max_model_len: Maximum tokens of a row; costs are measured at a short and a long context.
        threads: CPU threads.
        seconds: Maximum time of the measurement, without loading.

    Raises:
        JobError: The model cannot be loaded.
    """
    torch.set_num_threads(threads)
    try:
        length = min(max_model_len, max_positions(source.folder))
        target = Target.load(source, EngineConfig(rows=rows, max_model_len=length))
    except (EngineError, OSError, ValueError) as error:
        raise JobError(f"cannot load {source.folder}: {error}") from error
    return measure(target, source.folder.name, seconds, progress)


def in_words(costs: StepCosts) -> str:
    """Returns a line for each batch and context: milliseconds by draft tokens per row."""
    lines = [f"{costs.model} in {costs.dtype} on {costs.device}; milliseconds of a forward"]
    for rows, context in dict.fromkeys((c.rows, c.context) for c in costs.costs):
        own = [c for c in costs.costs if (c.rows, c.context) == (rows, context)]
        found = ", ".join(f"{c.tokens // rows - 1}: {c.seconds * 1e3:.2f}" for c in own)
        lines.append(f"b = {rows:3}, context {context:5}; by draft tokens a row  {found}")
    return "\n".join(lines)
