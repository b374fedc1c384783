"""Run what real clients' own documentation shows first against the demo service.

    python benchmarks/clients/bench_clients.py
    python benchmarks/clients/bench_clients.py --only openai,curl
    python benchmarks/clients/bench_clients.py --only curl --base http://127.0.0.1:8000

Only base URL, key and model name differ from the documentation. Each client has an environment of
its own in .bench/clients, which the first run installs; delete a folder to install the newest
version. What does not install counts as not passed. Clients run with their offline flags, and a
proxy that does not answer stands for every other host. The table goes to stdout and, if all clients
ran, into docs/reference/clients.md; progress goes to stderr, and what each client prints to
.bench/clients/NAME.log. The last line of stdout is one JSON object. The exit code is 1 if a case
did not pass.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.request import urlopen

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import common
from benchmarks.clients import cases
from benchmarks.common import ROOT, to_stderr
from tasc_store.embedded import free_port

HOMES = ROOT / ".bench" / "clients"
PAGE = ROOT / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- made by make test-clients -->", "<!-- end -->"
_START_S, _END_S, _INSTALL_S, _SCRIPT_S = 600.0, 90.0, 1800.0, 1800.0
_OFFLINE = {
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "OMP_NUM_THREADS"), "1"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}


@dataclass(frozen=True)
class Client:
    """A client and how it is installed.

    Attributes:
        requirements: What pip or npm installs; the first is the client. Nothing: it is there.
        shares: Whether it uses the packages of this Python, too; torch would be 2 GB once more.
    """

    name: str
    requirements: tuple[str, ...] = ()
    shares: bool = False

    @property
    def home(self) -> Path:
        return HOMES / self.name

    @property
    def site(self) -> Path:
        return next(self.home.glob("lib/python3*/site-packages"))

    @property
    def is_node(self) -> bool:
        return self.name.endswith("-node")

    @property
    def script(self) -> Path:
        name = f"with_{self.name.replace('-', '_')}.{'mjs' if self.is_node else 'py'}"
        return Path(__file__).resolve().with_name(name)

    @property
    def cases(self) -> list[str]:
        """Names of its cases, read from the script."""
        return re.findall(r'^(?:case\(|  \[)\s*"([^"]+)"', self.script.read_text("utf-8"), re.M)

    @property
    def version(self) -> str:
        name = self.requirements[0].partition("[")[0] if self.requirements else self.name
        if self.is_node:
            package = self.home / "node_modules" / name / "package.json"
            return str(json.loads(package.read_text("utf-8"))["version"])
        if self.requirements:
            return next(iter(distributions(name=name, path=[str(self.site)]))).version
        return subprocess.run([name, "--version"], capture_output=True, text=True).stdout.split()[1]


CLIENTS = (
    Client("openai", ("openai",)),
    Client("openai-node", ("openai",)),
    Client("litellm", ("litellm", "mcp")),  # its Responses API imports mcp
    Client("langchain-openai", ("langchain-openai",)),
    Client("instructor", ("instructor",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",)),
    Client("dspy", ("dspy",)),
    Client("lm-eval", ("lm-eval[api,hf]",), shares=True),
    Client("guidellm", ("guidellm",), shares=True),
    Client("curl"),
)


@dataclass
class Found:
    """The outcome of a client's cases; each is as `cases.run` prints it."""

    version: str = ""
    trouble: str = ""
    cases: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [f"{e['case']}: {e['error']}"[:240] for e in self.cases if not e["passed"]]


def main() -> int:
    parser, names = common.parser_of(__doc__), [client.name for client in CLIENTS]
    known = common.names_of(*names)
    parser.add_argument("--only", type=known, default=names, help=f"clients ({','.join(names)})")
    parser.add_argument("--base", help="URL of a running demo service; unset: one is started")
    parser.add_argument("--python", help="Python that has the clients; nothing is installed")
    common.add_json(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the service is ended, too
    chosen = {client: Found() for client in CLIENTS if client.name in options.only}
    for client, found in chosen.items():
        found.trouble = "" if options.python else install(client)
    with nullcontext(options.base) if options.base else demo() as base:
        for client, found in chosen.items():
            to_stderr(f"{client.name}: {len(client.cases)} cases ...")
            run(client, found, base, options.python)
            for each in found.failed:
                to_stderr(f"  not passed: {each}")
    rows = [
        [
            c.name,
            f.version,
            f"{len(f.cases) - len(f.failed)} of {len(f.cases)}",
            "\n".join(f.failed),
        ]
        for c, f in chosen.items()
    ]
    common.show_table("clients", ["client", "version", "passed", "not passed"], rows)
    if len(chosen) == len(CLIENTS) and not options.python:
        write_page(chosen)
    cases_, failed = (sum(len(getattr(f, n)) for f in chosen.values()) for n in ("cases", "failed"))
    record = {"passed": cases_ - failed, "cases": cases_, **common.about()}
    record["clients"] = {client.name: asdict(found) for client, found in chosen.items()}
    common.finish(record, options.json)
    return int(failed > 0)


def install(client: Client) -> str:
    """Make a client's environment if it is not there; returns why that failed, if it did."""
    marker, wanted = client.home / ".installed", " ".join(client.requirements)
    if not wanted or (marker.is_file() and marker.read_text("utf-8") == wanted):
        return ""
    to_stderr(f"installing {client.name} ...")
    try:
        client.home.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(client.home), "--no-audit", "--no-fund"]
        if not client.is_node:
            subprocess.run([sys.executable, "-m", "venv", client.home], check=True)
            command = [str(client.home / "bin" / "pip"), "install", "--quiet"]
        if client.shares:
            (client.site / "shared.pth").write_text(sysconfig.get_paths()["purelib"], "utf-8")
        command += client.requirements
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"did not install: {lines[-1]}"
    marker.write_text(wanted, "utf-8")
    return ""


