"""The dashboard "tasc-serve / Drafting": whether drafting pays, why not, is it lossless."""

from panels import Dashboard, Panel, Section, Target, Variable
from queries import (
    ACCEPTED,
    ACCEPTED_AT,
    DRAFTED,
    DRAFTS,
    OWN,
    RATE,
    REACHED_AT,
    mean,
    quantile,
    rate,
    ratio,
    rise,
)

_BLOCK = ratio("tasc_generation_tokens_total", "tasc_row_steps_total")
_BY_VERSION = " / ".join(
    f"sum by (task, model_name, fingerprint, version) (rate({counter}{OWN}{RATE})"
    " * on (task, model_name, proposer, instance) group_left (fingerprint, version)"
    f" tasc_draft_index_info{OWN})"
    for counter in ("tasc_generation_tokens_total", "tasc_row_steps_total")
)
_COVERAGE = ratio(DRAFTS, "tasc_row_steps_total")
_REPLICAS = f"count by (task) (tasc_num_requests_running{OWN})"
_INDEXED = f"count by (task) (tasc_draft_index_info{OWN})"


def _now(title: str, unit: str, about: str, wrong: str, expr: str) -> Panel:
    return Panel(title, unit, about, wrong, (Target(expr, "{{task}}"),), "stat", width=6, height=4)


def _at_position(by: str) -> str:
    return f"{rate(ACCEPTED_AT, by)} / ({rate(REACHED_AT, by)} > 0)"


_PAYS = (
    _now(
        "Block efficiency",
        "short",
        "Emitted tokens / target forwards of a row that can emit. 1 is decoding without drafts.",
        "See below whether coverage or acceptance is low.",
        _BLOCK,
    ),
    _now(
        "Coverage",
        "percentunit",
        "Row-steps with a non-empty draft / all row-steps.",
        "Low: see why rows go without a draft.",
        _COVERAGE,
    ),
    _now(
        "Output from drafts",
        "percentunit",
        "Accepted tokens / emitted tokens.",
        "Low with good acceptance: drafts are short or rare; `tasc tune` finds better settings.",
        ratio(ACCEPTED, "tasc_generation_tokens_total"),
    ),
    _now(
        "Acceptance rate",
        "percentunit",
        "Accepted tokens / drafted tokens.",
        "Low: the index knows other rows than those that come; build it from recent ones.",
        ratio(ACCEPTED, DRAFTED),
    ),
    Panel(
        "Tokens per step, live and forecast",
        "short",
        "Emitted tokens / row-steps, and what the index in use brought on rows it had not seen when"
        " it was judged; an index that nobody judged has no forecast.",
        "Live well under the forecast: the task's input has changed; run `tasc refresh`, or go back"
        " with `tasc index use`.",
        (
            Target(_BLOCK, "live {{task}}"),
            Target(f"avg by (task) (tasc_forecast_tokens_per_step{OWN})", "forecast {{task}}"),
        ),
    ),
    Panel(
        "Tokens from drafts and from the target",
        "short",
        "Emitted tokens per second: accepted from a draft, chosen by the target (bonus), and forced"
        " by a guide, which take no forward.",
        "Drafts fall while the target goes on: look at acceptance by source.",
        (
            Target(rate(ACCEPTED), "drafts {{task}}"),
            Target(rate("tasc_bonus_tokens_total"), "target {{task}}"),
            Target(rate("tasc_forced_tokens_total"), "guide {{task}}"),
        ),
    ),
    Panel(
        "Rows per step",
        "short",
        "Row-steps / verify steps: how full the batch is.",
        "1 under load: requests come one by one; the fuller a batch, the less drafts are worth.",
        (Target(ratio("tasc_row_steps_total", "tasc_verify_steps_total"), "{{task}}"),),
    ),
)

_ACCEPTANCE = (
    Panel(
        "Acceptance rate by draft position",
        "percentunit",
        "Drafts accepted at a position / drafts that reach it. A draft that ends earlier counts in"
        " neither; positions that no draft reached show nothing.",
        "Falls off early: raise min_prob or shorten drafts (num_speculative_tokens); `tasc tune`"
        " weighs it.",
        (Target(_at_position("task, position"), "{{task}} {{position}}"),),
        width=12,
        most=1,
    ),
    Panel(
        "Acceptance rate by position over time",
        "percentunit",
        "As on the left, of all chosen tasks together: a row is a draft position from 00.",
        "A column that turns pale at one moment: something changed then, an index or the input."
        " Pale rows at the top only: drafts are longer than what pays.",
        (
            Target(
                f'label_replace({_at_position("position")}, "position", "0$1", "position", "(.)")',
                "{{position}}",
            ),
        ),
        kind="cells",
        width=12,
        most=1,
    ),
    Panel(
        "Acceptance rate by source",
        "percentunit",
        "Accepted / drafted tokens of one source: the task's corpus, this request's prompt and"
        " answer so far, similar rows' outputs, ... A token counts for its largest contributor.",
        "The corpus alone falls: refresh the index. All fall: the model or its template changed.",
        (
            Target(
                f"{rate(ACCEPTED, 'task, source')} / ({rate(DRAFTED, 'task, source')} > 0)",
                "{{task}} {{source}}",
            ),
        ),
        width=12,
        most=1,
    ),
    Panel(
        "Draft tokens by source",
        "short",
        "Tokens proposed per second, accepted or not.",
        "A source with many tokens and low acceptance costs time: `tasc tune`, or leave it out.",
        (Target(rate(DRAFTED, "task, source"), "{{task}} {{source}}"),),
        width=12,
    ),
)

