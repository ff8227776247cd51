"""Endpoints for admin keys: the prefix cache, and sleep."""

from __future__ import annotations

import dataclasses
import time

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from engine.async_engine import AsyncEngine
from engine.server.server_config import ServerConfig, key_hash
from tests.e2e.tiny import make_engine, tiny_model
from tests.server.serving import CannedClient, serve

ADMIN = ServerConfig(admin_key_hashes=(key_hash("root"),), access_log=False)
BOTH = ServerConfig(
    admin_key_hashes=(key_hash("root"),), api_key_hashes=(key_hash("user"),), access_log=False
)
PATH = "/reset_prefix_cache"


def post(server, key=None, path=PATH, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, headers=headers, json=body, timeout=30)


def cached(server, key=None):
    body = {"prompt": [5, 9, 2, 7] * 16, "max_tokens": 1}
    response = post(server, key, "/v1/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_without_an_admin_key_there_is_no_such_path():
    with serve(lambda: CannedClient("a"), ServerConfig(api_key_hashes=(key_hash("k"),))) as server:
        assert post(server, "k").status_code == 404
        headers = {"X-API-Key": "k"}
        paths = httpx.get(server.url + "/openapi.json", headers=headers).json()["paths"]
        assert PATH not in paths


@pytest.mark.parametrize("config", [ADMIN, BOTH], ids=["open", "keys"])
def test_a_reset_frees_the_cached_blocks(config):
    user = "user" if config is BOTH else None
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), config) as server:
        assert cached(server, user) == 0
        assert cached(server, user) == 48
        for key in (None, "user", "roo", "root2"):
            found = post(server, key)
            assert found.status_code == 401 and "an admin API key" in found.text
        assert cached(server, user) == 48
        assert post(server, "root").json() == {"num_freed_blocks": 4}
        assert cached(server, user) == 0
        assert post(server, "root").json() == {"num_freed_blocks": 4}
        assert post(server, "root").json() == {"num_freed_blocks": 0}


def test_a_server_with_no_free_slot_still_obeys_its_admin():
    config = dataclasses.replace(ADMIN, max_concurrent_requests=1)
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), config) as server:
        with server.app.state.slots.hold(None):
            assert post(server, path="/v1/completions", prompt=[5]).status_code == 429
            assert post(server, "root").json() == {"num_freed_blocks": 0}
        assert cached(server) == 0


def test_an_admin_key_is_no_api_key():
    with serve(lambda: CannedClient("a"), BOTH) as server:
        assert post(server, "root", "/v1/completions", prompt="a").status_code == 401
        assert httpx.get(server.url + PATH, headers={"X-API-Key": "root"}).status_code == 405


@pytest.mark.parametrize("config", [ADMIN, BOTH], ids=["open", "keys"])
def test_no_spelling_of_a_path_does_without_the_admin_key(config):
    """Starlette's routes also match a path with a newline at its end."""
    headers = {"X-API-Key": "user", "Content-Type": "application/json"}
    with (
        serve(lambda: CannedClient("a"), config) as server,
        httpx.Client(headers=headers) as client,
    ):
        endpoints = [each for each in server.app.state.endpoints if each.is_admin]
        assert len(endpoints) >= 7
        for name in (each.path[1:] for each in endpoints):
            same = [name, f"%{ord(name[0]):02x}{name[1:]}"]
            others = [f"{name}%0A", f"{name}%0A%0A", f"{name}%0D", f"{name}%00", f"{name}%3F"]
            others += [f"{name}/", f"/{name}", f"./{name}", f"{name};a", name.upper()]
            for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
                for spelling in (*same, *others):
                    response = client.request(method, f"{server.url}/{spelling}", content="{}")
                    allowed = (401,) if spelling in same else (401, 404, 405)
                    assert response.status_code in allowed, (method, spelling)


