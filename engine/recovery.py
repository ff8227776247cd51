"""What happens when a step fails: it is undone, and the request to blame is found.

This stands beside `LLMEngine.step`, which asks three things of it: whom to leave out of the next
step (`excluded`), what to do about an error (`undo`), and to note the steps that came back
(`note_success`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from engine.errors import EngineError, OutOfMemoryError, StepTimeoutError
from engine.fault_bisection import FaultBisection
from engine.request import Request
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler

__all__ = ["StepRecovery"]

_LOG = logging.getLogger("engine")


class StepRecovery:
    """Undoes failed steps, and finds out which request makes them fail.

    A step that raises is rolled back: its requests return to the queue and are computed again. If
    that fails too, they are computed in ever smaller groups (`FaultBisection`) until the one to
    blame fails alone; the others go on.

    Parameters
    ----------
    scheduler : Scheduler
    runner : ModelRunner
    is_debug : bool
        Raise the errors of the engine's own checks once the step is undone, instead of taking them
        for a passing fault.

    Attributes
    ----------
    num_failures : int
        Steps that raised and were undone.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, is_debug: bool) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self._runner = runner
        self._is_debug = is_debug
        self._bisection = FaultBisection()
        self._has_just_failed = False
        self._abandoned: list[LaunchedStep] = []

    @property
    def is_bisecting(self) -> bool:
        """Tell whether each step must be read before the next one is launched."""
        return self._bisection.is_active

    @property
    def num_suspects(self) -> int:
        """Requests that were in a failing step and did not get beyond that point since."""
        return self._bisection.num_suspects

    def excluded(self) -> Iterator[set[Request]]:
        """Yield whom to leave out of the next step, in the order to be tried.

        While a fault is bisected: all but one group. A group may lack blocks that others hold, so
        after the groups come all that are in none of them, and at last everybody, because then
        something always fits.
        """
        if self._bisection.is_active:
            everybody = set(self._scheduler.unfinished_requests())
            groups = list(self._bisection.groups())
            for group in groups:
                yield everybody.difference(group)
            yield set().union(*groups)
        yield set()

    def undo(
        self, outputs: Sequence[ScheduleOutput], error: BaseException
    ) -> tuple[Request, str] | None:
        """Roll back `outputs`, newest first, because the last of them raised `error`.

        Returns
        -------
        (request, reason) or None
            The request to blame, if it is known now; it is for the caller to end it.

        Raises
        ------
        BaseException
            `error`, if it is an interrupt, a timeout, a failed check in debug mode, or would
            come again for ever.
        """
        for output in outputs:
            self._scheduler.rollback(output)
            self._runner.release([s.request for s in output.sequences])
        failed = outputs[-1]
        if not isinstance(error, StepTimeoutError):
            self._runner.recover()
        if self._is_to_be_raised(error) or (self._has_just_failed and not failed.sequences):
            raise error
        self.num_failures += 1
        self._has_just_failed = True
        # The trace is logged once: bisection repeats the failure for every group.
        trace = None if self._bisection.is_active else error
        _LOG.warning("step %d failed and is undone: %r", failed.step_id, error, exc_info=trace)
        guilty = self._bisection.note_failure(failed.sequences)
        if guilty is None:
            return None
        return guilty, f"the step failed twice: {type(error).__name__}: {error}"

    def abandon(self, steps: Sequence[LaunchedStep]) -> None:
        """Keep steps that are undone although the device may not have finished them.

        SAFETY: it may still read and write the host memory that they hold.
        """
        self._abandoned += steps

    def note_success(self, output: ScheduleOutput) -> None:
        """Note that a step came back; abandoned ones were before it on the stream."""
        self._has_just_failed = False
        self._abandoned.clear()
        if self._bisection.num_suspects:
            self._bisection.note_success(output.sequences)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that ended."""
        self._bisection.discard(request)

    def _is_to_be_raised(self, error: BaseException) -> bool:
        is_bug = isinstance(error, EngineError) and not isinstance(error, OutOfMemoryError)
        return (
            not isinstance(error, Exception)
            or isinstance(error, StepTimeoutError)
            or (self._is_debug and is_bug)
        )
