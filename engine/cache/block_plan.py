"""Plan the number of KV blocks: as many as fit in the device's memory, with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine import dtypes
from engine.cache.kv_cache import KVGeometry
from engine.cache.memory_pool import format_bytes
from engine.errors import ConfigError, OutOfMemoryError

__all__ = ["BlockPlan", "MemoryBudget", "plan_num_blocks"]


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of a device's memory, by use.

    Parameters
    ----------
    total : int
        The device's memory.
    others : int
        Used by other processes, and by this one outside the engine.
    weights, activations : int
        The model's weights, and the activations of its largest step.
    utilization : float
        Share of `total` for all of these and the pages together, in (0, 1].
    drafts : int
        The draft model or head, excluding its pages for these blocks.
    collectives : int
        Buffers of the collectives between tensor-parallel ranks.
    links : int
        Activations that the previous pipeline stage writes to this device.
    states : int
        State slots of recurrent layers.
    """

    total: int
    others: int
    weights: int
    activations: int
    utilization: float = 0.9
    drafts: int = 0
    collectives: int = 0
    links: int = 0
    states: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(f"utilization must be in (0, 1]; got {self.utilization}")

    @property
    def left(self) -> int:
        """Bytes left for the pages; negative if the other users already exceed the share."""
        used = self.others + self.weights + self.activations + self.drafts
        used += self.collectives + self.links + self.states
        return int(self.total * self.utilization) - used

    def __str__(self) -> str:
        share = f"{100 * self.utilization:.3g}%"
        drafts = f", what proposes drafts {format_bytes(self.drafts)}" if self.drafts else ""
        size = format_bytes(self.collectives)
        buffers = f", buffers of collectives {size}" if self.collectives else ""
        links = f", links of stages {format_bytes(self.links)}" if self.links else ""
        states = f", states {format_bytes(self.states)}" if self.states else ""
        return (
            f"{format_bytes(self.total)} in total, of which {share} may be used; "
            f"others use {format_bytes(self.others)}, weights {format_bytes(self.weights)}, "
            f"activations {format_bytes(self.activations)}{drafts}{buffers}{links}{states}; "
            f"left for the KV cache: {format_bytes(self.left)}"
        )


@dataclass(frozen=True)
class BlockPlan:
    """The number of blocks to allocate, and the reason for it."""

    num_blocks: int
    reason: str


def plan_num_blocks(
    budget: MemoryBudget,
    geometry: KVGeometry,
    *,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None = None,
    draft_bytes_per_block: int = 0,
) -> BlockPlan:
    """Choose the number of blocks: the most that can ever be used, or the most that fit.

    Parameters
    ----------
    budget : MemoryBudget
        The device's memory and its users.
    geometry : KVGeometry
        Shape and dtype of one block.
    max_model_len, max_num_seqs : int
        Maximum tokens per sequence, and maximum running sequences; their product bounds the
        number of useful blocks.
    num_blocks : int, optional
        Exact number requested by the user.
    draft_bytes_per_block : int
        Additional bytes of each block in the draft model's cache.

    Raises
    ------
    OutOfMemoryError
        If `num_blocks`, or one request of `max_model_len` tokens, does not fit. The message lists
        the users, the tokens that fit, and the nearest settings that work.

    Examples
    --------
    >>> geometry = KVGeometry.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16")
    >>> budget = MemoryBudget(total=1 << 20, others=0, weights=1 << 19, activations=0)
    >>> plan_num_blocks(budget, geometry, max_model_len=256, max_num_seqs=8).reason
    '25 blocks (400 tokens, 400.00 KiB): as many as fit into 409.60 KiB'
    """
    # Layers that are all recurrent need blocks only to name their prefixes.
    size = max(1, geometry.bytes_per_block + draft_bytes_per_block)
    fitting = max(0, budget.left) // size
    per_request = -(-max_model_len // geometry.block_size)
    wanted = per_request if num_blocks is None else num_blocks
    if fitting < wanted:
        raise _does_not_fit(budget, geometry, size, wanted, fitting, max_model_len, num_blocks)
    if num_blocks is not None:
        chosen = num_blocks
        why = "as asked for"
    elif fitting >= per_request * max_num_seqs:
        chosen = per_request * max_num_seqs
        why = f"enough for {max_num_seqs} requests of {max_model_len} tokens"
    else:
        chosen = fitting
        why = f"as many as fit into {format_bytes(budget.left)}"
    tokens = chosen * geometry.block_size
    text = f"{chosen} blocks ({tokens} tokens, {format_bytes(chosen * size)}): {why}"
    return BlockPlan(chosen, text)


def _does_not_fit(
    budget: MemoryBudget,
    geometry: KVGeometry,
    size: int,
    wanted: int,
    fitting: int,
    max_model_len: int,
    asked: int | None,
) -> OutOfMemoryError:
    """Build the error, with the nearest settings that work; `size`: bytes per block in total."""
    tokens = fitting * geometry.block_size
    lacking = wanted * size - budget.left
    what = f"num_blocks={wanted}" if asked else f"one request of max_model_len={max_model_len}"
    cures = []
    if fitting:
        cures.append(f"num_blocks={fitting}" if asked else f"max_model_len={tokens}")
    utilization = math.ceil((budget.utilization + lacking / budget.total) * 1000) / 1000
    if utilization <= 1.0:
        cures.append(f"memory_utilization={utilization:.3f}")
    if 0 < lacking <= budget.activations:
        room = format_bytes(budget.activations - lacking)
        cures.append(f"max_num_batched_tokens and max_num_seqs whose activations take {room}")
    saved = budget.weights / 2 + wanted * size / 2
    if geometry.dtype == "float32" and saved >= lacking:
        cures.append('dtype="bfloat16", which halves weights and cache')
    halved = wanted * (size - geometry.bytes_per_block / 2)
    if geometry.dtype not in ("float32", *dtypes.KV_CODE_DTYPES) and halved <= budget.left:
        cures.append('kv_cache_dtype="fp8" or "int8", which halves the cache')
    if budget.states:
        cures.append("a lower max_num_seqs: each request has its states")
    cures.append(f"free {format_bytes(lacking)} elsewhere")
    return OutOfMemoryError(
        f"{what} needs {format_bytes(wanted * size)} of KV cache. {budget}, "
        f"enough for {tokens} tokens. What would fit: {'; or '.join(cures)}."
    )
