"""What the ranks of tests/distributed/test_processes.py run; imported by their processes."""

import hashlib
import os
import time

import ml_dtypes
import numpy as np

from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.messages import Messages
from engine.errors import OutOfMemoryError, WeightsError
from engine.model import Model
from engine.parallel.rank import compare_ranks, run


def array_of(rank, dtype, count=1000):
    """Return a rank's array."""
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


def rounds(group, options):
    """Call every operation a few times; answer with a sum of what came out."""
    collectives = SharedMemoryCollectives(group)
    totals = []
    for name in ("float32", "float16", "bfloat16"):
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
        x = array_of(group.rank, dtype, options["count"])
        totals.append(collectives.all_reduce(x).tobytes())
        totals.append(collectives.all_gather(x[:8].reshape(2, 4)).tobytes())
        totals.append(collectives.broadcast(x.copy(), root=group.size - 1).tobytes())
        collectives.barrier(name)
    received = collectives.exchange(hashlib.sha256(b"".join(totals)).digest())
    assert len(set(received)) == 1
    return totals


def echo(group, options):
    """Receive messages until one is empty; exchange their lengths."""
    messages, collectives = Messages(group), SharedMemoryCollectives(group)
    lengths = []
    while data := messages.receive():
        lengths.append(len(data))
    collectives.exchange(repr(lengths).encode())


def die(group, options):
    """End the last rank in the middle of an operation."""
    collectives = SharedMemoryCollectives(group)
    collectives.barrier("before")
    if group.rank == group.size - 1:
        group.set_doing("step 7")
        kind = options["kind"]
        if kind == "kill":
            os.kill(os.getpid(), 9)
        elif kind == "raise":
            raise ValueError("the weights are upside down")
        elif kind == "exit":
            os._exit(3)
        else:
            time.sleep(600)
    collectives.all_reduce(np.ones(4, np.float32))


def disagree(group, options):
    """Call different operations."""
    collectives = SharedMemoryCollectives(group)
    if group.rank == 1:
        collectives.all_gather(np.ones(4, np.float32))
    else:
        collectives.all_reduce(np.ones(4, np.float32))


def sleep(group, options):
    """Do nothing."""
    time.sleep(600)


def out_of_memory(group, options):
    """Find no room for the weights."""
    compare_ranks(group, options["model"], options["loading"])
    raise OutOfMemoryError("cuda:1 has no room for 8.00 GiB of weights in bfloat16")


def without_new_files(group, options):
    """Serve as a rank that sees no files of new weights."""

    def opened_update(model, source):
        raise WeightsError(f"{source} is not on this disk")

    Model.opened_update = opened_update
    run(group, options)


def write_late(group, options):
    """Serve as a rank that reads new weights from a slow disk."""
    write_update = Model.write_update

    def late(model, update):
        time.sleep(3)
        return write_update(model, update)

    Model.write_update = late
    run(group, options)


def answer_late(group, options):
    """End a background task after some seconds."""
    time.sleep(options["seconds"])
    group.answer(7, "late")
    time.sleep(60)
