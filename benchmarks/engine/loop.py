"""A side of the benchmark: a process that loads one engine and runs it on demand.

The process reads a job from a file. It then reads a line of JSON from stdin for each call, and
answers with a line of JSON on stdout; the output of libraries goes to stderr. This module imports
the standard library only, because it runs in the environments of all peers.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Runs a setting, by name, over prompts of the job.
Run = Callable[[str, Sequence[list[int]]], "Ran"]
# Answers a call that is not a run.
Other = Callable[[dict[str, Any]], Any]
WARM_UP_ROWS = 32


@dataclass(frozen=True)
class Job:
    """The work of a side.

    Attributes:
        folder: The weights and the tokenizer in the format of transformers.
        task: The task whose train split may be drafted from.
        prompts: Token ids of each row.
        max_tokens: The greatest length of an answer, end-of-sequence included.
        batch: Rows that are decoded together unless a setting names another number; no setting
            names more.
        index: A folder with the draft index, ``index.tasc``; empty: an index of the train split.
        drafts: How vLLM drafts: ``ngram``, ``suffix``, ``tasc``, or empty for not at all.
        labels: Texts of which each answer is one; empty: answers are free.
        temperature: Sampling above 0. A sampled answer has ``max_tokens`` tokens.
        quantization: That of our engine, or ``int8`` for OpenVINO; empty for none.
    """

    folder: str
    task: str
    prompts: list[list[int]]
    max_tokens: int
    eos: list[int]
    threads: int
    dtype: str
    batch: int = 8
    index: str = ""
    drafts: str = ""
    labels: list[str] = field(default_factory=list)
    temperature: float = 0.0
    quantization: str = ""

    def whole(self, answer: list[int]) -> list[int]:
        """An answer with its end-of-sequence, which some engines do not return."""
        ends = [i for i, token in enumerate(answer) if token in self.eos]
        if ends:
            return answer[: ends[0] + 1]
        return answer if len(answer) >= self.max_tokens else [*answer, self.eos[0]]


@dataclass
class Ran:
    """One run over the rows; times are in seconds.

    Attributes:
        answers: The answer of each row, end-of-sequence included.
        latency, first: For each row, in any order: the time from its start to its end, and to its
            first token.
        steps, row_steps: Forwards of the model; the sum of rows that could emit in them. 0 if
            unknown.
        accepted, drafted: Draft tokens that the model accepted, and that it verified.
        draft, verify: Time of proposing and of the model; None if unknown.
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
    drafted: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def serve(load: Callable[[Job], tuple[Run, Other]]) -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    run, other = load(job)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        if "setting" in call:
            began = time.perf_counter()
            ran = run(call["setting"], job.prompts[slice(*call["rows"])])
            ran.seconds = ran.seconds or time.perf_counter() - began
            found = asdict(ran) | {"memory_mb": peak_mb()}
        else:
            found = other(call)
        print(json.dumps(found), file=answers, flush=True)


def hold(cores: int) -> None:
    """Restrict all threads of this process to the last cores."""
    allowed = sorted(os.sched_getaffinity(0))[-cores:]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), allowed)


def no_other(call: dict[str, Any]) -> Any:
    """The `Other` of sides that only run."""
    raise ValueError(f"{call} is no run")


def peak_mb() -> float:
    """The peak resident memory of this process; getrusage would include that of its parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
