"""The public CUDA headers: documented, usable alone, and what their examples compute."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from engine import cli, kernels
from engine.device import to_numpy
from engine.errors import CompileError
from engine.kernels import _nvrtc
from engine.kernels._module import ARCHITECTURES, ModuleSpec, source_dir
from engine.kernels._tools.headers import _declarations
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests import headers as page

ROOT = Path(__file__).parents[2]
HEADERS = kernels.headers()


@pytest.fixture(scope="module")
def nvrtc():
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture(scope="module")
def ops():
    return {
        op.source.path.stem: op
        for op in runpy.run_path(str(ROOT / "examples" / "headers" / "ops.py")).values()
        if isinstance(op, kernels.Op)
    }


def test_the_page_is_made_from_the_headers():
    assert page.PAGE.read_text() == page.page(), "run: python -m tests.headers"


def test_a_kernel_finds_what_the_issue_asks_for():
    wanted = {"types", "packed", "reduce", "mma", "cp_async", "tma", "mbarrier", "wgmma", "pdl"}
    assert wanted < set(HEADERS)
    assert HEADERS["tma"].architectures == ("sm_90a", "sm_100", "sm_103", "sm_120")
    assert HEADERS["wgmma"].architectures == ("sm_90a",)
    assert HEADERS["wgmma"].dtypes == ("float16", "bfloat16")
    assert HEADERS["mma"].architectures == ARCHITECTURES


@pytest.mark.parametrize("name", HEADERS)
def test_every_function_is_found_and_has_a_contract(name):
    text = (source_dir() / "common" / f"{name}.cuh").read_text()
    code = re.sub(r"//.*|template <>[^{;]*|#define(.*\\\n)*.*", "", text)
    declared = re.findall(r"__device__ __forceinline__ [^({;=]*?(\w+)\(", code)
    found = [member.name.rpartition("::")[2] for member in HEADERS[name].declarations]
    assert set(declared) <= set(found)
    for member in HEADERS[name].declarations:
        assert len(member.comment) > 3, f"{member.name}: say above it what it does"


def test_a_header_includes_public_headers_only():
    for header in HEADERS.values():
        text = (source_dir() / header.include).read_text()
        included = re.findall(r'#include "common/(\w+)\.cuh"', text)
        assert set(included) <= set(HEADERS), header.include


def test_declarations_are_read_as_they_stand():
    text = """
// ---- sums ------------------------------------------------

// Adds. Any thread.
__device__ __forceinline__ float add(float a,
                                     float b) {
  if (a > b) { return a + b; }
  return b + a;
}
template <int N>
__device__ __forceinline__ void fill(float (&x)[N]);
template <>
__device__ __forceinline__ void fill<1>(float (&x)[1]) {}
ENGINE_FILL(2, 3)

// A pair.
struct Pair {
  float a, b;
  // Returns the larger one.
  __device__ __forceinline__ float largest() const { return fmaxf(a, b); }
};

__device__ __forceinline__ int silent() { return 0; }
"""
    found = list(_declarations(text.splitlines()))
    assert [(each.name, each.text, each.comment) for each in found] == [
        ("add", "float add(float a, float b)", "Adds. Any thread."),
        ("fill", "template <int N> void fill(float (&x)[N])", "Adds. Any thread."),
        ("Pair", "struct Pair", "A pair."),
        ("Pair::largest", "float Pair::largest() const", "Returns the larger one."),
        ("silent", "int silent()", ""),
    ]
    assert {each.section for each in found} == {"sums"}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_compiles_alone(name, nvrtc):
    """Nothing before it: neither another header nor, for float32, the loader's macro."""
    header = HEADERS[name]
    source = f'#include "{header.include}"\n#include "{header.include}"\n'
    source += 'extern "C" __global__ void empty() {}\n'
    for dtype in header.dtypes:
        for arch in header.architectures:
            options = ModuleSpec(name, dtype).options(arch)
            if dtype == "float32":
                options = [each for each in options if not each.startswith("-DENGINE_DTYPE")]
            assert _nvrtc.compile_source(source, name, options).entries[0].name == "empty"


def test_wgmma_refuses_float32(nvrtc):
    options = ModuleSpec("user.cu", "float32").options("sm_90a")
    with pytest.raises(CompileError, match="must be float16 or bfloat16"):
        _nvrtc.compile_source('#include "common/wgmma.cuh"\n', "user.cu", options)


def test_every_header_has_an_example(ops):
    assert set(ops) == set(HEADERS)
    for name, op in ops.items():
        assert f'#include "common/{name}.cuh"' in op.source.current().text


def _sizes(op, **sizes):
    return {name: sizes[name] for name in op.signature.symbols}


@pytest.mark.parametrize("name", HEADERS)
def test_an_example_compiles_without_spills(name, ops, nvrtc):
    op = ops[name]
    for arch in _architectures(op):
        for dtype in _dtypes(op):
            problem = op.example_problem(_sizes(op, T=3, M=128, N=2048), dtype, arch=arch)
            for compiled in op.compile(problem):
                assert [entry.spill_bytes for entry in compiled.entries] == [0], (arch, dtype)


def _architectures(op):
    """Return those that every header of the example supports."""
    included = re.findall(r'#include "common/(\w+)\.cuh"', op.source.current().text)
    return set.intersection(*(set(HEADERS[name].architectures) for name in included))


def _dtypes(op):
    return op.signature.arrays[0].dtypes


@pytest.mark.grid("size", [{"T": 1, "M": 64, "N": 1024}, {"T": 70, "M": 192, "N": 3072}])
@pytest.mark.parametrize("name", HEADERS)
def test_an_example_computes_its_formula(xp, name, size, ops):
    op = ops[name]
    for dtype in _dtypes(op):
        problem = op.example_problem(_sizes(op, **size), dtype)
        shapes = [tuple(dim.value(problem.values) for dim in a.dims) for a in op.signature.arrays]
        arrays = [cases.normal(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        wide = [array.astype(np.float64) for array in arrays]
        want = op.reference(*wide, *([2.0] if name == "types" else []))
        got = to_numpy(op(*(cases.to_module(xp, array) for array in arrays)))
        assert_close(got, np.ascontiguousarray(want, got.dtype), reduction=max(size.values()))


def test_the_command_lists_headers(capsys):
    lines = _printed(capsys, "kernels", "headers").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [h.include for h in HEADERS.values()]
    one = _printed(capsys, "kernels", "headers", "pdl")
    assert _printed(capsys, "kernels", "headers", "common/pdl.cuh") == one
    assert "void pdl_wait()\n    Waits until the preceding" in one
    with pytest.raises(SystemExit):
        cli.main(["kernels", "headers", "pld"])
    assert "header must be one of" in capsys.readouterr().err


def _printed(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments])
    assert stopped.value.code == 0
    return capsys.readouterr().out
