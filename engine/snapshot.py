"""State of a running engine as plain values, for the server's watch view."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from engine.cache.tree_node import NO_BLOCK
from engine.llm_engine import LLMEngine
from engine.request import Request, RequestStatus

__all__ = ["StepClock", "snapshot", "starts_with"]

_MAX_REQUESTS = 256
_MAX_NODES = 200
_SMOOTHING = 0.1  # weight of the latest step in the moving average
_MIN_SPAN = 0.2  # minimum time in seconds over which tokens are counted

_STATES = {RequestStatus.RUNNING: "running", RequestStatus.SWAPPED: "swapped"}


class StepClock:
    """Mean duration of recent steps, and tokens per second.

    Attributes
    ----------
    step_seconds : float
        Exponential moving average of step durations; 0 before the first step.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self._since = time.monotonic()
        self._num_tokens = 0
        self._rate = 0.0

    def note(self, seconds: float) -> None:
        """Record the duration of a step."""
        known = self.step_seconds
        self.step_seconds = known + _SMOOTHING * (seconds - known) if known else seconds

    def rate(self, num_tokens: int) -> float:
        """Return recent tokens per second; `num_tokens`: total number of tokens so far."""
        now = time.monotonic()
        if (span := now - self._since) >= _MIN_SPAN:
            self._rate = max(0, num_tokens - self._num_tokens) / span
            self._since = now
            self._num_tokens = num_tokens
        return self._rate


def snapshot(
    engine: LLMEngine,
    clock: StepClock | None = None,
    wants: Callable[[str | None], bool] | None = None,
) -> dict[str, Any]:
    """Return the engine's current state; call between two steps.

    Parameters
    ----------
    engine : LLMEngine
    clock : StepClock, optional
        Source of times and rates; if omitted, they are 0.
    wants : callable, optional
        Selects the requests and prefixes that are listed, by their cache salt; the counts of
        requests and blocks cover all of them.

    Returns
    -------
    dict
        Numbers, texts, and lists and dicts of them; never the content of a prompt or reply. At most
        256 requests and 200 prefix-tree nodes are listed; the counts cover all of them.

    Examples
    --------
    >>> from engine import load
    >>> from engine.config import ModelConfig
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> engine = LLMEngine(load(config=config, load_format="dummy", device="cpu"), num_blocks=8)
    >>> engine.add_request("r0", [1, 2, 3])
    >>> seen = snapshot(engine)
    >>> seen["num_waiting"], seen["num_free_blocks"], seen["requests"][0]["state"]
    (1, 8, 'waiting')
    """
    scheduler = engine.scheduler
    blocks = scheduler.blocks.allocator
    batch = scheduler.last_batch
    every = scheduler.unfinished_requests()
    listed = (each for each in every if wants is None or wants(each.cache_salt))
    requests = islice(listed, _MAX_REQUESTS)
    return {
        "time": time.time(),
        "step_ms": 1000 * clock.step_seconds if clock else 0.0,
        "tokens_per_s": clock.rate(engine.collector.generation_tokens) if clock else 0.0,
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_blocks": blocks.num_blocks,
        "num_free_blocks": blocks.num_free,
        "num_cached_blocks": blocks.num_cached,
        "block_size": blocks.block_size,
        "requests": [_shown(request) for request in requests],
        "tree": _tree(engine, wants),
        "batch": {
            "num_tokens": batch.num_tokens,
            "num_prefills": batch.num_sequences - batch.num_decodes,
            "num_decodes": batch.num_decodes,
        },
    }


def starts_with(salt_prefix: str | None) -> Callable[[str | None], bool] | None:
    """Return the `wants` of `snapshot` for salts with this prefix; None for all of them.

    Examples
    --------
    >>> wants = starts_with("a")
    >>> wants("ab"), wants("b"), wants(None), starts_with(None)
    (True, False, False, None)
    """
    if salt_prefix is None:
        return None
    return lambda salt: salt is not None and salt.startswith(salt_prefix)


def _shown(request: Request) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "state": _STATES.get(request.status, "waiting"),
        "num_prompt": request.num_prompt_tokens,
        "num_cached": request.num_cached_tokens,
        "num_output": request.num_output_tokens,
        "num_blocks": len(request.block_table),
    }


def _tree(engine: LLMEngine, wants: Callable[[str | None], bool] | None) -> dict[str, Any]:
    """Return nodes as [number, parent's number or -1, blocks on the device, requests]."""
    blocks = engine.scheduler.blocks
    if blocks.tree is None:
        return {"num_nodes": 0, "num_blocks": 0, "nodes": []}
    first = blocks.tree.first_nodes(_MAX_NODES, wants or (lambda _: True))
    numbers = {node: i for i, node in enumerate(first)}
    nodes = []
    for node, number in numbers.items():
        parent = -1 if node.parent is None else numbers.get(node.parent, -1)
        on_device = node.block != NO_BLOCK
        users = blocks.allocator.num_owners(node.block) if on_device else 0
        nodes.append([number, parent, int(on_device), users])
    if wants is None:
        num_nodes = blocks.tree.num_nodes
        num_blocks = num_nodes - blocks.tree.num_host_nodes
    else:
        own = blocks.tree.walk(wants)
        num_nodes = len(own)
        num_blocks = sum(node.block != NO_BLOCK for node in own)
    return {"num_nodes": num_nodes, "num_blocks": num_blocks, "nodes": nodes}
