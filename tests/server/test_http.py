"""The server over HTTP with a scripted engine: every status, headers, keys, limits, raw errors."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import subprocess
import time

import httpx
import pytest

from engine import __version__
from engine.errors import EngineError, RequestError
from engine.scheduler.admission import QueueFullError
from engine.server.app import begin_drain
from engine.server.limits import RequestSlots
from engine.server.logs import configure_logging
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig, key_hash
from tests.server.serving import CannedClient, serve

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server():
    with serve(lambda: CannedClient("Hel", "lo")) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def _error(response):
    return response.json()["error"]


# ---- small endpoints


def test_models_version_and_health(http):
    [card] = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 4096)
    assert http.get("/v1/models/scripted").json()["id"] == "scripted"
    assert http.get("/v1/models/other/x").status_code == 404
    assert http.get("/version").json() == {"version": __version__}
    assert [http.get(p).status_code for p in ("/health", "/ping", "/ready")] == [200] * 3


def test_tokenize_and_detokenize(http):
    found = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert found == {"count": 2, "max_model_len": 4096, "tokens": [97, 98],
                     "token_strs": ["a", "b"]}  # fmt: skip
    ids = http.post("/tokenize", json=CHAT).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == "Hi\nassistant: "
    assert http.post("/tokenize", json={}).status_code == 400
    for name, value in (("add_generation_prompt", True), ("chat_template_kwargs", {"a": 1})):
        error = _error(http.post("/tokenize", json={"prompt": "ab", name: value}))
        assert error["param"] == name and "needs messages" in error["message"]


@pytest.mark.parametrize("token_id", [-1, 1 << 16, 10**30])
def test_only_ids_of_the_vocabulary_are_detokenized(http, token_id):
    error = _error(http.post("/detokenize", json={"tokens": [97, token_id]}))
    assert error["param"] == "tokens" and f"[0, 65536); got {token_id}" in error["message"]


@pytest.mark.parametrize(
    "path, name, more",
    [
        ("/tokenize", "prompt", {}),
        ("/v1/embeddings", "input", {}),
        ("/v1/completions", "prompt", {"add_special_tokens": False}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(server, http, monkeypatch, path, name, more):
    def encode(*_):
        raise AssertionError("tokenized")

    monkeypatch.setattr(server.client.tokenizer, "encode", encode)
    response = http.post(path, json={name: "x" * 4097, **more})
    error = _error(response)
    assert (response.status_code, error["param"]) == (400, name)
    assert error["code"] == "context_length_exceeded"
    assert "is 4096 tokens." in error["message"] and "at least 4097 tokens" in error["message"]


# ---- errors


@pytest.mark.parametrize(
    "method, path, body, status, code",
    [
        ("GET", "/nothing", None, 404, None),
        ("GET", "/v1/completions", None, 405, None),
        ("DELETE", "/v1/models", None, 405, None),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"prompt": "a", "n": 17}, 400, None),
        ("POST", "/v1/completions", {}, 400, None),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, None),
        ("POST", "/v1/chat/completions", {**CHAT, "temperature": 1e9}, 400, None),
        ("POST", "/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, None),
        ("POST", "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"x": 1}}, 400, None),
        ("POST", "/v1/embeddings", {"input": []}, 400, None),
    ],
)
def test_errors_have_openais_shape(http, method, path, body, status, code):
    response = http.request(method, path, json=body)
    assert response.status_code == status
    error = _error(response)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]


def test_an_unknown_path_and_variable_are_named(http):
    assert _error(http.get("/nothing"))["message"] == "Not Found: GET /nothing"
    response = http.put("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert _error(response)["message"] == "Method Not Allowed: PUT /v1/completions"
    for fields in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"x": 1}}):
        [name] = fields
        error = _error(http.post("/v1/chat/completions", json={**CHAT, **fields}))
        assert error["param"] == name and "the chat template" in error["message"]


def test_an_unknown_field_is_answered_with_the_nearest(http):
    error = _error(http.post("/v1/chat/completions", json={**CHAT, "max_token": 5}))
    assert error["param"] == "max_token"
    assert "did you mean 'max_tokens'?" in error["message"]


def test_anthropics_paths_have_anthropics_shape(http):
    found = http.get("/v1/messages/nothing/here").json()
    assert (found["type"], found["error"]["type"]) == ("error", "not_found_error")


def test_a_request_id_is_given_back(http):
    given = http.get("/health", headers={"X-Request-Id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    bad = http.get("/health", headers={"X-Request-Id": "a b"})
    assert len(bad.headers["x-request-id"]) == 32


def test_bodies_of_other_types_are_refused(http):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/jsonx"}, {}):
        response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == 415
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


def test_a_compressed_body_is_refused(http):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(b'{"prompt": "a"}')
    response = http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 415
    assert "got the Content-Encoding 'gzip'" in _error(response)["message"]
    assert response.headers["accept-encoding"] == "identity"
    headers["content-encoding"] = "identity"
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "raises, status",
    [(RequestError("top_p must be 1"), 400), (QueueFullError("the queue is full"), 429),
     (EngineError("the engine has ended"), 503), (KeyError("secret"), 500)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
)
def test_errors_of_the_engine_have_their_status_streaming_or_not(
    server, http, monkeypatch, raises, status, stream, path, body
):
    monkeypatch.setattr(server.client, "raises", raises)
    response = http.post(path, json={**body, "stream": stream})
    assert response.status_code == status
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_an_engine_that_ended_is_503(server, http, monkeypatch):
    monkeypatch.setattr(server.client, "error", EngineError("out of memory"))
    for path in ("/health", "/ready"):
        assert http.get(path).status_code == 503
    response = http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert "out of memory" in _error(response)["message"]


def test_an_engine_that_hangs_is_503(server, http, monkeypatch):
    monkeypatch.setattr(server.client, "is_responsive", False)
    for path in ("/health", "/ping", "/ready"):
        response = http.get(path)
        assert response.status_code == 503
        assert "longer than step_timeout" in _error(response)["message"]


def test_a_draining_server_takes_no_new_requests():
    with serve(lambda: CannedClient("Hi")) as server:
        begin_drain(server.app)
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/ready").status_code == 503
        response = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "10")


# ---- completions, by hand


def _frames(response):
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def test_several_prompts_are_numbered(http):
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 1.0}
    found = http.post("/v1/completions", json=body).json()
    assert [(c["index"], c["text"]) for c in found["choices"]] == [(i, "Hello") for i in range(4)]
    assert found["usage"]["prompt_tokens"] == 2
    assert found["usage"]["completion_tokens"] == 20
    frames = _frames(http.post("/v1/completions", json={**body, "stream": True}))
    texts = dict.fromkeys(range(4), "")
    for frame in frames:
        [choice] = frame["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello")


def test_echo_and_token_ids(http):
    found = http.post("/v1/completions", json={"prompt": [72, 105], "echo": True}).json()
    assert found["choices"][0]["text"] == "HiHello"
    body = {"prompt": "Hi", "echo": True, "max_tokens": 0}
    found = http.post("/v1/completions", json=body).json()
    assert found["choices"][0]["text"] == "Hi"
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    frames = _frames(http.post("/v1/completions", json={**body, "stream": True}))
    assert "".join(f["choices"][0]["text"] for f in frames) == "Hi"


@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": "a"}),
                                        ("/v1/chat/completions", CHAT)])  # fmt: skip
def test_usage_comes_in_a_frame_of_its_own(http, path, body):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *frames, last = _frames(http.post(path, json={**body, **options}))
    assert all(frame["usage"] is None for frame in frames)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert not any("usage" in f for f in _frames(http.post(path, json={**body, "stream": True})))


def test_priority_salt_and_timeout_reach_the_engine(server, http):
    options = {"priority": -3, "cache_salt": "s", "timeout": 5.0}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        assert http.post(path, json={**body, **options}).status_code == 200
        given = server.client.requests[-1][2]
        assert {name: given[name] for name in options} == options


# ---- keys and limits


def test_keys_open_every_path_but_health(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# people\nfile-key\n")
    config = ServerConfig(api_key_hashes=(key_hash("secret"),), api_key_file=str(path))
    with (
        serve(lambda: CannedClient("Hi"), config) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        get = client.get
        assert get("/health").status_code == 200
        for route in ("/v1/models", "/metrics", "/version", "/nothing", "/ready", "/openapi.json"):
            response = get(route)
            assert response.status_code == 401, route
            assert _error(response)["code"] == "invalid_api_key"
        for key in ("secret", "file-key"):
            assert get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert get("/v1/models", headers={"X-API-Key": key}).status_code == 200
        for bad in ("Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer " + "x" * 9000):
            assert get("/v1/models", headers={"Authorization": bad}).status_code == 401
        path.write_text("new-key\n")
        time.sleep(1.1)
        statuses = [
            get("/v1/models", headers={"X-API-Key": key}).status_code
            for key in ("new-key", "file-key", "secret")
        ]
        assert statuses == [200, 401, 200]


def test_limits_of_a_body():
    config = ServerConfig(max_body_bytes=1000, body_timeout=0.3, max_n=2, max_tools=1)
    with (
        serve(lambda: CannedClient("Hi"), config) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        post = client.post
        too_large = post("/v1/completions", json={"prompt": "x" * 1000})
        assert (too_large.status_code, _error(too_large)["code"]) == (413, "request_too_large")

        def chunks():
            for _ in range(100):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        assert post("/v1/completions", content=chunks(), headers=headers).status_code == 413

        def slow():
            yield b'{"prompt":'
            time.sleep(1)
            yield b'"a"}'

        assert post("/v1/completions", content=slow(), headers=headers).status_code == 408
        assert post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 400
        tools = [{"function": {"name": name}} for name in "ab"]
        assert post("/v1/chat/completions", json={**CHAT, "tools": tools}).status_code == 400


def test_too_many_requests_are_429():
    config = ServerConfig(max_concurrent_requests=1)
    with serve(lambda: CannedClient("a", "b", delay=2), config) as server:
        with httpx.stream("POST", server.url + "/v1/completions",
                          json={"prompt": "a", "stream": True}) as running:  # fmt: skip
            assert running.status_code == 200
            response = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert httpx.get(server.url + "/health").status_code == 200
        status = 429
        while status == 429:  # until the server has seen that the first client has gone
            time.sleep(0.01)
            status = httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code
        assert status == 200


def test_cors_is_off_by_default():
    with serve(lambda: CannedClient("a")) as server:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in httpx.get(server.url + "/health",
                                                              headers=headers).headers  # fmt: skip
    config = ServerConfig(allowed_origins=("https://a.example",), api_key_hashes=(key_hash("k"),))
    with serve(lambda: CannedClient("a"), config) as server:
        preflight = httpx.options(server.url + "/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = httpx.get(server.url + "/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


# What openai-js and anthropic's SDK send from a page.
SDK_HEADERS = (
    *("authorization", "content-type", "x-api-key", "idempotency-key", "x-request-id"),
    *("openai-organization", "openai-project", "openai-beta"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *(f"x-stainless-{name}" for name in ("lang", "package-version", "os", "arch", "runtime")),
    *("x-stainless-runtime-version", "x-stainless-retry-count", "x-stainless-timeout"),
    *("x-stainless-helper-method", "x-stainless-helper", "x-stainless-poll-helper"),
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models"])
def test_a_page_may_use_the_sdks(path):
    """Browsers ask without a key, and let pages read only headers that are exposed."""
    config = ServerConfig(allowed_origins=("https://a.example",), api_key_hashes=(key_hash("k"),))
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": ", ".join(SDK_HEADERS),
    }
    with serve(lambda: CannedClient("a"), config) as server:
        found = httpx.options(server.url + path, headers=asks)
        assert found.status_code == 200
        allowed = found.headers["access-control-allow-headers"].lower().split(", ")
        assert set(SDK_HEADERS) <= set(allowed)
        assert int(found.headers["access-control-max-age"]) >= 600
        other = asks | {"Origin": "https://b.example"}
        refused = httpx.options(server.url + path, headers=other)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        sent = {"Origin": "https://a.example", "X-API-Key": "k"}
        for status, key in ((404, "k"), (401, "x")):  # errors too
            answer = httpx.get(server.url + "/v1/none", headers=sent | {"X-API-Key": key})
            exposed = answer.headers["access-control-expose-headers"].lower()
            assert answer.status_code == status
            assert {"x-request-id", "request-id", "retry-after"} <= set(exposed.split(", "))


def test_allowed_headers_can_be_named():
    config = ServerConfig(allowed_origins=("https://a.example",), allowed_headers=("content-type",))
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serve(lambda: CannedClient("a"), config) as server:
        for name, status in (("content-type", 200), ("x-stainless-os", 400)):
            asks["Access-Control-Request-Headers"] = name
            assert httpx.options(server.url + "/v1/models", headers=asks).status_code == status


def test_curl_reads_a_stream(server):
    done = subprocess.run(
        ["curl", "-sN", server.url + "/v1/completions", "-H", "Content-Type: application/json",
         "-d", '{"prompt": "a", "stream": true}'],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]] == ["Hel", "lo"]


def test_a_path_of_a_proxy_is_not_part_of_the_routes():
    config = ServerConfig(root_path="/llm", api_key_hashes=(key_hash("k"),))
    with serve(lambda: CannedClient("a"), config, root_path="/llm") as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 401
        found = httpx.get(server.url + "/v1/models", headers={"X-API-Key": "k"})
        assert found.status_code == 200


def test_logs_are_lines_of_json_without_prompts_unless_asked_for(capfd):
    body = {"prompt": "a secret\nplan", "max_tokens": 2}
    for is_logged in (False, True):
        config = ServerConfig(json_logs=True, log_prompts=is_logged)
        configure_logging("info", json_logs=True, access_log=True)
        with serve(lambda: CannedClient("a"), config) as server:
            headers = {"X-Request-Id": "trace-1"}
            assert httpx.post(server.url + "/v1/completions", json=body, headers=headers)
            chat = {"messages": [{"role": "user", "content": "a secret plan"}]}
            assert httpx.post(server.url + "/v1/chat/completions", json=chat).status_code == 200
            httpx.get(server.url + "/no\u2028where?key=hidden")
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
        assert sum("secret" in str(line.get("prompt")) for line in lines) == 2 * is_logged
        first = next(line for line in lines if line.get("request_id") == "trace-1")
        assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
        assert first["ms"] >= 0 and first["bytes"] > 0
        assert lines[-1]["path"] == "/no\\u2028where"
        assert "hidden" not in str(lines)
    logging.getLogger("engine.server").handlers.clear()
    logging.getLogger("engine.server").propagate = True


def test_a_share_of_the_slots_is_kept_for_other_keys():
    slots = RequestSlots(ServerConfig(max_concurrent_requests=16))
    with contextlib.ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(slots.hold("greedy"))
        with pytest.raises(APIError) as caught:
            slots.hold("greedy").__enter__()
        assert caught.value.status == 429
        stack.enter_context(slots.hold("other"))
        stack.enter_context(slots.hold("third"))
        with pytest.raises(APIError, match="16 unfinished"):
            slots.hold("fourth").__enter__()
    assert slots.num_active == 0
    limited = RequestSlots(ServerConfig(max_requests_per_key=1))
    with limited.hold("a"), limited.hold("b"), pytest.raises(APIError, match="its share"):
        limited.hold("a").__enter__()
