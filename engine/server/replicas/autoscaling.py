"""Custom autoscaling policy for Ray Serve, which cannot count requests that bypass it.

Ray copies this module to its controller, so it must not import the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["METRIC", "num_replicas", "replicas_by_requests"]

METRIC = "unfinished_requests"


def num_replicas(num_requests: Iterable[float], target: float) -> int:
    """Return the number of replicas needed for a mean of at most `target` requests each.

    Parameters
    ----------
    num_requests : iterable of float
        Mean number of unfinished requests per replica.
    target : float

    Examples
    --------
    >>> num_replicas([150.0, 60.5], target=100), num_replicas([], target=100)
    (3, 0)
    """
    return math.ceil(sum(num_requests) / target)


def replicas_by_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas, and no state; Ray Serve applies bounds and delays."""
    found = (context.aggregated_metrics or {}).get(METRIC, {})
    return num_replicas(found.values(), context.config.target_ongoing_requests), {}
