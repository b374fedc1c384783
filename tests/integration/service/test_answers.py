"""Tests that the official client gets the answers of transformers from the service."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import NotFoundError
from serving import ALPHA, BETA, Ask, Said, complete, said

import tiny
from support import refused
from tasc_store import CorpusStore, connect

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
    ((text, end),) = said(chunks)
    return Said(text, chunks[-1].usage.completion_tokens, end)


def ask_all(client, bag, draft):
    # As many at once as one task has places for, though not all go to one.
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda one: ask(client, one, draft), bag))


def test_the_client_lists_the_tasks_as_models(client):
    assert [m.id for m in client.models.list()] == [ALPHA, BETA]


def test_answers_are_equal_with_drafts_without_and_by_the_model_alone(service, client):
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


def test_metrics_add_up(service, client):
    before = service.metrics()
    answers = ask_all(client, BAG, draft=True)
    after = service.metrics()
    for task in (ALPHA, BETA):
        mine = [a for one, a in zip(BAG, answers, strict=True) if one.task == task]

        def more(name, task=task, **labels):
            return after.sum(name, task=task, **labels) - before.sum(name, task=task, **labels)

        assert more("tasc_generation_tokens_total") == sum(a.tokens for a in mine)
        assert more("tasc_request_success_total") == len(mine)
        assert more("tasc_http_requests_total", code=200) == len(mine)
        accepted = after.sum("tasc_spec_decode_num_accepted_tokens_total", task=task)
        bonus = after.sum("tasc_bonus_tokens_total", task=task)
        forced = after.sum("tasc_forced_tokens_total", task=task)
        assert after.sum("tasc_generation_tokens_total", task=task) == accepted + bonus + forced
        reached = after.by_position("tasc_spec_decode_num_drafts_per_pos_total", task)
        kept = after.by_position("tasc_spec_decode_num_accepted_tokens_per_pos_total", task)
        assert 1 < len(kept) <= len(reached)
        assert all(k <= r for k, r in zip(kept, reached, strict=False))
        assert (reached, kept) == (sorted(reached, reverse=True), sorted(kept, reverse=True))
        assert sum(kept) == accepted
        assert reached[0] == after.sum("tasc_spec_decode_num_drafts_total", task=task)


def test_token_ids_and_stop_strings_are_taken(service, client):
    one = Ask(ALPHA, KNOWN[2])
    whole = service.expected(one).text
    ids = list(service.tasks[ALPHA].prompt(one.value, chat=False))
    stop = whole[len(whole) // 2 :][:2]
    answered = complete(client, ids, max_tokens=24, stop=[stop])
    assert said(answered) == [(whole[: whole.index(stop)], "stop")]


def test_the_client_understands_our_errors(client):
    with refused(NotFoundError, "'gamma'", "alpha, beta"):
        client.completions.create(model="gamma", prompt="hi")


def test_two_tokenizers_share_one_corpus(service):
    alpha, beta = service.status(ALPHA), service.status(BETA)
    assert alpha["fingerprint"] != beta["fingerprint"]
    with connect(service.redis_url) as store:
        assert len(CorpusStore(store, BETA)) == 0
        assert alpha["index_rows"] == beta["index_rows"] == len(CorpusStore(store, ALPHA)) > 0
    assert alpha["index_bytes"] != beta["index_bytes"]
