"""What was measured before, with what it was measured by: settings, commit, processor.

A file of other settings is measured anew; one of another commit is taken, and its commit told.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draft_report import git_revision, processor

_used: dict[str, Any] = {}


def kept(file: Path, settings: str, measure: Callable[[], Any]) -> Any:
    """What the file has if it was measured with these settings; else what ``measure`` finds."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.get("settings") != settings:
        by = {"settings": settings, "git": git_revision(), "processor": processor()}
        found = {**by, "found": measure()}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(file)
    by = {name: found[name] for name in ("git", "processor")}
    _used[json.dumps(by, sort_keys=True)] = by
    return found["found"]


def measured_by() -> list[dict[str, Any]]:
    """Commits and processors of all that was taken."""
    return list(_used.values())
