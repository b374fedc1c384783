"""Each source drafts what it alone can know, and settings are validated."""

import dataclasses
import json
from random import Random

import numpy as np
import pytest
from draft_cases import (
    EOS,
    FINGERPRINT,
    STARTS,
    VOCAB,
    begun,
    full_index,
    ids,
    make_index,
    make_proposer,
    propose,
)
from draft_checks import Tree, tree

from tasc_draft import NGRAM_SOURCES, BigramTable, DraftIndex, DraftSettings, NgramProposer

EMPTY = DraftIndex.empty(FINGERPRINT, VOCAB)


def drafting(*sources: str) -> DraftSettings:
    return DraftSettings(
        sources=sources, min_prob=0.0, num_speculative_tokens=16, recent_tokens=48, learning_rate=0
    )


def chain(index: DraftIndex, *sources: str) -> NgramProposer:
    return make_proposer(index, drafting(*sources), branching=False)


def said(nodes: Tree) -> list[int]:
    """The tokens of a chain."""
    return list(max(nodes, key=len, default=()))


def named(nodes: Tree) -> set[str]:
    return {node.source for node in nodes.values()}


def keyed_index() -> DraftIndex:
    """The prompt's first token tells the output's second one; the corpus alone cannot."""
    rng = Random(1)
    rows = [(key, rng.randrange(6, 11)) for key in range(1, 6) for _ in range(12)]
    return make_index([[11, 5 + key] for key, _ in rows], [[key, noise] for key, noise in rows])


def test_neighbours_say_what_was_said_to_prompts_like_this_one() -> None:
    index = keyed_index()
    for key in range(1, 6):
        for sources in (("neighbours",), ("corpus", "neighbours")):
            proposer = chain(index, *sources)
            proposer.start(0, ids([key, 11]))
            nodes = propose(proposer, 0)
            assert said(nodes) == [11, 5 + key, EOS]
            assert named(nodes) <= {*sources}
    alone = chain(index, "corpus")
    alone.start(0, ids([key, 11]))
    assert said(propose(alone, 0)) == [11, 6, EOS]


def test_the_likest_neighbour_counts_most() -> None:
    rng = Random(4)
    noise = [rng.choices(range(1, 8), k=6) for _ in range(40)]
    like, unlike = [8, 9, 10, 11], [8, 11, 11, 11]
    for prompt, other in ((like, unlike), (unlike, like)):
        index = make_index([[6], [7], *([1] for _ in noise)], [prompt, other, *noise])
        proposer = make_proposer(index, drafting("neighbours"))
        proposer.start(0, ids(prompt))
        nodes = propose(proposer, 0)
        assert nodes[6,].logp > nodes[7,].logp + 0.1


def test_aligned_words_say_the_tag_of_each_word() -> None:
    tags, rng = {(2,): 8, (2, 1): 10, (4,): 6}, Random(2)
    sentences = [rng.choices([*tags], k=rng.randrange(1, 5)) for _ in range(80)]
    prompts = [[token for word in words for token in word] for words in sentences]
    outputs = [[tags[word] for word in words] for words in sentences]
    proposer = chain(make_index(outputs, prompts, STARTS), "aligned")
    proposer.start(0, ids([4, 2, 2, 1, 2, 1, 4, 2, 4]))  # longer than any
    nodes = propose(proposer, 0)
    assert said(nodes) == [6, 8, 10, 10, 6, 8, 6, EOS]
    assert named(nodes) == {"aligned"}
    proposer.observe(0, ids([6, 8, 10]))
    assert said(propose(proposer, 0)) == [10, 6, 8, 6, EOS]


def test_recent_answers_are_said_again() -> None:
    proposer = chain(EMPTY, "corpus", "recent")
    begun(proposer, 0, [5], [3, 1, 4, EOS])
    begun(proposer, 1, [6], [])
    assert said(propose(proposer, 1)) == []
    proposer.finish(0)
    nodes = propose(proposer, 1)
    assert said(nodes) == [3, 1, 4, EOS]
    assert named(nodes) == {"recent"}


def test_the_targets_own_bigrams_go_on_where_all_else_is_silent() -> None:
    following = (np.arange(VOCAB, dtype=np.int32) + 1) % VOCAB
    tokens = np.stack([following, (following + 1) % VOCAB], 1)
    logp = np.log(np.full((VOCAB, 2), [0.9, 0.1])).astype(np.float32)
    table = BigramTable("a target", FINGERPRINT, VOCAB, tokens, logp)
    proposer = chain(dataclasses.replace(EMPTY, bigrams=table), "corpus", "bigrams")
    begun(proposer, 0, [5], [])
    assert said(propose(proposer, 0)) == []
    proposer.observe(0, ids([7]))
    nodes = propose(proposer, 0)
    assert said(nodes) == [8, 9, 10, 11, EOS]
    assert named(nodes) == {"bigrams"}


