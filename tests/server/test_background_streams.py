"""Background responses that are streamed, streamed again, and ended; and their input items."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time

import httpx
import pytest

from engine.errors import EngineError
from engine.server.event_log import EventLog
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig, key_hash
from engine.server.stored_responses import ResponseStore, StoredResponse, Turn
from tests.lazily import lazily
from tests.server.serving import CannedClient, serve

openai = lazily("openai")
PATH = "/v1/responses"
BODY = {"input": "Hi", "background": True, "stream": True}
GREEDY = {"model": "smollm2", "temperature": 0, "max_output_tokens": 12}


def frame(number):
    return b"data: %d\n\n" % number


# ---- the log


def test_readers_follow_from_any_event():
    async def run():
        log = EventLog()
        log.extend(frame(0) + frame(1))

        async def read(after):
            return b"".join([part async for part in log.follow(after)])

        early = [asyncio.create_task(read(after)) for after in (-1, 0, 3)]
        for number in range(2, 700):
            if number % 50 == 0:
                await asyncio.sleep(0)
            log.extend(frame(number))
        late = asyncio.create_task(read(500))
        await asyncio.sleep(0)
        log.close()
        found = [await task for task in (*early, late)]
        every = [frame(number) for number in range(700)]
        assert found == [b"".join(every[first:]) for first in (0, 1, 4, 501)]
        assert await read(699) == b"" and (log.first, log.end) == (0, 700)

    asyncio.run(run())


def test_dropped_events_are_named():
    async def run():
        log = EventLog()
        for number in range(100):
            log.extend(frame(number))
        size = log.num_bytes
        log.shrink(size // 2)
        assert log.num_bytes <= size // 2 and 45 <= log.first <= 55 and log.end == 100
        log.close()
        last = [part async for part in log.follow(log.first - 1)]
        assert b"".join(last) == b"".join(map(frame, range(log.first, 100)))
        with pytest.raises(APIError, match=rf"events up to {log.first - 1} are no longer kept"):
            await anext(log.follow(log.first - 2))
        log.shrink(0)
        assert (log.num_bytes, log.first, log.end) == (0, 100, 100)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_with_events_are_bounded(seed):
    chance = random.Random(seed)
    store = ResponseStore(ServerConfig(max_stored_responses=8, max_stored_bytes=40_000))
    running = []
    for index in range(600):
        key = chance.choice("ab")
        act = chance.random()
        if act < 0.1 and sum(k == key for k, _ in running) < 8:
            one = StoredResponse({"id": f"r{index}", "status": "in_progress"})
            one.log = EventLog()
            store.begin(key, one)
            running.append((key, one))
        elif act < 0.15 and running:
            key, one = running.pop(chance.randrange(len(running)))
            one.update({"id": one.id, "status": "completed", "text": "x" * 3000})
            store.put(key, one, Turn(b"1", None))
            store.log(key, one, frame(index))  # the last event comes after the response
        elif act < 0.2:
            store.delete(key, f"r{chance.randrange(index + 1)}")
        elif running:
            store.log(*chance.choice(running), b"data: %b\n\n" % (b"y" * chance.randrange(2000)))
        assert store.num_bytes <= 40_000
        logs = sum(one.log.num_bytes for _, one in running)
        assert store.num_bytes >= logs
    for key, one in running:
        store.put(key, one, Turn(b"1", None))
    for index in range(600):
        for key in "ab":
            store.delete(key, f"r{index}")
    assert store.num_bytes == 0


# ---- over HTTP


def events_of(data):
    """Return the events of a stream's text; comments are no events."""
    found = []
    for part in data.split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            name, text = lines
            event = json.loads(text.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def post(server, body, key=None):
    headers = {} if key is None else {"X-API-Key": key}
    return httpx.post(server.url + PATH, json=body, headers=headers, timeout=60)


def again(server, response_id, after=None, key=None):
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    headers = {} if key is None else {"X-API-Key": key}
    url = f"{server.url}{PATH}/{response_id}{query}"
    return httpx.get(url, headers=headers, timeout=60)


def cut_after(server, body, count):
    """Post a request and leave after some events; return them."""
    text = ""
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as response:
        for piece in response.iter_text():
            text += piece
            whole = text[: text.rfind("\n\n") + 2]
            if len(events_of(whole)) >= count:
                return events_of(whole)
    raise AssertionError("the stream ended before")


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stream_goes_on_where_it_was_cut():
    with serve(lambda: CannedClient(*"abcdefghij", delay=0.05)) as server:
        first = cut_after(server, BODY, 6)
        response_id = first[0]["response"]["id"]
        last = first[-1]["sequence_number"]
        rest = events_of(again(server, response_id, last).text)
        numbers = [event["sequence_number"] for event in first + rest]
        assert numbers == list(range(len(numbers)))
        assert [event["type"] for event in first[:3]] == [
            "response.created", "response.queued", "response.in_progress"
        ]  # fmt: skip
        states = [event["response"]["status"] for event in first[:3]]
        assert states == ["queued", "queued", "in_progress"]
        deltas = [e["delta"] for e in first + rest if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "abcdefghij"
        stored = httpx.get(f"{server.url}{PATH}/{response_id}").json()
        assert rest[-1] == {
            "type": "response.completed", "sequence_number": numbers[-1], "response": stored
        }  # fmt: skip
        for after in (None, *range(len(numbers))):
            found = events_of(again(server, response_id, after).text)
            assert found == (first + rest)[0 if after is None else after + 1 :]
        assert not server.app.state.slots.num_active


def test_several_readers_at_once():
    with serve(lambda: CannedClient(*"abcdef", delay=0.1)) as server:
        first = cut_after(server, BODY, 3)
        response_id = first[0]["response"]["id"]

        async def read_all():
            async with httpx.AsyncClient(timeout=60) as client:
                url = f"{server.url}{PATH}/{response_id}?stream=true"
                return await asyncio.gather(*(client.get(url) for _ in range(4)))

        texts = {answer.text for answer in asyncio.run(read_all())}
        assert len(texts) == 1
        assert events_of(texts.pop())[-1]["type"] == "response.completed"


def test_a_cancelled_stream_ends_in_the_middle():
    with serve(lambda: CannedClient(*"abc" * 200, delay=0.05)) as server:
        first = cut_after(server, BODY, 8)
        response_id = first[0]["response"]["id"]
        with httpx.stream(
            "GET", f"{server.url}{PATH}/{response_id}?stream=true", timeout=60
        ) as reader:
            pieces = reader.iter_text()
            text = next(pieces)
            found = httpx.post(f"{server.url}{PATH}/{response_id}/cancel", timeout=60).json()
            text += "".join(pieces)  # the reader's stream ends, too
        assert found["status"] == "cancelled" and not server.app.state.slots.num_active
        events = events_of(text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.output_item.done"
        said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        [item] = found["output"]
        assert item["status"] == "incomplete" and item["content"][0]["text"] == said
        assert ("abc" * 200).startswith(said) and len(said) < 600
        assert events_of(again(server, response_id).text) == events


def test_a_deleted_stream_ends():
    with serve(lambda: CannedClient(*"abc" * 200, delay=0.05)) as server:
        response_id = cut_after(server, BODY, 8)[0]["response"]["id"]
        assert httpx.delete(f"{server.url}{PATH}/{response_id}", timeout=60).status_code == 200
        assert again(server, response_id).status_code == 404
        assert server.app.state.responses.num_bytes == 0
        wait_until(lambda: not server.app.state.slots.num_active)


def test_a_failure_is_the_last_event():
    with serve(lambda: CannedClient("a", raises=EngineError("out of order"))) as server:
        events = events_of(post(server, BODY).text)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["message"] == "out of order"
        response_id = events[-1]["response"]["id"]
        assert events_of(again(server, response_id, 2).text) == events[3:]
        assert not server.app.state.slots.num_active


def test_events_beyond_the_limit_are_dropped_first():
    config = ServerConfig(max_stored_bytes=30_000)
    with serve(lambda: CannedClient(*["word "] * 400), config) as server:
        response_id = cut_after(server, BODY, 3)[0]["response"]["id"]
        wait_until(lambda: not server.app.state.slots.num_active)
        assert server.app.state.responses.num_bytes <= 30_000
        stored = httpx.get(f"{server.url}{PATH}/{response_id}").json()
        assert stored["output"][0]["content"][0]["text"] == "word " * 400
        error = again(server, response_id).json()["error"]
        assert "are no longer kept (max_stored_bytes); got -1" in error["message"]
        assert error["param"] == "starting_after"


def test_only_its_key_reads_a_stream():
    keys = {"api_key_hashes": (key_hash("a"), key_hash("b"))}
    with serve(lambda: CannedClient(*"ab"), ServerConfig(**keys)) as server:
        events = events_of(post(server, BODY, "a").text)
        response_id = events[0]["response"]["id"]
        assert again(server, response_id, key="b").status_code == 404
        url = f"{server.url}{PATH}/{response_id}/input_items"
        assert httpx.get(url, headers={"X-API-Key": "b"}).status_code == 404
        assert events_of(again(server, response_id, key="a").text) == events


@pytest.mark.parametrize(
    ("body", "query", "param", "words"),
    [
        ({}, "stream=true", "stream", "was not made with background and stream"),
        ({"background": True}, "stream=true", "stream", "was not made with background and stream"),
        ({}, "starting_after=1", "starting_after", "starting_after needs stream=true; got 1"),
        (BODY, "stream=true&starting_after=99", "starting_after", "below 10; got 99"),
        (BODY, "stream=true&starting_after=-2", "starting_after", "below 10; got -2"),
        (
            BODY,
            "stream=true&starting_after=x",
            "starting_after",
            "starting_after must be valid: expected `int`, got `str`; got 'x'",
        ),
        (BODY, "stream=maybe", "stream", "stream must be valid: expected `bool`, got `str`; got"),
        (BODY, "include=file_search_call.results", "include", "include must be empty"),
        (BODY, "include_obfuscation=true", "include_obfuscation", "events are not obfuscated"),
        (BODY, "after=x", "after", "after is not a parameter of this path; got 'x'"),
    ],
)
def test_what_cannot_be_streamed_again(body, query, param, words):
    with serve(lambda: CannedClient("a")) as server:
        made = post(server, {"input": "Hi", **body})
        if body.get("stream"):
            response_id = events_of(made.text)[0]["response"]["id"]
        else:
            response_id = made.json()["id"]
        found = httpx.get(f"{server.url}{PATH}/{response_id}?{query}")
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert words in error["message"] and error["param"] == param


# ---- OpenAI's client


def test_openais_client_streams_again(client):
    with client.responses.create(
        input="Count to five.", background=True, stream=True, **GREEDY
    ) as stream:
        first = [next(stream) for _ in range(5)]
    response_id = first[0].response.id
    rest = list(
        client.responses.retrieve(
            response_id, stream=True, starting_after=first[-1].sequence_number
        )
    )
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    want = client.responses.create(input="Count to five.", **GREEDY)
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert said == want.output_text == rest[-1].response.output_text
    assert client.responses.retrieve(response_id) == rest[-1].response


def test_input_items_of_a_conversation(client):
    first = client.responses.create(input="My name is Ada. 漢", **GREEDY)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    more = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"id": "msg_mine", "role": "user", "content": "What is my name?"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    second = client.responses.create(input=more, previous_response_id=first.id, **GREEDY)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # all pages
    assert [item.type for item in listed] == [
        *["message"] * 4, "function_call", "function_call_output"
    ]  # fmt: skip
    assert listed[0].content[0].text == "My name is Ada. 漢" and listed[0].role == "user"
    assert listed[1].id == first.output[0].id
    assert listed[1].content[0].text == first.output_text
    assert listed[3].id == "msg_mine" and listed[4].name == "f" and listed[5].output == "5"
    assert len({item.id for item in listed}) == 6
    newest = list(client.responses.input_items.list(second.id, limit=4))
    assert newest == listed[::-1]
    page = client.responses.input_items.list(second.id, limit=4, after=listed[4].id)
    assert page.data == listed[3::-1] and page.has_more is False
    assert [item.type for item in client.responses.input_items.list(first.id)] == ["message"]
    with pytest.raises(openai.BadRequestError, match="after must be the id of an input item"):
        client.responses.input_items.list(second.id, after="msg_none")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.responses.input_items.list(second.id, limit=101)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_input_items_with_one_id_are_each_listed_once(client):
    """As of a client that sends a message again which is already in the conversation."""
    again = {"id": "msg_1", "role": "user", "content": "Hi"}
    others = [{"role": "user", "content": text} for text in ("a", "b")]
    given = [again, others[0], again, others[1]]
    response = client.responses.create(input=given, **GREEDY)
    pages = client.responses.input_items.list(response.id, order="asc", limit=1)
    listed = list(itertools.islice(pages, 8))
    assert [item.content[0].text for item in listed] == ["Hi", "a", "Hi", "b"]
    assert len({item.id for item in listed}) == 4 and listed[0].id == "msg_1"


def test_input_items_of_a_response_in_progress():
    with serve(lambda: CannedClient(*"abc" * 100, delay=0.05)) as server:
        response_id = cut_after(server, BODY, 4)[0]["response"]["id"]
        url = f"{server.url}{PATH}/{response_id}"
        running = httpx.get(f"{url}/input_items").json()
        assert [item["content"][0]["text"] for item in running["data"]] == ["Hi"]
        httpx.post(f"{url}/cancel", timeout=60)
        assert httpx.get(f"{url}/input_items").json() == running
