"""The dashboard "tasc-serve / Latency": how long answers take and where the time goes."""

from panels import Dashboard, Panel, Target, Variable

_OWN = '{task=~"$task", model_name=~"$model_name"}'
_TASK = '{task=~"$task"}'  # the gateway knows the task, not the model
_RATE = "[$__rate_interval]"


def _quantile(q: float, metric: str) -> str:
    buckets = f"sum by (le, task) (rate({metric}_bucket{_OWN}{_RATE}))"
    return f"histogram_quantile({q}, {buckets})"


def _quantiles(title: str, metric: str, about: str) -> Panel:
    targets = tuple(
        Target(_quantile(q, metric), f"p{q * 100:.0f} {{{{task}}}}") for q in (0.5, 0.95, 0.99)
    )
    return Panel(title, "s", about, targets)


def _mean(metric: str) -> str:
    total = f"sum by (task) (rate({metric}_sum{_OWN}{_RATE}))"
    return f"{total} / sum by (task) (rate({metric}_count{_OWN}{_RATE}))"


_REQUESTS = (
    Panel(
        "Requests by status",
        "reqps",
        "HTTP answers per second at the gateways. Task '-': the request named no served task.",
        (
            Target(
                f'sum by (task, code) (rate(tasc_http_requests_total{{task=~"$task|-"}}{_RATE}))',
                "{{task}} {{code}}",
            ),
        ),
    ),
    Panel(
        "Finished requests by reason",
        "reqps",
        "stop: end-of-sequence or a stop string; length: max_tokens.",
        (
            Target(
                f"sum by (task, finished_reason) (rate(tasc_request_success_total{_OWN}{_RATE}))",
                "{{task}} {{finished_reason}}",
            ),
        ),
    ),
    Panel(
        "Running and waiting",
        "short",
        "Requests that hold a row of a batch, and requests in the replicas' queues.",
        (
            Target(f"sum by (task) (tasc_num_requests_running{_OWN})", "running {{task}}"),
            Target(f"sum by (task) (tasc_num_requests_waiting{_OWN})", "waiting {{task}}"),
        ),
    ),
)

_TIMES = (
    _quantiles(
        "End to end in the replica",
        "tasc_e2e_request_latency_seconds",
        "From a request's arrival in the engine to the end of its answer.",
    ),
    _quantiles(
        "Time to first token",
        "tasc_time_to_first_token_seconds",
        "From a request's arrival in the engine to its first token.",
    ),
    _quantiles(
        "Inter-token latency",
        "tasc_inter_token_latency_seconds",
        "The gap between two chunks divided by the tokens of the later one, once per token.",
    ),
    _quantiles(
        "Queue time",
        "tasc_request_queue_time_seconds",
        "From a request's arrival in the engine to a free row.",
    ),
    Panel(
        "End to end at the gateway",
        "s",
        "First byte of the request to last byte of the answer, the service's own hops included.",
        tuple(
            Target(
                f"histogram_quantile({q}, sum by (le, task)"
                f" (rate(tasc_http_request_seconds_bucket{_TASK}{_RATE})))",
                f"p{q * 100:.0f} {{{{task}}}}",
            )
            for q in (0.5, 0.95, 0.99)
        ),
    ),
    Panel(
        "Time per step",
        "s",
        "Mean seconds of one step for the whole batch: drafting, the target's forward, and asking "
        "guides what may come; a slow schema shows in the last.",
        (
            Target(_mean("tasc_draft_seconds"), "draft {{task}}"),
            Target(_mean("tasc_verify_seconds"), "verify {{task}}"),
            Target(_mean("tasc_guide_seconds"), "guides {{task}}"),
        ),
    ),
)

_REST = (
    Panel(
        "Step time, p99",
        "s",
        "99th percentile of one step for the whole batch.",
        (
            Target(_quantile(0.99, "tasc_draft_seconds"), "draft {{task}}"),
            Target(_quantile(0.99, "tasc_verify_seconds"), "verify {{task}}"),
        ),
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        "Part of the cache that requests hold for their longest answers; the fullest replica.",
        (Target(f"max by (task) (tasc_kv_cache_usage_ratio{_OWN})", "{{task}}"),),
        most=1,
    ),
    Panel(
        "Prompt and generation tokens",
        "short",
        "Tokens per second: prompt tokens that entered the cache, and emitted tokens.",
        (
            Target(f"sum by (task) (rate(tasc_prompt_tokens_total{_OWN}{_RATE}))", "in {{task}}"),
            Target(
                f"sum by (task) (rate(tasc_generation_tokens_total{_OWN}{_RATE}))", "out {{task}}"
            ),
        ),
    ),
    Panel(
        "Prompt tokens not computed again",
        "percentunit",
        "Prompt tokens copied from a beginning that another prompt had / all prompt tokens.",
        (
            Target(
                f"sum by (task) (rate(tasc_prefix_cache_hits_total{_OWN}{_RATE}))"
                f" / (sum by (task) (rate(tasc_prefix_cache_hits_total{_OWN}{_RATE}))"
                f" + sum by (task) (rate(tasc_prompt_tokens_total{_OWN}{_RATE})))",
                "{{task}}",
            ),
        ),
        most=1,
    ),
    Panel(
        "End to end, all requests",
        "s",
        "Requests per bucket of end-to-end time; a second band is a second kind of request.",
        (
            Target(
                f"sum by (le) (increase(tasc_e2e_request_latency_seconds_bucket{_OWN}{_RATE}))",
            ),
        ),
        kind="heatmap",
        width=24,
    ),
)

LATENCY = Dashboard(
    uid="tasc-latency",
    title="tasc-serve / Latency",
    about="How long answers take, and where the time goes.",
    panels=(*_REQUESTS, *_TIMES, *_REST),
    variables=(
        Variable("task", "tasc_verify_steps_total"),
        Variable("model_name", "tasc_verify_steps_total"),
    ),
)
