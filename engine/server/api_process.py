"""API process: HTTP, tokenization and detokenization; several can share an engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from engine.async_engine import EngineClient
from engine.errors import ConfigError, TemplateError
from engine.loading.download import resolve_model
from engine.loading.gguf import GgufFile
from engine.model_files import is_present
from engine.server.app import begin_drain, build_app, num_active_requests
from engine.server.child import ChildConfig, Report
from engine.server.connection_pool import fitting_pool
from engine.server.engine_client import ZmqEngineClient
from engine.server.http_protocol import http_protocol
from engine.server.listeners import BACKLOG
from engine.server.logs import configure_logging
from engine.server.option_files import check_files, read_template
from engine.server.replicas.client import ReplicaClient
from engine.server.server_config import ServerConfig
from engine.server.warm_up import warm_up
from engine.text import template_worker
from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["load_model_tokenizer", "main"]

_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 2  # time for connections to close after the last request
_log = logging.getLogger("engine.server")
_HANDSHAKE_SECONDS = 10.0  # time for a client to complete a TLS handshake
_ERROR_SECONDS = 1.0  # time for responses to report why the engine stopped


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers: the process installs its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with a limit for TLS handshakes, which uvicorn leaves at asyncio's 60 s."""
        config = self.config

        def connect() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            return cast(asyncio.Protocol, kind(config, self.server_state, self.lifespan.state))

        await self.lifespan.startup()
        self.servers = []
        seconds = _HANDSHAKE_SECONDS if config.ssl else None
        for each in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                connect,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=seconds,
            )
            self.servers.append(server)
        self.started = True


def main(config: ChildConfig, report: Report) -> None:
    """Serve until SIGTERM, then let running requests finish within `shutdown_timeout`."""
    options = ServerConfig.from_options(config.server)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts arrive one at a time
    configure_logging(options.log_level, json_logs=options.json_logs, access_log=options.access_log)
    logging.captureWarnings(True)  # as lines of the log
    check_files(options)
    with contextlib.suppress(TemplateError):  # the first chat request raises it again
        template_worker.start()
    tokenizer = load_model_tokenizer(config.model, options.chat_template)
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.socket(fileno=os.dup(number))) for number in config.listeners
        ]
        loop = _new_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_serve(config, options, tokenizer, listeners, report))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop does not support every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def load_model_tokenizer(model: str, chat_template: str | None) -> Tokenizer | None:
    """Load the same tokenizer as `Model.tokenizer`; None if the model has none."""
    source = resolve_model(model)
    template = None
    if chat_template is not None:
        template = read_template(chat_template)
    if source.kind == "gguf":
        return load_tokenizer(GgufFile(source.path).metadata, chat_template=template)
    if is_present(source.path / "tokenizer.json"):
        return load_tokenizer(source.path, chat_template=template)
    if template is not None:
        raise ConfigError("chat_template needs a model with a tokenizer; got one without")
    return None


async def _serve(
    config: ChildConfig,
    options: ServerConfig,
    tokenizer: Tokenizer | None,
    listeners: list[socket.socket],
    report: Report,
) -> None:
    loop = asyncio.get_running_loop()
    is_ending = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, is_ending.set)
    client = await _connect(config, options, tokenizer)
    await warm_up(client)
    app = build_app(client, options, secret=config.token.encode())
    server = _Server(_uvicorn_config(app, options))
    serving = asyncio.ensure_future(server.serve(sockets=listeners))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL_SECONDS)
    if server.started:
        gc.freeze()  # startup objects live as long as the process: exempt them from GC
        report.ready()
    while not (is_ending.is_set() or serving.done() or client.error is not None):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(is_ending.wait(), 0.2)
    begin_drain(app)
    await _drain(app, client, options.shutdown_timeout)
    if num_active_requests(app):  # tell their clients why they get no more
        seconds = f"{options.shutdown_timeout:g} s"
        await client.close(f"the server ends, and the request did not within {seconds}")
        await _drain(app, client, _ERROR_SECONDS)
    server.should_exit = True
    await serving
    await client.close()


async def _connect(
    config: ChildConfig, options: ServerConfig, tokenizer: Tokenizer | None
) -> ZmqEngineClient | ReplicaClient:
    """Connect to the engine or its replicas, and wait until one is ready."""
    if len(config.addresses) == 1:
        return await ZmqEngineClient.connect(config.addresses[0], config.token, tokenizer)
    seed = int(config.engine.get("seed", 0))
    return await ReplicaClient.connect(
        dict(enumerate(config.addresses)),
        config.token,
        tokenizer,
        seed=(seed, config.number),
        has_peers=options.api_server_count > 1,
    )


async def _drain(app: Starlette, client: EngineClient, seconds: float) -> None:
    """Wait up to `seconds` for running requests; stop early if the engine has ended."""
    end = time.monotonic() + seconds
    while num_active_requests(app) and (now := time.monotonic()) < end:
        if client.error is not None:
            end = min(end, now + _ERROR_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)


def _uvicorn_config(app: Starlette, options: ServerConfig) -> uvicorn.Config:
    pool = fitting_pool(options.max_connections)
    if pool.limit < options.max_connections:
        text = "max_connections is %d, but the limit of open files (ulimit -Hn) allows %d"
        _log.warning(text, options.max_connections, pool.limit)
    tls: dict[str, Any] = {}
    if options.ssl_certfile is not None:
        tls = {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile}
        if options.ssl_ca_certs is not None:
            tls |= {"ssl_ca_certs": options.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app,
        http=http_protocol(options, pool),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=options.root_path,
        backlog=BACKLOG,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        **tls,
    )
