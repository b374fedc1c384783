"""The way of one chat request through a running service: functions and files, to and from a step.

    python benchmarks/suite/walk.py [--tree DIR] [--list]

A hop is a function of the project that receives the prompt, as text or as token ids, or a record
that holds it, from the endpoint to the first forward. On the way back it is a function that
receives a record of the answer. Each function counts once. `--tree` names another checkout with
the same environment, so that two of them are counted in the same way.

A tracer is loaded into all processes of the service. It notes calls while a file exists, and looks
for the prompt in their arguments. The last line of stdout is one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx

from benchmarks.common import finish, folder, parser_of, show_table, to_stderr

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "wake me up at nine thirty on tuesday the fourteenth"
_TASK, _TEMPLATE = "walk", "intent and slots: {input}\\n"
_START_S = 180.0
# Names of records of an answer, in any version.
_ANSWERS = ("Delta", "Piece", "Answer", "Output", "Reply", "Chunk", "Answered", "GenerationResult")

# Loaded as `sitecustomize` by each process. It must not import anything of the project.
TRACER = """
import json, os, sys, threading, time
_HOME = os.environ["TASC_WALK"]
_ON, _IDS = os.path.join(_HOME, "on"), None
_TREES, _TEXT = os.environ["TASC_WALK_TREES"], os.environ["TASC_WALK_PROMPT"]
_TREES = tuple(_TREES.split(os.pathsep))
_ANSWERS = set(os.environ["TASC_WALK_ANSWERS"].split(","))
_state, _busy = {"on": False, "next": 0.0}, threading.local()
_records = {}

def _on():
    now = time.monotonic()
    if now >= _state["next"]:
        _state["on"], _state["next"] = os.path.exists(_ON), now + 0.02
    return _state["on"]

def _is_ids(value):
    global _IDS
    if _IDS is None and os.path.exists(os.path.join(_HOME, "ids")):
        with open(os.path.join(_HOME, "ids")) as file:
            _IDS = json.load(file)
    try:
        return _IDS is not None and len(value) == len(_IDS) and list(map(int, value)) == _IDS
    except Exception:
        return False

def _fields(value):
    names = getattr(type(value), "__dataclass_fields__", None)
    names = names or getattr(type(value), "__struct_fields__", None)
    names = names or getattr(type(value), "model_fields", None)
    if names and type(value).__module__.startswith("tasc_"):
        for name in names:
            yield getattr(value, name, None)

def _holds(value, depth):
    if isinstance(value, (str, bytes)):
        return _TEXT in (value if isinstance(value, str) else value.decode("utf-8", "ignore"))
    if type(value).__name__ == "ndarray" and getattr(value, "ndim", 0) == 1:
        return _is_ids(value)
    if depth == 0:
        return False
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], int):
            return _is_ids(value)
        return any(_holds(one, depth - 1) for one in value[:8])
    if isinstance(value, dict):
        return any(_holds(one, depth - 1) for one in list(value.values())[:8])
    return any(_holds(one, depth - 1) for one in _fields(value))

def _answers(value):
    if type(value).__name__ in _ANSWERS:
        return True
    return isinstance(value, (list, tuple)) and any(map(_answers, value[:4]))

def _profile(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    if not code.co_filename.startswith(_TREES) or not _on() or getattr(_busy, "on", False):
        return
    if "<" in code.co_name or code.co_name.startswith("__"):
        return  # comprehensions, and what a record does by itself
    _busy.on = True
    try:
        count = code.co_argcount + code.co_kwonlyargcount
        names = [n for n in code.co_varnames[:count] if n not in ("self", "cls")]
        values = [frame.f_locals.get(name) for name in names]
        kind = "prompt" if any(_holds(v, 4) for v in values) else None
        kind = kind or ("answer" if any(map(_answers, values)) else None)
        # Older trees have `Target._step`.
        forward = code.co_qualname in ("Target._start", "Target._step")
        if kind or forward:
            kind = "forward" if forward else kind
            line = [time.monotonic_ns(), kind, code.co_filename, code.co_qualname]
            with open(os.path.join(_HOME, f"{os.getpid()}.jsonl"), "a") as file:
                file.write(json.dumps(line) + "\\n")
    except Exception:
        pass
    finally:
        _busy.on = False

sys.setprofile(_profile)
threading.setprofile(_profile)
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tree", type=folder, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--list", action="store_true", help="show each hop")
    options = parser.parse_args()
    tree = options.tree.resolve()
    with tempfile.TemporaryDirectory() as home:
        calls = walked(tree, Path(home))
    began = next((at for at, kind, *_ in calls if kind == "forward"), None)
    if began is None:
        raise SystemExit("no forward was seen; does the service answer?")
    there = distinct(calls, "prompt", 0, began)
    back = distinct(calls, "answer", began, time.monotonic_ns())
    rows = [
        [name, str(len(hops)), str(len({file for file, _ in hops}))]
        for name, hops in (("prompt to its first forward", there), ("answer back", back))
    ]
    if options.list:
        for name, hops in (("prompt", there), ("answer", back)):
            listed = [[file.removeprefix(f"{tree}/"), function] for file, function in hops]
            show_table(name, ["file", "function"], listed)
    show_table("the way of a chat request", ["way", "hops", "files"], rows)
    finish({"there": [int(n) for n in rows[0][1:]], "back": [int(n) for n in rows[1][1:]]})


