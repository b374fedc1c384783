"""Tests that drafts by a model, or by it and n-grams, change no answer. Needs only Redis."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
import torch
from prometheus_client import CollectorRegistry
from serving import Task, publish
from transformers import AutoModelForCausalLM

import tiny
from support import index_of
from tasc_draft import DraftSettings
from tasc_draft.drafts import NEURAL
from tasc_engine import StepRecord, UnsupportedModel
from tasc_engine.drafting.neural.card import DrafterCard, target_fingerprint
from tasc_engine.drafting.neural.files import save_drafter
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_engine.errors import RankingError
from tasc_protocol import Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_store import ArtifactStore, NeuralDrafting, TaskStore
from tasc_store.artifacts import VOCABULARY

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(
    rows=4, max_model_len=128, device="cpu", cost_aware=False, neural_draft_limit_s=60
)
MOST = 40  # maximum tokens of an answer
PROMPTS = tiny.SENTENCES[:5]
LABELS = {"task": "t", "model_name": "tiny"}
Place = Callable[[str], Path]


@pytest.fixture(scope="module")
def drafter(made: Task, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Folders of drafters: a copy of the target, or a random head that reads it."""
    own = made.tokenizer.fingerprint
    places = {kind: tmp_path_factory.mktemp(kind) for kind in ("independent", "eagle")}
    save_drafter(places["independent"], made.model, DrafterCard("independent", own))
    torch.manual_seed(1)
    config = AutoModelForCausalLM.from_pretrained(made.record.model).config
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    size = config.hidden_size
    head = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    joint = torch.cat((0.1 * torch.randn(size, size), torch.eye(size)), 1).double()
    target = target_fingerprint(Path(made.record.model))
    save_drafter(places["eagle"], head, DrafterCard("eagle", own, target), joint)
    return places.__getitem__


@pytest.fixture(scope="module")
def expected(made: Task) -> list[str]:
    return [made.plain(made.prompt(value, chat=True), MOST).text for value in PROMPTS]


class Drafted:
    """A worker, and the draft tokens of its steps."""

    def __init__(
        self, client: redis.Redis, task: Task, neural: NeuralDrafting | None, cache: Path
    ) -> None:
        name = f"drafted-{uuid.uuid4().hex}"
        self.record = replace(task.record, name=name, corpus=None, max_tokens=MOST, neural=neural)
        TaskStore(client).put(self.record)
        self.client, self.cache = client, cache
        self.steps: list[StepRecord] = []

    def start(self) -> EngineBuilder:
        self.worker = EngineBuilder.of_task(
            self.client, self.record.name, ENGINE, cache_dir=self.cache, on_step=self.steps.append
        )
        return self.worker

    def answers(self) -> list[str]:
        """Returns the answers; the rows begin one after another."""
        calls = [Request(str(i), value, templated=True) for i, value in enumerate(PROMPTS)]
        requests = [self.worker.reader.request(call) for call in calls]
        found = {int(r.id): r.text for r in self.worker.engine.generate(requests)}
        return [found[i] for i in range(len(calls))]

    def accepted(self) -> tuple[int, int]:
        """Returns accepted tokens of the model and of n-grams since the last call."""
        assert not any(step.draft_failures for step in self.steps)
        by_source = sum(step.accepted.sum(1) for step in self.steps)
        self.steps.clear()
        return int(by_source[NEURAL]), int(by_source[:NEURAL].sum())


Make = Callable[[NeuralDrafting | None], Drafted]


@pytest.fixture
def make(client: redis.Redis, made: Task, tmp_path: Path) -> Make:
    return lambda neural: Drafted(client, made, neural, tmp_path)


@pytest.fixture
def ranking(made: Task, expected: list[str]) -> Ranking:
    """Counts of the expected answers."""
    own = made.tokenizer
    ids = [*(i for ids in own.encode_outputs(expected) for i in ids), own.eos_id]
    return Ranking.of(
        np.bincount(ids, minlength=own.vocab_size), eos_id=own.eos_id, origin="target",
        rows=len(expected), fingerprint=own.fingerprint,
    )  # fmt: skip


def publish_ranking(drafted: Drafted, ranking: Ranking, folder: Path) -> None:
    name = drafted.record.name
    store = ArtifactStore(drafted.client, name, ranking.fingerprint, kind=VOCABULARY)
    ranking.save(folder / "vocabulary.npz")
    store.announce(store.publish(folder / "vocabulary.npz", 0).version)


