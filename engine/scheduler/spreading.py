"""Spread decodes over the pipeline stages' concurrent steps."""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import Request

__all__ = ["requests_not_due"]


def requests_not_due(running: Iterable[Request], num_groups: int) -> set[Request]:
    """Return the running requests to leave out of the next step.

    A request is left out if its last token is not known yet, because the first stage needs it. Of
    the other decoding requests all but the first few are left out, so that each of `num_groups`
    steps in flight gets equally many. Prefills never are: a chunk may follow another in flight.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=9, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> requests = [Request(f"r{i}", [1, 2], rules) for i in range(4)]
    >>> for request in requests:
    ...     request.num_computed_tokens = 1
    >>> sorted(r.request_id for r in requests_not_due(requests, 2))
    ['r2', 'r3']
    """
    pending: set[Request] = set()
    ready: list[Request] = []
    for request in running:
        if request.num_pending_tokens:
            pending.add(request)
        elif request.num_tokens - request.num_computed_tokens == 1:
            ready.append(request)
    most = -(-(len(pending) + len(ready)) // num_groups)
    return pending.union(ready[most:])
