"""Shared by all ops: kernel loader, disk cache, launch helper and contract."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine import kernels
from engine.dtypes import BFLOAT16
from engine.errors import CompileError, ContractError, DTypeError, ShapeError
from engine.kernels import _module, _nvrtc
from engine.kernels._contract import FLOATS, INT32, Contract
from engine.kernels._disk_cache import cache_folder
from engine.kernels._launch import Kernel
from engine.kernels._module import CompileStats, ModuleSpec

ROOT = Path(__file__).parents[2]
SOURCE = """#include "common/scale.cuh"
extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= kScale * FACTOR + ENGINE_DTYPE; }
"""
SPEC = ModuleSpec("tiny.cu", "float32", (("FACTOR", 3),))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one small CUDA file and a header, and an empty cache."""
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(f"no NVRTC: {error}")
    folder = tmp_path / "cuda_src"
    (folder / "common").mkdir(parents=True)
    (folder / "common/scale.cuh").write_text("#pragma once\nconstexpr float kScale = 2.0f;\n")
    (folder / "tiny.cu").write_text(SOURCE)
    monkeypatch.setattr(_module, "source_dir", lambda: folder)
    monkeypatch.setattr(_module, "_stats", CompileStats())
    monkeypatch.setattr(_module, "_is_ready", False)
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    _forget_sources()
    yield folder
    _forget_sources()


def _forget_sources():
    _module._source.cache_clear()
    _module._digest.cache_clear()


def _compile(spec=SPEC, arch="sm_80"):
    """Load a module; return it and the number of compilations."""
    before = _module.stats().compiled
    found = _module.compile_module(spec, arch)
    assert found.path.read_bytes()[:4] == b"\x7fELF"
    assert [entry.name for entry in found.entries] == ["tiny"] and found.entries[0].registers > 0
    return found, _module.stats().compiled - before


# --- the cache on disk --------------------------------------------------------------------------


def test_a_module_is_compiled_once(sources, tmp_path):
    assert _module.cached_module(SPEC, "sm_80") is None
    first, count = _compile()
    assert count == 1 and _compile() == (first, 0) and _module.stats().cache_hits == 1
    assert _module.cached_module(SPEC, "sm_80") == first
    folder = tmp_path / "cache/kernels"
    assert first.path.parent == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.suffix for p in folder.iterdir()) == [".cubin", ".json"]


def test_what_the_result_depends_on_is_in_the_key(sources):
    seen = {_compile()[0].path}
    for spec, arch in (
        (SPEC, "sm_90a"),
        (ModuleSpec("tiny.cu", "float16", SPEC.defines), "sm_80"),
        (ModuleSpec("tiny.cu", "float32", (("FACTOR", 4),)), "sm_80"),
    ):
        found, count = _compile(spec, arch)
        assert count == 1
        seen.add(found.path)
    header = sources / "common/scale.cuh"
    header.write_text(header.read_text().replace("2.0f", "5.0f"))
    _forget_sources()  # like a new process
    found, count = _compile()
    assert count == 1 and len(seen | {found.path}) == 5


def test_every_option_but_the_folders_is_in_the_key(sources, monkeypatch):
    key = _module._cache_key(SPEC, "sm_80")
    options = SPEC.options("sm_80")
    monkeypatch.setattr(ModuleSpec, "options", lambda *_: [*options, "-I/elsewhere"])
    assert _module._cache_key(SPEC, "sm_80") == key
    monkeypatch.setattr(ModuleSpec, "options", lambda *_: [*options, "-lineinfo"])
    assert _module._cache_key(SPEC, "sm_80") != key


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other"])
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_damaged_file_is_made_again(sources, suffix, damage):
    found, _ = _compile()
    whole = found.path.read_bytes()
    [path] = found.path.parent.glob(f"*{suffix}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"[1]"}[damage])
    assert _module.cached_module(SPEC, "sm_80") is None
    again, count = _compile()
    assert count == 1 and again.path.read_bytes() == whole and _compile()[1] == 0


def test_a_record_with_other_fields_is_made_again(sources):
    found, _ = _compile()
    [path] = found.path.parent.glob("*.json")
    record = json.loads(path.read_text())
    for change in ({"entries": [{"name": "tiny"}]}, {"entries": 3}, {"cubin": 3}, {"sha256": ""}):
        path.write_text(json.dumps(record | change))
        assert _compile()[1] == 1


def test_a_record_without_the_compilers_report_is_made_again(sources):
    """NVRTC 13 returns a cubin of its own cache without running ptxas, unless it must not."""
    found, _ = _compile()
    [path] = found.path.parent.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"entries": []}))
    again, count = _compile()
    assert count == 1 and [entry.name for entry in again.entries] == ["tiny"]
    assert "-no-cache" in SPEC.options("sm_80")


