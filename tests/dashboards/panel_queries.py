"""All queries of all dashboards, as Grafana sends them."""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "dashboards"


def queries() -> dict[str, str]:
    """Returns the queries by file, panel and letter."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                name = f"{path.stem}: {panel['title']}, {panel['type']}, {target['refId']}"
                assert name not in found
                found[name] = as_sent(target["expr"])
    return found


def as_sent(expr: str) -> str:
    expr = expr.replace("$__rate_interval", "5s")
    expr = re.sub(r"\$(task|model_name)\b", ".*", expr)
    assert "$" not in expr.replace("$1", "")  # of label_replace, no variable
    return expr


QUERIES = queries()
