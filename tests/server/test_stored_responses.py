"""Stored and background responses: their store, and /v1/responses over HTTP."""

from __future__ import annotations

import json
import random
import time

import httpx
import pytest

from engine.errors import ConfigError, EngineError
from engine.server.protocol.errors import APIError
from engine.server.replicas.ray_serve import RayServeConfig
from engine.server.server_config import ServerConfig, key_hash
from engine.server.stored_responses import ResponseStore, StoredResponse, Turn, encoded
from tests.lazily import lazily
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import CannedClient, serve

openai = lazily("openai")
GREEDY = {"model": "smollm2", "temperature": 0, "max_output_tokens": 12}
PATH = "/v1/responses"


def stored(name, size=0, status="completed"):
    return StoredResponse({"id": name, "status": status, "text": "x" * size})


def turn(size, previous=None):
    return Turn(encoded(["x" * size]), previous)


# ---- the store


def test_the_oldest_response_of_a_key_is_dropped():
    store = ResponseStore(ServerConfig(max_stored_responses=3))
    for index in range(5):
        store.put("a", stored(f"r{index}"), turn(10))
    store.put("b", stored("r0"), turn(10))
    assert [store.find("a", f"r{i}") is not None for i in range(5)] == [False] * 2 + [True] * 3
    assert store.find("b", "r0") is not None and store.find("b", "r4") is None
    store.delete("a", "r3")
    store.delete("a", "r3")
    store.delete("c", "r3")
    assert store.find("a", "r3") is None and store.find("a", "r4") is not None


def test_the_bytes_are_bounded_and_the_largest_key_pays():
    store = ResponseStore(ServerConfig(max_stored_bytes=100_000))
    store.put("small", stored("s"), turn(1000))
    for index in range(50):
        store.put("large", stored(f"r{index}", 5000), turn(5000))
        assert store.num_bytes <= 100_000
    assert store.find("small", "s") is not None
    assert store.find("large", "r49") is not None and store.find("large", "r30") is None
    store.put("huge", stored("h", 200_000), turn(10))  # alone too large: kept by nobody
    assert store.find("huge", "h") is None and store.find("small", "s") is not None


def test_a_conversation_is_stored_once():
    store = ResponseStore(ServerConfig())
    last = None
    for index in range(100):
        last = turn(10_000, last)
        store.put(None, stored(f"r{index}"), last)
    assert store.num_bytes < 100 * 13_000
    items = json.loads(last.joined(2 << 20))
    assert items == ["x" * 10_000] * 100
    assert last.joined(500_000) is None
    for index in range(99):
        store.delete(None, f"r{index}")
    assert store.num_bytes > 100 * 10_000  # the last response continues from them all
    store.delete(None, "r99")
    assert store.num_bytes == 0


def test_a_turn_that_was_dropped_counts_again_when_another_follows_it():
    store = ResponseStore(ServerConfig())
    first = turn(10_000)
    store.put(None, stored("a"), first)
    store.delete(None, "a")
    assert store.num_bytes == 0
    store.put(None, stored("b"), turn(10, first))  # it was read before the deletion
    assert store.num_bytes > 10_000
    store.delete(None, "b")
    assert store.num_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_bytes_are_those_of_what_is_kept(seed):
    rng = random.Random(seed)
    config = ServerConfig(max_stored_responses=6, max_stored_bytes=60_000)
    store = ResponseStore(config)
    turns = {key: [] for key in "abc"}
    for index in range(200):
        key = rng.choice("abc")
        if rng.random() < 0.2:
            store.delete(key, f"{key}{rng.randrange(index + 1)}")
            continue
        previous = rng.choice([None, *turns[key][-4:]])
        turns[key].append(turn(rng.randrange(3000), previous))
        store.put(key, stored(f"{key}{index}", rng.randrange(3000)), turns[key][-1])
        kept = {}
        for each in (store.find(k, f"{k}{i}") for k in "abc" for i in range(index + 1)):
            if each is not None:
                kept[id(each)] = len(each.body) + 1024
                at = each.turn
                while at is not None:
                    kept[id(at)] = len(at.data) + 1024
                    at = at.previous
        assert store.num_bytes == sum(kept.values()) <= 60_000
        assert all(turns[k][-1].num_owners >= 0 for k in "abc" if turns[k])


