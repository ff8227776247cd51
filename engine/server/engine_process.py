"""Engine process: loads the model, then serves the API processes until SIGTERM."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

# Preloaded: otherwise NumPy imports them during the first request, which costs 20 to 40 ms.
import numpy.ma
import numpy.random  # noqa: F401

from engine.device import resolve_device
from engine.errors import ConfigError
from engine.llm_engine import LLMEngine
from engine.server.child import ChildConfig, Report, end_now
from engine.server.engine_loop import EngineLoop
from engine.server.gpus import engine_gpus, replica_gpus
from engine.server.load_log import LoadLog, totals_of
from engine.server.logs import configure_logging
from engine.server.server_config import ServerConfig
from engine.server.sockets import bound_socket

__all__ = ["main", "replica_device"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def main(config: ChildConfig, report: Report) -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: end_now(0))  # there is no request to finish yet
    server = ServerConfig.from_options(config.server)
    configure_logging(server.log_level, json_logs=server.json_logs, access_log=False)
    socket = bound_socket(config.addresses[config.number], config.token)
    options = dict(config.engine)
    replica = config.number if len(config.addresses) > 1 else None
    if replica is not None:
        num_ranks = engine_gpus(options)
        if num_ranks > 1:  # must be set before CUDA is initialized
            os.environ[_VISIBLE] = replica_gpus(replica, num_ranks, os.environ.get(_VISIBLE))
        device = options.get("device", "auto")
        options["device"] = replica_device(device, replica, num_ranks)
    engine = LLMEngine.from_name(config.model, **options)
    log = LoadLog(engine, server.log_stats_interval, replica)

    def beat() -> None:
        report.alive(totals_of(engine))
        log.tick()

    loop = EngineLoop(engine, socket, config.token, beat)

    def stop(*_: Any) -> None:
        loop.stop()

    signal.signal(signal.SIGTERM, stop)
    gc.freeze()  # startup objects live as long as the process: exempt them from GC
    report.ready()
    try:
        loop.run()
    finally:
        report.alive(totals_of(engine))
        socket.close()  # sends pending messages for at most the linger time
        socket.context.term()
    engine.close()
    engine.model.close()


def replica_device(device: str, number: int, num_ranks: int = 1) -> str:
    """Return a replica's device: the GPU with the replica's index, or the CPU.

    With several ranks, each uses one of the replica's visible GPUs; see `gpus.replica_gpus`.

    Raises
    ------
    ConfigError
        If `device` names a GPU by its index, since replicas cannot share it.

    Examples
    --------
    >>> replica_device("cuda", 3), replica_device("cuda", 3, 2), replica_device("cpu", 3)
    ('cuda:3', 'cuda', 'cpu')
    """
    if device == "auto":
        device = resolve_device(device)[0].kind
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"device must be 'cpu', 'cuda' or 'auto' with data_parallel_size > 1; got {device!r}"
        )
    return device if device == "cpu" or num_ranks > 1 else f"cuda:{number}"
