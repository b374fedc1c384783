"""The killed job's output beside the undisturbed one's: bytes, ids, speed, and what was redone."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batch_runs import Run


def compared(alone: Run, killed: Run, rows: int) -> dict[str, Any]:
    """The benchmark's findings, for JSON."""
    counts = Counter(_ids(killed.output))
    wanted = {f"{number:06}" for number in range(rows)}
    return {
        "rows": rows,
        "kills": len(killed.hits),
        "identical": alone.output.read_bytes() == killed.output.read_bytes(),
        "missing": len(wanted - counts.keys()),
        "doubled": sum(count > 1 for count in counts.values()),
        "redone": sum(hit.redone for hit in killed.hits),
        "starts": killed.starts,
        "undisturbed": {"seconds": alone.seconds, "rows_per_second": rows / alone.seconds},
        "disturbed": {"seconds": killed.seconds, "rows_per_second": rows / killed.seconds},
        "faults": [{**asdict(hit), "redone": hit.redone} for hit in killed.hits],
    }


def told(found: dict[str, Any]) -> str:
    """The findings as a table."""
    lines = [
        f"{name:11} {found[name]['seconds']:8.1f} s  {found[name]['rows_per_second']:8.1f} rows/s"
        for name in ("undisturbed", "disturbed")
    ]
    lines += [
        f"{hit['kind']:6} killed at row {hit['done']:6}: {hit['redone']} finished rows redone, "
        f"going on after {hit['recovery_seconds']:.1f} s"
        for hit in found["faults"]
    ]
    same = "equal byte for byte" if found["identical"] else "DIFFERENT"
    lines.append(f"outputs {same}; {found['missing']} ids missing, {found['doubled']} doubled")
    return "\n".join(lines)


def _ids(output: Path) -> list[str]:
    with output.open(encoding="utf-8") as file:
        return [json.loads(line)["id"] for line in file]
