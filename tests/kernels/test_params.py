"""A kernel's parameter struct has the same layout in CUDA and in Python."""

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
from engine.kernels._params import ParamStruct, struct_dtype

MAX_ARGUMENTS = 12
_KINDS = ["i32", "tmap", "ptr", "f32", "i64", "i32", "f64", "u32", "u64", "i32"]
_VALUES = {
    "i32": np.int32(-5),
    "i64": -(2**40),
    "u32": 2**32 - 1,
    "u64": 2**64 - 1,
    "f32": 0.5,
    "f64": np.float64(0.1),
    "ptr": None,
    "tmap": np.arange(128, dtype=np.uint8).view(np.dtype((np.void, 128))),
}

for _info in pkgutil.walk_packages(kernels.__path__, "engine.kernels."):
    importlib.import_module(_info.name)

STRUCTS = {k.struct.name: k.struct.dtype for k in KERNELS if k.struct is not None}


def _definition(name: str) -> str:
    """Return the struct's text; exactly one file defines it."""
    pattern = re.compile(rf"^struct {name}[^;\n]* \{{.*?^\}};", re.MULTILINE | re.DOTALL)
    found = {
        str(path): match.group()
        for path in sorted(source_dir().rglob("*.cu*"))
        if (match := pattern.search(path.read_text()))
    }
    assert len(found) == 1, f"struct {name} stands in {sorted(found)}"
    return next(iter(found.values()))


def _check(struct: str, layout: np.dtype) -> None:
    """Compile the struct alone, with static assertions for its size and each field's offset."""
    asserted = {f"sizeof({struct})": layout.itemsize}
    for field in layout.names or ():
        assert layout.fields is not None
        dtype, offset = layout.fields[field][:2]
        # The expansion of offsetof, whose header NVRTC lacks.
        asserted[f"__INTADDR__(&((({struct}*)0)->{field}))"] = offset
        asserted[f"sizeof({struct}::{field})"] = dtype.itemsize
    source = [
        '#include "common/page_codes.cuh"',
        '#include "common/state_slots.cuh"',
        "struct alignas(64) TensorMap { unsigned char bytes[128]; };",
        "using operand_t = scalar_t;",  # used only via pointers
        "using state_t = scalar_t;",  # likewise
        _definition(struct),
        *(f'static_assert({c} == {n}, "Python: {c} is {n}");' for c, n in asserted.items()),
    ]
    folders = [f"-I{folder}" for folder in (source_dir(), *_nvrtc.include_dirs())]
    options = ["-arch=sm_80", "-std=c++17", "-default-device", "-DENGINE_DTYPE=2", *folders]
    _nvrtc.compile_source("\n".join(source), f"{struct}.cu", options)


@pytest.mark.parametrize("struct", sorted(STRUCTS))
def test_a_struct_has_the_layout_of_its_python_twin(struct: str) -> None:
    layouts = {str(k.struct.dtype) for k in KERNELS if k.struct and k.struct.name == struct}
    assert len(layouts) == 1, f"kernels that take {struct} declare different parameters"
    _check(struct, STRUCTS[struct])


def test_another_layout_is_found() -> None:
    other = struct_dtype(["x", "n", "num_rows"], ["ptr", "i32", "i64"])
    with pytest.raises(CompileError, match="sizeof"):
        _check("RmsnormParams", other)


def test_kernels_of_many_parameters_take_a_struct() -> None:
    many = {k.entry: k.num_arguments for k in KERNELS if k.num_arguments > MAX_ARGUMENTS}
    assert not many, f"more than {MAX_ARGUMENTS} arguments and no struct: {many}"


def test_a_packed_struct_is_numpys():
    types = _KINDS
    names = [f"{kind}_{index}" for index, kind in enumerate(types)]
    params = ParamStruct("P", names, types)
    values = tuple(_VALUES[kind] for kind in types)
    memory = params.pack(values)
    whole = np.frombuffer(memory, params.dtype)[0]
    for index, (name, kind) in enumerate(zip(names, types, strict=True)):
        if kind == "tmap":
            assert whole[name].tobytes() == _VALUES["tmap"].tobytes()
        else:
            assert whole[name] == params.field(memory, index)[()] == (_VALUES[kind] or 0)
    field = params.field(memory, types.index("ptr"))
    field[()] = 2**63 + 5
    assert np.frombuffer(memory, params.dtype)[0][names[types.index("ptr")]] == 2**63 + 5


def test_a_number_that_does_not_fit_is_named():
    params = ParamStruct("P", ["n", "x"], ["i32", "ptr"])
    with pytest.raises(OverflowError, match=r"P: .*got \{'n': 2147483648\}"):
        params.pack((2**31, None))