_COST = (
    Panel(
        "Coverage over time",
        "percentunit",
        "Row-steps with a non-empty draft / all row-steps.",
        "Falls: see why rows go without a draft.",
        (Target(_COVERAGE, "{{task}}"),),
        most=1,
    ),
    Panel(
        "Why rows go without a draft",
        "percentunit",
        "Steps that drafting sat out since those before did not pay, and drafts that failed, each /"
        " verify steps; replicas without an index / replicas.",
        "Sat out: right under full batches; else drafts miss, so refresh the index. Failed: the"
        " replica's log has the error. No index: build one for this tokenizer. None of them, and"
        " low coverage: min_prob is high, or requests ask for no drafts.",
        (
            Target(
                ratio("tasc_drafting_paused_steps_total", "tasc_verify_steps_total"),
                "sat out {{task}}",
            ),
            Target(
                ratio("tasc_draft_failures_total", "tasc_verify_steps_total"), "failed {{task}}"
            ),
            Target(f"1 - ({_INDEXED} / {_REPLICAS} or 0 * {_REPLICAS})", "no index {{task}}"),
        ),
    ),
    Panel(
        "Drafting time / verify time",
        "percentunit",
        "Seconds spent proposing / seconds in the target's forward.",
        "Over a fifth: fewer neighbours, shorter drafts, or a smaller index.",
        (Target(ratio("tasc_draft_seconds_sum", "tasc_verify_seconds_sum"), "{{task}}"),),
    ),
    Panel(
        "Real steps / step costs",
        "percentunit",
        "By how much forwards take longer or shorter than the step costs that drafts are bought by:"
        " the replica that is furthest off. A tenth or two is noise; 0 without step costs.",
        "Over a third for minutes: the machine does other work, or less than when costs were"
        " measured. Costs follow real steps by themselves; nothing but time is lost meanwhile.",
        (Target(f"max by (task) (tasc_step_cost_error_ratio{OWN})", "{{task}}"),),
    ),
)

_NEURAL = (
    Panel(
        "Tokens a drafter drafts from",
        "short",
        "Size of the vocabulary that the drafter's head works with, of each drafted step and row:"
        " its mean, and what 95% of them stay below.",
        "As large as the tokenizer: draft from recent or ranked tokens (--draft-vocabulary), if"
        " drafting takes long. Much smaller than answers need: acceptance by source falls.",
        (
            Target(mean("tasc_active_vocabulary_tokens"), "mean {{task}}"),
            Target(quantile(0.95, "tasc_active_vocabulary_tokens"), "95% {{task}}"),
        ),
        width=12,
    ),
    Panel(
        "Drafters switched off",
        "short",
        "Replicas whose drafter was switched off until a restart: failed, it raised again and"
        " again; slow, its steps took longer than engine.neural_draft_limit_s.",
        "Any: the replica's log has the error, or the seconds. Change or unset the task's drafter,"
        " which starts new replicas; requests go on meanwhile.",
        (Target(f"sum by (task, reason) (tasc_neural_drafting_off{OWN})", "{{reason}} {{task}}"),),
        width=12,
    ),
)

_LOSSLESS = (
    Panel(
        "Shadow checks",
        "short",
        "Drafted answers per second that were decoded again without drafts and compared; and those"
        " chosen but not checked: queue full, too old before a row was idle, or failed.",
        "None: shadow.sample_rate is 0. Mostly dropped: no row is ever idle; lower"
        " shadow.sample_rate. failed: see the replica's log.",
        (
            Target(rate("tasc_lossless_checks_total"), "checked {{task}}"),
            Target(
                rate("tasc_lossless_checks_dropped_total", "task, reason"), "{{reason}} {{task}}"
            ),
        ),
    ),
    Panel(
        "Answers that differ without drafts",
        "short",
        "Shadow checks that found another answer: near_tie where two tokens are as likely as"
        " rounding can tell, real otherwise.",
        "real: a fault. Turn drafting off for the task (num_speculative_tokens: 0) and report what"
        " the replica's log says of it. near_tie: float32 has fewest.",
        (Target(rise("tasc_lossless_mismatches_total", "task, kind"), "{{kind}} {{task}}"),),
    ),
    Panel(
        "Tokens per step by index version",
        "short",
        "What each version of the draft index brings while it is in use.",
        "A new version brings less: go back with `tasc index use TASK VERSION`, and look at the"
        " rows that it was built from.",
        (Target(_BY_VERSION, "{{task}} {{model_name}} {{version}}"),),
    ),
)

DRAFTING = Dashboard(
    uid="tasc-drafting",
    title="tasc-serve / Drafting",
    about="Whether drafting pays, why it does not, and that it changes no answer.",
    sections=(
        Section("Does it pay?", _PAYS),
        Section("Acceptance", _ACCEPTANCE),
        Section("What it costs, and why it is off", _COST),
        Section("Drafting by a model", _NEURAL),
        Section("Lossless, and index versions", _LOSSLESS),
    ),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
