"""The benchmark's last line: every figure, what it was measured with, and on what. No tables."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draft_bars import NODES, Figure
from draft_costs import Costs
from draft_peers import PEERS
from draft_replays import Drafted, percentile

from tasc_draft import Replay

_PACKAGES = ("numpy", "numba", "tokenizers", "transformers", "torch")


def settings_of(rows: int, data: str, fingerprint: str) -> dict[str, Any]:
    """What was run, and where."""
    return {
        "benchmark": "drafts",
        "git": git_revision(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
            **{peer.package: peer.version for peer in PEERS},
        },
        "machine": {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()},
        "rows": rows,
        "nodes": NODES,
        "data": data,
        "tokenizer": fingerprint,
    }


def print_report(benchmark: str, found: Mapping[str, Any], file: Path | None) -> None:
    """A benchmark's last line, and the same in a file if one is named."""
    about = {"git": git_revision(), "processor": processor()}
    line = json.dumps(rounded({"benchmark": benchmark, **found, **about}))
    if file:
        file.write_text(line + "\n", encoding="utf-8")
    print(line)


def figures_record(figures: list[Figure]) -> list[dict[str, Any]]:
    return [figure.record for figure in figures]


def tasks_record(drafted: Mapping[str, Drafted]) -> dict[str, Any]:
    """Counts and tokens per step of each task; times are in `costs_record`."""
    return {
        name: {
            **replay_record(found.repeats[0]),
            "frozen": found.frozen.tokens_per_step,
            "by_nodes": found.sizes,
            "ceiling": found.ceiling,
            "peers": {peer: replay_record(r) for peer, r in found.peers.items()},
        }
        for name, found in drafted.items()
    }


def replay_record(found: Replay) -> dict[str, Any]:
    return {
        "tokens_per_step": found.tokens_per_step,
        "rows": found.rows,
        "steps": found.steps,
        "tokens": found.tokens,
        "draft_tokens": found.nodes,
        "drafted_steps": found.drafted_steps,
        "step_us": [percentile(found.draft_us, q) for q in (50, 99)],
        "start_us": [percentile(found.start_us, q) for q in (50, 99)],
    }


def costs_record(drafted: Mapping[str, Drafted], costs: Costs) -> dict[str, Any]:
    """Percentiles 50 and 99 of each repeat's times, and what building took."""
    return {
        "tasks": {
            name: {
                "step_us": _percentiles([r.draft_us for r in found.repeats]),
                "start_us": _percentiles([r.start_us for r in found.repeats]),
                "batch_us": _percentiles(costs.batch_us[name]),
                "build": asdict(costs.build[name]),
            }
            for name, found in drafted.items()
        },
        "two_processes": {"task": costs.cores_task, **asdict(costs.cores)},
    }


def git_revision() -> dict[str, Any]:
    """The commit that was measured, and whether files differed from it."""
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {"revision": head, "changed": bool(changes)}


def processor() -> str:
    """The processor's name where Linux tells, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def rounded(value: Any) -> Any:
    """The same with four digits behind the point, however deep."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def _percentiles(repeats: list[list[float]]) -> list[list[float]]:
    return [[percentile(us, q) for q in (50, 99)] for us in repeats]


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
