"""A server for tests of the page: prepared answers, and an engine that only says what it does."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import random
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from engine.server.routes import page, watch

MODEL = "double-1b"
ANSWER = (
    "Sunlight holds all colors. On its way through the air it meets molecules, which scatter "
    "blue light far more than red. So blue reaches your eyes from every side, and the sky is "
    "blue; at dusk the way through the air is longer, and what is left is red."
)
HOSTILE = "<img src=x onerror=alert(1)> <b>bold</b>"


class _WithoutKeys:
    """What the server's `Gate` notes of a request when there are no keys."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        scope.setdefault("state", {})["key_salt"] = None
        await self._app(scope, receive, send)


def tokens_of(text):
    """Split a text so that every word takes the space before it along; line breaks are apart."""
    return re.findall(r"\n+| ?[^ \n]+| +", text)


def logprobs_of(token, chance):
    """Return what the endpoint says of one token: itself and four others, likeliest first."""
    p = chance.choice([0.99, 0.97, 0.85, 0.55, 0.31, 0.16])
    texts = [token, " the", " a", " and", "\n"]
    shares = [p, *((1 - p) * share for share in (0.55, 0.25, 0.12, 0.06))]
    tops = sorted(zip(texts, shares, strict=True), key=lambda pair: -pair[1])
    tops = [{"token": t, "logprob": math.log(s), "bytes": list(t.encode())} for t, s in tops]
    own = {"token": token, "logprob": math.log(p), "bytes": list(token.encode())}
    return {"content": [{**own, "top_logprobs": tops}]}


