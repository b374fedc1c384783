"""How a task's answers are sampled where a request does not say. It samples nothing."""

from dataclasses import asdict, dataclass
from typing import Any

# Least and most of each, as the engine has them; the store knows no engine, a test compares both.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_ABOVE_0 = ("top_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Each value is that of the engine's rule of the same name; unset is the neutral one.

    Raises:
        ValueError: A value is no number, or outside its range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            _check(name, value)
            if name != "top_k":  # 1 and 1.0 are one value, and must be one in JSON
                object.__setattr__(self, name, float(value))

    @property
    def given(self) -> dict[str, Any]:
        """What is set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _check(name: str, value: object) -> None:
    whole = name == "top_k"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{name} is {value!r}; it must be {'an integer' if whole else 'a number'}")
    least, most = _RANGES[name]
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it goes from {least} to {most}")
    if name in _ABOVE_0 and not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
