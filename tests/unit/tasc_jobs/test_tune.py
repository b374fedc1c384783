"""The choice of settings, over held-out rows whose replays are made up; and holding rows out."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from support import refused
from tasc_draft import DraftSettings, Replay, Tokens
from tasc_draft.learning import LEAST_ROWS, held_out
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.commands import PriceRequest, StoredTask
from tasc_jobs.tuning.forecast import CostFile, StepCurve
from tasc_jobs.tuning.held_out import HeldOut
from tasc_jobs.tuning.replay_page import tune_page
from tasc_jobs.tuning.replays import index_of
from tasc_jobs.tuning.tune import BUDGETS, MIN_PROBS, by_curve, by_node, planned, tune
from tasc_runtime.data.local_corpus import TokenRows
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer
from tiny import make_tokenizer

BASE = DraftSettings(mixture="tasc", recent_tokens=999, n_max=4)


@dataclass
class MadeUp:
    """Tokens per step rise with the budget and by each source's worth; drafts are never short."""

    worth: dict[str, float]
    sources: tuple[str, ...] = ("corpus", "prompt", "neighbours", "recent")
    taught: list[DraftSettings] = field(default_factory=list)

    def weights(self, settings: DraftSettings) -> DraftSettings:
        self.taught.append(settings)
        return settings

    def final_weights(self, settings: DraftSettings) -> tuple[str, DraftSettings]:
        return "final", settings

    def replay(self, settings: DraftSettings, weights: DraftSettings) -> Replay:
        assert weights.sources == settings.sources
        assert weights.neighbours == settings.neighbours
        per_step = 1 + settings.num_speculative_tokens**0.5 - settings.min_prob
        per_step += sum(self.worth.get(name, 0) for name in settings.sources if name != "recent")
        per_step += self.worth.get("recent", 0) * (settings.recent_tokens > 0)
        per_step += {0: 0.0, 16: 0.1, 32: 0.3, 64: 0.2}[settings.neighbours]
        nodes = 1000 * settings.num_speculative_tokens
        return Replay(1, 1000, round(1000 * per_step), nodes, 1, [1], [1], [0.0], [0.0])


def test_the_settings_with_the_greatest_expected_speed_up_are_chosen():
    held = MadeUp({"corpus": 1.0, "prompt": 0.5})
    tuned = tune(held, BASE, by_node(0.05))
    best = max(tuned.trials, key=lambda trial: trial.speed_up)
    assert tuned.chosen == best
    assert best.speed_up == best.replay.tokens_per_step / (1 + 0.05 * best.replay.nodes / 1000)
    chosen = tuned.chosen.settings
    assert (chosen.neighbours, chosen.min_prob, chosen.mixture) == (32, 0.0, "mixed")
    assert chosen.n_max == BASE.n_max
    # 1 + sqrt(k) + 1.8 over 1 + k / 20: 4.8 / 1.2, 5.6 / 1.4, 6.8 / 1.8, 8.5 / 2.6
    assert chosen.num_speculative_tokens == 8
    assert tuned.weights == ("final", chosen)


@pytest.mark.parametrize(("node_cost", "budget"), [(0.0, 32), (0.5, 4)])
def test_dear_tokens_make_small_budgets(node_cost, budget):
    chosen = tune(MadeUp({}), BASE, by_node(node_cost)).chosen.settings
    assert chosen.num_speculative_tokens == budget


def test_each_sources_worth_is_measured_by_its_absence():
    tuned = tune(MadeUp({"corpus": 1.0, "prompt": 0.5, "recent": 0.25}), BASE, by_node(0.02))
    gains = {worth.source: pytest.approx(worth.gain) for worth in tuned.worths}
    assert gains == {"corpus": 1.0, "prompt": 0.5, "neighbours": 0.0, "recent": 0.25}
    assert tuned.chosen.settings.sources == BASE.sources


def test_a_source_that_hurts_is_left_out_and_weights_are_learnt_without_it():
    held = MadeUp({"corpus": 1.0, "prompt": -0.5})
    tuned = tune(held, BASE, by_node(0.02))
    assert tuned.chosen.settings.sources == tuple(n for n in BASE.sources if n != "prompt")
    assert tuned.chosen.settings in held.taught
    assert tuned.weights == ("final", tuned.chosen.settings)


def test_progress_is_told_of_every_replay():
    held, done = MadeUp({}), []
    tuned = tune(held, BASE, by_node(0.02), lambda: done.append(1))
    assert len(done) == planned(held) == len(tuned.trials) + len(tuned.worths)
    assert len(tuned.trials) >= len(BUDGETS) * len(MIN_PROBS)


