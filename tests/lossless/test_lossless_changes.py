"""Adapters and proposers change at random moments; every answer is that of its own target."""

import random
from pathlib import Path

import pytest

from lora_folders import make_adapter, merged_says
from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_engine import Engine, EngineConfig, GenerationRequest, ModelSource, StepRecord, Target
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
    """An engine whose targets and proposer change, and what it must answer."""

    def __init__(self, base: Path, folders: list[Path], seed: int) -> None:
        self.base, self.folders, self.random = base, folders, random.Random(seed)
        self.tokenizer = TaskTokenizer.from_folder(base)
        ids = [tuple(self.tokenizer.encode_prompt(text)) for text in SENTENCES]
        self.prompts = [(*a, *b)[:32] for a in ids[:3] for b in ids[:3]]
        target = Target.load(ModelSource(base, folders[0], "float64"), CONFIG)
        self.records: list[StepRecord] = []
        proposer = self.proposer(SETTINGS[0])
        self.engine = Engine(target, self.tokenizer, proposer, CONFIG, self.records.append)
        # What each number answers by, the first by a merged adapter: folders by adapters' names.
        self.answering: dict[int, dict[str | None, Path]] = {0: {None: folders[0]}}
        self.expected: dict[str, tuple[int, ...]] = {}
        self.begun = self.mixed = self.freed = 0

    def proposer(self, settings: DraftSettings) -> NgramProposer:
        return NgramProposer(
            settings,
            rows=CONFIG.rows,
            capacity=CONFIG.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=DraftIndex.empty(self.tokenizer.fingerprint, self.tokenizer.vocab_size),
        )

    def operate(self) -> None:
        chance = self.random.random()
        if chance < 0.3:
            self.arrive()
        elif chance < 0.33 and self.expected:
            name = self.random.choice(sorted(self.expected))
            assert self.engine.cancel(name)
            del self.expected[name]
        elif chance < 0.37:
            self.change_target()
        elif chance < 0.40:
            self.engine.draft_by(self.proposer(self.random.choice(SETTINGS)))
        else:
            self.step()
        self.engine.check_integrity()

    def arrive(self) -> None:
        number = (max if self.random.random() < 0.9 else min)(self.answering)
        adapter = self.random.choice(list(self.answering[number]))
        prompt = self.random.choice(self.prompts)
        request = GenerationRequest(
            str(self.begun), prompt, MOST, adapter=adapter, target=number,
            draft=self.random.random() < 0.8,
        )  # fmt: skip
        if self.engine.waiting < 6:
            self.engine.submit(request)
            self.begun += 1
            folder = self.answering[number][adapter]
            self.expected[request.id] = merged_says(self.base, folder, prompt, MOST)

    def change_target(self) -> None:
        """Another target, or one less."""
        if len(self.answering) < 2:
            one, two = self.random.sample(self.folders, 2)
            if several := self.random.random() < 0.5:
                source = ModelSource(
                    self.base, dtype="float64", adapters=(("one", one), ("two", two))
                )
            else:
                source = ModelSource(self.base, one, "float64")
            number = self.engine.add_target(self.engine.load_target(source))
            self.answering[number] = {"one": one, "two": two} if several else {None: one}
            return
        oldest = min(self.answering)
        if self.engine.drop_target(oldest):
            del self.answering[oldest]
            self.freed += 1

    def step(self) -> None:
        targets = {s.request.target for s in self.engine._active.values()}
        self.mixed += len(targets) > 1
        for delta in self.engine.step():
            if delta.result:
                assert delta.result.tokens == self.expected.pop(delta.id)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt_neox"])
def test_whatever_changes_every_answer_is_that_of_its_own_target(
    architecture: str, tmp_path_factory: pytest.TempPathFactory, everything: bool, seed: int
) -> None:
    operations = 1500 if everything else 500
    base = make_folder(tmp_path_factory.mktemp(architecture), architecture)
    folders = [make_adapter(base, tmp_path_factory.mktemp("lora"), seed) for seed in range(3)]
    begun, mixed, freed = (100, 10, 1) if everything else (0, 0, 0)
    changing = Changing(base, folders, seed)
    # A target is seldom freed, so that a run goes on until there were enough.
    for done in range(20 * operations):
        if done >= operations and changing.freed > freed:
            break
        changing.operate()
    while changing.expected:
        changing.step()
    assert changing.begun > begun
    assert changing.mixed > mixed, "rows of two targets at once"
    assert changing.freed > freed
    assert sum(record.accepted.sum() for record in changing.records) > 0
    assert sum(record.shared_tokens for record in changing.records) > 0
    assert not any(record.draft_failures for record in changing.records)
    for prompt in changing.prompts:
        answers = {merged_says(base, folder, prompt, MOST) for folder in folders}
        assert len(answers) == len(folders), "who answers is to be seen"
