"""Merge of partial attention results: `cuda_src/merge_states.cu`, `reference/merge_states.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._elementwise import is_aligned, is_large, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["merge_states", "specs"]

_THREADS = 256  # kThreads in CUDA
_PARAMS = (
    "outputs:ptr rest:ptr lses:ptr rest_lses:ptr rest_stride:i64 rest_lse_stride:i64 out:ptr "
    "lse_out:ptr num_rows:i64 num_states:i32 head_dim:i32 rows_per_block:i32 is_large:i32"
)
_VECTOR = Kernel("merge_states_vector", _PARAMS, struct="MergeStatesParams")
_PAIRS = Kernel(
    "merge_states_pairs", _PARAMS, struct="MergeStatesParams"
)  # two states, two rows per thread
_SCALAR = Kernel("merge_states_scalar", _PARAMS, struct="MergeStatesParams")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("merge_states.cu", dtype),)


def merge_states(
    outputs: Any | Sequence[Any], lses: Any | Sequence[Any], *, out: Any = None
) -> tuple[Any, Any]:
    """Merge attention over parts of the keys into attention over all of them.

    Parameters
    ----------
    outputs : (S, T, H, D) array of float32, float16 or bfloat16, or a pair of (T, H, D) arrays
        softmax(scores) V over each of the S parts.
    lses : (S, T, H) array of float32, or a pair of (T, H) arrays
        Natural logarithm of the sum of exp(score) over each part. -inf means that the query sees no
        key of the part; its output is then ignored.
    out : (T, H, D) array of the outputs' dtype, optional
        Array for the result; may be one of the outputs.

    Returns
    -------
    out : (T, H, D) array of the outputs' dtype
        0 if every part is empty.
    lse : (T, H) array of float32
        Log-sum-exp over all parts; -inf if every part is empty.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    With m the largest lse and w_s = exp(lse_s - m): out = sum of w_s outputs_s / sum of w_s and
    lse = m + log(sum of w_s), in float32, summed in the order of the parts, rounded once [1]_. The
    result is exact up to this rounding and the rounding of the parts.

    References
    ----------
    .. [1] Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023; Ye et al.:
       FlashInfer, arXiv:2501.01005.

    Examples
    --------
    >>> import numpy as np
    >>> outputs = np.array([[[[1.0]]], [[[4.0]]]], np.float32)
    >>> lses = np.log(np.array([[[1.0]], [[2.0]]], np.float32))  # the second weighs twice as much
    >>> out, lse = merge_states(outputs, lses)
    >>> out.round(3), np.exp(lse).round(3)
    (array([[[3.]]], dtype=float32), array([[3.]], dtype=float32))
    """
    call = Contract("merge_states")
    outputs = _states(call, "outputs", outputs, "T H D", FLOATS)
    call.check("outputs", call["D"] > 0, "of D = 1 or more", call["D"])
    lses = _states(call, "lses", lses, "T H", FLOAT32)
    if call.on_cpu:
        result, lse = reference.merge_states(outputs, lses)
        return call.finish(out, result), lse
    first = outputs[0]
    out = call.output("out", out, first.shape, first.dtype)
    lse = call.xp.empty(first.shape[:2], np.float32)
    _launch(outputs, lses, out, lse)
    return out, lse


def _states(call: Contract, name: str, value: Any, shape: str, dtype: Any) -> Any:
    """Check an array of S states, or a pair of arrays (returned as a pair)."""
    if not isinstance(value, tuple | list):
        array = call.array(name, value, f"S {shape}", dtype)
        call.check(name, call["S"] > 0, "of one state or more", array.shape)
        return array
    call.check(name, len(value) == 2, "one array or a pair", f"{len(value)} arrays")
    bound = call.bind("S", len(value), name)
    call.check(name, bound == 2, f"of S = {bound} states, as outputs", "a pair")
    first = call.array(f"{name}[0]", value[0], shape, dtype)
    return first, call.array(f"{name}[1]", value[1], shape, first.dtype)


def _launch(outputs: Any, lses: Any, out: Any, lse: Any) -> None:
    num_states = len(outputs)
    first = outputs[0]
    rest, rest_lses = (x[1] if num_states > 1 else x[0] for x in (outputs, lses))
    head_dim = first.shape[2]
    num_rows = first.shape[0] * first.shape[1]
    width = vector_width(first)
    fits = head_dim % width == 0 and is_aligned(first, rest, out)
    items = head_dim // width if fits else head_dim
    rows_per_block = _THREADS // min(items, _THREADS)
    is_pairs = bool(fits and num_states <= 2 and is_large(out))
    kernel = _PAIRS if is_pairs else _VECTOR if fits else _SCALAR
    kernel.launch(
        specs(dtype_name(first.dtype))[0],
        (ceil_div(num_rows, rows_per_block * (2 if is_pairs else 1)),),
        (_THREADS,),
        outputs=first,
        rest=rest,
        lses=lses[0],
        rest_lses=rest_lses,
        rest_stride=first.size,
        rest_lse_stride=lse.size,
        num_states=num_states,
        out=out,
        lse_out=lse,
        num_rows=num_rows,
        head_dim=head_dim,
        rows_per_block=rows_per_block,
        is_large=is_large(out),
    )