def test_the_prompt_is_copied_up_to_its_end() -> None:
    proposer = chain(EMPTY, "prompt")
    begun(proposer, 0, [1, 2, 3, 4, 5], [2, 3])
    nodes = propose(proposer, 0)
    assert said(nodes)[:2] == [4, 5]  # behind it lies the mark, which nobody says
    assert named(nodes) == {"prompt"}


def test_the_answer_itself_is_copied() -> None:
    proposer = chain(EMPTY, "prompt")
    begun(proposer, 0, [], [1, 2, 3, 1, 2])
    assert said(propose(proposer, 0, 3)) == [3, 1, 2]


def test_a_prompts_token_is_found_with_or_without_the_blank_in_front() -> None:
    canonical = np.arange(VOCAB + 1, dtype=np.int32)
    canonical[9] = 3
    for index, copied in ((EMPTY, []), (dataclasses.replace(EMPTY, canonical=canonical), [4, 5])):
        proposer = chain(index, "prompt")
        begun(proposer, 0, [1, 9, 4, 5], [3])
        assert said(propose(proposer, 0))[:2] == copied
        begun(proposer, 1, [1, 9, 4, 5], [1])
        assert said(propose(proposer, 1))[:3] == [9, 4, 5]


def test_the_corpus_says_what_most_outputs_say() -> None:
    proposer = make_proposer(make_index([[1, 2]] * 3 + [[1, 3]]), drafting("corpus"))
    proposer.start(0, ids([5]))
    nodes = propose(proposer, 0)
    assert nodes[1, 2].logp > nodes[1, 3].logp
    assert nodes[1,].logp > nodes[1, 2].logp
    assert named(nodes) == {"corpus"}


def test_rows_draft_from_their_own_prompts_and_neighbours() -> None:
    proposer = chain(keyed_index(), "neighbours")
    for row, key in enumerate((1, 4, 2)):
        proposer.start(row, ids([key, 11]))
    drafts = proposer.propose(ids([2, 0, 1]), ids([2] * 3))
    assert [said(tree(drafts, place)) for place in range(3)] == [[11, 7], [11, 6], [11, 9]]


def test_every_source_speaks_in_a_full_index() -> None:
    index = full_index()
    assert index.inputs
    assert index.aligned
    assert index.bigrams


LIMITS = {
    "num_speculative_tokens": (0, 256),
    "min_prob": (0.0, 1.0),
    "n_max": (2, 16),
    "p_min": (1, 2**31 - 1),
    "corpus_weight": (0.0, 1.0),
    "prefix": (1, 8),
    "neighbours": (0, 256),
    "neighbour_tokens": (0, 1 << 20),
    "recent_tokens": (0, 1 << 20),
    "learning_rate": (0.0, 1.0),
}


def test_every_number_has_limits() -> None:
    numbers = {f.name for f in dataclasses.fields(DraftSettings) if f.type in (int, float)}
    assert numbers == set(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_both_limits_are_allowed(name: str) -> None:
    for limit in LIMITS[name]:
        assert getattr(DraftSettings(**{name: limit}), name) == limit


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_outside_is_refused_with_its_limits(name: str) -> None:
    least, most = LIMITS[name]
    step = 0.01 if isinstance(least, float) else 1
    for value in (least - step, most + step, float("nan")):
        with pytest.raises(ValueError, match=rf"{name} is {value}.*{least} and {most}"):
            DraftSettings(**{name: value})


def test_an_unknown_mixture_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'best'.*'mixed', 'tasc', 'trie'"):
        DraftSettings(mixture="best")


def test_an_unknown_source_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"\['oracle'\] are unknown.*'corpus'.*'aligned'"):
        DraftSettings(sources=("corpus", "oracle"))


def test_settings_survive_json_and_can_be_compared() -> None:
    settings = DraftSettings(sources=("prompt", "corpus"), min_prob=0.5)
    again = DraftSettings(**json.loads(json.dumps(dataclasses.asdict(settings))))
    assert again == settings
    assert hash(again) == hash(settings)
    assert DraftSettings().sources == NGRAM_SOURCES


def test_the_published_settings_are_those_of_the_papers() -> None:
    tasc, trie = DraftSettings.published("tasc"), DraftSettings.published("trie")
    assert (tasc.n_max, tasc.p_min, tasc.corpus_weight, tasc.min_prob) == (6, 5, 0.75, 0.0)
    assert (trie.n_max, trie.prefix, trie.min_prob) == (13, 3, 0.0)
    assert (tasc.mixture, trie.mixture) == ("tasc", "trie")
    with pytest.raises(ValueError, match="'mixed' was not published"):
        DraftSettings.published("mixed")
