"""Errors that programs branch on: status, code, param and words, as OpenAI and Anthropic send."""

from __future__ import annotations

import re

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import EngineError
from engine.llm_engine import LLMEngine
from engine.scheduler.admission import QueueFullError
from engine.server.server_config import ServerConfig, key_hash
from tests.lazily import lazily
from tests.server.serving import CannedClient, serve

anthropic = lazily("anthropic")
openai = lazily("openai")

LIMIT = 64  # max_model_len
USER = [{"role": "user", "content": "Hi"}]
LONG = "word " * 100
CHATS = {
    "/v1/chat/completions": ("messages", [{"role": "user", "content": LONG}]),
    "/v1/completions": ("prompt", LONG),
    "/v1/embeddings": ("input", LONG),
    "/v1/responses": ("input", LONG),
}


@pytest.fixture(scope="module")
def url(smollm2):
    def make_client():
        return AsyncEngine(LLMEngine(smollm2, max_num_seqs=4, max_model_len=LIMIT, num_blocks=64))

    config = ServerConfig(served_model_name=("smollm2",), access_log=False)
    with serve(make_client, config) as found:
        yield found.url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found


def _error(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


# ---- prompts that are too long


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CHATS)
def test_a_prompt_too_long_has_openais_code_and_words(http, path, stream):
    name, prompt = CHATS[path]
    fields = {"model": "smollm2", name: prompt}
    if path != "/v1/embeddings":
        fields["stream"] = stream
    error = _error(http.post(path, json=fields))
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert error["type"] == "invalid_request_error"
    found = re.match(r"This model's maximum context length is (\d+) tokens\. ", error["message"])
    assert int(found[1]) == LIMIT
    count = int(re.search(r"resulted in (\d+) tokens", error["message"])[1])
    assert 100 <= count <= 150


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_has_anthropics_words(url, stream):
    message = {"role": "user", "content": LONG}
    fields = {"model": "smollm2", "messages": [message]}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        count = client.messages.count_tokens(**fields).input_tokens  # also of what does not fit
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**fields, max_tokens=4, stream=stream)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == f"prompt is too long: {count} tokens > {LIMIT - 1} maximum"


def test_the_border_is_where_no_token_is_left_to_generate(http):
    fields = {"model": "smollm2", "max_tokens": 4}
    fits = http.post("/v1/completions", json={**fields, "prompt": [5] * (LIMIT - 1)}).json()
    assert fits["usage"]["completion_tokens"] == 1
    error = _error(http.post("/v1/completions", json={**fields, "prompt": [5] * LIMIT}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"resulted in {LIMIT} tokens" in error["message"]
    assert f"at most {LIMIT - 1} tokens" in error["message"]
    inputs = {"model": "smollm2", "input": [[5] * LIMIT]}
    assert len(http.post("/v1/embeddings", json=inputs).json()["data"]) == 1


def test_a_text_too_long_to_be_tokenized_has_the_same_code(http):
    text = "word " * 100_000
    error = _error(http.post("/v1/completions", json={"prompt": text}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    fields = {"model": "smollm2", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    words = _error(http.post("/v1/messages", json=fields))["message"]
    assert re.fullmatch(rf"prompt is too long: \d+ tokens > {LIMIT - 1} maximum", words)


def test_a_conversation_longer_than_the_context_can_be_tokenized(http):
    found = http.post("/tokenize", json={"messages": [{"role": "user", "content": LONG}]}).json()
    assert found["count"] > LIMIT == found["max_model_len"]


# ---- the field

BOGUS = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "bogus"}},
}


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("/v1/chat/completions", {"messages": USER, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"messages": USER, "top_p": "x"}, "top_p"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": USER, "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": USER, "response_format": BOGUS}, "response_format"),
        ("/v1/chat/completions", {"messages": USER, "logit_bias": {"9999999999": 1}}, "logit_bias"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "function_call": {}}]},
            "messages",
        ),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "a", "response_format": BOGUS}, "response_format"),
        ("/v1/completions", {"prompt": "a", "guided_json": {"type": "bogus"}}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "guided_grammar": "x"}, "guided_grammar"),
        ("/v1/completions", {"prompt": "a", "guided_regex": ""}, "guided_regex"),
        ("/v1/completions", {"prompt": "a", "guided_choice": []}, "guided_choice"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regex": ""}},
            "structured_outputs",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "guided_regex": "a", "response_format": BOGUS},
            "response_format",
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**9]}, "prompt"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [10**9]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "temperature": -1}, "temperature"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "a", "truncation": "auto"}, "truncation"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "x"}]}, "tools"),
        (
            "/v1/responses",
            {
                "input": "a",
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": {"type": "bogus"}}
                },
            },
            "text.format",
        ),
    ],
)
def test_param_names_the_field_of_the_request(http, path, fields, param):
    assert _error(http.post(path, json=fields))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": -1}, "must be"),
        ("/v1/completions", {"prompt": "Hi", "guided_regex": "("}, "regex cannot be compiled"),
        ("/v1/embeddings", {"input": [5, -1]}, "must be a token id"),
        ("/inference/v1/generate", {"token_ids": [5, -1]}, "must be a token id"),
    ],
)
def test_messages_name_the_field_of_the_request(http, path, fields, words):
    message = _error(http.post(path, json={"model": "smollm2", **fields}))["message"]
    assert message.startswith(list(fields)[-1]) and words in message


