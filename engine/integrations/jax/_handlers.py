"""Handlers that XLA calls: the mirrors on CPUs, prepared launches on GPUs.

XLA calls a handler on a thread of its own, without the GIL; ctypes takes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from engine import device
from engine.errors import DeviceError, EngineError
from engine.integrations.jax._ffi import Buffer, Call, make_handler
from engine.integrations.jax._operators import (
    OPERATORS,
    decode,
    set_lowering,
    spread,
    target_name,
)
from engine.kernels._override.dispatch import without_overrides
from engine.kernels._prepared_call import ALIGNMENT, ArrayLayout, PreparedCall, prepare

__all__ = ["register"]

_SCRATCH_ALIGNMENT = 256  # bytes

_calls: dict[Any, tuple[PreparedCall, threading.Lock]] = {}
_preparing = threading.RLock()


def register() -> None:
    """Register every operator's targets with XLA, and its lowering with JAX."""
    on_cpu = jax.ffi.pycapsule(make_handler(_run_on_cpu, is_capturable=False))
    on_cuda = jax.ffi.pycapsule(make_handler(_run_on_cuda, is_capturable=True))
    for name in map(target_name, OPERATORS):
        jax.ffi.register_ffi_target(name, on_cpu, platform="cpu")
        jax.ffi.register_ffi_target(name, on_cuda, platform="CUDA")
    set_lowering("cpu", lambda *_: 0)
    set_lowering("cuda", _scratch_bytes)


def _run_on_cpu(call: Call) -> None:
    operator, given, options = decode(call.config)
    arrays = spread(given, [_view(buffer) for buffer in _widened(call.config, call.arguments)])
    for i, array in enumerate(arrays):
        if array is not None and i not in operator.aliases:
            array.flags.writeable = False
    with without_overrides():
        results = _as_tuple(operator.function(*arrays, **options))
    for buffer, result in zip(_new_results(call), results, strict=True):
        np.copyto(_view(buffer), result.reshape(buffer.shape))


def _new_results(call: Call) -> list[Buffer]:
    """Return the buffers of the results that the function returns, then that of scratch, if any."""
    operator, given, _ = decode(call.config)
    arguments = spread(given, call.arguments)
    for i, j in operator.aliases.items():
        # XLA copies an argument first if it is used later.
        if arguments[i].address != call.results[j].address:
            raise EngineError(f"{operator.name}: XLA did not alias argument {i} and result {j}")
    written = operator.aliases.values()
    return [buffer for j, buffer in enumerate(call.results) if j not in written]


