"""`RayReplica`: an engine in a Ray actor that serves clients on other machines.

Ray starts, monitors and stops it. Requests and tokens bypass Ray: they use the same sockets and
messages as the processes on a single machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from typing import Any

from engine.distributed.directory import REGISTER_SECONDS
from engine.distributed.ray_launch import RemoteDirectory, import_ray
from engine.errors import EngineError
from engine.llm_engine import LLMEngine
from engine.server.engine_loop import EngineLoop
from engine.server.load_log import LoadLog
from engine.server.logs import configure_logging
from engine.server.replicas.autoscaling import METRIC
from engine.server.server_config import ServerConfig
from engine.server.sockets import bound_socket

__all__ = ["RayReplica"]

_STOP_SECONDS = 10.0
_log = logging.getLogger("engine.server")


class RayReplica:
    """Loads a model and serves it until the actor ends; Ray Serve calls its methods.

    Parameters
    ----------
    model : str
        Model name, or a path that is valid on every machine.
    options : dict
        Keyword arguments of `LLMEngine.from_name`.
    directory, token : str
        Name of the replica directory, and the secret that clients send first.
    server : dict
        Options of `ServerConfig`; those of the log are used.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        model: str,
        options: dict[str, Any],
        directory: str,
        token: str,
        server: dict[str, Any],
    ) -> None:
        self.name = uuid.uuid4().hex
        self.address = ""
        self._directory = RemoteDirectory(directory)
        self._registering: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._loop: EngineLoop | None = None
        self._engine: LLMEngine | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(model, options, token, server), name="engine", daemon=True
        )
        self._thread.start()
        await asyncio.to_thread(self._is_ready.wait)
        await self.check_health()
        number = await self._directory.call("register", self.name, self.address)
        self._registering = asyncio.ensure_future(self._register(number))

    async def check_health(self) -> None:
        """Raise if the engine has stopped; Ray Serve then starts another replica.

        Raises
        ------
        EngineError
        """
        if self._error is not None:
            reason = f"{type(self._error).__name__}: {self._error}"
            raise EngineError(reason) from self._error
        if not self._thread.is_alive():
            raise EngineError("the engine has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric that the autoscaling policy uses."""
        engine = self._engine
        return {METRIC: float(engine.num_unfinished_requests) if engine else 0.0}

    async def where(self) -> dict[str, Any]:
        """Return the socket's address, the process id, and Ray's node id."""
        node = import_ray().get_runtime_context().get_node_id()
        return {"address": self.address, "pid": os.getpid(), "node": node}

    async def __del__(self) -> None:
        """Leave the directory and stop the loop; clients move their requests to other replicas."""
        if self._registering is not None:
            self._registering.cancel()
            with contextlib.suppress(Exception):  # the directory may already be gone
                await self._directory.call("leave", self.name)
        if self._loop is not None:
            self._loop.stop()
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    async def _register(self, number: int) -> None:
        while True:
            await asyncio.sleep(REGISTER_SECONDS)
            try:
                number = await self._directory.call("register", self.name, self.address, number)
            except Exception as error:  # if the directory has died, the next call restarts it
                _log.warning("the directory of replicas cannot be reached: %s", error)

    def _run(self, model: str, options: dict[str, Any], token: str, server: dict[str, Any]) -> None:
        """Load the model and serve it; runs in its own thread."""
        socket = None
        try:
            logs = ServerConfig.from_options(server)
            configure_logging(logs.log_level, json_logs=logs.json_logs, access_log=False)
            host = import_ray("ray.util").get_node_ip_address()
            socket = bound_socket(f"tcp://{host}:*", token)
            self.address = bytes(socket.last_endpoint).decode()  # type: ignore[arg-type]
            self._engine = LLMEngine.from_name(model, **options)
            log = LoadLog(self._engine, logs.log_stats_interval)
            self._loop = EngineLoop(self._engine, socket, token, log.tick)
            self._is_ready.set()
            self._loop.run()
        except BaseException as error:
            self._error = error
        finally:
            self._is_ready.set()
            if socket is not None:
                socket.close()
