"""What a task's answers may be: labels, a JSON schema or a regular expression, as text.

It checks sizes and that a schema is JSON; it compiles none of them and knows no tokenizer.
"""

import json

MOST_CHOICES = 20_000
MOST_CHOICE_CHARACTERS = 2_000_000  # of all choices together
MOST_TEXT_BYTES = 64 * 1024  # of a schema or a regular expression, in UTF-8


def check_forms(choices: object, schema: str | None, regex: str | None) -> None:
    """Raises ValueError: more than one of them is set, or one is empty, too large or no text."""
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
            _check_text(name, text)
    if schema is not None:
        _check_json(schema)


def _check_choices(choices: object) -> None:
    if not isinstance(choices, tuple) or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choices is {choices!r:.80}; it must be a list of non-empty strings")
    if len(choices) > MOST_CHOICES:
        raise ValueError(f"choices has {len(choices)} labels; at most {MOST_CHOICES}")
    if (size := sum(map(len, choices))) > MOST_CHOICE_CHARACTERS:
        raise ValueError(f"choices has {size} characters; at most {MOST_CHOICE_CHARACTERS}")
    seen: set[str] = set()
    for choice in choices:
        _encoded("choices", choice)
        if choice in seen:
            raise ValueError(f"choices has {choice!r:.80} twice; leave one out")
        seen.add(choice)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} is {text!r:.80}; it must be a non-empty string")
    if (size := len(_encoded(name, text))) > MOST_TEXT_BYTES:
        raise ValueError(f"{name} has {size} bytes; at most {MOST_TEXT_BYTES}")


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate in {text!r:.80}; write UTF-8") from error


def _check_json(schema: str) -> None:
    try:
        content = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema is no JSON ({error}); give a JSON schema") from error
    if not isinstance(content, dict):
        raise ValueError(f"schema is {schema!r:.80}; it must be a JSON object")
