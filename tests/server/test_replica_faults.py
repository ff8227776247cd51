"""Replicas that hang, end at bad moments or go on elsewhere: what clients see of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from engine.sampling_params import RequestOutputKind
from engine.server import messages as m
from engine.server.protocol.errors import APIError
from engine.server.replicas import client as replica_client
from engine.server.replicas.client import ReplicaClient
from engine.server.routes import health
from engine.server.sockets import bound_socket
from engine.structured.spec import StructuredOutput
from tests.e2e.tiny import Words, make_llm, tiny_model
from tests.server.loops import TOKEN, collected, eventually, run
from tests.server.test_replicas import (
    KINDS,
    _greedy,
    _num_tokens,
    _params,
    _rounded,
    connected,
    replicas,
)

__all__ = ["replicas"]


class Spelled(Words):
    """`Words` as far as grammars need them."""

    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in re.findall(r"w([0-9]+)", text)]


def _joined(outputs):
    """Return what a stream of pieces has brought, by continuation."""
    whole = {}
    for output in outputs:
        for each in output.outputs:
            ids, text, entries = whole.get(each.index, ([], "", []))[:3]
            ids, text = [*ids, *each.token_ids], text + each.text
            entries = [*entries, *(each.logprobs or ())]
            whole[each.index] = ids, text, entries, each.finish_reason, each.stop_reason
    return whole


def test_grammars_and_scores_of_prompts_go_on_where_they_were(replicas, monkeypatch):
    """Two replicas break one after the other; nothing is repeated and nothing is missing."""
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Spelled())
    pairs = StructuredOutput(regex="(w1[0-9] w2[0-9] w3[0-9] )+")
    options = [
        {"structured": pairs, "seed": 4},
        {"structured": pairs, "seed": 5, "n": 2, "stop": ["w35"], "logprobs": 1},
        {"structured": StructuredOutput(regex="(w5[0-9] ){31}"), "seed": 6},
        {"prompt_logprobs": 1, "seed": 7, "max_tokens": 33, "presence_penalty": 1.0},
    ]
    prompts = [f"w{4 + i} w5 w6" for i in range(len(options))]
    want = make_llm(tiny_model(deterministic=True)).generate(
        prompts, [_params(**o) for o in options]
    )
    found = replicas(3)

    async def main():
        async with connected(found, Spelled()) as client:

            async def one(prompt, option):
                params = _params(**option, output_kind=RequestOutputKind.DELTA)
                outputs = []
                async for output in client.generate(prompt, params):
                    outputs.append(output)
                    num_tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
                    if len(found) > 1 and num_tokens >= 10 * (4 - len(found)):
                        placed = next(p for p in client._placed.values() if p.route is not None)
                        victim = next(r for r in found if r.number == placed.route.replica)
                        found.remove(victim)
                        victim.die()
                return outputs

            answers = await asyncio.gather(*map(one, prompts, options))
            assert len(client._clients) == 1
            return answers

    for have, wanted in zip(run(main()), want, strict=True):
        assert have[-1].finished
        assert _rounded(_joined(have)) == _rounded(_joined([wanted]))
        scores = [output.prompt_logprobs for output in have if output.prompt_logprobs]
        assert [len(each) for each in scores] == [3] * bool(wanted.prompt_logprobs)


def test_one_that_hangs_hides_nothing_of_the_others(replicas, monkeypatch):
    """Without `step_timeout`, so that nobody knows that it hangs."""
    monkeypatch.setattr(replica_client, "_STATS_SECONDS", 0.3)
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            stream = client.generate([1, 2], _greedy(200))
            await anext(stream)
            [placed] = client._placed.values()
            stuck = placed.route.replica
            found[stuck].may_step.clear()
            await asyncio.sleep(0.05)
            assert list(await client.stats_by_replica()) == [1 - stuck]
            found[stuck].may_step.set()
            assert await _num_tokens(stream) == 200

    run(main())


def test_what_the_first_replica_is_asked_for_is_asked_of_one_that_responds(replicas):
    found = replicas(2, step_timeout=0.2)

    async def main():
        async with connected(found) as client:
            streams = [client.generate([1 + i], _greedy(200)) for i in range(2)]
            for stream in streams:
                await anext(stream)
            found[0].may_step.clear()
            await eventually(lambda: client._stuck == {0})
            assert (await asyncio.wait_for(client.snapshot(), 5))["num_blocks"] == 64
            vectors = await asyncio.wait_for(client.embed([[5, 6, 7]]), 5)
            assert vectors[0].shape == (48,)
            found[0].may_step.set()
            assert [await _num_tokens(stream) for stream in streams] == [200, 200]

    run(main())


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_deadline_holds_where_no_engine_keeps_it(is_hung, replicas, monkeypatch):
    """A request that is nowhere, or in an engine that hangs, ends at its deadline."""
    monkeypatch.setattr(replica_client, "_DEADLINE_SLACK", 0.1)
    found = replicas(1)

    async def main():
        async with connected(found, grace_seconds=30) as client:
            stream = client.generate([1, 2], _greedy(200), timeout=0.8)
            await anext(stream)
            found[0].may_step.clear()
            if not is_hung:
                found[0].die()
                await eventually(lambda: client.replicas == {0: "starting"})
                late = asyncio.ensure_future(collected(client, [3], _greedy(3), timeout=0.3))
            last = [output async for output in stream][-1].outputs[0]
            assert (last.finish_reason, last.stop_reason) == ("abort", "timeout")
            assert 1 <= len(last.token_ids) < 200
            if not is_hung:
                assert (await late)[-1].outputs[0].stop_reason == "timeout"
            found[0].may_step.set()

    run(main())


def test_two_replicas_that_die_together(replicas):
    """What both had goes on at the third, and so do requests that arrive at that moment."""
    found = replicas(3)

    async def main():
        async with connected(found) as client:
            streams = [client.generate([1 + i], _greedy(80)) for i in range(9)]
            for stream in streams:
                await anext(stream)
            assert len({placed.route.replica for placed in client._placed.values()}) == 3
            found[0].die()
            found[1].die()
            late = [collected(client, [20 + i], _greedy(30)) for i in range(3)]
            counts = await asyncio.gather(*map(_num_tokens, streams), *late)
            assert counts[:9] == [80] * 9
            assert [len(each[-1].outputs[0].token_ids) for each in counts[9:]] == [30] * 3
            assert client.replicas == {0: "starting", 1: "starting", 2: "ready"}

    run(main())


def test_a_server_without_replica_is_alive_and_not_ready(replicas):
    found = replicas(1)

    async def main():
        async with connected(found, grace_seconds=30) as client:
            state = SimpleNamespace(client=client, is_draining=False)
            request = SimpleNamespace(app=SimpleNamespace(state=state))
            assert (await health.ready(request)).status_code == 200
            stream = client.generate([1, 2], _greedy(200))
            await anext(stream)
            found[0].die()
            await eventually(lambda: client.replicas == {0: "starting"})
            assert (await health.health(request)).status_code == 200
            with pytest.raises(APIError, match="no replica is ready"):
                await health.ready(request)
            await stream.aclose()

    run(main())


def test_an_abort_needs_no_replica(replicas):
    found = replicas(1)

    async def main():
        async with connected(found, grace_seconds=30) as client:
            stream = client.generate([1, 2], _greedy(250), request_id="r")
            await anext(stream)
            found[0].die()
            await eventually(lambda: client.replicas == {0: "starting"})
            await client.abort("r")
            last = [output async for output in stream][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"

    run(main())


def test_a_request_that_cannot_be_sent_leaves_nothing(replicas):
    found = replicas(1)

    async def main():
        async with connected(found) as client:
            with pytest.raises(UnicodeEncodeError):
                await collected(client, [1], _greedy(2), request_id="\ud800")
            assert not client._placed and not client._requests

    run(main())


def test_an_engine_that_ends_as_it_becomes_ready_is_tried_again(tmp_path):
    """Both messages arrive in one batch: whoever waits for the first must hear of the second."""
    address = f"ipc://{tmp_path}/e"
    have_said, may_answer = threading.Event(), threading.Event()

    def engine():
        socket = bound_socket(address, TOKEN)
        encode = msgspec.msgpack.encode
        client = socket.recv_multipart()[0]
        socket.send_multipart([client, encode(m.Ready("m", 8, 9, [], {}, None))])
        socket.send_multipart([client, encode(m.Ended("it broke"))])
        have_said.set()
        client = socket.recv_multipart()[0]  # it comes again
        socket.send_multipart([client, encode(m.Ready("m", 8, 9, [], {}, None))])
        may_answer.wait(20)
        socket.close()

    async def main():
        client = ReplicaClient(TOKEN, has_peers=False)
        await client.set_replicas({0: address})
        await asyncio.sleep(0.05)  # it has said hello
        have_said.wait(20)
        time.sleep(0.1)  # for both to arrive before the loop looks
        try:
            await eventually(lambda: client.replicas == {0: "ready"})
            assert client._clients[0].error is None
        finally:
            may_answer.set()
            await client.close()

    thread = threading.Thread(target=engine)
    thread.start()
    run(main())
    thread.join(20)


def test_a_replica_that_joins_in_a_warm_up_hears_nothing_of_it(replicas):
    found = replicas(1)

    async def main():
        async with connected(found) as client:
            with client.answered_by(lambda message: []):
                found.extend(replicas(1))
                await client.set_replicas({each.number: each.address for each in found})
                await eventually(lambda: len(client._clients) == 2)
                streams = [client.generate([1 + i], _greedy(9)) for i in range(4)]
                tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
                await asyncio.sleep(0.2)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            assert (await collected(client, [1], _greedy(9)))[-1].finished

    run(main())
    assert sum(each.engine.stats().generation_tokens for each in found) == 9


def test_prefixes_are_remembered_in_blocks_of_the_engine(replicas):
    """What is not a whole block is not cached: that is no sign of an eviction."""
    found = replicas(1, block_size=128, num_blocks=8, max_num_batched_tokens=256)

    async def main():
        async with connected(found) as client:
            for length in (130, 200, 200, 128, 128):
                await collected(
                    client, [*range(4, 90), *range(4, 90), *range(30)][:length], _greedy(2)
                )
            return client._router.chunk_size, client._router.num_chunks

    assert run(main()) == (128, 1)


def test_replicas_that_are_connected_may_be_missing_in_a_list(replicas):
    """As in that of a directory that has been started again."""
    found = replicas(2)

    async def main():
        async with connected(found) as client:
            addresses = {each.number: each.address for each in found}
            streams = [client.generate([1 + i], _greedy(100)) for i in range(4)]
            for stream in streams:
                await anext(stream)
            clients = dict(client._clients)
            await client.set_replicas({}, keep_connected=True)
            await client.set_replicas({1: addresses[1]}, keep_connected=True)
            assert client._clients == clients
            for stream in streams:
                assert await _num_tokens(stream) == 100
            found[0].loop.stop()
            await eventually(lambda: client.replicas[0] == "starting")
            await client.set_replicas({1: addresses[1]}, keep_connected=True)
            assert client.replicas == {1: "ready"}

    run(main())


async def _disturb(found, client, rng, is_over):
    """Let replicas break, stop, hang and be missing in the list, until it is over."""
    addresses = {each.number: each.address for each in found}
    while not is_over.is_set():
        await asyncio.sleep(rng.random() * 0.2)
        victim, what = rng.choice(found), rng.choice(["break", "stop", "hang", "missing"])
        if what == "hang":
            victim.may_step.clear()
            await asyncio.sleep(rng.random() * 0.6)
            victim.may_step.set()
        elif what == "missing":
            others = {n: address for n, address in addresses.items() if n != victim.number}
            await client.set_replicas(others, keep_connected=rng.random() < 0.5)
            await asyncio.sleep(rng.random() * 0.1)
            await client.set_replicas(addresses)
        else:
            victim.die() if what == "break" else victim.loop.stop()
            await asyncio.to_thread(victim.thread.join, 5)
            if not victim.thread.is_alive():
                victim.start()
            victim.is_dying = False


async def _read(client, prompt, params, fate, rng):
    """Return the outputs of a request, which may be aborted, late, or left by its reader."""
    if fate == "left":
        stream = client.generate(prompt, params)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), rng.random())
        await stream.aclose()
        return []
    timeout = rng.random() + 0.01 if fate == "late" else None
    name = f"request-{rng.random()}"
    reading = asyncio.ensure_future(
        collected(client, prompt, params, request_id=name, timeout=timeout)
    )
    if fate == "aborted":
        await asyncio.sleep(rng.random() * 0.5)
        await client.abort(name)
    outputs = await reading
    assert outputs[-1].finished
    return outputs


@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_outputs_are_whole_and_nothing_is_left(seed, replicas, monkeypatch):
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    monkeypatch.setattr(replica_client, "_MAX_CRASHES", 1000)
    monkeypatch.setattr(replica_client, "_DEADLINE_SLACK", 0.2)
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if "best_of" not in kind]
    options = [rng.choice(kinds) | {"max_tokens": rng.randrange(30, 90)} for _ in range(20)]
    prompts = [" ".join(f"w{rng.randrange(4, 90)}" for _ in range(rng.choice([9, 64, 100])))
               for _ in options]  # fmt: skip
    want = make_llm(tiny_model(deterministic=True)).generate(
        prompts, [_params(**o) for o in options]
    )
    fates = [rng.choice(["read"] * 5 + ["aborted", "late", "left"]) for _ in options]
    found = replicas(3)

    async def main():
        slots, is_over = asyncio.Semaphore(12), asyncio.Event()
        async with connected(found, Words(), grace_seconds=60, has_peers=bool(seed % 2)) as client:

            async def one(prompt, option, fate):
                async with slots:
                    params = _params(**option, output_kind=RequestOutputKind.DELTA)
                    return await _read(client, prompt, params, fate, rng)

            disturbing = asyncio.ensure_future(_disturb(found, client, rng, is_over))
            answers = await asyncio.gather(*map(one, prompts, options, fates))
            is_over.set()
            await disturbing
            router = client._router
            await eventually(lambda: not any(map(router.num_requests, router.replicas)))
            assert not any(each._requests or each._handles for each in client._clients.values())
            return answers

    for have, wanted, fate in zip(run(main(), 150), want, fates, strict=True):
        if fate == "read":
            assert _rounded(_joined(have)) == _rounded(_joined([wanted]))
