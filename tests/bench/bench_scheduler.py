"""Scheduling on the host, without a model: microseconds of schedule, commit and prefix tree.

Microseconds per step by number of running and waiting requests; tree match and insert by depth;
prefill work with and without the prefix tree. Each row is verified before printing.
"""

from __future__ import annotations

import gc
import statistics
from time import perf_counter
from types import SimpleNamespace

from engine.cache.block_allocator import BlockAllocator
from engine.cache.prefix_tree import PrefixTree
from engine.request import Request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler

DEVICE = "CPU"
_RULES = SimpleNamespace(max_tokens=1000, min_tokens=0, ignore_eos=True, stop_token_ids=None)
_STEPS = 60


def _request(name, prompt, rules=_RULES):
    return Request(name, prompt, rules)


def _scheduler(num_running, **options):
    config = {
        "num_blocks": 100_000,
        "max_model_len": 8192,
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(8192, 128 * num_running),
    }
    return Scheduler(SchedulerConfig(**{**config, **options}))


def _sample(output):
    return {s.request: [5] for s in output.sequences if s.is_sampled}


def _fill(scheduler, num_running, num_waiting):
    """Set up `num_running` decoding requests and `num_waiting` queued ones."""
    for number in range(num_running + num_waiting):
        scheduler.add_request(_request(f"r{number}", [number % 997, number % 991] * 64))
    while any(
        r.num_output_tokens == 0 for r in list(scheduler.unfinished_requests())[:num_running]
    ):
        output = scheduler.schedule()
        scheduler.commit(output, _sample(output))
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)


def _time_decode(num_running, num_waiting):
    """Median microseconds of schedule() and commit() in steady decoding."""
    scheduler = _scheduler(num_running)
    _fill(scheduler, num_running, num_waiting)
    schedule, commit = [], []
    for _ in range(_STEPS):
        start = perf_counter()
        output = scheduler.schedule()
        middle = perf_counter()
        ids = _sample(output)
        before = perf_counter()
        scheduler.commit(output, ids)
        schedule.append(middle - start)
        commit.append(perf_counter() - before)
        assert len(output.sequences) == num_running
    return statistics.median(schedule) * 1e6, statistics.median(commit) * 1e6


def _decode_rows():
    for num_running, num_waiting in (
        (1, 0),
        (16, 0),
        (64, 0),
        (256, 0),
        (256, 1000),
        (256, 10_000),
    ):
        schedule, commit = _time_decode(num_running, num_waiting)
        yield {
            "case": f"decode, {num_running} running, {num_waiting} waiting",
            "schedule us": schedule,
            "commit us": commit,
            "us": schedule + commit,
        }


def _churn_row(num_running=256, length=8):
    """Short requests come and go: total microseconds per request."""
    rules = SimpleNamespace(**{**vars(_RULES), "max_tokens": length})
    scheduler = _scheduler(num_running)
    count = 8 * num_running
    start = perf_counter()
    for number in range(count):
        scheduler.add_request(_request(f"r{number}", [number % 997, number % 991] * 64, rules))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.commit(output, _sample(output))
    seconds = perf_counter() - start
    assert scheduler.stats().num_requests_running == 0
    return {"case": f"a request of 128 + {length} tokens, in and out", "us": seconds / count * 1e6}


def _tree_rows(block_size=16):
    for depth in (10, 100, 1000, 8000):
        ids = [number % 32_000 for number in range(depth * block_size)]
        match, insert = [], []
        for _ in range(5):
            tree = PrefixTree(BlockAllocator(depth, block_size))
            table = tree.allocator.allocate(depth)
            start = perf_counter()
            assert tree.insert(ids, table) == depth
            middle = perf_counter()
            assert tree.match(ids).blocks == table
            insert.append(middle - start)
            match.append(perf_counter() - middle)
        yield {
            "case": f"tree of depth {depth}",
            "match us": min(match) * 1e6,
            "insert us": min(insert) * 1e6,
            "match us/block": min(match) * 1e6 / depth,
        }


def _shared_prefix_rows(num_requests=32, common=2000, own=32):
    """Prefill tokens computed for the same requests with and without the tree."""
    rules = SimpleNamespace(**{**vars(_RULES), "max_tokens": 16})
    for caching in (False, True):
        scheduler = _scheduler(num_requests, prefix_caching=caching, max_num_batched_tokens=8192)
        for number in range(num_requests):
            prompt = [7] * common + [number] * own
            scheduler.add_request(_request(f"r{number}", prompt, rules))
        computed, steps_to_all = 0, 0
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            computed += output.num_scheduled_tokens
            steps_to_all += bool(output.num_decodes < len(output.sequences))
            scheduler.commit(output, _sample(output))
        yield {
            "case": f"{num_requests} requests, {common} common tokens, tree {caching}",
            "tokens computed": computed,
            "steps with prefill": steps_to_all,
        }


def main(device):
    """Measure, print, and return the rows (all on the host, whatever `device` is)."""
    gc.freeze()
    rows = [*_decode_rows(), _churn_row(), *_tree_rows(), *_shared_prefix_rows()]
    for row in rows:
        row["op"] = "scheduler"
        shown = {k: f"{v:.1f}" if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{k} {v}" for k, v in shown.items()))
    return rows
