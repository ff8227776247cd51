"""XLA's foreign function interface, called through ctypes: no compiler, no extension module.

A handler is a C function `XLA_FFI_Error* (XLA_FFI_CallFrame*)`. XLA calls it with the addresses of
the operands and of the results; here it is a ctypes callback, so it runs Python. The structs are
those of `xla/ffi/api/c_api.h` (in `jax.ffi.include_dir()`), version 0.3. Newer versions only append
fields and functions.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from engine.errors import EngineError

__all__ = ["Buffer", "Call", "make_handler"]

_VERSION = (0, 3)
_METADATA = 1  # XLA_FFI_Extension_Type
_CAPTURABLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
_INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code, as below
_INTERNAL = 13

_EXECUTE = 3  # XLA_FFI_ExecutionStage; handlers of other stages are not registered

_DTYPES = {
    code: np.dtype(dtype)
    for code, dtype in {
        1: np.bool_,
        2: np.int8,
        3: np.int16,
        4: np.int32,
        5: np.int64,
        6: np.uint8,
        7: np.uint16,
        8: np.uint32,
        9: np.uint64,
        10: np.float16,
        11: np.float32,
        12: np.float64,
        16: ml_dtypes.bfloat16,
        20: ml_dtypes.float8_e4m3fn,
    }.items()
}  # by XLA_FFI_DataType


class _Head(Structure):
    """The first two fields of each struct of the interface."""

    _fields_: ClassVar[Any] = (("struct_size", c_size_t), ("extension_start", c_void_p))


# XLA_FFI_Buffer: struct_size, extension_start, dtype, data, rank, dims.
_BUFFER = struct.Struct("@QPiPqP")


class _Buffers(_Head):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (("size", c_int64), ("types", c_void_p), ("buffers", c_void_p))


class _Bytes(Structure):
    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class _Attributes(_Head):
    _fields_ = (
        ("size", c_int64),
        ("types", c_void_p),
        ("names", POINTER(POINTER(_Bytes))),
        ("values", POINTER(POINTER(_Bytes))),
    )


class _Version(_Head):
    _fields_ = (("major", c_int), ("minor", c_int))


class _ErrorCreate(_Head):
    _fields_ = (("message", c_char_p), ("code", c_int))


class _ErrorDetails(_Head):
    """Arguments of XLA_FFI_Error_GetMessage; version 0.4 also writes the code."""

    _fields_ = (("error", c_void_p), ("message", c_char_p), ("code", c_int))


class _ContextGet(_Head):
    """Arguments of XLA_FFI_Stream_Get; those of XLA_FFI_DeviceOrdinal_Get hold an int32."""

    _fields_ = (("context", c_void_p), ("value", c_void_p))


_ApiFunction = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_API_FUNCTIONS = (
    *("error_create", "error_get_message", "error_destroy", "handler_register", "stream_get"),
    *("type_register", "context_get", "state_set", "state_get", "memory_allocate", "memory_free"),
    *("pool_schedule", "pool_num_threads", "future_create", "future_set_available"),
    *("future_set_error", "run_id_get", "device_ordinal_get"),
)


class _Api(_Head):
    _fields_ = (
        ("version", _Version),
        ("internal", c_void_p),
        *((name, _ApiFunction) for name in _API_FUNCTIONS),
    )


class _Frame(_Head):
    _fields_ = (
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class _MetadataHead(Structure):
    """XLA_FFI_Extension_Base."""

    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class _Metadata(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("version", _Version),
        ("traits", c_uint32),
        ("state_type_id", c_int64),
    )


class _MetadataExtension(Structure):
    _fields_ = (("base", _MetadataHead), ("metadata", POINTER(_Metadata)))


_HandlerFunction = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
_handlers: list[Any] = []  # XLA keeps their addresses for good, so they are never freed


class Buffer(NamedTuple):
    """An operand or a result: row-major, contiguous memory that XLA owns."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler. Valid only until the handler returns.

    Attributes
    ----------
    arguments, results : tuple of Buffer
    config : bytes
        The call's only attribute, a string.
    """

    arguments: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    config: bytes
    _frame: _Frame

    def stream(self) -> int:
        """Return the CUstream of the call."""
        return self._get("stream_get") or 0

    def device(self) -> int:
        """Return the ordinal of the call's device."""
        return (self._get("device_ordinal_get") or 0) & 0xFFFFFFFF

    def _get(self, function: str) -> int | None:
        api = self._frame.api.contents
        arguments = _ContextGet(ctypes.sizeof(_ContextGet), None, self._frame.context, None)
        error = getattr(api, function)(ctypes.addressof(arguments))
        if error:
            raise EngineError(f"XLA: {function}: {_take_message(api, error)}")
        value: int | None = arguments.value
        return value


