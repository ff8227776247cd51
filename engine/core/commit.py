"""The result of a step, once it is committed: what is left to do is its outputs."""

from __future__ import annotations

import time
from typing import NamedTuple

from engine.request import Request
from engine.runner.result import StepResult
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler

__all__ = ["CommittedStep", "commit"]


class CommittedStep(NamedTuple):
    """A step whose tokens are appended to its requests, but not yet to their output streams.

    Attributes
    ----------
    result : StepResult
    ended : tuple of Request
        Those that it finished, or that failed in it.
    time : float
        When its tokens arrived, in seconds on the monotonic clock.
    """

    result: StepResult
    ended: tuple[Request, ...]
    time: float


def commit(scheduler: Scheduler, output: ScheduleOutput, result: StepResult) -> CommittedStep:
    """Commit the oldest step to the scheduler.

    The results of requests that end inside their accepted drafts are cut there.
    """
    failed = [r for r in result.failed if not r.is_finished]
    for request in failed:
        scheduler.finish_request(request, "error", stop_reason=result.failed[request])
    finished = scheduler.commit(output, result.token_ids)
    if finished and output.num_draft_tokens:
        lengths = {s.request: s.num_reached_tokens for s in output.sequences}
        for request in finished:
            result.keep(request, request.num_known_tokens - lengths[request])
    return CommittedStep(result, (*finished, *failed), time.monotonic())
