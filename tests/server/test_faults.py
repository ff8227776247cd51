"""What the internet sends: disconnects, slow clients, malformed and oversized requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import time

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.sampling_params import SamplingParams
from engine.server.server_config import ServerConfig
from engine.text.tokenizer import ChatPrompt, load_tokenizer
from tests.e2e.tiny import CONFIG, Words, generate, make_engine, tiny_model
from tests.server.scripted_client import GOLDEN
from tests.server.serving import CHATML, CannedClient, serve

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def _raw(path, body, extra=b""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n" % len(data) + extra + b"\r\n" + data


def _connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def _read_all(connection):
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def _wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- disconnects


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": ["a", "b"]}),
                                        ("/v1/completions", {"prompt": "a"}),
                                        ("/v1/chat/completions", CHAT)])  # fmt: skip
def test_a_disconnect_aborts_the_request(path, body, stream):
    with serve(lambda: CannedClient(*"abcdefgh" * 100, delay=0.05)) as server:
        connection = _connect(server)
        connection.sendall(_raw(path, {**body, "stream": stream}))
        num = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        _wait_until(lambda: server.client.num_active == num)
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()
        begin = time.monotonic()
        _wait_until(lambda: server.client.num_active == 0)
        assert time.monotonic() - begin < 1
        assert server.client.num_aborted == num
        _wait_until(lambda: server.app.state.slots.num_active == 0)


def test_a_storm_of_disconnects_leaves_nothing_behind():
    """1,000 requests whose clients go, each at another moment; then the engine is empty."""
    model = tiny_model()
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": 512, "debug": False}

    async def storm(port):
        rng = random.Random(1)
        limit = asyncio.Semaphore(100)
        requests = [
            {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 50, "ignore_eos": True},
            {"prompt": [5, 6, 7], "max_tokens": 100, "stream": True, "ignore_eos": True},
            {"prompt": [4, 6], "max_tokens": 30, "n": 2, "temperature": 1.0, "stream": True},
        ]

        async def one(index):
            async with limit:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                data = _raw("/v1/completions", requests[index % 3])
                writer.write(data[: rng.randrange(len(data))] if index % 5 == 0 else data)
                if index % 2:
                    await asyncio.sleep(rng.random() * 0.02)
                else:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(200), rng.random() * 0.1)
                writer.transport.abort()

        await asyncio.gather(*(one(i) for i in range(1000)))

    with serve(lambda: AsyncEngine(make_engine(model, **options))) as server:
        asyncio.run(storm(server.port))
        engine = server.client._engine
        _wait_until(lambda: server.app.state.slots.num_active == 0)
        _wait_until(lambda: not engine.has_unfinished_requests())
        _wait_until(lambda: not server.server.server_state.connections)
        engine.check_integrity()
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
        found = httpx.post(server.url + "/v1/completions", json=body).json()
        assert found["usage"]["completion_tokens"] == 5
        free = engine.scheduler.stats()
        assert free.num_free_blocks + free.num_cached_blocks == free.num_blocks


def test_queued_requests_are_admitted_in_order():
    model, count = tiny_model(), 200
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 128, "debug": False}
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "stream": True, "logprobs": 0}

    async def main(port):
        answered = []

        async def first_frame(number, reader, writer):
            await reader.readuntil(b"data: ")
            answered.append(number)
            await reader.read()
            writer.close()

        tasks = []
        for number in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_raw("/v1/completions", body, b"Connection: close\r\n"))
            tasks.append(asyncio.ensure_future(first_frame(number, reader, writer)))
        await asyncio.gather(*tasks)
        return answered

    with serve(lambda: AsyncEngine(make_engine(model, **options))) as server:
        answered = asyncio.run(main(server.port))
    # A slow client reads those that have arrived meanwhile in any order.
    assert max(abs(a - b) for a, b in enumerate(answered)) < count // 4


def test_an_answer_is_sent_at_once():
    """Headers and body are two packets; with Nagle's algorithm the second one waits 40 ms."""
    with serve(lambda: CannedClient("a")) as server, _connect(server) as connection:
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            connection.sendall(_raw("/v1/completions", {"prompt": "a", "stream": True}))
            found = b""
            while not found.endswith(b"0\r\n\r\n"):
                found += connection.recv(65536)
            times.append(time.perf_counter() - begin)
    assert min(times) < 0.03


# ---- slow clients


