"""The part of `check` that needs no GPU: launches, compilation, and what the source tells."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine import env
from engine.errors import CompileError, EngineError
from engine.kernels._module import ARCHITECTURES, CompiledModule, compile_module
from engine.kernels._nvrtc import EntryInfo
from engine.kernels._tools.check_cases import Case, case_problem
from engine.kernels._tools.check_report import CompiledKernel, Finding
from engine.kernels._tools.check_sizes import array_shape
from engine.kernels._user.arguments import LaunchArguments
from engine.kernels._user.diagnostics import KernelCompileError, read_log
from engine.kernels._user.files import in_line
from engine.kernels._user.launch_failure import resource_errors
from engine.kernels._user.module import UserModule, can_run
from engine.kernels._user.op import Op
from engine.kernels._user.problem import CHIPS, Chip, Launch, Problem, TensorMapOf

__all__ = ["check_static"]

_SYNC = re.compile(
    r"__sync|cooperative_groups|\bcg::|mbarrier|\bbarrier|bar\.sync|cp_async|cluster_sync|\bblock_\w+<"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def check_static(
    op: Op, cases: Sequence[Case], chips: Sequence[Chip] = ()
) -> tuple[list[Finding], list[CompiledKernel]]:
    """Choose the launches of every case, compile what they need, and check what is known then.

    Parameters
    ----------
    op : Op
    cases : sequence of Case
    chips : sequence of Chip
        GPUs to compile for; by default one of each architecture that `requires` allows.

    Returns
    -------
    list of Finding, list of CompiledKernel
    """
    chosen = chips or [CHIPS[arch] for arch in ARCHITECTURES]
    chosen = [chip for chip in chosen if can_run(op.definition.requires, chip.arch)]
    findings = list(_source_findings(op))
    kernels: list[CompiledKernel] = []
    for chip in chosen:
        problems = _problems(op, cases, chip)
        launches, failed = _launches(op, problems)
        findings += failed
        matched, failed = _matched(op, launches)
        findings += failed
        compiled, failed = _compiled(matched, chip)
        findings += failed
        kernels += _rows(compiled)
        for problem, arguments in matched.items():
            findings += _resource_findings(launches[problem], arguments, problem, compiled)
        findings += _unused_findings(op, next(iter(matched))) if matched else []
        findings += _compiler_findings(compiled)
    return _folded(findings), list(dict.fromkeys(kernels))


def _problems(op: Op, cases: Sequence[Case], chip: Chip) -> dict[Problem, Case]:
    """Return the problems of the cases for which a call launches something."""
    found: dict[Problem, Case] = {}
    for case in cases:
        sizes = dict(case.sizes) | dict(case.scalars)
        written = [*op.signature.outputs, *(a for a in op.signature.arrays if a.is_inout)]
        shapes = [array_shape(array, sizes) for array in written]
        if any(shape is not None and 0 not in shape for shape in shapes):
            found.setdefault(case_problem(op, case, chip), case)
    return found


def _is_left_unwritten(op: Op, launches: Sequence[Launch], case: Case) -> bool:
    """Tell whether no block runs although a result has elements, which nothing has set to 0."""
    if any(math.prod(launch.grid) for launch in launches):
        return False
    sizes = dict(case.sizes) | dict(case.scalars)
    results = (array_shape(array, sizes) for array in op.signature.outputs if not array.is_zeroed)
    return any(shape is not None and 0 not in shape for shape in results)


def _launches(
    op: Op, problems: dict[Problem, Case]
) -> tuple[dict[Problem, tuple[Launch, ...]], list[Finding]]:
    found = {}
    failed = []
    for problem, case in problems.items():
        try:
            found[problem] = op.launches(problem)
            if _is_left_unwritten(op, found[problem], case):
                text = f"the grid {found[problem][0].grid} has no blocks: nothing writes the result"
                failed.append(Finding("grid", text, str(case)))
            again = op.definition.launch(problem)
            if ((again,) if isinstance(again, Launch) else tuple(again)) != found[problem]:
                text = "launch returns something else when it is called again; it must be pure"
                failed.append(Finding("launch", text, str(case)))
        except EngineError as error:
            failed.append(Finding("launch", str(error), str(case)))
        except Exception as error:
            where = in_line(op.definition.file, error)
            text = f"launch fails{where}: {type(error).__name__}: {error}"
            failed.append(Finding("launch", text, str(case)))
    return found, failed


def _matched(
    op: Op, launches: dict[Problem, tuple[Launch, ...]]
) -> tuple[dict[Problem, tuple[LaunchArguments, ...]], list[Finding]]:
    """Match the parameters of every kernel with the signature."""
    matched = {}
    failed = []
    for problem in launches:
        try:
            matched[problem] = op.match(problem)
        except EngineError as error:
            failed.append(Finding("parameters", str(error)))
    return matched, failed


def _compiled(
    matched: dict[Problem, tuple[LaunchArguments, ...]], chip: Chip
) -> tuple[dict[UserModule, CompiledModule], list[Finding]]:
    """Compile each module once."""
    modules = dict.fromkeys(each.module for several in matched.values() for each in several)
    compiled = {}
    failed = []
    with ThreadPoolExecutor(env.compile_workers()) as pool:
        for module, result in zip(
            modules, pool.map(lambda module: _outcome(module, chip.arch), modules), strict=True
        ):
            if isinstance(result, CompiledModule):
                compiled[module] = result
            elif isinstance(result, KernelCompileError):
                where = f"{module.variant}, {chip.arch}"
                failed += [Finding("compile", each.text(), where) for each in result.diagnostics]
            else:
                failed.append(Finding("compile", str(result)))
    return compiled, failed


def _outcome(module: UserModule, arch: str) -> CompiledModule | CompileError:
    try:
        return compile_module(module, arch)
    except CompileError as error:
        return error


def _rows(compiled: dict[UserModule, CompiledModule]) -> Iterator[CompiledKernel]:
    for module, result in compiled.items():
        for entry in result.entries:
            numbers = (entry.registers, entry.spill_bytes, entry.shared_bytes)
            macros = " ".join(f"{name}={value}" for name, value in (*module.types, *module.defines))
            name = f"{entry.name} {macros}".rstrip()
            yield CompiledKernel(result.arch, module.dtype, name, *numbers)


def _resource_findings(
    launches: Sequence[Launch],
    arguments: Sequence[LaunchArguments],
    problem: Problem,
    compiled: dict[UserModule, CompiledModule],
) -> Iterator[Finding]:
    for launch, each in zip(launches, arguments, strict=True):
        module = compiled.get(each.module)
        if module is None:
            continue
        for entry in module.entries:
            if entry.name == each.kernel.entry:
                yield from _too_many(problem, launch, entry, module)


def _too_many(
    problem: Problem, launch: Launch, entry: EntryInfo, module: CompiledModule
) -> Iterator[Finding]:
    for reason in resource_errors(launch, entry, module, problem.chip):
        yield Finding("resources", reason)
    if entry.spill_bytes:
        yield Finding(
            "spill",
            f"{entry.name} spills {entry.spill_bytes} bytes: it needs more registers than "
            f"{entry.registers}",
            f"{problem.dtype}, {problem.arch}",
            is_error=False,
        )


def _compiler_findings(compiled: dict[UserModule, CompiledModule]) -> Iterator[Finding]:
    """Yield the compiler's warnings."""
    for module, result in compiled.items():
        for each in read_log(result.log, module.file, module.text):
            where = f"{module.variant}, {result.arch}"
            yield Finding("compiler", each.text(), where, is_error=False)


