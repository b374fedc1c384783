"""Tests the choice of settings with invented replays, and prices with known values."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from support import refused
from tasc_draft import DraftSettings, Replay, Tokens
from tasc_draft.replaying import MIN_ROWS, held_out
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.commands import PriceOptions, StoredTask
from tasc_jobs.tuning.costs import CostFile, StepCurve, read_cost_file, speed_up
from tasc_jobs.tuning.held_out import HeldOut
from tasc_jobs.tuning.replay_page import tune_page
from tasc_jobs.tuning.tune import BUDGETS, MIN_PROBS, at_rows, by_curve, by_node, planned, tune
from tasc_protocol import GuideSpec
from tasc_runtime.data.local_corpus import TokenRows, encode, index_of
from tasc_runtime.errors import FileError
from tasc_store import TaskRecord
from tasc_store.corpus import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer

BASE = DraftSettings(mixture="tasc", recent_tokens=999, n_max=4)


@dataclass
class MadeUp:
    """Tokens per step rise with the budget and by each source's worth; drafts are never short."""

    worth: dict[str, float]
    sources: tuple[str, ...] = ("corpus", "prompt", "neighbours", "recent")
    taught: list[DraftSettings] = field(default_factory=list)

    def weights(self, settings: DraftSettings, *, final: bool = False) -> Any:
        if final:
            return "final", settings
        self.taught.append(settings)
        return settings

    def replay(self, settings: DraftSettings, weights: DraftSettings) -> Replay:
        assert (weights.sources, weights.neighbours) == (settings.sources, settings.neighbours)
        per_step = 1 + settings.num_speculative_tokens**0.5 - settings.min_prob
        per_step += sum(self.worth.get(name, 0) for name in settings.sources if name != "recent")
        per_step += self.worth.get("recent", 0) * (settings.recent_tokens > 0)
        per_step += {0: 0.0, 16: 0.1, 32: 0.3, 64: 0.2}[settings.neighbours]
        nodes = 1000 * settings.num_speculative_tokens
        tokens = round(1000 * per_step)
        return Replay(1, 1000, tokens, nodes, 1, [1], [1], [0.0], [0.0], tokens)


def test_tuning_chooses_the_greatest_expected_speed_up_and_counts_replays():
    held, done = MadeUp({"corpus": 1.0, "prompt": 0.5, "neighbours": 0.1}), []
    tuned = tune(held, BASE, by_node(0.05), lambda: done.append(1))
    assert len(done) == planned(held) == len(tuned.trials) + len(tuned.worths)
    assert len(tuned.trials) >= len(BUDGETS) * len(MIN_PROBS)
    best = max(tuned.trials, key=lambda trial: trial.speed_up)
    assert tuned.chosen == best
    by_hand = best.replay.tokens_per_step / (1 + 0.05 * best.replay.nodes / 1000)
    assert best.speed_up == pytest.approx(by_hand)
    chosen = tuned.chosen.settings
    assert (chosen.neighbours, chosen.min_prob, chosen.mixture) == (32, 0.0, "mixed")
    assert chosen.n_max == BASE.n_max
    # 1 + sqrt(k) + 1.9 over 1 + k / 20: 4.9 / 1.2, 5.7 / 1.4, 6.9 / 1.8, 8.6 / 2.6
    assert chosen.num_speculative_tokens == 8
    assert tuned.weights == ("final", chosen)
    for node_cost, budget in ((0.0, 32), (0.5, 4)):  # expensive tokens lead to small budgets
        chosen = tune(MadeUp({}), BASE, by_node(node_cost)).chosen.settings
        assert chosen.num_speculative_tokens == budget


