"""What kept files say of how they were made, held against what is asked for now. It makes none."""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasc_text import PromptTemplate


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write_whole(file: Path, found: Mapping[str, Any]) -> None:
    """Whoever reads the file, or stops the writer, finds all of it or nothing."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(file)


def require_same(path: Path, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Hold a file or folder to what is asked; what it does not say, as older ones, is no matter.

    Raises:
        SystemExit: It was made otherwise.
    """
    differ = [
        f"{name} is {kept[name]!r} there and {value!r} here"
        for name, value in asked.items()
        if name in kept and kept[name] != value
    ]
    if differ:
        raise SystemExit(
            f"{path} was made otherwise: {', '.join(differ)}; name another --work, or delete it"
        )


def circumstances(template: PromptTemplate) -> dict[str, str]:
    """What an answer's time and quality hang on beside the fine-tune: libraries and the prompt."""
    digest = hashlib.blake2b(template.text.encode(), digest_size=8).hexdigest()
    return {"torch": version("torch"), "transformers": version("transformers"), "template": digest}
