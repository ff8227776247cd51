"""Several replicas: routing, requests that outlive their replica, loads, what ends when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import ConfigError, EngineError, RequestError
from engine.llm_engine import QueueFullError
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import messages as m
from engine.server import sockets
from engine.server.engine_loop import EngineLoop
from engine.server.engine_process import replica_device
from engine.server.gpus import replica_gpus
from engine.server.replicas import client as replica_client
from engine.server.replicas.client import ReplicaClient
from engine.server.sockets import bound_socket
from engine.server.warm_up import warm_up
from tests.e2e.tiny import Words, check_drained, make_engine, make_llm, tiny_model
from tests.server.loops import TOKEN, collected, eventually, run

ROOT = Path(__file__).parents[2]
CUMULATIVE, DELTA, FINAL = KIND_TYPES = tuple(RequestOutputKind)

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_k": 9},
    {"n": 3, "seed": 5},
    {"n": 2, "best_of": 4, "seed": 6},
    {"n": 2, "seed": 7, "logprobs": 2},
    {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.0},
    {"seed": 9, "allowed_token_ids": list(range(20, 40)), "min_tokens": 30},
    {"seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 21, "stop": ["w1 w7", "55"]},
    {"seed": 22, "n": 2, "stop": ["17"], "include_stop_str_in_output": True, "logprobs": 1},
]


class Replica:
    """An engine and its loop on a thread; `die` ends it as a fault would."""

    def __init__(self, folder, number, **options):
        self.number, self.address = number, f"ipc://{folder}/{number}"
        self.options = {"deterministic": True} | options
        self.start()

    def start(self):
        options = dict(self.options)
        model = tiny_model(deterministic=options.pop("deterministic"))
        self.engine = make_engine(model, **options)
        self.socket = bound_socket(self.address, TOKEN)
        self.loop = EngineLoop(self.engine, self.socket, TOKEN)
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_dying, self.num_steps, self.last_step = False, 0, None
        step = self.engine.step

        def counted():
            self.may_step.wait(20)
            if self.is_dying or self.num_steps == self.last_step:
                raise RuntimeError("the replica broke")
            self.num_steps += 1
            return step()

        self.engine.step = counted
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        with contextlib.suppress(RuntimeError):
            self.loop.run()
        self.socket.close()

    def die(self):
        self.is_dying = True
        self.may_step.set()

    def stop(self):
        self.may_step.set()
        self.loop.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def replicas(tmp_path):
    """A function that starts replicas; they end with the test."""
    found = []

    def start(count, **options):
        new = [Replica(tmp_path, len(found) + i, **options) for i in range(count)]
        found.extend(new)
        return new

    yield start
    for replica in found:
        replica.stop()


@contextlib.asynccontextmanager
async def connected(replicas, tokenizer=None, **options):
    addresses = {each.number: each.address for each in replicas}
    options = {"has_peers": False} | options
    client = await ReplicaClient.connect(addresses, TOKEN, tokenizer, **options)
    try:
        await eventually(lambda: len(client._clients) == len(replicas))
        yield client
        await eventually(lambda: not client._placed)
        client._router.check_integrity()
        loads = [client._router.load(number) for number in client._router.replicas]
        assert client._has_peers or not any(loads)
    finally:
        await client.close()


def _params(**options):
    return SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | options))


def _greedy(max_tokens=40, **options):
    return _params(temperature=0.0, max_tokens=max_tokens, **options)


def _check_drained(replica):
    """Stop a replica when it has nothing to do; nothing may be left in it."""
    run(eventually(lambda: not replica.engine.has_unfinished_requests()))
    replica.stop()
    check_drained(replica.engine)


async def _num_tokens(stream):
    """Read a stream to its end; return how many tokens its request has got."""
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    return len(outputs[-1].outputs[0].token_ids)


def _joined(outputs, kind):
    """Return each continuation's ids, text, ends and log-probabilities."""
    whole = {}
    for output in outputs:
        for each in output.outputs:
            ids, text, logprobs = whole.get(each.index, ([], "", []))[:3]
            if kind is not DELTA:
                ids, text, logprobs = [], "", []
            whole[each.index] = (
                [*ids, *each.token_ids],
                text + each.text,
                [*logprobs, *(each.logprobs or ())],
                each.finish_reason,
                each.stop_reason,
            )
    return whole


