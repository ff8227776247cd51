"""Main process of the server: starts the engine and API processes, and shuts them down together.

If the engine exits, the server exits too and reports the reason. With several replicas, one that
exits is restarted as long as another one is serving. An API process that exits is restarted;
streams in the others continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.checks import parse_object
from engine.distributed.log_stream import bounded_stderr
from engine.errors import ConfigError, EngineError
from engine.model_files import excerpt
from engine.server.child import ChildConfig, duration, say
from engine.server.listeners import listening_sockets
from engine.server.messages import BEAT_SECONDS
from engine.server.running import PREFIX, ServerRecord
from engine.server.server_config import ServerConfig
from engine.text.child_process import kill_tree

__all__ = ["Supervisor", "supervise"]

_MAX_ADDRESS = 100  # bytes; the kernel limits a socket's path to 104 or 108
# Maximum restarts within `_RESTART_SPAN`: of all API processes, and of each replica.
_MAX_RESTARTS = 5
_RESTART_SPAN = 60.0  # seconds; window over which restarts are counted
_SLACK_SECONDS = 6.0  # time for a child to exit, beyond `shutdown_timeout`
_NOTICE_SECONDS = 2.0  # maximum delay until we notice an engine's exit that an API process has seen
_LAST_WORDS_SECONDS = 3.0  # time for API processes to tell their clients that the engine exited
_ENGINE = "engine.server.engine_process"
_API = "engine.server.api_process"
# Not `-m`, which puts the current folder first on `sys.path`.
_CODE = """import sys; module, *sys.path[:] = sys.argv[1:]
from importlib import import_module
from engine.server.child import run_child
run_child(import_module(module).main)"""


@dataclass(eq=False)
class _Child:
    """Child process; `reason` is why it exited, if it has reported that."""

    module: str
    number: int  # index of the replica or API process
    process: asyncio.subprocess.Process
    listeners: list[socket.socket]
    ready: asyncio.Event
    seen: float = 0.0  # time of the last report, in `time.monotonic` seconds
    reason: str = ""
    status: int = 1
    is_ending: bool = False  # whether it was told to exit
    totals: dict[str, int] = field(default_factory=dict)  # counters of its last report

    def ending(self) -> str:
        """Return why it exited."""
        code = self.process.returncode
        if self.reason:
            return self.reason
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"


class Supervisor:
    """Starts, restarts and stops the processes of a server.

    Parameters
    ----------
    model : str
        Name or local path of the model.
    server : ServerConfig
    engine : dict
        Keyword arguments of `LLMEngine.from_name`; plain values only.
    """

    def __init__(self, model: str, server: ServerConfig, engine: dict[str, Any]) -> None:
        self._server = server
        self._start = time.monotonic()
        self._children: set[_Child] = set()
        self._engines: dict[int, _Child] = {}  # replica index -> the process started last
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._failed_starts: Counter[int] = Counter()  # replica index -> consecutive failed starts
        self._is_announced = False
        self._num_signals = 0
        self._signal = ""  # name of the first signal
        self._totals: Counter[str] = Counter()  # counters of the children that have exited
        self._is_ending = asyncio.Event()
        self._ended: asyncio.Queue[_Child] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = tempfile.mkdtemp(prefix=PREFIX)  # mode 700
        token = secrets.token_hex(16)
        size = server.data_parallel_size
        addresses = [f"ipc://{self._folder}/engine-{number}" for number in range(size)]
        if len(os.fsencode(addresses[-1])) > _MAX_ADDRESS:
            os.rmdir(self._folder)
            raise ConfigError(f"TMPDIR must be a shorter path; got {excerpt(self._folder)}")
        self._config = ChildConfig(model, server.options(), engine, addresses, token)

    async def run(self, listeners: list[list[socket.socket]]) -> int:
        """Serve until a signal arrives or the engine exits; say why, and return the exit status.

        `listeners` holds each API process's listening sockets.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        names = self._server.served_model_name
        record = ServerRecord.of_this_process(
            names[0] if names else self._config.model, self._server.url
        )
        record.write(self._folder)
        try:
            for number in range(self._server.data_parallel_size):
                await self._spawn_engine(number)
            for index, sockets in enumerate(listeners):
                await self._spawn(_API, index, sockets)
            self._watch(self._announce(list(self._children), record))
            status = await self._watch_over()
            reason = f"ended by {self._signal}"
        except _Ended as error:
            status = error.status
            reason = str(error)
        finally:
            self._kill()
            for task in self._tasks:
                task.cancel()
            for child in self._children:
                await child.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        say(f"{reason}{self._summary() if self._is_announced else ''}")
        return status

    def _summary(self) -> str:
        """Return what has been served and for how long, as the end of a sentence."""
        totals = self._totals.copy()
        for child in self._children:
            totals.update(child.totals)
        counts = ", ".join(f"{count} {name}" for name, count in totals.items()) or "nothing"
        return f"; served {counts} in {duration(time.monotonic() - self._start)}"

    async def _watch_over(self) -> int:
        """Restart processes until the server must stop; stop it and return the exit status."""
        ending = asyncio.ensure_future(self._is_ending.wait())
        while True:
            ended = asyncio.ensure_future(self._ended.get())
            await asyncio.wait({ending, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ended.cancel()
                return await self._drain()
            child = ended.result()
            if child.module == _ENGINE:
                if not (self._is_announced and self._is_served()):
                    await self._say_last_words()
                    raise _engine_ended(child)
                await self._restart_engine(child)
            elif any(e.process.returncode is None for e in self._engines.values()):
                await self._restart_api(child)

    def _is_served(self) -> bool:
        """Return whether any replica is ready."""
        engines = self._engines.values()
        return any(e.ready.is_set() and e.process.returncode is None for e in engines)

    async def _restart_engine(self, child: _Child) -> None:
        """Restart a replica unless it has exited too often; the others continue."""
        name = f"replica {child.number}"
        # Counted separately: slow failing starts would never accumulate within `_RESTART_SPAN`.
        failed = 0 if child.ready.is_set() else self._failed_starts[child.number] + 1
        self._failed_starts[child.number] = failed
        if self._may_restart(name) and failed <= _MAX_RESTARTS:
            say(f"{name} ended ({child.ending()}) and is started again")
            await self._spawn_engine(child.number)
        else:
            say(f"{name} ended again and again ({child.ending()}): it is given up")

    async def _restart_api(self, child: _Child) -> None:
        """Restart an API process that has exited."""
        if not child.ready.is_set():
            # The cause may be an engine exit, which we notice later than the API process does.
            engines = list(self._engines.values())
            await self._wait_for(engines, _NOTICE_SECONDS)
            for engine in engines:
                if engine not in self._children:
                    raise _engine_ended(engine)
            raise _Ended(f"an API process could not start: {child.ending()}", child.status)
        if not self._may_restart(_API):
            raise _Ended(f"an API process ended again and again: {child.ending()}", 1)
        say(f"an API process ended ({child.ending()}) and is started again")
        await self._spawn(_API, child.number, child.listeners)

    def _may_restart(self, name: str) -> bool:
        """Count a restart; return whether recent restarts are within the limit."""
        now = time.monotonic()
        restarts = self._restarts[name]
        restarts.append(now)
        while restarts[0] < now - _RESTART_SPAN:
            restarts.popleft()
        return len(restarts) <= _MAX_RESTARTS

    async def _drain(self) -> int:
        """Let the API processes finish their requests, then stop the engine.

        Raises
        ------
        _Ended
            If the engine (or every replica) fails meanwhile, so that answers are cut off, or does
            not exit.
        """
        apis = [child for child in self._children if child.module == _API]
        _signal(apis, signal.SIGTERM)
        if any(child.ready.is_set() for child in apis):
            await self._wait_for(apis, self._server.shutdown_timeout + _SLACK_SECONDS)
        self._kill(apis)
        engines = list(self._engines.values())
        for engine in engines:
            engine.is_ending = True
        _signal([engine for engine in engines if engine in self._children], signal.SIGTERM)
        await self._wait_for(engines, _SLACK_SECONDS)
        if self._num_signals >= 2:
            return 1
        if not self._children.isdisjoint(engines):
            raise _Ended(f"the engine's process did not end within {_SLACK_SECONDS:g} s", 1)
        # -SIGTERM: the signal came before the process had a handler, so it had served nothing yet.
        if all(engine.process.returncode not in (0, -signal.SIGTERM) for engine in engines):
            raise _engine_ended(engines[0])
        return 0

    async def _say_last_words(self) -> None:
        """Wait for the API processes to tell their clients that the engine has stopped."""
        starting = [child for child in self._children if child.module == _ENGINE]
        self._kill(starting)
        if any(child.ready.is_set() for child in self._children):
            await self._wait_for(list(self._children), _LAST_WORDS_SECONDS)

    async def _wait_for(self, children: list[_Child], seconds: float) -> None:
        """Wait up to `seconds` until these children have exited and their reports are read.

        A second signal also ends the wait.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._num_signals < 2:
            if self._children.isdisjoint(children):
                return
            await asyncio.sleep(0.02)

    # ---- children

    async def _spawn_engine(self, number: int) -> None:
        engine = self._engines[number] = await self._spawn(_ENGINE, number)
        if self._server.hang_timeout is not None:
            self._watch(self._kill_if_hung(engine, self._server.hang_timeout))

    async def _spawn(
        self, module: str, number: int, listeners: Sequence[socket.socket] = ()
    ) -> _Child:
        descriptors = [each.fileno() for each in listeners]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CODE, module),
            *(os.path.abspath(path) for path in sys.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C must only reach the supervisor
        )
        child = _Child(module, number, process, list(listeners), asyncio.Event())
        self._children.add(child)
        assert process.stdin is not None
        config = replace(self._config, number=number, listeners=descriptors)
        process.stdin.write(config.line())
        self._watch(self._follow(child))
        return child

    async def _follow(self, child: _Child) -> None:
        """Read a child's reports until it exits."""
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line exceeded the reader's limit, and was skipped
                continue
            if not line:
                break
            child.seen = time.monotonic()
            message = parse_object(line) or {}
            if "totals" in message:
                child.totals = message["totals"]
            elif message.get("ready"):
                child.ready.set()
            elif "reason" in message:
                child.reason = str(message["reason"])
                child.status = 2 if message.get("status") == 2 else 1
        await child.process.wait()
        self._totals.update(child.totals)
        self._children.discard(child)
        self._ended.put_nowait(child)

    async def _kill_if_hung(self, engine: _Child, limit: float) -> None:
        """Kill a replica if one of its steps takes more than `limit` seconds."""
        await engine.ready.wait()
        if not await self._is_hung(engine, limit):
            return
        reason = f"a step has taken longer than hang_timeout={limit:g} s"
        say(f"{reason}; the stacks of the engine's threads:")
        _signal([engine], signal.SIGQUIT)
        await asyncio.sleep(BEAT_SECONDS)
        if engine in self._children and not engine.reason:
            engine.reason = reason
            self._kill([engine])

    async def _is_hung(self, engine: _Child, limit: float) -> bool:
        """Return True once the engine hangs; False once it has exited or was told to."""
        seen = 0.0
        start = 0.0
        looked = time.monotonic()
        while engine in self._children and not engine.is_ending:
            now = time.monotonic()
            if now - looked > 2 * BEAT_SECONDS:  # we were suspended, perhaps the engine too
                start = now
            looked = now
            if now - max(start, engine.seen) > limit + BEAT_SECONDS:
                # Only the second time: this process may not have had time to read a report yet.
                if seen == engine.seen:
                    return True
                seen = engine.seen
            await asyncio.sleep(BEAT_SECONDS)
        return False

    async def _announce(self, children: list[_Child], record: ServerRecord) -> None:
        for child in children:
            await child.ready.wait()
        self._is_announced = True
        replace(record, is_ready=True).write(self._folder)
        say(f"ready at {self._server.url} ({time.monotonic() - self._start:.1f} s)")

    def _watch(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        self._signal = self._signal or number.name
        self._is_ending.set()

    def _kill(self, children: list[_Child] | None = None) -> None:
        """Kill these children, by default all, with the processes that they have started."""
        for child in list(self._children) if children is None else children:
            if child.process.returncode is None:
                kill_tree(child.process.pid)


class _Ended(EngineError):
    """The server must exit, for a reason and with an exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def _engine_ended(engine: _Child) -> _Ended:
    return _Ended(f"the engine's process ended: {engine.ending()}", engine.status)


def supervise(model: str, server: ServerConfig, engine: dict[str, Any]) -> int:
    """Serve a model until a signal arrives or the engine exits; return the exit status.

    Raises
    ------
    ConfigError
        If the server cannot listen on its address.
    """
    listeners = listening_sockets(server)
    bound = replace(server, port=listeners[0][0].getsockname()[1])

    async def main() -> int:
        return await Supervisor(model, bound, engine).run(listeners)

    with bounded_stderr():
        try:
            return asyncio.run(main())
        finally:
            for listener in itertools.chain(*listeners):
                listener.close()


def _signal(children: list[_Child], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
