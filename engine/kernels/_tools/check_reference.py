"""The reference's own check: it runs, returns the declared shapes, keeps its arguments, and is
finite for finite arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.kernels._tools.check_cases import Case
from engine.kernels._tools.check_compare import region
from engine.kernels._tools.check_report import Finding
from engine.kernels._user.files import in_line
from engine.kernels._user.op import Op

__all__ = ["run_reference"]

_INDEX_HINT = (
    "if an argument holds indices, say which are valid: "
    'inputs={"ids": lambda rng, call: rng.integers(0, call["V"], call["T"])}'
)


def run_reference(
    op: Op, case: Case, values: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return what the reference computes, by name of the result or written argument.

    None if it fails.
    """
    arguments = {  # copies: those that the op writes must not reach the kernel
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = op(**arguments)
    except Exception as error:
        text = str(error) if isinstance(error, EngineError) else _explained(op, error)
        return None, [Finding("reference", text + _empty_hint(case))]
    names = [array.name for array in op.signature.outputs]
    outputs = returned if len(names) > 1 else (returned,)
    wanted = dict(zip(names, outputs, strict=True)) if names else {}
    inout = [array.name for array in op.signature.arrays if array.is_inout]
    wanted |= {name: arguments[name] for name in inout if name not in case.omitted}
    return wanted, list(_not_finite(case, values, wanted))


def _explained(op: Op, error: Exception) -> str:
    hint = f"\n{_INDEX_HINT}" if isinstance(error, IndexError) else ""
    where = in_line(op.definition.file, error)
    return f"the reference fails{where}: {type(error).__name__}: {error}{hint}"


def _empty_hint(case: Case) -> str:
    empty = [name for name, size in case.sizes if size == 0]
    return f"\nif {empty[0]} is never 0, state where='{empty[0]} >= 1'" if empty else ""


def _not_finite(case: Case, values: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Finding]:
    """Return a warning if finite arguments give NaN or infinity; sums of nothing may."""
    arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
    if case.special or any(array.size == 0 for array in arrays):
        return []
    found = []
    for name, array in wanted.items():
        if array.dtype.kind in "fV":
            mask = ~np.isfinite(array.astype(np.float32))
            if mask.any():
                text = f"the reference is not finite for finite arguments, at {region(name, mask)}"
                found.append(Finding("not finite", text, is_error=False))
    return found
