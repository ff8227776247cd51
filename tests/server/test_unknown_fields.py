"""Fields that the server does not know, at every level of every protocol."""

from __future__ import annotations

import copy
import json
import logging

import httpx
import pytest

from engine.server.protocol import unknown_fields
from engine.server.server_config import ServerConfig
from tests.golden.text_templates import TOOLS
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import CannedClient, serve

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    },
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "3"}],
                    }
                ],
            },
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "output_config": {},
    },
    "/tokenize": {"messages": [{"role": "user", "content": "Hi"}]},
}
OPAQUE = ("parameters", "input_schema", "input", "arguments")  # a schema or data of the client's


def places(value, path=()):
    """Yield the path of every object of a body that the protocol defines."""
    if isinstance(value, dict):
        yield path
        for name, item in value.items():
            if name not in OPAQUE or isinstance(item, list):
                yield from places(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


PLACES = [(url, path) for url, body in BODIES.items() for path in places(body)]
IDS = ["-".join([url.rpartition("/")[2], *map(str, path)]) for url, path in PLACES]


def with_field(url, path, value):
    body = copy.deepcopy(BODIES[url])
    place = body
    for step in path:
        place = place[step]
    place["new_field"] = value
    return body


def _serve(**options):
    def answer(prompt, params):
        return "Hello"

    return serve(lambda: ScriptedClient(TOOLS, answer), ServerConfig(**options, access_log=False))


@pytest.fixture(scope="module")
def strict():
    with _serve() as server, httpx.Client(base_url=server.url) as found:
        yield found


@pytest.fixture(scope="module")
def lenient():
    with _serve(ignore_unknown_fields=True) as server, httpx.Client(base_url=server.url) as found:
        yield found


def test_the_places_are_those_meant():
    assert len(PLACES) == 37
    assert ("/v1/chat/completions", ("stream_options",)) in PLACES
    assert ("/v1/messages", ("messages", 2, "content", 0, "content", 0)) in PLACES


@pytest.mark.parametrize("url, path", PLACES, ids=IDS)
def test_null_is_ignored_and_else_is_an_error(strict, url, path):
    found = strict.post(url, json=with_field(url, path, None))
    assert found.status_code == 200, found.text
    refused = strict.post(url, json=with_field(url, path, 1))
    assert refused.status_code == 400
    assert "unknown field 'new_field'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("url, path", PLACES, ids=IDS)
def test_with_the_option_they_are_ignored_and_logged(lenient, caplog, monkeypatch, url, path):
    monkeypatch.setattr(logging.getLogger("engine.server"), "propagate", True)
    monkeypatch.setattr(unknown_fields, "_warned", set())
    for value in (1, {"deep": [1]}):
        found = lenient.post(url, json=with_field(url, path, value))
        assert found.status_code == 200, found.text
    (line,) = [m for m in caplog.messages if "new_field" in m]  # once a place
    assert "'new_field', which is ignored" in line


def test_what_is_known_is_still_checked_and_used(lenient):
    body = {"messages": [{"role": "user", "content": "Hi", "x": 1}], "y": 2}
    url = "/v1/chat/completions"
    error = lenient.post(url, json={**body, "temperature": "hot"}).json()["error"]
    assert error["param"] == "temperature"
    found = lenient.post(url, json={**body, "max_tokens": 1}).json()
    assert found["choices"][0]["message"]["content"] == "H"
    assert found["usage"]["completion_tokens"] == 1
    big = {"tokens": [10**30], "x": 1}
    assert f"got {10**30}" in lenient.post("/detokenize", json=big).json()["error"]["message"]


def test_the_content_of_a_schema_is_left_alone(lenient):
    """A field of a tool's schema is not a field of the protocol, whatever its name."""
    body = BODIES["/v1/chat/completions"] | {"tool_choice": "auto", "stream": False, "x": 1}
    tool = {"name": "add", "parameters": SCHEMA | {"x-mine": None, "new_field": 1}}
    body = body | {"tools": [{"type": "function", "function": tool}], "stream_options": None}
    with _serve(ignore_unknown_fields=True) as server:
        httpx.post(server.url + "/v1/chat/completions", json=body).raise_for_status()
        (prompt,) = server.client.prompts
    assert '"x-mine": null' in prompt and '"new_field": 1' in prompt


def test_the_log_is_bounded(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("engine.server"), "propagate", True)
    monkeypatch.setattr(unknown_fields, "_warned", set())
    config = ServerConfig(ignore_unknown_fields=True, access_log=False)
    fields = {f"field_{i}\n" + "x" * 5000: i for i in range(300)}
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    with serve(lambda: CannedClient("Hi"), config) as server:
        httpx.post(server.url + "/v1/chat/completions", json=body).raise_for_status()
    lines = [m for m in caplog.messages if "which is ignored" in m]
    assert len(lines) == unknown_fields.MAX_WARNINGS
    assert all(len(line) < 200 and "\n" not in line for line in lines)


def test_requests_of_other_servers_stay_strict(strict, lenient):
    body = {"messages": [{"role": "user", "content": "Hi"}], "x": 1}
    for _ in range(2):
        assert lenient.post("/v1/chat/completions", json=body).status_code == 200
        assert strict.post("/v1/chat/completions", json=body).status_code == 400


def test_invalid_json_after_an_unknown_field(strict):
    headers = {"content-type": "application/json"}
    for content in (b'{"x": null, "messages": [}', b'{"x": null, "y": ' + b"[" * 100_000):
        found = strict.post("/v1/chat/completions", content=content, headers=headers)
        assert found.status_code == 400
        assert json.loads(found.content)["error"]["type"] == "invalid_request_error"