def distinct(
    calls: list[tuple[int, str, str, str]], kind: str, begin: int, end: int
) -> list[tuple[str, str]]:
    """Files and functions of one kind between two times, each once, in order."""
    return [
        *dict.fromkeys((f, name) for at, k, f, name in calls if k == kind and begin <= at < end)
    ]


def walked(tree: Path, home: Path) -> list[tuple[int, str, str, str]]:
    """Answers one request in a service of a tree; returns the calls, in order of time."""
    (home / "sitecustomize.py").write_text(TRACER)
    paths = [str(home), str(tree / "services"), str(tree / "pipelines")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TASC_WALK": str(home),
        "TASC_WALK_TREES": os.pathsep.join(paths[1:]),
        "TASC_WALK_PROMPT": PROMPT,
        "TASC_WALK_ANSWERS": ",".join(_ANSWERS),
        "TASC_DATA_DIR": str(home / "data"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("REDIS_URL", None)
    with serving(tree, home, environment) as url:
        ask(url, "play some jazz")  # what is compiled and connected once is no part of the way
        (home / "ids").write_text(json.dumps(prompt_ids(tree)))
        (home / "on").touch()
        time.sleep(0.2)
        ask(url, PROMPT)
        (home / "on").unlink()
        time.sleep(0.2)
    lines = (line for file in home.glob("*.jsonl") for line in file.read_text().splitlines())
    return sorted(tuple(json.loads(line)) for line in lines)


def prompt_ids(tree: Path) -> list[int]:
    from tasc_jobs.demo.tasks import MODEL
    from tasc_text import PromptTemplate, TaskTokenizer

    tokenizer = TaskTokenizer.from_folder(MODEL)
    template = PromptTemplate(_TEMPLATE.replace("\\n", "\n"))
    return [int(token) for token in template.encode(tokenizer, PROMPT)]


def ask(url: str, text: str) -> None:
    body: dict[str, Any] = {"model": _TASK, "messages": [{"role": "user", "content": text}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


@contextmanager
def serving(tree: Path, home: Path, environment: dict[str, str]) -> Iterator[str]:
    """A service of one task with the shipped model; ends with the block."""
    tasc = [str(Path(sys.executable).with_name("tasc"))]
    demo = tree / "pipelines/tasc_jobs/demo"
    made = [*tasc, "task", "create", _TASK, "--model", str(demo / "tasc-demo-7m")]
    made += ["--adapter", str(demo / "adapters/massive_en"), "--template", _TEMPLATE]
    subprocess.run(made, check=True, env=environment, cwd=home, stdout=subprocess.DEVNULL)
    port = 18_473
    settings = {"tasks": [{"name": _TASK}], "http": {"port": port}}
    (home / "service.yaml").write_text(json.dumps(settings))
    to_stderr(f"starting the service of {tree} ...")
    with (home / "log").open("wb") as log:
        service = subprocess.Popen(
            [*tasc, "serve", "--config", str(home / "service.yaml")],
            env=environment, cwd=home, stdout=log, stderr=log,
        )  # fmt: skip
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while not ready(url):
            if service.poll() is not None or time.monotonic() > ends:
                raise SystemExit(
                    f"the service did not start:\n{(home / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.5)
        yield url
    finally:
        service.terminate()
        service.wait(60)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
