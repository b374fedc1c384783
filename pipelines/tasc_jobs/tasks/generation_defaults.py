"""Generation settings in a model's files that differ from those of tasks.

transformers' ``generate`` follows ``generation_config.json``, or ``config.json`` if there is no
such file. A task takes the most likely token unless its options change that.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.values import option, record_of
from tasc_text.ends import CONFIG, GENERATION, read_json
from tasc_text.template import FIELD

# Sampling values: the default of `generate`, and the value of a task without options.
_SAMPLING = {"temperature": (1.0, 0.0), "top_k": (50, 0), "top_p": (1.0, 1.0), "min_p": (0.0, 0.0)}
# Settings for which tasks have no option, and the values with which a setting has no effect.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "watermarking_config": (),
}
_OTHERS_SAMPLED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
_OF_REQUESTS = {"suppress_tokens": "logit_bias", "min_new_tokens": "min_tokens"}


@dataclass(frozen=True)
class GenerationDefaults:
    """Settings in a model's files that affect answers, and that tasks use only if options say so.

    Attributes:
        file: The file with the settings.
        values: Task values that reproduce `generate`, by name; values that a task cannot have are
            left out.
        others: Settings for which tasks have no option.
        implicit: Names of values that are not in the file and are defaults of `generate`.
    """

    file: str
    values: Mapping[str, Any]
    others: Mapping[str, Any]
    implicit: Collection[str] = ()

    @classmethod
    def of(cls, folder: Path) -> "GenerationDefaults":
        """Read the settings of a model folder.

        Raises:
            TokenizerError: A file cannot be read.
        """
        file = GENERATION if (folder / GENERATION).is_file() else CONFIG
        settings = {k: v for k, v in read_json(folder / file).items() if v not in (None, [], {})}
        values: dict[str, Any] = {}
        others = dict(_OTHERS)
        if settings.get("do_sample") is True:
            found = {name: settings.get(name, by) for name, (by, _) in _SAMPLING.items()}
            values = {name: v for name, v in found.items() if v != _SAMPLING[name][1]}
            others |= _OTHERS_SAMPLED
        if settings.get("repetition_penalty", 1) != 1:
            values["repetition_penalty"] = settings["repetition_penalty"]
        if stops := settings.get("stop_strings"):
            given = stops if isinstance(stops, list) else [stops]
            values["stop"] = [text for text in given if _valid("stop", (text,))]
        values = {name: v for name, v in values.items() if v != [] and _valid(name, v)}
        own = {name: settings[name] for name in others if name in settings}
        changing = {k: v for k, v in own.items() if v not in others[k]}
        return cls(file, values, changing, _SAMPLING.keys() - settings)

    def without(self, names: Collection[str]) -> "GenerationDefaults":
        """Returns a copy without the values of these names."""
        values = {name: value for name, value in self.values.items() if name not in names}
        return replace(self, values=values)

    @property
    def options(self) -> list[str]:
        """Command-line arguments that set these values for a task."""
        given = {name: v if isinstance(v, list) else [v] for name, v in self.values.items()}
        pairs = [(option(name), str(v)) for name in given for v in given[name]]
        # A value with a leading hyphen would be parsed as an option.
        return [
            word
            for name, v in pairs
            for word in ((f"{name}={v}",) if v.startswith("-") else (name, v))
        ]

    def in_words(self, way_out: str) -> str:
        """Returns a line on the settings that tasks do not use; empty if there are none.

        Args:
            way_out: Text that explains how to give a task the values.
        """
        parts = []
        if self.values:
            sampled = ["do_sample"] if self.values.keys() & self.implicit else []
            shown = (
                f"{name} {value}{' by default' if name in self.implicit else ''}"
                for name, value in self.values.items()
            )
            parts.append(
                f"{', '.join([*sampled, *shown])}, which a task uses only if its options say so: "
                f"{way_out}"
            )
        if self.others:
            found = [field for name, field in _OF_REQUESTS.items() if name in self.others]
            requests = f" (requests have {' and '.join(found)})" if found else ""
            listed = ", ".join(f"{name} {value}" for name, value in self.others.items())
            parts.append(f"{listed}, for which tasks have no option{requests}")
        return f"{self.file} of the model says {'; and '.join(parts)}" if parts else ""


def _valid(name: str, value: Any) -> bool:
    """Whether a task can have a value."""
    value = tuple(value) if isinstance(value, list) else value
    try:
        record_of({"name": "t", "model": "m", "fingerprint": "f", "template": FIELD, name: value})
    except UsageError:
        return False
    return True