def _rounded(whole):
    """Return the same with log-probabilities as far as recomputed ones are equal."""
    return {
        index: (
            *found[:2],
            [{i: round(p.logprob, 3) for i, p in entry.items()} for entry in found[2]],
            *found[3:],
        )
        for index, found in whole.items()
    }


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_a_replica_that_breaks_loses_no_request_and_changes_no_token(kind, replicas, monkeypatch):
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    options = [o for o in KINDS if kind is not DELTA or "best_of" not in o]
    prompts = [f"w{4 + i} w5 w{6 + i}" for i in range(len(options))]
    want = make_llm(tiny_model(deterministic=True)).generate(
        prompts, [_params(**o) for o in options]
    )
    found = replicas(2)
    found[0].last_step = 25

    async def main():
        async with connected(found, Words()) as client:
            pairs = zip(prompts, options, strict=True)
            streams = [collected(client, p, _params(**o, output_kind=kind)) for p, o in pairs]
            outputs = await asyncio.gather(*streams)
            assert client.replicas == {0: "starting", 1: "ready"}
            return outputs

    outputs = run(main())
    assert not found[0].thread.is_alive() and found[0].num_steps == 25
    assert found[0].engine.num_unfinished_requests >= 1
    _check_drained(found[1])
    for have, wanted in zip(outputs, want, strict=True):
        assert have[-1].finished
        assert _rounded(_joined(have, kind)) == _rounded(_joined([wanted], CUMULATIVE))
        if kind is CUMULATIVE:
            lengths = [len(output.outputs[0].token_ids) for output in have]
            assert "best_of" in str(wanted) or lengths == sorted(lengths)


def test_a_request_without_a_seed_gets_one_that_it_keeps(replicas):
    found = replicas(2)
    params = _params(temperature=1.5, output_kind=DELTA)

    async def tokens(breaks):
        async with connected(found, seed=(7, 0)) as client:
            ids = []
            async for output in client.generate([5, 6, 7], params):
                ids += output.outputs[0].token_ids
                if breaks and len(ids) == 10:
                    [placed] = client._placed.values()
                    found[placed.route.replica].die()
            return ids

    whole = run(tokens(False))
    assert run(tokens(True)) == whole and len(whole) == 40


@pytest.mark.kills
@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_lose_nothing(seed, replicas, monkeypatch):
    """Requests of all kinds, ten at a time, while replicas break and come back."""
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    monkeypatch.setattr(replica_client, "_MAX_CRASHES", 1000)
    rng = random.Random(seed)
    options = [rng.choice(KINDS) | {"max_tokens": rng.randrange(30, 90)} for _ in range(30)]
    prompts = [" ".join(f"w{rng.randrange(4, 90)}" for _ in range(rng.randrange(1, 40)))] * 5
    prompts += [" ".join(f"w{rng.randrange(4, 90)}" for _ in range(9)) for _ in range(25)]
    want = make_llm(tiny_model(deterministic=True)).generate(
        prompts, [_params(**o) for o in options]
    )
    found = replicas(3, num_blocks=rng.choice([16, 64]))

    async def kill():
        """Return how many have ended."""
        num_ended = 0
        for _ in range(6):
            await asyncio.sleep(rng.random() * 0.2)
            victim = rng.choice(found)
            victim.die()
            await asyncio.to_thread(victim.thread.join, 5)
            if not victim.thread.is_alive():  # an idle one has not noticed
                victim.start()
                num_ended += 1
        return num_ended

    async def main():
        async with connected(found, Words(), grace_seconds=60) as client:
            slots = asyncio.Semaphore(10)

            async def one(prompt, option):
                async with slots:
                    kind = rng.choice([CUMULATIVE, FINAL] if "best_of" in option else [*KIND_TYPES])
                    return kind, await collected(
                        client, prompt, _params(**option, output_kind=kind)
                    )

            tasks = [one(*pair) for pair in zip(prompts, options, strict=True)]
            answers, num_ended = await asyncio.gather(asyncio.gather(*tasks), kill())
            assert num_ended >= 2
            for each in found:
                if each.is_dying and each.thread.is_alive():
                    each.is_dying = False
            return answers

    for (kind, have), wanted in zip(run(main(), 120), want, strict=True):
        assert have[-1].finished
        assert _rounded(_joined(have, kind)) == _rounded(_joined([wanted], CUMULATIVE))


