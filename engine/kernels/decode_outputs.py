"""Outputs of a decode step, for the next step and the host: `cuda_src/decode_outputs.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import INT32, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["decode_outputs", "specs"]

_THREADS = 128
_KERNEL = Kernel(
    "decode_outputs",
    "token_ids:ptr status:ptr rows:ptr last_ids:ptr out:ptr num_tokens:i32 query_len:i32 "
    "num_rows:i32",
)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the module of the op: one for all dtypes, since the arrays are integers."""
    return (ModuleSpec("decode_outputs.cu", "float32"),)


def decode_outputs(
    token_ids: Any, status: Any, rows: Any, last_ids: Any, *, out: Any = None
) -> Any:
    """Store the last sampled ids for the next step, and stack ids and status for the host.

    Parameters
    ----------
    token_ids, status : (B, Q) array of int32
        Results of `sample`, for Q tokens per sequence.
    rows : (B,) array of int32
        Each sequence's request row, all distinct; padding is outside [0, S).
    last_ids : (S,) array of int32
        Last id sampled in each row; the op writes the id of the sequence's last token to it.
    out : (2, B, Q) array of int32, optional
        Array for the result.

    Returns
    -------
    (2, B, Q) array of int32
        The ids, then their status.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Examples
    --------
    >>> import numpy as np
    >>> i32 = lambda *values: np.array(values, np.int32)
    >>> last_ids = i32(1, 2, 3)
    >>> out = decode_outputs(i32([7, 9], [8, 4]), i32([0, 0], [0, 0]), i32(2, -1), last_ids)
    >>> out[0].tolist(), last_ids
    ([[7, 9], [8, 4]], array([1, 2, 9], dtype=int32))
    """
    call = Contract("decode_outputs")
    token_ids = call.array("token_ids", token_ids, "B Q", INT32)
    status = call.array("status", status, "B Q", INT32)
    rows = call.array("rows", rows, "B", INT32)
    last_ids = call.written("last_ids", last_ids, "S", INT32)
    if call.on_cpu:
        call.check_target(out, (2, call["B"], call["Q"]), INT32)  # before `last_ids` is written
        return call.finish(out, reference.decode_outputs(token_ids, status, rows, last_ids))
    num_tokens = call["B"] * call["Q"]
    out = call.output("out", out, (2, call["B"], call["Q"]), INT32)
    _KERNEL.launch(
        specs("float32")[0],
        (ceil_div(num_tokens, _THREADS),),
        (_THREADS,),
        token_ids=token_ids,
        status=status,
        rows=rows,
        last_ids=last_ids,
        out=out,
        num_tokens=num_tokens,
        query_len=call["Q"],
        num_rows=call["S"],
    )
    return out
