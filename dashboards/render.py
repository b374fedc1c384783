"""Writes each dashboard beside this file as JSON for Grafana; ``--check`` only compares."""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from corpora import CORPORA
from drafting import DRAFTING
from latency import LATENCY
from panels import Dashboard

_FILES = {"latency.json": LATENCY, "drafting.json": DRAFTING, "corpora.json": CORPORA}


def rendered(dashboard: Dashboard) -> str:
    """The dashboard's file content."""
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard.built()) + "\n"


def stale(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that are missing or differ from what they would be."""
    return [
        name
        for name, dashboard in _FILES.items()
        if not (path := folder / name).exists() or path.read_text("utf-8") != rendered(dashboard)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is stale")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    names = stale(options.folder)
    if options.check:
        for name in names:
            print(f"{name} is stale; run: python dashboards/render.py", file=sys.stderr)
        return 1 if names else 0
    for name in names:
        (options.folder / name).write_text(rendered(_FILES[name]), "utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
