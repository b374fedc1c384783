"""How a model's files say that its answers are chosen, where tasks choose them otherwise.

transformers' ``generate`` follows ``generation_config.json``, and without one ``config.json``. A
task takes the most likely token unless its options say otherwise.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasc_jobs.tasks.values import option
from tasc_text.ends import CONFIG, GENERATION, read_json

# What `generate` samples by if the files do not say, and what a task does without options.
_SAMPLING = {"temperature": (1.0, 0.0), "top_k": (50, 0), "top_p": (1.0, 1.0), "min_p": (0.0, 0.0)}
# No option of a task does what these do; the values are those that change nothing.
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
    """Settings of a model's files that change answers and that no task takes over.

    Attributes:
        file: The file that has them.
        values: Of a task, by name, with which it answers in the same way.
        others: Settings that no option of a task stands for.
    """

    file: str
    values: Mapping[str, Any]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "GenerationDefaults":
        """Read those of a model folder.

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
            values["stop"] = [stops] if isinstance(stops, str) else stops
        own = {name: settings[name] for name in others if name in settings}
        return cls(file, values, {k: v for k, v in own.items() if v not in others[k]})

    def without(self, names: Collection[str]) -> "GenerationDefaults":
        """Those but the values of these names."""
        values = {name: value for name, value in self.values.items() if name not in names}
        return GenerationDefaults(self.file, values, self.others)

    @property
    def options(self) -> list[str]:
        """Words of a command line that give a task the values."""
        given = {name: v if isinstance(v, list) else [v] for name, v in self.values.items()}
        return [word for name in given for v in given[name] for word in (option(name), str(v))]

    def in_words(self, way_out: str) -> str:
        """A line on what is not taken over; empty where there is nothing.

        Args:
            way_out: Gives a task the values.
        """
        said = []
        if self.values:
            said.append(
                f"{_listed(self.values)}, which a task uses only if its options say so: {way_out}"
            )
        if self.others:
            found = [field for name, field in _OF_REQUESTS.items() if name in self.others]
            requests = f" (requests have {' and '.join(found)})" if found else ""
            said.append(f"{_listed(self.others)}, for which tasks have no option{requests}")
        return f"{self.file} of the model says {'; and '.join(said)}" if said else ""


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
