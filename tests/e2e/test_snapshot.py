"""The watch view's picture of an engine: counts that agree, bounds, nothing of any text."""

from __future__ import annotations

import asyncio
import json

from engine.async_engine import AsyncEngine
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.snapshot import StepClock, snapshot
from tests.e2e.tiny import make_engine, run, tiny_model


def _params(max_tokens=20):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_requests_batch_and_blocks():
    engine = make_engine(tiny_model(), max_num_seqs=2)
    for i in range(3):
        engine.add_request(f"r{i}", list(range(5, 25)), _params())
    seen = snapshot(engine)
    assert (seen["num_running"], seen["num_waiting"]) == (0, 3)
    engine.step()
    seen = snapshot(engine)
    assert seen["batch"]["num_tokens"] == 20 and seen["batch"]["num_prefills"] == 1
    while snapshot(engine)["batch"]["num_decodes"] < 2:
        engine.step()
    seen = snapshot(engine)
    assert seen["batch"] == {"num_tokens": 2, "num_prefills": 0, "num_decodes": 2}
    states = [request["state"] for request in seen["requests"]]
    assert states == ["running", "running", "waiting"]
    second = seen["requests"][1]
    assert (second["num_prompt"], second["num_cached"]) == (20, 16)
    assert second["num_blocks"] == 2 and second["num_output"] >= 1
    # One block of the prompt is shared, so that the two hold three together.
    assert seen["num_blocks"] - seen["num_free_blocks"] == 3
    assert seen["tree"] == {"num_nodes": 1, "num_blocks": 1, "nodes": [[0, -1, 1, 2]]}
    assert json.loads(json.dumps(seen)) == seen
    run(engine)
    seen = snapshot(engine)
    assert seen["requests"] == [] and seen["num_free_blocks"] + seen["num_cached_blocks"] == 64


def test_the_tree_is_breadth_first_and_bounded():
    engine = make_engine(tiny_model(), num_blocks=400)
    for i in range(30):
        engine.add_request(f"r{i}", [i, *[7] * 195], _params(1))
    run(engine)
    tree = snapshot(engine)["tree"]
    assert tree["num_nodes"] == 30 * 12
    assert len(tree["nodes"]) == 200
    parents = [parent for _, parent, _, _ in tree["nodes"]]
    assert parents[:30] == [-1] * 30 and parents == sorted(parents)
    assert all(parent < number for number, parent, _, _ in tree["nodes"])


def test_at_most_256_requests_are_described():
    engine = make_engine(tiny_model())
    for i in range(300):
        engine.add_request(f"r{i}", [5], _params())
    seen = snapshot(engine)
    assert len(seen["requests"]) == 256 and seen["num_waiting"] == 300
    engine.close()


def test_the_clock_measures_steps_and_tokens(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine.snapshot.time.monotonic", lambda: now[0])
    clock = StepClock()
    clock.note(0.002)
    assert clock.step_seconds == 0.002
    for _ in range(100):
        clock.note(0.004)
    assert abs(clock.step_seconds - 0.004) < 1e-6
    now[0] += 0.5
    assert clock.rate(100) == 200.0
    now[0] += 0.01
    assert clock.rate(5000) == 200.0  # two readers at once share a figure
    now[0] += 1.0
    assert clock.rate(100) == 0.0


def test_async_engine_has_it():
    async def main():
        engine = AsyncEngine(make_engine(tiny_model()))
        params = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream = engine.generate([1, 2, 3], params, request_id="mine")
        await anext(stream)
        seen = await engine.snapshot()
        async for _ in stream:
            pass
        await engine.close()
        return seen

    seen = asyncio.run(asyncio.wait_for(main(), 60))
    assert seen["step_ms"] > 0 and [r["id"] for r in seen["requests"]] == ["mine"]
