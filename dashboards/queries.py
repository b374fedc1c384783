"""Queries that several dashboards ask in the same way. It knows no dashboard."""

from typing import Final

OWN: Final = '{task=~"$task", model_name=~"$model_name"}'
TASK: Final = '{task=~"$task"}'  # a gateway knows the task, not the model
RATE: Final = "[$__rate_interval]"
_SPEC: Final = "tasc_spec_decode_num_"
DRAFTS: Final = _SPEC + "drafts_total"
DRAFTED: Final = _SPEC + "draft_tokens_total"
ACCEPTED: Final = _SPEC + "accepted_tokens_total"
REACHED_AT: Final = _SPEC + "drafts_per_pos_total"
ACCEPTED_AT: Final = _SPEC + "accepted_tokens_per_pos_total"


def rate(metric: str, by: str = "task", where: str = OWN) -> str:
    """A counter's rise per second, summed over processes."""
    return f"sum by ({by}) (rate({metric}{where}{RATE}))"


def rise(metric: str, by: str = "task", where: str = OWN) -> str:
    """A counter's rise over the drawn interval: for what is rare."""
    return f"sum by ({by}) (increase({metric}{where}{RATE}))"


def ratio(above: str, below: str, by: str = "task") -> str:
    """A ratio of sums, which is no mean of ratios."""
    return f"{rate(above, by)} / {rate(below, by)}"


def share(above: str, below: str, of: str, by: str = "task") -> str:
    """What is in ``above`` and not in ``below``, by one of ``of``; at least 0."""
    difference = f"{rate(above, by, TASK)} - {rate(below, by, TASK)}"
    return f"clamp_min({difference}, 0) / {rate(of, by, TASK)}"


def mean(histogram: str) -> str:
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantile(q: float, histogram: str, where: str = OWN) -> str:
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le, task', where)})"
