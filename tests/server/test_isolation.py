"""Keys do not see each other: cached prefixes, the watch page, stored answers."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.sampling_params import SamplingParams
from engine.server.auth import KeyRing
from engine.server.server_config import ServerConfig, key_hash
from tests.e2e.tiny import make_engine, tiny_model
from tests.server.loops import connected, run, served
from tests.server.serving import CannedClient, serve

A, B = "key-of-a", "key-of-b"
TWO = {"api_key_hashes": (key_hash(A), key_hash(B))}
PROMPT = [5, 9, 2, 7] * 16
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/inference/v1/generate": {"token_ids": [5, 9]},
    "/v1/messages": {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
    },
}


def ask(server, key, path="/v1/completions", **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def cached(server, key, **body):
    """Return the number of tokens that the request has found in the prefix cache."""
    body = {"prompt": PROMPT, "max_tokens": 1} | body
    return ask(server, key, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def serve_tiny(**options):
    return serve(lambda: AsyncEngine(make_engine(tiny_model())), ServerConfig(**options))


def test_one_key_does_not_learn_what_another_has_sent():
    with serve_tiny(**TWO) as server:
        assert cached(server, A) == 0
        assert cached(server, B) == 0  # nor does it find what is there
        assert cached(server, A) == cached(server, B) == 48
        assert cached(server, A, cache_salt="own") == 0  # a request's own salt still counts
        assert cached(server, A, cache_salt="own") == 48
        assert cached(server, B, cache_salt="own") == 0


def test_sharing_is_an_option():
    with serve_tiny(**TWO, share_prefixes_between_keys=True) as server:
        assert cached(server, A) == 0
        assert cached(server, B) == 48
        assert cached(server, B, cache_salt="own") == 0
        assert cached(server, A, cache_salt="own") == 48


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_key_puts_its_requests_ahead_of_those_of_others(path):
    def found(config, priority):
        with serve(lambda: CannedClient("ok"), config) as server:
            response = httpx.post(
                server.url + path,
                json=BODIES[path] | {"priority": priority},
                headers={"X-API-Key": A},
            )
            return response.json().get("error", {}).get("message"), server.client.requests

    message, requests = found(ServerConfig(**TWO), -1)
    assert message == "priority must be at least 0 on a server of several keys; got -1"
    assert not requests
    for config, priority in (
        (ServerConfig(**TWO), 2),
        (ServerConfig(**TWO, share_prefixes_between_keys=True), -1),
        (ServerConfig(api_key_hashes=(key_hash(A),)), -1),
    ):
        message, [(_, _, options)] = found(config, priority)
        assert message is None and options["priority"] == priority


def salts(config, key, path, **more):
    with serve(lambda: CannedClient("ok"), config) as server:
        ask(server, key, path, **BODIES[path], **more)
        return [options["cache_salt"] for _, _, options in server.client.requests]


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_isolates(path):
    [salt] = salts(ServerConfig(**TWO), A, path)
    assert len(salt) == 32 and A not in salt and salt not in key_hash(A)
    assert salts(ServerConfig(), None, path) == [None]
    assert salts(ServerConfig(api_key_hashes=(key_hash(A),)), A, path) == [None]
    with serve(lambda: CannedClient("ok"), ServerConfig(**TWO)) as server:
        for key in (A, B, A):
            ask(server, key, path, **BODIES[path])
        found = [options["cache_salt"] for _, _, options in server.client.requests]
        assert found[0] == found[2] != found[1]


def test_no_salt_of_a_request_is_another_keys():
    """B cannot spell A's salt, even if it knows it."""
    ring = KeyRing(ServerConfig(**TWO), secret=b"known")
    of_a, of_b = (ring.cache_salt(key_hash(key)) for key in (A, B))
    for own in (of_a, f"{of_a}/x", f"/{of_a}", ""):
        with serve(lambda: CannedClient("ok"), ServerConfig(**TWO)) as server:
            headers = {"Authorization": f"Bearer {B}"}
            body = BODIES["/v1/completions"] | {"cache_salt": own}
            httpx.post(server.url + "/v1/completions", json=body, headers=headers)
            for _, _, options in server.client.requests:
                assert options["cache_salt"][32:] == (f"/{own}" if own else "")
                assert not options["cache_salt"].startswith(of_a)
    assert len(of_a) == len(of_b) == 32


def test_processes_of_one_server_have_the_same_salts_and_other_servers_others():
    config = ServerConfig(**TWO)
    first, second, other = (
        KeyRing(config, secret=secret).cache_salt(key_hash(A)) for secret in (b"1", b"1", b"2")
    )
    assert first == second != other
    assert KeyRing(config).cache_salt(key_hash(A)) != KeyRing(config).cache_salt(key_hash(A))


def test_keys_of_a_file_are_tenants_as_it_may_change(tmp_path):
    file = tmp_path / "keys"
    file.write_text(A)
    now = [0.0]
    ring = KeyRing(ServerConfig(api_key_file=str(file)), clock=lambda: now[0])
    before = ring.cache_salt(key_hash(A))
    file.write_text(f"{B}\n")
    now[0] = 2.0
    ring._reload()
    assert ring.cache_salt(key_hash(A)) == before != ring.cache_salt(key_hash(B))


def _watched(server, key):
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{server.url}/v1/engine/watch", headers=headers) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


def test_the_watch_page_shows_a_key_its_own_prefixes():
    with serve_tiny(**TWO) as server:
        cached(server, A)
        cached(server, B, prompt=PROMPT[:40])
        seen = [_watched(server, key) for key in (A, B)]
    assert [len(each["tree"]["nodes"]) for each in seen] == [4, 2]
    assert [each["tree"]["num_nodes"] for each in seen] == [4, 2]
    assert [each["num_cached_blocks"] for each in seen] == [6, 6]  # totals are everybody's
    with serve_tiny(**TWO, share_prefixes_between_keys=True) as server:
        cached(server, A)
        assert len(_watched(server, B)["tree"]["nodes"]) == 4


def test_snapshots_list_the_requests_of_a_salt(monkeypatch):
    engine = make_engine(tiny_model())
    step = engine.step
    long = SamplingParams(max_tokens=150, ignore_eos=True)

    def slow():  # no request may end before it has been seen
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine, "step", slow)

    async def main(address):
        async with connected(address) as client:
            streams = [
                client.generate(PROMPT, long, request_id=name, cache_salt=salt)
                for name, salt in (("one", "a/1"), ("two", "b"), ("three", None))
            ]
            await asyncio.gather(*(anext(stream) for stream in streams))
            found = [
                sorted(request["id"] for request in (await client.snapshot(prefix))["requests"])
                for prefix in ("a", "b", "c", None)
            ]
            for stream in streams:
                await stream.aclose()
            return found

    with served(engine) as (_, address):
        assert run(main(address)) == [["one"], ["two"], [], ["one", "three", "two"]]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/files"),
        ("GET", "/v1/batches"),
    ],
)
def test_nothing_of_another_key_can_be_asked_for(method, path):
    """An id opens nothing to another key than the one that has made it."""
    with serve(lambda: CannedClient("ok"), ServerConfig(**TWO)) as server:
        mine = ask(server, A, "/v1/responses", input="Hi")
        headers = {"Authorization": f"Bearer {B}"}
        found = httpx.request(
            method, server.url + path.replace("resp_1", mine["id"]), headers=headers
        )
        assert found.status_code in (404, 405)
        body = {"input": "Hi", "previous_response_id": mine["id"]}
        found = httpx.post(server.url + "/v1/responses", json=body, headers=headers)
        assert found.status_code == 400 and "previous_response_id" in found.text