def make_handler(run: Callable[[Call], None], *, is_capturable: bool) -> Any:
    """Return the address of a handler that calls `run`; what it raises becomes an XLA error.

    Parameters
    ----------
    run : callable
        May be called on any thread, several at once.
    is_capturable : bool
        Promise that with the same attributes and shapes, `run` always launches the same kernels on
        the call's stream, and does nothing else: XLA may then capture it into a CUDA graph.
    """

    def handle(frame_pointer: Any) -> int | None:
        frame = frame_pointer.contents
        try:
            if frame.extension_start:
                _describe(frame, is_capturable)
            else:
                run(_read(frame))
        except BaseException as error:  # nothing may cross the C boundary
            return _error(frame, error)
        return None

    handler = _HandlerFunction(handle)
    _handlers.append(handler)
    return ctypes.cast(handler, c_void_p)


def _read(frame: _Frame) -> Call:
    if frame.stage != _EXECUTE:
        raise EngineError(f"XLA: wrong stage {frame.stage} of a call; {_EXECUTE} is execute")
    attributes = frame.attributes
    config = attributes.values[0].contents if attributes.size else _Bytes()
    return Call(
        _buffers(frame.arguments),
        _buffers(frame.results),
        ctypes.string_at(config.ptr, config.len) if config.len else b"",
        frame,
    )


def _buffers(buffers: _Buffers) -> tuple[Buffer, ...]:
    if not buffers.size:
        return ()
    read = []
    for where in (c_void_p * buffers.size).from_address(buffers.buffers):
        _, _, code, address, rank, dims = _BUFFER.unpack(ctypes.string_at(where, _BUFFER.size))
        dtype, shape = _layout(code, ctypes.string_at(dims, 8 * rank) if rank else b"")
        read.append(Buffer(address, dtype, shape))
    return tuple(read)


@lru_cache(maxsize=4096)
def _layout(code: int, dims: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return _DTYPES[code], struct.unpack(f"@{len(dims) // 8}q", dims)


def _describe(frame: _Frame, is_capturable: bool) -> None:
    """Answer the query for the handler's version and traits, made once when it is registered."""
    version = frame.api.contents.version
    if (version.major, version.minor) < _VERSION:
        raise EngineError(
            f"XLA's foreign function interface must be at least {_VERSION[0]}.{_VERSION[1]} "
            f"(jaxlib 0.10); got {version.major}.{version.minor}"
        )
    extension = _MetadataExtension.from_address(frame.extension_start)
    if extension.base.type != _METADATA:
        raise EngineError(f"XLA: unknown extension {extension.base.type} of a call frame")
    metadata = extension.metadata.contents
    metadata.version = _Version(ctypes.sizeof(_Version), None, *_VERSION)
    metadata.traits = _CAPTURABLE if is_capturable else 0
    metadata.state_type_id = 0  # XLA_FFI_UNKNOWN_TYPE_ID: the handler has no state


def _error(frame: _Frame, error: BaseException) -> int | None:
    is_ours = isinstance(error, EngineError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    arguments = _ErrorCreate(
        ctypes.sizeof(_ErrorCreate),
        None,
        message.encode(),
        _INVALID_ARGUMENT if is_ours else _INTERNAL,
    )
    created: int | None = frame.api.contents.error_create(ctypes.addressof(arguments))
    return created


def _take_message(api: _Api, error: int) -> str:
    """Return the message of an error that XLA gave us, and free it."""
    arguments = _ErrorDetails(ctypes.sizeof(_ErrorDetails), None, error, None, 0)
    api.error_get_message(ctypes.addressof(arguments))
    message = (arguments.message or b"").decode()
    arguments.message = None
    api.error_destroy(ctypes.addressof(arguments))
    return message
