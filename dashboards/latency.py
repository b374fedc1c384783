"""The dashboard "tasc-serve / Service latency": whether answers come, how fast, and what delays.

Its last section shows how texts are classified.
"""

from panels import Dashboard, Panel, Section, Target, Variable
from queries import OWN, TASK, mean, quantile, rate, ratio, rise, share

_HTTP = "tasc_http_requests_total"


def _quantiles(title: str, histogram: str, about: str, wrong: str, where: str = OWN) -> Panel:
    targets = tuple(
        Target(quantile(q, histogram, where), f"p{q * 100:.0f} {{{{task}}}}")
        for q in (0.5, 0.95, 0.99)
    )
    return Panel(title, "s", about, wrong, targets)


def _share(codes: str) -> str:
    """Share of a task's answers that have one of ``codes``."""
    refused = rate(_HTTP, "task, code", f'{{task=~"$task", code=~"{codes}"}}')
    return f"{refused} / ignoring (code) group_left {rate(_HTTP, where=TASK)}"


_REQUESTS = (
    Panel(
        "Requests by status",
        "reqps",
        "HTTP answers per second at the gateways. Task '-': the request named no served task.",
        "Many 4xx: a client asks for what is not served; the answer's text says what. None at all:"
        " look at the load balancer, then at /readyz.",
        (Target(rate(_HTTP, "task, code", '{task=~"$task|-"}'), "{{task}} {{code}}"),),
    ),
    Panel(
        "Share of 503 and 504",
        "percentunit",
        "Answers with 503 (queues full, or no replica answers) or 504 (out of time) / all answers.",
        "503 with full queues, or 504 with a long queue time: add replicas, or limit the task or"
        " its keys. 503 with fewer replicas seen: look at the replicas' logs.",
        (Target(_share("503|504"), "{{task}} {{code}}"),),
    ),
    Panel(
        "Rate-limited requests",
        "reqps",
        "Requests per second answered 429, by whose limit they met: the key's or the task's.",
        "Fine where one client asks too much. Where all do, raise max_requests_per_s of the task,"
        " or the key's limits, if there is capacity.",
        (Target(rate("tasc_rate_limited_total", "task, limit", TASK), "{{task}} {{limit}}"),),
    ),
    Panel(
        "Ignored messages",
        "short",
        "Messages per second of answered requests that the task's format string has no place for.",
        "Clients send system messages or earlier turns that the model never sees: give the task its"
        " model's chat template, or have clients send the input alone.",
        (Target(rate("tasc_ignored_messages_total", where=TASK), "{{task}}"),),
    ),
    Panel(
        "Finished requests by reason",
        "reqps",
        "stop: end-of-sequence or a stop string; length: max_tokens.",
        "Mostly length where answers should end by themselves: raise max_tokens, or look whether"
        " clients use the chat template that the model was trained with.",
        (
            Target(
                rate("tasc_request_success_total", "task, finished_reason"),
                "{{task}} {{finished_reason}}",
            ),
        ),
    ),
    Panel(
        "Running and waiting",
        "short",
        "Requests that hold a row of a batch, and requests in the replicas' queues.",
        "Waiting that does not go down: add replicas, or rows where memory allows it. Waiting with"
        " nothing running: the step loop stands still; see the replicas' logs.",
        (
            Target(f"sum by (task) (tasc_num_requests_running{OWN})", "running {{task}}"),
            Target(f"sum by (task) (tasc_num_requests_waiting{OWN})", "waiting {{task}}"),
        ),
    ),
    Panel(
        "Prompt and generation tokens",
        "short",
        "Tokens per second: prompt tokens that entered the cache, and emitted tokens.",
        "Fewer out at the same number of requests running: see time per step here and block"
        " efficiency under Drafting.",
        (
            Target(rate("tasc_prompt_tokens_total"), "in {{task}}"),
            Target(rate("tasc_generation_tokens_total"), "out {{task}}"),
        ),
    ),
)

