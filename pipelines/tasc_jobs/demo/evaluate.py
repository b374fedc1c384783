"""Quality of the shipped adapters on their full test splits, by our engine with drafts on.

    python -m tasc_jobs.demo.evaluate

One engine at a time, in this process; no store and no service. Prints one JSON object.
"""

import json
from dataclasses import asdict
from typing import Any

import torch

from tasc_draft import SOURCES, NgramProposer, Tokens, build_learnt_index
from tasc_engine import Engine, EngineConfig, EngineTotals, GenerationRequest, Target
from tasc_jobs.evaluate.quality import intent_quality, tagging_accuracy
from tasc_jobs.demo.tasks import TASKS, demo_record, read_split
from tasc_jobs.progress import Progress
from tasc_serve.models import load_tokenizer
from tasc_serve.worker import device_of, model_source
from tasc_text import PromptTemplate

CONFIG = EngineConfig(rows=8, max_model_len=1024)
MAX_TOKENS = 512


def evaluate(task: str) -> dict[str, Any]:
    """Quality and block efficiency of one task over its whole test split."""
    totals, engine = _engine(task)
    tokenizer, template = (
        load_tokenizer(demo_record(task)),
        PromptTemplate(demo_record(task).template),
    )
    rows = read_split(task, "test")
    requests = (
        GenerationRequest(
            str(i), tuple(tokenizer.encode_prompt(template.render(r["input"]))), MAX_TOKENS
        )
        for i, r in enumerate(rows)
    )
    answers = [""] * len(rows)
    with Progress(task, len(rows)) as bar:
        for result in engine.generate(requests):
            answers[int(result.id)] = result.text
            bar.advance()
    truth = [r["output"] for r in rows]
    quality = (
        asdict(intent_quality(answers, truth))
        if task == "massive_en"
        else {"tagging_accuracy": tagging_accuracy(answers, truth)}
    )
    return {"rows": len(rows), "block_efficiency": totals.block_efficiency, **quality}


def _engine(task: str) -> tuple[EngineTotals, Engine]:
    record = demo_record(task)
    tokenizer = load_tokenizer(record)
    target = Target.load(
        model_source(record, device_of("auto", gpus=torch.cuda.device_count())), CONFIG
    )
    rows, template = read_split(task, "train"), PromptTemplate(record.template)
    index = build_learnt_index(
        Tokens.of(tokenizer.encode_outputs([r["output"] for r in rows])),
        Tokens.of([tokenizer.encode_prompt(template.render(r["input"])) for r in rows]),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        settings=record.draft,
        word_starts=tokenizer.word_starts,
        canonical=tokenizer.canonical,
    )
    proposer = NgramProposer(
        record.draft,
        rows=CONFIG.rows,
        capacity=CONFIG.max_model_len,
        vocab_size=target.vocab_size,
        eos_ids=tokenizer.eos_ids,
        index=index,
    )
    totals = EngineTotals(len(SOURCES), proposer.max_depth)
    return totals, Engine(target, tokenizer, proposer, CONFIG, totals.add)


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({task: evaluate(task) for task in TASKS}))


if __name__ == "__main__":
    main()
