"""Decides what the next step computes: queues, token budget, chunking, preemption.

Pure Python, on integers only. One step is

    output = scheduler.schedule()             # reserves blocks, advances the token counts
    ... run output.sequences ...
    scheduler.commit(output, sampled_ids)     # appends tokens, finishes, frees

A loop may call `schedule()` for step n + 1 before it commits step n: the token that step n samples
is then *pending* (see `engine.request`). Every decision depends only on the order of calls.

A step computes one token per decoding request, or more if drafts of its next tokens were proposed
(`propose`); the step then verifies them (see `engine.drafts`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from engine.cache.block_manager import BlockManager, BlockMoves
from engine.cache.prefix_tree import PrefixTree
from engine.cache.state_slots import SlotMoves, StateSlots
from engine.drafts import Drafts
from engine.errors import ContractError
from engine.request import Request, RequestStatus, finished_status
from engine.scheduler.check import check_output
from engine.scheduler.chunks import UnchangedBatch, add_chunk, chunk_size, put_decodes_first
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.drafting import DraftTokens, checked_drafts, count_accepted, fitting_drafts
from engine.scheduler.output import BatchSize, InFlightSteps, ScheduledSequence, ScheduleOutput
from engine.scheduler.preemption import prefers_swap
from engine.scheduler.prefixes_in_flight import PrefixesInFlight
from engine.scheduler.request_queues import RequestQueues
from engine.scheduler.spreading import chained_not_due, requests_not_due
from engine.scheduler.stats import SchedulerStats, collect

__all__ = ["Scheduler"]

_RUNNING = RequestStatus.RUNNING
_new = object.__new__
# Requests passed over per step: another one computes their prefix, or their adapter has no slot.
_MAX_PASSED = 16
# Later requests that may overtake one whose adapter has no slot, before a slot is freed for it.
_MAX_OVERTAKING = 32


class Scheduler:
    """Continuous batching over paged KV, first come first served within a priority.

    Decodes come first, then prefills in progress, then new requests, until the token budget,
    `max_num_seqs` or the blocks run out. Admission allocates blocks for all known tokens of a
    request; it gets one more block whenever these are full. If none is free, the running request
    that is last in service order is preempted, to be recomputed or swapped in later.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64))
    >>> request = Request("r0", [1, 2, 3], rules)
    >>> scheduler.add_request(request)
    >>> output = scheduler.schedule()
    >>> output.sequences
    [<r0[0:3]*>]
    >>> [request.finish_reason for request in scheduler.commit(output, {request: [7]})]
    ['length']
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            num_host_blocks=config.num_host_blocks,
            prefix_caching=config.prefix_caching,
            max_blocks_per_salt=config.max_blocks_per_salt,
            states=partial(_state_slots, config) if config.num_state_slots else None,
        )
        self._states = self.blocks.states
        if config.debug:
            self.blocks.record_freed()
        self._queues = RequestQueues(config, self.blocks)
        self.last_batch = BatchSize()  # last step's batch size, for the watch view
        self._in_flight = InFlightSteps()
        self._unchanged = UnchangedBatch()
        self._has_drafts = False  # whether a running request may have drafts
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_swaps = 0
        self._num_retries = 0
        self._prefix_epoch = 0  # number of resets of the prefix cache

    @property
    def num_waiting(self) -> int:
        """Requests that are not running, preempted ones included."""
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that hold device blocks."""
        return len(self._queues.running)

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request is waiting or running."""
        return bool(self._queues.requests)

    def unfinished_requests(self) -> Iterator[Request]:
        """Iterate over waiting and running requests in order of arrival."""
        return iter(self._queues.requests.values())

    # ---- adding and ending requests

    def add_request(
        self, request: Request, siblings: Sequence[Request] = (), *, is_resumed: bool = False
    ) -> None:
        """Queue `request`.

        Parameters
        ----------
        request : Request
        siblings : sequence of Request, optional
            More requests with the same prompt (parallel samples). They wait until `request` has
            computed it, then share its blocks.
        is_resumed : bool
            Another engine already accepted them: the queue's limits do not apply, and no sibling
            waits.

        Raises
        ------
        RequestError
            If an id is in use, the prompt is empty or leaves no room for a token, or a request can
            never fit into the KV cache. Nothing is queued.
        QueueFullError
            If the queue's limits would be exceeded (also a RequestError). Nothing is queued.
        """
        self._queues.add(request, siblings, is_resumed=is_resumed)

    def fork_request(self, parent: Request, child: Request, *, is_resumed: bool = False) -> None:
        """Add `child`, which continues from tokens that `parent` has computed (beam search).

        `child` may already have output tokens. If `parent` is running and `max_num_seqs` allows it,
        `child` shares its blocks and runs at once; otherwise it is queued like any other request.
        With `is_resumed`, the queue's limits do not apply.

        Raises
        ------
        RequestError, QueueFullError
            As for `add_request`, or if the tokens of the two differ.
        """
        self._queues.add_fork(parent, child, is_resumed=is_resumed)

    def finish_request(
        self, request: Request, reason: str, *, stop_reason: int | str | None = None
    ) -> None:
        """End `request` for a reason only the caller can see (a stop string, an error).

        Parameters
        ----------
        request : Request
            Unchanged if it has already finished.
        reason : str
            "stop", "length", "abort" or "error".
        stop_reason : int or str, optional
        """
        status = finished_status(reason)
        if not request.is_finished:
            request.stop_reason = stop_reason
            self._queues.finish(request, status)

    def correct_finish(
        self,
        request: Request,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> int:
        """Replace the finish reason of `request`: its text takes precedence over `commit`.

        `num_output_tokens`: number of output tokens to keep; a step with drafts may have appended
        more. Returns the number of tokens dropped.
        """
        status = finished_status(reason)
        if not request.is_finished:
            raise ContractError(f"request {request.request_id!r} must have finished; it has not")
        request.status = status
        request.stop_reason = stop_reason
        num_cut = 0
        if num_output_tokens is not None:
            num_cut = request.num_output_tokens - num_output_tokens
            del request.output_token_ids[num_output_tokens:]
            request.num_tokens -= num_cut
        return num_cut

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed, on device and host.

        Unfinished requests keep their blocks, and continue. What they have computed, or will, is
        shared only among themselves, not with requests that start later.
        """
        count = self.blocks.reset_prefixes()
        self._prefix_epoch += 1
        for request in self.unfinished_requests():
            first = request if request.leader is None else request.leader
            has_blocks = first.block_table or first.host_block_table
            request.prefix_epoch = self._prefix_epoch if has_blocks else 0
        return count

    def decoding_requests(self) -> list[Request]:
        """Return the running requests that have an output token and can be decoded further."""
        return [
            request
            for request in self._queues.running
            if request.output_token_ids
            and request.num_tokens - request.num_computed_tokens == 1
            and request.num_tokens < request.pause_len
        ]

    def propose(
        self, request: Request, token_ids: DraftTokens, parents: Sequence[int] | None = None
    ) -> bool:
        """Propose drafts: guesses at the next tokens of `request`, for its next step to verify.

        Drafts take no blocks or token budget away from other requests; those that do not fit are
        dropped. A new proposal replaces the previous one; the request's next step consumes it.

        Parameters
        ----------
        request : Request
        token_ids : sequence of int, or Drafts
            At most `max_draft_tokens`.
        parents : sequence of int, optional
            For a tree of drafts, the index of each draft's parent; -1 is the request's last token.

        Returns
        -------
        bool
            False if ignored, because the request is not running or has drafts in flight.

        Raises
        ------
        RequestError
            If there are too many drafts, or they are not valid ids or not a valid tree.
        """
        drafts = checked_drafts(request, token_ids, parents, self.config)
        if request.status is not _RUNNING or request.num_draft_tokens:
            return False
        request.drafts = drafts
        self._has_drafts = True
        return True

    def requests_not_due(self, num_groups: int, *, chains_steps: bool = False) -> set[Request]:
        """Return the requests to exclude from a pipeline's next step (module `spreading`)."""
        running = self._queues.running
        if not chains_steps:
            return requests_not_due(running, num_groups)
        return chained_not_due(running, num_groups, self._in_flight)

    # ---- one step

    def schedule(self, excluded: Collection[Request] = ()) -> ScheduleOutput:
        """Decide the next step and reserve its blocks.

        The output is empty if there are no requests, or if all of them depend on tokens of
        uncommitted steps. Otherwise at least one token is computed.

        Parameters
        ----------
        excluded : collection of Request, optional
            Waiting or running requests to leave out of this step. They stay in their queues (a
            running one may still be preempted). The output may then be empty although other
            requests wait, because the excluded ones hold the blocks they need.
        """
        output = ScheduleOutput(self._num_steps)
        self._num_steps += 1
        others = self._schedule_decodes(output, excluded)
        self._schedule_chunks(output, others)
        if not output.preempted:
            self._admit(output, excluded)
        self._unchanged.mark(output, self._queues, has_chunks=bool(others))
        self._complete(output)
        return output

    def commit(
        self, output: ScheduleOutput, sampled: Mapping[Request, Sequence[int]]
    ) -> list[Request]:
        """Record the result of a step: append tokens, finish requests, free their blocks.

        Parameters
        ----------
        output : ScheduleOutput
            The oldest uncommitted step (empty steps need not be committed).
        sampled : mapping of Request to ids
            The ids sampled for every sequence with `is_sampled`: one id, or with drafts the
            accepted drafts (their keys already in sequence order) and the id after them. Requests
            that have since finished are skipped.

        Returns
        -------
        list of Request
            Requests this step finished, by a stop id or by length; their blocks are freed.
        """
        self._in_flight.settle_oldest(output)
        self.blocks.settle(output.swap_in, output.slot_moves)
        finished: list[Request] = []
        has_drafts = output.num_draft_tokens > 0
        has_prompts = not output.is_unchanged  # an unchanged batch has no prompts left
        for sequence in output.sequences:
            request = sequence.request
            status = request.status
            if status is not _RUNNING and request.is_finished:
                continue
            start = sequence.start
            drafts = None
            reached = start + sequence.num_scheduled_tokens
            if has_drafts and (drafts := sequence.drafts) is not None:
                reached -= len(drafts)
            if request.num_computed_tokens >= reached:  # not preempted since
                request.num_committed_tokens = reached
                if has_prompts and start < len(request.prompt_token_ids) and status is _RUNNING:
                    self.blocks.cache_prefix(request)
            if not sequence.is_sampled:
                continue
            is_computed = request.num_committed_tokens >= len(request.prompt_token_ids)
            if request.siblings and status is _RUNNING and is_computed:
                self._queues.release_siblings(request)
            if not (ids := sampled.get(request)):
                raise ContractError(f"no token was sampled for request {request.request_id!r}")
            if drafts is not None:
                if self._states is not None and status is _RUNNING:
                    self._states.accept(request, start, len(ids) - 1)
                count_accepted(request, ids)
            if (end := request.append_tokens(ids)) is not None:
                self._queues.retire(request, end)
                finished.append(request)
        if finished:
            self._queues.drop_finished()
        if self.config.debug:
            self.check_integrity()
        return finished

    def rollback(self, output: ScheduleOutput) -> None:
        """Undo a failed step: requeue all its requests for recomputation.

        Everything the step wrote or copied is discarded. If several steps are in flight, roll back
        the newest first.
        """
        self._in_flight.settle_newest(output)
        moves = BlockMoves(output.swap_out, output.copies, output.swap_in)
        self.blocks.drop_uncopied(moves)
        self.blocks.settle(output.swap_in, output.slot_moves)
        for sequence in output.sequences:
            self._undo(sequence)
        if output.slot_moves is not None:
            self._retry_forks(output.slot_moves)
        for request in output.preempted:
            if request.status is RequestStatus.SWAPPED:
                self.blocks.release(request, keep=False)
                request.status = RequestStatus.PREEMPTED

    # ---- parts of schedule()

    def _schedule_decodes(
        self, output: ScheduleOutput, excluded: Collection[Request]
    ) -> list[Request]:
        """Schedule each running request that has exactly one token to compute; return the others.

        The others are prefills in progress, requests with drafts, and those at their `pause_len`.
        """
        others: list[Request] = []
        sequences = output.sequences
        block_size = self.config.block_size
        states = self._states
        if has_drafts := self._has_drafts:
            self._has_drafts = any([r.drafts is not None for r in self._queues.running])
        for request in self._queues.running:  # `_make_room` may preempt its tail
            if excluded and request in excluded:
                continue
            start = request.num_computed_tokens
            num_tokens = request.num_tokens
            if num_tokens - start != 1 or (has_drafts and self._settle_drafts(request)):
                others.append(request)
                continue
            if num_tokens >= request.pause_len:
                others.append(request)
                continue
            # A request can need another block only at a block boundary.
            if (
                request.shares_last_block
                or (not start % block_size and start >= len(request.block_table) * block_size)
            ) and not self._make_room(request, output):
                continue
            if (
                states is not None
                and (state := request.state) is not None
                and (state.is_new or not start % states.grid)
            ):
                output.state_access.append(states.access(request, start, 1))
            num_pending = request.num_pending_tokens
            # Skip the constructor: it would take a third of this loop's time.
            sequence = _new(ScheduledSequence)
            sequence.request = request
            sequence.start = start
            sequence.num_scheduled_tokens = 1
            sequence.is_sampled = True
            sequence.num_pending_tokens = 1 if num_pending else 0  # of the one token computed here
            sequences.append(sequence)
            request.num_computed_tokens = num_tokens
            request.num_tokens = num_tokens + 1
            request.num_pending_tokens = num_pending + 1
        output.num_scheduled_tokens = output.num_decodes = len(sequences)
        return others

    def _schedule_chunks(self, output: ScheduleOutput, requests: list[Request]) -> None:
        """Schedule prefills in progress and decodes with drafts, in service order.

        A prefill leaves a token of the budget to each decode after it, as to those without drafts.
        """
        config = self.config
        num_decodes = sum(map(_is_decode, requests))  # those from here on
        for index, request in enumerate(requests):
            num_decodes -= _is_decode(request)
            if request.status is not _RUNNING or request.num_draft_tokens:
                continue  # preempted just now, or its drafts are in flight
            if request.num_tokens >= request.pause_len:
                self._end_short_rope(request, output)
                continue
            num_new = chunk_size(request, output, config, self._states, reserved=num_decodes)
            if not num_new:
                continue  # the budget is spent
            later = len(requests) - index - 1
            drafts = fitting_drafts(request, num_new, output, config, reserved=later)
            if drafts and self._has_room_for(len(drafts), requests, index):
                self._add_chunk(request, output, num_new, drafts)
            elif self._make_room(request, output):
                self._add_chunk(request, output, num_new)

    def _admit(self, output: ScheduleOutput, excluded: Collection[Request]) -> None:
        """Admit waiting requests, in service order, until one does not fit."""
        queues = self._queues
        config = self.config
        if not len(queues.waiting):
            return
        passed = [request for request in excluded if request in queues.waiting]
        for request in passed:
            queues.waiting.discard(request)
        most_passed = len(passed) + _MAX_PASSED
        in_flight = PrefixesInFlight(self.blocks, [*self._in_flight, output])
        adapters = self._running_adapters()
        without_slot: list[Request] = []
        closed = 0  # serial of the adapter that gets no more requests, until its slot is free
        while len(queues.waiting) and len(queues.running) < config.max_num_seqs:
            request = self._next_waiting()
            # A restarted request would get other blocks than its step in flight writes.
            is_held = request.num_pending_tokens or self._is_in_flight(request)
            if is_held or not chunk_size(request, output, config):
                break
            has_slot = self._has_slot_for(request, adapters, closed)
            if not has_slot or in_flight.covers_most_of(request):
                if len(passed) == most_passed:
                    break
                if not has_slot:
                    without_slot.append(request)
                    if not closed and request.num_skips >= _MAX_OVERTAKING:
                        closed = self._adapter_to_end()
                queues.waiting.discard(request)
                passed.append(request)
                continue
            # Leave running requests room to grow; a lone request may take every block.
            spare = config.watermark_blocks if queues.running else 0
            if not self.blocks.admit(request, spare=spare):
                break
            queues.waiting.take(request)
            queues.run(request)
            for other in without_slot:
                other.num_skips += other.order < request.order
            in_flight.add(request)
            if request.adapter is not None:
                adapters.add(request.adapter.serial)
            output.admitted.append(request)
            num_new = chunk_size(request, output, config, self._states)  # skips the cached part
            self._add_chunk(request, output, num_new)
        for request in passed:
            queues.waiting.push(request)

    def _complete(self, output: ScheduleOutput) -> None:
        """Put decodes first, and add the block moves."""
        put_decodes_first(output)
        self.last_batch = output.size
        if self.blocks.has_moves:
            new = self.blocks.take_moves()
            output.swap_out = new.swap_out
            output.copies = new.copies
            output.swap_in = new.swap_in
        if self._states is not None:
            output.slot_moves = self._states.take_moves()
        if not output.is_empty:
            self._in_flight.append(output)
        if self.config.debug:
            output.freed_blocks = self.blocks.take_freed([*output.copies, *output.swap_in])
            check_output(output, self.config)
            self.check_integrity()

    def _add_chunk(
        self, request: Request, output: ScheduleOutput, num_new: int, drafts: Drafts | None = None
    ) -> None:
        """Schedule the next `num_new` tokens of `request`; see `add_chunk`."""
        if self._states is not None:
            start = request.num_computed_tokens
            output.state_access.append(self._states.access(request, start, num_new))
        add_chunk(request, output, num_new, drafts)

    def _settle_drafts(self, request: Request) -> bool:
        """Drop a decode's drafts if it lacks a block and none is free; tell whether it has drafts.

        Without them it gets the block in service order: later requests, which may be preempted for
        it, are not scheduled yet.
        """
        if request.drafts is None:
            return False
        blocks = self.blocks
        if request.num_draft_tokens or blocks.num_available or not blocks.lacks_block(request):
            return True
        request.drafts = None
        return False

    def _has_room_for(self, num_drafts: int, requests: Sequence[Request], index: int) -> bool:
        """Allocate the blocks and state slots of drafts of a request; False if there are too few.

        Blocks that later requests need for their next token are left to them.
        """
        request = requests[index]
        spare = 0
        if self.blocks.num_available < len(requests) + num_drafts:  # else there are enough
            later = itertools.islice(requests, index + 1, None)
            running = (each for each in later if each.status is _RUNNING)
            spare = sum(map(self.blocks.lacks_block, running))
        return self.blocks.grow(request, request.num_tokens + num_drafts, spare=spare) and (
            self._states is None or self._states.reserve_drafts(request, num_drafts)
        )

    def _is_in_flight(self, request: Request) -> bool:
        """Tell whether a step that is not committed computes tokens of a restarted request."""
        return request.num_restarts > 0 and any(
            sequence.request is request for step in self._in_flight for sequence in step.sequences
        )

    def _running_adapters(self) -> set[int]:
        """Return the serials of the running requests' adapters."""
        if not self.config.max_adapters:
            return set()
        return {one.adapter.serial for one in self._queues.running if one.adapter is not None}

    def _has_slot_for(self, request: Request, adapters: set[int], closed: int) -> bool:
        """Tell whether the request has no adapter, or one that fits beside those running.

        The adapter with the serial `closed` gets no more requests.
        """
        if request.adapter is None:
            return True
        if request.adapter.serial in adapters:
            return bool(request.adapter.serial != closed)
        return len(adapters) < self.config.max_adapters

    def _adapter_to_end(self) -> int:
        """Return the serial of the running adapter with the fewest requests; ties: the oldest.

        As none is added to these, the fewest never become more, and in the end a slot is free.
        """
        running: Counter[int] = Counter(
            r.adapter.serial for r in self._queues.running if r.adapter is not None
        )
        return min(running, key=lambda serial: (running[serial], serial))

    def _next_waiting(self) -> Request:
        waiting = self._queues.waiting
        if self.config.policy == "fcfs":
            return waiting.peek()
        return waiting.best_of_first(self.config.lpm_window, self.blocks.match_length)

    def _make_room(self, request: Request, output: ScheduleOutput) -> bool:
        """Allocate the blocks that `request` lacks, preempting the last running requests if needed.

        Returns False if `request` has to wait: it was itself preempted, or the last running request
        is already scheduled in this step.
        """
        while not self.blocks.grow(request, request.num_tokens):
            last = self._queues.running[-1]
            if any(sequence.request is last for sequence in output.sequences):
                return False
            swap = prefers_swap(last, self.blocks, self.config)
            output.preempted.append(self._queues.preempt_last(swap=swap))
            self._num_preemptions += 1
            self._num_swaps += swap
            if last is request:
                return False
        return True

    def _end_short_rope(self, request: Request, output: ScheduleOutput) -> None:
        """Requeue `request` if its next token needs longrope's long factors.

        All of its keys are computed anew with them. While its last token is pending, it waits: that
        token may end it.
        """
        if request.num_pending_tokens:
            return
        self._queues.restart(request)
        output.restarted.append(request)

    # ---- parts of commit() and rollback()

    def _undo(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        if request.is_finished:
            return
        if sequence.is_sampled:
            request.num_pending_tokens -= 1
            request.num_tokens -= 1
        if request.status is _RUNNING:
            self._queues.retry(request)
            self._num_retries += 1

    def _retry_forks(self, moves: SlotMoves) -> None:
        """Requeue the running requests whose states a failed step may not have copied."""
        torn = {slot for _, slot in moves.copies}
        for request in [r for r in self._queues.running if r.state and r.state.slot in torn]:
            self._queues.retry(request)
            self._num_retries += 1

    # ---- metrics and tests

    def stats(self) -> SchedulerStats:
        """Return a snapshot of all counters."""
        return collect(
            self.blocks,
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_swaps=self._num_swaps,
            num_retries=self._num_retries,
        )

    def describe(self) -> str:
        """Return the counters and request ids as text, for the log."""
        names = [request.request_id for request in self.unfinished_requests()]
        return f"{self.stats()}\n{len(names)} unfinished requests: {names[:64]}"

    def check_integrity(self) -> None:
        """Verify queues, limits, counts and blocks (docs/memory.md lists the invariants).

        Raises
        ------
        EngineError
            If an invariant is violated; the message names it.
        """
        in_flight = [host for output in self._in_flight for host, _ in output.swap_in]
        slots_in_flight = [o.slot_moves for o in self._in_flight if o.slot_moves is not None]
        self._queues.check_integrity(in_flight, slots_in_flight)


def _is_decode(request: Request) -> bool:
    """Tell whether `request`, drafts aside, has exactly one token to compute."""
    return request.num_tokens - request.num_computed_tokens == 1


def _state_slots(config: SchedulerConfig, tree: PrefixTree | None) -> StateSlots:
    return StateSlots(
        config.num_state_slots,
        config.max_num_seqs,
        num_host_slots=config.num_host_state_slots,
        tree=tree,
        grid=config.state_grid,
        interval=config.state_interval,
    )
