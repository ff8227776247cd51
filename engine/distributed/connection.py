"""Authenticated TCP connections between the stages of a pipeline, for framed messages.

First, both ends prove in messages of fixed size that they know the pipeline's secret (HMAC-SHA256
over a challenge from each end); otherwise the connection is refused, and nothing more is read.
Later messages are checksummed, but neither encrypted nor signed: the network between the hosts must
be trusted.

A frame is a length, a message built by `messages.pack`, and its CRC-32 checksum. Both ends compute
the checksum piece by piece, while other pieces are on their way.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from engine.distributed.messages import Buffer, pack_parts, unpack
from engine.errors import RankError

__all__ = ["Address", "Connection", "Listener", "connect", "parse_address"]

Address = tuple[str, int]
Message = tuple[int, list[int], list[Any]]

_LOG = logging.getLogger("engine")
_GREETING = b"engine pipeline 2\n"
_NONCE_BYTES = 32
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_MAX_BYTES = 1 << 36  # maximum frame size: a corrupt length must not allocate more
_PIECE_BYTES = 1 << 18  # bytes sent or received at once, which fit into a core's cache
_PROOF_SECONDS = 10.0  # timeout of the handshake
_MAX_HANDSHAKES = 64  # maximum handshakes at once, each in a thread
_MAX_LOGGED = 16  # maximum refused connections that are logged as warnings
_RETRY_SECONDS = 0.2  # seconds until the next attempt if a connection cannot be accepted


class Connection:
    """One end of an authenticated connection.

    Only one thread may receive; any thread may send.

    Parameters
    ----------
    sock : socket

    Attributes
    ----------
    peer : (host, port)
        Address of the other end.
    own_host : str
        Address under which the other end knows this host.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: Address = sock.getpeername()[:2]
        self.own_host: str = sock.getsockname()[0]

    def send(self, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Any] = ()) -> None:
        """Send a message of integers and NumPy arrays; an array may be None.

        Raises
        ------
        OSError
            If the connection has ended.
        """
        parts = pack_parts(kind, numbers, arrays)
        size = sum(map(len, parts))
        if size <= _PIECE_BYTES:
            data = b"".join(parts)
            frame = _LENGTH.pack(size) + data + _CHECKSUM.pack(zlib.crc32(data))
            with self._sending:
                self._socket.sendall(frame)
            return
        checksum = 0
        with self._sending:
            self._socket.sendall(_LENGTH.pack(size))
            for piece in _pieces(parts):
                self._socket.sendall(piece)
                checksum = zlib.crc32(piece, checksum)
            self._socket.sendall(_CHECKSUM.pack(checksum))

    def receive(self) -> Message:
        """Wait for the next message; its arrays are writable.

        Raises
        ------
        OSError
            If the connection has ended.
        RankError
            If the message is damaged.
        """
        [size] = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
        if size > _MAX_BYTES:
            raise RankError(f"a message from {self.peer} is damaged: {size} bytes")
        # Not zeroed: the system provides the memory as bytes arrive.
        data = np.empty(size + _CHECKSUM.size, np.uint8).data
        at = checksum = 0
        while at < len(data):
            count = self._socket.recv_into(data[at : at + _PIECE_BYTES])
            if not count:
                raise _closed()
            checksum = zlib.crc32(data[at : min(at + count, size)], checksum)
            at += count
        if _CHECKSUM.unpack(data[size:]) != (checksum,):
            raise RankError(f"a message from {self.peer} is damaged: its checksum is wrong")
        return unpack(data[:size])

    def close(self) -> None:
        """End the connection, and wake the receiving thread. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """Listens on a port, and accepts connections that prove the secret.

    Parameters
    ----------
    host, port : str, int
        Address to listen on; port 0 picks a free port.
    secret : bytes
    accept : callable
        Called with each `Connection`, in a new thread.

    Attributes
    ----------
    port : int
    num_refused : int
        Number of connections that failed to prove the secret.

    Raises
    ------
    OSError
        If it cannot listen on the address.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, accept: Callable[[Connection], Any]
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self.num_refused = 0
        self._secret = secret
        self._accept = accept
        self._is_closed = False
        self._slots = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._proving: dict[socket.socket, None] = {}  # by arrival
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; a second call does nothing."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _run(self) -> None:
        is_failing = False
        while True:
            try:
                self._start(*self._socket.accept())
                is_failing = False
            except (OSError, RuntimeError) as error:
                if self._is_closed:
                    return
                # Too many open files or threads, for example, or the client has gone already.
                if not is_failing:
                    _LOG.warning("connections cannot be accepted at the moment: %s", error)
                is_failing = True
                time.sleep(_RETRY_SECONDS)

    def _start(self, sock: socket.socket, peer: Any) -> None:
        """Let a connection prove itself in a new thread: a silent one must not delay the others."""
        if not self._slots.acquire(blocking=False):
            self._end_oldest()
            self._slots.acquire()
        with self._lock:
            self._proving[sock] = None
        try:
            threading.Thread(target=self._prove, args=(sock, peer), daemon=True).start()
        except RuntimeError:
            self._end_proof(sock)
            sock.close()
            raise

    def _end_oldest(self) -> None:
        # The oldest is the least likely to be a stage, which answers at once.
        with self._lock, contextlib.suppress(OSError, StopIteration):
            next(iter(self._proving)).shutdown(socket.SHUT_RDWR)

    def _end_proof(self, sock: socket.socket) -> None:
        with self._lock:
            del self._proving[sock]
        self._slots.release()

    def _prove(self, sock: socket.socket, peer: Any) -> None:
        connection = None
        try:
            deadline = time.monotonic() + _PROOF_SECONDS
            sock.settimeout(_PROOF_SECONDS)
            own = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(_GREETING + own)
            theirs = bytes(_receive(sock, _NONCE_BYTES, deadline))
            proof = bytes(_receive(sock, _NONCE_BYTES, deadline))
            if not hmac.compare_digest(proof, _proof(self._secret, b"client", own, theirs)):
                raise RankError("its secret is another one")
            sock.sendall(_proof(self._secret, b"server", theirs, own))
            connection = Connection(sock)
        except (OSError, RankError) as error:
            self.num_refused += 1
            level = logging.WARNING if self.num_refused <= _MAX_LOGGED else logging.DEBUG
            _LOG.log(level, "a connection from %s:%s was refused: %s", *peer[:2], error)
        finally:
            self._end_proof(sock)
        if connection is None:
            sock.close()
        else:
            self._accept(connection)


