"""The ctypes structs of XLA's foreign interface, against the header that jaxlib ships."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from engine.errors import EngineError, ShapeError  # noqa: E402
from engine.integrations.jax import _ffi  # noqa: E402

HEADER = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
CODE = re.sub(r"//[^\n]*", "", HEADER)
RENAMED = {  # since version 0.4
    "XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base",
    "XLA_FFI_Error_GetDetails": "XLA_FFI_Error_GetMessage",
    "XLA_FFI_InvokeContext_Get)": "XLA_FFI_ExecutionContext_Get)",
}
for new, old in RENAMED.items():
    CODE = CODE.replace(new, old)
# Name in the header -> our struct.
STRUCTS = {
    "XLA_FFI_Args": _ffi._Buffers,
    "XLA_FFI_Rets": _ffi._Buffers,
    "XLA_FFI_Attrs": _ffi._Attributes,
    "XLA_FFI_ByteSpan": _ffi._Bytes,
    "XLA_FFI_Api_Version": _ffi._Version,
    "XLA_FFI_Error_Create_Args": _ffi._ErrorCreate,
    "XLA_FFI_Error_GetMessage_Args": _ffi._ErrorDetails,
    "XLA_FFI_Stream_Get_Args": _ffi._ContextGet,
    "XLA_FFI_Extension_Base": _ffi._MetadataHead,
    "XLA_FFI_Metadata": _ffi._Metadata,
    "XLA_FFI_Metadata_Extension": _ffi._MetadataExtension,
    "XLA_FFI_CallFrame": _ffi._Frame,
}
SIZES = {"int": 4, "int32_t": 4, "int64_t": 8, "size_t": 8, "XLA_FFI_Handler_Traits": 4}
SIZES |= {name: 4 for name in re.findall(r"typedef enum \{[^}]*\} (\w+);", CODE)}
SIZES["XLA_FFI_TypeId"] = 8


def header_fields(name):
    """Return the types of a struct's fields, in order."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", CODE, re.DOTALL).group(1)
    return [line.rsplit(None, 1)[0].strip() for line in body.split(";") if line.strip()]


def size_of(kind):
    if kind.endswith("*"):
        return 8
    name = kind.removeprefix("struct ").removeprefix("const ")
    if name in SIZES:
        return SIZES[name]
    return ctypes.sizeof(STRUCTS[name])


def our_fields(struct):
    """Return the offsets and sizes of all fields, inherited ones included."""
    names = [n for kind in reversed(struct.__mro__) for n, *_ in getattr(kind, "_fields_", ())]
    return [(getattr(struct, n).offset, getattr(struct, n).size) for n in dict.fromkeys(names)]


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_has_the_headers_layout(name):
    offset = 0
    wanted = []
    for size in map(size_of, header_fields(name)):
        align = min(size, 8)
        offset = -(-offset // align) * align
        wanted.append((offset, size))
        offset += size
    ours = our_fields(STRUCTS[name])
    common = min(len(ours), len(wanted))  # newer versions append fields
    assert common > 1 and ours[:common] == wanted[:common]


def test_buffer_format_is_the_headers():
    kinds = {"Q": "size_t", "P": "*", "i": "XLA_FFI_DataType", "q": "int64_t"}
    fields = header_fields("XLA_FFI_Buffer")
    for letter, kind in zip(_ffi._BUFFER.format.lstrip("@"), fields, strict=True):
        assert kind.endswith(kinds[letter]), (letter, kind)


def test_functions_and_codes_are_the_headers():
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", CODE)
    short = ["".join(f.lower().split("_")) for f in functions]
    ours = ["".join(f.split("_")) for f in _ffi._API_FUNCTIONS]
    renamed = {
        "contextget": "executioncontextget",
        "memoryallocate": "devicememoryallocate",
        "memoryfree": "devicememoryfree",
        "poolschedule": "threadpoolschedule",
        "poolnumthreads": "threadpoolnumthreads",
    }
    assert [renamed.get(name, name) for name in ours] == short[: len(ours)]
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", CODE))
    names = {"bool": "PRED", "bfloat16": "BF16", "float8_e4m3fn": "F8E4M3FN"}
    for code, dtype in _ffi._DTYPES.items():
        kind = {"i": "S", "u": "U", "f": "F"}.get(dtype.kind, "")
        assert int(codes[names.get(dtype.name, f"{kind}{8 * dtype.itemsize}")]) == code
    version = re.findall(r"#define XLA_FFI_API_M\w+ (\d+)", CODE)
    assert tuple(map(int, version)) >= _ffi._VERSION


def register(name, run):
    capsule = jax.ffi.pycapsule(_ffi.make_handler(run, is_capturable=False))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def call(name, *arrays, result, **attributes):
    return jax.jit(lambda *a: jax.ffi.ffi_call(name, result)(*a, **attributes))(*arrays)


@pytest.mark.parametrize("dtype", [d.name for d in _ffi._DTYPES.values() if d.itemsize < 8])
def test_a_handler_reads_buffers_and_the_attribute(dtype):
    seen = []

    def run(call):
        seen.append((call.config, call.arguments, call.device()))
        with pytest.raises(EngineError, match="stream_get: XLA FFI GPU context is not available"):
            call.stream()
        for source, target in zip(call.arguments, call.results, strict=True):
            size = int(np.prod(source.shape)) * source.dtype.itemsize
            ctypes.memmove(target.address, source.address, size)

    register(f"test.copy_{dtype}", run)
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    result = call(
        f"test.copy_{dtype}", x, result=jax.ShapeDtypeStruct(x.shape, x.dtype), config="hé"
    )
    np.testing.assert_array_equal(result, x)
    ((config, arguments, device),) = seen
    assert (config, device) == ("hé".encode(), 0)
    assert arguments[0].shape == (2, 3) and arguments[0].dtype == x.dtype


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ShapeError("x: wanted 2; got 3"), "INVALID_ARGUMENT: x: wanted 2; got 3"),
        (KeyError("nothing"), "INTERNAL: KeyError: 'nothing'"),
        (KeyboardInterrupt(), "INTERNAL: KeyboardInterrupt"),
    ],
)
def test_what_a_handler_raises_becomes_xlas_error(error, wanted):
    def run(_):
        raise error

    name = f"test.raise_{type(error).__name__}"
    register(name, run)
    with pytest.raises(jax.errors.JaxRuntimeError, match=wanted):
        call(name, result=jax.ShapeDtypeStruct((), jnp.float32)).block_until_ready()
