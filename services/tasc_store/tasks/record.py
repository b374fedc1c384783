"""The frozen record of a task, and its JSON.

A record includes the form of answers (labels, a JSON schema or a regular expression), the sampling
defaults, and the settings of a drafter. This module checks sizes, and that a schema is a JSON
object, but not that a schema or a regular expression is valid.
"""

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, Literal, Self, get_args

from tasc_draft.settings import DraftSettings
from tasc_protocol import SamplingDefaults
from tasc_protocol.request import MOST_CHOICE_BYTES, MOST_CHOICES, MOST_GUIDE_BYTES
from tasc_store import keys
from tasc_text import ChatTemplate


def check_forms(choices: object, schema: str | None, regex: str | None) -> None:
    """Raises ValueError if several forms are set, or a form is empty, too large or not a text."""
    given = [
        name
        for name, value in (("choices", choices != ()), ("schema", schema), ("regex", regex))
        if value not in (None, False)
    ]
    if len(given) > 1:
        named = " and ".join(given)
        raise ValueError(f"an answer has one form, but {named} are set; unset all but one")
    _check_choices(choices)
    for name, text in (("schema", schema), ("regex", regex)):
        if text is not None:
            _check_form_text(name, text)
    if schema is not None:
        _check_json(schema)


def _check_choices(choices: object) -> None:
    if not isinstance(choices, tuple) or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choices is {choices!r:.80}; it must be a list of non-empty strings")
    if len(choices) > MOST_CHOICES:
        raise ValueError(f"choices has {len(choices)} labels; at most {MOST_CHOICES}")
    if (size := sum(len(_encoded("choices", c)) for c in choices)) > MOST_CHOICE_BYTES:
        raise ValueError(f"choices has {size} bytes; at most {MOST_CHOICE_BYTES}")
    seen: set[str] = set()
    for choice in choices:
        if choice in seen:
            raise ValueError(f"choices has {choice!r:.80} twice; leave one out")
        seen.add(choice)


def _check_form_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} is {text!r:.80}; it must be a non-empty string")
    if (size := len(_encoded(name, text))) > MOST_GUIDE_BYTES:
        raise ValueError(f"{name} has {size} bytes; at most {MOST_GUIDE_BYTES}")


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate in {text!r:.80}; write UTF-8") from error


def _check_json(schema: str) -> None:
    try:
        content = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema is not JSON ({error}); give a JSON schema") from error
    if not isinstance(content, dict):
        raise ValueError(f"schema is {schema!r:.80}; it must be a JSON object")


_WHOLE = {"ranked_tokens": 1 << 24, "depth": 16, "width": 32, "nodes": 63}
_CHOICES = {
    "proposer": ("neural", "hybrid"),
    "vocabulary": ("full", "ranked", "recent", "recent+ranked"),
}


@dataclass(frozen=True)
class NeuralDrafting:
    """A drafter and how it drafts.

    Attributes:
        drafter: Folder or hub name of a drafter that `tasc train-drafter` made.
        proposer: ``neural``: only the drafter drafts; ``hybrid``: the drafter and n-grams draft one
            tree together.
        vocabulary: Tokens to draft from: ``full``: all; ``ranked``: the most frequent tokens of the
            task's answers; ``recent``: the tokens of a row's latest context; ``recent+ranked``:
            both.
        ranked_tokens: Number of tokens of the ranking to use.
        depth: Number of levels of a draft's tree.
        width: Number of expanded nodes per level.
        nodes: Maximum number of draft tokens of a row in a step; for a hybrid, maximum number of
            the drafter's own tokens.
        sure: For a hybrid: the drafter runs where the likeliest token of the n-grams has a lower
            probability than this.

    Raises:
        ValueError: A value is of the wrong kind or outside its range.
    """

    drafter: str
    proposer: Literal["neural", "hybrid"] = "hybrid"
    vocabulary: Literal["full", "ranked", "recent", "recent+ranked"] = "full"
    ranked_tokens: int = 4096
    depth: int = 5
    width: int = 10
    nodes: int = 32
    sure: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.drafter:
            raise ValueError(f"drafter is {self.drafter!r}; it must be a folder or a hub name")
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}; use one of {', '.join(allowed)}")
        for name, high in _WHOLE.items():
            _require_within(name, getattr(self, name), 1, high, whole=True)
        _require_within("sure", self.sure, 0, 1)
        if (self.depth - 1) * self.width > _WHOLE["nodes"]:
            raise ValueError(
                f"depth {self.depth} and width {self.width} expand {(self.depth - 1) * self.width} "
                f"nodes; at most {_WHOLE['nodes']} are allowed, so lower one of them"
            )

    @property
    def is_ranked(self) -> bool:
        """Whether drafting needs a ranking of the task's tokens."""
        return self.vocabulary in ("ranked", "recent+ranked")