_GATEWAY, _REPLICAS = "tasc_http_request_duration_seconds_sum", "tasc_http_replica_seconds_sum"
_ENGINE, _QUEUE = "tasc_e2e_request_latency_seconds_sum", "tasc_request_queue_time_seconds_sum"
_ANSWERED = "tasc_http_replica_seconds_count"
_PARTS = Panel(
    "Where a request's time goes",
    "s",
    "Mean seconds that a generating request spends in each part; together they are its whole time."
    " proxy: from HAProxy to the gateway; gateway: reading, checks, writing; connection: to the"
    " replica and back, and admission there; queue: until a row is free; engine: prefill and steps."
    " Answers of one request that run side by side (n, lists of prompts) count one after another.",
    "proxy or gateway grow: more gateways (http.gateways), or CPU for them. queue grows: add"
    " replicas. engine grows: see time per step and Drafting.",
    (
        Target(
            f"{rate('tasc_http_proxy_seconds_sum', where=TASK)}"
            f" / {rate('tasc_http_proxy_seconds_count', where=TASK)}",
            "proxy {{task}}",
        ),
        Target(share(_GATEWAY, _REPLICAS, _ANSWERED), "gateway {{task}}"),
        Target(share(_REPLICAS, _ENGINE, _ANSWERED), "connection {{task}}"),
        Target(f"{rate(_QUEUE, where=TASK)} / {rate(_ANSWERED, where=TASK)}", "queue {{task}}"),
        Target(share(_ENGINE, _QUEUE, _ANSWERED), "engine {{task}}"),
    ),
    width=24,
    stacked=True,
)
_TIMES = (
    _PARTS,
    _quantiles(
        "End to end at the gateway",
        "tasc_http_request_duration_seconds",
        "First byte of the request to last byte of the answer, the service's own hops included.",
        "Much above the time in the replica: gateways lack CPU; raise http.gateways.",
        TASK,
    ),
    _quantiles(
        "End to end in the replica",
        "tasc_e2e_request_latency_seconds",
        "From a request's arrival in the engine to the end of its answer.",
        "See which part grew: queue time, time to first token, or inter-token latency.",
    ),
    _quantiles(
        "Queue time",
        "tasc_request_queue_time_seconds",
        "From a request's arrival in the engine to a free row.",
        "Add replicas, or raise engine.rows; a full KV cache holds requests back as well.",
    ),
    _quantiles(
        "Time to first token",
        "tasc_time_to_first_token_seconds",
        "From a request's arrival in the engine to its first token.",
        "Without queue time: prompts are long, or share no beginning; see prompt tokens not"
        " computed again.",
    ),
    _quantiles(
        "Inter-token latency",
        "tasc_inter_token_latency_seconds",
        "The gap between two chunks divided by the tokens of the later one, once per token.",
        "Too many rows for one machine, other processes on its cores, or drafts that are accepted"
        " less: see time per step and Drafting.",
    ),
    Panel(
        "End to end, all requests",
        "s",
        "Requests per bucket of end-to-end time.",
        "A second band is a second kind of request; a band that wanders upwards is load.",
        (Target(rise("tasc_e2e_request_latency_seconds_bucket", "le"), "{{le}}"),),
        kind="buckets",
    ),
)

