"""Tests that probabilities of labels equal those of each label alone, or differ as little as said.

Tables of random numbers replace the model in some tests, whose references enumerate all labels.
"""

import json
import random
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guide_walks import path_to, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from tree_layouts import depths_of

from lora_folders import make_adapter
from neural_drafters import exact as exact_norms
from support import failing_where, refused
from tasc_engine import GuideSpec, Request, Target
from tasc_engine.errors import OutOfMemory
from tasc_engine.guided.scoring import LabelScorer, LabelSet
from tasc_engine.layout import Int32
from tasc_engine.step import verify
from tasc_protocol import FieldError, LabelScores, Scoring
from tasc_runtime.llm import Classification
from tasc_serve import LLM
from tasc_text import TaskTokenizer
from tiny import END, SENTENCES, make_folder

Float64 = NDArray[np.float64]
Tokens = tuple[int, ...]
ENDS = (None, "", ", slot fills")
CLOSE = 1e-9
SIZES: dict[str, Any] = {"dtype": "float64", "rows": 3, "max_model_len": 200, "cost_aware": False}
TEXTS = [*SENTENCES[:3], "naïve café, 東京 🙂" * 4]
WORDS = ("alarm", "set", "music", "play", "intent", "time", "friday", "nine", "artist", "🙂")
BEGIN = "intent: play_music, slot fills: {artist: "
LABELS = {
    "in others": ("alarm", "a", "alarm set", "al", "alarm set for nine", "alarm set for nine am"),
    "with a long beginning": tuple(f"{BEGIN}{name}" for name in ("the beatles", "the", "nine", "")),
    "long": tuple(f"{'wake me up at ' * n}{word}" for n in (1, 3, 4) for word in WORDS[:3]),
    "one": ("wake me up at nine am",),
    "one letter": ("e",),
}