def connect(address: Address, secret: bytes, timeout: float = _PROOF_SECONDS) -> Connection:
    """Connect to a `Listener`; both ends prove that they know the secret.

    Raises
    ------
    RankError
        If the address cannot be reached, or the secrets differ.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout)
    except OSError as error:
        raise RankError(f"{where} cannot be reached: {error}") from error
    deadline = time.monotonic() + timeout
    try:
        greeting = _receive(sock, len(_GREETING) + _NONCE_BYTES, deadline)
        if greeting[: len(_GREETING)] != _GREETING:
            raise RankError(f"{where} is no stage of a pipeline, or of another version")
        theirs = bytes(greeting[len(_GREETING) :])
        own = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(own + _proof(secret, b"client", theirs, own))
        proof = bytes(_receive(sock, _NONCE_BYTES, deadline))
        if not hmac.compare_digest(proof, _proof(secret, b"server", own, theirs)):
            raise RankError(f"{where} does not know the secret of this pipeline")
        return Connection(sock)
    except OSError as error:
        sock.close()
        raise RankError(
            f"{where} refused the connection: is the secret the same? ({error})"
        ) from error
    except BaseException:
        sock.close()
        raise


def parse_address(text: str) -> Address:
    """Return the host and the port of "HOST:PORT".

    Raises
    ------
    ValueError
        If `text` does not have this form.

    Examples
    --------
    >>> parse_address("10.0.0.1:29500"), parse_address("[::1]:80")
    (('10.0.0.1', 29500), ('::1', 80))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address must be HOST:PORT; got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own, "sha256")


def _receive(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Return the next `size` bytes.

    Raises
    ------
    OSError
        If the connection ends first, or at `deadline` on the monotonic clock.
    """
    data = bytearray(size)
    at = 0
    while at < size:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        count = sock.recv_into(memoryview(data)[at:])
        if not count:
            raise _closed()
        at += count
        if deadline is not None and at < size and time.monotonic() > deadline:
            raise TimeoutError("the other end has not proved the secret in time")
    return data


def _pieces(parts: Sequence[Buffer]) -> Iterator[memoryview]:
    """Yield the bytes of `parts`, at most `_PIECE_BYTES` at once."""
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]


def _closed() -> ConnectionResetError:
    return ConnectionResetError("the other end has closed the connection")