def _source_findings(op: Op) -> Iterator[Finding]:
    text = op.source.current()
    code = _COMMENT.sub("", text.text)
    if "__shared__" in code and not _SYNC.search(code):
        yield Finding(
            "synchronisation",
            f"{text.label} uses __shared__ memory, but never __syncthreads(): a thread may read "
            "what another one has not written yet",
            is_error=False,
        )


def _unused_findings(op: Op, problem: Problem) -> Iterator[Finding]:
    """Yield the arrays that no kernel of a problem takes; an output among them is an error."""
    text = op.source.current()
    taken: set[str] = set()
    for launch in op.launches(problem):
        params = text.entry(launch.entry or op.definition.entry).params
        taken |= {param.name for param in params}
        maps = [value for _, value in launch.args if isinstance(value, TensorMapOf)]
        taken |= {value.array for value in maps}
    for array in op.signature.outputs:
        if array.name not in taken:
            names = f"`{array.name}`"
            yield Finding("unused", f"no kernel has a parameter {names}: nothing writes it")
    for array in op.signature.arrays:
        if array.name not in taken and problem.has(array.name):
            yield Finding(
                "unused", f"no kernel has a parameter `{array.name}`: is it read?", is_error=False
            )


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    """Say the same thing about several dtypes and architectures once."""
    where: dict[tuple[str, str, bool], list[str]] = {}
    for finding in findings:
        key = (finding.kind, finding.text, finding.is_error)
        where.setdefault(key, []).append(finding.where)
    folded = []
    for (kind, text, is_error), places in where.items():
        several = [place for place in dict.fromkeys(places) if place]
        shown = "; ".join(several[:2]) + (f"; {len(several) - 2} more" if several[2:] else "")
        folded.append(Finding(kind, text, shown, is_error=is_error))
    return folded
