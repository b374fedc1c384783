"""Train the small model that ships with tasc-serve, from scratch, on one machine.

It makes a byte-level BPE tokenizer from task *inputs* (so that task outputs are not already single
tokens), a Qwen2-architecture base model from the inputs and outputs of several tasks, and one LoRA
adapter (PEFT, r = 16) per served task. It knows nothing of drafting or serving: the result is a
plain Hugging Face folder.

    python benchmarks/demo_model/train.py --data DIR --out DIR

DIR holds a folder for each of BASE_TASKS with ``train.jsonl.gz``: string fields id, input, output.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tasc_jobs.demo.tasks import MODEL, TEMPLATES
from tasc_runtime.data.rows import read_raw_rows


@dataclass(frozen=True)
class ModelSize:
    """A model to train; its folder's name tells its millions of parameters."""

    name: str
    hidden: int
    intermediate: int
    layers: int


SIZES = {
    "half": ModelSize("tasc-demo-3m", 192, 512, 4),
    "demo": ModelSize(MODEL.name, 256, 704, 6),
}
END = "<|endoftext|>"
END_ID = 0  # the one special token comes first
BASE_TASKS = ("massive_en", "pos_ewt", "clinc150")
ADAPTER_TASKS = ("massive_en", "pos_ewt")
IGNORED = -100
PROMPT_LOSS_WEIGHT = 0.1


@dataclass(frozen=True)
class TrainExample:
    """One row as token ids: ``ids[:prompt]`` the prompt, then the output and end-of-sequence."""

    ids: list[int]
    prompt: int


@dataclass(frozen=True)
class Phase:
    """One training run over a list of examples."""

    name: str
    epochs: float
    learning_rate: float
    prompt_weight: float
    batch_tokens: int


def read_rows(data: Path, task: str, split: str = "train") -> list[dict[str, str]]:
    return [record.value for record in read_raw_rows(data / task / f"{split}.jsonl.gz")]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, task: str, rows: list[dict[str, str]]) -> list[TrainExample]:
    end = END_ID
    prompts = tokenizer.encode_batch([TEMPLATES[task].replace("{input}", r["input"]) for r in rows])
    outputs = tokenizer.encode_batch([r["output"] for r in rows])
    return [
        TrainExample([*p.ids, *o.ids, end], len(p.ids))
        for p, o in zip(prompts, outputs, strict=True)
    ]


def batches(
    examples: list[TrainExample], batch_tokens: int, rng: random.Random
) -> list[list[TrainExample]]:
    """Examples of like length together, at most ``batch_tokens`` padded tokens, in random order."""
    order = sorted(examples, key=lambda e: len(e.ids) + rng.random() * 4)
    groups: list[list[TrainExample]] = [[]]
    for example in order:
        if (len(groups[-1]) + 1) * len(example.ids) > batch_tokens and groups[-1]:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return groups


def collate(group: list[TrainExample], prompt_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids, labels and loss weights, each ``[rows, longest]``."""
    longest = max(len(e.ids) for e in group)
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    labels = torch.full((len(group), longest), IGNORED)
    weights = torch.zeros(len(group), longest)
    for i, e in enumerate(group):
        ids[i, : len(e.ids)] = torch.tensor(e.ids)
        labels[i, : len(e.ids)] = torch.tensor(e.ids)
        weights[i, : e.prompt] = prompt_weight
        weights[i, e.prompt : len(e.ids)] = 1.0
    return ids, labels, weights


def loss_of(model: Any, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy; the LM head runs only where the weight is not zero."""
    # Right padding needs no mask: a causal model never lets a token look at what follows it.
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    target, weight = labels[:, 1:], weights[:, 1:]
    looked_at = weight > 0
    logits = causal.lm_head(hidden[looked_at]).float()
    each = torch.nn.functional.cross_entropy(logits, target[looked_at], reduction="none")
    kept = weight[looked_at]
    return (each * kept).sum() / kept.sum()


def run_phase(model: Any, examples: list[TrainExample], phase: Phase, rng: random.Random) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    per_epoch = len(batches(examples, phase.batch_tokens, random.Random(0)))
    total = math.ceil(per_epoch * phase.epochs)
    device = next(model.parameters()).device
    step, started, mean = 0, time.monotonic(), 0.0
    model.train()
    while step < total:
        for group in batches(examples, phase.batch_tokens, rng):
            scale = min(1.0, (step + 1) / 200) * (
                0.02 + 0.98 * (1 + math.cos(math.pi * step / total)) / 2
            )
            for g in optimizer.param_groups:
                g["lr"] = phase.learning_rate * scale
            ids, labels, weights = (
                t.to(device, non_blocking=True) for t in collate(group, phase.prompt_weight)
            )
            # Processors without bfloat16 of their own take three times as long in it.
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(model, ids, labels, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
            if step % 100 == 0 or step == total:
                elapsed = time.monotonic() - started
                print(
                    f"{phase.name} step {step}/{total} loss {mean:.4f} "
                    f"{elapsed:.0f} s, {elapsed / step * (total - step):.0f} s left",
                    flush=True,
                )
            if step == total:
                return


def new_model(size: ModelSize, vocab_size: int, end: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation="eager")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def train_base(args: argparse.Namespace, out: Path, rng: random.Random) -> Tokenizer:
    rows = {task: read_rows(args.data, task) for task in BASE_TASKS}
    texts = (TEMPLATES[task].replace("{input}", r["input"]) for task in rows for r in rows[task])
    tokenizer = train_tokenizer(texts, args.vocab_size)
    folder = out / SIZES[args.size].name
    save_tokenizer(tokenizer, folder)
    examples = [e for task in rows for e in encode(tokenizer, task, rows[task])]
    print(f"base: {len(examples)} rows, {sum(len(e.ids) for e in examples)} tokens an epoch")
    model = new_model(SIZES[args.size], tokenizer.get_vocab_size(), END_ID).to(args.device)
    print(f"base: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    phase = Phase("base", args.base_epochs, 1.5e-3, PROMPT_LOSS_WEIGHT, args.batch_tokens)
    run_phase(model, examples, phase, rng)
    model.to(torch.float16).save_pretrained(folder)
    return tokenizer


def train_adapter(
    args: argparse.Namespace, out: Path, tokenizer: Tokenizer, task: str, rng: random.Random
) -> None:
    name = SIZES[args.size].name
    base = Qwen2ForCausalLM.from_pretrained(
        out / name, dtype=torch.float32, attn_implementation="eager"
    ).to(args.device)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    examples = encode(tokenizer, task, read_rows(args.data, task))
    phase = Phase(task, args.adapter_epochs, 1e-3, 0.0, args.batch_tokens)
    run_phase(model, examples, phase, rng)
    model.peft_config["default"].base_model_name_or_path = name
    model.to(torch.float16).save_pretrained(out / "adapters" / task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per task")
    parser.add_argument("--out", type=Path, required=True, help="folder for model and adapters")
    parser.add_argument("--size", choices=SIZES, default="demo", help="size of the model (demo)")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument(
        "--base-epochs",
        type=float,
        default=8,
        help="epochs of the base; 0 keeps that in OUT",
    )
    parser.add_argument("--adapter-epochs", type=float, default=2, help="0 makes no adapters")
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    if args.base_epochs:
        tokenizer = train_base(args, args.out, rng)
    else:
        tokenizer = Tokenizer.from_file(str(args.out / SIZES[args.size].name / "tokenizer.json"))
    for task in ADAPTER_TASKS if args.adapter_epochs else ():
        train_adapter(args, args.out, tokenizer, task, rng)


if __name__ == "__main__":
    main()