_STEPS = (
    Panel(
        "Time per step",
        "s",
        "Mean seconds of one step for the whole batch: drafting, the target's forward, and asking"
        " guides what may come.",
        "Forwards: fewer rows, or fewer processes on the machine's cores. Guides: a schema is slow;"
        " make it simpler.",
        (
            Target(mean("tasc_draft_seconds"), "draft {{task}}"),
            Target(mean("tasc_verify_seconds"), "verify {{task}}"),
            Target(mean("tasc_guide_seconds"), "guides {{task}}"),
        ),
        width=6,
    ),
    Panel(
        "Step time, p99",
        "s",
        "99th percentile of one step for the whole batch.",
        "Far above the mean: something else takes the CPU or GPU at times.",
        (
            Target(quantile(0.99, "tasc_draft_seconds"), "draft {{task}}"),
            Target(quantile(0.99, "tasc_verify_seconds"), "verify {{task}}"),
        ),
        width=6,
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        "Part of the cache that requests hold for their longest answers; the fullest replica.",
        "Near 100% while requests wait: raise engine.kv_cache_bytes, or lower max_tokens.",
        (Target(f"max by (task) (tasc_kv_cache_usage_ratio{OWN})", "{{task}}"),),
        width=6,
        most=1,
    ),
    Panel(
        "Prompt tokens not computed again",
        "percentunit",
        "Prompt tokens copied from a beginning that another prompt had / all prompt tokens.",
        "Low though prompts begin alike: raise engine.prefix_cache_bytes; 0 is right for prompts"
        " that share nothing.",
        (
            Target(
                f"{rate('tasc_prefix_cache_hits_total')} / ({rate('tasc_prefix_cache_hits_total')}"
                f" + {rate('tasc_prompt_tokens_total')})",
                "{{task}}",
            ),
        ),
        width=6,
        most=1,
    ),
)