class SimulatedEngine:
    """Snapshots of an engine that serves requests whose prompts begin alike.

    Parameters
    ----------
    num_requests : int
        In flight at any time; 0 for an idle engine.
    """

    def __init__(self, num_requests=14, num_blocks=640, block_size=16, seed=3):
        self.num_requests, self.num_blocks, self.block_size = num_requests, num_blocks, block_size
        self.chance = random.Random(seed)
        self.error = None
        self.num_snapshots = 0
        self.requests = []
        self.branches = [[index, 0, size, 0] for index, size in enumerate((7, 12, 4, 20, 9), 1)]
        self.made = 0

    def _add(self):
        chance, self.made = self.chance, self.made + 1
        branch = chance.choice(self.branches)
        cached = self.block_size * (8 + branch[2])
        prompt = cached + chance.randrange(20, 260)
        total = chance.randrange(60, 420)
        request = {
            "id": f"chatcmpl-{chance.getrandbits(64):016x}",
            "branch": branch[0],
            "state": "running",
        }
        request |= {"num_prompt": prompt, "num_cached": cached, "num_output": 0, "total": total}
        self.requests.append(request)

    def _advance(self):
        for request in self.requests:
            request["num_output"] += self.chance.randrange(9, 15)
        for request in [r for r in self.requests if r["num_output"] >= r["total"]]:
            self.requests.remove(request)
            leaf = [len(self.branches) + 1, request["branch"], self.chance.randrange(3, 22), 0]
            if len(self.branches) < 22:
                self.branches.append(leaf)
        if len(self.requests) < self.num_requests:
            self._add()

    def _tree(self):
        used = {}
        parents = {node[0]: node[1] for node in self.branches}
        for request in self.requests:
            node = request["branch"]
            while node:
                used[node] = used.get(node, 0) + 1
                node = parents[node]
        nodes = [[0, -1, 8, len(self.requests)]]
        nodes += [[n, parent, size, used.get(n, 0)] for n, parent, size, _ in self.branches]
        total = sum(node[2] for node in nodes)
        return {"num_nodes": len(nodes), "num_blocks": total, "nodes": nodes}

    async def snapshot(self, salt_prefix=None):
        """Return the next snapshot, a quarter of a second later in the engine's life."""
        if self.error is not None:
            raise self.error
        self.num_snapshots += 1
        self._advance()
        tree, size = self._tree(), self.block_size
        shown = []
        for index, request in enumerate(self.requests):
            state = "waiting" if index >= 12 else "running"
            row = {k: request[k] for k in ("id", "num_prompt", "num_cached", "num_output")}
            length = request["num_prompt"] + request["num_output"]
            if state == "waiting":
                request["num_output"] = row["num_output"] = row["num_cached"] = length = 0
            shown.append({**row, "state": state, "num_blocks": -(-length // size)})
        own = sum(max(0, r["num_blocks"] - r["num_cached"] // size) for r in shown)
        running = sum(r["state"] == "running" for r in shown)
        wave = 1 + 0.25 * math.sin(self.num_snapshots / 9) + 0.08 * self.chance.random()
        prefills = self.chance.choice([0, 0, 0, 1, 2]) if running else 0
        num_tokens = running + prefills * self.chance.randrange(90, 240)
        return {
            "time": self.num_snapshots * 0.25,
            "step_ms": 7.9 * wave if running else 0.0,
            "tokens_per_s": running / 0.0079 / wave,
            "num_running": running,
            "num_waiting": len(shown) - running,
            "num_blocks": self.num_blocks,
            "num_free_blocks": max(0, self.num_blocks - own - tree["num_blocks"]),
            "block_size": size,
            "requests": shown,
            "tree": tree,
            "batch": {
                "num_tokens": num_tokens,
                "num_prefills": prefills,
                "num_decodes": running - min(prefills, running),
            },
        }


@dataclass
class Script:
    """What the double answers with, and what it was asked."""

    text: str = ANSWER
    thoughts: str = ""
    delay: float = 0.004  # seconds before each token
    key: str | None = None
    error: tuple[int, str, dict[str, str]] | None = None
    knows_models: bool = True
    refused_models: list[str] = field(default_factory=list)
    defaults: dict[str, float] | None = None  # sampling parameters of the model
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    num_layers: int = 12  # layers the logit lens reads; 0: it does not support the model
    ends: str = ""  # after four tokens: "cut", or "error"
    asked: list[dict] = field(default_factory=list)
    lenses: list[dict] = field(default_factory=list)
    was_aborted: threading.Event = field(default_factory=threading.Event)


def _error(status, message, headers=None):
    body = {"error": {"message": message, "type": "error", "param": None, "code": status}}
    return JSONResponse(body, status, headers)


async def _chat(request):
    script = request.app.state.script
    asked = json.loads(await request.body())
    script.asked.append(asked)
    if script.error:
        return _error(*script.error)
    if asked["model"] in script.refused_models:
        return _error(503, "this model is being loaded")
    return StreamingResponse(_chunks(script, asked), media_type="text/event-stream")


async def _chunks(script, asked):
    chance = random.Random(1)

    def frame(delta, reason=None, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
        chunk = {"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
        return f"data: {json.dumps(chunk)}\n\n"

    def of_token(number, name, token):
        given = {"logprobs": logprobs_of(token, chance)} if asked.get("logprobs") else {}
        if asked.get("return_token_ids"):
            given["token_ids"] = [number]
        return frame({name: token}, **given)

    tokens = [("reasoning_content", t) for t in tokens_of(script.thoughts) if script.thoughts]
    tokens += [("content", t) for t in tokens_of(script.text)]
    try:
        yield ": keep-alive\n\n" + frame({"role": "assistant", "content": ""})
        for number, (name, token) in enumerate(tokens):
            await asyncio.sleep(script.delay)
            yield of_token(number, name, token)
            if script.ends and number == 3:
                if script.ends == "error":
                    yield f"data: {json.dumps({'error': {'message': 'the device is gone'}})}\n\n"
                return
        for number, (name, arguments) in enumerate(script.calls):
            start = {"index": number, "id": f"call-{number}", "type": "function"}
            yield frame({"tool_calls": [start | {"function": {"name": name, "arguments": ""}}]})
            for part in tokens_of(arguments):
                call = {"index": number, "function": {"arguments": part}}
                yield frame({"tool_calls": [call]})
        yield frame({}, "tool_calls" if script.calls else "stop")
        usage = {"prompt_tokens": 40, "completion_tokens": len(tokens)}
        usage["prompt_tokens_details"] = {"cached_tokens": 32}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        script.was_aborted.set()
        raise


async def _completions(request):
    request.app.state.script.asked.append(json.loads(await request.body()))
    return JSONResponse({"choices": []})


async def _models(request):
    if not request.app.state.script.knows_models:
        return _error(503, "loading the model")
    defaults = request.app.state.script.defaults
    given = {} if defaults is None else {"default_sampling_params": defaults}
    return JSONResponse({"data": [{"id": MODEL, **given}, {"id": "another-model"}]})


async def _lens_limits(request):
    limits = {"max_tokens": 4096, "max_lens_tokens": 16, "max_top": 20}
    return JSONResponse({"num_layers": request.app.state.script.num_layers, **limits})


async def _lens(request):
    """Say that a layer is as sure of a token as it is late, and knows it in the last third."""
    script = request.app.state.script
    asked = json.loads(await request.body())
    script.lenses.append(asked)
    texts = tokens_of(script.text)
    guesses = [",", " the", " of", " a", " light"]

    def layer(index, text, at):
        p = 0.28 + 0.7 * (index / script.num_layers) ** 2
        is_known = index >= script.num_layers * (8 + at % 3) // 12
        first = text if is_known else guesses[(index + at) % 3]
        rest = [one for one in guesses if one != first][:4]
        top = [first, *rest]
        shares = [p, *((1 - p) * share for share in (0.3, 0.2, 0.1, 0.05))]
        found = [
            {"token": t, "token_id": at if t == text else 1000 + len(t), "probability": s}
            for t, s in zip(top, shares, strict=True)
        ]
        rank, own = (1, p) if is_known else (40 * (script.num_layers - index), 0.001)
        return {"rank": rank, "probability": own, "top": found}

    tokens = [
        {
            "token_id": at,
            "token": texts[at],
            "layers": [layer(index, texts[at], at) for index in range(script.num_layers)],
        }
        for at in asked["token_ids"][-asked["num_tokens"] :]
    ]
    body = {"model": asked["model"], "num_tokens": 40 + len(asked["token_ids"]), "tokens": tokens}
    return JSONResponse(body)


class _Keys:
    """Lets requests with the key through, and anybody to the files of the page."""

    def __init__(self, app, script):
        self.app, self.script = app, script

    async def __call__(self, scope, receive, send):
        is_open = scope["type"] != "http" or scope["path"] in page.PUBLIC_PATHS
        given = dict(scope.get("headers", [])).get(b"authorization", b"").decode()
        if is_open or not self.script.key or given == f"Bearer {self.script.key}":
            await self.app(scope, receive, send)
        else:
            await _error(401, "wrong or missing API key")(scope, receive, send)


def build_double(script, engine):
    """Return the application: the real page and the real feed, everything else scripted."""
    own = [
        Route("/v1/models", _models),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
        Route("/v1/engine/lens", _lens_limits, methods=["GET"]),
        Route("/v1/engine/lens", _lens, methods=["POST"]),
        Route("/v1/completions", _completions, methods=["POST"]),
    ]
    handlers = {
        HTTPException: lambda _, error: _error(error.status_code, error.detail, error.headers)
    }
    app = Starlette(
        routes=[*page.routes(), *watch.routes(), *own],
        exception_handlers=handlers,
        middleware=[Middleware(_WithoutKeys)],
    )
    app.state.script, app.state.client = script, engine
    app.state.config = SimpleNamespace(max_watchers=3, send_timeout=10.0)
    app.state.is_draining = False
    app.add_middleware(_Keys, script=script)
    return app


class Server:
    """An application on a free port of this machine, in a thread."""

    def __init__(self, app):
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self):
        """End the thread; open streams get a second."""
        self._server.should_exit = True
        self._thread.join()


def get(site, path, method="GET", **headers):
    """Return the status, the headers by their names in lower case, and the body."""
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read()
    finally:
        connection.close()


def first_lines(site, count, **headers):
    """Return the first lines of the stream of snapshots."""
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=10)
    connection.request("GET", "/v1/engine/watch", headers=headers)
    answer = connection.getresponse()
    lines = [answer.readline() for _ in range(count)]
    connection.close()
    return lines