def test_slow_headers_and_bodies_end_in_time():
    config = ServerConfig(body_timeout=0.5, timeout_keep_alive=0.5)
    with serve(lambda: CannedClient("a"), config, timeout_keep_alive=1) as server:
        silent, headers, body, idle = (_connect(server) for _ in range(4))
        request = _raw("/v1/completions", {"prompt": "a"})
        headers.sendall(request[:30])
        body.sendall(request[:-4])
        idle.sendall(request)
        begin = time.monotonic()
        assert b"408" in _read_all(silent)[:20]
        assert b"408" in _read_all(headers)[:20]
        assert b"408" in _read_all(body)[:20]
        assert b"200" in _read_all(idle)[:20]
        assert time.monotonic() - begin < 3
        for connection in (silent, headers, body, idle):
            connection.close()


def test_headers_that_come_byte_by_byte_do_not_live_longer():
    config = ServerConfig(body_timeout=0.5)
    with serve(lambda: CannedClient("a"), config) as server, _connect(server) as connection:
        begin = time.monotonic()
        request = _raw("/v1/completions", {"prompt": "a"})
        with pytest.raises(OSError):
            for byte in request[:100]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begin < 2


def test_headers_are_bounded():
    with serve(lambda: CannedClient("a"), ServerConfig(max_header_bytes=1000)) as server:
        with _connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 2000)
            assert b"431" in _read_all(connection)[:20]
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("num_bytes, status", [(1000, b"200"), (1001, b"431"), (20_000, b"431")])
def test_the_bound_of_headers_holds_for_those_that_arrive_at_once(num_bytes, status):
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: "
    with serve(lambda: CannedClient("a"), ServerConfig(max_header_bytes=1000)) as server:
        with _connect(server) as connection:
            connection.sendall(head + b"x" * (num_bytes - len(head) - 4) + b"\r\n\r\n")
            assert _read_all(connection).split()[1] == status
        body = {"prompt": "a" * 3000}  # which is no header
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200


def test_a_client_that_does_not_read_is_dropped():
    pieces = ["x" * 100_000] * 400
    config = ServerConfig(send_timeout=0.3)
    with (
        serve(lambda: CannedClient(*pieces), config) as server,
        _connect(server) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "a", "stream": True, "max_tokens": 1000}
        connection.sendall(_raw("/v1/completions", body))
        _wait_until(lambda: server.client.num_active == 1)
        _wait_until(lambda: server.client.num_active == 0)
        assert server.client.num_aborted == 1


# ---- malformed requests


def _seeds():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    options = {"n": 1, "temperature": 0.5, "stop": ["a"], "logit_bias": {"1": 2.0}, "seed": 3}
    return [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1, "echo": True, **options}),
        ("/v1/completions", {"prompt": [1, 2], "stream": True, **options}),
        ("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "auto", **options}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    ]


VALUES = [
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -0.0, "", "a" * 10_000, "\u0000", "\ud800", [],
    {}, [[]], [None], {"": None}, [1, "a"], {"type": "json_schema"}, "auto", [{"role": "user"}],
]  # fmt: skip


def _mutated(rng):
    """Return the bytes of a request that is wrong somewhere."""
    path, body = rng.choice(_seeds())
    body = json.loads(json.dumps(body))
    kind = rng.randrange(6)
    if kind < 3:  # another value somewhere
        owner, key = body, rng.choice(list(body))
        while isinstance(owner[key], (dict, list)) and owner[key] and rng.random() < 0.6:
            owner = owner[key]
            key = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        owner[key] = rng.choice(VALUES)
        if kind == 2:
            body[rng.choice(["max_tokens", "priority", "xyzzy", "guided_json"])] = rng.choice(
                VALUES
            )
        return _raw(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(1, 5)):  # other bytes
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = bytes(rng.choices(b'\xff\x00{}[]",:\\9e', k=2))
    if kind == 3:
        return _raw(path, bytes(data))
    if kind == 4:
        name = rng.choice([b"Authorization", b"X-Request-Id", b"Content-Type", b"Expect", b"X"])
        value = (
            bytes(rng.choices(range(256), k=rng.randrange(40)))
            .replace(b"\n", b"")
            .replace(b"\r", b"")
        )
        return _raw(path, body, name + b": " + value + b"\r\n")
    request = bytearray(_raw(path, body))
    for _ in range(3):
        request[rng.randrange(len(request))] = rng.randrange(256)
    return bytes(request)


@pytest.fixture
def text_model(monkeypatch):
    """A tiny model with a real tokenizer and a chat template for tools and reasoning."""
    tokenizer = load_tokenizer(
        GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}, chat_template=CHATML
    )
    model = tiny_model(config=dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size))
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setattr(type(model), "tokenizer", tokenizer)
    return model


