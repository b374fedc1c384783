"""A side of the benchmark: a process that loads one engine and runs it when it is told to.

It reads a job from the file that it is given, then a line of JSON from stdin for each call, and
answers each by a line of JSON on stdout; what libraries print goes to stderr. It imports nothing
but the standard library: it runs in the environments of all peers.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Name of a setting, and how many rows of the job, from the first on; what one run gave.
Run = Callable[[str, int], "Ran"]
# Answers a call that is no run.
Other = Callable[[dict[str, Any]], Any]
WARM_UP_ROWS = 32


@dataclass(frozen=True)
class Job:
    """What every side gets.

    Attributes:
        folder: Weights and tokenizer, as transformers reads them.
        task: Whose train split may be drafted from.
        prompts: Token ids of each row.
        max_tokens: Of an answer, end-of-sequence included.
        batch: Rows decoded together where a setting does not say otherwise.
    """

    folder: str
    task: str
    prompts: list[list[int]]
    max_tokens: int
    eos: list[int]
    threads: int
    dtype: str
    batch: int = 8

    def whole(self, answer: list[int]) -> list[int]:
        """An answer up to its end-of-sequence, which some engines keep to themselves."""
        ends = [i for i, token in enumerate(answer) if token in self.eos]
        if ends:
            return answer[: ends[0] + 1]
        return answer if len(answer) >= self.max_tokens else [*answer, self.eos[0]]


@dataclass
class Ran:
    """One run over the rows; times are seconds.

    Attributes:
        answers: By row, end-of-sequence included.
        latency, first: By row in any order: from the row's start to its end and first token.
        steps, row_steps: Forwards of the model; rows that could emit in them. 0 if unknown.
        draft, verify: Time spent proposing and in the model; None if unknown.
    """

    answers: list[list[int]]
    seconds: float = 0.0
    latency: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    steps: int = 0
    row_steps: int = 0
    accepted: int = 0
    draft: float | None = None
    verify: float | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def serve(load: Callable[[Job], tuple[Run, Other]]) -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, other = load(Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        if "setting" in call:
            began = time.perf_counter()
            ran = run(call["setting"], call["rows"])
            ran.seconds = ran.seconds or time.perf_counter() - began
            found = asdict(ran) | {"memory_mb": peak_mb()}
        else:
            found = other(call)
        print(json.dumps(found), file=answers, flush=True)


def no_other(call: dict[str, Any]) -> Any:
    """For sides that only run."""
    raise ValueError(f"{call} is no run")


def peak_mb() -> float:
    """The most memory this process has had resident; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