def test_items_are_found_as_long_as_their_response_is():
    store = ResponseStore(ServerConfig(max_stored_responses=1))
    for name in "ab":
        made = {"id": name, "status": "completed", "output": [{"id": f"msg_{name}"}]}
        store.put("key", StoredResponse(made), turn(1))
    assert store.owner("key", "msg_a") is None and store.owner("other", "msg_b") is None
    assert store.owner("key", "msg_b").id == "b"
    store.delete("key", "b")
    assert store.owner("key", "msg_b") is None


def test_responses_in_progress_are_limited_and_not_dropped():
    store = ResponseStore(ServerConfig(max_stored_responses=2))
    first, second = stored("a", status="queued"), stored("b", status="queued")
    store.begin("k", first)
    store.begin("k", second)
    with pytest.raises(APIError, match="2 responses are in progress"):
        store.begin("k", stored("c", status="queued"))
    store.begin("other", stored("c", status="queued"))
    for index in range(4):
        store.put("k", stored(f"r{index}"), turn(1))
    assert store.find("k", "a") is first and not first.is_finished
    store.put("k", first, turn(1))
    store.begin("k", stored("d", status="queued"))


@pytest.mark.parametrize("options", [{"api_server_count": 2}, {"nodes": 1}], ids=str)
def test_a_store_needs_a_single_process(options):
    assert not ResponseStore(ServerConfig(**options)).is_enabled
    with pytest.raises(ConfigError, match="max_stored_responses must be 0 with several API"):
        ServerConfig(**options, max_stored_responses=5)
    ServerConfig(**options, max_stored_responses=0)
    with pytest.raises(ConfigError, match="got 5 and num_ingresses 2"):
        RayServeConfig(num_ingresses=2, server={"max_stored_responses": 5})


# ---- OpenAI's client


def test_a_response_is_retrieved_continued_and_deleted(client):
    first = client.responses.create(input="My name is Ada.", instructions="Be brief.", **GREEDY)
    assert first.store is True and first.previous_response_id is None
    again = client.responses.retrieve(first.id)
    assert again == first
    second = client.responses.create(
        input="What is my name?", previous_response_id=first.id, **GREEDY
    )
    assert second.previous_response_id == first.id
    whole = client.responses.create(
        input=[
            {"role": "user", "content": "My name is Ada."},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "What is my name?"},
        ],
        store=False,
        **GREEDY,
    )
    assert whole.store is False
    assert second.output_text == whole.output_text and second.usage.input_tokens > 20
    assert second.usage.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.retrieve(whole.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    third = client.responses.create(input="Thanks.", previous_response_id=second.id, **GREEDY)
    assert third.usage.input_tokens > second.usage.input_tokens  # of the deleted one too
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id=first.id, **GREEDY)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_an_empty_answer_is_a_turn_of_the_conversation():
    template = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}"
    )
    with (
        serve(lambda: ScriptedClient(template, lambda *_: "")) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        first = http.post(PATH, json={"input": "a"}).json()
        body = {"input": "b", "previous_response_id": first["id"]}
        assert http.post(PATH, json=body).json()["status"] == "completed"
        assert server.client.prompts[-1] == "user: a\nassistant: \nuser: b\n"


def test_items_of_stored_responses_are_named_by_id(client):
    """As clients send that assume what was stored: only the ids of the answers."""
    user = {"role": "user", "content": "My name is Ada."}
    question = {"role": "user", "content": "What is my name?"}
    first = client.responses.create(input=[user], **GREEDY)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_id = client.responses.create(input=[user, *references, question], **GREEDY)
    whole = [user, *(item.model_dump() for item in first.output), question]
    want = client.responses.create(input=whole, store=False, **GREEDY)
    assert by_id.output_text == want.output_text
    assert by_id.usage.input_tokens == want.usage.input_tokens
    client.responses.delete(first.id)  # the items themselves are kept with the second response
    items = client.responses.input_items.list(by_id.id, order="asc").data
    assert [item.id for item in items[1:-1]] == [item.id for item in first.output]
    with pytest.raises(openai.NotFoundError, match=r"input\[1\].id must be of an item") as caught:
        client.responses.create(input=[user, *references, question], **GREEDY)
    assert caught.value.param == "input"


def test_input_tokens_are_those_of_the_response(client):
    first = client.responses.create(input="Hi", **GREEDY)
    fields = {
        "model": "smollm2",
        "input": "Thanks.",
        "instructions": "Be brief.",
        "previous_response_id": first.id,
    }
    count = client.responses.input_tokens.count(**fields)
    assert count.object == "response.input_tokens"
    assert count.input_tokens == client.responses.create(**fields).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.input_tokens.count(**fields | {"previous_response_id": "resp_none"})


def test_a_streamed_response_is_stored(client):
    *_, last = client.responses.create(input="Hi", stream=True, **GREEDY)
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id) == last.response