def test_malformed_requests_are_never_a_500_and_never_hang(text_model):
    config = ServerConfig(body_timeout=0.3)
    rng = random.Random(7)

    async def send_all(port):
        statuses, failed = [], []

        async def one(data):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                head = await asyncio.wait_for(reader.read(15), 10)
            except ConnectionError:
                head = b""
            finally:
                writer.transport.abort()
            statuses.append(head)
            if head[9:12] == b"500":
                failed.append(data)

        for _ in range(40):
            await asyncio.gather(*(one(_mutated(rng)) for _ in range(25)))
        return statuses, failed

    def make_client():
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_blocks": 512}
        return AsyncEngine(make_engine(text_model, **options, debug=False))

    with serve(make_client, config, log_level="critical") as server:
        statuses, failed = asyncio.run(send_all(server.port))
        assert failed == []
        assert all(s.startswith(b"HTTP/1.") for s in statuses if s)
        assert {s[9:12] for s in statuses if s} >= {b"200", b"400", b"404"}
        _wait_until(lambda: server.app.state.slots.num_active == 0)
        assert httpx.get(server.url + "/health").status_code == 200


def test_deep_and_endless_json_is_refused_quickly():
    with serve(lambda: CannedClient("a")) as server, httpx.Client(base_url=server.url) as client:
        headers = {"content-type": "application/json"}
        bodies = [
            b"[" * 1_000_000,
            b'{"prompt":' + b"[" * 1_000_000,
            b'{"guided_json":' + b'{"a":' * 200_000,
            b'{"messages":[{"role":"user","content":[' + b"[" * 1_000_000,
            b'{"prompt":"a","logit_bias":{' + b'"1":1,' * 300_000 + b'"2":2}}',
            b'{"prompt":"a","seed":' + b"9" * 1_000_000 + b"}",
        ]
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in bodies:
                begin = time.monotonic()
                response = client.post(path, content=body, headers=headers)
                assert response.status_code in (200, 400), response.text[:500]
                assert time.monotonic() - begin < 5


def test_requests_leave_no_files_and_tasks_behind():
    async def requests(port, count):
        for number in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stream = number % 2 == 0
            path, body = ("/v1/completions", {"prompt": "a"})
            if number % 4 < 2:
                path, body = "/v1/chat/completions", CHAT
            writer.write(_raw(path, {**body, "stream": stream}, b"Connection: close\r\n"))
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            await writer.wait_closed()

    async def many(port):
        await asyncio.gather(*(requests(port, 25) for _ in range(10)))

    def count():
        return len(os.listdir("/proc/self/fd")), len(server.server.server_state.tasks)

    with serve(lambda: CannedClient("Hel", "lo")) as server:
        asyncio.run(many(server.port))
        _wait_until(lambda: count()[1] == 0)
        before = count()
        for _ in range(3):
            asyncio.run(many(server.port))
        _wait_until(lambda: count() <= before)


# ---- a tokenizer that raises


