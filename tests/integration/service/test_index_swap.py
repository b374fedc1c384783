"""A new draft index comes in while requests are answered, and changes speed only."""

import pytest
from serving import ALPHA, BETA, Ask, asking

import tiny
from support import eventually
from tasc_jobs.index.build import build_and_publish
from tasc_store import CorpusRow, CorpusStore, connect

pytestmark = [pytest.mark.ray, pytest.mark.redis]
BAG = [Ask(t, v, 40, draft=d) for v in tiny.SENTENCES for t in (ALPHA, BETA) for d in (True, False)]


def served(service, task):
    status = service.status(task)
    return status["index_version"], status["index_rows"]


def info_of(service, task):
    """Returns the number of versions in the metrics, and of series of the served version."""
    metrics, version = service.metrics(), served(service, task)[0]
    name = "tasc_draft_index_info"
    return metrics.sum(name, task=task), metrics.sum(name, task=task, version=version)


def test_index_swap_under_load_changes_no_answer(service):
    want = {one: service.expected(one) for one in BAG}  # before threads share the models
    assert len(set(want.values())) > len(tiny.SENTENCES)
    old = {task: service.status(task)["index_version"] for task in (ALPHA, BETA)}
    with asking(service, BAG, 4) as answers:
        with connect(service.redis_url) as client:
            more = [CorpusRow(f"{one}", one.value, want[one].text) for one in BAG]
            CorpusStore(client, ALPHA).append(more)
            rows = len(CorpusStore(client, ALPHA))
        for task in (ALPHA, BETA):
            new = build_and_publish(service.redis_url, service.tasks[task].record)[0].version
            assert new > old[task]
            # Two replicas serve BETA and swap at different times: a status is of either.
            eventually(lambda t=task, v=new: served(service, t) == (v, rows))
        eventually(lambda: len(answers) > 4 * len(BAG))
    assert [(one, answer) for one, answer in answers if answer != want[one]] == []
    for task in (ALPHA, BETA):
        assert service.metrics().sum("tasc_index_swaps_total", task=task) >= 1
        eventually(lambda t=task: info_of(service, t) == (1, 1))
