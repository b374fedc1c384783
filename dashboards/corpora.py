"""The dashboard "tasc-serve / Batch and corpora": what refreshes get, and what they made."""

from panels import Dashboard, Panel, Section, Target, Variable
from queries import OWN, rate, rise

_KEPT = "tasc_collected_rows_total"

_ROWS = (
    Panel(
        "Answers kept for the corpus",
        "short",
        "Finished answers per second that were stored for `tasc refresh`.",
        "None: collect.share is 0, or clients ask for anything special (sampling, guides, stop"
        " strings), which is no answer of the task's own.",
        (Target(rate(_KEPT), "{{task}}"),),
    ),
    Panel(
        "Kept of finished",
        "percentunit",
        "Answers stored / requests finished.",
        "Far under collect.share: most requests ask for something special, or rows are lost.",
        (Target(f"{rate(_KEPT)} / {rate('tasc_request_success_total')}", "{{task}}"),),
        most=1,
    ),
    Panel(
        "Answers lost to the corpus",
        "short",
        "Answers that no refresh will see: full where they came faster than the store took them,"
        " trimmed where the store let old ones go for new ones.",
        "full: Redis is slow or away; raise collect.max_buffered_bytes or lower collect.share."
        " trimmed: run `tasc refresh` more often, or raise collect.max_rows.",
        (
            Target(
                rise("tasc_collected_rows_lost_total", "task, reason"),
                "{{reason}} {{task}}",
            ),
        ),
    ),
)

_INDEX = (
    Panel(
        "Replicas by index version",
        "short",
        "Replicas that serve a version of the draft index.",
        "Two versions for minutes: a replica does not follow; its log says why it cannot fetch the"
        " index.",
        (
            Target(
                f"count by (task, version) (tasc_draft_index_info{OWN})",
                "{{task}} v{{version}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Index age",
        "s",
        "Time since the oldest served draft index was built.",
        "Old while tokens per step fall under the forecast: schedule `tasc refresh`. Old and"
        " as good as forecast: leave it.",
        (
            Target(
                f"time() - min by (task) (tasc_draft_index_built_timestamp_seconds{OWN})",
                "{{task}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Index size",
        "bytes",
        "Bytes of the served draft index; a node's replicas share one copy.",
        "Grows with every refresh: limit the rows that an index is built from.",
        (Target(f"max by (task) (tasc_draft_index_bytes{OWN})", "{{task}}"),),
        width=6,
    ),
    Panel(
        "Index swaps",
        "short",
        "Indexes swapped in by running replicas.",
        "More often than you refresh: two jobs publish for one task, or an index goes to and fro.",
        (Target(rise("tasc_index_swaps_total"), "{{task}}"),),
        width=6,
    ),
)

CORPORA = Dashboard(
    uid="tasc-corpora",
    title="tasc-serve / Batch and corpora",
    about="Answers kept for the corpus, and the draft indexes built of it.",
    sections=(Section("Answers kept", _ROWS), Section("Draft indexes", _INDEX)),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
