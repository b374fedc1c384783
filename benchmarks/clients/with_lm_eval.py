"""Cases of `lm-eval`: tasks of our own over the shipped rows, by command and by function.

The last three compare what it finds over HTTP, drafted, with its own `--model hf` in float32 on the
shipped model with the adapter merged.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
from cases import API, MODEL, case, run
from lm_eval.tasks import TaskManager

TASKS = str(Path(__file__).parent / "tasks")
DEMO = Path.cwd() / "pipelines" / "tasc_jobs" / "demo"
ROWS = int(os.environ.get("CLIENT_ROWS", "300"))
TOLERANCE = 1e-4
COMPLETIONS, LIKELIHOOD = "local-completions", "massive_loglikelihood"
CHAT = {"model": MODEL, "base_url": f"{API}/chat/completions"}
SERVED: Any = {"model": MODEL, "base_url": f"{API}/completions", "num_concurrent": 4}
SERVED |= {"tokenizer": str(DEMO / "tasc-demo-7m"), "tokenizer_backend": "huggingface"}


TEXTS = SERVED | {"tokenized_requests": False}


def evaluate(model: str, where: Any, task: str, rows: int = 32, batch: int = 1) -> Any:
    """The metrics of a task, and its samples."""
    found: Any = lm_eval.simple_evaluate(
        model, where, [task], limit=rows, batch_size=batch, bootstrap_iters=0,
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        apply_chat_template=task == "massive_chat",
    )  # fmt: skip
    return found["results"][task], found["samples"][task]


@cache
def merged() -> dict[str, str]:
    """The arguments of `--model hf`: the adapter is merged into the model first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, base = f"{os.environ['CLIENT_HOME']}/merged", SERVED["tokenizer"]
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = PeftModel.from_pretrained(model, str(DEMO / "adapters" / MODEL)).merge_and_unload()
    for each in (model, AutoTokenizer.from_pretrained(base)):
        each.save_pretrained(folder)
    return {"pretrained": folder, "dtype": "float32", "device": "cpu"}


def command() -> str:
    where = ",".join(f"{name}={value}" for name, value in SERVED.items())
    words = ["--model", COMPLETIONS, "--model_args", where, "--limit", "20"]
    words += ["--tasks", "massive_generate", "--include_path", TASKS]
    done = subprocess.run([sys.executable, "-m", "lm_eval", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout


def chat_score() -> float:
    return float(evaluate("local-chat-completions", CHAT, "massive_chat")[0]["intent,none"])


def texts() -> dict[str, float]:
    """Drafts change no text."""
    (metrics, ours), (_, theirs) = both("massive_generate", 1)
    same = sum(a["resps"] == b["resps"] for a, b in zip(ours, theirs, strict=True))
    assert same == len(theirs), f"{same} of {len(theirs)} texts are the same"
    return {"rows": same, "whole answer right": metrics["row,none"]}


def likelihoods(task: str) -> dict[str, Any]:
    """The same accuracy, and each row's log-likelihood within the tolerance."""
    (metrics, ours), (plain, theirs) = both(task, 8)
    differences = [
        abs(float(a) - float(b))
        for one, other in zip(ours, theirs, strict=True)
        for ((a, _),), ((b, _),) in zip(one["resps"], other["resps"], strict=True)
    ]
    accuracies, worst = (metrics["acc,none"], plain["acc,none"]), max(differences)
    assert accuracies[0] == accuracies[1], accuracies
    assert worst <= TOLERANCE, f"the log-likelihoods differ by up to {worst:.2e}"
    return {"rows": len(ours), "accuracy": accuracies[0], "greatest difference": f"{worst:.1e}"}


def both(task: str, batch: int) -> Any:
    served = evaluate(COMPLETIONS, SERVED, task, ROWS, batch)
    return served, evaluate("hf", merged(), task, ROWS)


case("command with generate_until", lambda: "massive_generate" in command(), True, limit_s=180)
case("chat completions with generate_until", lambda: chat_score() > 0.5, True)
case("loglikelihood of texts", lambda: evaluate(COMPLETIONS, TEXTS, LIKELIHOOD)[0], dict)
case("loglikelihood as by hf", lambda: likelihoods(LIKELIHOOD), dict, limit_s=600)
case("multiple choice as by hf", lambda: likelihoods("massive_choice"), dict, limit_s=600)
case("generated texts as by hf", texts, dict, limit_s=600)

run()