_RACER = """
import pathlib, sys, time
from engine.kernels import _module, _nvrtc
_nvrtc.version()
sources, go, ready = map(pathlib.Path, sys.argv[1:])
_module.source_dir = lambda: sources
ready.touch()
while not go.exists():
    time.sleep(0.001)
for factor in range(3):
    spec = _module.ModuleSpec("tiny.cu", "float32", (("FACTOR", factor),))
    assert _module.compile_module(spec, "sm_80").path.read_bytes()[:4] == b"\\x7fELF"
print(_module.stats().compiled)
"""


def test_processes_that_compile_the_same_at_once(sources, tmp_path):
    go, ready = tmp_path / "go", [tmp_path / f"ready{i}" for i in range(3)]
    command = [sys.executable, "-c", _RACER, str(sources), str(go)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True, env=env)
        for r in ready
    ]
    while not all(r.exists() for r in ready) and all(p.poll() is None for p in racers):
        time.sleep(0.01)
    go.touch()
    counts = [int(p.communicate(timeout=120)[0]) for p in racers]
    assert [p.returncode for p in racers] == [0, 0, 0] and sum(counts) >= 3
    names = [path.name for path in (tmp_path / "cache/kernels").iterdir()]
    assert len([n for n in names if n.endswith(".json")]) == 3
    assert not [n for n in names if n.startswith(".tmp-")]
    for factor in range(3):
        assert _compile(ModuleSpec("tiny.cu", "float32", (("FACTOR", factor),)))[1] == 0


def test_a_folder_of_others_is_refused(sources, tmp_path):
    folder = tmp_path / "cache/kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(CompileError, match=r"by this user only; got .* mode 777. .*CACHE_DIR"):
        _module.compile_module(SPEC, "sm_80")


def test_a_folder_that_cannot_be_made_is_named(sources, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"kernel cache .*file/kernels .* set ENGINE_CACHE_DIR"):
        _module.compile_module(SPEC, "sm_80")


def test_a_disk_that_is_full_is_named(sources, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CompileError, match=r"kernel cache .* No space left .* ENGINE_CACHE_DIR"):
        _module.compile_module(SPEC, "sm_80")
    assert not list(cache_folder().iterdir())  # no partial files remain


# --- compiling ----------------------------------------------------------------------------------


def test_errors_carry_the_compilers_words(sources):
    (sources / "tiny.cu").write_text("__global__ void broken() { undeclared = 1; }")
    with pytest.raises(CompileError, match=r'tiny.cu(.|\n)*"undeclared" is undefined'):
        _module.compile_module(SPEC, "sm_80")
    with pytest.raises(CompileError, match=r"no CUDA file 'none.cu'"):
        _module.compile_module(ModuleSpec("none.cu", "float32"), "sm_80")


def test_many_at_once(sources, capsys):
    specs = [ModuleSpec("tiny.cu", "float32", (("FACTOR", i % 5),)) for i in range(10)]
    hopper = ModuleSpec("tiny_sm90.cu", "float32")  # not for this architecture
    found = _module.compile_all([*specs, hopper], "sm_80")
    assert [module.spec for module in found] == specs[:5] and _module.stats().compiled == 5
    assert capsys.readouterr() == ("", "")
    _module.compile_all(specs, "sm_80", progress=True)
    assert "compiling kernels" in capsys.readouterr().err and _module.stats().compiled == 5