def random_labels(rng: random.Random, count: int) -> tuple[str, ...]:
    """Returns labels of up to six words; a few of them begin with others."""
    labels = {"_".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(count)}
    longer = {f"{label}_{rng.choice(WORDS)}" for label in rng.sample(sorted(labels), count // 6)}
    return tuple(sorted(labels | longer))


LABELS["random"] = random_labels(random.Random(0), 16)
EVERY = tuple(dict.fromkeys(label for labels in LABELS.values() for label in labels))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an architecture, whose answers are uncertain; made once."""

    @cache
    def of(architecture: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(architecture), architecture, sharpness=0.5)

    return of


@pytest.fixture(scope="module")
def llm_of(folder_of: Callable[[str], Path]) -> Callable[..., LLM]:
    """Returns the `LLM` of an architecture with some engine settings, made once."""

    @cache
    def of(architecture: str = "qwen2", **engine: Any) -> LLM:
        return LLM(folder_of(architecture), **{**SIZES, **engine})

    return of


@cache
def reference(folder: Path) -> Any:
    """Loads a model whose norms and attention compute in float64."""
    return exact_norms(
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa"
        ).eval()
    )


@cache
@torch.inference_mode()
def logprob_alone(folder: Path, prompt: Tokens, answer: Tokens) -> float:
    logits = reference(folder)(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(answer)), list(answer)].sum())


def true_shares(
    folder: Path, text: str, labels: Sequence[str], end: str | None = None
) -> dict[str, float]:
    """Returns the share of each label; transformers computes each label alone."""
    tokenizer = TaskTokenizer.from_folder(folder)
    prompt = tuple(tokenizer.encode_prompt(text))
    ends = [(id_,) for id_ in tokenizer.eos_ids] if end is None else [()]
    ids = tokenizer.encode_outputs([label + (end or "") for label in labels])
    logs = [
        np.logaddexp.reduce([logprob_alone(folder, prompt, (*own, *after)) for after in ends])
        for own in ids
    ]
    shares = np.exp(logs - np.logaddexp.reduce(logs)).tolist()
    return dict(zip(labels, shares, strict=True))


def assert_exact(
    llm: LLM, folder: Path, labels: Sequence[str], end: str | None, texts: Sequence[str] = TEXTS
) -> None:
    for text, found in zip(texts, llm.classify(texts, labels, end=end, exact=True), strict=True):
        assert (found.error, found.unseen_mass) == (None, 0.0)
        numbers = [*found.probabilities.values()]
        assert numbers == sorted(numbers, reverse=True)
        assert found.label == next(iter(found.probabilities))
        assert found.probability == numbers[0]
        true = true_shares(folder, text, labels, end)
        assert found.probabilities == pytest.approx(true, rel=CLOSE, abs=1e-300)


# The default, half of the labels, all of them, and as many as one forward finds.
WAYS: list[dict[str, Any]] = [
    {"tolerance": 0.001, "max_steps": 1000},
    {"tolerance": 0.5, "max_steps": 1000},
    {"tolerance": 0.0, "max_steps": 1000},
    {"tolerance": 0.0, "max_steps": 1},
]


def assert_bounded(found: Classification, true: dict[str, float]) -> None:
    """Asserts that no probability is further from the true one than ``unseen_mass``."""
    assert found.error is None
    assert found.probabilities.keys() <= true.keys()
    for label, share in true.items():
        assert abs(found.probabilities.get(label, 0.0) - share) <= found.unseen_mass + CLOSE


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt_neox", "phi", "mistral"])
def test_exact_probabilities_equal_those_of_transformers(llm_of, folder_of, architecture) -> None:
    folder = folder_of(architecture)
    for end in ENDS:
        assert_exact(llm_of(architecture), folder, EVERY, end, TEXTS[:2])


@pytest.mark.parametrize("labels", LABELS)
def test_exact_probabilities_are_the_same_for_all_sizes_of_trees(llm_of, folder_of, labels) -> None:
    """Prompts are longer than a prefill chunk, and rows outgrow the window of 16 tokens."""
    tokenizer = TaskTokenizer.from_folder(folder_of("mistral"))
    longest = max(map(len, tokenizer.encode_outputs(LABELS["long"])))
    for most in (0, 1, 3, 5, 63):
        assert (most < longest) == (most != 63)
        llm = llm_of("mistral", max_draft_tokens=most, prefill_chunk=7)
        for end in ENDS:
            assert_exact(llm, folder_of("mistral"), LABELS[labels], end, TEXTS[:2])


def test_label_ends_with_any_of_several_ends_of_sequence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_neox", sharpness=0.5)
    plain = true_shares(folder, TEXTS[0], LABELS["in others"])
    for file in ("config.json", "generation_config.json"):
        wrote = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**wrote, "eos_token_id": [0, 7, 300]}))
    assert TaskTokenizer.from_folder(folder).eos_ids == (0, 7, 300)
    for most in (0, 3, 32):
        llm = LLM(folder, **SIZES, max_draft_tokens=most)
        for labels in LABELS.values():
            assert_exact(llm, folder, labels, None)
    with pytest.raises(AssertionError):
        assert_bounded(llm.classify(TEXTS[0], LABELS["in others"], exact=True)[0], plain)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits, places, tokens: (logits * 1.001, places, tokens),
        lambda logits, places, tokens: (logits, np.maximum(places - 1, 0), tokens),
        lambda logits, places, tokens: (logits, places, np.roll(tokens, 1)),
    ],
)
def test_wrong_numbers_do_not_pass_for_those_of_transformers(
    llm_of, folder_of, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]
) -> None:
    """Positive control of the tests above."""
    folder, honest = folder_of("qwen2"), verify.continuation_logprobs
    monkeypatch.setattr(verify, "continuation_logprobs", lambda *found: honest(*wrong(*found)))
    with pytest.raises(AssertionError, match="approx|abs"):
        assert_exact(llm_of(), folder, LABELS["random"], None, TEXTS[:1])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("most", [3, 32])
def test_no_probability_is_further_from_the_true_one_than_the_unseen_mass(
    llm_of, folder_of, end: str | None, most: int
) -> None:
    labels = (*random_labels(random.Random(most), 24), *LABELS["in others"][1:])
    llm, folder = llm_of("gpt_neox", max_draft_tokens=most), folder_of("gpt_neox")
    true = [true_shares(folder, text, labels, end) for text in TEXTS]
    unseen: list[list[float]] = []
    for how in WAYS:
        found = llm.classify(TEXTS, labels, end=end, **how)
        for one, shares in zip(found, true, strict=True):
            assert_bounded(one, shares)
            assert one.unseen_mass <= how["tolerance"] or how["max_steps"] == 1
        unseen.append([one.unseen_mass for one in found])
    default, half, everything, one_forward = map(np.array, unseen)
    assert default.max() > 0  # some labels were left out
    assert half.max() > 0.001
    assert everything.max() == 0
    assert (one_forward >= default).all()
    assert one_forward.max() > 0.001


def test_drafts_only_say_where_scoring_begins(
    folder_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus of drafts has right labels, other labels, and texts that are no label."""
    labels, folder, drafted = random_labels(random.Random(1), 40), folder_of("gpt_neox"), []

    def grow(scorer: LabelScorer, tokens: Int32, *rest: Any, honest: Any = LabelScorer.grow) -> Any:
        drafted.append(len(tokens))
        return honest(scorer, tokens, *rest)

    monkeypatch.setattr(LabelScorer, "grow", grow)
    true = [true_shares(folder, text, labels) for text in TEXTS]
    answers = [max(shares, key=lambda label: shares[label]) for shares in true]
    corpus = [*zip(TEXTS, answers, strict=True), *zip(TEXTS, labels, strict=False), ("a", "bc")]
    llm = LLM(folder, corpus=corpus, cache_dir=tmp_path, **SIZES, max_draft_tokens=6)
    for how in WAYS:
        for one, shares in zip(llm.classify(TEXTS, labels, **how), true, strict=True):
            assert_bounded(one, shares)
    assert sum(n > 0 for n in drafted) >= len(TEXTS)
    assert_exact(llm, folder, labels, None)


def test_adapters_of_requests_give_the_numbers_of_merged_models(folder_of, tmp_path: Path) -> None:
    base, labels = folder_of("llama"), LABELS["random"]
    folders = {name: make_adapter(base, tmp_path / name, n) for n, name in enumerate("ab")}
    alone: dict[str | None, Sequence[Classification]] = {
        name: LLM(base, adapter=folders.get(name or ""), **SIZES).classify(
            TEXTS, labels, exact=True
        )
        for name in (None, "a", "b")
    }
    assert len({round(found[0].probability, 3) for found in alone.values()}) == 3
    llm = LLM(base, adapters=folders, **SIZES)
    for one, own in zip(
        llm.classify(TEXTS, labels, exact=True, adapter="b"), alone["b"], strict=True
    ):
        assert one.probabilities == pytest.approx(own.probabilities, rel=0, abs=CLOSE)
    spec, scoring = GuideSpec("labels", labels), Scoring(exact=True)
    most, prompts = llm.engine.scoring_tokens(spec), map(llm.tokenizer.encode_prompt, TEXTS)
    mixed = [
        Request(f"{i} {name}", tuple(ids), most, guide=spec, scoring=scoring, adapter=name)
        for i, ids in enumerate(prompts)
        for name in alone
    ]
    results = {result.id: result.scores for result in llm.engine.generate(mixed)}
    for name, expected in alone.items():
        for i, own in enumerate(expected):
            scores = results[f"{i} {name}"]
            assert scores
            found = dict(zip(scores.labels, scores.probabilities, strict=True))
            assert found == pytest.approx(own.probabilities, rel=0, abs=CLOSE)


def test_nan_logits_fail_only_their_input(llm_of, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    expected = llm.classify(TEXTS, LABELS["random"], exact=True)
    steps = list[int]()

    def start(target: Target, batch: Any, honest: Any = Target.start_logits) -> Any:
        wait = honest(target, batch)

        def poisoned() -> torch.Tensor:
            logits = wait().clone()
            steps.append(1)
            if len(steps) == 1:
                logits[0] = torch.nan
            return logits

        return poisoned

    monkeypatch.setattr(Target, "start_logits", start)
    found = llm.classify(TEXTS, LABELS["random"], exact=True)
    (failed,) = (one for one in found if one.error)
    assert "NaN" in (failed.error or "")
    assert (failed.label, failed.probabilities, failed.unseen_mass) == (None, {}, 1.0)
    for one, other in zip(found, expected, strict=True):
        if one is not failed:
            assert one.probabilities == pytest.approx(other.probabilities, rel=0, abs=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_trees_become_smaller_until_they_fit_the_memory(
    llm_of, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    llm, labels = llm_of(), LABELS["random"]
    expected = llm.classify(TEXTS, labels, exact=True)
    failed = failing_where(
        monkeypatch, Target, "start_logits", OutOfMemory("too many nodes"),
        lambda _, target, batch: len(batch.drafts.tokens) > 3,
    )  # fmt: skip
    found = llm.classify(TEXTS, labels, exact=exact)
    assert 1 < sum(failed) < len(failed) / 2
    for one, other in zip(found, expected, strict=True):
        if exact:
            assert one.probabilities == pytest.approx(other.probabilities, rel=0, abs=1e-12)
        assert_bounded(one, {**other.probabilities})


@pytest.mark.parametrize("most", [0, 5])
def test_prompt_that_just_leaves_room_for_its_labels_is_scored(folder_of, most: int) -> None:
    folder, labels = folder_of("qwen2"), LABELS["long"]
    llm = LLM(folder, **{**SIZES, "max_model_len": 64}, max_draft_tokens=most)
    prompt = [5] * (64 - llm.engine.scoring_tokens(GuideSpec("labels", labels)))
    (found,) = llm.classify([prompt], labels, exact=True)
    (roomy,) = LLM(folder, **SIZES).classify([prompt], labels, exact=True)
    assert found.probabilities == pytest.approx(roomy.probabilities, rel=0, abs=CLOSE)
    with refused(FieldError, f"{len(prompt) + 1} tokens", "64"):
        llm.classify([[5, *prompt]], labels)
    with refused(FieldError, "64"):
        llm.classify([[5] * 64], labels)


MANY = [str(number) for number in range(20_001)]


@pytest.mark.parametrize(
    ("given", "field", "named"),
    [
        ({"labels": None}, "labels", ["labels"]),
        ({"labels": []}, "labels", ["empty"]),
        ({"labels": "alarm"}, "labels", ["'alarm'"]),
        ({"labels": ["alarm", 7]}, "labels", ["7"]),
        ({"labels": ["set", "alarm", "play", "alarm"]}, "labels", ["'alarm'", "1", "3"]),
        ({"labels": ["alarm", "alarm"], "end": ""}, "labels", ["'alarm'"]),
        *(({"labels": ["alarm", ""], "end": end}, "labels", ["''"]) for end in ENDS),
        ({"labels": MANY}, "labels", ["20001", "20000"]),
        ({"labels": ["x" * 2_000_001]}, "labels", ["2000001"]),
        *(({"labels": ["alarm", f"a{END}"], "end": end}, "labels", [END]) for end in ENDS),
        ({"labels": ["alarm"], "end": END}, "labels", [END]),
        ({"labels": ["alarm", "a\ud800"]}, "labels", [r"\ud800"]),
        ({"end": "\udfff"}, "end", [r"\udfff"]),
        ({"end": 3}, "end", ["3"]),
        ({"inputs": "a\ud800"}, "inputs", ["1"]),
        *(({"tolerance": value}, "tolerance", [str(value)]) for value in (-0.1, 1.0, np.nan, "x")),
        *(({"max_steps": value}, "max_steps", [str(value)]) for value in (0, 10_001, 1.5)),
        ({"adapter": "unknown"}, "adapter", ["unknown"]),
    ],
)  # fmt: skip
def test_wrong_labels_and_options_are_refused_by_name(llm_of, given, field, named) -> None:
    asked = {"inputs": TEXTS[0], "labels": ["alarm", "set"], **given}
    with refused(FieldError, *named, field=field):
        llm_of().classify(**asked)


def test_labels_of_the_task_are_scored_if_none_are_given(folder_of) -> None:
    folder, labels = folder_of("qwen2"), LABELS["in others"]
    (found,) = LLM(folder, choices=labels, stop="alarm", **SIZES).classify(TEXTS[0], exact=True)
    assert found.probabilities == pytest.approx(true_shares(folder, TEXTS[0], labels), abs=CLOSE)
    for own in ({"regex": "a+"}, {"schema": {"type": "object"}}):
        with refused(FieldError, "labels", field="labels"):
            LLM(folder, **own, **SIZES).classify(TEXTS[0])


# Without a model: tokens are 0 to 7, and those from 6 on end answers.

VOCAB, EOS = 8, (6, 7)
Table = Callable[[Tokens], Float64]
token_lists = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple), min_size=1, max_size=14,
    unique=True,
)  # fmt: skip
no_draft = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)


def random_table(seed: int, zeros: float = 0.0) -> Table:
    """Log-probabilities of the next token after each path; a share of them are impossible."""

    @cache
    def after(path: Tokens) -> Float64:
        make = np.random.default_rng([seed, len(path), *path])
        weights = make.exponential(size=VOCAB) ** 4 * (make.random(VOCAB) >= zeros)
        weights[0] += 1e-9
        with np.errstate(divide="ignore"):
            return np.log(weights / weights.sum())

    return after


def flat_table(value: float) -> Table:
    return lambda path: np.full(VOCAB, value)


def logp_of(table: Table, tokens: Sequence[int], known: int = 0) -> float:
    """The log-probability of tokens behind the first ones, which are known."""
    return float(sum(table(tuple(tokens[:i]))[tokens[i]] for i in range(known, len(tokens))))


def set_of(token_lists: Sequence[Tokens], ends: Sequence[int]) -> tuple[LabelSet, Any]:
    """Returns labels, each with any of some ends, or without an end; and their sequences."""
    sequences = [[(*own, end) for end in ends] or [own] for own in token_lists]
    return LabelSet.of([str(own) for own in token_lists], sequences), sequences


def scored(
    labels: LabelSet,
    how: Scoring,
    max_nodes: int,
    table: Table,
    draft: Any = no_draft,
    dropped: Collection[int] = (),
) -> LabelScorer:
    """Scores labels by a table instead of a model; checks each tree.

    Args:
        dropped: Forwards whose tree does not fit the memory.
    """
    scorer = LabelScorer(labels, how, max_nodes)
    for n in range(len(labels.label) + len(dropped)):  # other forwards look at a further node
        tokens, parents, depths = scorer.grow(*(no_draft if scorer.steps else draft))
        assert len(tokens) <= max_nodes
        assert len(scorer.path) + len(tokens) <= labels.slots(max_nodes)
        assert ((parents >= -1) & (parents < np.arange(len(parents)))).all()
        assert depths.tolist() == depths_of(parents.tolist())
        nodes = [path_to(tokens.tolist(), parents.tolist(), x) for x in range(len(tokens))]
        paths = [(*scorer.path.tolist(), *node) for node in [[], *nodes]]
        assert len({*paths}) == len(paths)
        if n % 2:  # the forward failed behind its logits, and is run again
            scorer.wanted(len(tokens))
        places, wanted = scorer.wanted(0 if n in dropped else len(tokens))
        scorer.read(np.array([table(paths[p])[t] for p, t in zip(places, wanted, strict=True)]))
        if scorer.done or scorer.error:
            break
    assert scorer.done or scorer.error
    return scorer


def shares_of(scores: LabelScores, labels: LabelSet) -> Float64:
    found = dict(zip(scores.labels, scores.probabilities, strict=True))
    return np.array([found.get(text, 0.0) for text in labels.texts])


@settings(deadline=None, max_examples=300)
@given(
    token_lists, st.sampled_from([(), EOS[:1], EOS]), trees, st.integers(0, 6),
    st.integers(0, 2**32), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 0.4, 3.0]),
    st.sampled_from([0.0, 0.01, 0.3]), st.integers(1, 8), st.sets(st.integers(0, 4)),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_scores_by_any_table_equal_those_of_all_labels_enumerated(
    token_lists, ends, tree, max_nodes, seed, zeros, temperature, tolerance, max_steps, dropped,
    mass, biased,
) -> None:  # fmt: skip
    labels, sequences = set_of(token_lists, ends)
    table, stem = random_table(seed, zeros), labels.path(labels.stem).tolist()
    assert all([*each[: len(stem)]] == stem for own in sequences for each in own)
    known = 0 if mass else len(stem)
    logs = [[logp_of(table, each, known) for each in own] for own in sequences]
    logs = np.logaddexp.reduce(logs, 1)
    biases = np.random.default_rng(seed).normal(0, 3, len(logs)) * biased
    given = {"mass": mass, "biases": tuple(biases.tolist()) * biased}
    tokens, parents = (np.array(part, np.int32) for part in tree)
    draft = tokens, parents, -np.random.default_rng(seed).random(len(tokens)).astype(np.float32)
    exact = scored(labels, Scoring(exact=True, **given), max_nodes, table, draft, dropped)
    how = Scoring(tolerance=tolerance, max_steps=max_steps, temperature=temperature, **given)
    some = scored(labels, how, max_nodes, table, draft, dropped)
    if logs.max() == -np.inf:
        assert exact.error
        assert some.error
        return
    assert not exact.error + some.error
    found = exact.scores()
    own = dict(zip(found.labels, found.logprobs, strict=True))
    expected = dict(zip(labels.texts, logs.tolist(), strict=True))
    assert own == pytest.approx(expected, rel=0, abs=CLOSE)
    assert found.unseen == 0
    inner = [
        any(other == own[: len(other)] for other in token_lists if other != own and not ends)
        for own in token_lists
    ]
    whole = np.exp(np.logaddexp.reduce(logs[~np.array(inner)]))
    assert found.mass == (pytest.approx(whole, abs=CLOSE) if mass else None)
    true = np.exp(logs + biases)
    assert shares_of(found, labels) == pytest.approx(true / true.sum(), abs=CLOSE)
    found, true = some.scores(), np.exp(logs / temperature + biases)
    true /= true.sum()
    assert np.abs(shares_of(found, labels) - true).max() <= found.unseen + CLOSE
    assert found.unseen <= tolerance or some.steps >= max_steps
    left_out = [
        share for text, share in zip(labels.texts, true, strict=True) if text not in found.labels
    ]
    assert found.unseen > 0 or not any(left_out)


def often_one(path: Tokens) -> Float64:
    """Token 1 has most of the probability, and after the first token nearly all."""
    most = 0.99 if path else 0.7
    return np.log(np.where(np.arange(VOCAB) == 1, most, (1 - most) / (VOCAB - 1)))


@pytest.mark.parametrize(
    ("token_lists", "table", "temperature", "counted"),
    [
        ([(1,) * n for n in range(1, 5)], often_one, 1.0, "most_nested"),
        ([(1, *own) for own in product((1, 2, 3), repeat=3)], flat_table(-2.1), 4.0, "ends_below"),
    ],
)
def test_unseen_mass_counts_the_labels_below_a_prefix(
    token_lists, table: Table, temperature: float, counted: str
) -> None:
    """Labels in other labels, and those that a temperature makes alike, exceed their prefix."""
    labels, sequences = set_of([*token_lists, (2,)], ())
    true = np.exp([logp_of(table, own[0]) / temperature for own in sequences])
    true /= true.sum()

    def furthest() -> float:
        """The greatest error, minus its limit."""
        how = Scoring(max_steps=1, temperature=temperature)
        found = scored(labels, how, 0, table).scores()
        assert len(found.labels) < 3
        return float(np.abs(shares_of(found, labels) - true).max() - found.unseen)

    assert furthest() <= 0
    vars(labels)[counted] = np.ones_like(labels.label)
    assert furthest() > 0  # positive control


def test_scoring_ends_with_an_error_if_no_label_has_a_probability() -> None:
    labels, _ = set_of([(1, 2), (2, 1)], EOS)
    for value, fails in ((-3.0, False), (np.nan, True), (-np.inf, True)):
        for exact in (True, False):
            found = scored(labels, Scoring(exact=exact), 4, flat_table(value))
            assert bool(found.error) == fails


def test_equal_tokens_of_two_labels_are_refused_by_their_texts() -> None:
    with refused(ValueError, "'one'", "'other'"):
        LabelSet.of(["one", "two", "other"], [[(1, 2)], [(2,)], [(1, 2)]])
