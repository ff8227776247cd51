"""Frames between processes: the engine's ZeroMQ socket, and the TCP port of a pipeline's engine.

Strangers connect without the token, and send what they like. Then a client that has the token sends
messages that are wrong: mutations of legal ones, and some made by hand. Neither may end a process,
nor change what another client is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.distributed import connection
from engine.distributed.messages import pack, unpack
from engine.errors import EngineError, RankError
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import messages as m
from engine.server import sockets
from tests.attack.figures import Figure
from tests.attack.target import Target
from tests.e2e.tiny import make_engine, tiny_model
from tests.server.loops import TOKEN, collected, connected, served

NUM_FRAMES = 1000
_MEMORY_MB = 16  # maximum growth
_FLOOD_SECONDS = 3.0
_ADD = m.Add(1, "r", [1, 2, 3], {"max_tokens": 4, "temperature": 0.0}, False, 0, None, None)
_LEGAL = [
    m.Hello(),
    _ADD,
    m.Add(
        2, "s", [5] * 40, {"n": 3, "seed": 5, "logprobs": 2}, True, 1, "salt", 9.0, [[7], [], []]
    ),
    m.Add(3, "t", [9], {"prompt_logprobs": 2, "stop_token_ids": [4]}, False, 0, None, None),
    m.Abort(1),
    m.Drop(2),
    m.End(1, 0, "stop"),
    m.Call(4, "stats"),
    m.Call(5, "snapshot"),
    m.Embed(6, [[1, 2], [3]], "mean", True),
    m.Cancel(6),
]
_VALUES: list[Any] = [
    *(None, True, -1, 0, 1 << 31, (1 << 64) - 1, -(1 << 63), float("nan"), float("inf"), 1e308),
    *("", "\0", "w" * 5000, "stop", b"", b"\xff" * 70, [], {}, [[]] * 50, {"": None}),
    *([1 << 40], [-1], ["x"], {"n": 1 << 20}, {"logprobs": -1}, {"structured": {}}, {"seed": -5}),
]
_BY_HAND = [
    b"",
    b"\xc1",
    b"\x91" * 2000 + b"\xc0",  # nested 2,000 deep
    b"\x91\xa3Add",
    b"\x92\xa5Hello\xa5wrong",
    b"\x92\xa5Hello\xd9\x05\xff\xfe\xfa\xfb\xfc",  # not UTF-8
    b"\x92\xa5Hello\xa6t\xc3\xb6ken",
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xc6\xff\xff\xff\xff",  # bytes of that size
    b"\x92\xa4Drop\xcf" + b"\xff" * 8,
    *map(
        msgspec.msgpack.encode,
        [
            m.End(1, 7, "stop"),
            m.End(1, -9, "stop"),
            m.End(1, 0, "no reason"),
            m.Embed(7, [[]], "mean", True),
            m.Embed(8, [[1 << 40]], "last", True),
            m.Embed(9, [[1]], "no pooling", True),
            m.Call(10, "no call"),
            m.Add(11, "u", [], {}, False, 0, None, None),
            m.Add(11, "u", [1], {"no": "field"}, False, 0, None, None),
            m.Add(11, "u", [1], {"structured": {"json": 5}}, False, 0, None, None),
            m.Add(11, "u", [1], {"n": 2}, False, 0, None, None, [[1]]),
            m.Ended("not the engine"),
            m.StepResult([1], [1, 2], []),
        ],
    ),
]


def hostile(seed: int, count: int) -> list[bytes]:
    """Return hand-made messages, and mutations of legal ones."""
    random_ = random.Random(seed)
    legal = [msgspec.msgpack.encode(each) for each in _LEGAL]
    found = list(_BY_HAND)
    while len(found) < count:
        data = random_.choice(legal)
        kind = random_.randrange(6)
        if kind < 3:  # another value somewhere
            value = msgspec.msgpack.decode(data)
            _change(value, random_)
            data = msgspec.msgpack.encode(value)
        elif kind == 3:  # other bytes
            mutable = bytearray(data)
            for _ in range(random_.randint(1, 4)):
                mutable[random_.randrange(len(mutable))] = random_.randrange(256)
            data = bytes(mutable)
        elif kind == 4:  # too short or too long
            at = random_.randrange(len(data))
            data = random_.choice((data[:at], data[:at] + bytes(9) + data[at:], data + data))
        found.append(data)  # or as it is: sent again
    return found[:count]


def _change(value: Any, random_: random.Random) -> None:
    """Replace, remove or repeat one item of a list or mapping, at any depth."""
    at = random_.choice(range(len(value)) if isinstance(value, list) else list(value))
    if isinstance(value[at], list | dict) and value[at] and random_.random() < 0.6:
        _change(value[at], random_)
    elif isinstance(value, list) and random_.random() < 0.2:
        value[at : at + 1] = random_.choice(([], [value[at]] * 3))
    else:
        value[at] = random_.choice(_VALUES)


async def send_as_client(address: str, frames: list[bytes]) -> int:
    """Send messages from a client that has the token; return how many answers of another changed.

    The other client's request runs all the time.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    changed = 0
    async with connected(address) as client:
        want = (await collected(client, [1, 2], params))[-1].outputs[0].token_ids
        bad, monitor = sockets.connected_socket(address, TOKEN)
        proof = sockets.proof_of(TOKEN)
        bad.send_multipart([proof, msgspec.msgpack.encode(m.Hello())])
        for first in range(0, len(frames), 50):
            waiting = asyncio.ensure_future(collected(client, [1, 2], params))
            for data in frames[first : first + 50]:
                bad.send_multipart([proof, *sockets.frames_of(data)])
                while bad.poll(0):
                    bad.recv_multipart()
                await asyncio.sleep(0)
            try:
                changed += (await waiting)[-1].outputs[0].token_ids != want
            except EngineError:
                changed += 1
        bad.disable_monitor()
        monitor.close(linger=0)
        bad.close(linger=0)
    return changed


