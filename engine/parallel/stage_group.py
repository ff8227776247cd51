"""Engine side of a pipeline: starts the other stages, exchanges messages with them, ends them.

The engine listens on a port, and the stages connect to it. Each is a process that it started on
this host, or one that was started elsewhere. Any failure ends all of them: a stage ends when its
connection to the engine closes.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine._version import __version__
from engine.checks import parse_object
from engine.distributed.connection import Address, Connection, Listener, Message
from engine.distributed.group import STOPPED_SECONDS
from engine.distributed.messages import from_text, to_text
from engine.distributed.peer import FAIL, PING, PING_SECONDS, Peer
from engine.distributed.processes import describe_ending, end_processes, thread_environment
from engine.errors import RankError
from engine.parallel.activations import ACTIVATIONS
from engine.parallel.stage import ADAPTER_READ, ANSWER, HELLO, LINK, READY, WELCOME
from engine.text import child_process

__all__ = ["StageGroup"]

_CODE = "from engine.parallel.stage import run_child; run_child()"
_END_SECONDS = 3.0  # grace period before processes are killed
_WATCH_SECONDS = 0.25  # polling interval of the failure watcher
_WAIT_SECONDS = 0.1  # wait for a message before checking the stages' states
_GRACE_SECONDS = 1.0  # grace period of a process once its connection has closed
_SILENT_SECONDS = 5.0  # silence after which a stage's host counts as lost
_LOADING_SECONDS = 60.0  # the same limit while it loads: the interpreter may be busy


class StageGroup:
    """All stages of a pipeline but the last, which is this process.

    Parameters
    ----------
    num_stages : int
        Number of stages, the last one included.
    secret : bytes
        Shared secret; every connection must prove that it knows it.
    address : (host, port)
        Address to listen on; port 0 picks a free port.
    timeout : float
        Seconds after which a stage that does not send its activations, or with links a step that
        does not end, counts as stuck.

    Attributes
    ----------
    failure : str
        Reason for the group's end; "" if it has not ended, or ended normally.
    on_end : callable
        Called when the group has ended, after its connections.
    on_ending : callable
        Called before they are closed, from any thread, and when the processes have ended.

    Raises
    ------
    RankError
        If it cannot listen on the address.
    """

    def __init__(
        self, num_stages: int, secret: bytes, address: Address, *, timeout: float = 60.0
    ) -> None:
        self.num_stages = num_stages
        self.timeout = timeout
        self.failure = ""
        self.doing = "starting"
        self.on_end: Callable[[], object] = tuple
        self.on_ending: Callable[[], object] = tuple
        self._secret = secret
        self._peers: dict[int, Peer] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._link: Peer | None = None  # receives activations from the stage before the last
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ready = self._is_closing = False
        self._looked = self._awake = time.monotonic()  # _awake: since when we run without a pause
        self._finding = threading.Lock()
        self._ending = threading.Lock()
        self._accepting = threading.Lock()
        try:
            self._listener = Listener(*address, secret, self._accept)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise RankError(f"the engine cannot listen at {where}: {error}") from error
        self.address: Address = address[0], self._listener.port
        threading.Thread(target=self._watch, daemon=True).start()

    # ---- startup

    def start_processes(self, num_threads: int | None) -> None:
        """Start all stages on this host.

        `num_threads`: threads per stage, unless the environment sets them.

        Raises
        ------
        RankError
            If a stage cannot be started.
        """
        for stage in range(self.num_stages - 1):
            task = {"address": list(self.address), "stage": stage, "secret": self._secret.hex()}
            try:
                process = child_process.start(_CODE, thread_environment(num_threads))
            except OSError as error:
                raise RankError(f"stage {stage} could not be started: {error}") from error
            self._processes[stage] = process
            with contextlib.suppress(OSError):  # a dead process never connects
                child_process.send(process.stdin, json.dumps(task).encode())

    @property
    def pids(self) -> list[int]:
        """Process ids of the stages that were started here."""
        return [process.pid for process in self._processes.values()]

    @property
    def hellos(self) -> Mapping[int, Mapping[str, Any]]:
        """ "pid", "version" and "port" of each stage; the previous stage connects to the port."""
        return self._hellos

    def wait_for_stages(self, seconds: float) -> None:
        """Wait until all stages have connected.

        Raises
        ------
        RankError
            If a stage has not connected within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while missing := [s for s in range(self.num_stages - 1) if s not in self._hellos]:
            self.check()
            if time.monotonic() > deadline:
                who = ", ".join(f"stage {stage}" for stage in missing)
                refused = self._listener.num_refused
                raise RankError(
                    f"{who} did not connect to {self.address[0]}:{self.address[1]} within "
                    f"{seconds:g} s" + (f"; {refused} connections were refused" * bool(refused))
                )
            time.sleep(0.01)

    def welcome(self, options: Mapping[str, Any]) -> None:
        """Send each stage its loading options. `wait_until_ready` waits for them.

        Parameters
        ----------
        options : mapping
            JSON values for `engine.parallel.stage`. "next" is added: the address to which the stage
            sends its activations, or None for this process.
        """
        for stage in range(self.num_stages - 1):
            peer = self._peers.get(stage + 1)  # None: this process, whose address a stage knows
            address = peer and [peer.connection.peer[0], self._hellos[stage + 1]["port"]]
            self._send(stage, WELCOME, (), [to_text({**options, "next": address})])

    def wait_until_ready(self) -> None:
        """Wait until all stages have loaded their layers and are connected to the next one."""
        for stage in range(self.num_stages - 1):
            self._answer(stage, READY, "the start", math.inf)
        while self._link is None:
            self.check()
            time.sleep(0.01)
        self._is_ready = True
        self._listener.close()

    # ---- messages

    def send(
        self, what: str, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Any] = ()
    ) -> None:
        """Send a message to all stages; `what` names it in errors.

        Raises
        ------
        RankError
            If a stage has failed; all have then ended.
        """
        self.doing = what
        self.post(kind, numbers, arrays)

    def post(self, kind: int, numbers: Sequence[int], arrays: Sequence[Any] = ()) -> None:
        """Send a message that is no operation of its own to all stages, from any thread.

        Raises
        ------
        RankError
            See `send`.
        """
        self.check()
        for stage in range(self.num_stages - 1):
            self._send(stage, kind, numbers, arrays)

    def adapter_errors(self, serial: int) -> dict[str, str]:
        """Wait until each stage has read an adapter; return the error of each that could not.

        Raises
        ------
        RankError
            If a stage has failed; all have then ended.
        """
        errors = {}
        for stage in range(self.num_stages - 1):
            peer = self._peers[stage]
            numbers: list[int] = []
            while numbers != [serial]:  # those of an interrupted call are skipped
                message = self._wait_for(peer, "an adapter", math.inf, ADAPTER_READ)
                _, numbers, [text] = message
            if error := from_text(text):
                errors[peer.name] = error
        return errors

    def ask(
        self, what: str, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Any] = ()
    ) -> list[Message]:
        """Send a message to all stages, and return the answer of each.

        Raises
        ------
        RankError
            If a stage has failed; all have then ended.
        """
        self.send(what, kind, numbers, arrays)
        return self.answers(what)

    def answers(self, what: str) -> list[Message]:
        """Wait for each stage's answer to the message `what`, the last one sent. See `ask`."""
        stages = range(self.num_stages - 1)
        return [self._answer(stage, ANSWER, what, math.inf) for stage in stages]

    @property
    def has_activations(self) -> bool:
        """Whether `activations` would return or raise at once."""
        return self._link is not None and self._link.has_message

    def activations(self, step: int) -> list[Any]:
        """Return a step's activations from the stage before the last one.

        Raises
        ------
        RankError
            If a stage has failed or does not send them in time; all have then ended.
        """
        assert self._link is not None
        message = self._wait_for(self._link, f"the activations of step {step}", self.timeout)
        kind, numbers, arrays = message
        if kind != ACTIVATIONS or numbers != [step]:
            raise self.fail(f"{self._link.name} sent step {numbers} instead of step {step}")
        return arrays

    # ---- failures

    @property
    def is_closing(self) -> bool:
        """Tell whether the stages have ended or are about to."""
        return self._is_closing

    def check(self) -> None:
        """Verify that all stages are alive.

        Raises
        ------
        RankError
            Names the first stage that failed, with its last words; the same at every later call.
            All stages have then ended.
        """
        with self._finding:
            if not self.failure and not self._is_closing:
                self.failure = self._first_failure()
        if self.failure:
            self.end()
            raise RankError(self.failure)
        if self._is_closing:
            raise RankError("the stages have ended: the model was closed")

    def fail(self, text: str) -> RankError:
        """End all stages; return an error with the first failure, else with `text`."""
        with self._finding:
            self.failure = self.failure or self._first_failure() or text
        self.end()
        return RankError(self.failure)

    def describe(self) -> str:
        """Return the current operation of each stage, as text for messages."""
        return "".join(f"; {peer.name} is in: {peer.doing}" for peer in self._sorted())

    def end(self) -> None:
        """End all stages; a second call does nothing.

        Processes on this host that do not end by themselves within seconds are killed.
        """
        with self._ending:
            if self._is_closing:
                return
            self._is_closing = True
            self._call_on_ending()
            self._listener.close()
            with self._accepting:  # later stages are refused
                peers = [*self._peers.values(), *filter(None, [self._link])]
            for peer in peers:
                peer.connection.close()
            end_processes(self._processes.values(), _END_SECONDS)
            self._call_on_ending()  # Again: what a stage's GPU still executed may have undone it.
            self.on_end()

    # ---- helpers

    def _call_on_ending(self) -> None:
        with contextlib.suppress(Exception):  # the device may have failed
            self.on_ending()

    def _accept(self, connection: Connection) -> None:
        """Accept a stage's connection: HELLO opens the one for messages, LINK for activations."""
        try:
            kind, [stage], arrays = connection.receive()
            with self._accepting:
                if self._is_closing:
                    why = "the engine has ended"
                elif kind == HELLO:
                    why = self._take(connection, stage, parse_object(from_text(arrays[0])))
                elif kind == LINK and stage == self.num_stages - 2 and self._link is None:
                    self._link = Peer(connection, f"stage {stage}")
                    why = ""
                else:
                    why = f"stage {stage} is not the one before the last, or has connected already"
            if why:
                connection.send(FAIL, (), [to_text(why)])
                connection.close()
        except Exception:  # whatever it has sent
            connection.close()

    def _take(self, connection: Connection, stage: int, hello: dict[str, Any] | None) -> str:
        """Accept a stage; return the reason for a refusal, or ""."""
        if not 0 <= stage < self.num_stages - 1:
            return f"stage must be in [0, {self.num_stages - 1}); got {stage}"
        if hello is None or not isinstance(hello.get("port"), int):
            return f"stage {stage} said no hello"
        if hello.get("version") != __version__:
            return f"stage {stage} has engine {hello.get('version')}, not {__version__}"
        if stage in self._peers:
            return f"stage {stage} has connected already"
        self._peers[stage] = Peer(connection, f"stage {stage}", apart=(ADAPTER_READ,))
        self._hellos[stage] = hello
        return ""

    def _send(self, stage: int, kind: int, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
        try:
            self._peers[stage].connection.send(kind, numbers, arrays)
        except OSError as error:
            self.find_failure(2 * _GRACE_SECONDS)
            raise self.fail(f"the connection to stage {stage} was lost: {error}") from error

    def find_failure(self, seconds: float) -> None:
        """Wait for the cause of what has gone wrong: last words, or the end of a process.

        Raises
        ------
        RankError
            Names it, if it is known within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_WAIT_SECONDS)

    def _answer(self, stage: int, kind: int, what: str, timeout: float) -> Message:
        message = self._wait_for(self._peers[stage], what, timeout)
        if message[0] != kind:
            raise self.fail(f"stage {stage} answered message {message[0]} to {what}")
        return message

    def _wait_for(self, peer: Peer, what: str, timeout: float, kind: int | None = None) -> Message:
        """Return a stage's next message (`Peer.next`); end the group if none comes in time."""
        looked = time.monotonic()
        deadline = looked + timeout
        while True:
            try:
                message = peer.next(_WAIT_SECONDS, kind)
            except RankError:
                message = None
                time.sleep(_WAIT_SECONDS)
            if message is not None:
                return message
            self.check()
            now = time.monotonic()
            if now - looked > STOPPED_SECONDS:
                deadline += now - looked
            looked = now
            if now > deadline:
                raise self.fail(
                    f"{peer.name} did not send {what} within {timeout:g} s{self.describe()}"
                )

    def _sorted(self) -> list[Peer]:
        return [peer for _, peer in sorted(self._peers.items())]

    def _first_failure(self) -> str:
        """Describe the first stage that failed or died; "" if none has."""
        peers = self._sorted()
        ended = {stage: process.poll() for stage, process in self._processes.items()}
        for peer in peers:
            if peer.words:
                return f"{peer.name} failed; its last words:\n{peer.words}"
        for stage, code in ended.items():
            if code is not None:
                doing = self._peers[stage].doing if stage in self._peers else "starting"
                return f"stage {stage} {describe_ending(code)}; it was last in: {doing}"
        now = time.monotonic()
        if now - self._looked > STOPPED_SECONDS:  # this process was stopped, and others may be
            self._awake = now
        self._looked = now
        silence = max(2.0, min(self.timeout, _SILENT_SECONDS))
        silence = silence if self._is_ready else _LOADING_SECONDS
        for peer in (*peers, *filter(None, [self._link])):
            if peer.lost and now - peer.lost_since > _GRACE_SECONDS:
                where = peer.connection.peer[0]
                return (
                    f"the connection to {peer.name} ({where}) was lost: {peer.lost}; it was last "
                    f"in: {peer.doing}"
                )
        for stage, peer in sorted(self._peers.items()):
            if now - max(peer.heard, self._awake) > silence:
                if stage in self._processes:
                    # It hangs, and would not end by itself.
                    child_process.kill_tree(self._processes[stage].pid)
                return (
                    f"{peer.name} has not been heard of for {silence:g} s; it was last in: "
                    f"{peer.doing}"
                )
        return ""

    def _watch(self) -> None:
        """Send heartbeats to all stages, and look for failures."""
        last = 0.0
        while not self._is_closing:
            with contextlib.suppress(RankError):
                self.check()
            if time.monotonic() - last > PING_SECONDS:
                last = time.monotonic()
                for peer in list(self._peers.values()):
                    with contextlib.suppress(OSError):
                        peer.connection.send(PING, (), [to_text(self.doing)])
            time.sleep(_WATCH_SECONDS)
