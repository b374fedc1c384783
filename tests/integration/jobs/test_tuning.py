"""Tests that ``tasc tune`` publishes settings for replicas, with assumed and measured costs."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import redis

from support import assert_self_contained
from tasc_draft import DraftIndex, build_index, read_index, write_index
from tasc_draft.index.weights import Weights
from tasc_jobs.demo.tasks import read_split
from tasc_runtime.data.local_corpus import encode
from tasc_runtime.models import load_tokenizer
from tasc_store import Artifact, ArtifactCache, ArtifactStore, CorpusRow, CorpusStore, TaskRecord
from tasc_store.indexes import DraftIndexes
from tasc_text import PromptTemplate

pytestmark = pytest.mark.redis
ROWS = 400


@pytest.fixture
def record(client: redis.Redis, shipped_task: TaskRecord) -> TaskRecord:
    """A task with a slice of the shipped rows, and no index yet."""
    rows = read_split("massive_en", "train")[:ROWS]
    added = [CorpusRow(r["id"], r["input"], r["output"]) for r in rows]
    CorpusStore(client, shipped_task.name).append(added)
    return shipped_task


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    """Step costs: verification is nearly free for b = 8, and a step per token for b = 2.

    Steps take so long that the measured time of drafting does not show in a speed-up.
    """
    measured = [
        {"rows": b, "tokens": b * k, "context": 64, "seconds": seconds * (1 + more * (k - 1))}
        for b, seconds, more in ((8, 1e6, 1e-4), (2, 2e5, 1.0))
        for k in (1, 40)
    ]
    path = tmp_path / "costs.json"
    machine = {"model": "m", "device": "made up", "dtype": "float32"}
    path.write_text(json.dumps({**machine, "costs": measured}))
    return path


def current(client: redis.Redis, record: TaskRecord, folder: Path) -> tuple[Artifact, DraftIndex]:
    """Returns the current index as a replica gets it."""
    store = ArtifactStore(client, record.name, record.fingerprint)
    tokenizer = load_tokenizer(record)
    found = DraftIndexes(record.name, store, ArtifactCache(folder / "cache"), tokenizer).current()
    assert found[0] is not None
    return found


def test_tuned_settings_are_published_with_the_index(client, record, tmp_path, tasc_here):
    report = tmp_path / "report.html"
    printed = json.loads(tasc_here.run("tune", record.name, "--json", "--report", report))
    artifact, index = current(client, record, tmp_path)
    assert (artifact.version, artifact.corpus_rows) == (printed["version"], ROWS) == (1, ROWS)
    assert index.settings is not None
    settings = asdict(index.settings)
    assert {**settings, "sources": list(settings["sources"])} == printed["settings"]
    assert index.settings.mixture == "mixed"
    in_use = "recent" in index.settings.sources
    assert index.settings.recent_tokens == record.draft.recent_tokens * in_use
    assert index.weights is not None
    assert (index.weights.values != Weights.initial().values).any()
    assert index.corpus.documents == ROWS
    replays = len(printed["trials"]) + len(printed["sources"])
    assert f"{replays}/{replays} replays" in tasc_here.err
    assert all(w["kept"] == (w["source"] in settings["sources"]) for w in printed["sources"])
    html = report.read_text(encoding="utf-8")
    assert html.count("<svg") == 3
    assert_self_contained(html)
    assert printed["price"] == {"node_cost": 0.02, "step_cost": None}


def test_tuning_figures_are_consistent(record, tasc_here, costs):
    options = ["--step-cost", costs, "--batch-size", 8, "--json"]
    printed = json.loads(tasc_here.run("tune", record.name, *options))
    for trial in [*printed["trials"], printed["chosen"]]:
        assert trial["tokens_per_step"] == trial["tokens"] / trial["steps"]
        assert trial["nodes_per_step"] <= trial["num_speculative_tokens"]
    assert printed["chosen"]["speed_up"] >= max(t["speed_up"] for t in printed["trials"])
    assert printed["chosen"]["num_speculative_tokens"] >= 16
    assert (printed["price"]["node_cost"], printed["price"]["step_cost"]["rows"]) == (None, 8)
    assert all(s["gain"] == s["with_it"] - s["without_it"] for s in printed["sources"])
    assert max(s["gain"] for s in printed["sources"]) > 0
    dear, cheap = printed["by_rows"]
    assert (dear["rows"], cheap["rows"]) == (2, 8)
    assert cheap["speed_up"] == printed["chosen"]["speed_up"]
    assert dear["speed_up"] < dear["best_speed_up"] < 1


def test_step_costs_can_be_measured_on_this_machine(record, tasc_here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["tune", record.name, "--batch-size", 2, "--json"]
    printed = json.loads(tasc_here.run(*command, "--measure-cost"))
    assert [each["rows"] for each in printed["by_rows"]] == [1, 2]
    assert printed["price"]["step_cost"]["model"] == Path(record.model).name
    (file,) = tmp_path.glob("tasc-serve/costs/*.json")
    again = json.loads(tasc_here.run(*command, "--step-cost", file))
    assert again["price"] == printed["price"]
    plain = [each["plain_seconds"] for each in printed["by_rows"]]
    assert [each["plain_seconds"] for each in again["by_rows"]] == plain


def test_tuning_changes_only_weights_and_settings_of_an_index(client, record, tmp_path, tasc_here):
    tokenizer = load_tokenizer(record)
    store = CorpusStore(client, record.name)
    rows = encode(store.read(0, 300), tokenizer, PromptTemplate(record.template))
    before = build_index(
        rows.outputs, rows.prompts, fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    path = tmp_path / "index"
    write_index(before, path)
    artifacts = ArtifactStore(client, record.name, record.fingerprint)
    artifacts.announce(artifacts.publish(path, 300).version)
    tasc_here.run("tune", record.name)
    assert "100 newer rows" in tasc_here.err
    artifact, index = current(client, record, tmp_path)
    assert (artifact.version, artifact.corpus_rows) == (2, 300)
    assert artifacts.versions() == [1, 2]
    np.testing.assert_array_equal(index.corpus.text, before.corpus.text)
    np.testing.assert_array_equal(index.corpus.order, before.corpus.order)
    assert index.settings != before.settings is None
    artifacts.download(artifacts.get(1), path)
    assert read_index(path).settings is None


def test_task_show_lists_tuned_settings(client, record, tmp_path, tasc_here):
    assert json.loads(tasc_here.run("task", "show", record.name, "--json"))["tuned"] is None
    rows = encode(read_rows(client, record), load_tokenizer(record), PromptTemplate("{input}"))
    chosen = replace(record.draft, num_speculative_tokens=5, sources=("corpus", "prompt"))
    tokenizer = load_tokenizer(record)
    index = build_index(
        rows.outputs, rows.prompts, fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    path, store = tmp_path / "index", ArtifactStore(client, record.name, record.fingerprint)
    for version, settings in ((1, None), (2, chosen)):
        write_index(replace(index, settings=settings), path)
        store.announce(store.publish(path, ROWS).version)
        found = json.loads(tasc_here.run("task", "show", record.name, "--json"))["tuned"]
        in_json = json.loads(json.dumps(settings and asdict(settings)))
        assert found == (settings and {"index_version": version, "settings": in_json})
    lines = tasc_here.run("task", "show", record.name).partition("\n\n")[0].splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert "index version 2" in shown["tuned"]
    assert shown["num_speculative_tokens"].startswith("5 ")
    assert shown["sources"].startswith("corpus, prompt ")
    assert shown["min_prob"] == str(record.draft.min_prob)
    tasc_here.run("task", "set", record.name, "--num-speculative-tokens", 9)
    assert "num_speculative_tokens" in tasc_here.err
    tasc_here.run("index", "use", record.name, 1)
    assert "tuned" not in tasc_here.run("task", "show", record.name)
    client.delete(f"tasc:{{{record.name}}}:index:{record.fingerprint}:chunk:1:0")
    tasc_here.run("task", "show", record.name)
    assert "index version 1" in tasc_here.err


def read_rows(client: redis.Redis, record: TaskRecord) -> list[CorpusRow]:
    return list(CorpusStore(client, record.name).read(0, ROWS))


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["tune", "TASK", "--report", "nowhere/r.html"], 2, "nowhere/r.html"),
        (
            ["tune", "TASK", "--step-cost", "COSTS", "--batch-size", "3"],
            1,
            "step costs for b = 3 rows",
        ),
        (["tune", "TASK", "--step-cost", "COSTS", "--measure-cost"], 2, "--measure-cost"),
    ],
)
def test_refused_tuning_publishes_nothing(client, record, tasc_here, costs, command, code, message):
    named = {"TASK": record.name, "COSTS": costs}
    assert message in tasc_here.run(*(named.get(part, part) for part in command), code=code)
    assert ArtifactStore(client, record.name, record.fingerprint).current() is None
