"""Attention masks of transformers as ranges of tokens, without an array of queries x keys.

transformers describes a mask by a function of indices and a 2-D padding mask. Every mask that its
decoders and encoders build is, row by row of the batch, a list of runs of tokens that attend among
themselves, causally or not, perhaps within a window. `make_mask` finds the runs from what each
token may see of its neighbour, which takes time linear in the number of tokens.

Padding is a run of its own: its queries get no keys, so their results are 0, and its keys get no
queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import masking_utils

from engine.errors import ContractError
from engine.integrations._bounds import length_bound
from engine.kernels import Periodic

__all__ = ["AttentionMask", "Runs", "make_mask"]

_REMEDY = "choose another attn_implementation, such as sdpa or flex_attention"

_FLAW = "padding between tokens of a sequence, or tokens that see later ones (images, prefixes)"

# Minimum average number of tokens of the sequences packed into a row, while tracing: runs cannot
# be counted then, and this bounds their number.
_TRACED_RUN = 128

_NEVER_AGAIN = 2**30 - 1  # longest period of a pattern


@dataclass(frozen=True)
class Runs:
    """Ends of runs of tokens, in queries and in keys; queries of a run see only its keys.

    Attributes
    ----------
    query_ends : (N+1,) int32 tensor
        0, then the end of each run, counted over the queries of all rows.
    key_rows, key_positions : (N+1,) int32 tensors
        Likewise for keys: the row of the batch, and the position in that row.
    max_queries, max_keys : int
        Upper bounds of a run's length.
    num_queries : int
        Queries of each row.
    is_exact : bool tensor of shape (), optional
        False if runs cannot express the mask. None if that was checked when the mask was made.
    """

    query_ends: torch.Tensor
    key_rows: torch.Tensor
    key_positions: torch.Tensor
    max_queries: int
    max_keys: int
    num_queries: int
    is_exact: torch.Tensor | None = None

    def of_last(self, count: int) -> Runs:
        """Return the runs of the last `count` queries of each row: they keep their keys."""
        if count >= self.num_queries:
            return self
        ends = self.query_ends
        left_out = self.num_queries - count
        kept = (ends % self.num_queries - left_out).clamp(min=0)
        return replace(
            self,
            query_ends=ends // self.num_queries * count + kept,
            max_queries=min(self.max_queries, count),
            num_queries=count,
        )


@dataclass(frozen=True)
class AttentionMask:
    """Mask that a model passes to its attention layers in place of a tensor.

    Attributes
    ----------
    causal : bool
        The last query of a run sees all its keys, each earlier one a key fewer.
    window : int
        Number of keys that a query sees at most; 0 means no limit.
    pattern : engine.kernels.Periodic, optional
        A window in both directions.
    num_keys : int, optional
        Number of keys that are written (static cache); None means all.
    runs : Runs, optional
        None means that each row of the batch is one run.
    """

    causal: bool
    window: int = 0
    pattern: Periodic | None = None
    num_keys: int | None = None
    runs: Runs | None = None
    ndim = 4  # transformers passes 4-D masks to the layers unchanged

    def to(self, device: Any, **_: Any) -> AttentionMask:
        """Return the mask on another device: accelerate moves a layer's arguments to the layer."""
        if self.runs is None:
            return self
        moved = {
            name: value.to(device)
            for name, value in vars(self.runs).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, runs=replace(self.runs, **moved))

    def __getitem__(self, index: Any) -> AttentionMask:
        """Return the mask of the last queries, as ``mask[:, :, -1:, :]`` is of a dense one.

        Gemma 4 computes its last layers for these alone.
        """
        match index:
            case (batch, heads, slice(start=start, stop=None, step=None), keys) if (
                batch == heads == keys == slice(None) and (start or 0) <= 0 and self.causal
            ):
                runs = self.runs if self.runs is None or not start else self.runs.of_last(-start)
                return replace(self, runs=runs)
        raise ContractError(f"attention mask: has no part {index!r}; {_REMEDY}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"attention mask: is no tensor, it has no {name}; {_REMEDY}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Refuse what a model computes with the mask, such as its sum with scores."""
        name = getattr(function, "__name__", str(function))
        raise ContractError(f"attention mask: is no tensor, {name} cannot take it; {_REMEDY}")


@dataclass(frozen=True)
class _Problem:
    """Sizes of a mask: queries and keys per row, and the position of the first of each."""

    batch: int
    queries: int
    keys: int
    first_query: Any  # int, or a tensor of shape () for a static cache
    first_key: Any
    causal: bool
    is_aligned: bool  # A query belongs to the run of the key at its position.
    device: Any

    def ends_with_last_key(self) -> bool:
        """Return whether the last query is known to be at the position of the last key."""
        if not self.causal:
            return True
        if isinstance(self.first_query, torch.Tensor) or isinstance(self.first_key, torch.Tensor):
            return False
        return bool(self.first_query + self.queries == self.first_key + self.keys)

    def has_one_query(self) -> bool:
        """Return whether this is a decode step."""
        return self.causal and self.queries == 1

    def without_future_keys(self) -> _Problem:
        """Return the problem without keys after the last query; reads its offsets."""
        if not self.causal:
            return self
        first_query = int(self.first_query)
        first_key = int(self.first_key)
        end = first_query + self.queries
        if end > first_key + self.keys:
            raise ContractError(
                f"attention mask: queries end at position {end}; wanted at most the end of the "
                f"keys, {first_key + self.keys}; {_REMEDY}"
            )
        return replace(self, keys=end - first_key, first_query=first_query, first_key=first_key)

    def has_no_padding(self, padding: torch.Tensor | None) -> bool:
        """Return whether all keys are tokens; reads one value."""
        if padding is None:
            return True
        here = padding[:, self.first_key : self.first_key + self.keys]
        return here.shape[1] == self.keys and bool(here.all())

    def queries_before(
        self, row: torch.Tensor, position: torch.Tensor, is_token: torch.Tensor
    ) -> torch.Tensor:
        """Return how many of a row's queries belong to runs that end at key `position` or before.

        If they are not aligned, all queries of a row see its one run of tokens.
        """
        if self.is_aligned:
            return (position + self.first_key - self.first_query).clamp(0, self.queries)
        return self.queries * (position > is_token.int().argmax(1)[row])


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> AttentionMask:
    """Return the mask of one kind of layer; for `AttentionMaskInterface.register`.

    See `transformers.masking_utils.sdpa_mask` for the parameters.

    Raises
    ------
    ContractError
        If runs of tokens cannot express the mask: image tokens that see each other, a model's own
        mask function, padding between tokens of a sequence.

    Examples
    --------
    >>> padding = torch.tensor([[False, True, True], [True, True, True]])
    >>> mask = make_mask(2, 3, 3, attention_mask=padding)
    >>> mask.runs.query_ends.tolist()
    [0, 1, 1, 3, 3, 6, 6]
    """
    if isinstance(attention_mask, AttentionMask):
        return attention_mask
    if use_vmap:
        raise ContractError(f"attention mask: the model adds a mask function of its own; {_REMEDY}")
    is_full = mask_function is masking_utils.bidirectional_mask_function
    is_two_way = local_size is not None and "allow_is_bidirectional_skip" in kwargs
    causal = not is_full and not is_two_way  # checked by `_find_runs`
    pattern = None if causal else _both_ways(q_length, kv_length, local_size)
    mask = AttentionMask(causal, (local_size or 0) if causal else 0, pattern)
    is_aligned = causal or pattern is not None
    problem = _Problem(
        batch_size, q_length, kv_length, q_offset, kv_offset, causal, is_aligned, device
    )
    is_plain = is_full or mask_function is masking_utils.causal_mask_function
    # transformers prepares the masks of compiled decoding in advance: their shapes must not change.
    is_static = causal and q_length == 1 and not kwargs.get("allow_is_causal_skip", True)
    if is_static or _is_traced():
        if is_plain and attention_mask is None and problem.ends_with_last_key():
            return mask
        sequences = 0 if is_plain or attention_mask is not None else kv_length // _TRACED_RUN
        chunks = kv_length // local_size + 1 if local_size else 0
        capacity = batch_size * (3 + sequences + chunks)
        traced = _traced_runs(problem, mask_function, attention_mask, capacity)
        return replace(mask, runs=traced)
    problem = problem.without_future_keys()
    mask = replace(mask, num_keys=None if problem.keys == kv_length else problem.keys)
    if is_plain and problem.has_no_padding(attention_mask):
        return mask
    return replace(mask, runs=_counted_runs(problem, mask_function, attention_mask))


def _is_traced() -> bool:
    """Return whether reading a tensor's value would break the graph that is being made."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _both_ways(num_queries: int, num_keys: int, reach: int | None) -> Periodic | None:
    """Return the pattern of a window to either side, None if it hides nothing."""
    if reach is None or num_keys <= reach + 1:
        return None
    if num_keys != num_queries:
        raise ContractError(
            f"attention mask: a window in both directions needs as many keys as queries, "
            f"{num_queries}; got {num_keys}; {_REMEDY}"
        )
    pattern: Periodic = _window_both_ways(reach)
    return pattern


@cache
def _kept_window(reach: int) -> Periodic:
    """Return the pattern of a window; the cache keeps it alive, since graphs hold its number."""
    return Periodic(period=_NEVER_AGAIN, width=2 * reach + 1, offset=reach)


def _window(reach: int) -> Periodic:
    return _kept_window(reach)


_window_both_ways = torch.compiler.assume_constant_result(_window)  # called while tracing


def _counted_runs(
    problem: _Problem, mask_function: Callable[..., Any], padding: torch.Tensor | None
) -> Runs | None:
    """Return the runs, None if each row is one; reads one small tensor."""
    starts, is_token, flaw = _find_runs(problem, mask_function, padding)
    index = torch.arange(problem.keys, device=starts.device)
    lengths = index - torch.where(starts, index, 0).cummax(1).values + 1
    facts = torch.stack((starts.sum(), lengths.amax(), is_token.all(), flaw)).tolist()
    num_runs, longest, has_no_padding, is_wrong = facts
    if is_wrong:
        raise ContractError(f"attention mask: {_FLAW}; {_REMEDY}")
    if num_runs == problem.batch and has_no_padding:
        return None
    if problem.has_one_query():
        ends = _ends_of_one_query(problem, starts, is_token)
        return Runs(*ends, max_queries=1, max_keys=problem.keys, num_queries=1)
    ends = _ends(problem, starts, is_token, num_runs, compact=True)
    max_keys = min(length_bound(longest), problem.keys)
    queries = min(max_keys, problem.queries) if problem.is_aligned else problem.queries
    return Runs(*ends, max_queries=queries, max_keys=max_keys, num_queries=problem.queries)


def _traced_runs(
    problem: _Problem,
    mask_function: Callable[..., Any],
    padding: torch.Tensor | None,
    capacity: int,
) -> Runs:
    """Return at most `capacity` runs, and some that are empty, without reading a tensor."""
    starts, is_token, flaw = _find_runs(problem, mask_function, padding)
    if problem.has_one_query():
        ends = _ends_of_one_query(problem, starts, is_token)
        return Runs(*ends, max_queries=1, max_keys=problem.keys, num_queries=1, is_exact=~flaw)
    ends = _ends(problem, starts, is_token, capacity, compact=False)
    is_exact = ~flaw & (starts.sum() <= capacity)
    queries = problem.queries
    sizes = {"max_queries": queries, "max_keys": problem.keys, "num_queries": queries}
    return Runs(*ends, **sizes, is_exact=is_exact)


def _find_runs(
    problem: _Problem, mask_function: Callable[..., Any], padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return masks (B, S) of the keys that start a run and of those that are tokens, and a flag.

    The flag () is set if runs cannot express the mask.
    """
    batch = problem.batch
    keys = problem.keys
    position = problem.first_key + torch.arange(keys, device=problem.device)
    is_token = torch.ones((batch, keys), dtype=torch.bool, device=problem.device)
    if problem.causal:
        is_token = is_token & (position < problem.first_query + problem.queries)
    if padding is not None:
        missing = problem.first_key + keys - padding.shape[-1]
        padding = torch.nn.functional.pad(padding.bool(), (0, max(missing, 0)))
        is_token = is_token & padding[:, position]
    row = torch.arange(batch, device=problem.device)[:, None]
    head = torch.zeros_like(row)
    before = position[None, :-1]
    after = position[None, 1:]
    breaks = torch.ones_like(is_token)
    breaks[:, 1:] = ~mask_function(row, head, after, before)
    is_wrong = mask_function(row, head, before, after) == problem.causal
    flaw = (is_wrong & is_token[:, 1:] & is_token[:, :-1]).any()
    changes = torch.ones_like(is_token)
    changes[:, 1:] = is_token[:, 1:] ^ is_token[:, :-1]
    # A token after padding that sees tokens before it: a run of its own would lose them.
    earlier = is_token.cumsum(1) - is_token.int()
    of_others = torch.where(breaks, earlier, 0).cummax(1).values
    is_split = is_token & changes & (earlier > of_others)
    return breaks | changes, is_token, flaw | is_split.any()


def _ends(
    problem: _Problem,
    starts: torch.Tensor,
    is_token: torch.Tensor,
    num_runs: int,
    *,
    compact: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ends of runs in queries, in rows of keys and in positions there, after a 0.

    Each run of the mask becomes two. The first has its queries and, unless it is padding, its keys.
    The second, without queries, has the keys of padding, and those between two rows in the caller's
    layout. `compact` omits second runs without keys.
    """
    keys = problem.keys
    total = starts.numel()
    start = starts.flatten()
    begin = torch.full((num_runs + 1,), total, device=starts.device)
    place = torch.where(start, start.cumsum(0) - 1, num_runs).clamp(max=num_runs)
    begin = begin.scatter(0, place, torch.arange(total, device=starts.device))
    begin[num_runs] = total
    end = begin[1:]
    begin = begin[:-1]
    row = (end - 1) // keys
    position = end - row * keys  # behind the run's last key
    queries = row * problem.queries + problem.queries_before(row, position, is_token)
    has_keys = is_token.flatten()[begin.clamp(max=total - 1)] & (begin < total)
    key_rows = torch.stack((torch.where(has_keys, row, begin // keys), end // keys), 1)
    key_positions = torch.stack((torch.where(has_keys, position, begin % keys), end % keys), 1)
    columns = (queries.repeat_interleave(2), key_rows.flatten(), key_positions.flatten())
    if compact:
        has_second = ~has_keys | (end % keys == 0)
        kept = torch.stack((torch.ones_like(has_second), has_second), 1).flatten()
        columns = tuple(column[kept] for column in columns)
    return tuple(torch.nn.functional.pad(column, (1, 0)).int() for column in columns)


def _ends_of_one_query(
    problem: _Problem, starts: torch.Tensor, is_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ends as `_ends` does, for one query per row: two runs per row, and one more.

    The first run of a row has no query. It skips the keys between those that the previous row's
    query sees and those that this row's query sees. The kernel divides the GPU among the runs, so
    their number is kept small.
    """
    place = torch.arange(problem.keys, device=starts.device)
    row = torch.arange(problem.batch, device=starts.device)
    end = problem.first_query + 1 - problem.first_key
    is_run = is_token & (place == end - 1)  # otherwise the query is padding and sees no key
    begin = torch.where(starts & (place < end), place, 0).amax(1)
    end = torch.zeros_like(begin) + end
    begin = torch.where(is_run.any(1), begin, end)
    return (
        _bounded(torch.stack((row, row + 1), 1), problem.batch),
        _bounded(torch.stack((row, row), 1), problem.batch),
        _bounded(torch.stack((begin, end), 1), 0),
    )


def _bounded(pairs: torch.Tensor, last: int) -> torch.Tensor:
    """Return 0, the pairs one after the other, then `last`."""
    pad = torch.nn.functional.pad
    return pad(pad(pairs.flatten(), (1, 0)), (0, 1), value=last).int()
