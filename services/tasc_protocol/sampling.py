"""The sampling parameters of a request, in one table.

The HTTP schema, task records, command options, the samplers' arrays and the docs are made from the
fields of `Sampling` that are annotated with a `Parameter`.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

MOST_BIASES = 1024  # maximum number of biases of one request
MOST_BIAS = 10_000.0  # enough to force or forbid a token; sums stay finite
_MOST_SEED = 2**64


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter. A request may set it; otherwise, the task's value counts.

    Attributes:
        minimum: The minimum value.
        maximum: The maximum value.
        option_help: The help text of the command option.
        request_help: The end of the description in the HTTP schema.
        request_range: The range in an HTTP request, if not ``minimum`` to ``maximum``.
        above_minimum: Whether the minimum itself is refused.
        is_penalty: Whether earlier tokens change the choice of later tokens, even at temperature 0.
        is_extension: Whether OpenAI's API lacks the parameter.
        name, default: As in `Sampling`; the default changes nothing.
    """

    minimum: float
    maximum: float
    option_help: str
    request_help: str = ""
    request_range: tuple[float, float] | None = None
    above_minimum: bool = False
    is_penalty: bool = False
    is_extension: bool = False
    name: str = ""
    default: float = 0.0

    @property
    def is_integer(self) -> bool:
        """Whether fractions are refused."""
        return isinstance(self.default, int)

    def require(self, value: Any) -> None:
        """Raises ValueError if a value is not a number of the right kind and in range."""
        name, kinds = self.name, (int,) if self.is_integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            needed = "an integer" if self.is_integer else "a number"
            raise ValueError(f"{name} is {value!r}; it must be {needed}")
        if not self.minimum <= value <= self.maximum:
            raise ValueError(f"{name} is {value}; it goes from {self.minimum} to {self.maximum}")
        if self.above_minimum and value == self.minimum:
            raise ValueError(f"{name} is {value}; it must be above {self.minimum:g}")


@dataclass(frozen=True)
class Sampling:
    """The rule by which the target's token is chosen at each position of an answer.

    The logits are changed in this order: ``logit_bias``, penalties, what a guide allows,
    ``temperature``, ``min_p``, ``top_k``, ``top_p``.

    Attributes:
        temperature: 0 takes the greatest logit, the first if several are equal. Above 0, tokens are
            drawn from the softmax of the logits divided by the temperature.
        top_p: Draw from the smallest set of the most likely tokens whose probabilities sum to this
            value (Holtzman et al. 2020, arXiv 1904.09751).
        top_k: Draw from this many of the most likely tokens; 0 for all.
        min_p: Draw from tokens with at least this fraction of the highest probability (Nguyen et
            al. 2024, arXiv 2407.01082).
        repetition_penalty: Divides positive and multiplies negative logits of tokens that are in
            the prompt or the answer so far (Keskar et al. 2019, arXiv 1909.05858).
        presence_penalty: Subtracted from logits of tokens that are in the answer so far.
        frequency_penalty: Subtracted once for each occurrence of a token in the answer so far.
        logit_bias: Token ids, and the number added to the logit of each.
        seed: Equal requests with the same seed get the same answer.
        prompt: Index of the prompt in its request.
        choice: Index of the answer among the ``n`` answers to its prompt.

    Raises:
        ValueError: A value is out of its range, or not a number.
    """

    temperature: Annotated[
        float,
        Parameter(
            0.0,
            100.0,
            "0 to 100; 0 takes the most likely token.",
            "; 0 takes the likeliest token, the first of equal ones",
            request_range=(0.0, 2.0),
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        Parameter(
            0.0,
            1.0,
            "Above 0, to 1: share of probability to sample from.",
            "; 0 with temperature 0 only, where it is unused",
            request_range=(0.0, 1.0),
            above_minimum=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            0,
            2**31 - 1,
            "Number of likeliest tokens to sample from; 0: all.",
            "; 0 or -1: all tokens",
            request_range=(-1, 2**31 - 1),
            is_extension=True,
        ),
    ] = 0
    min_p: Annotated[
        float,
        Parameter(
            0.0,
            1.0,
            "0 to 1: minimum probability relative to the greatest.",
            is_extension=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            0.0,
            100.0,
            "Above 0, to 100: penalty for repeated tokens; 1: none.",
            above_minimum=True,
            is_penalty=True,
            is_extension=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Parameter(
            -100.0,
            100.0,
            "-100 to 100: penalty for tokens in the answer.",
            request_range=(-2.0, 2.0),
            is_penalty=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            -100.0,
            100.0,
            "-100 to 100: penalty for each occurrence in the answer.",
            request_range=(-2.0, 2.0),
            is_penalty=True,
        ),
    ] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        for parameter in PARAMETERS.values():
            parameter.require(getattr(self, parameter.name))
        for name, most in (("seed", _MOST_SEED - 1), ("prompt", 2**32 - 1), ("choice", 2**32 - 1)):
            value = getattr(self, name)
            if type(value) is not int:
                raise ValueError(f"{name} is {value!r}; it must be an integer")
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it goes from 0 to {most}")
        if len(self.logit_bias) > MOST_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_BIASES}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias has a token twice; add its values up")
        for token, value in self.logit_bias:
            if not abs(value) <= MOST_BIAS:
                raise ValueError(
                    f"logit_bias of token {token} is {value}; it goes from -{MOST_BIAS:g} to "
                    f"{MOST_BIAS:g}"
                )

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the choice of later tokens."""
        return any(getattr(self, one.name) != one.default for one in _PENALTIES)

    @property
    def plain(self) -> bool:
        """Whether the greatest of the target's unchanged logits is taken."""
        return self.temperature == 0 and not self.penalises and not self.logit_bias


def _parameters() -> dict[str, Parameter]:
    hints = get_type_hints(Sampling, include_extras=True)
    found = {}
    for each in fields(Sampling):
        for table in getattr(hints[each.name], "__metadata__", ()):
            found[each.name] = replace(table, name=each.name, default=each.default)
    return found


PARAMETERS: Final = _parameters()
_PENALTIES = tuple(one for one in PARAMETERS.values() if one.is_penalty)


@dataclass(frozen=True)
class SamplingDefaults:
    """A task's values of the sampling parameters; None: the value that changes nothing.

    Raises:
        ValueError: A value is not a number, or outside its range.
    """

    if TYPE_CHECKING:

        def __init__(self, **values: float | None) -> None: ...

    else:
        __annotations__ = dict.fromkeys(PARAMETERS, float | None)
        vars().update(dict.fromkeys(PARAMETERS))

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            PARAMETERS[name].require(value)
            if not PARAMETERS[name].is_integer:  # 1 and 1.0 must give the same JSON
                object.__setattr__(self, name, float(value))

    @property
    def given(self) -> dict[str, Any]:
        """The values that are set, by name."""
        values = ((name, getattr(self, name)) for name in PARAMETERS)
        return {name: value for name, value in values if value is not None}
