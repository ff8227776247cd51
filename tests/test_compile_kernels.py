"""The choice of architectures that each kernel is compiled for."""

from __future__ import annotations

import re
from collections import defaultdict

from engine.kernels._module import ARCHITECTURES, source_dir
from tests.compile_kernels import chosen_jobs, conditions, every_spec, outcome


def test_every_module_and_every_outcome_of_its_conditions_is_compiled():
    specs = every_spec()
    jobs = [job for job, _ in chosen_jobs(specs)]
    assert len(jobs) == len(set(jobs)) and {spec for spec, _ in jobs} == set(specs)
    assert all(spec.supports(arch) for spec, arch in jobs)
    compiled = defaultdict(set)
    for spec, arch in jobs:
        compiled[spec.file, spec.dtype].add(outcome(spec.file, arch))
    for spec in specs:
        wanted = {outcome(spec.file, arch) for arch in ARCHITECTURES if spec.supports(arch)}
        assert compiled[spec.file, spec.dtype] == wanted, spec


def test_conditions_are_found_in_headers_and_in_those_of_cuda():
    assert (">=", 1200) in conditions("sample/sample.cu")
    assert (">=", 900) in conditions("rmsnorm.cu")  # programmatic dependent launch
    assert (">=", 890) in conditions("quantize_rows/quantize_rows.cu")  # cuda_fp8.h


def test_no_condition_is_written_in_another_way():
    """Every comparison with an architecture is one that `conditions` reads."""
    for path in source_dir().rglob("*.cu*"):
        for line in path.read_text().splitlines():
            code = line.partition("//")[0]
            known = re.sub(r"defined\(__CUDA_ARCH__\)|#ifdef __CUDA_ARCH__", "", code)
            known = re.sub(r"(__CUDA_ARCH__|kArch) (>=|<|==) \d+", "", known)
            known = re.sub(r"constexpr int kArch = (__CUDA_ARCH__|0);", "", known)
            assert not re.search(r"__CUDA_ARCH\w*|\bkArch\b", known), f"{path.name}: {line}"
