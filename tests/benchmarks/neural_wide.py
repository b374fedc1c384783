"""A target with a real vocabulary of 100,000 tokens and little else, so that its head dominates.

Trained from scratch on one task's rows, by sampled softmax (Jean et al. 2015, arXiv 1412.2007): of
the task's own tokens and, in each step, some of all others, which stand for the rest.
"""

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from draft_tasks import open_tokenizer
from ft_tasks import FtTask
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasc_jobs.drafter.training import packed
from tasc_jobs.finetune.examples import Example
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer

HIDDEN, LAYERS, HEADS = 128, 4, 4
_BATCH, _EPOCHS, _RATE, _WARM_UP = 32, 3, 2e-3, 50
_OTHERS = 1024  # tokens of a step that no row has
_PROMPT_WEIGHT = 0.1


@dataclass(frozen=True)
class _Columns:
    """Tokens whose logits are computed in training."""

    seen: Tensor
    place: Tensor  # of each token among those seen
    unseen: Tensor

    @classmethod
    def of(cls, examples: Sequence[Example], vocab_size: int) -> "_Columns":
        is_seen = torch.zeros(vocab_size, dtype=torch.bool)
        for example in examples:
            is_seen[list(example.ids)] = True
        seen, unseen = is_seen.nonzero()[:, 0], (~is_seen).nonzero()[:, 0]
        place = torch.zeros(vocab_size, dtype=torch.long)
        place[seen] = torch.arange(len(seen))
        return cls(seen, place, unseen)

    def loss(self, model: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
        """``float32[n]`` of places that should say ``ids``."""
        others = self.unseen[torch.randint(len(self.unseen), (_OTHERS,))]
        weight = model.lm_head.weight[torch.cat((self.seen, others))]
        logits = hidden @ weight.T
        # Each of the others stands for as many.
        share = math.log(len(self.unseen) / _OTHERS)
        logits = torch.cat((logits[:, : len(self.seen)], logits[:, len(self.seen) :] + share), 1)
        return torch.nn.functional.cross_entropy(logits, self.place[ids], reduction="none")


def make_wide(task: FtTask, rows: Sequence[CorpusRow], tokenizer: Path, folder: Path) -> None:
    """Train it on one thread, and write it with its tokenizer."""
    torch.manual_seed(0)
    tokens = open_tokenizer(tokenizer)
    examples = _examples(task, rows, tokens)
    model = _new(tokens)
    columns = _Columns.of(examples, model.config.vocab_size)
    epoch = max(1, len(examples) // _BATCH)
    steps = epoch * _EPOCHS
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), fused=True)
    order, rng = list(range(len(examples))), random.Random(0)
    for step in range(steps):
        if (at := step % epoch * _BATCH) == 0:
            rng.shuffle(order)
        rate = _RATE * min((step + 1) / _WARM_UP, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = packed([examples[i] for i in order[at : at + _BATCH]], _PROMPT_WEIGHT)
        chosen = weights > 0
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[chosen]
        each = columns.loss(model, hidden, ids[:, 1:][chosen]) * weights[chosen]
        (each.sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


def _new(tokens: TaskTokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokens.vocab_size, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokens.eos_id, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _examples(task: FtTask, rows: Sequence[CorpusRow], tokens: TaskTokenizer) -> list[Example]:
    outputs = tokens.encode_outputs([row.output for row in rows])
    prompts = [tokens.encode_prompt(task.prompt.render(row.input)) for row in rows]
    return [
        Example((*prompt, *output, tokens.eos_id), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
