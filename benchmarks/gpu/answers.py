"""The parts that answer rows: plain against drafted, old against new, with rules or quantised."""

import dataclasses
import json
import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch

import tasc_engine
from benchmarks.common import ROOT, git_revision, in_turn, read_json, write_json
from benchmarks.engine.equal import NEAR, Answers, Judge, compare
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.steps import random_model
from benchmarks.gpu.work import (
    BASE,
    DRAFTED,
    PLAIN,
    Work,
    ceiling,
    index_of,
    kernels,
    model_folder,
    share_of_equal,
    speeds,
)
from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.model.loading import Quantization, load_model
from tasc_protocol.request import GuideSpec
from tasc_text import TaskTokenizer

_SLOTS = ("time", "date", "place_name", "person", "event_name", "artist_name", "food_type")


def answers(found: Found, here: Here) -> None:
    """Speeds by batch, and the share of time that the GPU works."""
    for batch in here.batches:
        work, rows = Work.load(here, batch), here(24 * batch, batch + 1)
        costs = work.costs(here)
        speeds(found, f"b={batch}", work, work.compared(here, rows, costs))
        for kind, settings in (("plain", PLAIN), ("drafted", DRAFTED)):
            share = kernels(partial(work.run, settings, here(4 * batch, batch), costs), here)
            found.figure(f"b={batch} {kind} busy", share["busy"], "of the time")
            found.put(f"kernels b={batch} {kind}", share["longest"])
        del costs, work


def flips(found: Found, here: Here) -> None:
    """Answers that drafts, or a batch of another size, change, with the margins of logits there.

    The margins are the differences of the two greatest logits: of transformers in the run's dtype,
    and of the same weights in float32.
    """
    rows = here(500, 6)
    half = load_model(ModelSource(model_folder(here), dtype=here.dtype, device=here.device))
    exact = deepcopy(half).float()
    for dtype in dict.fromkeys((here.dtype, "float32")):
        work, alone = Work.load(here, 8, dtype), Work.load(here, 1, dtype)
        plain, prompts = work.run(PLAIN, rows).answers, work.prompts[:rows]
        others = {"drafts": work.run(DRAFTED, rows), "a batch of 1": alone.run(PLAIN, rows)}
        for name, other in others.items():
            own, true = (
                compare(other.answers, plain, prompts, judge_of(model), NEAR).differences
                for model in (half if dtype == here.dtype else exact, exact)
            )
            found.figure(
                f"{dtype}, changed by {name}", float(len(own)), "answers", rows=rows,
                accepted=int(other.totals.accepted.sum()),
            )  # fmt: skip
            found.put(f"margins {dtype}, {name}", [
                {"row": a.row, "place": a.place, "margin": a.margin, "float32": b.margin}
                for a, b in zip(own, true, strict=True)
            ])  # fmt: skip


def judge_of(model: Any) -> Judge:
    """Margins of a transformers model after prefixes."""

    @torch.inference_mode()
    def judge(prefixes: Answers) -> list[float]:
        margins = []
        for prefix in prefixes:
            logits = model(input_ids=torch.tensor([prefix], device=model.device)).logits[0, -1]
            first, second = logits.float().topk(2).values.tolist()
            margins.append(first - second)
        return margins

    return judge


def old(found: Found, here: Here) -> None:
    """Speeds of this checkout and of an older one; each run is a new process."""
    assert here.old is not None, "main leaves this part out without --old"
    folders = {"new": ROOT, "old": here.old}
    found.put("commits", {name: git_revision(own) for name, own in folders.items()})
    sides = {name: partial(_run_side, here, own) for name, own in folders.items()}
    runs = in_turn(sides, here(2, 1))
    found.put("peak_bytes of each", {name: own[-1]["peak_bytes"] for name, own in runs.items()})
    for kind, (name, own) in product(("plain", "drafted"), runs.items()):
        answers, new = (each[-1][kind]["answers"] for each in (own, runs["new"]))
        found.figure(
            f"b={here.batches[0]} {kind} {name}", [r for run in own for r in run[kind]["rates"]],
            "tokens/s", own[-1][kind]["ceiling"], same_as_new=share_of_equal(answers, new),
        )  # fmt: skip


