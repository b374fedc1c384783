"""The ``tasc`` command in this process, or in a separate one with traceable child processes."""

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support import DEADLINE_S, eventually
from tasc_jobs.cli.main import main
from tasc_jobs.hints import use_store


class InProcess:
    """Runs ``tasc`` in this process.

    Attributes:
        out, err: The stdout and the stderr of the last command.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = self.err = ""
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr("signal.signal", lambda signum, handler: None)

    def run(self, *args: object, code: int = 0) -> str:
        """Run a command to its end; returns its stdout, or its stderr if it has to fail."""
        self._monkeypatch.setattr(sys, "argv", ["tasc", *map(str, args)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        use_store(None, None)  # as in the next process
        self.out, self.err = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, self.err
        assert "Traceback" not in self.err, self.err
        return self.out if code == 0 else self.err


class KilledOnError(subprocess.Popen[str]):
    """A process that is killed if its block fails, as it might never end by itself."""

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self.kill()
        super().__exit__(kind, *error)


class Command:
    """Runs ``tasc`` with a mark in its environment by which all its processes can be found.

    Attributes:
        err: The stderr of the last command that `run` ran.
    """

    def __init__(self, folder: Path) -> None:
        self.err = ""
        self.mark = uuid.uuid4().hex
        self.data_dir = folder / "redis"
        unset = ("REDIS_URL", "RAY_ADDRESS", "XDG_CACHE_HOME", "XDG_DATA_HOME")
        self.env = {k: v for k, v in os.environ.items() if k not in unset}
        self.env |= {"TASC_TEST_MARK": self.mark, "TASC_DATA_DIR": str(self.data_dir)}
        self.env["HOME"] = str(folder)

    def start(self, *args: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        code = "from tasc_jobs.cli.main import main; main()"
        return KilledOnError(
            [sys.executable, "-c", code, *map(str, args)],
            env=self.env, text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *args: object, code: int = 0) -> str:
        """Run a command to its end; returns its stdout, or its stderr if it has to fail."""
        with self.start(*args) as process:
            out, self.err = self.finish(process)
        assert process.returncode == code, self.err
        assert "Traceback" not in self.err, self.err
        return out if code == 0 else self.err

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=DEADLINE_S)
        except BaseException:
            process.kill()  # its child processes die with it, or wait_until_gone finds them
            raise

    def processes(self) -> dict[int, str]:
        """The command of each process with the mark, by its id."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environ.read_bytes():
                    command = environ.with_name("cmdline").read_text().replace("\0", " ")
                    found[int(environ.parent.name)] = command
            except OSError:
                continue  # it ended while we looked
        return found

    def kill(self) -> None:
        """End the remaining processes with the mark."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self) -> None:
        eventually(lambda: not self.processes())
