"""What an override must return: shape and dtype of the results of an op, from its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine import device
from engine.dtypes import np_dtype
from engine.errors import ContractError
from engine.reference.sample import BAD_ID, OK, SampleResult

__all__ = ["RESULTS", "ROUTERS", "WRITERS", "check_results", "sample_result"]

Shape = tuple[int, ...]
Wanted = tuple[tuple[Shape, Any], ...]
Arguments = Mapping[str, Any]

_FLOAT32 = np.dtype(np.float32)


def _like(*names: str) -> Callable[[Arguments], Wanted]:
    return lambda a: tuple((tuple(a[name].shape), a[name].dtype) for name in names)


def _half(a: Arguments) -> Wanted:
    *rows, n = a["x"].shape
    return (((*rows, n if a.get("up") is not None else n // 2), a["x"].dtype),)


def _norm(a: Arguments) -> Wanted:
    return _like("x")(a) * (1 if a["residual"] is None else 2)


def _product(a: Arguments) -> Wanted:
    is_gated = a["activation"] in ("swiglu", "silu_and_mul")
    columns = a["weight"].shape[0] // (2 if is_gated else 1)
    dtype = a["x"].dtype if a.get("out_dtype") is None else a["out_dtype"]
    return (((a["x"].shape[0], columns), dtype),)


def _rows_of_table(a: Arguments) -> Wanted:
    return (((*a["token_ids"].shape, a["weight"].shape[1]), a["weight"].dtype),)


def _codes(a: Arguments) -> Wanted:
    m, k = a["x"].shape
    groups = max(1, math.ceil(k / (a["group"] or max(k, 1))))
    dtype = np.dtype(np.int8 if a["dtype"] == "int8" else np.uint8)
    return ((m, k), dtype), ((m, groups), _FLOAT32)


def _normed_codes(a: Arguments) -> Wanted:
    return (*_codes(a), *(() if a["residual"] is None else _like("x")(a)))


def _attended(a: Arguments) -> Wanted:
    q = a["q"]
    lse = ((tuple(q.shape[:-1]), _FLOAT32),) if a["return_lse"] else ()
    if a.get("quantize_out"):
        groups = max(1, math.ceil(q.shape[2] * q.shape[3] / 128))
        scales = (*q.shape[:2], groups), _FLOAT32
        return ((tuple(q.shape), np.dtype(np.uint8)), scales, *lse)
    return (*_like("q")(a), *lse)


def _of_pairs(a: Arguments) -> Wanted:
    rows = a["weight"].shape[2 if a["transposed"] else 1]
    shape = a["routing"].order.shape[0], rows if a["activation"] is None else rows // 2
    if a["quantize_out"]:
        groups = max(1, math.ceil(shape[1] / 128))
        return (shape, np.dtype(np.uint8)), ((shape[0], groups), _FLOAT32)
    return ((shape, a["x"].dtype if a.get("out_dtype") is None else a["out_dtype"]),)


def _of_tokens(a: Arguments) -> Wanted:
    dtype = a["x"].dtype if a.get("out_dtype") is None else a["out_dtype"]
    return (((a["routing"].experts.shape[0], a["weight"].shape[1]), dtype),)


def _summed_experts(a: Arguments) -> Wanted:
    t, _, n = a["pairs"].shape
    return (((t, n), a["pairs"].dtype),)


def _normed_experts(a: Arguments) -> Wanted:
    h = _like("residual")(a)
    if a["dtype"] is None:
        return h * 2
    return (*_codes(dict(a) | {"x": a["residual"]}), *h)


def _routed(a: Arguments) -> Wanted:
    tokens, num_experts = a["logits"].shape
    k = a["top_k"] + a["num_shared"]
    return _routing(tokens, k, num_experts, a["logits"].dtype)


def _sorted(a: Arguments) -> Wanted:
    tokens, k = a["ids"].shape
    return _routing(tokens, k, a["num_experts"], a["weights"].dtype)


def _routing(tokens: int, k: int, num_experts: int, dtype: Any) -> Wanted:
    int32 = np.dtype(np.int32)
    pairs = (tokens * k,)
    return ((tokens, k), int32), ((tokens, k), dtype), (pairs, int32), ((num_experts + 1,), int32)


RESULTS: dict[str, Callable[[Arguments], Wanted]] = {
    **dict.fromkeys(("silu", "gelu", "relu", "xielu", "clamp"), _like("x")),
    **dict.fromkeys(("sigmoid_gate", "residual_add"), _like("x")),
    **dict.fromkeys(("swiglu", "geglu"), _half),
    "all_reduce": _like("x"),
    "rmsnorm": _norm,
    "all_reduce_rmsnorm": _like("x", "residual"),
    **dict.fromkeys(("gemm", "gemm_wna16", "gemm_fp8", "gemm_int8"), _product),
    **dict.fromkeys(("rmsnorm_gemm", "rmsnorm_gemm_wna16"), _product),
    "embedding": _rows_of_table,
    "rope": _like("q", "k"),
    "quantize_rows": _codes,
    "rmsnorm_quantize": _normed_codes,
    "attention_decode": _attended,
    "attention_prefill": _attended,
    "mla_decode": _attended,
    "moe_route": _routed,
    "moe_sort": _sorted,
    "moe_gemm": _of_pairs,
    "moe_gemm_combine": _of_tokens,
    "moe_combine": _summed_experts,
    "moe_combine_rmsnorm": _normed_experts,
}
"""Op -> shape and dtype of its results. What other ops must return is not checked."""

ROUTERS = frozenset(("moe_route", "moe_sort"))
"""Ops that return a `Routing`; an override may return its four arrays as a plain tuple."""

WRITERS = frozenset(("kv_store", "qk_norm_rope_store", "mla_store", "kv_copy", "kv_swap"))
"""Ops that return nothing: they write into their arguments."""


def check_results(op: str, label: str, results: tuple[Any, ...], arguments: Arguments) -> None:
    """Compare an override's results with what the op must return.

    Raises
    ------
    ContractError
        If one has another shape or dtype, or is an array of another kind; the message shows both.
    """
    if op not in RESULTS:
        return
    on_gpu = any(map(device.is_cupy_array, arguments.values()))
    wanted = RESULTS[op](arguments)
    expected = tuple((shape, _dtype_name(dtype)) for shape, dtype in wanted)
    given = tuple(_of(result) for result in results)
    if given != expected:
        raise ContractError(
            f"{label} returned {_shown(given)}; {op} must return {_shown(expected)}"
        )
    for result in results:
        is_other = isinstance(result, np.matrix | np.ma.MaskedArray)
        if is_other or device.is_cupy_array(result) != on_gpu:
            kind = f"{type(result).__module__}.{type(result).__name__}"
            wanted_kind = "cupy.ndarray" if on_gpu else "numpy.ndarray"
            raise ContractError(f"{label} returned a {kind}; {op} must return a {wanted_kind} here")


def _dtype_name(dtype: Any) -> str:
    return str(np_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype))


def _of(result: Any) -> tuple[Any, str]:
    if not hasattr(result, "shape") or not hasattr(result, "dtype"):
        return None, type(result).__name__
    return tuple(result.shape), str(result.dtype)


def _shown(arrays: Any) -> str:
    texts = [name if shape is None else f"{shape} {name}" for shape, name in arrays]
    return " and ".join(texts) or "nothing"


def sample_result(token_ids: Any, logits: Any, num_logprobs: int | None) -> SampleResult:
    """Return the result of the op `sample` for the ids (R,) that a user's sampler chose.

    An id outside the vocabulary is reported as a row that cannot be sampled.
    """
    xp = device.array_module(logits)
    ids = xp.asarray(token_ids)
    if ids.shape != logits.shape[:1] or ids.dtype.kind not in "iu":
        raise ContractError(
            f"a sampler must return {logits.shape[:1]} token ids; got {ids.dtype} {ids.shape}"
        )
    is_known = (ids >= 0) & (ids < logits.shape[1])
    ids = xp.where(is_known, ids, 0).astype(np.int32)
    status = xp.where(is_known, np.int32(OK), np.int32(BAD_ID)).astype(np.int32)
    result = SampleResult(ids, status, None, None, None, xp.ones(len(ids), np.int32))
    if num_logprobs is None:
        return result
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    top_ids = xp.argsort(-logprobs, axis=1, kind="stable")[:, :num_logprobs].astype(np.int32)
    return result._replace(
        logprobs=xp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0],
        top_ids=top_ids,
        top_logprobs=xp.take_along_axis(logprobs, top_ids, axis=1),
    )