def _run_side(here: Here, checkout: Path) -> dict[str, Any]:
    paths = os.pathsep.join(str(checkout / name) for name in ("services", "pipelines", "tests"))
    command = [sys.executable, *sys.argv, "--one", "side"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, stdout=sys.stderr)
    return read_json(here.out / "side.json")


def side(found: Found, here: Here) -> None:
    """A side of `old`, by the packages that this process imports."""
    work, rows = Work.load(here, here.batches[0]), here(48 * here.batches[0], 9)
    found.put("packages", tasc_engine.__file__)
    for kind, runs in work.compared(here, rows, work.costs(here)).items():
        rates, last = [run.tokens_per_second for run in runs], runs[-1]
        found.put(kind, {"rates": rates, "ceiling": work.most(last), "answers": last.answers})


def rules(found: Found, here: Here) -> None:
    """Sampling and a JSON schema; drafts are the plain answers to the same rows, 8 a row."""
    model, config = random_model("0.5b", here), EngineConfig(rows=8, max_model_len=512)
    floor, size = ceiling(model, here, 8).step_seconds, int(model.config.vocab_size)
    folder = here.work / f"tokenizer-{size}"
    grow_tokenizer(folder, size)
    tokenizer = TaskTokenizer.from_folder(folder)
    prompts = np.random.default_rng(0).integers(1, 8000, (here(48, 3), 24)).tolist()
    item = {"type": "object", "additionalProperties": False, "required": ["slot", "text"],
            "properties": {"slot": {"enum": list(_SLOTS)},
                           "text": {"type": "string", "maxLength": 24}}}  # fmt: skip
    schema = {"type": "object", "additionalProperties": False, "required": ["slots"],
              "properties": {"slots": {"type": "array", "items": item, "maxItems": 4}}}  # fmt: skip
    guide = GuideSpec("json_schema", text=json.dumps(schema))
    drawn = {"parameters": {"temperature": 1.0, "top_p": 0.9}}
    asked: dict[str, dict[str, Any]] = {"greedy": {}, "top_p": drawn, "JSON": {"guide": guide}}
    asked["top_p and JSON"] = drawn | {"guide": guide}
    target = Target(model, config)
    for name, kind in asked.items():
        own = kind | ({"seed": 7} if "parameters" in kind else {})
        begin = index_of(tokenizer, prompts, prompts)
        work = Work(target, tokenizer, begin, prompts, floor, here(64, 16), (own,))
        work.index = index_of(tokenizer, prompts, work.run(PLAIN, len(prompts)).answers)
        settings = dataclasses.replace(DRAFTED, num_speculative_tokens=8)
        speeds(found, name, work, work.compared(here, len(prompts), None, settings))


def grow_tokenizer(folder: Path, size: int) -> None:
    """Write the shipped tokenizer with unused words up to a size, as masks and guides see it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in BASE.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    found = read_json(folder / "tokenizer.json")
    vocabulary, words = found["model"]["vocab"], product(ascii_lowercase, repeat=4)
    while len(vocabulary) < size:
        vocabulary.setdefault("\u0120" + "".join(next(words)), len(vocabulary))
    write_json(folder / "tokenizer.json", found)


def quantised(found: Found, here: Here) -> None:
    """Speeds with quantised weights, whose steps no graph runs."""
    if find_spec("bitsandbytes") is None:
        found.put("skipped", "bitsandbytes is not installed")
        return
    kinds: tuple[Quantization, ...] = ("nf4", "int8")
    for kind in kinds:
        work = Work.load(here, here.batches[0], quantization=kind)
        name = f"{kind} b={here.batches[0]}"
        rows = here(4 * here.batches[0], 9)
        speeds(found, name, work, work.compared(here, rows, work.costs(here)))
        busy = kernels(partial(work.run, PLAIN, here.batches[0]), here)["busy"]
        found.figure(f"{name} plain busy", busy, "of the time")
        del work
