"""Metrics of a replica: steps, drafts, requests, draft index, lossless checks, collected answers.

Names keep vLLM's suffixes, so that vLLM's dashboards need only another prefix. The denominators
``tasc_row_steps_total`` and ``tasc_spec_decode_num_drafts_per_pos_total`` are added.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from tasc_draft.drafts import SOURCES
from tasc_engine.stats import Counts, StepRecord
from tasc_protocol import FinishReason, GenerationResult
from tasc_store import Artifact

NotCollected: TypeAlias = Literal["full", "trimmed"]
Mismatch: TypeAlias = Literal["near_tie", "real"]
NotChecked: TypeAlias = Literal["full", "old", "failed"]

# vLLM's bounds, and finer bounds below them, since a small model answers in milliseconds.
E2E_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
)
_QUEUE_S = (0.0005, 0.001, 0.002, *E2E_S)
_FIRST_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0),
)
_INTER_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_FORWARDS = (1, 2, 3, 4, 5, 6, 8, 10, 16, 32, 64, 128, 1024)
_MAX_LABELS, _MAX_LABEL_CHARS = 50, 100  # of the series of one replica
_OTHER, _FOREIGN = "other", "from_request"  # further labels of the task, and labels of requests
_MAX_PENDING = 64  # maximum number of steps that are not counted yet
_DRAFT_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1)

# Series names without tasc_: counters summed over step records, and histograms of step times.
_STEP_COUNTERS: Final = {
    "drafting_paused_steps": "Steps without drafts because earlier drafts did not pay off.",
    "draft_failures": "Proposer calls that failed, and invalid drafts.",
    "row_steps": "Forward passes of rows that could emit: the denominator of block efficiency.",
    "prompt_tokens": "Prompt tokens computed by forward passes.",
    "prefix_cache_hits": "Prompt tokens copied from the prefix cache.",
    "bonus_tokens": "Emitted tokens that the target chose itself.",
    "forced_tokens": "Emitted tokens without a forward pass, because a guide allowed no other.",
    "spec_decode_num_drafts": "Row-steps with a non-empty draft.",
}
_STEP_SECONDS: Final = {
    "draft_seconds": ("Time to propose drafts, per step.", _DRAFT_S),
    "guide_seconds": ("Time to compute the tokens that guides allow, per step.", _DRAFT_S),
    "verify_seconds": (
        "Time of a forward pass of the target until its tokens are read.",
        _INTER_TOKEN_S,
    ),
}
# Record fields whose names differ from the names of their series.
_FIELDS: Final = {
    "drafting_paused_steps": "paused",
    "prefix_cache_hits": "shared_tokens",
    "spec_decode_num_drafts": "drafts",
}


class ManyHistogram(Histogram):
    """A histogram that observes many values at about the cost of one."""

    def observe_all(self, values: Sequence[float], times: Sequence[int]) -> None:
        """Observes ``values[i]`` as often as ``times[i]`` says, for each i."""
        self._sum.inc(float(np.dot(values, times)))
        buckets = np.bincount(np.searchsorted(self._upper_bounds, values), times)
        for bucket, count in zip(self._buckets, buckets.tolist(), strict=False):
            if count:
                bucket.inc(count)


_Item = TypeVar("_Item")
_Family = TypeVar("_Family", Counter, Gauge, ManyHistogram)


class Series:
    """Makes series in one registry, with common labels and names that begin with tasc_.

    Each family is made once; after `relabel`, the same families get other series.

    Args:
        by: Further labels of all families; their values come first in calls.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], *by: str) -> None:
        self._registry, self._labels, self._by = registry, labels, by
        self._families: dict[str, Any] = {}

    def relabel(self, labels: dict[str, str]) -> None:
        """Makes series with these labels from now on, and drops gauges with the old labels."""
        self.clear()
        self._labels = labels

    def clear(self, *names: str) -> None:
        """Drops the samples of these families, or of all gauges if no names are given.

        Functions that return counters of such a family must be made again.
        """
        for name, family in self._families.items():
            if name in names or (not names and isinstance(family, Gauge)):
                family.clear()

    def counters(self, name: str, text: str, *by: str) -> Callable[..., Counter]:
        """Returns a function from values of further labels to a counter."""
        return self._labelled(Counter, name, text, *by)

    def counter(self, name: str, text: str) -> Counter:
        return self.counters(name, text)()

    def gauges(self, name: str, text: str, *by: str) -> Callable[..., Gauge]:
        """Returns a function from values of further labels to a gauge with a sample."""
        return self._labelled(Gauge, name, text, *by)

    def gauge(self, name: str, text: str) -> Gauge:
        return self.gauges(name, text)()

    def histograms(
        self, name: str, text: str, buckets: tuple[float, ...], *by: str
    ) -> Callable[..., ManyHistogram]:
        return self._labelled(ManyHistogram, name, text, *by, buckets=buckets)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> ManyHistogram:
        return self.histograms(name, text, buckets)()

    def _labelled(
        self, kind: type[_Family], name: str, text: str, *by: str, **options: Any
    ) -> Callable[..., _Family]:
        if name not in self._families:
            labels = (*self._labels, *self._by, *by)
            self._families[name] = kind(
                f"tasc_{name}", text, labels, registry=self._registry, **options
            )
        family: _Family = self._families[name]
        own = tuple(self._labels.values())

        def child(*values: object) -> _Family:
            return family.labels(*own, *map(str, values))

        # Children of gauges are not cached, since clearing a gauge drops its children.
        return child if kind is Gauge else cache(child)


