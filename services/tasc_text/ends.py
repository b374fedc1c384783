"""Finds the tokens that end a model's answers in the files of its folder.

No single file is complete for all models. Chat models often end a turn with another token than they
end a text, and a fine-tuned model may name its end in one file only. So a token ends an answer if
any file names it as an end.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasc_text.errors import TokenizerError
from tasc_text.renderer import shared_renderer

TEMPLATE, TOKENIZER = "the chat template", "tokenizer_config.json"
GENERATION, CONFIG = "generation_config.json", "config.json"
_SPECIAL = "special_tokens_map.json"
_ANSWER = "an-answer-of-the-model"


def named_ends(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the ends of answers by the file that names them, without files that name none.

    The first end is the one that the model most likely writes: the end after an answer in the chat
    template, else the tokenizer's ``eos_token``, else the first end in the model's settings.

    Raises:
        TokenizerError: A file cannot be read, or the chat template breaks its renderer.
    """
    ids = _vocabulary(folder / "tokenizer.json")
    settings = read_json(folder / TOKENIZER)
    if "added_tokens_decoder" not in settings:  # as transformers does
        settings |= read_json(folder / _SPECIAL)
    special = {k: text for k, v in settings.items() if k.endswith("_token") and (text := _text(v))}
    found = {
        TEMPLATE: _turn_end(folder, settings, special, ids),
        TOKENIZER: _known((special.get("eos_token"),), ids),
        GENERATION: _ids(_eos(read_json(folder / GENERATION))),
        CONFIG: _ids(_eos(read_json(folder / CONFIG))),
    }
    return {name: ends for name, ends in found.items() if ends}


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; an empty object if there is no file or it has no object.

    Raises:
        TokenizerError: The file cannot be read as JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _vocabulary(path: Path) -> dict[str, int]:
    """Returns the ids of added tokens by text. Only added tokens are found verbatim in texts."""
    return {t["content"]: t["id"] for t in read_json(path).get("added_tokens", [])}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _known(texts: tuple[str | None, ...], ids: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(ids[text] for text in texts if text is not None and text in ids)


def _eos(settings: Mapping[str, Any]) -> Any:
    """Returns the end that settings name, for the model or else for its text part."""
    named, text = settings.get("eos_token_id"), settings.get("text_config")
    return text.get("eos_token_id") if named is None and isinstance(text, dict) else named


def _ids(named: Any) -> tuple[int, ...]:
    listed = named if isinstance(named, list) else [named]
    return tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _turn_end(
    folder: Path, settings: Mapping[str, Any], special: Mapping[str, str], ids: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the token that the chat template writes after an answer, if it is an added token."""
    source = _template(folder, settings)
    if source is None or not ("eos_token" in source or any(text in source for text in ids)):
        return ()
    try:
        behind = _behind_answer(source, tuple(special.items()))
    except RuntimeError as error:
        raise TokenizerError(
            f"the chat template of {folder} cannot be rendered ({error}); mend or remove it"
        ) from error
    return _known((max(filter(behind.startswith, ids), key=len, default=None),), ids)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the source of a folder's chat template, as transformers finds it."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read as text: {error}") from error
    named = settings.get("chat_template")
    if isinstance(named, list):
        pairs = [each for each in named if isinstance(each, dict)]
        named = next((e.get("template") for e in pairs if e.get("name") == "default"), None)
    return named if isinstance(named, str) else None


@lru_cache(16)
def _behind_answer(source: str, special: tuple[tuple[str, str], ...]) -> str:
    """Returns what a template writes after an answer; empty if it changes the answer's text."""
    answer = shared_renderer().ask(
        {
            "source": source,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": _ANSWER},
            ],
            "add_generation_prompt": False,
            "variables": dict(special),
        }
    )
    _, found, behind = answer.get("text", "").rpartition(_ANSWER)
    return behind.lstrip() if found else ""