def send_as_stranger(address: str, frames: list[bytes]) -> None:
    """Send messages without the token: with the engine's key and without, whole and in parts."""
    for has_key in (False, True):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        if has_key:
            dealer.curve_serverkey = zmq.curve_public(sockets._secret_key(TOKEN))
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(address)
        for data in frames:
            for each in ([data], [b"", data], [bytes(32), data], [data[:32].ljust(32), data]):
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(each, zmq.NOBLOCK)
        time.sleep(0.2)
        context.destroy(linger=100)


def flood(address: str, seconds: float, memory: Any) -> tuple[int, int]:
    """Announce frames of 1 GiB, and messages without end; return the bytes sent and most memory."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00%b" + bytes(32)
    ready = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    large = b"%b" + (1 << 30).to_bytes(8, "big")
    heads = [
        greeting % b"NULL".ljust(20, b"\0") + ready + large % b"\x02",
        greeting % b"NULL".ljust(20, b"\0") + large % b"\x06",
        greeting % b"CURVE".ljust(20, b"\0") + large % b"\x06",
        greeting % b"NULL".ljust(20, b"\0") + ready + b"\x01\x00",  # then more empty parts
        bytes(64),
    ]
    sent = most = 0
    for head in heads:
        end = time.monotonic() + seconds / len(heads)
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.settimeout(0.5)
                raw.connect(address.removeprefix("ipc://"))
                raw.sendall(head)
                while time.monotonic() < end:
                    sent += raw.send(b"\x01\x00" * 32768)
                    most = max(most, memory())
            time.sleep(0.01)
            most = max(most, memory())
    return sent, most


def attack_port(count: int, seed: int) -> int:
    """Send wrong handshakes to the port of a pipeline's engine; return how many were accepted."""
    accepted: list[connection.Connection] = []
    listener = connection.Listener("127.0.0.1", 0, b"a secret", accepted.append)
    random_ = random.Random(seed)
    try:
        for _ in range(count):
            with (
                socket.create_connection(("127.0.0.1", listener.port)) as raw,
                contextlib.suppress(OSError),
            ):
                raw.sendall(random_.randbytes(random_.choice((0, 1, 31, 64, 65, 5000))))
        friend = connection.connect(("127.0.0.1", listener.port), b"a secret")
        friend.close()
        end = time.monotonic() + 10
        while not accepted and time.monotonic() < end:
            time.sleep(0.01)
        return len(accepted) - 1
    finally:
        listener.close()


def unpack_failures(count: int, seed: int) -> int:
    """Decode damaged messages of stages; return how many raise another error than `RankError`."""
    random_ = random.Random(seed)
    found = 0
    for _ in range(count):
        data = bytearray(pack(3, [7, -1], [None, memory_of(random_), memory_of(random_)]))
        for _ in range(random_.randint(1, 3)):
            at = random_.randrange(0, len(data), 8)
            data[at : at + 8] = random_.choice(
                (random_.randbytes(8), b"\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little"), b"")
            )
        try:
            unpack(bytes(data))
        except RankError:
            pass
        except Exception:
            found += 1
    return found


def memory_of(random_: random.Random) -> Any:
    """Return a small array."""
    return np.zeros((random_.randrange(3), random_.randrange(4)), np.float32)


def attack(target: Target, scale: float = 1.0) -> list[Figure]:
    """Return how many processes ended, how many answers changed, and the engine's memory."""
    count = max(1, int(NUM_FRAMES * scale))
    frames = hostile(1, count)
    [path] = target.folder.glob("engine-*/engine-0")
    [pid] = target.engine_pids()

    def memory() -> int:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before = memory()
    send_as_stranger(f"ipc://{path}", frames)
    sent, most = flood(f"ipc://{path}", _FLOOD_SECONDS * scale, memory)
    is_same = target.is_alive() and target.engine_pids() == [pid]
    has_ended = False
    changed = 0
    logging.disable(logging.WARNING)  # a line for each frame
    try:
        with served(make_engine(tiny_model())) as (_, address):
            send_as_stranger(address, frames)
            changed = asyncio.run(send_as_client(address, frames))
    except (AssertionError, OSError):
        has_ended = True
    return [
        Figure("processes ended by strangers' frames", 0 if is_same else 1, "", 0),
        Figure("memory by strangers' frames", max(0, most - before) / 1e6, "MB", _MEMORY_MB),
        Figure("sent by strangers", sent / 1e6, "MB"),
        Figure("/health afterwards", target.health_seconds(), "s", 1.0),
        Figure(f"engines ended by {count} frames of a client", int(has_ended), "", 0),
        Figure("answers of other clients that changed", changed, "", 0),
        Figure("strangers accepted by a stage's port", attack_port(count, 2), "", 0),
        Figure("messages of stages that end a thread", unpack_failures(count, 3), "", 0),
    ]
