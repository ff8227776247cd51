"""The engine's process: loads the model, then serves the API processes until it is told to end."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

# NumPy would import them in the first request: 20 to 40 ms.
import numpy.ma
import numpy.random  # noqa: F401

from engine.llm_engine import LLMEngine
from engine.server.child import ChildConfig, Report
from engine.server.engine_loop import EngineLoop
from engine.server.sockets import bound_socket

__all__ = ["main"]


def main(config: ChildConfig, report: Report) -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to finish yet
    socket = bound_socket(config.address)
    engine = LLMEngine.from_name(config.model, **config.engine)
    loop = EngineLoop(engine, socket, config.token, report.alive)

    def stop(*_: Any) -> None:
        loop.stop()

    signal.signal(signal.SIGTERM, stop)
    gc.freeze()  # what is there now stays: later collections need not look at it
    report.ready()
    try:
        loop.run()
    finally:
        socket.close()  # sends what is left, for at most its linger
        socket.context.term()
    engine.close()
    engine.model.close()
