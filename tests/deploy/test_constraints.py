"""constraints.txt: one exact version of each package, inside the ranges of both distributions."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SERVE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DRAFT: dict[str, Any] = tomllib.loads((ROOT / "services" / "pyproject.toml").read_text("utf-8"))
PROJECT = SERVE["project"]
OWN = f"tasc-draft=={DRAFT['project']['version']}"
DEPENDENCIES = [text for text in PROJECT["dependencies"] if text != OWN]
RANGES = [*DEPENDENCIES, *PROJECT["optional-dependencies"]["dev"]]
OF_DRAFT = [
    *DRAFT["project"]["dependencies"],
    *chain(*DRAFT["project"]["optional-dependencies"].values()),
]
# Requirements of vLLM's wheels for Linux, for packages that tasc-draft requires, too; and the
# versions that uv chose on 2026-11-28 for vLLM alone, and again with `tasc-draft[redis,chat]`.
VLLM = {
    "0.32.0": (
        ["numba==0.65.0", "tokenizers>=0.23.2", "filelock>=3.20.3", "transformers>=5.16.1,<5.20"],
        ["numpy==2.3.5", "llvmlite==0.47.0", "tokenizers==0.23.3", "transformers==5.19.0"],
    ),
    "0.33.0": (
        ["numba==0.65.0", "tokenizers>=0.23.2", "filelock>=3.20.3", "transformers>=5.16.1,<5.21"],
        ["numpy==2.3.5", "llvmlite==0.47.0", "tokenizers==0.23.3", "transformers==5.20.2"],
    ),
}
BOTH = ["filelock==4.3.1", "fsspec==2026.9.0", "jinja2==3.1.6", "msgspec==0.22.0"]


def lines() -> list[str]:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def versions() -> dict[str, Version]:
    """The exact versions, by name."""
    found = {}
    for line in lines():
        requirement = Requirement(line)
        found[canonicalize_name(requirement.name)] = _exact(requirement)
    return found


def test_both_distributions_have_the_same_version_and_ranges() -> None:
    """So a test of the lowest or of the pinned versions counts for both."""
    assert OWN in PROJECT["dependencies"]
    assert PROJECT["version"] == DRAFT["project"]["version"]
    assert PROJECT["requires-python"] == DRAFT["project"]["requires-python"]
    assert set(OF_DRAFT) <= set(DEPENDENCIES)
    assert (ROOT / "services" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("version", VLLM)
def test_tasc_draft_changes_no_version_that_vllm_chooses(version: str) -> None:
    required, chosen = VLLM[version]
    pinned = {one.name: one for one in map(Requirement, [*chosen, *BOTH, required[0]])}
    for text in required:
        one = Requirement(text)
        assert one.specifier.contains(_exact(pinned[one.name])), text
    shared = [one for one in map(Requirement, OF_DRAFT) if one.name != "redis"]
    assert {one.name for one in shared} == pinned.keys()
    for ours in shared:
        assert ours.specifier.contains(_exact(pinned[ours.name])), str(ours)


def _exact(requirement: Requirement) -> Version:
    (exact,) = requirement.specifier
    assert exact.operator == "=="
    return Version(exact.version)


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
    assert all(line.endswith(" ./services .") for line in with_packages)
    recipe = re.sub(r"\\\n\s*", "", _recipe(".venv/.installed"))
    for name in ("PIP", "PROJECT"):
        recipe = recipe.replace(f"$({name})", _variable(name))
    made = re.findall(r"pip install(?:(?!pip install).)*", recipe)
    assert len(made) == 5  # numba, uv, torch, everything with uv, everything with pip
    assert all("--constraint constraints.txt" in line for line in (*made, *with_packages))
    assert all("--editable ./services --editable '.[dev]'" in line for line in made[-2:])


def _variable(name: str) -> str:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (found,) = re.findall(rf"(?m)^{name} := (.*)$", makefile)
    return str(found)


def _recipe(target: str) -> str:
    """Returns a target's prerequisites and commands."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (found,) = re.findall(rf"(?m)^{re.escape(target)}: .*\n(?:\t.*\n)+", makefile)
    return str(found)
