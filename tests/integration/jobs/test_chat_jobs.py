"""A task with a chat template: all jobs prompt it as transformers does; drafts change no answer.

The rows' outputs are the answers of transformers' ``generate`` to the prompts of its
``apply_chat_template``, so a job with other prompts gets other answers than the rows have.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_jobs import ENGINE, WorkerRun, answers, asked, request
from openai import OpenAI
from transformers import AutoTokenizer, PreTrainedModel

import tiny
from chat_families import make_chat_tokenizer
from support import read_rows, write_rows
from tasc_command import InProcess
from tasc_draft import Tokens
from tasc_jobs.index.build import opened
from tasc_runtime.data.local_corpus import encode
from tasc_runtime.llm import LLM
from tasc_runtime.models import load_tokenizer, template_of
from tasc_store import CorpusStore, TaskStore

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SYSTEM, SHOT = "Say what it is.", ("play some jazz", "music")
MAX_TOKENS = 12
INPUTS = [
    f"{verb} {what} {when}"
    for verb in ("wake me", "play", "set")
    for what in ("an alarm", "music", "it")
    for when in ("", "at nine", "on friday", "naïve 🙂")
]
Turns = list[dict[str, str]]


def turns(*texts: str, system: str | None = None) -> Turns:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


TALKS = [
    turns("wake me"),
    turns("set an alarm", "alarm", "for two hours"),
    turns("play jazz", system="Be brief."),
    turns("", "", "{{ 7 }} <|eot_id|>", system="é🙂"),
]


class Chats:
    """A model with a template like Llama 3's, which writes a token that the tokenizer also adds."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_chat_tokenizer(folder, "llama")
        self.model: PreTrainedModel = tiny.make_model(folder, "llama", seed=7)
        self.theirs: Any = AutoTokenizer.from_pretrained(folder)
        ends = self.theirs.convert_tokens_to_ids(["<|end_of_text|>", self.theirs.eos_token])
        self.model.generation_config.eos_token_id = ends
        self.model.generation_config.save_pretrained(folder)

    def ids(self, talk: Turns) -> list[int]:
        """Returns the ids of a talk after the task's example and system prompt, if it has none."""
        own = talk[0]["role"] == "system"
        system = talk[:1] if own else turns(system=SYSTEM)
        talk = [*system, *turns(*SHOT), *talk[own:]]
        found = self.theirs.apply_chat_template(talk, add_generation_prompt=True)
        return list(found["input_ids"])

    def answer(self, talk: Turns) -> list[int]:
        return tiny.plain(self.model, self.ids(talk), MAX_TOKENS)

    def says(self, talk: Turns) -> str:
        return str(self.theirs.decode(self.answer(talk), skip_special_tokens=True))

    def loss(self, rows: Sequence[dict[str, str]]) -> float:
        """Returns the mean loss per token of the rows' outputs and the tokenizer's EOS."""
        losses = []
        for row in rows:
            prompt = self.ids(turns(row["input"]))
            output = self.theirs(row["output"], add_special_tokens=False)["input_ids"]
            output.append(self.theirs.eos_token_id)
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(
                logits, torch.tensor(output), reduction="none"
            ))  # fmt: skip
        return float(torch.cat(losses).mean())


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    return Chats(tmp_path_factory.mktemp("chat-jobs") / "model")


@pytest.fixture(scope="module")
def rows(chats: Chats) -> list[dict[str, str]]:
    """The rows with an output that is not blank."""
    texts = ((text, chats.says(turns(text))) for text in INPUTS)
    found = [{"id": x, "input": x, "output": y} for x, y in texts if y.strip()]
    assert len({row["output"] for row in found}) > len(INPUTS) / 2
    return found