def test_a_machines_costs_can_set_the_price():
    curve = StepCurve(8, 64, (8, 40, 72), (0.01, 0.01, 0.10))
    tuned = tune(MadeUp({}), BASE, by_curve(curve, 0.0))
    assert tuned.chosen.settings.num_speculative_tokens == 4  # 8 rows of 1 + 4 tokens are free
    beyond = [t for t in tuned.trials if t.settings.num_speculative_tokens > 8]
    assert beyond
    assert {trial.speed_up for trial in beyond} == {0.0}


def test_the_report_shows_the_gain_of_every_source():
    page = tune_page("t", tune(MadeUp({"corpus": 1.0}), BASE, by_node(0.02)), ("so",))
    bars = page.plots[0]
    assert dict(bars.bars)["corpus"] == pytest.approx(1.0)
    assert [row[0] for row in page.tables[1].rows] == list(MadeUp.sources)
    lines = {line.name: list(line.x) for line in page.plots[1].lines}
    assert lines == {f"min_prob {p}": list(BUDGETS) for p in MIN_PROBS}


def test_the_price_of_a_drafted_token_is_said_to_be_assumed_and_how_to_measure_it():
    assumed = PriceRequest(0.035, None, 8)
    said = assumed.in_words()
    assert said.startswith("Assumed, not measured: a drafted token costs 3.5% of a step without")
    assert "--node-cost 0.035" in said
    assert "--step-cost FILE" in said
    assert assumed.figures() == {"node_cost": 0.035, "step_cost": None}


def test_a_measured_price_is_said_to_be_measured_and_of_what():
    cost = {"rows": 8, "tokens": 8, "context": 64, "seconds": 0.01}
    machine = {"model": "m", "device": "d", "dtype": "float32"}
    measured = PriceRequest(0.02, CostFile.model_validate({**machine, "costs": [cost]}), 8)
    said = measured.in_words()
    assert said.startswith("Measured (--step-cost), not assumed")
    assert "m in float32 on d at b = 8" in said
    assert measured.figures() == {"node_cost": None, "step_cost": {**machine, "rows": 8}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return TaskTokenizer.from_folder(folder)


def numbered(rows: int) -> TokenRows:
    """Each row's prompt and output are its own number, in two digits."""
    texts = Tokens.of([[20 + i // 100, 20 + i % 100] for i in range(rows)])
    return TokenRows(texts, texts)


def test_the_rows_that_judge_are_in_neither_the_index_nor_the_lesson(tokenizer, monkeypatch):
    rows, seen = numbered(LEAST_ROWS), {}

    def learn(index, prompts, outputs, **rest):
        seen["index"], seen["taught"] = index, outputs.ids.reshape(-1, 2).tolist()

    def run(index, rows, settings, **rest):
        seen["judged"] = [answer[:-1].tolist() for _, answer in rows]

    monkeypatch.setattr("tasc_jobs.tuning.held_out.learn_weights", learn)
    monkeypatch.setattr("tasc_jobs.tuning.held_out.run", run)
    held = HeldOut(rows, tokenizer, branching=False)
    held.weights(DraftSettings())
    held.replay(DraftSettings(), None)
    _, out = held_out(len(rows))
    everything = [rows.take(np.array([i])).outputs.ids.tolist() for i in out]
    assert len(seen["judged"]) == held.rows == len(out) // 2
    assert sorted(seen["judged"] + seen["taught"]) == sorted(everything)
    assert seen["index"].corpus.documents == len(rows) - len(out)
    held.final_weights(DraftSettings())
    assert seen["taught"] == everything


def test_where_the_index_is_capped_so_is_the_one_that_is_tuned_with(tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tasc_jobs.tuning.held_out.learn_weights", lambda index, *rest, **more: seen.append(index)
    )
    rows = numbered(LEAST_ROWS)
    record = TaskRecord("t", "m", tokenizer.fingerprint, "{input}")
    whole = StoredTask(record, tokenizer, rows, index_of(rows, tokenizer), 0)
    assert whole.max_bytes is replace(whole, index=None).max_bytes is None
    capped = replace(whole, index=index_of(rows, tokenizer, max_bytes=4000))
    assert 3000 < capped.max_bytes <= 4000
    for task in (whole, capped):
        HeldOut(rows, tokenizer, branching=False, max_bytes=task.max_bytes).weights(DraftSettings())
    free, tight = (index.corpus for index in seen)
    assert 0 < tight.nbytes <= capped.max_bytes < free.nbytes
    assert 0 < tight.documents < free.documents


def test_lessons_never_keep_recent_answers(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "tasc_jobs.tuning.held_out.learn_weights",
        lambda *args, settings, **rest: asked.append(settings),
    )
    held = HeldOut(numbered(LEAST_ROWS), tokenizer, branching=False)
    held.weights(DraftSettings(neighbours=7))
    assert asked == [replace(DraftSettings(neighbours=7), recent_tokens=0)]


def test_too_few_rows_are_refused(tokenizer):
    with refused(JobError, str(LEAST_ROWS)):
        HeldOut(numbered(199), tokenizer, branching=False)
