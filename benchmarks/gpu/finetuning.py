"""The stage that fine-tunes the 0.5B shape on the device, with embedding rows for new tokens.

It times plain LoRA, and QLoRA if bitsandbytes is installed. Weights and examples are random, as the
cost of a step does not depend on the text. A falling loss shows that rows and adapter learn.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.steps import NAME, random_model
from benchmarks.gpu.work import wait
from tasc_train.finetune.examples import Example
from tasc_train.finetune.hyperparameters import FinetuneSettings
from tasc_train.finetune.model import adapted, add_rows, load_base
from tasc_train.finetune.training import Trainer, TrainingProgress

NEW, PROMPT, OUTPUT, ROWS = 500, 48, 16, 64
_WARM_UP = 2  # steps that are not timed


def finetuning(found: Found, here: Here) -> None:
    folder = here.folder / f"base-{NAME}"
    model = random_model(here)
    model.save_pretrained(folder)
    work = operations(model, here(ROWS, 4))
    del model
    kinds = {"lora": False}
    if not here.dry and find_spec("bitsandbytes") is not None:
        kinds["qlora"] = True
    for kind, nf4 in kinds.items():
        found.put(kind, timed(folder, nf4, work, here))


def operations(model: Any, rows: int) -> float:
    """Floating-point operations of a step of so many rows.

    A frozen weight has two for each token forwards and two backwards (Hu et al. 2022). The LM head
    runs only for tokens with a label; embeddings are looked up.
    """
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    inner = sum(module.weight.numel() for module in linear)
    return 4.0 * rows * (inner * (PROMPT + OUTPUT) + head.weight.numel() * OUTPUT)


def timed(folder: Path, nf4: bool, work: float, here: Here) -> dict[str, Any]:
    """Tokens per second after the first steps, as a share of the device's matrix rate too."""
    new, rows = here(NEW, 8), here(ROWS, 4)
    model = load_base(folder, nf4=nf4, device=here.device)
    first = model.config.vocab_size
    parts = {first + at: (at + 1, at + 2) for at in range(new)}
    add_rows(model, first + new, parts)
    settings = FinetuneSettings(
        epochs=here(12, 4), learning_rate=1e-3, batch_rows=rows, micro_rows=here(ROWS, 2)
    )
    examples = _examples(first, new, rows)
    told, took = _run(Trainer(adapted(model, parts, settings), examples, settings), here)
    seconds = median(took[_WARM_UP:])
    rate = Found.read(here, "steps").get("matrix_rate")  # of the device's matrix products
    return {
        "tokens_per_second": told[-1].tokens / seconds,
        "share_of_matrix_rate": None if rate is None else work / seconds / rate,
        "first_loss": told[0].loss,
        "last_loss": told[-1].loss,
        "peak_bytes": 0 if here.dry else torch.cuda.max_memory_allocated(),
    }


def _run(trainer: Trainer, here: Here) -> tuple[list[TrainingProgress], list[float]]:
    """Train; the report and the seconds of each step."""
    told, times = list[TrainingProgress](), [time.perf_counter()]
    if not here.dry:
        torch.cuda.reset_peak_memory_stats()
    for each in trainer.run():
        wait(here.device)
        times.append(time.perf_counter())
        told.append(each)
    return told, np.diff(times).tolist()


def _examples(first: int, new: int, rows: int) -> list[Example]:
    """Examples with prompts of old tokens and outputs of new ones."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, first, (rows, PROMPT)).tolist()
    outputs = random.integers(first, first + new, (rows, OUTPUT)).tolist()
    return [Example((*p, *o), PROMPT) for p, o in zip(prompts, outputs, strict=True)]
