"""Cases of `guidellm run`: what its README shows first, in seconds instead of minutes."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from cases import BASE, INPUT, MODEL, case, run

TOKENIZER = Path.cwd() / "pipelines" / "tasc_jobs" / "demo" / "tasc-demo-7m"
SYNTHETIC = "kind=synthetic_text,prompt_tokens=48,output_tokens=24"


def benchmark(profile: str, backend: str = "", data: str = SYNTHETIC) -> tuple[int, int]:
    """Returns how many of eight requests succeeded, and how many there were."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text(f"{json.dumps({'prompt': INPUT})}\n" * 8)
        options = {
            "backend": f"kind=openai_http,target={BASE},model={MODEL}{backend}",
            "profile": profile,
            "constraint": "kind=max_requests,count=8",
            "data": data,
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "output": "kind=json,path=out.json",
        }
        command = [f"{os.environ['CLIENT_HOME']}/bin/guidellm", "run", "--disable-console"]
        command += [word for name, value in options.items() for word in (f"--{name}", value)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
        found = json.loads((Path(folder) / "out.json").read_text())
    totals = found["benchmarks"][0]["metrics"]["request_totals"]
    return totals["successful"], totals["total"]


FORMAT = ",request_format=/v1"
FILE = "kind=json_file,path=rows.jsonl"
case("chat completions", lambda: benchmark("kind=synchronous"), (8, 8))
case("completions", lambda: benchmark("kind=concurrent,streams=4", f"{FORMAT}/completions"), (8, 8))
case("responses", lambda: benchmark("kind=concurrent,streams=4", f"{FORMAT}/responses"), (8, 8))
case("without streaming", lambda: benchmark("kind=constant,rate=10", ",stream=false"), (8, 8))
case("prompts of a file", lambda: benchmark("kind=throughput,max_concurrency=4", "", FILE), (8, 8))

run()
