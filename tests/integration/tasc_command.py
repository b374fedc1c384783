"""The ``tasc`` command in a process of its own, all of whose processes can be found again."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

from support import DEADLINE_S, eventually


class Command:
    """Runs ``tasc`` with a mark in its environment by which all its processes can be found."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.data_dir = folder / "redis"
        unset = ("REDIS_URL", "RAY_ADDRESS")
        self.env = {k: v for k, v in os.environ.items() if k not in unset}
        self.env |= {"TASC_TEST_MARK": self.mark, "TASC_DATA_DIR": str(self.data_dir)}
        self.env["HOME"] = str(folder)

    def start(self, *args: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        code = "from tasc_jobs.cli import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            env=self.env, text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *args: object, code: int = 0) -> str:
        with self.start(*args) as process:
            out, err = self.finish(process)
        assert process.returncode == code, err
        return out if code == 0 else err

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=DEADLINE_S)
        except BaseException:
            process.kill()  # what it started dies with it, or shows in wait_until_gone
            raise

    def processes(self) -> list[str]:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environ.read_bytes():
                    found.append(environ.with_name("cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it ended while we looked
        return found

    def wait_until_gone(self) -> None:
        eventually(lambda: not self.processes())