def test_sources_without_a_gain_are_left_out():
    worth = {"corpus": 1.0, "prompt": 0.5, "neighbours": 0.1, "recent": 0.25}
    tuned = tune(MadeUp(worth), BASE, by_node(0.02))
    assert {w.source: pytest.approx(w.gain) for w in tuned.worths} == worth
    assert tuned.chosen.settings.sources == BASE.sources
    assert all(w.kept for w in tuned.worths)
    for lost, dropped in (
        ({"prompt": -0.001}, {"prompt"}),
        ({"prompt": 0.0, "neighbours": -0.5}, {"prompt", "neighbours"}),
        ({"recent": -0.08}, {"recent"}),  # of 6.9 tokens per step
        ({"recent": -0.06}, set()),  # a replay of the corpus cannot show their worth
        ({"corpus": 0.0, "recent": -0.2}, {"corpus", "recent"}),
    ):
        held = MadeUp({**worth, **lost})
        tuned = tune(held, BASE, by_node(0.02))
        chosen = tuned.chosen.settings
        assert chosen.sources == tuple(n for n in BASE.sources if n not in dropped)
        assert {w.source for w in tuned.worths if not w.kept} == dropped
        assert tuned.weights == ("final", chosen)
        drafted = {n for n in BASE.sources if n not in dropped | {"recent"}}
        assert any(drafted == set(s.sources) - {"recent"} for s in held.taught)


class StandIns(MadeUp):
    """Corpus and prompt have the same gain, and together no more than one alone."""

    def replay(self, settings: DraftSettings, weights: DraftSettings) -> Replay:
        both = {"corpus", "prompt"} <= set(settings.sources)
        self.worth = {"corpus": 0.5, "prompt": 0.0 if both else 0.5, "neighbours": 0.1}
        return super().replay(settings, weights)


def test_one_of_two_equivalent_sources_is_kept():
    chosen = tune(StandIns({}), BASE, by_node(0.02)).chosen.settings
    assert len({"corpus", "prompt"} & set(chosen.sources)) == 1


def test_measured_costs_determine_the_chosen_draft_budget():
    curve = StepCurve(8, 64, (8, 40, 72), (0.01, 0.01, 0.10))
    tuned = tune(MadeUp({}), BASE, by_curve(curve, 0.0))
    assert tuned.chosen.settings.num_speculative_tokens == 4  # 8 rows of 1 + 4 tokens are free
    beyond = [t for t in tuned.trials if t.settings.num_speculative_tokens > 8]
    assert beyond
    assert {trial.speed_up for trial in beyond} == {0.0}


def test_report_has_the_gain_of_each_source():
    page = tune_page("t", tune(MadeUp({"corpus": 1.0}), BASE, by_node(0.02)), (), ("so",))
    bars = page.plots[0]
    assert dict(bars.bars)["corpus"] == pytest.approx(1.0)
    assert [row[0] for row in page.tables[1].rows] == list(MadeUp.sources)
    lines = {line.name: list(line.x) for line in page.plots[1].lines}
    assert lines == {f"min_prob {p}": list(BUDGETS) for p in MIN_PROBS}


@pytest.mark.parametrize("with_costs", [False, True])
def test_price_names_its_origin(with_costs: bool):
    machine = {"model": "m", "device": "d", "dtype": "float32"}
    given = CostFile.model_validate(costs(cost(8, 8, 0.01))) if with_costs else None
    price = PriceOptions(0.035, 8, given)
    if with_costs:
        assert "m in float32 on d at b = 8" in price.in_words()
        assert price.figures() == {"node_cost": None, "step_cost": {**machine, "rows": 8}}
    else:
        assert "--node-cost 0.035" in price.in_words()
        assert price.figures() == {"node_cost": 0.035, "step_cost": None}


def test_speed_ups_are_shown_for_each_number_of_rows():
    tuned = tune(MadeUp({}), BASE, by_node(0.03))
    assert tuned.chosen.settings.num_speculative_tokens == 16
    free = StepCurve(1, 64, (1, 40), (0.01, 0.01))
    dear = StepCurve(8, 64, (8, 320), (0.01, 0.4))
    short = StepCurve(2, 64, (2, 20), (0.01, 0.01))  # costs of up to 9 draft tokens a row
    found = [at_rows(tuned, curve, 0.0) for curve in (free, dear, short)]
    assert found[0].speed_up == pytest.approx(tuned.chosen.replay.tokens_per_step)
    assert (found[0].best_budget, found[1].best_budget, found[2].best_budget) == (32, 4, 8)
    assert found[1].speed_up < found[1].best_speed_up < 1
    assert found[2].speed_up is None
    page = tune_page("t", tuned, found, ())
    assert [row[0] for row in page.tables[0].rows] == ["1", "8", "2"]
    assert page.tables[0].rows[2][2] == "not measured"