def test_a_background_response_is_polled(client):
    want = client.responses.create(input="Count to five.", **GREEDY)
    response = client.responses.create(input="Count to five.", background=True, **GREEDY)
    assert response.status == "queued" and response.background is True and response.output == []
    end = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.01)
        response = client.responses.retrieve(response.id)
    assert response.status == "incomplete" and response.output_text == want.output_text
    assert response.usage.output_tokens == 12
    assert client.responses.cancel(response.id) == response  # too late: nothing changes


def test_a_background_response_is_cancelled(client, real_server):
    options = {**GREEDY, "max_output_tokens": 400}
    response = client.responses.create(input="Write a long story.", background=True, **options)
    with pytest.raises(openai.BadRequestError, match=r"it is (queued|in_progress)"):
        client.responses.create(input="x", previous_response_id=response.id, **GREEDY)
    found = client.responses.cancel(response.id)
    assert (found.status, found.id) == ("cancelled", response.id)
    assert client.responses.retrieve(response.id) == found == client.responses.cancel(response.id)
    end = time.monotonic() + 20
    while real_server.app.state.slots.num_active and time.monotonic() < end:
        time.sleep(0.01)
    assert not real_server.app.state.slots.num_active
    with pytest.raises(openai.BadRequestError, match="it is cancelled"):
        client.responses.create(input="x", previous_response_id=response.id, **GREEDY)


def test_a_background_response_in_progress_is_deleted(client):
    options = {**GREEDY, "max_output_tokens": 400}
    response = client.responses.create(input="Write a long story.", background=True, **options)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_foreground_response_cannot_be_cancelled(client):
    response = client.responses.create(input="Hi", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="not made with background"):
        client.responses.cancel(response.id)


# ---- faults and limits


def post(server, body, key=None):
    headers = {} if key is None else {"X-API-Key": key}
    return httpx.post(server.url + PATH, json=body, headers=headers, timeout=30)


def finished(server, response_id, key=None):
    headers = {} if key is None else {"X-API-Key": key}
    end = time.monotonic() + 20
    while True:
        found = httpx.get(f"{server.url}{PATH}/{response_id}", headers=headers).json()
        if found["status"] not in ("queued", "in_progress"):
            return found
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_background_response_that_fails_says_why():
    with serve(lambda: CannedClient("a", raises=EngineError("out of order"))) as server:
        found = post(server, {"input": "Hi", "background": True}).json()
        found = finished(server, found["id"])
        assert found["status"] == "failed"
        assert found["error"] == {"code": "server_error", "message": "out of order"}
        assert not server.app.state.slots.num_active


def test_a_background_response_that_cannot_begin_is_refused_at_once():
    with serve(lambda: CannedClient("a")) as server:
        found = post(server, {"input": "Hi", "background": True, "temperature": -1})
        assert found.status_code == 400 and found.json()["error"]["param"] == "temperature"
        assert not server.app.state.slots.num_active


def test_a_failed_or_abandoned_response_is_not_stored():
    with serve(lambda: CannedClient("a", raises=EngineError("no"))) as server:
        assert post(server, {"input": "Hi"}).status_code == 503
        assert server.app.state.responses.num_bytes == 0
    with serve(lambda: CannedClient(*"abc", delay=0.2)) as server:
        body = {"input": "Hi", "stream": True}
        with httpx.stream("POST", server.url + PATH, json=body) as response:
            next(response.iter_bytes())
        time.sleep(0.8)
        assert server.app.state.responses.num_bytes == 0


def test_a_background_response_outlives_its_connection():
    with serve(lambda: CannedClient(*"abc", delay=0.1)) as server:
        first = post(server, {"input": "Hi", "background": True}).json()
        found = finished(server, first["id"])
        assert found["output"][0]["content"][0]["text"] == "abc"


