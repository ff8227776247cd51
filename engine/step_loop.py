"""The loop under `LLMEngine.step`: schedule, launch, read, commit; and what happens when one fails.

With `depth` 0 each step is read before the next one is scheduled. With `depth` 1 the next step is
scheduled and launched first, while the device still works, so its host part costs no time: a step's
results arrive one step late. The tokens are the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from engine.errors import EngineError, OutOfMemoryError, StepTimeoutError
from engine.request import Request
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.result import StepResult
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.suspects import Suspects
from engine.watchdog import Watchdog

__all__ = ["StepLoop"]

_LOG = logging.getLogger("engine")


class StepLoop:
    """Turns the scheduler's decisions into committed tokens.

    A step that raises is rolled back: its requests return to the queue and are computed again. If
    that fails too, they are computed in ever smaller groups (`Suspects`), each step read before
    the next one is launched, until the one to blame fails alone; the others go on.

    Parameters
    ----------
    scheduler : Scheduler
    runner : ModelRunner
    watchdog : Watchdog
    depth : int
        How many steps may be under way when the next one is scheduled: 0 or 1.
    is_debug : bool
        Whether errors of the engine's own checks are raised (after the roll-back) like an
        interrupt, and not taken for a passing fault.
    on_schedule : callable
        Called with each output before it is launched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        watchdog: Watchdog,
        *,
        depth: int,
        is_debug: bool,
        on_schedule: Callable[[ScheduleOutput], None],
    ) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self._runner = runner
        self._watchdog = watchdog
        self._depth = depth
        self._is_debug = is_debug
        self._on_schedule = on_schedule
        self._under_way: deque[LaunchedStep] = deque()
        self._suspects = Suspects()
        self._has_just_failed = False
        self._abandoned: list[LaunchedStep] = []
        self._results: list[StepResult] = []  # committed, but not given back

    @property
    def num_under_way(self) -> int:
        """Steps launched and not read."""
        return len(self._under_way)

    def advance(self) -> list[StepResult]:
        """Launch a step, and read those that are due; return the results that were committed.

        Raises
        ------
        StepTimeoutError
            If the watchdog is to give up stuck steps. What was launched is rolled back.
        """
        with self._watchdog:
            if self._runner.needs_host_ids or self._suspects.is_trying:
                self._settle(keep=0)  # without the last ids on the host, some cannot go on
            launched = self._launch()
            is_late = launched and not self._suspects.is_trying
            self._settle(keep=self._depth if is_late else 0)
        results, self._results = self._results, []
        return results

    def drain(self) -> None:
        """Wait for everything that is under way, and forget its results."""
        while self._under_way:
            step = self._under_way.pop()
            self._scheduler.rollback(step.output)
            self._runner.read(step)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a finished request."""
        self._suspects.discard(request)
        self._runner.remove(request)

    def _launch(self) -> bool:
        """Schedule and launch; False if there was nothing to do."""
        output = self._schedule()
        if output.is_empty:
            return False
        try:
            self._on_schedule(output)
            step = self._runner.launch(output)
        except BaseException as error:
            self._undo([output], error)
            return True
        self._under_way.append(step)
        return True

    def _schedule(self) -> ScheduleOutput:
        for held in self._held():
            output = self._scheduler.schedule(held)
            self._runner.release(output.preempted)
            if not output.is_empty:
                return output
        return output

    def _held(self) -> Iterator[set[Request]]:
        """Yield whom to leave out of the next step: on trial, all but one group.

        A group may lack blocks that others hold; so after the groups come all that are not on
        trial, and at last everybody, because then something always fits.
        """
        if self._suspects.is_trying:
            everybody = set(self._scheduler.unfinished_requests())
            groups = list(self._suspects.groups())
            for group in groups:
                yield everybody.difference(group)
            yield set().union(*groups)
        yield set()

    def _settle(self, *, keep: int) -> None:
        """Read and commit the oldest steps until `keep` are under way."""
        while len(self._under_way) > keep:
            step = self._under_way[0]
            try:
                self._watchdog.check()
                result = self._runner.read(step, self._watchdog.remaining())
            except BaseException as error:
                outputs = [s.output for s in reversed(self._under_way)]
                # SAFETY: the device may still read and write what these steps hold.
                self._abandoned += self._under_way
                self._under_way.clear()
                self._undo(outputs, error)
                return
            self._under_way.popleft()
            self._commit(step.output, result)

    def _commit(self, output: ScheduleOutput, result: StepResult) -> None:
        self._fail(result)
        result.finished = self._scheduler.commit(output, result.token_ids)
        self._runner.release(result.finished)
        self._results.append(result)
        self._has_just_failed = False
        self._abandoned.clear()  # were before this one on the stream
        if self._suspects:
            self._suspects.note_success(output.sequences)

    def _fail(self, result: StepResult) -> None:
        """End the requests that failed; those that ended meanwhile did not fail."""
        result.failed = {r: why for r, why in result.failed.items() if not r.is_finished}
        for request, why in result.failed.items():
            self._scheduler.finish_request(request, "error", stop_reason=why)
        self._runner.release(result.failed)

    def _undo(self, outputs: Sequence[ScheduleOutput], error: BaseException) -> None:
        """Roll back `outputs`, newest first, because the last of them raised `error`."""
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
        # Once is enough to read where: a trial repeats it for every group.
        trace = None if self._suspects.is_trying else error
        _LOG.warning("step %d failed and is undone: %r", failed.step_id, error, exc_info=trace)
        guilty = self._suspects.note_failure(failed.sequences)
        why = f"the step failed twice: {type(error).__name__}: {error}"
        result = StepResult(failed={} if guilty is None else {guilty: why})
        self._fail(result)
        self._results.append(result)

    def _is_to_be_raised(self, error: BaseException) -> bool:
        is_bug = isinstance(error, EngineError) and not isinstance(error, OutOfMemoryError)
        return (
            not isinstance(error, Exception)
            or isinstance(error, StepTimeoutError)
            or (self._is_debug and is_bug)
        )
