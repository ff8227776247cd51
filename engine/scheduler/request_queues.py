"""The request queues: every unfinished request is in exactly one of them.

waiting    in service order; hold no device blocks
siblings   parallel samples, waiting for another request to compute their common prompt
running    hold device blocks; ordered by `Request.order`
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from engine.cache.block_manager import BlockManager
from engine.cache.state_slots import SlotMoves
from engine.errors import RequestError
from engine.request import Request, RequestStatus
from engine.scheduler.admission import check_queue, check_request
from engine.scheduler.check import check_queues
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.waiting import WaitingQueue

__all__ = ["RequestQueues"]

_RUNNING = RequestStatus.RUNNING


class RequestQueues:
    """The request queues, and moves between them.

    Attributes
    ----------
    requests : dict of str to Request
        All unfinished requests, in order of arrival.
    waiting : WaitingQueue
    running : list of Request
    num_changes : int
        Number of times a request has entered or left `running`.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.num_changes = 0
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are not running."""
        return len(self.requests) - len(self.running)

    def add(
        self, request: Request, siblings: Sequence[Request], *, is_resumed: bool = False
    ) -> None:
        """Queue `request`, with `siblings` waiting for its prompt; an error changes nothing.

        `is_resumed`: another engine already accepted them, so the queue's limits do not apply; they
        may have output tokens, so none waits for another's prompt.
        """
        group = [request, *siblings]
        limits = [self._check_new(member, request) for member in group]
        if len({member.request_id for member in group}) < len(group):
            raise RequestError(
                f"request {request.request_id!r} and its siblings must have different ids"
            )
        if not is_resumed:
            check_queue(group, self.num_waiting, self.waiting, self.config)
        for member, limit in zip(group, limits, strict=True):
            window = self.config.priority_window
            self._register(member, limit, self._num_arrived + member.priority * window)
        for member in group if is_resumed else [request]:
            self.waiting.push(member)
        if not is_resumed:
            self._set_leader(request, siblings)

    def add_fork(self, parent: Request, child: Request, *, is_resumed: bool) -> None:
        """Add `child`: running on the blocks of `parent` if possible, otherwise queued.

        `is_resumed`: see `add`.
        """
        limit = self._check_new(child, child)
        child.prefix_epoch = parent.prefix_epoch
        child.num_tokens = child.num_known_tokens
        if self._can_fork(parent, child):
            self.blocks.check_fork(parent, child)
        if not is_resumed and not self._can_start(parent, child):
            check_queue([child], self.num_waiting, self.waiting, self.config)
        self._register(child, limit, parent.order[0])
        self._start_or_queue(parent, child)

    def release_siblings(self, request: Request) -> None:
        """Start or queue the siblings of `request`, now that its prompt is computed."""
        siblings = request.siblings
        request.siblings = []
        for sibling in siblings:
            sibling.leader = None
            self._start_or_queue(request, sibling)

    def run(self, request: Request) -> None:
        """Add `request`, which holds its blocks and is in no queue, to `running`."""
        request.status = _RUNNING
        self.num_changes += 1
        insort(self.running, request, key=_order)

    def preempt_last(self, *, swap: bool) -> Request:
        """Swap out or release the blocks of the last running request, and requeue it."""
        request = self.running.pop()
        self.num_changes += 1
        if swap:
            self.blocks.swap_out(request)
            request.status = RequestStatus.SWAPPED
        else:
            self.blocks.release(request)
            request.status = RequestStatus.PREEMPTED
        request.drop_drafts()
        request.num_preemptions += 1
        request.num_restarts += 1
        self.waiting.push(request)
        return request

    def restart(self, request: Request) -> None:
        """Requeue a running request to compute all its tokens anew; its blocks stay cached."""
        request.num_preemptions += 1
        self._requeue(request, keep=True)

    def retry(self, request: Request) -> None:
        """Requeue a running request, discarding everything it has computed."""
        self._requeue(request, keep=False)

    def _requeue(self, request: Request, *, keep: bool) -> None:
        self._remove_running(request)
        self.blocks.release(request, keep=keep)
        request.status = RequestStatus.PREEMPTED
        request.drop_drafts()
        request.num_restarts += 1
        self.waiting.push(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End `request`, whichever queue it is in."""
        if request.status is _RUNNING:
            self._remove_running(request)
        self.retire(request, status)

    def retire(self, request: Request, status: RequestStatus) -> None:
        """End `request`; if it is running, the caller must remove it from `running`."""
        self.waiting.discard(request)
        self._leave_group(request)
        del self.requests[request.request_id]
        # After a reset of the prefix cache, no later request may match its blocks.
        self.blocks.release(request, keep=not request.prefix_epoch)
        request.num_tokens -= request.num_pending_tokens
        request.num_pending_tokens = 0
        request.status = status

    def drop_finished(self) -> None:
        """Remove retired requests from `running`."""
        self.running = [request for request in self.running if request.status is _RUNNING]
        self.num_changes += 1

    def check_integrity(
        self, host_in_flight: Iterable[int], slots_in_flight: Iterable[SlotMoves] = ()
    ) -> None:
        """Verify queues, limits, counts and blocks."""
        siblings = [sibling for request in self.requests.values() for sibling in request.siblings]
        check_queues(self.requests.values(), self.running, self.waiting, siblings, self.config)
        self.blocks.check_integrity(self.requests.values(), host_in_flight, slots_in_flight)

    def _remove_running(self, request: Request) -> None:
        self.running.remove(request)
        self.num_changes += 1

    def _register(self, request: Request, max_num_tokens: int, rank: int) -> None:
        request.max_num_tokens = max_num_tokens
        request.num_tokens = request.num_known_tokens
        request.order = (rank, self._num_arrived)
        self._num_arrived += 1
        self.requests[request.request_id] = request

    def _start_or_queue(self, parent: Request, child: Request) -> None:
        if self._can_start(parent, child):
            self.blocks.fork(parent, child)
            self.run(child)
        else:
            self.waiting.push(child)

    def _can_start(self, parent: Request, child: Request) -> bool:
        return self._can_fork(parent, child) and len(self.running) < self.config.max_num_seqs

    def _can_fork(self, parent: Request, child: Request) -> bool:
        """Tell whether `child` can continue from the keys, and the state, that `parent` holds."""
        return (
            parent.status is _RUNNING
            # A prompt that is scored is computed whole, unless the parent scores the same one.
            and (child.reuse_prefix or child.prompt_token_ids is parent.prompt_token_ids)
            and parent.long_rope == child.needs_long_rope
            and self.blocks.can_fork_state(parent, child)
        )

    def _set_leader(self, request: Request, siblings: Sequence[Request]) -> None:
        request.siblings = list(siblings)
        for sibling in siblings:
            sibling.leader = request

    def _leave_group(self, request: Request) -> None:
        """Remove `request`, which ends early, from its group; its siblings get a new leader."""
        if request.siblings:
            first, *others = request.siblings
            request.siblings = []
            first.leader = None
            self.waiting.push(first)
            self._set_leader(first, others)
        if request.leader is not None:
            request.leader.siblings.remove(request)
            request.leader = None

    def _check_new(self, request: Request, leader: Request) -> int:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        if request is not leader and (
            request.prompt_token_ids != leader.prompt_token_ids
            or request.prefix_key != leader.prefix_key
        ):
            raise RequestError(
                f"request {request.request_id!r} must have the prompt, salt and rope of its "
                f"sibling {leader.request_id!r}; they differ"
            )
        return check_request(request, self.config)


def _order(request: Request) -> tuple[int, int]:
    return request.order
