"""`kernels.profile`: registers, occupancy and waves of each launch; counters, if ncu is there."""

from __future__ import annotations

from collections.abc import Mapping

from engine.device import resolve_device
from engine.errors import CompileError, ConfigError
from engine.kernels._module import ARCHITECTURES
from engine.kernels._tools import ncu
from engine.kernels._tools.bench_sizes import bench_dtypes, bench_shapes, case_of
from engine.kernels._tools.check_cases import Case, case_problem
from engine.kernels._tools.occupancy import Occupancy, occupancy
from engine.kernels._tools.profile_report import LaunchProfile, ProfileReport
from engine.kernels._tools.roofline import peaks_of_device
from engine.kernels._user.arguments import LaunchArguments
from engine.kernels._user.module import can_run
from engine.kernels._user.op import Op, current_chip
from engine.kernels._user.problem import CHIPS, Chip, Launch

__all__ = ["profile", "profile_compiled"]


def profile(
    op: Op,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "",
    *,
    counters: bool = True,
) -> ProfileReport:
    """Profile the launches of an op.

    Parameters
    ----------
    op : Op
        Made by `kernels.define`.
    sizes : mapping, optional
        A size for every symbol; by default the first of the definition's `bench`.
    dtype : str
        The file's `scalar_t`; by default one of 16 bits, if the op supports one.
    counters : bool
        Measure with ncu (Nsight Compute), if it is installed: a child process runs the file of the
        definition. Other processes on the GPU disturb the figures.

    Returns
    -------
    ProfileReport
        For each launch: registers, spilled bytes, shared memory, occupancy and what limits it,
        waves of the grid. Without a GPU: compiled for a common GPU of each architecture.

    Raises
    ------
    ConfigError
        If a size is missing, or violates the definition's conditions.
    CompileError
        If the CUDA source does not compile.

    Examples
    --------
    >>> from engine import kernels  # doctest: +SKIP
    >>> print(kernels.profile(scale_rows, {"T": 8192, "N": 4096}))  # doctest: +SKIP
    scale_rows  T=8192, N=4096, float16  on NVIDIA H200 SXM
    scale_rows  grid (131072,), block (256,)
      registers 16 a thread, none spilled; shared memory 0 bytes static, 0 dynamic
      occupancy 100%: 8 blocks an SM, 64 of 64 warps; limited by threads
      ...
    """
    shape = bench_shapes(op, sizes)[0]
    name = bench_dtypes(op, [dtype] if dtype else ())[-1]
    case = case_of(op, shape.sizes, name)
    device = resolve_device("auto")[0]
    device.activate()
    if not device.is_cuda:
        return profile_compiled(op, case)
    launches = _launches(op, case, current_chip(), on_gpu=True)
    found, note = ncu.measure(op, case) if counters else ((), "")
    peaks = peaks_of_device(device.index)
    return ProfileReport(op.name, str(case), launches, {}, found, note, peaks)


def profile_compiled(op: Op, case: Case) -> ProfileReport:
    """Compile what a call needs for a common GPU of each architecture; needs no GPU."""
    launches: list[LaunchProfile] = []
    failures = {}
    for arch in ARCHITECTURES:
        if not can_run(op.definition.requires, arch):
            failures[arch] = f"the definition requires {op.definition.requires}"
            continue
        try:
            launches += _launches(op, case, CHIPS[arch], on_gpu=False)
        except (CompileError, ConfigError) as error:
            failures[arch] = str(error)
    note = "compiled, not run: there is no GPU"
    return ProfileReport(op.name, str(case), tuple(launches), failures, note=note)


def _launches(op: Op, case: Case, chip: Chip, *, on_gpu: bool) -> tuple[LaunchProfile, ...]:
    problem = case_problem(op, case, chip)
    compiled = {module.spec: module for module in op.compile(problem)}
    found = []
    for launch, arguments in zip(op.launches(problem), op.match(problem), strict=True):
        name = arguments.kernel.entry
        entries = compiled[arguments.module].entries
        entry = next(entry for entry in entries if entry.name == name)
        shared = entry.shared_bytes + launch.shared
        held = occupancy(chip, launch.num_threads, entry.registers, shared)
        if on_gpu:
            held = _of_driver(held, arguments, launch)
        found.append(
            LaunchProfile(
                chip, name, launch, entry.registers, entry.spill_bytes, entry.shared_bytes, held
            )
        )
    return tuple(found)


def _of_driver(held: Occupancy, arguments: LaunchArguments, launch: Launch) -> Occupancy:
    """Return the occupancy with the driver's count of blocks."""
    count = arguments.kernel.resident_blocks(arguments.module, launch.num_threads, launch.shared)
    warps = -(-launch.num_threads // 32)
    limits = held.limits if count == held.blocks else ("the driver's count",)
    return Occupancy(count, count * warps, held.max_warps, limits)
