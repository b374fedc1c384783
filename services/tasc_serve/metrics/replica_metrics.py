"""Metrics of a replica: steps and drafts, collected answers, draft index, shadow checks, record.

Names keep vLLM's suffixes, so that its dashboards need another prefix only. The denominators
``tasc_row_steps_total`` and ``tasc_spec_decode_num_drafts_per_pos_total`` are added.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tasc_draft.drafts import SOURCES
from tasc_engine.request import FinishReason, GenerationResult
from tasc_engine.stats import Counts, StepRecord

Lost: TypeAlias = Literal["full", "trimmed"]
_LABELS: Final = ("task", "model_name")


class CollectorMetrics:
    """The series of one replica's collector; all of them are there from the start, at 0.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, *, task: str, model_name: str) -> None:
        own = (task, model_name)
        self._rows = Counter(
            "tasc_collected_rows",
            "Finished answers that were stored for `tasc refresh`.",
            _LABELS,
            registry=registry,
        ).labels(*own)
        lost = Counter(
            "tasc_collected_rows_lost",
            "Answers that no refresh will see: full where they came faster than the store took"
            " them, trimmed where the store let old ones go for new ones.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._lost = {reason: lost.labels(*own, reason) for reason in get_args(Lost)}

    def stored(self, rows: int) -> None:
        """Count answers that reached the store."""
        self._rows.inc(rows)

    def lost(self, reason: Lost, rows: int = 1) -> None:
        """Count answers that went."""
        self._lost[reason].inc(rows)


class DriftMetrics:
    """The series of one replica.

    What is expected carries the labels of the counters it is compared with; where nothing is
    known of an index there is no sample.

    Args:
        labels: Those of the replica's other series.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._forecast = Gauge(
            "tasc_forecast_tokens_per_step",
            "Tokens per step that the draft index in use brought on rows it had not seen.",
            tuple(labels),
            registry=registry,
        )
        self._built = Gauge(
            "tasc_draft_index_built_timestamp_seconds",
            "When the draft index in use was built, in seconds since the epoch.",
            tuple(labels),
            registry=registry,
        )
        self._rollbacks = Counter(
            "tasc_index_rollbacks",
            "Draft indexes that this replica took out of use since they drafted worse.",
            tuple(labels),
            registry=registry,
        )
        self._rollbacks.labels(**self._labels)

    def expect(self, tokens_per_step: float | None) -> None:
        """Say what the index in use is expected to bring; None: nobody knows."""
        if tokens_per_step is None:
            self._forecast.clear()
        else:
            self._forecast.labels(**self._labels).set(tokens_per_step)

    def built(self, at: float | None) -> None:
        """Say when the index in use was built, in seconds since the epoch; None: there is none."""
        if at is None:
            self._built.clear()
        else:
            self._built.labels(**self._labels).set(at)

    def drafted_by(self, proposer: str) -> None:
        """Another mixture makes the drafts; what is expected of them is to be said anew."""
        self._forecast.clear()
        self._built.clear()
        self._labels = {**self._labels, "proposer": proposer}
        self._rollbacks.labels(**self._labels)

    def rolled_back(self) -> None:
        """Count a roll-back."""
        self._rollbacks.labels(**self._labels).inc()


Mismatch: TypeAlias = Literal["near_tie", "real"]
Dropped: TypeAlias = Literal["full", "old", "failed"]


class ShadowMetrics:
    """The series of one replica's shadow checks; all of them are there from the start, at 0.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, *, task: str, model_name: str) -> None:
        own = (task, model_name)
        self._checks = Counter(
            "tasc_lossless_checks",
            "Drafted answers that were decoded again without drafts, and compared.",
            _LABELS,
            registry=registry,
        ).labels(*own)
        mismatches = Counter(
            "tasc_lossless_mismatches",
            "Of these, answers that differ: near_tie where the two tokens are as likely as rounding"
            " can tell, real otherwise.",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._mismatches = {kind: mismatches.labels(*own, kind) for kind in get_args(Mismatch)}
        dropped = Counter(
            "tasc_lossless_checks_dropped",
            "Answers chosen for a check that had none: the queue was full, rows were not idle"
            " before they were old, or decoding failed.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._dropped = {reason: dropped.labels(*own, reason) for reason in get_args(Dropped)}

    def checked(self, mismatch: Mismatch | None) -> None:
        """Count one comparison, and what differed."""
        self._checks.inc()
        if mismatch:
            self._mismatches[mismatch].inc()

    def dropped(self, reason: Dropped) -> None:
        """Count an answer that was chosen and not checked."""
        self._dropped[reason].inc()


class RecordMetrics:
    """The series of one replica.

    Args:
        version: Asked at each scrape.

    Raises:
        ValueError: The registry already holds this series.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        version: Callable[[], int],
        *,
        task: str,
        model_name: str,
    ) -> None:
        served = Gauge(
            "tasc_record_version",
            "Version of the task's record that new requests are answered by.",
            ("task", "model_name"),
            registry=registry,
        )
        served.labels(task, model_name).set_function(version)


# vLLM's edges, and finer ones below: a small model answers in milliseconds.
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
_VERIFY_S = _INTER_TOKEN_S
_DRAFT_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1)


Family = TypeVar("Family", Counter, Gauge, Histogram)


class _Series:
    """Makes series that all carry the replica's own labels.

    Families are made once: with other labels the same ones get other series.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels
        self._families: dict[str, Any] = {}

    def use(self, labels: dict[str, str]) -> None:
        """Make series with these labels from now on. Gauges with those of before are gone."""
        for family in self._families.values():
            if isinstance(family, Gauge):
                family.clear()
        self._labels = labels

    def counters(self, name: str, text: str, *by: str) -> Callable[..., Counter]:
        return self._labelled(self.family(Counter, name, text, *by))

    def counter(self, name: str, text: str) -> Counter:
        return self.counters(name, text)()

    def gauge(self, name: str, text: str) -> Gauge:
        return self._labelled(self.family(Gauge, name, text))()

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._labelled(self.family(Histogram, name, text, buckets=buckets))()

    def family(self, kind: type[Family], name: str, text: str, *by: str, **how: Any) -> Family:
        if name not in self._families:
            names = (*self._labels, *by)
            self._families[name] = kind(name, text, names, registry=self._registry, **how)
        found: Family = self._families[name]
        return found

    def _labelled(self, family: Family) -> Callable[..., Family]:
        own = tuple(self._labels.values())
        return lambda *values: family.labels(*own, *map(str, values))


class _TokensBySource:
    """Draft tokens by source, in total and by position; every child is resolved once."""

    def __init__(self, total: Callable[..., Counter], by_position: Callable[..., Counter]) -> None:
        self._total = [total(source) for source in SOURCES]
        self._by_position = by_position
        self._children: list[list[Counter]] = [[] for _ in SOURCES]

    def add(self, tokens: Counts, by_position: Counts) -> None:
        """Count ``tokens`` in total, and what ``by_position`` says, each ``[source, position]``."""
        self._resolve(by_position.shape[1])
        wholes = tokens.sum(1).tolist()
        rows = zip(self._total, self._children, wholes, by_position.tolist(), strict=True)
        for total, children, whole, row in rows:
            if whole:
                total.inc(whole)
                for child, n in zip(children, row, strict=False):
                    if n:
                        child.inc(n)

    def _resolve(self, positions: int) -> None:
        for source, children in zip(SOURCES, self._children, strict=True):
            for position in range(len(children), positions):
                children.append(self._by_position(source, position))


class ReplicaMetrics:
    """The series of one replica: one task, one target, one proposer.

    Args:
        registry: Where the series live; another registry is another process's view.
        task: The task's name.
        model_name: The target's name.
        proposer: The mixture that makes the drafts.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(
        self, registry: CollectorRegistry, *, task: str, model_name: str, proposer: str
    ) -> None:
        self._labels = {"task": task, "model_name": model_name, "proposer": proposer}
        self._series = _Series(registry, self._labels)
        self._version: int | None = None
        self._started = False
        self._make()

    @property
    def proposer(self) -> str:
        """The mixture that makes the drafts."""
        return self._labels["proposer"]

    def drafted_by(self, proposer: str) -> None:
        """Another mixture makes the drafts: what is counted from now on carries its name.

        Gauges, the draft index's too, are to be set anew. Called on the step loop.
        """
        self._labels = {**self._labels, "proposer": proposer}
        self._series.use(self._labels)
        self._make()

    def _make(self) -> None:
        self._steps_of(self._series)
        self._drafting_of(self._series)
        self._requests_of(self._series)
        self._index_of(self._series)

    def _steps_of(self, make: _Series) -> None:
        self._steps = make.counter("tasc_verify_steps", "Target forwards of a whole batch.")
        self._paused_steps = make.counter(
            "tasc_drafting_paused_steps", "Steps without drafts because those before did not pay."
        )
        self._draft_failures = make.counter(
            "tasc_draft_failures", "Proposer calls that raised, and drafts that were no trees."
        )
        self._row_steps = make.counter(
            "tasc_row_steps", "Target forwards of one row that could emit: block efficiency's base."
        )
        self._prompt_tokens = make.counter(
            "tasc_prompt_tokens", "Prompt tokens that entered the cache by a forward."
        )
        self._shared_tokens = make.counter(
            "tasc_prefix_cache_hits", "Prompt tokens copied from a beginning that another had."
        )
        self._generation_tokens = make.counter(
            "tasc_generation_tokens",
            "Emitted tokens, end-of-sequence included: accepted + bonus + forced.",
        )
        self._bonus_tokens = make.counter(
            "tasc_bonus_tokens", "Emitted tokens that the target chose itself."
        )
        self._forced_tokens = make.counter(
            "tasc_forced_tokens", "Emitted tokens that had no forward: a guide allowed no other."
        )
        self._draft_seconds = make.histogram("tasc_draft_seconds", "Proposing, per step.", _DRAFT_S)
        self._guide_seconds = make.histogram(
            "tasc_guide_seconds", "Asking guides what may come, per step.", _DRAFT_S
        )
        self._verify_seconds = make.histogram(
            "tasc_verify_seconds", "The target's forward until its tokens are read.", _VERIFY_S
        )

    def _drafting_of(self, make: _Series) -> None:
        name = "tasc_spec_decode_num_"
        self._drafts = make.counter(name + "drafts", "Row-steps with a non-empty draft.")
        self._drafted = _TokensBySource(
            make.counters(name + "draft_tokens", "Draft tokens proposed.", "source"),
            make.counters(
                name + "drafts_per_pos",
                "Drafts that reach a position, by the likeliest token there: sum over sources"
                " before dividing.",
                *("source", "position"),
            ),
        )
        self._accepted = _TokensBySource(
            make.counters(name + "accepted_tokens", "Draft tokens emitted, no bonus.", "source"),
            make.counters(
                name + "accepted_tokens_per_pos",
                "Draft tokens emitted at a position.",
                *("source", "position"),
            ),
        )

    def _requests_of(self, make: _Series) -> None:
        success = make.counters(
            "tasc_request_success", "Requests that ended, by how.", "finished_reason"
        )
        self._finished = {reason: success(reason) for reason in get_args(FinishReason)}
        self._first_token = make.histogram(
            "tasc_time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self._e2e = make.histogram(
            "tasc_e2e_request_latency_seconds", "Arrival to the end of the answer.", E2E_S
        )
        self._queued = make.histogram(
            "tasc_request_queue_time_seconds", "Arrival to a free row.", _QUEUE_S
        )
        self._inter_token = make.histogram(
            "tasc_inter_token_latency_seconds",
            "Gap between two chunks divided by the tokens of the later, once per token.",
            _INTER_TOKEN_S,
        )
        self._running = make.gauge("tasc_num_requests_running", "Requests that hold a row.")
        self._waiting = make.gauge("tasc_num_requests_waiting", "Requests in the queue.")
        self._kv_ratio = make.gauge(
            "tasc_kv_cache_usage_ratio",
            "Part of the KV cache that requests hold for their longest answers.",
        )

    def _index_of(self, make: _Series) -> None:
        self._index_info = make.family(
            Gauge, "tasc_draft_index_info", "1 for the served one.", "version"
        )
        self._index_bytes = make.gauge("tasc_draft_index_bytes", "Size of the served draft index.")
        self._swaps = make.counter("tasc_index_swaps", "Draft indexes swapped in while running.")

    def observe_step(self, record: StepRecord) -> None:
        """Count one step. Called on the step loop: some tens of microseconds.

        Raises:
            ValueError: The record has not one row of counts for each of ``SOURCES``.
        """
        self._drafted.add(record.drafted, record.reached)
        self._accepted.add(record.accepted, record.accepted)
        self._steps.inc()
        self._row_steps.inc(record.row_steps)
        self._drafts.inc(record.drafts)
        self._bonus_tokens.inc(record.bonus_tokens)
        self._forced_tokens.inc(record.forced_tokens)
        self._generation_tokens.inc(record.emitted_tokens)
        self._prompt_tokens.inc(record.prompt_tokens)
        self._shared_tokens.inc(record.shared_tokens)
        self._paused_steps.inc(int(record.paused))
        self._draft_failures.inc(record.draft_failures)
        self._draft_seconds.observe(record.draft_seconds)
        self._guide_seconds.observe(record.guide_seconds)
        self._verify_seconds.observe(record.verify_seconds)

    def observe_result(self, result: GenerationResult) -> None:
        """Count one answered request; one that was given up on has no result."""
        self._finished[result.finish_reason].inc()
        self._queued.observe(result.timings.queued)
        self._e2e.observe(result.timings.total)
        self._first_token.observe(result.timings.first_token)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """Observe ``seconds / tokens`` once per token.

        Args:
            seconds: Gap between the previous chunk of this request and the current one.
            tokens: Tokens in the current chunk; a chunk without tokens is not observed.
        """
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def set_load(self, running: int, waiting: int, kv_ratio: float) -> None:
        """Set requests that hold a row, requests in the queue, and the cache's use in [0, 1]."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_ratio.set(kv_ratio)

    def set_index(self, version: int | None, size_bytes: int) -> None:
        """Say which draft index is served; None is none. The first call is no swap."""
        self._index_bytes.set(size_bytes)
        if version != self._version:
            self._index_info.clear()
        if version is not None:
            self._index_info.labels(*self._labels.values(), str(version)).set(1)
        self._swaps.inc(int(self._started and version != self._version))
        self._started, self._version = True, version
