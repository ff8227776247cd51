"""Who computes what in the next step: queues, token budget, chunking, preemption.

Pure Python on integers. One step is

    output = scheduler.schedule()             # reserves blocks, advances the token counts
    ... run output.sequences ...
    scheduler.commit(output, sampled_ids)     # appends tokens, finishes, frees

and a loop may call `schedule()` for step n + 1 before it commits step n: the token that step n
samples is then *pending* (see `engine.request`). Every choice depends only on the order of calls.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence

from engine.cache.block_manager import BlockManager
from engine.errors import ContractError, EngineError, RequestError
from engine.request import FINISH_REASONS, Request, RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import ScheduledSequence, ScheduleOutput
from engine.scheduler.waiting import WaitingQueue

__all__ = ["Scheduler"]

_RUNNING = RequestStatus.RUNNING


class Scheduler:
    """Continuous batching over pages, first come first served.

    Decodes come first, then the prefills under way, then new requests, as far as the token budget,
    the number of sequences and the blocks go. A request gets the blocks of all its tokens when it
    is admitted, and one more block whenever it outgrows them; if there is none, the request that
    came last gives up its blocks and will be recomputed.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64))
    >>> scheduler.add_request(Request("r0", [1, 2, 3], rules))
    >>> output = scheduler.schedule()
    >>> output.sequences
    [<r0[0:3]*>]
    >>> [request.finish_reason for request in scheduler.commit(output, {"r0": [7]})]
    ['length']
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # ordered by Request.order
        self._in_flight: list[ScheduleOutput] = []  # scheduled, not committed; oldest first
        self._num_arrived = 0
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold device blocks."""
        return len(self._running)

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request is waiting or running."""
        return bool(self._requests)

    def unfinished_requests(self) -> Iterator[Request]:
        """Iterate over waiting and running requests in the order of their arrival."""
        return iter(self._requests.values())

    def get_request(self, request_id: str) -> Request | None:
        """Return the unfinished request of this id, if there is one."""
        return self._requests.get(request_id)

    # ---- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue `request`.

        Raises
        ------
        RequestError
            If the id is taken, the prompt is empty or as long as the model allows, or the request
            can never fit into the pool. Nothing is queued.
        """
        self._check_new(request)
        self._requests[request.request_id] = request
        request.order = (self._num_arrived, self._num_arrived)
        self._num_arrived += 1
        self._waiting.push(request)

    def abort_request(self, request_id: str) -> bool:
        """End the request of this id, in whatever state; False if no such request is unfinished."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return True

    def finish_request(
        self, request: Request, reason: str, *, stop_reason: int | str | None = None
    ) -> None:
        """End `request` because of something that only the caller sees (a stop string, an error).

        Parameters
        ----------
        request : Request
            Nothing happens if it is finished already.
        reason : str
            "stop", "length", "abort" or "error".
        stop_reason : int or str, optional
            What stopped it, e.g. the stop string.
        """
        if reason not in FINISH_REASONS:
            raise ContractError(f"reason must be one of {list(FINISH_REASONS)}; got {reason!r}")
        if not request.is_finished:
            request.stop_reason = stop_reason
            self._finish(request, FINISH_REASONS[reason])

    # ---- one step

    def schedule(self) -> ScheduleOutput:
        """Decide the next step and reserve its blocks.

        The output is empty if nothing waits or runs, or if all that could be computed depends on
        tokens of steps that are not committed yet. Otherwise at least one token is computed.
        """
        output = ScheduleOutput(self._num_steps)
        self._num_steps += 1
        prefills = self._schedule_decodes(output)
        self._schedule_prefills(output, prefills)
        if not output.preempted:
            self._admit(output)
        self._complete(output)
        return output

    def commit(self, output: ScheduleOutput, sampled: Mapping[str, Sequence[int]]) -> list[Request]:
        """Take over the result of a step.

        Parameters
        ----------
        output : ScheduleOutput
            The oldest one not committed yet (an empty one may be left out).
        sampled : mapping of request id to ids
            The ids sampled for every sequence with `is_sampled` (normally one each). Requests that
            finished meanwhile need not be there and are skipped.

        Returns
        -------
        list of Request
            Those that this step finished, by a stop id or by their length; their blocks are freed.
        """
        self._leave_flight(output, oldest=True)
        finished: list[Request] = []
        for sequence in output.sequences:
            request = sequence.request
            if request.is_finished:
                continue
            context_len = sequence.start + sequence.num_scheduled_tokens
            if request.num_computed_tokens >= context_len:  # not preempted meanwhile
                request.num_committed_tokens = context_len
            if sequence.is_sampled and (status := self._append(request, sampled)) is not None:
                self._retire(request, status)
                finished.append(request)
        if finished:
            self._running = [r for r in self._running if r.status is _RUNNING]
        return finished

    def rollback(self, output: ScheduleOutput) -> None:
        """Undo a step that failed: all its requests go back to the queue to be recomputed.

        Whatever the step had written is forgotten. With several steps in flight, roll back the
        newest first.
        """
        self._leave_flight(output, oldest=False)
        for sequence in output.sequences:
            request = sequence.request
            if request.is_finished:
                continue
            if sequence.is_sampled:
                request.num_pending_tokens -= 1
                request.num_tokens -= 1
            if request.status is _RUNNING:
                self._running.remove(request)
                self._requeue(request)

    # ---- parts of schedule()

    def _schedule_decodes(self, output: ScheduleOutput) -> list[Request]:
        """Schedule every running request that has one token to compute; return the others."""
        prefills: list[Request] = []
        running, sequences = self._running, output.sequences
        block_size = self.config.block_size
        index = 0
        while index < len(running):  # the tail may be preempted under way
            request = running[index]
            index += 1
            start = request.num_computed_tokens
            if request.num_tokens - start != 1:
                prefills.append(request)
                continue
            if request.num_tokens >= request.max_num_tokens:
                continue  # its last token is pending
            is_full = start >= len(request.block_table) * block_size
            if (is_full or request.shares_last_block) and not self._make_room(request, output):
                continue
            sequences.append(ScheduledSequence(request, start, 1, True, request.num_pending_tokens))
            request.num_computed_tokens = start + 1
            request.num_tokens += 1
            request.num_pending_tokens += 1
        output.num_scheduled_tokens = len(sequences)
        return prefills

    def _schedule_prefills(self, output: ScheduleOutput, prefills: list[Request]) -> None:
        """Continue prefills under way, oldest first."""
        for request in prefills:
            if request.status is not _RUNNING or not self._chunk(request, output):
                continue  # preempted just now, or the budget is spent
            if self._make_room(request, output):
                self._schedule_chunk(request, output)

    def _admit(self, output: ScheduleOutput) -> None:
        """Let waiting requests in, in order, until one does not fit."""
        spare = self.config.watermark_blocks
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            if request.num_pending_tokens or not self._chunk(request, output):
                break
            # Room kept for those that run; a request alone may have everything.
            if not self.blocks.grow(
                request, request.num_tokens, spare=spare if self._running else 0
            ):
                break
            self._waiting.pop()
            request.status = _RUNNING
            insort(self._running, request, key=_order)
            output.admitted.append(request)
            self._schedule_chunk(request, output)

    def _complete(self, output: ScheduleOutput) -> None:
        """Put one-token sequences first, and add the block moves."""
        sequences = output.sequences
        sequences.sort(key=_is_chunk)  # stable
        output.num_decodes = sum(s.num_scheduled_tokens == 1 for s in sequences)
        moves = self.blocks.take_moves()
        output.swap_out, output.copies, output.swap_in = moves.swap_out, moves.copies, moves.swap_in
        if not output.is_empty:
            self._in_flight.append(output)

    def _chunk(self, request: Request, output: ScheduleOutput) -> int:
        """Return how many tokens of `request` this step may still take."""
        config = self.config
        room = config.max_num_batched_tokens - output.num_scheduled_tokens
        if config.max_prefill_chunk:
            room = min(room, config.max_prefill_chunk)
        return min(room, request.num_tokens - request.num_computed_tokens)

    def _schedule_chunk(self, request: Request, output: ScheduleOutput) -> None:
        start, num_new = request.num_computed_tokens, self._chunk(request, output)
        is_sampled = start + num_new == request.num_tokens
        num_pending = request.num_pending_tokens if is_sampled else 0
        output.sequences.append(ScheduledSequence(request, start, num_new, is_sampled, num_pending))
        output.num_scheduled_tokens += num_new
        request.num_computed_tokens += num_new
        request.num_tokens += is_sampled
        request.num_pending_tokens += is_sampled

    def _make_room(self, request: Request, output: ScheduleOutput) -> bool:
        """Get `request` the blocks it lacks, by preemption from the end if need be.

        False if it has to wait: it was preempted itself, or all that came later is scheduled.
        """
        while not self.blocks.grow(request, request.num_tokens):
            victim = self._running[-1]
            if any(sequence.request is victim for sequence in output.sequences):
                return False
            self._running.pop()
            self._requeue(victim)
            self.num_preemptions += 1
            victim.num_preemptions += 1
            output.preempted.append(victim)
            if victim is request:
                return False
        return True

    # ---- small parts

    def _requeue(self, request: Request) -> None:
        self.blocks.release(request)
        request.status = RequestStatus.PREEMPTED
        self._waiting.push(request)

    def _append(
        self, request: Request, sampled: Mapping[str, Sequence[int]]
    ) -> RequestStatus | None:
        ids = sampled.get(request.request_id)
        if not ids:
            raise ContractError(f"no token was sampled for request {request.request_id!r}")
        for token_id in ids:
            status = request.append_token(token_id)
            if status is not None:
                return status
        return None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is _RUNNING:
            self._running.remove(request)
        self._retire(request, status)

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Let go of a request (whoever calls removes it from the running ones)."""
        self._waiting.discard(request)
        del self._requests[request.request_id]
        self.blocks.release(request)
        request.num_tokens -= request.num_pending_tokens
        request.num_pending_tokens = 0
        request.status = status

    def _leave_flight(self, output: ScheduleOutput, *, oldest: bool) -> None:
        if output.is_empty:
            return
        expected = self._in_flight[0 if oldest else -1] if self._in_flight else None
        if output is not expected:
            wanted = "none is" if expected is None else f"step {expected.step_id} comes first"
            raise ContractError(f"step {output.step_id} is not to be settled now; {wanted}")
        self._in_flight.remove(output)

    def _check_new(self, request: Request) -> None:
        config, num_prompt = self.config, request.num_prompt_tokens
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        if not 0 < num_prompt < config.max_model_len:
            raise RequestError(
                f"the prompt must have 1 to {config.max_model_len - 1} tokens (max_model_len "
                f"{config.max_model_len} less one to generate); got {num_prompt}"
            )
        max_tokens = request.sampling_params.max_tokens
        longest = config.max_model_len if max_tokens is None else num_prompt + max_tokens
        request.max_num_tokens = min(longest, config.max_model_len)
        # The key of the very last token is never needed.
        num_blocks = self.blocks.num_blocks_for(request.max_num_tokens - 1)
        if num_blocks > config.num_blocks:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and up to {request.max_num_tokens - num_prompt} "
                f"new ones need {num_blocks} KV blocks of {config.block_size} tokens, but there "
                f"are only {config.num_blocks}; lower max_tokens or shorten the prompt"
            )

    def check_integrity(self) -> None:
        """Verify queues, limits, counts and blocks.

        Raises
        ------
        EngineError
            Naming what is wrong.
        """
        running, waiting = self._running, list(self._waiting)
        _verify(len(running) <= self.config.max_num_seqs, "too many requests run")
        _verify(running == sorted(running, key=_order), "the running requests are out of order")
        held = {id(r) for r in running} | {id(r) for r in waiting}
        _verify(
            len(held) == len(running) + len(waiting) == len(self._requests),
            "a request is in two queues or in none",
        )
        for request in self._requests.values():
            name = f"request {request.request_id!r}"
            is_running = request.status is _RUNNING
            _verify(is_running == (request not in self._waiting), f"{name}: wrong queue")
            _verify(is_running or not request.block_table, f"{name} waits, but holds blocks")
            known = request.num_known_tokens + request.num_pending_tokens
            _verify(request.num_tokens == known, f"{name}: num_tokens is wrong")
            computed = request.num_computed_tokens
            _verify(request.num_committed_tokens <= computed, f"{name}: committed > computed")
            _verify(computed < request.num_tokens, f"{name}: nothing left to compute")
            capacity = len(request.block_table) * self.config.block_size
            _verify(computed <= capacity, f"{name}: more tokens computed than slots held")
        self.blocks.check_integrity(self._requests.values())


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _is_chunk(sequence: ScheduledSequence) -> bool:
    return sequence.num_scheduled_tokens != 1


def _verify(holds: bool, message: str) -> None:
    if not holds:
        raise EngineError(f"scheduler: {message}")
