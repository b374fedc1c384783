"""Computes how many replicas a task needs, from the requests that its replicas hold.

Serve counts only calls over its own handles. Our calls use separate connections, so replicas report
the number of their requests as a custom metric.
"""

from typing import Any

OUTSTANDING = "tasc_outstanding"


def replicas_needed(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns how many replicas would hold ``target_ongoing_requests`` each.

    Serve calls this in its controller, and applies bounds, delays and factors to the result.

    Args:
        context: Serve's `AutoscalingContext`.
    """
    held = (context.aggregated_metrics or {}).get(OUTSTANDING, {})
    return sum(held.values()) / context.config.get_target_ongoing_requests(), {}