def test_parameters_are_refused():
    with serve(lambda: CannedClient("a"), ADMIN) as server:
        found = post(server, "root", PATH + "?reset_running_requests=true")
        assert found.status_code == 400
        assert "reset_running_requests is not a parameter" in found.text


def test_it_is_described():
    with serve(lambda: CannedClient("a"), ADMIN) as server:
        document = httpx.get(server.url + "/openapi.json").json()
    validate(document, cls=OpenAPIV31SpecValidator)
    assert document["paths"][PATH]["post"]["security"] == [{"key": []}]
    [level] = document["paths"]["/sleep"]["post"]["parameters"]
    assert (level["name"], level["in"], level["required"]) == ("level", "query", False)
    assert "security" not in document["paths"]["/v1/completions"]["post"]


# ---- sleep


def get(server, path, key="root"):
    return httpx.get(server.url + path, headers={"X-API-Key": key}, timeout=30)


@pytest.mark.parametrize("level", ["", "?level=1", "?level=2"])
def test_a_server_sleeps_and_wakes_up(level):
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), ADMIN) as server:
        body = {"prompt": [5, 9, 2, 7] * 8, "max_tokens": 4, "temperature": 0}
        want = post(server, None, "/v1/completions", **body, return_token_ids=True)
        assert get(server, "/is_sleeping").json() == {"is_sleeping": False}
        assert post(server, "root", "/sleep" + level).json() == {"is_sleeping": True}
        assert post(server, "root", "/sleep" + level).json() == {"is_sleeping": True}
        assert get(server, "/is_sleeping").json() == {"is_sleeping": True}
        assert get(server, "/ready").status_code == 503
        assert get(server, "/health").status_code == 200
        assert get(server, "/metrics").status_code == 200
        for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            found = post(server, None, path, **{field: [5, 9]})
            assert found.status_code == 503 and "asleep" in found.text
            assert "retry-after" in found.headers
        assert post(server, "root", "/wake_up").json() == {"is_sleeping": False}
        assert post(server, "root", "/wake_up").json() == {"is_sleeping": False}
        assert get(server, "/ready").status_code == 200
        found = post(server, None, "/v1/completions", **body, return_token_ids=True)
        assert found.json()["choices"] == want.json()["choices"]


def test_only_an_admin_puts_a_server_to_sleep():
    with serve(lambda: CannedClient("a"), BOTH) as server:
        for key in (None, "user", "x"):
            for path in ("/sleep", "/wake_up"):
                assert post(server, key, path).status_code == 401
            assert get(server, "/is_sleeping", key or "").status_code == 401
        for query, words in (
            ("?level=3", "level must be 1 or 2; got '3'"),
            ("?mode=abort", "mode is not a parameter"),
            ("?level[]=2", "level[] is not a parameter"),
        ):
            found = post(server, "root", "/sleep" + query)
            assert found.status_code == 400 and words in found.text
        assert "tags is not a parameter" in post(server, "root", "/wake_up?tags=weights").text


def test_a_busy_server_does_not_sleep(monkeypatch):
    engine = make_engine(tiny_model())
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.02), step())[1])
    with serve(lambda: AsyncEngine(engine), ADMIN) as server:
        body = {"prompt": [5, 9], "max_tokens": 100, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True  # the model has no tokenizer, and frames no text
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            frames = response.iter_bytes()
            next(frames)
            found = post(server, "root", "/sleep")
            assert found.status_code == 400
            assert "sleep needs an engine without unfinished requests; got 1" in found.text
            assert b"[DONE]" in b"".join(frames)
        assert post(server, "root", "/sleep").json() == {"is_sleeping": True}


def test_an_engine_that_cannot_sleep_says_why(monkeypatch):
    model = tiny_model()
    engine = make_engine(model)
    monkeypatch.setattr(model, "num_ranks", 2)
    with serve(lambda: AsyncEngine(engine), ADMIN) as server:
        found = post(server, "root", "/sleep")
        assert found.status_code == 400 and "a model in one process" in found.text
        monkeypatch.setattr(model, "num_ranks", 1)
