"""/reset_prefix_cache: only for admin keys, through every kind of client."""

from __future__ import annotations

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


def test_an_admin_key_is_no_api_key():
    with serve(lambda: CannedClient("a"), BOTH) as server:
        assert post(server, "root", "/v1/completions", prompt="a").status_code == 401
        assert httpx.get(server.url + PATH, headers={"X-API-Key": "root"}).status_code == 405


def test_parameters_are_refused():
    with serve(lambda: CannedClient("a"), ADMIN) as server:
        found = post(server, "root", PATH + "?reset_running_requests=true")
        assert found.status_code == 400 and "reset_running_requests=true" in found.text


def test_it_is_described():
    with serve(lambda: CannedClient("a"), ADMIN) as server:
        document = httpx.get(server.url + "/openapi.json").json()
    validate(document, cls=OpenAPIV31SpecValidator)
    assert document["paths"][PATH]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/v1/completions"]["post"]