class _TokensBySource:
    """Counters of draft tokens by source, in total and by position; children are resolved once."""

    def __init__(self, total: Callable[..., Counter], by_position: Callable[..., Counter]) -> None:
        self._total = [total(source) for source in SOURCES]
        self._by_position = by_position
        self._children: list[list[Counter]] = [[] for _ in SOURCES]

    def add(self, tokens: Counts, by_position: Counts) -> None:
        """Counts ``tokens`` in total and ``by_position``; both are ``[source, position]``."""
        self._resolve(by_position.shape[1])
        sums = tokens.sum(1).tolist()
        rows = zip(self._total, self._children, sums, by_position.tolist(), strict=True)
        for total, children, count, row in rows:
            if count:
                total.inc(count)
                for child, n in zip(children, row, strict=False):
                    if n:
                        child.inc(n)

    def _resolve(self, positions: int) -> None:
        for source, children in zip(SOURCES, self._children, strict=True):
            for position in range(len(children), positions):
                children.append(self._by_position(source, position))


class ReplicaMetrics:
    """The metrics of one replica: one task, one target, one proposer.

    Counters are exported from the start, at 0. Unknown values of the index have no sample.

    Args:
        registry: Registry of the series; one for each process.
        task: The task's name.
        model_name: The target's name.
        proposer: The name of the proposer that makes the drafts.
        record_version: Returns the version of the task's record; called at each scrape.
        load: Returns the number of requests that hold a row, the number of queued requests, and the
            used share of the KV cache; called at each scrape.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        task: str,
        model_name: str,
        proposer: str,
        record_version: Callable[[], int] = lambda: 0,
        load: Callable[[], tuple[int, int, float]] = lambda: (0, 0, 0.0),
    ) -> None:
        own = {"task": task, "model_name": model_name}
        self._labels = {**own, "proposer": proposer}
        self._series = Series(registry, self._labels)
        self._version: int | None = None
        self._started = False
        self._load = load
        self._pending: deque[StepRecord] = deque()
        self._gaps: deque[tuple[float, int]] = deque()
        self._counting = threading.Lock()
        # Scrapes collect in order of registration. This collector is the first, so that pending
        # steps are counted before their series are read.
        registry.register(self)
        self._make_drafted_series(self._series)
        self._make_own_series(Series(registry, own), record_version)

    @property
    def proposer(self) -> str:
        """The name of the proposer that makes the drafts."""
        return self._labels["proposer"]

    def set_proposer(self, proposer: str) -> None:
        """Labels later counts with another proposer. Called on the step loop.

        Gauges must be set again, including the gauges of the draft index and of its labels.
        """
        self._count_pending()
        with self._counting:
            self._labels = {**self._labels, "proposer": proposer}
            self._series.relabel(self._labels)
            self._make_drafted_series(self._series)

    def collect(self) -> Sequence[Metric]:
        """Counts pending steps. A scrape calls this method before it reads the series.

        A scrape of selected series (``name[]``) does not call this method.
        """
        self._count_pending()
        return ()

    def describe(self) -> Sequence[Metric]:
        """Returns nothing, as this collector has no series of its own."""
        return ()

    def _make_own_series(self, make: Series, record_version: Callable[[], int]) -> None:
        make.gauge(
            "record_version", "Version of the task's record that new requests are answered by."
        ).set_function(record_version)
        self.collected = make.counter(
            "collected_rows", "Finished answers that were stored for `tasc refresh`."
        )
        not_collected = make.counters(
            "collected_rows_dropped",
            "Collected answers that were lost: full if they came faster than Redis took them,"
            " trimmed if Redis removed old ones to make room.",
            "reason",
        )
        self.not_collected: Mapping[NotCollected, Counter] = {
            reason: not_collected(reason) for reason in get_args(NotCollected)
        }
        self._checks = make.counter(
            "lossless_checks",
            "Drafted answers that were decoded again without drafts, and compared.",
        )
        mismatches = make.counters(
            "lossless_mismatches",
            "Checked answers that differ: near_tie if the two tokens are equally likely within"
            " rounding, real otherwise.",
            "kind",
        )
        self._mismatches = {kind: mismatches(kind) for kind in get_args(Mismatch)}
        not_checked = make.counters(
            "lossless_checks_dropped",
            "Answers that were chosen for a check but not checked: the queue was full, no row was"
            " idle in time, or decoding failed.",
            "reason",
        )
        self.not_checked: Mapping[NotChecked, Counter] = {
            reason: not_checked(reason) for reason in get_args(NotChecked)
        }

    def _make_drafted_series(self, make: Series) -> None:
        self._make_steps(make)
        self._make_drafts(make)
        self._make_requests(make)
        self._make_index(make)
        self._make_classification(make)

    def _make_steps(self, make: Series) -> None:
        counter, histogram = make.counter, make.histogram
        self._steps = counter("verify_steps", "Forward passes of the target for a whole batch.")
        self._step_counters = {name: counter(name, text) for name, text in _STEP_COUNTERS.items()}
        self._generation_tokens = counter(
            "generation_tokens",
            "Emitted tokens, end-of-sequence included: accepted + bonus + forced.",
        )
        self._step_seconds = {name: histogram(name, *of) for name, of in _STEP_SECONDS.items()}
        self._cost_error = make.gauge(
            "step_cost_error_ratio",
            "Mean relative difference between measured step costs and the times of real steps.",
        )

    def _make_drafts(self, make: Series) -> None:
        counters, name = make.counters, "spec_decode_num_"
        self._drafted = _TokensBySource(
            counters(name + "draft_tokens", "Draft tokens proposed.", "source"),
            counters(
                name + "drafts_per_pos",
                "Drafts that reach a position, by the source of the likeliest token there; sum over"
                " sources before dividing.",
                *("source", "position"),
            ),
        )
        self._accepted = _TokensBySource(
            counters(
                name + "accepted_tokens", "Accepted draft tokens, without bonus tokens.", "source"
            ),
            counters(
                name + "accepted_tokens_per_pos",
                "Accepted draft tokens at a position.",
                *("source", "position"),
            ),
        )

    def _make_requests(self, make: Series) -> None:
        gauge, histogram = make.gauge, make.histogram
        success = make.counters(
            "request_success", "Answered requests, by finish reason.", "finished_reason"
        )
        self._finished = {reason: success(reason) for reason in get_args(FinishReason)}
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "Time from arrival in the engine to the first token.",
            _FIRST_TOKEN_S,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds",
            "Time from arrival in the engine to the end of the answer.",
            E2E_S,
        )
        self._queued = histogram(
            "request_queue_time_seconds",
            "Time from arrival in the engine to a free row.",
            _QUEUE_S,
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Gap between two chunks divided by the tokens of the later one, once per token.",
            _INTER_TOKEN_S,
        )
        gauge("num_requests_running", "Requests that hold a row.").set_function(
            lambda: self._load()[0]
        )
        gauge("num_requests_waiting", "Requests in the queue.").set_function(
            lambda: self._load()[1]
        )
        gauge(
            "kv_cache_usage_ratio",
            "Share of the KV cache that requests reserve for their longest answers.",
        ).set_function(lambda: self._load()[2])

    def _make_classification(self, make: Series) -> None:
        self._named = set[str]()
        self._make_classified(make)
        self._corpus_rows = make.gauges(
            "corpus_label_rows",
            "Rows of the draft index's corpus with a label of the task, by the same names.",
            "label",
        )
        self._abstained = make.counter(
            "classifications_abstained",
            "Abstentions: classifications whose likeliest label was not probable enough.",
        )
        self._confidence = make.histogram(
            "classification_confidence", "Probability of the likeliest label.", _SHARES
        )
        self._classify_steps = make.histogram(
            "classification_steps", "Forward passes of one classification.", _FORWARDS
        )

    def _make_classified(self, make: Series) -> None:
        self._classified = make.counters(
            "classifications",
            f"Classifications by label, for the {_MAX_LABELS} labels of the task that are the"
            f" commonest of its corpus, then for the first answered. {_OTHER}: further labels;"
            f" {_FOREIGN}: labels that are not the task's.",
            "label",
        )

    def _make_index(self, make: Series) -> None:
        gauges = make.gauges
        self._index_info = gauges(
            "draft_index_info",
            "1 for the draft index in use; versions are numbered per tokenizer.",
            *("fingerprint", "version"),
        )
        self._index_bytes = make.gauge("draft_index_bytes", "Size of the draft index in use.")
        self._forecast = gauges(
            "forecast_tokens_per_step",
            "Tokens per step with the draft index in use, measured on rows that are not in it.",
        )
        self._built = gauges(
            "draft_index_built_timestamp_seconds",
            "When the draft index in use was built, in seconds since the epoch.",
        )
        self._swaps = make.counter(
            "index_swaps", "Number of times a running replica took another draft index."
        )

    def observe_step(self, record: StepRecord) -> None:
        """Counts one step, at the next scrape or together with 63 others, whichever is first.

        Called on the step loop.

        Raises:
            ValueError: The record does not have one row of counts for each of ``SOURCES``.
        """
        if any(len(c) != len(SOURCES) for c in (record.drafted, record.reached, record.accepted)):
            found = record.drafted.shape
            raise ValueError(f"counts have the shape {found}; give {len(SOURCES)} rows")
        self._pending.append(record)
        if len(self._pending) >= _MAX_PENDING:
            self._count_pending()

    def _count_pending(self) -> None:
        with self._counting:
            if gaps := _taken(self._gaps):
                seconds, tokens = zip(*gaps, strict=True)
                self._inter_token.observe_all(seconds, tokens)
            if records := _taken(self._pending):
                self._count(records)

    def _count(self, records: Sequence[StepRecord]) -> None:
        def total(name: str) -> int:
            return sum(getattr(record, name) for record in records)

        accepted = _sum([record.accepted for record in records])
        self._drafted.add(
            _sum([record.drafted for record in records]),
            _sum([record.reached for record in records]),
        )
        self._accepted.add(accepted, accepted)
        self._steps.inc(len(records))
        for name, counter in self._step_counters.items():
            counter.inc(total(_FIELDS.get(name, name)))
        emitted = total("bonus_tokens") + total("forced_tokens")
        self._generation_tokens.inc(int(accepted.sum()) + emitted)
        once = [1] * len(records)
        for name, histogram in self._step_seconds.items():
            histogram.observe_all([getattr(record, name) for record in records], once)
        self._cost_error.set(records[-1].cost_error)

    def observe_result(self, result: GenerationResult, own_labels: bool = True) -> None:
        """Counts one answered request. An abandoned request has no result.

        Args:
            own_labels: Whether scored labels are the task's; others have no names of their own.
        """
        self._finished[result.finish_reason].inc()
        self._queued.observe(result.timings.queued)
        self._e2e.observe(result.timings.total)
        self._first_token.observe(result.timings.first_token)
        scores = result.scores
        if scores is not None and scores.mass is None:  # decisions are no classifications
            if result.text == scores.labels[0]:
                self._count_label(result.text[:_MAX_LABEL_CHARS], own_labels)
            else:
                self._abstained.inc()
            self._confidence.observe(scores.probabilities[0] * (1 - scores.unseen))
            self._classify_steps.observe(result.acceptance.steps)

    def _count_label(self, label: str, own: bool) -> None:
        if not own:
            label = _FOREIGN
        elif label not in self._named and len(self._named) < _MAX_LABELS:
            self._named.add(label)
        elif label not in self._named:
            label = _OTHER
        self._classified(label).inc()

    def set_labels(self, rows: Mapping[str, int]) -> None:
        """Exports how many rows of the corpus have each label, and names the commonest labels.

        Counts of classifications begin at 0 again if the names change. Any thread may call this.

        Args:
            rows: The rows of each label of the task. If no label has any, names of its labels stay.
        """
        self._series.clear("corpus_label_rows")
        if not any(rows.values()):
            self._named &= {label[:_MAX_LABEL_CHARS] for label in rows}
            return
        found = dict[str, int]()
        for label, count in rows.items():
            name = label[:_MAX_LABEL_CHARS]
            found[name] = found.get(name, 0) + count
        names = sorted(found, key=lambda name: -found[name])[:_MAX_LABELS]
        if self._named != set(names):
            self._named = set(names)
            self._series.clear("classifications")
            self._make_classified(self._series)
        counts = {name: found[name] for name in names}
        counts[_OTHER] = counts.get(_OTHER, 0) + sum(found.values()) - sum(counts.values())
        for name, count in counts.items():
            self._classified(name)  # exported from now on, at 0
            self._corpus_rows(name).set(count)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """Observes ``seconds / tokens`` once per token, when the step is counted.

        Args:
            seconds: Gap between the previous chunk of this request and the current chunk.
            tokens: Number of tokens in the current chunk; a chunk without tokens is not observed.
        """
        if tokens:
            self._gaps.append((seconds / tokens, tokens))

    def set_index(self, artifact: Artifact | None, size_bytes: int) -> None:
        """Exports the draft index in use; None: no index. The first call does not count a swap."""
        version = artifact.version if artifact else None
        if version != self._version:
            self._series.clear(
                "draft_index_info",
                "forecast_tokens_per_step",
                "draft_index_built_timestamp_seconds",
            )
        self._index_bytes.set(size_bytes)
        if artifact:
            self._index_info(artifact.fingerprint, artifact.version).set(1)
            self._built().set(artifact.created_at)
            if artifact.forecast is not None:
                self._forecast().set(artifact.forecast)
        self._swaps.inc(int(self._started and version != self._version))
        self._started, self._version = True, version

    def observe_check(self, mismatch: Mismatch | None) -> None:
        """Counts one comparison of an answer with its shadow, and the kind of a mismatch."""
        self._checks.inc()
        if mismatch:
            self._mismatches[mismatch].inc()


def _sum(counts: Sequence[Counts]) -> Counts:
    """The sum of ``[source, position]`` counts with different numbers of positions."""
    widths = {each.shape[1] for each in counts}
    total = np.zeros((len(SOURCES), max(widths)), np.int64)
    for width in widths:
        total[:, :width] += np.sum([each for each in counts if each.shape[1] == width], axis=0)
    return total


def _taken(waiting: deque[_Item]) -> list[_Item]:
    """Removes and returns the pending items; another thread may add items at the same time."""
    return [waiting.popleft() for _ in range(len(waiting))]
