"""Prints pip's constraints for the lowest version that pyproject.toml allows of each dependency."""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for dependency in project["dependencies"]:
        if found := re.match(r"([\w-]+)(?:\[.*\])?>=([^,]+)", dependency):
            print(f"{found[1]}=={found[2]}")


if __name__ == "__main__":
    main()
