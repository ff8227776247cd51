"""A server on a free port in a thread of the test's own process; an engine of canned answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace

import uvicorn

from engine.async_engine import ModelInfo
from engine.errors import EngineError
from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from engine.sampling_params import RequestOutputKind
from engine.server.app import build_app
from engine.server.http_protocol import http_protocol
from engine.server.server_config import ServerConfig
from engine.text.tokenizer import ChatPrompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% if enable_thinking is defined %}<think></think>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextlib.contextmanager
def serve(make_client, config=None, **uvicorn_options):
    """Serve the application of `make_client()`, which is called in the server's event loop.

    Yields an object with `url`, `app` and `client`.
    """
    found = SimpleNamespace(app=None, error=None)
    ready = threading.Event()

    async def main():
        try:
            found.client = make_client()
            used = config or ServerConfig()
            found.app = build_app(found.client, used)
            listener = socket.create_server(("127.0.0.1", 0))
            found.port = listener.getsockname()[1]
            found.url = f"http://127.0.0.1:{found.port}"
            options = {"log_level": "warning", "lifespan": "off", "access_log": False}
            options |= {"timeout_graceful_shutdown": 2, "http": http_protocol(used)}
            options |= uvicorn_options
            found.server = uvicorn.Server(uvicorn.Config(found.app, **options))
            serving = asyncio.ensure_future(found.server.serve(sockets=[listener]))
            while not found.server.started and not serving.done():
                await asyncio.sleep(0.005)
        except BaseException as error:
            found.error = error
            raise
        finally:
            ready.set()
        await serving
        await found.client.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="test server")
    thread.start()
    try:
        assert ready.wait(120)
        if found.error is not None:
            raise found.error
        yield found
    finally:
        if found.error is None:
            found.server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class WordTokenizer:
    """One token a character; renders conversations with a template like ChatML."""

    chat_template = CHATML
    max_token_chars = 1
    vocab_size = 1 << 16

    def encode(self, text, add_special_tokens=True):
        return [min(ord(c), self.vocab_size - 1) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    def id_to_token(self, token_id):
        return chr(token_id)

    def template_variables(self, has_tools):
        return frozenset({"enable_thinking"})

    def render_chat(self, messages, **options):
        return ChatPrompt("\n".join(str(m["content"]) for m in messages) + "\nassistant: ")

    def encode_prompt(self, prompt, add_special_tokens=False):
        return self.encode(prompt.text, add_special_tokens)


class CannedClient:
    """An `EngineClient` that says what it is told to, in pieces.

    Parameters
    ----------
    *pieces : str
        The text of every answer.
    delay : float
        Seconds before each piece.
    """

    def __init__(self, *pieces, delay=0.0, finish_reason="stop", raises=None):
        self.model_info = ModelInfo("scripted", 4096, 1 << 16)
        self.tokenizer = WordTokenizer()
        self.error = None
        self.is_responsive = True
        self.seems_asleep = False
        self.pieces = pieces
        self.delay = delay
        self.finish_reason = finish_reason
        self.raises = raises
        self.requests = []  # (prompt, params, options)
        self.num_active = 0
        self.num_aborted = 0

    async def generate(self, prompt, params=None, **options):
        self.requests.append((prompt, params, options))
        self.num_active += 1
        is_finished = False
        try:
            if self.raises is not None:
                raise self.raises
            async for output in self._outputs(prompt, params, options):
                is_finished = output.finished
                yield output
        finally:
            self.num_active -= 1
            self.num_aborted += not is_finished

    async def _outputs(self, prompt, params, options):
        text, ids = None, prompt
        if isinstance(prompt, dict):
            text, ids = prompt["prompt"], prompt["prompt_token_ids"]
        elif isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt)
        pieces = list(self.pieces)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            for _ in pieces:
                await asyncio.sleep(self.delay)
            pieces = ["".join(pieces)]
        for number, piece in enumerate(pieces):
            if params.output_kind is not RequestOutputKind.FINAL_ONLY:
                await asyncio.sleep(self.delay)
            is_last = number == len(pieces) - 1
            reason = self.finish_reason if is_last else None
            outputs = [
                CompletionOutput(i, piece, list(map(ord, piece)), finish_reason=reason)
                for i in range(params.n)
            ]
            metrics = RequestMetrics(0.0)
            yield RequestOutput(
                options.get("request_id"), text, ids, outputs, is_last, metrics=metrics
            )

    async def abort(self, request_id):
        pass

    async def reset_prefix_cache(self):
        return 0

    adapters = ()

    def adapter_of(self, model):
        return None

    async def close(self):
        self.error = EngineError("closed")