def _widened(config: bytes, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers as the function takes them. See `Operator.pairs`."""
    operator, given, _ = decode(config)
    index = [i for i, is_given in enumerate(given) if is_given]
    return [
        b._replace(dtype=np.dtype(np.int64), shape=b.shape[:-1]) if i in operator.pairs else b
        for i, b in zip(index, buffers, strict=True)
    ]


def _view(buffer: Buffer) -> np.ndarray[Any, Any]:
    """Return a buffer in the host's memory as an array."""
    if 0 in buffer.shape:
        return np.empty(buffer.shape, buffer.dtype)
    size = int(np.prod(buffer.shape)) * buffer.dtype.itemsize
    memory: Any = (ctypes.c_char * size).from_address(buffer.address)
    view: np.ndarray[Any, Any] = np.frombuffer(memory, buffer.dtype)
    return view.reshape(buffer.shape)


def _as_tuple(results: Any) -> tuple[Any, ...]:
    if results is None:
        return ()
    return tuple(results) if isinstance(results, tuple) else (results,)


def _run_on_cuda(call: Call) -> None:
    with _on_device(call.device()):
        prepared, lock = _prepared(call.config, call.arguments, call.device())
        with lock:  # ctypes releases the GIL in a launch
            _launch(prepared, call)


def _launch(prepared: PreparedCall, call: Call) -> None:
    buffers = _new_results(call)
    results = buffers[: len(prepared.results)]
    scratch = _checked_scratch(prepared, call, buffers[len(prepared.results) :])
    counters = scratch + _aligned(prepared.scratch_bytes)
    stream = call.stream()
    if prepared.num_counters:
        _zero(counters, prepared.num_counters, stream)
    addresses = [buffer.address for buffer in (*call.arguments, *results)]
    prepared.run(addresses, stream, scratch, counters)


def _checked_scratch(prepared: PreparedCall, call: Call, buffers: list[Buffer]) -> int:
    """Return the address of the scratch memory that XLA provides, 0 for none."""
    needed = _size_of_scratch(prepared)
    found = sum(buffer.shape[0] for buffer in buffers)
    if found < needed:
        name = decode(call.config)[0].name
        raise EngineError(f"{name}: needs {needed} bytes of scratch; got {found}")
    return buffers[0].address if buffers else 0


def _scratch_bytes(config: str, arrays: Sequence[Any], results: Sequence[Any]) -> int:
    """Prepare a call while it is lowered, and return its scratch memory in bytes."""
    index = _lowering_device()
    buffers = [Buffer(0, np.dtype(a.dtype), tuple(a.shape)) for a in arrays]
    with _on_device(index):
        prepared, _ = _prepared(config.encode(), buffers, index)
    operator, _, _ = decode(config.encode())
    written = operator.aliases.values()
    wanted = [r for i, r in enumerate(results) if i not in written]
    for layout, struct in zip(prepared.results, wanted, strict=True):
        if layout.dtype != struct.dtype or np.prod(layout.shape) != np.prod(struct.shape):
            raise EngineError(f"{operator.name}: returns {layout}; {struct} was declared")
    return _size_of_scratch(prepared)


def _lowering_device() -> int:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise DeviceError(
            f"lowering an op for CUDA needs a GPU, for it decides the scratch memory ({error})"
        ) from error
    index: int = devices[0].local_hardware_id
    return index


def _prepared(
    config: bytes, arguments: Sequence[Buffer], index: int
) -> tuple[PreparedCall, threading.Lock]:
    """Return the prepared call on the current device `index`.

    A call is new where it is lowered; elsewhere only on a further device, or if the program was
    compiled in another process. Its modules may then be loaded while XLA captures a graph.
    """
    key = (config, index, *((b.dtype, b.shape, b.address % ALIGNMENT) for b in arguments))
    found = _calls.get(key)
    if found is None:
        with _preparing:
            found = _calls.get(key)
            if found is None:
                found = _calls[key] = (_prepare(config, arguments), threading.Lock())
    return found


def _prepare(config: bytes, arguments: Sequence[Buffer]) -> PreparedCall:
    operator, given, options = decode(config)
    layouts = [
        ArrayLayout.contiguous(b.shape, b.dtype)._replace(offset=b.address % ALIGNMENT)
        for b in _widened(config, arguments)
    ]
    # A program is prepared once, and runs in threads that know of no `override` block.
    with without_overrides():
        return prepare(
            lambda *arrays: operator.function(*spread(given, arrays), **options), layouts
        )


def _size_of_scratch(prepared: PreparedCall) -> int:
    """Bytes of scratch, then of counters."""
    return _aligned(prepared.scratch_bytes) + 4 * prepared.num_counters


def _aligned(size: int) -> int:
    return -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT


@contextlib.contextmanager
def _on_device(index: int) -> Iterator[None]:
    cuda = device.cupy().cuda
    if cuda.runtime.getDevice() == index:
        yield
    else:
        with cuda.Device(index):
            yield


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _zero(address: int, count: int, stream: int) -> None:
    """Set `count` int32 to 0 on the stream; a graph records it as any launch."""
    status = _driver().cuMemsetD32Async(
        ctypes.c_uint64(address), 0, ctypes.c_size_t(count), ctypes.c_void_p(stream)
    )
    if status:
        raise DeviceError(f"cuMemsetD32Async: error {status}")