# ---- other codes


@pytest.fixture(scope="module")
def guarded():
    config = ServerConfig(api_key_hashes=(key_hash("k"),), access_log=False)
    with serve(lambda: CannedClient("Hi"), config) as found:
        yield found.url


def test_a_wrong_key(guarded):
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        assert caught.value.request_id
    with (
        anthropic.Anthropic(base_url=guarded, api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError) as found,
    ):
        other.messages.create(model="scripted", max_tokens=4, messages=USER)
    assert found.value.body["error"]["type"] == "authentication_error"
    assert found.value.request_id
    assert found.value.request_id == found.value.body["request_id"]


def test_another_model(guarded):
    with (
        openai.OpenAI(base_url=f"{guarded}/v1", api_key="k", max_retries=0) as client,
        pytest.raises(openai.NotFoundError) as caught,
    ):
        client.chat.completions.create(model="other", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with (
        anthropic.Anthropic(base_url=guarded, api_key="k", max_retries=0) as other,
        pytest.raises(anthropic.NotFoundError) as found,
    ):
        other.messages.create(model="other", max_tokens=4, messages=USER)
    assert found.value.body["error"]["type"] == "not_found_error"
    assert found.value.request_id


@pytest.mark.parametrize(
    "error, statuses, code, kind",
    [
        (QueueFullError("full"), (429, 429), "rate_limit_exceeded", "rate_limit_error"),
        (EngineError("gone"), (503, 529), "service_unavailable", "overloaded_error"),
        (KeyError("a bug"), (500, 500), None, "api_error"),
    ],
)
def test_failures_that_clients_retry(error, statuses, code, kind):
    with serve(lambda: CannedClient("Hi", raises=error)) as server:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            client.chat.completions.create(model="scripted", messages=USER)
        assert (caught.value.status_code, caught.value.code) == (statuses[0], code)
        with (
            anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as other,
            pytest.raises(anthropic.APIStatusError) as found,
        ):
            other.messages.create(model="scripted", max_tokens=4, messages=USER)
        assert found.value.status_code == statuses[1]
        assert found.value.body["error"]["type"] == kind
        if statuses[0] != 500:
            assert int(found.value.response.headers["retry-after"]) > 0


def test_a_thread_is_refused_with_the_code_that_makes_clients_send_everything(http):
    fields = {"model": "smollm2", "messages": USER, "max_tokens": 1}
    error = _error(http.post("/v1/messages", json={**fields, "thread": {"type": "create"}}))
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert "details" not in _error(http.post("/v1/messages", json={**fields, "max_tokens": 0}))
    assert http.post("/v1/messages", json={**fields, "thread": None}).status_code == 200


def test_both_names_of_the_request_id(http):
    fields = {"model": "smollm2", "messages": USER, "max_tokens": 1}
    sent = {"X-Request-Id": "trace-7"}
    for stream in (False, True):
        found = http.post("/v1/messages", json={**fields, "stream": stream}, headers=sent)
        assert found.headers["request-id"] == found.headers["x-request-id"] == "trace-7"
    found = http.post("/v1/messages/count_tokens", json={}, headers=sent)
    assert (found.status_code, found.headers["request-id"]) == (400, "trace-7")