def test_threads_may_share_the_cache(sources):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: _module.compile_module(SPEC, "sm_80"), range(8)))
    assert len({module.path for module in found}) == 1 and _compile()[1] == 0


def test_what_is_compiled_after_ready_is_counted(sources):
    _compile()
    _module.mark_ready()
    assert _compile()[1] == 0 and _module.stats().compiles_after_ready == 0
    _module.compile_module(SPEC, "sm_86")
    assert _module.stats().compiles_after_ready == 1 and "tiny.cu" in _module.stats().late[0]


def test_overlapping_blocks_count_again_once_the_last_one_ends(sources):
    _module.mark_ready()
    first = _module.uncounted()
    second = _module.uncounted()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    _module.compile_module(SPEC, "sm_80")
    assert _module.stats().compiles_after_ready == 0
    second.__exit__(None, None, None)
    _module.compile_module(SPEC, "sm_86")
    assert _module.stats().compiles_after_ready == 1


# --- the launch helper --------------------------------------------------------------------------


def test_arguments_are_cast_to_the_types_of_the_kernel():
    kernel = Kernel("k", "x:ptr none:ptr n:i32 rows:i64 bits:u32 eps:f32 scale:f64")
    values = kernel._values(
        {"scale": 2, "eps": 0.1, "bits": 7, "rows": 2**40, "n": 5, "none": None, "x": "array"}
    )
    kinds = [np.uint64, np.int32, np.int64, np.uint32, np.float32, np.float64]
    assert values[0] == "array" and [type(v) for v in values[1:]] == kinds
    assert values[1:] == (0, 5, 2**40, 7, np.float32(0.1), 2.0)


def test_wrong_arguments_are_named():
    kernel = Kernel("k", "x:ptr n:i32")
    with pytest.raises(ContractError, match=r"k: missing arguments \['n'\], unknown \['m'\]"):
        kernel._values({"x": None, "m": 1})
    with pytest.raises(ContractError, match=r"missing arguments \['n', 'x'\], unknown \[\]"):
        kernel._values({})
    for number in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            kernel._values({"x": None, "n": number})


# --- the contract -------------------------------------------------------------------------------


def _floats(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_sizes_are_bound_by_name():
    call = Contract("op")
    call.array("x", _floats(2, 3, 8), "* H D", FLOATS)
    call.array("y", _floats(8, 3), "D H", FLOATS)
    assert call.dims == {"H": 3, "D": 8} and call["D"] == 8 and call.on_cpu
    call.array("z", _floats(16, 8), "16 D", FLOATS)


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        (_floats(7), "N", r"op: w: must have shape \(N,\); N = 8 from x; got \(7,\)"),
        (_floats(2, 9), "2 N", r"w: must have shape \(2, N\); N = 8 from x; got \(2, 9\)"),
        (_floats(3, 8), "2 N", r"w: must have shape \(2, N\); got \(3, 8\)"),
        (_floats(8), "M N", r"w: must have shape \(M, N\); got \(8,\)"),
        (_floats(8), "* M N", r"w: must have shape \(..., M, N\); got \(8,\)"),
        (_floats(4, 5), "M M", r"w: must have shape \(M, M\); M = 4 from w; got \(4, 5\)"),
    ],
)
def test_a_wrong_shape_names_both_arguments_and_both_values(value, shape, message):
    call = Contract("op")
    call.array("x", _floats(2, 8), "T N", FLOATS)
    with pytest.raises(ShapeError, match=message):
        call.array("w", value, shape, FLOATS)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (_floats(8, dtype=np.float64), FLOATS, "must be float32 or float16 or bfloat16; got float"),
        (_floats(8, dtype=">f4"), FLOATS, "got >f4"),
        (_floats(8), INT32, "op: x: must be int32; got float32"),
        (_floats(8), BFLOAT16, "must be bfloat16; got float32"),
        ([1.0, 2.0], FLOATS, "op: x: must be an array; got list"),
        (
            np.ma.array([1.0, 2.0], mask=[0, 1]),
            FLOATS,
            "x: must be a plain array; got a masked one",
        ),
        (None, FLOATS, "must be an array; got NoneType"),
    ],
)
def test_a_wrong_type_is_named(value, dtype, message):
    with pytest.raises(DTypeError, match=message):
        Contract("op").array("x", value, "N", dtype)