def test_a_replica_that_comes_back_is_used_again(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            for victim in (0, 1, 0):
                stream = client.generate([1, 2, 3], _greedy(200))
                await anext(stream)
                found[victim].may_step.clear()
                busy = asyncio.ensure_future(
                    asyncio.gather(*(collected(client, [9 + i], _greedy(30)) for i in range(6)))
                )
                await asyncio.sleep(0.05)
                found[victim].die()
                await eventually(lambda v=victim: client.replicas[v] == "starting")
                assert len((await busy)[0][-1].outputs[0].token_ids) == 30
                found[victim].thread.join(20)
                found[victim].start()
                await eventually(lambda v=victim: client.replicas[v] == "ready")
                assert await _num_tokens(stream) == 200
            assert client.error is None

    run(main())


def test_when_all_replicas_have_ended_so_have_the_requests(replicas):
    found = replicas(2)

    async def main():
        async with connected(found, grace_seconds=0.2) as client:
            stream = client.generate([1, 2], _greedy(250))
            await anext(stream)
            for each in found:
                each.die()
            with pytest.raises(EngineError, match="the replica broke"):
                async for _ in stream:
                    pass
            # The other one breaks at its next step.
            assert "the replica broke" in str(client.error) and not client.is_responsive
            with pytest.raises(EngineError, match="has ended"):
                await anext(client.generate([1], _greedy()))

    run(main())


def test_requests_wait_for_a_replica(replicas):
    found = replicas(1)

    async def main():
        async with connected(found) as client:
            stream = client.generate([1, 2], _greedy(200))
            await anext(stream)
            found[0].die()
            await eventually(lambda: client.replicas == {0: "starting"})
            other = asyncio.ensure_future(collected(client, [3], _greedy(3)))
            found[0].thread.join(20)
            found[0].start()
            assert await _num_tokens(stream) == 200
            assert (await other)[-1].finished

    run(main())


def test_a_request_that_ends_replicas_does_not_end_all_of_them(replicas):
    found = replicas(4)
    for each in found[:3]:
        each.last_step = 5

    async def main():
        async with connected(found) as client:
            client._router.report_load(3, 10**6, 0)  # the last choice
            with pytest.raises(EngineError, match=r"3 replicas have ended .* the replica broke"):
                await collected(client, [1, 2], _greedy(250))
            assert client.replicas[3] == "ready" and client.error is None
            assert (await collected(client, [1, 2], _greedy()))[-1].finished
            client._router.report_load(3, 0, 0)

    run(main())


def test_a_replica_that_is_told_to_end_is_not_its_requests_fault(replicas):
    found = replicas(5)

    async def main():
        async with connected(found) as client:
            ids, told = [], set()
            async for output in client.generate([1, 2], _greedy(60, output_kind=DELTA)):
                ids += output.outputs[0].token_ids
                # Tokens may come several at once, and after their replica was told to end.
                if len(told) < 4 and len(ids) >= 12 * len(told) + 4:
                    [placed] = client._placed.values()
                    found[placed.route.replica].loop.stop()
                    told.add(placed.route.replica)
            return ids

    assert len(run(main())) == 60
    for each in found:
        each.thread.join(0.5)
    assert sum(not each.thread.is_alive() for each in found) == 4


def test_a_removed_replica_ends_what_it_had_and_others_go_on(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            streams = [client.generate([1 + i], _greedy(100)) for i in range(4)]
            for stream in streams:
                await anext(stream)
            addresses = {each.number: each.address for each in found}
            await client.set_replicas({1: addresses[1]})
            assert client.replicas == {1: "ready"}
            for stream in streams:
                assert await _num_tokens(stream) == 100
            await eventually(lambda: not found[0].engine.has_unfinished_requests())
            await client.set_replicas(addresses)
            await eventually(lambda: client.replicas == {0: "ready", 1: "ready"})
            # Whoever numbers them may have forgotten which was which.
            stream = client.generate([9], _greedy(100))
            await anext(stream)
            await client.set_replicas({0: addresses[1], 1: addresses[0]})
            await eventually(lambda: client.replicas == {0: "ready", 1: "ready"})
            assert await _num_tokens(stream) == 100

    run(main())
    for each in found:
        _check_drained(each)


def test_equal_prefixes_go_to_one_replica_and_others_are_spread(replicas):
    found = replicas(2, num_blocks=256, max_num_batched_tokens=256)

    async def main():
        async with connected(found) as client:
            common = [*range(4, 90)] * 2
            firsts = [await collected(client, [*common, i], _greedy(2)) for i in range(6)]
            assert [f[-1].num_cached_tokens for f in firsts] == [0] + [160] * 5
            before = [each.num_steps for each in found]
            assert 0 in before
            streams = [collected(client, [60 + i] * 20, _greedy(20)) for i in range(8)]
            await asyncio.gather(*streams)
            assert all(each.num_steps > n for each, n in zip(found, before, strict=True))

    run(main())


def test_replicas_without_a_prefix_cache_are_all_the_same(replicas):
    found = replicas(2, enable_prefix_caching=False)

    async def main():
        async with connected(found) as client:
            for _ in range(3):
                await collected(client, [*range(4, 90)] * 2, _greedy(2))
            assert client._router.num_chunks == 0

    run(main())


def test_a_full_queue_is_left_for_another_replica(replicas):
    found = replicas(2, max_num_seqs=1, max_num_queued_requests=1)

    async def main():
        async with connected(found) as client:
            client._router.report_load(1, 10**6, 0)  # so all are tried at replica 0 first
            tasks = [collected(client, [i], _greedy(150)) for i in range(1, 9)]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [each for each in outcomes if isinstance(each, QueueFullError)]
            served = [each for each in outcomes if isinstance(each, list)]
            assert len(refused) + len(served) == 8 and len(served) >= 2 and refused
            assert all(each.num_steps for each in found)
            client._router.report_load(1, 0, 0)

    run(main())


def test_an_abort_is_not_lost_with_the_replica(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            stream = client.generate([1, 2], _greedy(250), request_id="r")
            await anext(stream)
            [placed] = client._placed.values()
            busy = found[placed.route.replica]
            busy.may_step.clear()
            await asyncio.sleep(0.05)
            await client.abort("r")
            busy.die()
            outputs = [o async for o in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
            await client.abort("unknown")

    run(main())


def test_readers_that_go_leave_nothing_behind(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            streams = [client.generate([1 + i], _greedy(200)) for i in range(6)]
            for stream in streams:
                await anext(stream)
            found[0].die()
            for stream in streams[:3]:
                await stream.aclose()
            await eventually(lambda: client.replicas[0] == "starting")
            for stream in streams[3:]:
                await anext(stream)
                await stream.aclose()

    run(main())
    _check_drained(found[1])


def test_the_load_of_other_clients_counts(replicas):
    found = replicas(2)

    async def main():
        async with connected(found, has_peers=True) as one, connected(found, has_peers=True) as two:
            streams = [one.generate([1 + i], _greedy(250)) for i in range(3)]
            for stream in streams:
                await anext(stream)
            loads = [one._router.num_requests(number) for number in (0, 1)]
            assert sorted(loads) == [1, 2]
            await eventually(lambda: two._router.load(loads.index(2)) >= 2 * 256)
            assert two._router.load(loads.index(1)) < two._router.load(loads.index(2))
            for stream in streams:
                await stream.aclose()

    run(main())


def test_a_replica_in_a_long_step_gets_no_new_requests(replicas):
    found = replicas(2, step_timeout=0.2)

    async def main():
        async with connected(found) as client:
            stream = client.generate([1, 2], _greedy(60))
            await anext(stream)
            [placed] = client._placed.values()
            stuck = placed.route.replica
            found[stuck].may_step.clear()
            await eventually(lambda: client._stuck == {stuck})
            assert client.replicas == {stuck: "stuck", 1 - stuck: "ready"} and client.is_responsive
            for i in range(4):
                assert (await collected(client, [3 + i], _greedy(3)))[-1].finished
            found[stuck].may_step.set()
            assert await _num_tokens(stream) == 60

    run(main())


def test_calls(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            await collected(client, [5] * 40, _greedy(3))
            stats = await client.stats_by_replica()
            assert sorted(stats) == [0, 1]
            assert sum(s.generation_tokens for s in stats.values()) == 3
            assert (await client.snapshot())["num_blocks"] == 64
            assert (await client.stats()) == stats[0]
            assert await client.reset_prefix_cache() == 2  # blocks of 16 of 42 tokens
            assert await client.reset_prefix_cache() == 0
            assert client._router.num_chunks == 0
            await client.sleep()
            assert await client.is_sleeping()
            with pytest.raises(EngineError, match="asleep"):
                await collected(client, [5] * 40, _greedy(3))
            await client.wake_up()
            assert not await client.is_sleeping()
            busy = client.generate([5] * 40, _greedy(200))
            await anext(busy)
            with pytest.raises(RequestError, match="unfinished"):
                await client.sleep()
            assert not await client.is_sleeping()  # the other one is awake again
            await busy.aclose()
            vectors = await client.embed([[5, 6, 7], [8]])
            assert len(vectors) == 2 and vectors[0].shape == (48,)
            lens = await client.logit_lens([5, 6, 7], 2)
            assert lens.top_ids.shape == (client.model_info.num_lens_layers, 2, 5)
            found[0].die()
            more = await asyncio.gather(*(client.embed([[5, 6, 7], [8]]) for _ in range(6)))
            assert all((each[0] == vectors[0]).all() for each in more)
            after = await client.logit_lens([5, 6, 7], 2)
            assert (after.ranks == lens.ranks).all()

    run(main())


def _updated(replica, update=lambda path: None):
    """Have an engine note the paths of new weights, instead of reading them."""
    paths = []

    def note(path):
        paths.append(path)
        update(path)
        return ("weight",)

    replica.engine.update_weights = note
    return paths


def test_a_replica_that_joins_catches_up(replicas):
    """It reads each folder once, in the order of their last updates, and sleeps with the others."""
    found = replicas(2)
    _updated(found[0])
    read = _updated(found[1])

    async def main():
        async with connected(found[:1]) as client:
            for path in ("a", "b", "a"):
                assert await client.update_weights(path) == ("weight",)
            await client.sleep(1)
            await client.sleep(2)  # changes nothing: they sleep already
            await client.set_replicas({each.number: each.address for each in found})
            await eventually(lambda: len(client._clients) == 2)
            assert read == ["b", "a"] and found[1].engine.is_sleeping
            await client.wake_up()
            assert not any(each.engine.is_sleeping for each in found)
            await client.sleep(2)  # drops the new weights
            await client.wake_up()
            await client.set_replicas({0: found[0].address})
            await client.set_replicas({each.number: each.address for each in found})
            await eventually(lambda: len(client._clients) == 2)
            assert read == ["b", "a"] and not found[1].engine.is_sleeping

    run(main())


def test_a_replica_joins_after_an_update_in_progress(replicas):
    found = replicas(2)
    may_end = threading.Event()
    _updated(found[0], lambda path: may_end.wait(20))
    read = _updated(found[1])

    async def main():
        async with connected(found[:1]) as client:
            updating = asyncio.ensure_future(client.update_weights("a"))
            await client.set_replicas({each.number: each.address for each in found})
            await asyncio.sleep(0.3)
            assert len(client._clients) == 1 and not read
            may_end.set()
            await updating
            await eventually(lambda: len(client._clients) == 2)
            assert read == ["a"]

    run(main())


def test_a_replica_that_ends_while_it_catches_up(replicas):
    found = replicas(2)
    _updated(found[0])
    read = _updated(found[1], lambda path: found[1].loop.stop())

    async def main():
        async with connected(found[:1]) as client:
            await client.update_weights("a")
            await client.update_weights("b")
            await client.set_replicas({each.number: each.address for each in found})
            await asyncio.to_thread(found[1].thread.join, 20)
            assert read
            await asyncio.sleep(0.3)
            assert len(client._clients) == 1
            found[1].start()
            again = _updated(found[1])
            await eventually(lambda: len(client._clients) == 2)
            assert again == ["a", "b"]
            assert client._clients[1].error is None

    run(main())


def test_without_a_replica_nothing_is_changed(replicas):
    [found] = replicas(1)

    async def main():
        async with connected([found], grace_seconds=30) as client:
            found.loop.stop()
            await eventually(lambda: not client._clients)
            for call in (client.sleep(), client.wake_up(), client.update_weights("a")):
                with pytest.raises(EngineError, match="no replica is ready"):
                    await call

    run(main())


def test_it_is_warmed_up_without_its_engines(replicas):
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            answers = await warm_up(client)
            assert b"[DONE]" in answers[0]

    run(main())
    assert not any(each.num_steps for each in found)


def test_what_a_refused_request_leaves(replicas):
    found = replicas(2, num_blocks=8)

    async def main():
        async with connected(found) as client:
            with pytest.raises(EngineError, match="KV blocks"):
                await collected(client, [1] * 10, _greedy(200))
            assert (await collected(client, [1], _greedy(2)))[-1].finished

    run(main())


def test_a_replica_has_the_gpu_of_its_number(monkeypatch):
    assert replica_device("cpu", 2) == replica_device("auto", 2) == "cpu"
    assert replica_device("cuda", 2) == "cuda:2"
    with pytest.raises(ConfigError, match="data_parallel_size > 1; got 'cuda:1'"):
        replica_device("cuda:1", 0)
    # Ranks take the GPUs that their replica sees.
    assert replica_device("cuda", 2, 4) == "cuda"
    assert [replica_gpus(n, 2, "0,GPU-1f,5,6") for n in (0, 1)] == ["0,GPU-1f", "5,6"]
    with pytest.raises(ConfigError, match="replica 2 of 2 ranks needs GPUs 4 to 5"):
        replica_gpus(2, 2, "0,1,5,6")


def test_messages_of_before_are_still_read():
    """Fields that have come later have a default."""
    assert m.Heartbeat().num_requests == 0


def test_a_machine_that_falls_silent_is_noticed(monkeypatch):
    """As a connection over TCP does not end by itself; an engine in a long step does answer."""
    monkeypatch.setattr(sockets, "_PING_MS", 200)
    code = (
        "import time; from engine.server.sockets import bound_socket\n"
        "socket = bound_socket('tcp://127.0.0.1:*', 'a token')\n"
        "print(socket.last_endpoint.decode(), flush=True)\n"
        "while True: time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as engine:
        socket, monitor = sockets.connected_socket(engine.stdout.readline().strip(), "a token")
        try:
            assert not monitor.poll(1500)
            os.kill(engine.pid, signal.SIGSTOP)
            assert monitor.poll(5000)
        finally:
            engine.kill()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