def test_a_background_response_holds_the_slot_of_its_request():
    config = ServerConfig(max_concurrent_requests=1)
    with serve(lambda: CannedClient("a", delay=60), config) as server:
        first = post(server, {"input": "Hi", "background": True}).json()
        slots = server.app.state.slots
        assert slots.num_active == 1
        assert post(server, {"input": "Hi", "background": True}).status_code == 429
        found = httpx.post(f"{server.url}{PATH}/{first['id']}/cancel").json()  # takes no slot
        assert found["status"] == "cancelled" and slots.num_active == 0
        assert post(server, {"input": "Hi", "background": True}).status_code == 200


def test_references_name_a_limited_number_of_bytes():
    config = ServerConfig(max_body_bytes=4000)
    with serve(lambda: CannedClient("a" * 1500), config) as server:
        [item] = post(server, {"input": "Hi"}).json()["output"]
        items = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "b"}]
        assert post(server, {"input": items}).status_code == 200
        found = post(server, {"input": items * 2})
        assert found.status_code == 400 and "at most 4000 bytes" in found.json()["error"]["message"]


def test_keys_see_their_own_responses_only():
    keys = {"api_key_hashes": (key_hash("a"), key_hash("b"))}
    config = ServerConfig(**keys, share_prefixes_between_keys=True)
    with serve(lambda: CannedClient("ok", delay=0.2), config) as server:
        done = post(server, {"input": "Hi"}, "a").json()["id"]
        running = post(server, {"input": "Hi", "background": True}, "a").json()["id"]
        for name in (done, running, "resp_none"):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                url = f"{server.url}{PATH}/{name}{path}"
                found = httpx.request(method, url, headers={"X-API-Key": "b"})
                assert found.status_code == 404
                assert found.json()["error"]["message"] == f"the response '{name}' does not exist"
            found = post(server, {"input": "Hi", "previous_response_id": name}, "b")
            assert found.status_code == 400
            assert found.json()["error"]["code"] == "previous_response_not_found"
        [item] = httpx.get(f"{server.url}{PATH}/{done}", headers={"X-API-Key": "a"}).json()[
            "output"
        ]
        items = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "b"}]
        assert post(server, {"input": items}, "b").status_code == 404
        assert post(server, {"input": items}, "a").status_code == 200
        assert finished(server, running, "a")["status"] == "completed"


def test_a_background_response_must_be_stored():
    with serve(lambda: CannedClient("a")) as server:
        found = post(server, {"input": "Hi", "background": True, "store": False})
        assert found.status_code == 400
        assert "store must be null or true" in found.json()["error"]["message"]


def test_without_a_store_everything_that_needs_it_is_refused():
    with serve(lambda: CannedClient("a"), ServerConfig(max_stored_responses=0)) as server:
        for body in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            found = post(server, {"input": "Hi", **body})
            assert found.status_code == 400 and "max_stored_responses" in found.text
        found = post(server, {"input": "Hi"}).json()
        assert found["store"] is False
        again = httpx.get(f"{server.url}{PATH}/{found['id']}")
        assert again.status_code == 404 and "no responses are stored" in again.text


def test_parameters_of_a_retrieval():
    with serve(lambda: CannedClient("a")) as server:
        url = f"{server.url}{PATH}/{post(server, {'input': 'Hi'}).json()['id']}"
        fine = "?stream=false&include[]=reasoning.encrypted_content&include_obfuscation=false"
        assert httpx.get(url + fine).status_code == 200


def test_a_conversation_is_bounded_as_one_body_is():
    config = ServerConfig(max_body_bytes=4000)
    with serve(lambda: CannedClient("a"), config) as server:
        previous = None
        for status in (200, 200, 200, 400):
            body = {"input": "x" * 1200, "previous_response_id": previous}
            found = post(server, body)
            assert found.status_code == status, found.text
            previous = found.json().get("id")
        assert "previous_response_id must lead to at most 4000 bytes" in found.text


def test_items_of_previous_responses_count():
    with serve(lambda: CannedClient("a")) as server:
        items = [{"role": "user", "content": "x"}] * 3000
        first = post(server, {"input": items})
        assert first.status_code == 400  # the context of the canned model is shorter
        items = [{"role": "user", "content": ""}] * 1500
        previous = None
        for _ in range(3):
            found = post(server, {"input": items, "previous_response_id": previous})
            if found.status_code != 200:
                break
            previous = found.json()["id"]
        assert "input must have at most 4096 items; got 1500 after 3002" in found.text
