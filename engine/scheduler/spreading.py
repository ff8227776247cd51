"""Spread decodes over the pipeline stages' concurrent steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.request import Request
from engine.scheduler.output import ScheduleOutput

__all__ = ["chained_not_due", "requests_not_due"]


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


def chained_not_due(
    running: Iterable[Request], num_groups: int, in_flight: Sequence[ScheduleOutput]
) -> set[Request]:
    """Return the running requests to leave out of the next step, if the device has their last ids.

    A step may then follow one that has not been read, so as many groups as stages keep all stages
    at work. A request is left out if two of its steps have not been read, or one, if the host needs
    its ids. Of the others, those of the last ``num_groups - 1`` steps are left out, whose groups
    take turns with this one, unless nobody else is due; and all but the first few of the rest, so
    that groups get equally large.

    Parameters
    ----------
    running : iterable of Request
    num_groups : int
        At least 2.
    in_flight : sequence of ScheduleOutput
        Steps not yet read, oldest first.
    """
    others = in_flight[1 - num_groups :]
    in_others = {sequence.request for output in others for sequence in output.sequences}
    left_out: set[Request] = set()
    due: list[Request] = []
    of_others: list[Request] = []
    for request in running:
        most_pending = 0 if request.spec.needs_host_ids else 1
        if request.num_pending_tokens > most_pending:
            left_out.add(request)
        elif request.num_tokens - request.num_computed_tokens == 1:
            (of_others if request in in_others else due).append(request)
    most = -(-(len(left_out) + len(due) + len(of_others)) // num_groups)
    if not due:
        return left_out.union(of_others[most:])
    return left_out.union(of_others, due[most:])
