"""AsyncEngine: requests of tasks and event loops, aborts, faults, and the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.async_engine import AsyncEngine
from engine.errors import EngineError, RequestError
from engine.outputs import RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingParams
from tests.e2e.tiny import check_drained, make_engine, make_llm, mixed_params, tiny_model

DELTA = RequestOutputKind.DELTA


@pytest.fixture
def model():
    return tiny_model()


def _params(**options):
    return SamplingParams(temperature=0.0, ignore_eos=True, output_kind=DELTA, **options)


async def _ids(engine, prompt, params, *, started=None, **options):
    found = []
    async for output in engine.generate(prompt, params, **options):
        assert isinstance(output, RequestOutput)
        if started is not None:
            started.set()
        found += output.outputs[0].token_ids
    assert output.finished
    return found


def _run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_tasks_get_what_the_offline_engine_gives(model):
    prompts = [[4 + i, 5, 6 + i] for i in range(12)]
    params = [mixed_params(i, max_tokens=3 + i, output_kind=DELTA) for i in range(12)]
    want = [o.outputs[0].token_ids for o in make_llm(model).generate(prompts, params)]

    async def main():
        engine = AsyncEngine(make_engine(model))
        pairs = zip(prompts, params, strict=True)
        found = await asyncio.gather(*(_ids(engine, *pair) for pair in pairs))
        stats = await engine.stats()
        await engine.close()
        return found, stats

    found, stats = _run(main())
    assert found == [list(ids) for ids in want]
    assert stats.generation_tokens == sum(map(len, want))


def test_each_event_loop_gets_its_own_outputs(model):
    engine = AsyncEngine(make_engine(model))
    found = {}

    def serve(first):
        found[first] = _run(_ids(engine, [first, 5], _params(max_tokens=20)))

    threads = [threading.Thread(target=serve, args=(first,)) for first in (7, 8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _run(engine.close())
    want = make_llm(tiny_model()).generate([[f, 5] for f in (7, 8, 9)], _params(max_tokens=20))
    assert [found[f] for f in (7, 8, 9)] == [list(o.outputs[0].token_ids) for o in want]


def test_a_closed_generator_and_a_cancelled_task_abort_their_requests(model):
    core = make_engine(model)

    async def main():
        engine = AsyncEngine(core)
        outputs = engine.generate([4, 5], _params(max_tokens=10_000), request_id="closed")
        await anext(outputs)
        await outputs.aclose()
        started = asyncio.Event()
        params = _params(max_tokens=10_000)
        task = asyncio.ensure_future(_ids(engine, [4, 6], params, started=started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await _ids(engine, [4, 7], _params(max_tokens=2), request_id="closed")
        await engine.stats()
        assert core.num_unfinished_requests == 0
        check_drained(core)
        await engine.close()

    _run(main())


def test_an_aborted_request_yields_its_output_so_far(model):
    async def main():
        engine = AsyncEngine(make_engine(model))
        await engine.abort("unknown")
        async for output in engine.generate([4, 5], _params(max_tokens=10_000), request_id="r"):
            if not output.finished:
                await engine.abort("r")
        await engine.close()
        return output

    assert _run(main()).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_an_id_is_free_as_soon_as_its_request_is_aborted(model, max_tokens):
    """Both calls come before the same step: each generator gets the end of its own request."""

    async def main():
        engine = AsyncEngine(make_engine(model))
        started = asyncio.Event()
        options = {"started": started, "request_id": "r"}
        old = asyncio.ensure_future(_ids(engine, [4, 5], _params(max_tokens=10_000), **options))
        await started.wait()
        blocked = threading.Event()
        engine._call(lambda: blocked.wait(60))  # The thread waits until both calls are queued.
        abort = asyncio.ensure_future(engine.abort("r"))
        params = _params(max_tokens=max_tokens)
        new = asyncio.ensure_future(_ids(engine, [6, 7], params, request_id="r"))
        await asyncio.sleep(0.01)
        blocked.set()
        await abort
        found = await asyncio.wait_for(asyncio.gather(old, new), 20)
        assert engine.error is None
        await engine.close()
        return found

    aborted, whole = _run(main())
    assert 0 < len(aborted) < 10_000 and len(whole) == max_tokens


def test_a_bad_request_is_refused_and_the_others_go_on(model):
    async def main():
        engine = AsyncEngine(make_engine(model, max_num_queued_requests=100))
        good = asyncio.ensure_future(_ids(engine, [4, 5], _params(max_tokens=100), request_id="r"))
        await asyncio.sleep(0)
        for prompt, options, message in [
            ([4], {"request_id": "r"}, "in use"),  # first, while "r" still runs
            ([10**6], {}, "token id"),
            ("text", {}, "no tokenizer"),
            ([4], {"timeout": -1}, "timeout must be"),
        ]:
            with pytest.raises(RequestError, match=message):
                await _ids(engine, prompt, _params(max_tokens=3), **options)
        assert len(await good) == 100
        await engine.close()

    _run(main())


def test_all_learn_why_the_engine_failed(model):
    core = make_engine(model)

    async def main():
        engine = AsyncEngine(core)
        outputs = engine.generate([4, 5], _params(max_tokens=10_000))
        await anext(outputs)
        core.step = lambda: 1 / 0
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            async for _ in outputs:
                pass
        assert isinstance(engine.error, ZeroDivisionError)
        with pytest.raises(EngineError, match="has ended"):
            await _ids(engine, [4], _params(max_tokens=1))
        with pytest.raises(EngineError, match="has ended"):
            await engine.stats()
        await engine.close()

    _run(main())
    assert core.kv_cache.is_closed


def test_closing_ends_the_requests(model):
    async def main():
        engine = AsyncEngine(make_engine(model))
        outputs = engine.generate([4, 5], _params(max_tokens=10_000))
        await anext(outputs)
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            async for _ in outputs:
                pass
        await engine.close()

    _run(main())


def test_a_call_made_while_the_thread_ends_is_answered(model):
    async def main():
        engine = AsyncEngine(make_engine(model))
        last_look, called = threading.Event(), threading.Event()
        fail_calls = engine._fail_calls

        def slow_end():
            fail_calls()
            if threading.current_thread() is engine._thread:
                last_look.set()
                assert called.wait(20)

        engine._fail_calls = slow_end
        closing = asyncio.create_task(engine.close())
        assert await asyncio.to_thread(last_look.wait, 20)
        try:
            with pytest.raises(EngineError, match="closed"):
                await asyncio.wait_for(engine.stats(), 5)
        finally:
            called.set()
        await closing

    _run(main())


def test_it_tells_whether_a_step_hangs(model, monkeypatch):
    core = make_engine(model, step_timeout=0.2)
    forward, is_in_step, go_on = type(model).forward, threading.Event(), threading.Event()

    def hang(self, batch, pages):
        is_in_step.set()
        go_on.wait(30)
        return forward(self, batch, pages)

    monkeypatch.setattr(type(model), "forward", hang)

    async def main():
        engine = AsyncEngine(core)
        task = asyncio.ensure_future(_ids(engine, [5, 6], _params(max_tokens=2)))
        await asyncio.to_thread(is_in_step.wait, 30)
        assert engine.is_responsive
        while engine.is_responsive:
            await asyncio.sleep(0.01)
        go_on.set()
        await task
        assert engine.is_responsive
        await engine.close()
        assert not engine.is_responsive

    _run(main())


def test_a_call_that_follows_another_waits_for_a_step(model):
    """As the parts of embeddings, each asked for when the last has come."""
    made, num_parts = make_engine(model), 5
    steps, seen, num_steps = made.step, [], 0

    def step():
        nonlocal num_steps
        num_steps += 1
        return steps()

    made.step = step

    async def main():
        engine = AsyncEngine(made)

        def part():
            seen.append(num_steps)
            if len(seen) < num_parts:
                engine._call(part)

        task = asyncio.create_task(_ids(engine, [1, 2], _params(max_tokens=60)))
        await engine.stats()
        engine._call(part)
        await task
        await engine.close()

    _run(main())
    assert len(set(seen)) == len(seen) == num_parts, seen
