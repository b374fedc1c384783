"""constraints.txt: one exact version of each package, inside the ranges of pyproject.toml."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RANGES = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def lines() -> list[str]:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def versions() -> dict[str, Version]:
    """The exact versions, by name."""
    found = {}
    for line in lines():
        requirement = Requirement(line)
        (exact,) = requirement.specifier
        assert exact.operator == "==", line
        found[canonicalize_name(requirement.name)] = Version(exact.version)
    return found


@pytest.mark.parametrize("text", RANGES)
def test_dependency_is_pinned_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(versions()[canonicalize_name(requirement.name)])


def test_pinned_versions_exist_on_every_package_index() -> None:
    """Each name occurs once, and `+cpu` would not exist on a machine with a GPU."""
    assert len(versions()) == len(lines()) > 100
    assert [name for name, version in versions().items() if version.local] == []
    assert not re.search(r"(?m)^-|://", (ROOT / "constraints.txt").read_text("utf-8"))


def test_transitive_dependencies_are_pinned() -> None:
    wanted, seen = list(RANGES), set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        for needed in _needed(requirement):
            if needed not in seen:
                seen.add(needed)
                wanted.append(needed)
    assert len(seen) > len(RANGES)
    assert {canonicalize_name(Requirement(text).name) for text in seen} <= versions().keys()


def _needed(requirement: Requirement) -> Iterator[str]:
    """Yields the packages that an installed package needs on this machine."""
    try:
        found = [Requirement(text) for text in requires(requirement.name) or ()]
    except PackageNotFoundError:
        return
    for one in found:
        extras = ({"extra": extra} for extra in ("", *requirement.extras))
        if one.marker is None or any(one.marker.evaluate(extra) for extra in extras):
            one.marker = None
            yield str(one)


def test_image_and_makefile_install_with_the_constraints() -> None:
    """The image's wheel is built apart, without its dependencies."""
    image = re.sub(r"\\\n\s*", "", (ROOT / "deploy" / "Dockerfile").read_text("utf-8"))
    installs = [line for line in image.splitlines() if "pip install" in line]
    with_packages = [line for line in installs if "--no-deps" not in line]
    assert len(with_packages) == 2
    recipe = re.sub(r"\\\n\s*", "", _recipe(".venv/.installed")).replace("$(PIP)", _variable("PIP"))
    made = re.findall(r"pip install(?:(?!pip install).)*", recipe)
    assert len(made) == 5  # numba, uv, torch, everything with uv, everything with pip
    assert all("--constraint constraints.txt" in line for line in (*made, *with_packages))


def _variable(name: str) -> str:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (found,) = re.findall(rf"(?m)^{name} := (.*)$", makefile)
    return str(found)


def _recipe(target: str) -> str:
    """Returns a target's prerequisites and commands."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (found,) = re.findall(rf"(?m)^{re.escape(target)}: .*\n(?:\t.*\n)+", makefile)
    return str(found)
