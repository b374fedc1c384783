"""The dashboard "tasc-serve / Batch and corpora": batches, what refreshes get, what they made."""

from panels import Dashboard, Panel, Section, Target, Variable
from queries import OWN, TASK, rate, rise

_KEPT = "tasc_collected_rows_total"
_REQUESTS = "tasc_batch_requests_total"

# Every gateway says the same of the one store: the greatest counts.
_BATCHES = (
    Panel(
        "Batches waiting and in progress",
        "short",
        "Batches that no worker holds, and those that workers answer now.",
        "Many wait and few are in progress: start more of `tasc worker`. None is in progress: is"
        " one running, does its --tasks name the task, what does its log say?",
        (
            Target(f"max by (task) (tasc_batch_waiting{TASK})", "waiting {{task}}"),
            Target(f"sum by (task) (tasc_batch_in_progress{TASK})", "in progress {{task}}"),
        ),
        width=6,
    ),
    Panel(
        "Longest wait for a worker",
        "s",
        "Time since the first of the waiting batches was asked for, or last held by a worker.",
        "Over some hours: a batch expires after a day, with what is done of it: start workers.",
        (Target(f"max by (task) (tasc_batch_oldest_waiting_seconds{TASK})", "{{task}}"),),
        width=6,
    ),
    Panel(
        "Batches ended",
        "short",
        "Batches that workers ended, by their last status.",
        "failed: the batch's errors (`client.batches.retrieve(id).errors`) name the line. expired:"
        " too few workers. cancelled: somebody asked for it.",
        (Target(rise("tasc_batch_ended_total", "task, status", TASK), "{{status}} {{task}}"),),
        width=6,
    ),
    Panel(
        "Engines of workers that failed",
        "short",
        "Batches given back since no engine could be built, or kept, on the worker's machine.",
        "Any: the worker's log says why (no model folder, no memory, no Redis). The batch waits for"
        " another worker; --max-faults in a row end the worker.",
        (Target(rise("tasc_batch_engine_failures_total", where=TASK), "{{task}}"),),
        width=6,
    ),
    Panel(
        "Requests of batches done",
        "reqps",
        "Requests of batches that workers answered, or found to be wrong, per second.",
        "Falls while batches wait: fewer workers, or slower ones; `tasc worker --actors` has more"
        " engines work on one batch. Many failed: the batch's error file says why, line by line.",
        (Target(rate(_REQUESTS, "task, result", TASK), "{{result}} {{task}}"),),
        width=8,
    ),
    Panel(
        "Tokens of batches",
        "short",
        "Tokens per second of answers that are done, end-of-sequence included.",
        "Lower than a replica's on the same machine: engines wait for rows or for Redis, or share"
        " their CPUs with replicas.",
        (Target(rate("tasc_batch_tokens_total", where=TASK), "{{task}}"),),
        width=8,
    ),
    Panel(
        "Rows in engines' hands",
        "short",
        "Requests of batches that workers' engines have in hand.",
        "0 while a batch is in progress: its engines are coming up, or cannot; see the worker's"
        " log.",
        (Target(f"sum by (task) (tasc_batch_rows_running{TASK})", "{{task}}"),),
        width=8,
    ),
)

_ROWS = (
    Panel(
        "Answers kept for the corpus",
        "short",
        "Finished answers per second that were stored for `tasc refresh`.",
        "None: collect.sample_rate is 0, or clients ask for anything special (sampling, guides,"
        " stop strings), which is no answer of the task's own.",
        (Target(rate(_KEPT), "{{task}}"),),
    ),
    Panel(
        "Kept of finished",
        "percentunit",
        "Answers stored / requests finished.",
        "Far under collect.sample_rate: most requests ask for something special, or rows are lost.",
        (Target(f"{rate(_KEPT)} / {rate('tasc_request_success_total')}", "{{task}}"),),
        most=1,
    ),
    Panel(
        "Answers lost to the corpus",
        "short",
        "Answers that no refresh will see: full where they came faster than the store took them,"
        " trimmed where the store let old ones go for new ones.",
        "full: Redis is slow or away; raise collect.max_buffer_bytes or lower collect.sample_rate."
        " trimmed: run `tasc refresh` more often, or raise collect.max_rows.",
        (
            Target(
                rise("tasc_collected_rows_dropped_total", "task, reason"),
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
    about="Batches, answers kept for the corpus, and the draft indexes built of it.",
    sections=(
        Section("Batches", _BATCHES),
        Section("Answers kept", _ROWS),
        Section("Draft indexes", _INDEX),
    ),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
