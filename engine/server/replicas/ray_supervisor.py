"""`engine serve --nodes N`: runs the `ray_serve` application on a cluster until a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

from engine.distributed.ray_launch import import_ray
from engine.errors import ConfigError
from engine.server.child import duration, say
from engine.server.gpus import engine_gpus
from engine.server.replicas.ray_serve import RayServeConfig, build
from engine.server.server_config import ServerConfig

__all__ = ["supervise_on_ray"]

_NAME = "engine"
_ADDRESS = "auto"  # RAY_ADDRESS, or this machine's cluster
_REPORT_SECONDS = 10.0


def supervise_on_ray(model: str, server: ServerConfig, engine: dict[str, Any]) -> int:
    """Serve a model on a Ray cluster until a signal; return the exit status.

    Parameters
    ----------
    model : str
        Model name, or a path that is valid on every machine.
    server : ServerConfig
        `data_parallel_size` replicas and `api_server_count` ingresses.
    engine : dict
        Keyword arguments of `LLMEngine.from_name`.

    Raises
    ------
    ConfigError
        If no cluster is running, or an option does not apply to Ray Serve.
    """
    arguments = _arguments(model, server, engine)
    RayServeConfig.from_options(arguments)  # validate the options before connecting
    ray = import_ray()
    serve = import_ray("ray.serve")
    start = time.monotonic()
    ending = threading.Event()
    reasons: list[str] = []

    def end(number: int, _: Any) -> None:
        reasons.append(signal.Signals(number).name)
        ending.set()

    try:
        ray.init(address=_ADDRESS, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise ConfigError(f"nodes needs a running Ray cluster (ray start): {error}") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        if not _wait_for_nodes(ray, server.nodes, ending):
            return 0
        serve.start(http_options={"host": server.host, "port": server.port})
        serve.run(build(arguments), name=_NAME, route_prefix="/")
        say(f"ready at {server.url}, on every machine ({time.monotonic() - start:.1f} s)")
        ending.wait()
        serve.delete(_NAME)
        say(f"ended by {reasons[0]} after {duration(time.monotonic() - start)}")
        return 0
    except RuntimeError as error:  # Ray Serve has already logged the details
        say(f"the application could not start: {error}")
        with contextlib.suppress(Exception):
            serve.delete(_NAME)
        return 1
    finally:
        ray.shutdown()


def _arguments(model: str, server: ServerConfig, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `ray_serve.build`."""
    if server.port == 0:
        raise ConfigError("port must be a fixed one with nodes; got 0")
    size = server.data_parallel_size
    is_cpu = engine.get("device") == "cpu"
    return {
        "model": model,
        "engine": engine | {"progress": False},
        "server": server.options(),
        "num_ingresses": server.api_server_count,
        "min_replicas": size,
        "max_replicas": size,
        "num_gpus": 0 if is_cpu else engine_gpus(engine),
    }


def _wait_for_nodes(ray: Any, count: int, ending: threading.Event) -> bool:
    """Wait until the cluster has `count` machines; return False if a signal comes first."""
    said = 0.0
    while (found := sum(node["Alive"] for node in ray.nodes())) < count:
        if time.monotonic() - said > _REPORT_SECONDS:
            say(f"waiting for {count} machines; the cluster has {found}")
            said = time.monotonic()
        if ending.wait(0.2):
            return False
    return True
