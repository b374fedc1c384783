"""Tests that the official client gets the answers of transformers from the service."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ALPHA, BETA, Ask, Said, choices_of, complete

import tiny

pytestmark = [pytest.mark.ray, pytest.mark.redis]

KNOWN = tiny.SENTENCES  # their answers are in the corpus
NEW = tuple(f"{s}, or {t}" for s, t in itertools.pairwise(KNOWN))
BAG = [
    Ask(task, value, max_tokens, chat, stream)
    for value, max_tokens in [*((v, 24) for v in KNOWN), *zip(NEW, (1, 7, 30, 50, 60), strict=True)]
    for task in (ALPHA, BETA)
    for chat, stream in itertools.product((False, True), repeat=2)
]


def ask(client, one, draft=True):
    """Sends a request with the official client."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if one.stream else {}
    more |= {"max_tokens": one.max_tokens, "extra": {"draft": draft}}
    answered = complete(client, one.value, task=one.task, chat=one.chat, **more)
    chunks = list(answered) if one.stream else [answered]
    ((text, end),) = choices_of(chunks)
    return Said(text, chunks[-1].usage.completion_tokens, end)


def ask_all(client, bag, draft):
    # As many at once as one task has places for, though not all go to one.
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda one: ask(client, one, draft), bag))


def test_answers_with_and_without_drafts_equal_transformers_answers(service, client):
    before = service.metrics()
    drafted = ask_all(client, BAG, draft=True)
    between = service.metrics()
    undrafted = ask_all(client, BAG, draft=False)
    after = service.metrics()
    name = "tasc_spec_decode_num_{}_tokens_total".format
    for task in (ALPHA, BETA):
        proposed, accepted = (
            between.sum(name(kind), task=task) - before.sum(name(kind), task=task)
            for kind in ("draft", "accepted")
        )
        assert 0 < accepted < proposed, "drafts must have been accepted, and others rejected"
        from_corpus = between.sum(name("accepted"), task=task, source="corpus")
        assert from_corpus > before.sum(name("accepted"), task=task, source="corpus")
        assert after.sum(name("draft"), task=task) == between.sum(name("draft"), task=task)
    want = [service.expected(one) for one in BAG]
    assert {w.reason for w in want} == {"length", "stop"}
    assert drafted == want
    assert undrafted == want
