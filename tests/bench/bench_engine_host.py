"""Host time of an engine step, excluding model and sampler.

One step of N running decode requests on the mock model: schedule, lay out, commit, deliver outputs.
The time of `forward` and of the sampler is subtracted.

With drafts, also the time from a step's result to the next launch, during which the device idles.
Graphs are mocked: their results count upwards, so "ngram" drafts for a counting prompt are accepted
and all other drafts are rejected.
"""

from __future__ import annotations

import time
from collections import deque
from random import Random

import numpy as np

from engine import LLMEngine, SamplingParams
from engine.kernels.sample import SampleResult
from engine.models.mock_model import MockModel
from engine.sampling_params import RequestOutputKind
from engine.speculative import make_speculation

DEVICE = "CPU"
_STEPS = 200
_PERIOD, _VOCAB = 20, 1000  # the prompt cycles through 0 to _PERIOD - 1


class _FreeOfCharge:
    """Measures the time spent in work a GPU would do."""

    def __init__(self):
        self.seconds = 0.0

    def wrap(self, function):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def _sample(logits, batch):
    ids = logits.argmax(axis=1).astype(np.int32)
    return SampleResult(ids, np.zeros(len(ids), np.int32), None, None, None, None)


class _Tokenizer:
    special_ids, strip_left, eos_token_ids = frozenset(), 0, ()

    def token_bytes(self, token_id):
        return b"word "


def _engine_of(model, num_requests, blocks_of_each, **options):
    return LLMEngine(
        model,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        num_blocks=num_requests * blocks_of_each,
        async_scheduling=True,
        **options,
    )


def _engine(num_requests, kind, *, with_text):
    model = MockModel(vocab_size=32, max_model_len=8192)
    model.has_tokenizer, model.tokenizer = with_text, _Tokenizer()
    engine = _engine_of(model, num_requests, 48)
    free = _FreeOfCharge()
    model.forward = free.wrap(model.forward)
    engine.runner.sampler = free.wrap(_sample)
    params = SamplingParams(max_tokens=600, ignore_eos=True, output_kind=kind, temperature=0.7)
    for index in range(num_requests):
        engine.add_request(f"r{index}", [index % 32] * (100 + index % 16), params)
    for _ in range(num_requests * 120 // 8192 + 8):
        engine.step()
    return engine, free, params


def _measure(name, num_requests, kind, *, with_text=False, num_changed=0):
    engine, free, params = _engine(num_requests, kind, with_text=with_text)
    names, times = deque(f"r{index}" for index in range(num_requests)), []
    for step in range(_STEPS):
        for index in range(num_changed):
            engine.abort_request(names.popleft())
            names.append(f"r{step}-{index}")
            engine.add_request(names[-1], [step % 32, index, *range(30)], params)
        free.seconds = 0.0
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start - free.seconds)
    return _row(f"{name} {num_requests}", {"": times})


def _row(case, all_seconds):
    """Print and return a row with the median and the 5th percentile of each list of times."""
    row = {"op": "engine_host", "case": case}
    for what, seconds in all_seconds.items():
        ordered = sorted(seconds)
        row[f"{what}median us"] = ordered[len(ordered) // 2] * 1e6
        row[f"{what}best us"] = ordered[len(ordered) // 20] * 1e6
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return row


def _random_drafts(count):
    rng = Random(0)

    def propose(token_ids, num_tokens):
        return [rng.randrange(_PERIOD, _VOCAB) for _ in range(count)]

    return {"proposer": propose, "num_speculative_tokens": count, "adaptive": False}


def _engine_with_drafts(num_requests, config):
    model = MockModel(_VOCAB, max_model_len=4096)
    engine = _engine_of(model, num_requests, 128, speculative_config=config)
    limits, runner = engine.config.scheduler, engine.runner
    runner.capture_graphs(limits.max_model_len, limits.max_draft_tokens)
    engine.speculation = engine._streams._speculation = make_speculation(
        engine.config.speculative, engine.scheduler, runner, overlaps=True
    )
    params = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)
    for index in range(num_requests):
        engine.add_request(f"r{index}", [*range(_PERIOD)] * 25, params)
    for _ in range(num_requests * 500 // 8192 + 12):
        engine.step()
    return engine


def _measure_drafts(name, num_requests, config):
    """Measure draft-verifying steps: total host time, and host time while the device idles."""
    engine = _engine_with_drafts(num_requests, config)
    inputs, now, at = engine.runner.graphs._inputs, time.perf_counter, {}

    def replay(key):
        at["launch"] = now()
        ids = inputs.arrays["token_ids"][: key.num_tokens]
        inputs.results[: key.num_tokens] = (ids + 1) % _PERIOD
        inputs.results[key.num_tokens : 2 * key.num_tokens] = 0
        at["launched"] = now()

    engine.runner.graphs.replay = replay
    engine.model.check_ranks = lambda: at.update(result=now())  # called once results have arrived
    waits, times = [], []
    for _ in range(_STEPS):
        start = now()
        engine.step()
        times.append(now() - start - (at["launched"] - at["launch"]))
        if at["result"] < at["launch"]:
            waits.append(at["launch"] - at["result"])
    assert len(waits) > _STEPS // 2, "hardly any step has verified drafts"
    return _row(f"{name} {num_requests}", {"": times, "result to launch, ": waits})


def main():
    final, delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    rows = [_measure("decode, final output only", n, final) for n in (1, 16, 64, 256)]
    rows.append(_measure("decode, final output only, text at the end", 256, final, with_text=True))
    rows.append(_measure("decode, 4 come and go a step", 256, final, num_changed=4))
    rows.append(_measure("decode, deltas", 256, delta))
    rows.append(_measure("decode, deltas with text", 256, delta, with_text=True))
    for count in (1, 64):
        rows.append(_measure_drafts("4 tokens, random drafts", count, _random_drafts(3)))
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
        rows.append(_measure_drafts("4 tokens, n-gram", count, ngram))
    return rows
