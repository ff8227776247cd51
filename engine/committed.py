"""The result of a step, once it is committed: what is left to do is its outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.request import Request
from engine.runner.result import StepResult
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler

__all__ = ["CommittedStep", "commit"]


@dataclass(frozen=True)
class CommittedStep:
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
    time: float = field(default_factory=time.monotonic)


def commit(scheduler: Scheduler, output: ScheduleOutput, result: StepResult) -> CommittedStep:
    """Commit the oldest step to the scheduler.

    The results of requests that end inside their accepted drafts are cut there.
    """
    failed = {r: why for r, why in result.failed.items() if not r.is_finished}
    for request, why in failed.items():
        scheduler.finish_request(request, "error", stop_reason=why)
    lengths = {}
    if output.num_draft_tokens:
        lengths = {request: request.num_output_tokens for request in result.token_ids}
    finished = scheduler.commit(output, result.token_ids)
    for request in lengths.keys() & finished:
        result.keep(request, request.num_output_tokens - lengths[request])
    return CommittedStep(result, (*finished, *failed))
