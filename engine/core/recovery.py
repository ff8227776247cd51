"""Recovery from failed steps: roll them back and find the faulty request.

`LLMEngine.step` uses it in three ways: to exclude requests from the next step (`excluded`), to
roll back after an error (`undo`), and to record successful steps (`record_success`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from engine.core.fault_bisection import FaultBisection
from engine.errors import EngineError, OutOfMemoryError, RankError, StepTimeoutError
from engine.request import Request
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler

__all__ = ["StepRecovery"]

_LOG = logging.getLogger("engine")


class StepRecovery:
    """Rolls back failed steps and finds the request that causes them.

    When a step raises, its requests return to the queue and are recomputed. If that fails too,
    fault bisection computes them in ever smaller groups until the faulty request fails alone; the
    other requests continue.

    Parameters
    ----------
    scheduler : Scheduler
    runner : ModelRunner
    is_debug : bool
        Re-raise errors from the engine's own checks after the rollback, instead of treating them as
        transient faults.

    Attributes
    ----------
    num_failures : int
        Steps that raised and were rolled back.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, is_debug: bool) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self._runner = runner
        self._is_debug = is_debug
        self._bisection = FaultBisection()
        self._has_just_failed = False
        self._traced = ""  # the failure that was logged last
        self._abandoned: list[LaunchedStep] = []

    @property
    def is_bisecting(self) -> bool:
        """Tell whether each step must be read back before the next one is launched."""
        return self._bisection.is_active

    @property
    def num_suspects(self) -> int:
        """Requests that have not yet advanced past the point where their step failed."""
        return self._bisection.num_suspects

    def excluded(self) -> Iterator[set[Request]]:
        """Yield the sets of requests to exclude from the next step, in the order to try them.

        During bisection each set excludes everything but one group. That group may lack blocks that
        other requests hold, so two fallbacks follow: exclude all groups, so that only requests
        outside them run; and exclude nothing, in which case at least one request fits.
        """
        if self._bisection.is_active:
            unfinished = set(self._scheduler.unfinished_requests())
            groups = list(self._bisection.groups())
            for group in groups:
                yield unfinished.difference(group)
            yield set().union(*groups)
        yield set()

    def undo(
        self, outputs: Sequence[ScheduleOutput], error: BaseException
    ) -> tuple[Request, str] | None:
        """Roll back `outputs`, newest first; the oldest one raised `error`.

        Returns
        -------
        (request, reason) or None
            The faulty request, once it is known; the caller must end it.

        Raises
        ------
        BaseException
            `error`, if it is an interrupt, a timeout, a rank's failure or, in debug mode, a failed
            check, or if retrying would fail forever.
        """
        for output in outputs:
            self._scheduler.rollback(output)
            self._runner.release([s.request for s in output.sequences])
        failed = outputs[-1]
        if not isinstance(error, StepTimeoutError):
            self._runner.recover()
        if self._must_raise(error) or (self._has_just_failed and not failed.sequences):
            raise error
        self.num_failures += 1
        self._has_just_failed = True
        # Log the traceback only once: the retry and bisection repeat the failure.
        is_repeated = self._bisection.num_suspects > 0 and repr(error) == self._traced
        trace = None if is_repeated else error
        self._traced = repr(error)
        _LOG.warning("step %d failed and is undone: %r", failed.step_id, error, exc_info=trace)
        faulty = self._bisection.record_failure(failed.sequences)
        if faulty is None:
            return None
        return faulty, f"the step failed twice: {type(error).__name__}: {error}"

    def abandon(self, steps: Sequence[LaunchedStep]) -> None:
        """Keep rolled-back steps that may still be running on the device.

        SAFETY: the device may still access host memory that they own.
        """
        self._abandoned += steps

    def record_success(self, output: ScheduleOutput) -> None:
        """Record a successful step; abandoned steps, being earlier in the stream, are done."""
        self._has_just_failed = False
        self._abandoned.clear()
        if self._bisection.num_suspects:
            self._bisection.record_success(output.sequences)

    def forget(self, request: Request) -> None:
        """Drop the state kept for a request that has ended."""
        self._bisection.discard(request)

    def _must_raise(self, error: BaseException) -> bool:
        is_bug = isinstance(error, EngineError) and not isinstance(error, OutOfMemoryError)
        return (
            not isinstance(error, Exception)
            or isinstance(error, StepTimeoutError | RankError)
            or (self._is_debug and is_bug)
        )