def _require_within(
    name: str, value: object, low: float, high: float, *, whole: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{name} is {value!r}; it must be {'an integer' if whole else 'a number'}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it goes from {low} to {high}")


_FIELD = "{input}"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
Quantization = Literal["nf4", "int8", "int8-dynamic", "int8-dynamic-float-head"]
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAY_BE_UNSET = ("adapter", "revision", "corpus")
# Fields that are left out of the JSON if unset. So putting an older record again writes the same
# JSON and adds no version, and older programs can read records without these fields.
_LATER = (
    *("quantization", "sampling", "choices", "schema", "regex", "adapters", "neural", "chat"),
    *("allow_special_tokens_in_input", "label_end", "abstain_below", "label_temperature"),
    *("calibrated_for", "label_biases", "abstain_label"),
)

_PARTS: dict[str, type[Any]] = {
    "draft": DraftSettings,
    "sampling": SamplingDefaults,
    "neural": NeuralDrafting,
    "chat": ChatTemplate,
}


@dataclass(frozen=True)
class TaskRecord:
    """The complete definition of a task.

    Attributes:
        name: Letters, digits, ``.``, ``_`` and ``-``; at most 64.
        model: Hub name or folder of the base model.
        fingerprint: Fingerprint of the target's tokenizer.
        template: Prompt with ``{input}`` exactly once; with ``chat``, it must be ``{input}``.
        adapter: Hub name or folder of a PEFT adapter.
        revision: Revision of the base model on the hub.
        dtype: float32, bfloat16, float16 or float64.
        stop: Strings that end an answer.
        max_tokens: Maximum number of tokens of an answer, unless a request sets another maximum.
        corpus: The task whose corpus this task drafts from; unset: this task.
        draft: The drafting settings of the task.
        quantization: nf4, int8, int8-dynamic or int8-dynamic-float-head; unset: weights of
            ``dtype``.
        sampling: Sampling parameters, used where a request sets none.
        choices: Labels; the answer is one of them. Only one of choices, schema and regex may be
            set.
        schema: JSON schema of the answer, as text.
        regex: Regular expression of the whole answer.
        adapters: Pairs of a name and a folder or hub name of a PEFT adapter. Each request uses one
            of them, by default the first. A name has up to 64 letters, digits, ``.``, ``_`` and
            ``-``. Only one of adapter and adapters may be set.
        neural: A drafter, which drafts alone or together with n-grams; unset: only n-grams draft.
        chat: The model's chat template, and the turns that conversations begin with; unset: prompts
            are made by ``template``.
        allow_special_tokens_in_input: Whether spellings of special tokens, such as ``<|im_end|>``,
            become these tokens in texts that are put into the template; else they are ordinary
            text.
        label_end: The text behind each of the choices when they are scored; empty: nothing; unset:
            an end of sequence.
        abstain_below: If the likeliest of scored choices has a lower probability, there is no
            answer; unset: there is always one.
        abstain_label: The answer in place of none.
        label_temperature: Divisor of the log-probabilities of scored choices, which calibrates
            them; unset: they are not calibrated.
        label_biases: Numbers that are added to the quotients of the choices, one for each; empty:
            nothing is added. Used only with ``label_temperature``.
        calibrated_for: `scoring_fingerprint` of the record for which ``label_temperature`` and
            ``label_biases`` were fitted.

    Raises:
        ValueError: A value is of the wrong kind or outside its range; or ``label_temperature`` was
            fitted for another model, prompt or label set.
    """

    name: str
    model: str
    fingerprint: str
    template: str
    adapter: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    corpus: str | None = None
    draft: DraftSettings = field(default_factory=DraftSettings)
    quantization: Quantization | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    choices: tuple[str, ...] = ()
    schema: str | None = None
    regex: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    neural: NeuralDrafting | None = None
    chat: ChatTemplate | None = None
    allow_special_tokens_in_input: bool = False
    label_end: str | None = None
    abstain_below: float | None = None
    abstain_label: str | None = None
    label_temperature: float | None = None
    label_biases: tuple[float, ...] = ()
    calibrated_for: str | None = None

    def __post_init__(self) -> None:
        for name in ("name", "model", "fingerprint", "template", *_MAY_BE_UNSET):
            _check_text(name, getattr(self, name))
        keys.checked_task(self.name)
        keys.checked_task(self.corpus_name)
        keys.checked_fingerprint(self.fingerprint)
        if (found := self.template.count(_FIELD)) != 1:
            raise ValueError(f"template has {_FIELD} {found} times; put it in exactly once")
        if not isinstance(self.chat, ChatTemplate | None):
            raise ValueError(f"chat is {self.chat!r:.80}; it must be an object, or unset")
        if self.chat is not None and self.template != _FIELD:
            raise ValueError(
                f"template is {self.template!r:.80}, and there is a chat template; set one of them"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(_DTYPES)}")
        if self.quantization not in (None, *get_args(Quantization)):
            allowed = ", ".join(get_args(Quantization))
            raise ValueError(f"quantization is {self.quantization!r}; use {allowed}, or none")
        if self.is_int8 and self.dtype != "float32":
            raise ValueError(
                f"quantization is {self.quantization} and dtype is {self.dtype}; leave dtype out, "
                "because everything but the products is float32"
            )
        if not isinstance(self.stop, tuple) or not all(_is_text(s) for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a list of non-empty strings")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens!r}; it must be an integer above 0")
        check_forms(self.choices, self.schema, self.regex)
        _check_adapters(self.adapters)
        if self.adapter is not None and self.adapters:
            raise ValueError(
                "adapter and adapters are set; unset one, or name the adapter among adapters"
            )
        if not isinstance(self.neural, NeuralDrafting | None):
            raise ValueError(f"neural is {self.neural!r:.80}; it must be an object, or unset")
        spells = self.allow_special_tokens_in_input
        if not isinstance(spells, bool):
            raise ValueError(
                f"allow_special_tokens_in_input is {spells!r:.80}; it must be true or false"
            )
        self._check_scoring()

    def _check_scoring(self) -> None:
        if not isinstance(self.label_end, str | None):
            raise ValueError(f"label_end is {self.label_end!r:.80}; it must be a text, or unset")
        if self.abstain_below is not None:
            _require_within("abstain_below", self.abstain_below, 0, 1)
        if not isinstance(self.abstain_label, str | None):
            raise ValueError(f"abstain_label is {self.abstain_label!r:.80}; it must be a text")
        biases = self.label_biases
        if not isinstance(biases, tuple) or not all(map(_is_finite, biases)):
            raise ValueError(f"label_biases is {biases!r:.80}; it must be a list of finite numbers")
        if self.label_temperature is None:
            return
        _require_within("label_temperature", self.label_temperature, 0.01, 100)
        if self.calibrated_for != self.scoring_fingerprint:
            raise ValueError(
                f"the calibration (label_temperature {self.label_temperature:g}) is for another "
                "model, adapter, dtype, prompt, label end or label set; unset it (with "
                "--unset label_temperature), and run `tasc calibrate` again"
            )
        if biases and len(biases) != len(self.choices):
            raise ValueError(
                f"label_biases has {len(biases)} numbers; give one for each of "
                f"{len(self.choices)} choices, or none"
            )

    @property
    def scoring_fingerprint(self) -> str:
        """Identifies all that the probabilities of the choices depend on."""
        chat = None if self.chat is None else asdict(self.chat)
        parts: list[Any] = [self.model, self.revision, self.adapter, self.adapters, self.dtype]
        parts += [self.quantization, self.template, chat, self.choices, self.label_end]
        parts += [self.fingerprint, self.allow_special_tokens_in_input]
        return sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def is_int8(self) -> bool:
        """Whether the engine's own int8 products are used, on a CPU."""
        return self.quantization in ("int8-dynamic", "int8-dynamic-float-head")

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names by which requests choose an adapter."""
        return tuple(name for name, _ in self.adapters)

    @property
    def corpus_name(self) -> str:
        """The task whose corpus this task drafts from."""
        return self.name if self.corpus is None else self.corpus

    def to_json(self) -> str:
        content = {**asdict(self), "sampling": self.sampling.given}
        written = {k: v for k, v in content.items() if v or v == "" or k not in _LATER}
        return json.dumps(written, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a record written by `to_json` or by hand; fields with a default may be absent.

        Raises:
            ValueError: The text is not a JSON object, a field is unknown or missing, or a value is
                wrong.
        """
        content = _object("task record", json.loads(text), cls)
        for name in ("stop", "choices", "label_biases"):
            if isinstance(content.get(name), list):
                content[name] = tuple(content[name])
        if "adapters" in content:
            content["adapters"] = _pairs(content["adapters"])
        for name, part in _PARTS.items():
            if name in content and not (name in ("neural", "chat") and content[name] is None):
                values = _object(name, content[name], part)
                for pairs in values.keys() & {"tokens", "shots"}:
                    values[pairs] = _pairs(values[pairs])
                content[name] = part(**values)
        return cls(**content)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and -math.inf < value < math.inf


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_text(name: str, value: object) -> None:
    if value is None and name in _MAY_BE_UNSET:
        return
    if not _is_text(value):
        raise ValueError(f"{name} is {value!r}; it must be a non-empty string")


def _pairs(content: Any) -> Any:
    """Converts an object or a list to pairs; returns invalid values unchanged, for later checks."""
    if isinstance(content, dict):
        return tuple(content.items())
    if not isinstance(content, list):
        return content
    return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in content)


def _check_adapters(adapters: object) -> None:
    if not isinstance(adapters, tuple) or not all(map(_is_pair, adapters)):
        raise ValueError(
            f"adapters is {adapters!r:.200}; it must be pairs of a name and a folder or hub name"
        )
    names = [name for name, _ in adapters]
    for name in names:
        if not _ADAPTER_NAME.fullmatch(name):
            raise ValueError(
                f"adapters has the name {name!r:.80}; use 1 to 64 of letters, digits, '.', '_' "
                "and '-'"
            )
        if names.count(name) > 1:
            raise ValueError(f"adapters has {name!r} twice; use each name once")


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_text, value))


def _object(kind: str, content: Any, cls: type[Any]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{kind} is {content!r:.80}; it must be a JSON object")
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(content.keys() - known.keys()):
        raise ValueError(
            f"{kind} has unknown fields {', '.join(unknown)}; known are {', '.join(known)}"
        )
    needed = (n for n, f in known.items() if f.default is f.default_factory is MISSING)
    if missing := [n for n in needed if n not in content]:
        raise ValueError(f"{kind} lacks {', '.join(missing)}; add what is missing")
    return dict(content)