@pytest.mark.parametrize(
    ("proposer", "kind", "vocabulary"),
    [
        ("neural", "independent", "full"),
        ("neural", "eagle", "recent"),
        ("hybrid", "independent", "recent"),
        ("hybrid", "eagle", "full"),
    ],
)
def test_drafter_changes_no_answer_and_its_drafts_are_accepted(
    make: Make, drafter: Place, expected: list[str], proposer: str, kind: str, vocabulary: str
) -> None:
    how = NeuralDrafting(str(drafter(kind)), proposer, vocabulary, depth=3, width=4)
    drafted = make(how)
    worker = drafted.start()
    assert worker.drafts_by == f"{proposer}/{kind}"
    assert drafted.answers() == expected
    neural, ngram = drafted.accepted()
    assert neural > (50 if kind == "independent" else 0)
    assert (ngram > 0) == (proposer == "hybrid")


def test_indexes_and_settings_change_during_answers_with_a_drafter(make, drafter, made, expected):
    drafted = make(NeuralDrafting(str(drafter("independent")), depth=3, width=4))
    worker = drafted.start()
    assert drafted.answers() == expected
    before = drafted.accepted()
    answered = index_of(made.tokenizer, made.tokenizer.encode_outputs(expected))
    artifact = publish(worker.indexes.store, answered)
    requests = [worker.reader.request(Request(v, v, templated=True)) for v in PROMPTS]
    for request in requests:
        worker.engine.submit(request)
    found = [worker.engine.step() for _ in range(3)]
    worker.swap(artifact, worker.indexes.fetch(artifact))
    off, on = DraftSettings(num_speculative_tokens=0), DraftSettings(min_prob=0.0)
    for version, (settings, name) in enumerate(((off, "mixed"), (on, "hybrid/independent")), 2):
        found += [worker.engine.step() for _ in range(2)]
        record = replace(worker.record, draft=settings)
        made_for = worker.proposer_for(record, worker.proposer.index)
        worker.take(record, version, made_for)
        assert worker.drafts_by == name
    while worker.engine.running:
        found.append(worker.engine.step())
    texts = {d.result.id: d.result.text for step in found for d in step if d.result}
    assert ([texts[value] for value in PROMPTS], worker.artifact) == (expected, artifact)
    drafted.accepted()
    assert drafted.answers() == expected
    neural, ngram = drafted.accepted()
    assert neural > 0
    assert ngram > before[1]  # the index drafts


@pytest.mark.parametrize("vocabulary", ["ranked", "recent+ranked"])
def test_drafter_uses_the_ranking_of_the_task(
    make: Make, drafter: Place, ranking: Ranking, expected: list[str], vocabulary: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    how = NeuralDrafting(str(drafter("independent")), "neural", vocabulary, ranked_tokens=20)
    drafted = make(how)
    with pytest.raises(ServiceError):
        drafted.start()
    publish_ranking(drafted, ranking, tmp_path)
    worker = drafted.start()
    registry = CollectorRegistry()
    assert worker.drafter is not None
    worker.drafter.publish(NeuralMetrics(registry, LABELS))
    assert [drafted.answers() for _ in range(2)] == [expected] * 2
    assert drafted.accepted()[0] > 20
    total, count = (
        registry.get_sample_value(f"tasc_active_vocabulary_tokens_{end}", LABELS)
        for end in ("sum", "count")
    )
    assert total is not None
    assert count
    least = len(ranking.top(20))
    assert total == least * count if vocabulary == "ranked" else total > least * count


def test_unsuitable_drafter_or_ranking_is_refused_at_load(make, drafter, made, ranking, tmp_path):
    save_drafter(tmp_path / "d", made.model, DrafterCard("independent", "f" * 32))
    with pytest.raises(UnsupportedModel):
        make(NeuralDrafting(str(tmp_path / "d"))).start()
    most = {"vocabulary": "ranked", "ranked_tokens": made.tokenizer.vocab_size + 1}
    drafted = make(NeuralDrafting(str(drafter("independent")), **most))
    publish_ranking(drafted, ranking, tmp_path)
    with pytest.raises(RankingError):
        drafted.start()