@contextmanager
def demo() -> Iterator[str]:
    """The service that `tasc demo --serve` starts, on a free port."""
    port, log = free_port("127.0.0.1"), HOMES / "service.log"
    base = f"http://127.0.0.1:{port}"
    code = "from tasc_jobs.cli.main import main; main()"
    log.parent.mkdir(parents=True, exist_ok=True)
    to_stderr("starting the demo service ...")
    with tempfile.TemporaryDirectory(prefix="tasc-clients-") as folder, log.open("w") as out:
        env = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "RAY_ADDRESS")}
        service = subprocess.Popen(
            [sys.executable, "-c", code, "demo", "--serve", "--port", str(port)], cwd=folder,
            env={**env, "TASC_DATA_DIR": f"{folder}/redis", "HOME": folder},
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + _START_S
            while not is_ready(base):
                if service.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the demo service did not start; {log} says why")
                time.sleep(0.5)
            yield base
        finally:
            service.send_signal(signal.SIGTERM)
            killer = threading.Timer(_END_S, os.killpg, (service.pid, signal.SIGKILL))
            killer.start()
            service.wait()
            killer.cancel()


def is_ready(base: str) -> bool:
    try:
        with urlopen(f"{base}/readyz", timeout=5):
            return True
    except OSError:
        return False


def run(client: Client, found: Found, base: str, python: str | None = None) -> None:
    """Run a client's script; cases that it does not tell of have not passed."""
    if not found.trouble:
        found.version = "" if python else client.version
        own = shutil.which("node") if client.is_node else f"{client.home}/bin/python"
        program = python or (own if client.requirements else sys.executable)
        facts = {name: getattr(cases, name) for name in ("MODEL", "INPUT", "PROMPT", "ANSWER")}
        env = {k: os.environ[k] for k in ("PATH", "LANG", "TMPDIR") if k in os.environ} | _OFFLINE
        env |= {"HOME": str(HOMES / "home"), "CLIENT_HOME": str(client.home), "CLIENT_BASE": base}
        env["CLIENT_FACTS"] = json.dumps({**facts, "API": f"{base}/v1"})
        log = HOMES / f"{client.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as err:
            process = subprocess.Popen(
                [str(program), str(client.script)], cwd=ROOT, env=env, stdout=subprocess.PIPE,
                stderr=err, text=True, start_new_session=True,
            )  # fmt: skip
        # A case ends at its own limit; this is for a client that cannot be interrupted.
        timer = threading.Timer(_SCRIPT_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout
        with process.stdout as lines:
            found.cases = [json.loads(line) for line in lines]
        code = process.wait()
        timer.cancel()
        if len(found.cases) < len(client.cases):
            found.trouble = f"the script ended, with code {code}; {log} says why"
    told = {each["case"] for each in found.cases}
    nothing = {"passed": False, "error": found.trouble, "found": None, "seconds": 0.0}
    found.cases += [{"case": name, **nothing} for name in client.cases if name not in told]


def write_page(chosen: Mapping[Client, Found]) -> None:
    """Put the table between the markers of the page."""
    lines = ["| client | version | passed | cases |", "|---|---|---|---|"]
    for client, found in chosen.items():
        told = [e["case"] if e["passed"] else f"**not: {e['case']}**" for e in found.cases]
        share = f"{len(told) - len(found.failed)} of {len(told)}"
        version = found.version or "did not install"
        lines.append(f"| `{client.name}` | {version} | {share} | {', '.join(told)} |")
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text("\n\n".join([f"{head}{BEGIN}", "\n".join(lines), f"{END}{tail}"]), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
