"""compute-sanitizer on a user's kernel: a few calls in child processes, and its findings in words
with the source line."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine import device
from engine.errors import DeviceError
from engine.kernels._tools.check_cases import Case, make_inputs
from engine.kernels._tools.check_placement import placed_call
from engine.kernels._tools.check_reference import run_reference
from engine.kernels._tools.check_report import CheckReport, Finding
from engine.kernels._tools.worker import Worker, WorkerFailure
from engine.kernels._user.op import Op

__all__ = ["TOOLS", "read_findings", "sanitize"]

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
"""Tools of compute-sanitizer."""

_SECONDS = 120.0  # longest time of a call under the tool
_MAX_CASES = 8
_KINDS = ("one", "odd", "uneven", "asked")
_HEAD = re.compile(r"^=+ ?")
_PLACE = re.compile(r"(?:in|at) (?:\S*/)?([\w.-]+\.cuh?):(\d+)")
_STARTS = re.compile(
    r"Invalid|Uninitialized|Error: |ERROR: |Warning: Race|Barrier error|Misaligned|Potential|"
    r"Race reported|Divergent"
)
_ACCESS = re.compile(r"(Read|Write|Atomic) access at \S+ in (\S+)")
_WORDS = (
    (
        r"Invalid __\w+__ (\w+) of size (\d+) bytes.* is misaligned.*",
        r"a \1 of \2 bytes at an address that is no multiple of \2",
    ),
    (
        r"Invalid __global__ (\w+) of size (\d+) bytes.* is (\S+ bytes \w+) the nearest allocation "
        r"at \w+ of size (\S+ bytes).*",
        r"a \1 of \2 bytes outside every array: \3 the nearest one, of \4",
    ),
    (r"Invalid __global__ (\w+) of size (\d+) bytes.*", r"a \1 of \2 bytes outside every array"),
    (r"Invalid __shared__ (\w+) of size (\d+) bytes.*", r"a \1 of \2 bytes outside shared memory"),
    (r"Invalid __local__ (\w+) of size (\d+) bytes.*", r"a \1 of \2 bytes outside a local array"),
    (
        r"Uninitialized __(\w+)__ memory read of size (\d+) bytes.*",
        r"a read of \2 bytes of \1 memory that nothing has written",
    ),
    (r".*Barrier error detected\.? ?(.*?)\.?", r"a barrier that not all threads reach: \1"),
)


def sanitize(
    op: Op, tool: str, cases: Sequence[Case], seed: int, report: CheckReport
) -> list[Finding]:
    """Run a few of the calls under a tool of compute-sanitizer; return what it found.

    Raises
    ------
    DeviceError
        If there is no GPU, or compute-sanitizer is not installed.
    """
    program = _program()
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        raise DeviceError(f"compute-sanitizer needs a GPU: {reason}")
    dtype = cases[0].dtype
    few = [
        case
        for case in cases
        if case.kind in _KINDS and case.dtype == dtype and case.view in ("", "misaligned")
    ]
    few.sort(key=lambda case: bool(case.view or case.omitted or case.changed))
    findings: list[Finding] = []
    for case in few[:_MAX_CASES]:
        findings += _sanitized(op, program, tool, case, seed, report)
    return findings


def _program() -> str:
    found = shutil.which("compute-sanitizer")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if found is None and variable in os.environ:
            found = shutil.which("compute-sanitizer", path=f"{os.environ[variable]}/bin")
    found = found or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise DeviceError(
            "compute-sanitizer is not installed: it comes with the CUDA toolkit (conda: "
            "`conda install -c nvidia cuda-sanitizer-api`); put it on PATH, or set CUDA_HOME"
        )
    return found


def _sanitized(
    op: Op, program: str, tool: str, case: Case, seed: int, report: CheckReport
) -> Iterator[Finding]:
    values = make_inputs(op, case, seed)
    wanted, failed = run_reference(op, case, values)
    if wanted is None:
        yield from failed
        return
    call = replace(placed_call(op, case, values, wanted), guard=0, is_full=False, has_graph=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        prefix = [program, "--tool", tool, "--log-file", str(log), "--print-limit", "100"]
        worker = Worker(op, _SECONDS, prefix, exact=True)
        trouble = ""
        try:
            answer = worker.call(call)
            trouble = answer.error[1] if answer.error else ""
        except WorkerFailure as error:
            trouble = str(error)
        report.device = worker.device
        report.num_calls += 1
        worker.close()
        text = log.read_text(errors="replace") if log.exists() else ""
    found = list(read_findings(text, tool, op.source.current().text, op.source.current().label))
    for each in found:
        yield replace(each, where=str(case))
    if trouble and not found:
        yield Finding(tool, f"the call fails under {tool}: {trouble}", str(case))


def read_findings(log: str, tool: str, source: str, label: str) -> Iterator[Finding]:
    """Yield the findings of a log, each place once.

    Parameters
    ----------
    log : str
        What the tool wrote.
    tool : str
    source, label : str
        The CUDA text and its name, to show the line.
    """
    seen = set()
    code = source.splitlines()
    for block in _blocks(log):
        text = _in_words(block)
        places = list(dict.fromkeys(found.groups() for found in map(_PLACE.search, block) if found))
        where = f"{places[0][0]}:{places[0][1]}: " if places else ""
        if (where, block[0]) in seen:
            continue
        seen.add((where, block[0]))
        thread = next((f", {line}" for line in block if line.startswith("by thread")), "")
        lines = [f"{where}{text}{thread}"]
        for file, number in places:
            if file == label and int(number) <= len(code):
                lines.append(f"    {number} | {code[int(number) - 1].strip()}")
        yield Finding(tool, "\n".join(lines))


def _blocks(log: str) -> Iterator[list[str]]:
    """Yield the lines of each finding, without the marks and the host's backtrace."""
    block: list[str] = []
    for raw in [*log.splitlines(), "========="]:
        line = _HEAD.sub("", raw).strip()
        if _STARTS.match(line) or not line or line.startswith(("Saved host", "Host Frame")):
            if block:
                yield block
            block = []
        if _STARTS.match(line):
            block = [line]
        elif block and line:
            block.append(line)


def _in_words(block: Sequence[str]) -> str:
    more = [line for line in block[1:] if line.startswith(("and ", "Access to", "Address"))]
    text = " ".join([block[0], *more])
    if accesses := _ACCESS.findall(text):
        both = " and ".join(f"a {kind.lower()} in {place}" for kind, place in accesses)
        return f"a race in shared memory: {both}, without a __syncthreads() in between"
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, text):
            return found.expand(words)
    return text
