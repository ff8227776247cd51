"""/v1/responses and /v1/messages: keys, aborts, late failures, and random bodies over HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from engine.server.protocol.responses import ResponsesRequest
from engine.server.server_config import ServerConfig, key_hash
from tests.lazily import lazily
from tests.server.serving import CannedClient, serve
from tests.server.test_protocol_fuzz import body

anthropic = lazily("anthropic")
openai = lazily("openai")

USER = [{"role": "user", "content": "Hi"}]


def openai_client(server, **options):
    options = {"api_key": "k", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def anthropic_client(server, **options):
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "k", "max_retries": 0, **options}
    )


def test_keys():
    config = ServerConfig(api_key_hashes=(key_hash("k"),), access_log=False)
    fields = {"model": "scripted", "max_tokens": 8, "messages": USER}
    with serve(lambda: CannedClient("Hel", "lo"), config) as server:
        with anthropic_client(server) as client:  # which sends X-API-Key
            assert client.messages.create(**fields).content[0].text == "Hello"
        with anthropic_client(server, api_key="other") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**fields)
            assert caught.value.body["error"]["type"] == "authentication_error"
        with (
            openai_client(server, api_key="other") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.responses.create(model="scripted", input="Hi")


def test_an_answer_that_was_aborted_is_an_error():
    """As when the server shuts down before the answer is finished."""
    make = functools.partial(CannedClient, "Hel", "lo", finish_reason="abort")
    with serve(make) as server, openai_client(server) as client:
        with pytest.raises(openai.InternalServerError, match="the request was aborted"):
            client.responses.create(model="scripted", input="Hi")
        *_, last = client.responses.create(model="scripted", input="Hi", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        with anthropic_client(server) as other, pytest.raises(anthropic.APIStatusError) as caught:
            for _ in other.messages.create(
                model="scripted", max_tokens=8, messages=USER, stream=True
            ):
                pass
        assert caught.value.body["error"]["type"] == "overloaded_error"


class LateFailure(CannedClient):
    """Fails after the stream had to begin without a token."""

    async def generate(self, prompt, params=None, **options):
        await asyncio.sleep(0.3)
        raise EngineError("the engine has stopped")
        yield


def test_half_of_a_surrogate_pair_in_a_call_ends_no_conversation():
    """It was an internal error in one protocol, and in the others a call without an answer."""
    text = '<tool_call>{"name": "add", "arguments": {"a": "x\\ud83d"}}</tool_call>'
    with serve(lambda: CannedClient(*text)) as server:
        with anthropic_client(server) as client:
            fields = {"model": "scripted", "max_tokens": 8, "messages": USER}
            fields["tools"] = [{"name": "add", "input_schema": {"type": "object"}}]
            answers = [client.messages.create(**fields)]
            with client.messages.stream(**fields) as events:
                answers.append(events.get_final_message())
            assert [one.content[0].input for one in answers] == [{"a": "x\ufffd"}] * 2
        with openai_client(server) as client:
            tools = [{"type": "function", "name": "add", "parameters": {}}]
            first = client.responses.create(model="scripted", input="Hi", tools=tools)
            call_id = first.output[0].call_id
            result = {"type": "function_call_output", "call_id": call_id, "output": "3"}
            second = client.responses.create(
                model="scripted", input=[result], previous_response_id=first.id, tools=tools
            )
            assert second.status == "completed"


def test_a_failure_after_comments_is_a_stream_that_clients_read():
    config = ServerConfig(sse_keep_alive=0.05, access_log=False)
    with serve(LateFailure, config) as server:
        with openai_client(server) as client:
            events = list(client.responses.create(model="scripted", input="Hi", stream=True))
            assert [event.type for event in events] == [
                "response.created", "response.in_progress", "response.failed",
            ]  # fmt: skip
            assert [event.sequence_number for event in events] == [0, 1, 2]
        with anthropic_client(server) as other, pytest.raises(anthropic.APIStatusError) as caught:
            list(other.messages.create(model="scripted", max_tokens=8, messages=USER, stream=True))
        assert caught.value.body["error"]["message"] == "the engine has stopped"


class LateBug(CannedClient):
    """Raises what no engine raises, behind the first token."""

    async def generate(self, prompt, params=None, **options):
        async for output in super().generate(prompt, params, **options):
            yield output
            raise KeyError("secret")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"model": "scripted", "max_tokens": 8, "messages": USER}),
    ],
)
def test_the_connection_of_a_stream_that_failed_serves_the_next_request(path, fields, caplog):
    body = json.dumps({**fields, "stream": True})
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    first = f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{body}"
    second = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with (
        serve(lambda: LateBug("Hel", "lo"), ServerConfig(access_log=False)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection,
    ):
        connection.sendall((first + second).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    stream, models = answer.split(b"0\r\n\r\n", 1)
    assert b"internal error (KeyError)" in stream
    assert models.startswith(b"HTTP/1.1 200") and b'"id":"scripted"' in models
    assert sum(record.exc_info is not None for record in caplog.records) == 1


@pytest.fixture(scope="module")
def http():
    config = ServerConfig(access_log=False)
    make = functools.partial(CannedClient, "Hel", "lo")
    with serve(make, config) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/responses", ResponsesRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
    ],
)
@given(st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_bodies_are_answered(http, path, kind, data):
    found = http.post(path, json=data.draw(body(kind)))
    assert found.status_code in (200, 400, 404)
    if found.status_code != 200:
        assert found.json()["error"]["message"]
