"""Memory of one process that another one writes: streams wait for it, and stop when told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from engine import device
from engine.distributed.inbox import Inbox, Outbox
from engine.errors import DeviceError

pytestmark = pytest.mark.gpu

# For each step on standard input, this process sends the numbers 1 to `size`, times step + 1, to
# slot step % 2.
SENDER = """
import sys
import numpy as np
from engine.device import Device, cupy
from engine.distributed.inbox import Outbox

handle, index, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
outbox = Outbox(Device("cuda", index), handle)
print("ready", flush=True)
for line in sys.stdin:
    step = int(line)
    numbers = cupy().arange(1, size + 1, dtype=np.int64) * (step + 1)
    outbox.write(step % 2 * numbers.nbytes, numbers)
    numbers.fill(-1)  # later work on the stream may overwrite the source
    outbox.post(step + 1)
cupy().cuda.get_current_stream().synchronize()
outbox.close()
"""


@pytest.fixture
def cuda():
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        pytest.skip(f"no GPU: {reason}")
    return chosen


def _sender(inbox, index, size):
    """Start the process on GPU `index`; return it once it has mapped the memory."""
    command = [sys.executable, "-c", SENDER, inbox.handle.hex(), str(index), str(size)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_what_is_launched_before_it_is_there_reads_it(cuda, size):
    """Also from the same GPU; 3,000,000 numbers take longer than the counter."""
    xp = cuda.xp
    inbox = Inbox(cuda, 16 * size)
    slots = inbox.memory.view(np.int64).reshape(2, size)
    slots.fill(-7)
    xp.zeros((2, size), np.int64)[0] = slots[0]  # a kernel loaded below would wait for the device
    last = xp.cuda.runtime.getDeviceCount() - 1
    stream = xp.cuda.Stream(non_blocking=True)
    with _sender(inbox, last, size) as process:
        for first in range(0, 20, 2):
            found = xp.zeros((2, size), np.int64)
            xp.cuda.get_current_stream().synchronize()
            with stream:
                for step in (first, first + 1):
                    inbox.wait(step + 1)
                    found[step % 2] = slots[step % 2]
                done = stream.record()
            time.sleep(0.01)
            assert not done.done
            process.stdin.write(f"{first}\n{first + 1}\n")
            stream.synchronize()
            numbers = xp.arange(1, size + 1)
            for step in (first, first + 1):
                assert bool((found[step % 2] == numbers * (step + 1)).all())
        process.stdin.close()
        assert process.wait(60) == 0


def test_abort_ends_waits_from_another_thread(cuda):
    inbox = Inbox(cuda, 64)
    stream = cuda.xp.cuda.Stream(non_blocking=True)
    timer = threading.Timer(0.5, inbox.abort)
    start = time.monotonic()
    timer.start()
    with stream:
        inbox.wait(1)
        inbox.wait(2)
    stream.synchronize()
    assert 0.4 < time.monotonic() - start < 5.0
    timer.join()
    with stream:
        inbox.wait(2**40)
    stream.synchronize()
    with _sender(inbox, 0, 1) as process:  # a later post undoes it
        process.stdin.write("0\n")
        process.stdin.close()
        assert process.wait(60) == 0
    with stream:
        inbox.wait(1)
        inbox.wait(2)
        done = stream.record()
    time.sleep(0.05)
    assert not done.done
    inbox.abort()
    stream.synchronize()
    inbox.close()
    inbox.abort()  # nothing is left to wait for


def test_memory_returns_and_the_current_device_stays(cuda):
    """A finalizer runs in any thread, whose device may be another one."""
    runtime = cuda.xp.cuda.runtime
    last = runtime.getDeviceCount() - 1
    cuda.xp.cuda.Device(last).use()
    try:
        for _ in range(300):  # GiB, more than any GPU has
            inbox = Inbox(cuda, 1 << 30)
            cuda.xp.cuda.Device(last).use()
            inbox.close()
            assert runtime.getDevice() == last
    finally:
        cuda.activate()


def test_what_cannot_be_mapped_is_an_error(cuda):
    with pytest.raises(DeviceError, match=r"cannot map the memory of another device"):
        Outbox(cuda, bytes(64))
    total = cuda.xp.cuda.runtime.memGetInfo()[1]
    with pytest.raises(DeviceError, match=rf"{2 * total + 256} bytes on {cuda} cannot be"):
        Inbox(cuda, 2 * total)