def test_layouts():
    wide = _floats(4, 16)
    rows, turned = wide[:, :8], wide.T
    assert Contract("op").array("x", rows, "M N", FLOATS).flags.c_contiguous
    assert Contract("op").array("x", rows, "M N", FLOATS, layout="rows") is rows
    assert Contract("op").array("x", turned, "M N", FLOATS, layout="rows").flags.c_contiguous
    assert Contract("op").array("x", turned, "M N", FLOATS, layout="any") is turned
    with pytest.raises(ShapeError, match=r"op: out: must be C-contiguous; got strides \(64, 4\)"):
        Contract("op").written("out", rows, "M N", FLOATS)
    with pytest.raises(ShapeError, match="op: out: its last axis must be contiguous"):
        Contract("op").written("out", turned, "M N", FLOATS, layout="rows")


def test_foreign_arrays_are_taken_without_a_copy():
    array = _floats(3)
    foreign = SimpleNamespace(
        __dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__
    )
    assert np.shares_memory(Contract("op").array("x", foreign, "N", FLOATS), array)


def test_a_foreign_array_that_cannot_be_read_is_told_with_its_dtype():
    """NumPy reads no bfloat16 by DLPack, and PyTorch exports no tensor that needs a gradient."""

    def export(**_):
        raise BufferError("Unsupported dtype in DLTensor.")

    foreign = SimpleNamespace(
        dtype="torch.bfloat16", __dlpack__=export, __dlpack_device__=_floats(3).__dlpack_device__
    )
    said = "op: x: must be readable as an array; got SimpleNamespace of torch.bfloat16: Unsupp"
    with pytest.raises(ContractError, match=said):
        Contract("op").array("x", foreign, "N", FLOATS)


@pytest.mark.parametrize("value", [float("nan"), -1, 2, True, "1", None])
def test_numbers_have_bounds(value):
    with pytest.raises(ContractError, match=r"op: eps: must be a number from 0 to 1; got"):
        Contract("op").number("eps", value, low=0, high=1)
    assert Contract("op").number("eps", np.float32(1), low=0, high=1) == 1.0


@pytest.mark.gpu
def test_arrays_of_two_modules_are_refused(cp):
    call = Contract("op")
    call.array("x", cp.zeros(3, cp.float32), "N", FLOATS)
    with pytest.raises(ContractError, match="y: is a numpy array, but x is a cupy array; move one"):
        call.array("y", _floats(3), "N", FLOATS)


def test_a_target_may_come_by_dlpack_and_must_be_writeable():
    class Foreign:
        """Stand-in for an array of another library."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x, weight = _floats(2, 8), np.ones(8, np.float32)
    into = np.zeros((2, 8), np.float32)
    kernels.rmsnorm(x, weight, out=Foreign(into))
    np.testing.assert_array_equal(into, kernels.rmsnorm(x, weight))
    into.flags.writeable = False
    with pytest.raises(ContractError, match="out: must be writeable; got a read-only array"):
        kernels.rmsnorm(x, weight, out=into)


def test_of_several_targets_none_is_filled_if_one_is_refused():
    q, table = np.ones((3, 2, 8), np.float32), np.zeros((4, 8), np.float32)
    good, positions = np.full_like(q, 7), np.zeros(3, np.int32)
    with pytest.raises(ShapeError, match=r"out\[1\]: must have shape"):
        kernels.rope(q, q.copy(), positions, table, out=(good, np.zeros((3, 1, 8), np.float32)))
    assert (good == 7).all()
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ShapeError, match="residual_out: must have shape"):
        kernels.rmsnorm(x, x[0], residual=x, out=good[:2, 0], residual_out=x[:1])
    assert (good == 7).all()
