"""The struct of a kernel's parameters lies in CUDA as its Python twin does."""

from __future__ import annotations

import importlib
import pkgutil
import re

import numpy as np
import pytest

from engine import kernels
from engine.errors import CompileError
from engine.kernels import _nvrtc
from engine.kernels._launch import KERNELS
from engine.kernels._module import source_dir
from engine.kernels._params import struct_dtype

MAX_ARGUMENTS = 12
NOT_YET = {
    "attention_decode",
    "attention_decode_combine",
    "attention_decode_sm90",
    "kv_gather_scalar",
    "kv_gather_vector",
    "kv_store_scalar",
    "kv_store_vector",
    "merge_states_pairs",
    "merge_states_scalar",
    "merge_states_vector",
    "qk_norm_rope_store_half_scalar",
    "qk_norm_rope_store_half_vector",
    "qk_norm_rope_store_interleaved_scalar",
    "qk_norm_rope_store_interleaved_vector",
    "rope_half_scalar",
    "rope_half_vector",
    "rope_interleaved_scalar",
    "rope_interleaved_vector",
}

for _info in pkgutil.walk_packages(kernels.__path__, "engine.kernels."):
    importlib.import_module(_info.name)

STRUCTS = {kernel.struct: kernel.layout for kernel in KERNELS if kernel.struct is not None}


def _definition(name: str) -> str:
    """Return the struct's text; exactly one file defines it."""
    pattern = re.compile(rf"^struct {name} \{{.*?^\}};", re.MULTILINE | re.DOTALL)
    found = {
        str(path): match.group()
        for path in sorted(source_dir().rglob("*.cu*"))
        if (match := pattern.search(path.read_text()))
    }
    assert len(found) == 1, f"struct {name} stands in {sorted(found)}"
    return next(iter(found.values()))


def _check(struct: str, layout: np.dtype) -> None:
    """Compile the struct alone, with an assertion for its size and for each of its fields."""
    asserted = {f"sizeof({struct})": layout.itemsize}
    for field in layout.names or ():
        assert layout.fields is not None
        dtype, offset = layout.fields[field][:2]
        # What offsetof stands for in the compiler's own headers, which NVRTC does not have.
        asserted[f"__INTADDR__(&((({struct}*)0)->{field}))"] = offset
        asserted[f"sizeof({struct}::{field})"] = dtype.itemsize
    source = [
        '#include "common/types.cuh"',
        "struct alignas(64) TensorMap { unsigned char bytes[128]; };",
        _definition(struct),
        *(f'static_assert({c} == {n}, "Python: {c} is {n}");' for c, n in asserted.items()),
    ]
    folders = [f"-I{folder}" for folder in (source_dir(), *_nvrtc.include_dirs())]
    options = ["-arch=sm_80", "-std=c++17", "-default-device", "-DENGINE_DTYPE=2", *folders]
    _nvrtc.compile_source("\n".join(source), f"{struct}.cu", options)


@pytest.mark.parametrize("struct", sorted(STRUCTS))
def test_a_struct_has_the_layout_of_its_python_twin(struct: str) -> None:
    layouts = {str(kernel.layout) for kernel in KERNELS if kernel.struct == struct}
    assert len(layouts) == 1, f"kernels that take {struct} declare different parameters"
    _check(struct, STRUCTS[struct])


def test_another_layout_is_found() -> None:
    other = struct_dtype(["x", "n", "num_rows"], ["ptr", "i32", "i64"])
    with pytest.raises(CompileError, match="sizeof"):
        _check("RmsnormParams", other)


def test_kernels_of_many_parameters_take_a_struct() -> None:
    many = {k.entry: k.num_arguments for k in KERNELS if k.num_arguments > MAX_ARGUMENTS}
    assert set(many) == NOT_YET, f"more than {MAX_ARGUMENTS} arguments: {many}"