_FAILOVER = (
    Panel(
        "Replicas seen",
        "short",
        "Replicas of a task that answered a gateway lately; the gateway that sees fewest.",
        "Fewer than configured for over a minute: see `ray status` and the replicas' logs. Up and"
        " down: replicas die and come back, by memory or a node that is cut off.",
        (Target(f"min by (task) (tasc_replicas_reachable{TASK})", "{{task}}"),),
        width=6,
    ),
    Panel(
        "Replicas by version of the task",
        "short",
        "Replicas whose new requests are answered by a version of the task's record. Requests go to"
        " the newest that has a place.",
        "Two versions for minutes: a rolling update has not ended, since new replicas do not start"
        " (`serve status`), or the application must be deployed again (the replica's log). Those of"
        " the newest version bear the load alone.",
        (
            Target(
                f'count_values by (task) ("version", tasc_record_version{OWN})',
                "{{task}} v{{version}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Failovers by cause",
        "short",
        "Requests brought to another replica: their own died, fell silent or had a broken engine;"
        " and refused, those that were lost too often or over the budget, and got 503.",
        "died: out of memory or a lost node. silent: a machine without CPU, or cut off. broken: the"
        " replica's log has the error. refused: see failover in the settings.",
        (
            Target(rise("tasc_failovers_total", "task, reason", TASK), "{{reason}} {{task}}"),
            Target(rise("tasc_failovers_refused_total", where=TASK), "refused {{task}}"),
        ),
        width=6,
    ),
    Panel(
        "Time of failover",
        "s",
        "From the loss of a replica to the next piece of an answer: the pause that a client sees."
        " The part before the loss was noticed, up to failover.heartbeat_timeout_s, comes on top.",
        "Long: the replicas that are left are full, or none is left and requests wait for a new"
        " one; keep at least two replicas of a task.",
        tuple(
            Target(quantile(q, "tasc_failover_seconds", TASK), f"p{q * 100:.0f} {{{{task}}}}")
            for q in (0.5, 0.99)
        ),
        width=6,
    ),
)

# Each classification has one confidence, with or without a label.
_CLASSIFIED = "tasc_classification_confidence_count"
_NO_LABEL = ratio("tasc_classifications_abstained_total", _CLASSIFIED)
_LABELS = (
    f"{rate('tasc_classifications_total', 'task, label')}"
    f" / ignoring (label) group_left {rate(_CLASSIFIED)}"
)
# Recorded by deploy/rules.yml.
_DRIFT = "task_label:tasc_label_drift:psi_increase1h"
_NOW = "task_label:tasc_classifications:share_increase1h"
_CORPUS = "task_label:tasc_corpus_label_rows:share"
_DRIFTING = f"and on (task, label) {_DRIFT} > 0.02"
_CLASSIFICATION = (
    Panel(
        "Label shares",
        "percentunit",
        "Classifications with a label / all classifications of the task; no label: the likeliest"
        " was not probable enough. Shares of a task add up to 100%. The 50 commonest labels of the"
        " corpus have names, or without a corpus the first 50 that a replica answers with. The rest"
        " is other; labels that are in a request only are from_request.",
        "A share moves and stays: compare it with the corpus and with that of a week before, and"
        " read some texts. If they are as before, the model, the prompt or the labels have changed."
        " other moves at restarts: there are over 50 labels and no draft index with rows of them.",
        (
            Target(_LABELS, "{{label}} {{task}}"),
            Target(_NO_LABEL, "no label {{task}}"),
        ),
        width=12,
        most=1,
    ),
    Panel(
        "Abstentions",
        "percentunit",
        "Classifications without a label, since the likeliest had a probability below abstain_below"
        " / all classifications. 0 if neither the task nor a request sets it.",
        "Rises while confidence falls: texts come that no label fits; add a label, or fine-tune the"
        " model on them. Rises alone: the task or a client raised abstain_below.",
        (Target(_NO_LABEL, "{{task}}"),),
        width=12,
    ),
    Panel(
        "Confidence",
        "percentunit",
        "Probability of the likeliest label, abstentions included: its mean, and what 10% of"
        " classifications stay below (p10). A calibrated task has calibrated probabilities.",
        "Both fall: new kinds of texts, or labels that mean almost the same. p10 alone: one kind of"
        " texts is unclear. A jump at a change of the model, the prompt or the labels is expected;"
        " choose abstain_below anew.",
        (
            Target(mean("tasc_classification_confidence"), "mean {{task}}"),
            Target(quantile(0.1, "tasc_classification_confidence"), "p10 {{task}}"),
        ),
        width=12,
        most=1,
    ),
    Panel(
        "Label drift",
        "short",
        "Population stability index of the labels of the last hour against those of the draft"
        " index's corpus, by deploy/rules.yml: 0 if all shares are equal, and the alert's line at"
        " 0.2. It needs 500 classifications in the hour, and 20 of them and 20 rows for each label."
        " Tasks without choices, or without prompts in their index, have none.",
        "Over the line: see which labels drift, and read texts that get them. New kinds of texts:"
        " add rows to the corpus, fine-tune, calibrate. The same texts: the model, the prompt or"
        " the labels have changed. Up and down each day: texts have a daily rhythm; take a longer"
        " window in rules.yml.",
        (Target(f"sum by (task) ({_DRIFT}{TASK})", "{{task}}"), Target("vector(0.2)", "alert")),
        width=12,
    ),
    Panel(
        "Labels that drift",
        "percentunit",
        "Share of each label that brings over 0.02 to the label drift: of the last hour's"
        " classifications that have a label of the task, and of the corpus's rows with a label.",
        "One label grows: read texts that get it. other grows: rare labels are no longer rare, or"
        " texts are new. A label that the corpus lacks: build the index again, with rows of it.",
        (
            Target(f"{_NOW}{TASK} {_DRIFTING}", "{{label}} {{task}}"),
            Target(f"{_CORPUS}{TASK} {_DRIFTING}", "{{label}} {{task}} in the corpus"),
        ),
        width=12,
        most=1,
    ),
    Panel(
        "Forward passes per classification",
        "short",
        "Forwards of the target until the labels of one text are scored, the last one of the prompt"
        " included: their mean, and what 95% of classifications do not exceed (p95), rounded up.",
        "Many: raise tolerance, lower max_steps, or leave exact out; labels of fewer tokens need"
        " fewer. Classifications that end at max_steps may have an unseen_mass above tolerance.",
        (
            Target(mean("tasc_classification_steps"), "mean {{task}}"),
            Target(f"ceil({quantile(0.95, 'tasc_classification_steps')})", "p95 {{task}}"),
        ),
        width=12,
    ),
)

LATENCY = Dashboard(
    uid="tasc-latency",
    title="tasc-serve / Service latency",
    about="Whether answers come, how long they take, where the time goes, and which labels texts"
    " get.",
    sections=(
        Section("Requests", _REQUESTS),
        Section("Times", _TIMES),
        Section("Steps and memory", _STEPS),
        Section("Replicas and failover", _FAILOVER),
        Section("Classification", _CLASSIFICATION),
    ),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