def numbered(rows: int) -> TokenRows:
    """Each row's prompt and output are its own number, in two digits."""
    texts = Tokens.of([[20 + i // 100, 20 + i % 100] for i in range(rows)])
    return TokenRows(texts, texts)


def test_judging_rows_are_not_in_the_index_and_not_learnt_from(tokenizer, monkeypatch):
    rows, seen = numbered(MIN_ROWS), {}

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
    held.weights(DraftSettings(), final=True)
    assert seen["taught"] == everything


def test_learnt_weights_ignore_recent_answers_and_need_enough_rows(tokenizer):
    held = HeldOut(numbered(MIN_ROWS), tokenizer, branching=False)
    some, none = (held.weights(DraftSettings(recent_tokens=n)).values for n in (1000, 0))
    assert np.array_equal(some, none)
    with refused(JobError, str(MIN_ROWS)):
        HeldOut(numbered(MIN_ROWS - 1), tokenizer, branching=False)


def test_tuning_uses_an_index_with_the_size_cap_of_the_current_index(tokenizer, monkeypatch):
    learn, seen = "tasc_jobs.tuning.held_out.learn_weights", []
    monkeypatch.setattr(learn, lambda index, *rest, **more: seen.append(index))
    rows = numbered(MIN_ROWS)
    record = TaskRecord("t", "m", tokenizer.fingerprint, "{input}")
    whole = StoredTask(record, tokenizer, rows, index_of(rows, tokenizer), len(rows), 0)
    assert whole.max_bytes is replace(whole, index=None).max_bytes is None
    capped = replace(whole, index=index_of(rows, tokenizer, max_bytes=4000))
    assert 3000 < capped.max_bytes <= 4000
    for task in (whole, capped):
        HeldOut(rows, tokenizer, branching=False, max_bytes=task.max_bytes).weights(DraftSettings())
    free, tight = (index.corpus for index in seen)
    assert 0 < tight.nbytes <= capped.max_bytes < free.nbytes
    assert 0 < tight.documents < free.documents


# 10 ms for the 8 tokens of a plain step, 30 ms for 24 and 110 ms for 88.
CURVE = StepCurve(8, 128, (8, 24, 88), (0.010, 0.030, 0.110))


def replay(tokens: int, steps: int, nodes: int, microseconds: float = 0.0) -> Replay:
    times = [microseconds] * steps
    return Replay(2, steps, tokens, nodes, steps, [steps], [steps // 2], times, [0.0, 0.0], tokens)


def cost(rows: int, tokens: int, seconds: float, context: int = 128) -> dict:
    return {"rows": rows, "tokens": tokens, "context": context, "seconds": seconds}


def costs(*measured: dict, **more: object) -> dict:
    return {"model": "m", "device": "d", "dtype": "float32", "costs": list(measured), **more}


def test_speed_ups_equal_values_computed_by_hand():
    assert (CURVE.plain, CURVE.at(88.5)) == (0.010, None)
    assert [CURVE.at(n) for n in (16, 56, 88)] == pytest.approx([0.020, 0.070, 0.110])
    # 3 tokens a step, 2 nodes: 8 * (1 + 2) = 24 tokens, 30 ms; 3 * 10 / 30 = 1 without drafting.
    assert speed_up(CURVE, replay(30, 10, 20)) == pytest.approx(1.0)
    # 625 us for each of 8 rows are 5 ms more.
    slow = replay(30, 10, 20, microseconds=625.0)
    assert speed_up(CURVE, slow) == pytest.approx(3 * 10 / 35)
    # Finding neighbours at the start of a row is drafting, too: 500 us a step for each row.
    found = Replay(2, 4, 8, 0, 0, [], [], [100.0] * 4, [1000.0, 600.0], 8)
    assert speed_up(CURVE, found) == pytest.approx(2 * 10 / 14)
    # A step that is larger than the measured ones has no price.
    assert speed_up(CURVE, replay(90, 10, 150)) is None


def test_cost_file_gives_the_curve_at_the_nearest_context(tmp_path):
    path = tmp_path / "cost.json"
    measured = [cost(8, 88, 0.11), cost(8, 8, 0.01), cost(8, 24, 0.03)]
    far = [cost(8, 8, 1.0, 1024), cost(8, 88, 2.0, 1024), cost(1, 1, 0.5), cost(1, 9, 0.6)]
    path.write_text(json.dumps(costs(*measured, *far)))
    found = read_cost_file(path)
    assert found.curve(8, 500.0) == CURVE
    assert (found.curve(8, 600.0).context, found.curve(1, 0.0).plain) == (1024, 0.5)
    found = CostFile.model_validate(costs(cost(1, 1, 0.1), cost(1, 9, 0.2), cost(8, 8, 0.1)))
    assert [curve.rows for curve in found.curves(0.0)] == [1]
    with refused(JobError, "b = 32", "b = 1, 8", "--batch-size"):
        found.curve(32, 0.0)
    with refused(JobError, "8 to 8"):
        found.curve(8, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (costs(cost(1, 1, 0.1), speed=1), "speed is 1: "),
        (costs({**cost(1, 1, 0.1), "ms": 1}), "costs.0.ms is 1: "),
        (costs(cost(1, 1, 0.0)), "costs.0.seconds"),
        (costs(cost(0, 1, 0.1)), "costs.0.rows"),
        (costs(), "costs is "),
        ({"costs": [cost(1, 1, 0.1)]}, "model is missing"),
        ([], "cost.json"),
        ("{", "JSON"),
    ],
)
def test_file_without_step_costs_is_refused(tmp_path, content, message):
    path = tmp_path / "cost.json"
    with refused(FileError, "cost.json"):
        read_cost_file(path)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused(FileError, "cost.json", message):
        read_cost_file(path)


def test_prompt_tokens_cost_the_same_with_and_without_drafts() -> None:
    """A speed-up of 4 without prompt tokens shrinks as prompts grow."""
    found = Replay(10, 25, 100, 0, 0, [], [], [0.0], [0.0], 100)
    assert by_node(0.1)(found) == pytest.approx(4)
    assert by_node(0.1, 50)(found) == pytest.approx((100 + 50) / (25 + 50))
    curve = StepCurve(8, 64, (8, 16, 24), (1.0, 1.2, 1.4))
    # 10 rows with prompts of 50 tokens, 8 at a time: 0.025 s a token.
    found = speed_up(curve, found, prompt_tokens=50)
    assert found == pytest.approx((100 * 1.0 + 100) / (25 * 1.0 + 100))


def test_forced_tokens_cost_the_same_with_and_without_drafts() -> None:
    """The answer is a branch, six forced tokens and a branch; the draft is all but the last."""
    found = Replay(1, 1, 8, 7, 1, [1], [1], [0.0], [0.0], 2, carried=6, forced=6)
    assert by_node(0.05)(found) == pytest.approx((2 + 0.3) / (1 + 0.35))
    # A plain step takes 1 s, and each further token 0.05 s.
    curve = StepCurve(1, 64, (1, 21), (1.0, 2.0))
    assert speed_up(curve, found) == pytest.approx((2 + 0.3) / (1 + 0.35))


@pytest.mark.parametrize("kind", ["choice", "regex"])
def test_plain_steps_of_guided_replays_exclude_forced_tokens(kind: str) -> None:
    texts = ("alarm set now", "alarm set later", "play music")
    tokenizer = TaskTokenizer.from_folder(MODEL)
    rows = [CorpusRow(str(n), f"text {n}", texts[n % 3]) for n in range(MIN_ROWS)]
    encoded = encode(rows, tokenizer, PromptTemplate("{input}"))
    text = "|".join(texts)
    spec = GuideSpec("choice", texts) if kind == "choice" else GuideSpec("regex", text=text)
    free = HeldOut(encoded, tokenizer, branching=True)
    guided = HeldOut(encoded, tokenizer, branching=True, guide=spec)
    plain = [each.replay(replace(BASE, num_speculative_tokens=0), None) for each in (free, guided)]
    assert plain[0].plain_steps == plain[0].steps == plain[0].tokens == plain[1].tokens
    # The first token and, behind "alarm set", the next one are decided; the rest is forced.
    play = tokenizer.encode_outputs(["play music"])[0][0]
    decided = sum(1 if answer[0] == play else 2 for _, answer in guided.judging)
    if kind == "choice":
        assert plain[1].plain_steps == plain[1].steps == decided
    else:  # an expression allows other tokens of the same text
        assert decided <= plain[1].plain_steps == plain[1].steps < plain[0].steps
