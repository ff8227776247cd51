"""Batch sizes and context lengths to capture CUDA graphs for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["GraphKey", "batch_sizes", "context_buckets"]

# Numbers of sequences; larger sizes in steps of 128.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, order=True)
class GraphKey:
    """Identifies a graph by the shape of its batch.

    Attributes
    ----------
    size : int
        Number of sequences, padding included.
    max_context_len : int
        Longest context the graph supports.
    query_len : int
        Query tokens per sequence.
    is_tree : bool
        Whether a sequence's drafts may form a tree instead of a chain.
    adapters : tuple of str
        Kinds of the weights that LoRA adapters of the batch may change, sorted; () without any.
    has_delta : bool
        Whether the previous pipeline stage sends a delta besides the residual stream.
    """

    size: int
    max_context_len: int
    query_len: int = 1
    is_tree: bool = False
    adapters: tuple[str, ...] = ()
    has_delta: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens per step, padding included."""
        return self.size * self.query_len


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture graphs for; the last is at least `max_num_seqs`.

    GEMM tiles have 32, 64, 96, 128 or 192 rows, and a partial tile takes about as long as a full
    one, so batches are padded to full tiles.

    Examples
    --------
    >>> batch_sizes(20), batch_sizes(3), batch_sizes(300)[-3:]
    ((1, 2, 4, 8, 16, 32), (1, 2, 4), (192, 256, 384))
    """
    sizes: list[int] = []
    for size in itertools.chain(_SIZES, itertools.count(_SIZES[-1] + 128, 128)):
        sizes.append(size)
        if size >= max_num_seqs:
            break
    return tuple(sizes)


def context_buckets(size: int, max_model_len: int) -> tuple[int, ...]:
    """Return the maximum context lengths to capture graphs of `size` sequences for.

    A graph fixes attention's tile and its number of KV splits per sequence. With many sequences
    there are hardly any splits, whatever the length, so one graph serves all lengths.

    Examples
    --------
    >>> context_buckets(1, 40960), context_buckets(64, 40960)
    ((1024, 2048, 4096, 16384, 40960), (40960,))
    """
    if size > 16:
        return (max_model_len,)
    lengths = (1024, 2048, *(1 << power for power in range(12, 40, 2)))
    return (*itertools.takewhile(lambda length: length < max_model_len, lengths), max_model_len)
