"""The dashboard "tasc-serve / Drafting": whether drafting pays, and what it drafts from."""

from panels import Dashboard, Panel, Target, Variable

_OWN = '{task=~"$task", model_name=~"$model_name"}'
_SPEC = "tasc_spec_decode_num_"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{_OWN}[$__rate_interval]))"


def _ratio(above: str, below: str, by: str) -> str:
    return f"{_rate(above, by)} / {_rate(below, by)}"


_BLOCK = _ratio("tasc_generation_tokens_total", "tasc_row_steps_total", "task")
_COVERAGE = _ratio(_SPEC + "drafts_total", "tasc_row_steps_total", "task")
_FROM_DRAFTS = _ratio(_SPEC + "accepted_tokens_total", "tasc_generation_tokens_total", "task")
_ACCEPTANCE = _ratio(_SPEC + "accepted_tokens_total", _SPEC + "draft_tokens_total", "task")
_NOW = (
    (
        "Block efficiency",
        "short",
        "Emitted tokens / target forwards of a row that can emit.",
        _BLOCK,
    ),
    ("Coverage", "percentunit", "Row-steps with a non-empty draft / all row-steps.", _COVERAGE),
    ("Output from drafts", "percentunit", "Accepted tokens / emitted tokens.", _FROM_DRAFTS),
    ("Acceptance rate", "percentunit", "Accepted tokens / drafted tokens.", _ACCEPTANCE),
)

_BY_POSITION = Panel(
    "Acceptance rate by draft position",
    "percentunit",
    "Drafts accepted at a position / drafts that reach it. A draft that ends earlier counts in"
    " neither; positions that no draft reached show nothing.",
    (
        Target(
            _rate(_SPEC + "accepted_tokens_per_pos_total", "task, position")
            + f" / ({_rate(_SPEC + 'drafts_per_pos_total', 'task, position')} > 0)",
            "{{task}} {{position}}",
        ),
    ),
    width=12,
    most=1,
)
_BY_SOURCE = Panel(
    "Acceptance rate by source",
    "percentunit",
    "Accepted / drafted tokens of one source: the task's corpus, this request's prompt and answer"
    " so far, similar rows' outputs, ... A token counts for its largest contributor.",
    (
        Target(
            _rate(_SPEC + "accepted_tokens_total", "task, source")
            + f" / ({_rate(_SPEC + 'draft_tokens_total', 'task, source')} > 0)",
            "{{task}} {{source}}",
        ),
    ),
    width=12,
    most=1,
)
_OVER_TIME = (
    Panel(
        "Block efficiency",
        "short",
        "Emitted tokens / row-steps. The denominator is tasc_row_steps_total: each row counts its"
        " own forwards, whatever the batch. 1 is decoding without drafts.",
        (Target(_BLOCK, "{{task}}"),),
    ),
    Panel(
        "Rows per step",
        "short",
        "Row-steps / verify steps: how full the batch is.",
        (
            Target(
                _ratio("tasc_row_steps_total", "tasc_verify_steps_total", "task"),
                "{{task}}",
            ),
        ),
    ),
    Panel(
        "Coverage",
        "percentunit",
        "Row-steps with a non-empty draft / all row-steps.",
        (Target(_COVERAGE, "{{task}}"),),
        most=1,
    ),
    Panel(
        "Tokens from drafts and from the target",
        "short",
        "Emitted tokens per second: accepted from a draft, chosen by the target (bonus), and "
        "forced by a guide, which take no forward.",
        (
            Target(_rate(_SPEC + "accepted_tokens_total", "task"), "drafts {{task}}"),
            Target(_rate("tasc_bonus_tokens_total", "task"), "target {{task}}"),
            Target(_rate("tasc_forced_tokens_total", "task"), "guide {{task}}"),
        ),
    ),
    Panel(
        "Draft tokens by source",
        "short",
        "Tokens proposed per second, accepted or not.",
        (Target(_rate(_SPEC + "draft_tokens_total", "task, source"), "{{task}} {{source}}"),),
    ),
    Panel(
        "Drafting time / verify time",
        "percentunit",
        "Seconds spent proposing / seconds in the target's forward.",
        (Target(_ratio("tasc_draft_seconds_sum", "tasc_verify_seconds_sum", "task"), "{{task}}"),),
    ),
    Panel(
        "Steps that drafting sat out",
        "percentunit",
        "Steps without drafts because those before them did not pay / verify steps.",
        (
            Target(
                _ratio("tasc_drafting_paused_steps_total", "tasc_verify_steps_total", "task"),
                "{{task}}",
            ),
        ),
        most=1,
    ),
)
_FAILURES = Panel(
    "Drafts that failed",
    "short",
    "Proposer calls that raised and drafts that were no trees, per second: answers go on without.",
    (Target(_rate("tasc_draft_failures_total", "task"), "{{task}}"),),
)
_INDEX = (
    Panel(
        "Replicas by index version",
        "short",
        "Replicas that serve a version of the draft index; two for long mean one does not follow.",
        (
            Target(
                f"count by (task, version) (tasc_draft_index_info{_OWN})",
                "{{task}} v{{version}}",
            ),
        ),
    ),
    Panel(
        "Index size",
        "bytes",
        "Bytes of the served draft index; a node's replicas share one copy.",
        (Target(f"max by (task) (tasc_draft_index_bytes{_OWN})", "{{task}}"),),
    ),
    Panel(
        "Index swaps",
        "short",
        "Indexes swapped in by running replicas.",
        (
            Target(
                f"sum by (task) (increase(tasc_index_swaps_total{_OWN}[$__rate_interval]))",
                "{{task}}",
            ),
        ),
    ),
)

DRAFTING = Dashboard(
    uid="tasc-drafting",
    title="tasc-serve / Drafting",
    about="Whether drafting pays, and what it drafts from.",
    panels=(
        *(
            Panel(title, unit, about, (Target(expr, "{{task}}"),), "stat", width=6, height=4)
            for title, unit, about, expr in _NOW
        ),
        _BY_POSITION,
        _BY_SOURCE,
        *_OVER_TIME,
        _FAILURES,
        *_INDEX,
    ),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
