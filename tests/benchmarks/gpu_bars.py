"""What the GPU path must reach, and whether it did. It measures nothing."""

from typing import Any

# Name of a bar: stage, path to the figure in what the stage found, least it must be.
LEAST: dict[str, tuple[tuple[str, ...], float]] = {
    "plain_over_ceiling_b1": (("steps", "plain_over_ceiling", "1"), 0.6),
    "plain_over_ceiling_b8": (("steps", "plain_over_ceiling", "8"), 0.6),
    "drafted_over_plain_b1": (("speed", "drafted_over_plain", "1"), 3.0),
    "drafted_over_plain_b8": (("speed", "drafted_over_plain", "8"), 2.5),
    "tests_passed": (("tests", "passed"), 1),
}
# Likewise: the most it may be.
MOST: dict[str, tuple[tuple[str, ...], float]] = {
    "tests_failed": (("tests", "failed"), 0),
    "demo_float32_differences": (("equality", "demo float32", "above"), 0),
    "demo_half_precision_differences": (("equality", "demo drafted against plain", "above"), 0),
    **{
        f"tiny_{name}_differences": (("equality", f"tiny {name}", "above"), 0)
        for name in ("qwen2", "llama", "mistral", "gemma2")
    },
}


def bars(stages: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each bar the figure, what it is held against, and whether it is met.

    A figure that was not found meets nothing.
    """
    judged = {}
    for name, (path, least) in LEAST.items():
        value = _at(stages, path)
        judged[name] = {"found": value, "least": least, "met": value is not None and value >= least}
    for name, (path, most) in MOST.items():
        value = _at(stages, path)
        judged[name] = {"found": value, "most": most, "met": value is not None and value <= most}
    return judged


def _at(found: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found
