"""Tests the pages that a new user follows: their blocks run in order in one folder."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from documents import FOLLOWED, LANGUAGES, ROOT, Block, document, documents

from tasc_command import Command

_LIMIT_S = 600
_MARK = pytest.mark.slow("it starts engines and Ray")
_QUICK = {"install.md"}


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    home = tmp_path / "home"
    home.mkdir()
    command = Command(home)
    command.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    yield command
    command.kill()


def run_page(blocks: Sequence[Block], command: Command, tmp_path: Path) -> str:
    """Run blocks as one shell would; returns what they printed.

    A service that a page starts in the background must be ended by the page.
    """
    folder = tmp_path / "empty"
    folder.mkdir()
    lines = ["set -e", "trap 'code=$?; [ $code = 0 ] || echo \"$block: exit code $code\"' EXIT"]
    for number, block in enumerate(blocks):
        lines.append(f"block={shlex.quote(block.name)}")
        if block.language == "python":
            program = tmp_path / f"block{number}.py"
            program.write_text(block.text)
            lines.append(f"python {program}")
        else:
            lines.append(block.text)
    script = tmp_path / "page.sh"
    script.write_text("\n".join(lines) + "\n")
    printed = tmp_path / "printed"
    with printed.open("w") as out:  # no pipe: processes in the background would hold it open
        ran = subprocess.run(
            ["bash", script], cwd=folder, env=command.env, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, timeout=_LIMIT_S,
        )  # fmt: skip
    assert ran.returncode == 0, printed.read_text()
    command.wait_until_gone()
    return printed.read_text()


def runnable(page: Path) -> list[Block]:
    found = (b for b in document(page).blocks if b.language in ("bash", "python"))
    return [block for block in found if block.reason is None and not block.is_make]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=() if p.name in _QUICK else _MARK, id=p.name) for p in FOLLOWED]
)
def test_blocks_of_a_page_run_in_order(page: Path, command: Command, tmp_path: Path) -> None:
    blocks = runnable(page)
    ports = {int(port) for b in blocks for port in re.findall(r"127\.0\.0\.1:(\d+)", b.text)}
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"another program uses port {port}, which this page needs; end it")
    if blocks:
        run_page(blocks, command, tmp_path)


def test_failing_block_is_named_and_later_blocks_do_not_run(command, tmp_path):
    texts = [
        ("bash", "X=7\nsleep 1000 &\necho $! > pid"),
        ("python", "print(open('pid').read())"),
        ("bash", "kill $(cat pid)\necho $((X + 1))"),
        ("bash", "false"),
        ("bash", "echo late"),
    ]
    blocks = [Block(ROOT / "p.md", i, *text, None) for i, text in enumerate(texts, 1)]
    with pytest.raises(AssertionError, match=r"p\.md:4: exit code 1") as failed:
        run_page(blocks, command, tmp_path)
    assert "8\n" in str(failed.value)
    assert "late\n" not in str(failed.value)
    (tmp_path / "empty").rename(tmp_path / "used")
    assert run_page(blocks[:3], command, tmp_path).endswith("8\n")


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_blocks_have_a_language_and_a_reason_if_they_do_not_run(page: Path) -> None:
    for block in document(page).blocks:
        assert block.language in LANGUAGES, f"{block.name}: no language of {sorted(LANGUAGES)}"
        assert block.reason != "", f"{block.name}: no reason not to run it"


def test_make_targets_named_in_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = {
        target
        for page in documents()
        for start, text in (
            *(("(?:^|; |&& )", b.text) for b in page.blocks if b.language == "bash"),
            ("`", page.prose),
        )
        for target in re.findall(f"{start}make ([a-z-]+)", text, re.M)
    }
    assert {"demo", "test"} <= named
    assert named <= targets
