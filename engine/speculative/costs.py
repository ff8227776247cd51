"""Cost of a step with and without drafts, measured once, when the engine is constructed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.layers.batch import ForwardBatch
from engine.request import Request
from engine.runner.model_runner import ModelRunner
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import SamplingParams
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["StepCosts", "graph_seconds", "measure_propose_costs", "measure_step_costs"]

_SIZES = (1, 8, 64, 256)  # sequences per step, measured with CUDA graphs
_NUM_TOKENS = (1, 2, 4, 8, 16)  # tokens per step, measured without graphs
# Measuring stops at whichever limit comes first.
_CALLS = 3
_SECONDS = 0.5


class StepCosts:
    """Seconds of a decode step, interpolated between measured points and extrapolated beyond.

    Parameters
    ----------
    sizes : sequence of int
        Batch sizes in sequences, ascending. With a single size, the cost depends only on the number
        of tokens.
    query_lens : sequence of int
        Query tokens of each sequence, ascending.
    seconds : array-like
        (len(sizes), len(query_lens)).

    Examples
    --------
    >>> costs = StepCosts([1], [1, 2, 4], [[0.010, 0.012, 0.016]])
    >>> round(costs.seconds(1, 3), 4), round(costs.seconds(2, 4), 4)
    (0.014, 0.024)
    """

    def __init__(self, sizes: Sequence[int], query_lens: Sequence[int], seconds: Any) -> None:
        self._sizes = np.array(sizes, np.float64)
        self._lens = np.array(query_lens, np.float64)
        times = np.array(seconds, np.float64)
        # More tokens never make a step faster: a measurement that says so is noise.
        self._seconds = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
        self._known: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def seconds(self, num_sequences: int, query_len: float) -> float:
        """Return the seconds of a step of `num_sequences` with `query_len` tokens each."""
        return float(self.all_seconds(num_sequences, np.array([query_len]))[0])

    def all_of(self, num_sequences: int, query_lens: tuple[int, ...]) -> list[float]:
        """Return `seconds` for each of `query_lens` (memoised)."""
        key = num_sequences, query_lens
        if (known := self._known.get(key)) is None:
            known = self.all_seconds(num_sequences, np.array(query_lens, np.float64)).tolist()
            self._known[key] = known
        return known

    def all_seconds(self, num_sequences: int, query_lens: Any) -> Any:
        """Return `seconds` for each of `query_lens`, an array of possibly fractional lengths."""
        if len(self._sizes) == 1:
            return _interpolated(num_sequences * query_lens, self._lens, self._seconds[0])
        # Interpolate between the two nearest sizes, or extrapolate from the last two.
        above = int(np.clip(np.searchsorted(self._sizes, num_sequences), 1, len(self._sizes) - 1))
        low, high = self._sizes[above - 1 : above + 1]
        share = (num_sequences - low) / (high - low)
        rows = self._seconds[above - 1 : above + 1]
        first, second = (_interpolated(query_lens, self._lens, row) for row in rows)
        return np.maximum(first + share * (second - first), np.minimum(first, second))


def measure_step_costs(
    runner: ModelRunner, query_lens: Sequence[int], max_num_seqs: int, max_num_batched_tokens: int
) -> StepCosts:
    """Time decode steps of a runner before its first request; overwrites its first blocks.

    Parameters
    ----------
    runner : ModelRunner
    query_lens : sequence of int
        1, then the query lengths of the captured graphs, ascending.
    max_num_seqs, max_num_batched_tokens : int
        Maximum number of sequences, and of tokens, per step; of tokens also per sequence.
    """
    if runner.graphs is not None:
        sizes = [n for n in _SIZES if n < max_num_seqs] + [max_num_seqs]
        seconds = [[graph_seconds(runner, n, length) for length in query_lens] for n in sizes]
        return StepCosts(sizes, query_lens, seconds)
    room = runner.kv_cache.num_blocks * runner.kv_cache.geometry.block_size
    room = min(room, max_num_batched_tokens)
    lens = [n for n in _NUM_TOKENS if n <= max(1, min(room, max(query_lens)))]
    return StepCosts([1], lens, [[_forward_seconds(runner, n) for n in lens]])


def measure_propose_costs(runner: ModelRunner, max_num_seqs: int, num_blocks: int) -> StepCosts:
    """Time a draft model's whole steps, from launch to read-back, before its first request.

    Overwrites its first blocks.

    Parameters
    ----------
    runner : ModelRunner
        Runner of the draft model.
    max_num_seqs, num_blocks : int
        Maximum number of sequences per step, and number of blocks that may be overwritten.
    """
    most = min(max_num_seqs, num_blocks)
    sizes = [n for n in (_SIZES if runner.graphs is not None else (1,)) if n < most] + [most]
    requests = [_dummy_request(block) for block in range(most)]
    seconds = [[_step_seconds(runner, requests[:n], length) for length in (1, 2)] for n in sizes]
    runner.release(requests)
    return StepCosts(sizes, [1, 2], seconds)


def _dummy_request(block: int) -> Request:
    params = SamplingParams(temperature=0.0)
    request = Request(f"dummy-{block}", [0, 0], params, spec=SamplingSpec(params, seed=0))
    request.block_table = [block]
    request.max_num_tokens = 3
    return request


def _step_seconds(runner: ModelRunner, requests: Sequence[Request], query_len: int) -> float:
    sequences = [ScheduledSequence(request, 0, query_len, True, 0) for request in requests]
    are_decodes = query_len == 1 or runner.graphs is not None
    step = ScheduleOutput(
        0,
        sequences,
        num_scheduled_tokens=query_len * len(sequences),
        num_decodes=len(sequences) if are_decodes else 0,
        query_len=query_len if are_decodes else 1,
    )
    return _shortest(lambda: runner.read(runner.launch(step)), runner.model.device)


def graph_seconds(runner: Any, num_sequences: int, query_len: int) -> float:
    """Return the seconds that a graph replay takes for `num_sequences` of `query_len` tokens."""
    key = runner.graphs.key(num_sequences, query_len, query_len)
    return _shortest(lambda: runner.graphs.repeat(key), runner.model.device)


def _forward_seconds(runner: Any, num_tokens: int) -> float:
    model = runner.model
    size = runner.kv_cache.geometry.block_size
    table = list(range(-(-num_tokens // size)))
    ids = np.arange(num_tokens, dtype=np.int32) % model.config.vocab_size
    slots = runner.kv_cache.first_slots(1)
    batch = ForwardBatch.build([ids], [0], [table], size, logits="all", state_slots=slots)
    batch = batch.to(model.device)
    return _shortest(lambda: model.forward(batch, runner.kv_cache.layers), model.device)


def _shortest(call: Callable[[], Any], device: Any) -> float:
    """Return the time of the fastest call in seconds; the first call may load kernels."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _CALLS and sum(times) < _SECONDS):
        start = time.perf_counter()
        call()
        if device.is_cuda:
            device.xp.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _interpolated(x: Any, at: Any, values: Any) -> Any:
    """Interpolate linearly at `x`; beyond the last point, continue its slope."""
    if len(at) == 1:
        return values[0] * np.maximum(x / at[0], 1.0)
    slope = max(0.0, (values[-1] - values[-2]) / (at[-1] - at[-2]))
    return np.interp(x, at, values) + slope * np.maximum(0.0, x - at[-1])
