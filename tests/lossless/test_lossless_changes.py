"""Tests that answers stay the target's if requests choose adapters and proposers change."""

import random
from pathlib import Path

import pytest

from lora_folders import make_adapter, merged_says
from support import make_proposer
from tasc_draft import DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, ModelSource, Request, StepRecord, Target
from tasc_text import TaskTokenizer
from tiny import SENTENCES, make_folder

CONFIG = EngineConfig(rows=4, max_model_len=64, prefill_chunk=8, prefix_cache_bytes=1 << 16)
MOST = 24
SETTINGS = (
    DraftSettings(min_prob=0.0),
    DraftSettings(num_speculative_tokens=3, min_prob=0.0),
    DraftSettings.published("trie"),
    DraftSettings(mixture="tasc", min_prob=0.0),
    DraftSettings(num_speculative_tokens=0),
)


class Changing:
    def __init__(self, base: Path, folders: list[Path], seed: int) -> None:
        self.base, self.folders, self.random = base, folders, random.Random(seed)
        self.tokenizer = TaskTokenizer.from_folder(base)
        ids = [tuple(self.tokenizer.encode_prompt(text)) for text in SENTENCES]
        self.prompts = [(*a, *b)[:32] for a in ids[:3] for b in ids[:3]]
        self.adapters = {str(i): folder for i, folder in enumerate(folders)}
        source = ModelSource(base, dtype="float64", adapters=tuple(self.adapters.items()))
        target = Target.load(source, CONFIG)
        self.records: list[StepRecord] = []
        proposer = self.proposer(SETTINGS[0])
        self.engine = Engine(target, self.tokenizer, proposer, CONFIG, self.records.append)
        self.expected: dict[str, tuple[int, ...]] = {}
        self.begun = self.changed = 0

    def proposer(self, settings: DraftSettings) -> NgramProposer:
        return make_proposer(self.tokenizer, settings, CONFIG)

    def operate(self) -> None:
        chance = self.random.random()
        if chance < 0.3:
            self.arrive()
        elif chance < 0.33 and self.expected:
            name = self.random.choice(sorted(self.expected))
            assert self.engine.cancel(name)
            del self.expected[name]
        elif chance < 0.37:
            self.changed += self.engine.running > 0
            self.engine.draft_by(self.proposer(self.random.choice(SETTINGS)))
        else:
            self.step()
        self.engine.check_integrity()

    def arrive(self) -> None:
        adapter = self.random.choice(list(self.adapters))
        prompt = self.random.choice(self.prompts)
        request = Request(
            str(self.begun), prompt, MOST, adapter=adapter, draft=self.random.random() < 0.8
        )
        if self.engine.waiting < 6:
            self.engine.submit(request)
            self.begun += 1
            folder = self.adapters[adapter]
            self.expected[request.id] = merged_says(self.base, folder, prompt, MOST)

    def step(self) -> None:
        for delta in self.engine.step():
            if delta.result:
                assert delta.result.tokens == self.expected.pop(delta.id)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt_neox"])
def test_whatever_changes_every_answer_is_that_of_its_own_adapter(
    architecture: str, tmp_path_factory: pytest.TempPathFactory, everything: bool, seed: int
) -> None:
    operations = 1500 if everything else 500
    base = make_folder(tmp_path_factory.mktemp(architecture), architecture)
    folders = [make_adapter(base, tmp_path_factory.mktemp("lora"), seed) for seed in range(3)]
    changing = Changing(base, folders, seed)
    for _ in range(operations):
        changing.operate()
    while changing.expected:
        changing.step()
    assert changing.begun > operations / 10
    assert changing.changed > operations / 100, "in the middle of answers"
    assert sum(record.accepted.sum() for record in changing.records) > 0
    assert sum(record.shared_tokens for record in changing.records) > 0
    assert not any(record.draft_failures for record in changing.records)
    for prompt in changing.prompts:
        answers = {merged_says(base, folder, prompt, MOST) for folder in folders}
        assert len(answers) == len(folders), "who answers is to be seen"