class _Broken(Words):
    """A tokenizer that cannot decode one id."""

    chat_template = CHATML
    bad_id = None

    def token_bytes(self, token_id):
        if token_id == self.bad_id:
            raise ValueError("no text")
        return super().token_bytes(token_id)

    def render_chat(self, messages, **options):
        return ChatPrompt(" ".join(m["content"] for m in messages))

    def encode_prompt(self, prompt, add_special_tokens=False):
        return self.encode(prompt.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 20}),
    ("/v1/completions", {"prompt": "w5 w6 w7", "logprobs": 20, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 w6 w7"}],
                              "logprobs": True, "top_logprobs": 20}),
])  # fmt: skip
def test_a_tokenizer_may_raise_for_tokens_that_are_only_shown(monkeypatch, path, body, stream):
    """A token of the prompt, and one of the top tokens."""
    model = tiny_model()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)
    [expected] = generate(model, [5, 6, 7], params).outputs
    beside = next(i for i in expected.logprobs[0] if i not in (5, 6, 7, *expected.token_ids))
    tokenizer = _Broken()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setattr(type(model), "tokenizer", tokenizer)
    body |= {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "stream": stream}

    def tokens(http):
        """Return (token, its top tokens) of the answer."""
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        frames = [response.text]
        if stream:
            frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        shown = [choice["logprobs"] for f in frames for choice in json.loads(f)["choices"]]
        shown = [one for one in shown if one]
        if "chat" in path:
            items = [item for one in shown for item in one["content"]]
            return [(i["token"], {t["token"] for t in i["top_logprobs"]}) for i in items]
        pairs = [p for s in shown for p in zip(s["tokens"], s["top_logprobs"], strict=True)]
        return [(token, set(top or ())) for token, top in pairs]

    with (
        serve(lambda: AsyncEngine(make_engine(model, debug=False))) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        whole = tokens(http)
        assert [t for t, _ in whole][-6:] == [f"w{i} " for i in expected.token_ids]
        for tokenizer.bad_id in (7, beside):
            lost = f"w{tokenizer.bad_id} "
            assert any(lost in {token, *top} for token, top in whole)
            shown = [["" if t == lost else t for t in (token, *top)] for token, top in whole]
            assert [sorted([t, *top]) for t, top in tokens(http)] == [*map(sorted, shown)]


def test_a_prompt_whose_text_cannot_be_returned_is_the_clients_error(monkeypatch):
    model, tokenizer = tiny_model(), _Broken()
    tokenizer.bad_id = 7
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setattr(type(model), "tokenizer", tokenizer)
    bodies = {
        "/v1/completions": {"prompt": [[5], [6, 7]], "echo": True},
        "/detokenize": {"tokens": [7]},
    }
    with serve(lambda: AsyncEngine(make_engine(model, debug=False))) as server:
        for path, body in bodies.items():
            response = httpx.post(server.url + path, json=body)
            error = response.json()["error"]
            param = "prompt" if "prompt" in body else "tokens"
            name = "prompt[1]" if "prompt" in body else "tokens"
            assert (response.status_code, error["param"]) == (400, param)
            assert error["message"] == (
                f"{name} must be tokens that have a text; got ValueError of the tokenizer: no text"
            )
        body = {"prompt": [[5], [6]], "echo": True, "max_tokens": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]] == ["w5 ", "w6 "]


# ---- one of several


@pytest.mark.parametrize("path, body, message", [
    ("/v1/completions", {"prompt": [[5], [6, 97]]}, "prompt[1][1] must be "),
    ("/v1/completions", {"prompt": ["w5", "w5 " * 256]}, "prompt[1]: This model's maximum "),
    ("/v1/completions", {"prompt": [[97], [5]], "echo": True}, "prompt[0][0] must be "),
    ("/v1/completions", {"prompt": ["w5", "w" * 2000], "return_token_ids": True},
     "prompt[1]: This model's maximum "),
    ("/v1/completions", {"prompt": [[97]]}, "prompt[0] must be "),
    ("/v1/embeddings", {"input": [[5], [6, 97]]}, "input[1][1] must be "),
    ("/v1/embeddings", {"input": ["w5", "w5 " * 300]}, "input[1]: This model's maximum "),
    ("/v1/embeddings", {"input": [5, 97]}, "input[1] must be "),
    ("/score", {"text_1": "w5", "text_2": ["w6", ""]}, "text_2[1] must not be empty"),
    ("/score", {"text_1": "", "text_2": ["w6", "w7"]}, "text_1 must not be empty"),
    ("/rerank", {"query": "w5", "documents": ["w6", "w7 " * 300]}, "documents[1]: This model's "),
])  # fmt: skip
def test_an_error_about_one_of_several_says_which(several, path, body, message):
    for options in [{}, {"stream": True}] if "completions" in path else [{}]:
        response = httpx.post(several.url + path, json=body | options)
        error = response.json()["error"]
        assert response.status_code == 400 and error["message"].startswith(message), error
        assert error["param"] in body
        assert (error["code"] == "context_length_exceeded") == ("This model's" in message)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_one_of_several_says_which(several, monkeypatch, stream):
    monkeypatch.setattr(several.client.tokenizer, "bad_id", 9)
    body = {"prompt": [[5], [6]], "stream": stream, "max_tokens": 1, "logit_bias": {"9": 100}}
    text = httpx.post(several.url + "/v1/completions", json=body).text
    assert "[0]: the request failed: the tokenizer raised ValueError" in text
    body["prompt"] = [[5]]
    text = httpx.post(several.url + "/v1/completions", json=body).text
    assert '"message":"the request failed: the tokenizer raised ValueError' in text


@pytest.fixture(scope="module")
def several():
    model = tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "has_tokenizer", True)
        patch.setattr(type(model), "tokenizer", _Broken())
        with serve(lambda: AsyncEngine(make_engine(model, debug=False))) as server:
            yield server