@pytest.fixture
def file(rows: list[dict[str, str]], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def tasc(tasc_here: InProcess) -> Callable[..., Any]:
    return lambda *args: json.loads(tasc_here.run(*args, "--json").splitlines()[-1])


@pytest.fixture
def served(in_process, tasc, chats, task, file):
    """The name of a task with rows and an index."""
    few = write_rows(file.with_name("few.jsonl"), [{"input": SHOT[0], "output": SHOT[1]}])
    in_process.run(
        "task", "create", task, "--model", chats.folder, "--chat-template", "auto",
        "--system-prompt", SYSTEM, "--few-shot", few, "--dtype", "float64",
        "--max-tokens", MAX_TOKENS, "--draft", "min_prob=0",
        "--allow-special-tokens-in-input",  # as transformers do
    )  # fmt: skip
    tasc("ingest", task, file)
    tasc("build-index", task)
    return task


@pytest.mark.slow("six jobs")
def test_batch_jobs_render_prompts_like_transformers(
    client, redis_url, tasc, served, chats, rows, file, tmp_path
):
    record, corpus = TaskStore(client).get(served), CorpusStore(client, served)
    expected = [chats.ids(turns(row["input"])) for row in rows]
    with opened(redis_url, record) as indexed:
        assert indexed.prompts
        assert listed(indexed.prompts) == expected
    stored = corpus.read(0, len(corpus))
    in_process = encode(stored, load_tokenizer(record), template_of(record))
    assert listed(in_process.prompts) == expected

    found = tasc("evaluate", served, "--test", file, "--repeats", 1, "--max-model-len", 256)
    assert (found["rows"], found["identical"]) == (len(rows), len(rows))
    assert found["quality"]["exact_match"] == 1.0
    sides = found["sides"]
    assert sides["drafted"]["steps_per_answer"] < sides["plain"]["steps_per_answer"]

    few = ("--epochs", 1, "--batch-rows", len(rows), "--output", tmp_path / "tuned")
    found = tasc("finetune", served, *few)
    assert (found["rows"], found["steps"], found["end"]) == (len(rows), 1, "<|eot_id|>")
    assert found["first_loss"] == pytest.approx(chats.loss(rows), rel=1e-4)

    drafter = ("--kind", "independent", "--hidden", 16, "--epochs", 1, "--max-model-len", 256)
    tasc("train-drafter", served, *drafter, "--limit", 8, "--output", tmp_path / "drafter")
    made = {row["input"]: row["ids"] for row in read_rows(tmp_path / "drafter" / "answers.jsonl")}
    assert made == {row["input"]: chats.answer(turns(row["input"])) for row in rows[:8]}

    out = tmp_path / "out.jsonl"
    tasc("generate", served, "--input", file, "--output", out, "--max-model-len", 256)
    assert [row["text"] for row in read_rows(out)] == [row["output"] for row in rows]


def test_conversations_have_the_answers_of_transformers(
    openai: OpenAI, run: WorkerRun, redis_url: str, served: str, chats: Chats
) -> None:
    engine = ENGINE.model_copy(update={"max_model_len": 256})
    run.settings = replace(run.settings, engine=engine)
    bodies = [{"model": served, "messages": talk} for talk in TALKS]
    bodies += [{**body, "draft": False} for body in bodies]
    lines = [request(f"{i}", "/v1/chat/completions", body) for i, body in enumerate(bodies)]
    batch = asked(openai, lines)
    run.worker().run_waiting()
    done = answers(openai, openai.batches.retrieve(batch.id).output_file_id)
    texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in done.values()]
    expected = [chats.says(talk) for talk in TALKS]
    assert texts == expected * 2
    here = LLM.from_task(served, redis_url, max_model_len=256, cost_aware=False)
    found = here.chat(TALKS) + here.generate(INPUTS)
    assert [answer.text for answer in found[: len(TALKS)]] == expected
    assert 0 < sum(answer.accepted for answer in found) < sum(answer.drafted for answer in found)
    assert [answer.text for answer in here.chat(TALKS, draft=False)] == expected


def listed(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])]
