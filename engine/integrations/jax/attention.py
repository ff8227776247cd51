"""Attention on JAX's arrays: dense batches, packed sequences, and its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine import kernels
from engine.errors import ContractError
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._operators import Shapes, define, varying_alike
from engine.integrations.jax._patterns import pattern_of, pattern_option
from engine.kernels._attention import ScoreRule, check_count, check_heads, checked_sinks
from engine.kernels._contract import FLOATS
from engine.kernels._prepared_call import constant

__all__ = ["attention", "attention_varlen"]


def _struct(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _out_and_lse(q: Any, *_: Any, **__: Any) -> Shapes:
    return [_struct(q.shape, q.dtype), _struct(q.shape[:-1], jnp.float32)]


def _input_gradients(dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Shapes:
    return [_struct(a.shape, a.dtype) for a in (q, k, v)]


def _forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sinks: Any,
    *,
    pattern: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    deterministic: bool,
    **rule: Any,
) -> Any:
    """Packed sequences (T, H, D). `deterministic` is an option of the gradient."""
    return kernels.attention_prefill(
        *(q, k, v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sinks=sinks,
        pattern=pattern_of(pattern),
        max_seqlen_q=max_seqlen_q,
        return_lse=True,
        **rule,
    )


def _dense_forward(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    arrays: Any = (*_packed(q, k, v), *_starts(q, k), sinks)
    return _forward(*arrays, **options)


def _dense_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Any:
    lse = lse.reshape(-1, lse.shape[-1])
    arrays = (*_packed(dout, q, k, v, out), lse, *_starts(q, k))
    return _backward(*arrays, **options)


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Any,
) -> Any:
    return kernels.attention_backward(
        *(dout, q, k, v, out, lse),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **options,
    )


def _packed(*arrays: Any) -> tuple[Any, ...]:
    """Return (B, S, H, D) arrays as (B * S, H, D)."""
    return tuple(a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in arrays)


def _starts(*arrays: Any) -> tuple[Any, ...]:
    """Return the first row of each of the batch's sequences, then the end, for each array."""
    return tuple(
        _constant(np.arange(a.shape[0] + 1, dtype=np.int32) * np.int32(a.shape[1]), like=a)
        for a in arrays
    )


def _constant(values: np.ndarray[Any, Any], like: Any) -> Any:
    return values if isinstance(like, np.ndarray) else constant(values)


_DENSE = define("attention", _dense_forward, _out_and_lse, rows=(0, 1, 2), merges=True)
_DENSE_BACKWARD = define(
    "attention_backward", _dense_backward, _input_gradients, rows=tuple(range(6)), merges=True
)
_VARLEN = define("attention_varlen", _forward, _out_and_lse)
_VARLEN_BACKWARD = define("attention_varlen_backward", _backward, _input_gradients)


def _run_dense(options: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    return _DENSE(q, k, v, sinks, **dict(options))


def _dense_residuals(options: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    out, lse = _run_dense(options, q, k, v, sinks)
    return (out, lse), (q, k, v, sinks, out, lse)


def _dense_gradient(options: Any, residuals: Any, cotangents: Any) -> Any:
    q, k, v, sinks, out, lse = residuals
    dout = cotangents[0]
    gradients = _DENSE_BACKWARD(dout, q, k, v, out, lse, **_backward_options(options))
    return (*gradients, _sinks_gradient(sinks, dout, out, lse))


def _run_varlen(
    options: Any, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, sinks: Any
) -> Any:
    return _VARLEN(q, k, v, starts_q, starts_k, sinks, **dict(options))


def _varlen_residuals(options: Any, *arrays: Any) -> Any:
    out, lse = _run_varlen(options, *arrays)
    return (out, lse), (arrays, out, lse)


def _varlen_gradient(options: Any, residuals: Any, cotangents: Any) -> Any:
    (q, k, v, *starts, sinks), out, lse = residuals
    dout = cotangents[0]
    gradients = _VARLEN_BACKWARD(dout, q, k, v, out, lse, *starts, **_backward_options(options))
    return (*gradients, None, None, _sinks_gradient(sinks, dout, out, lse))


def _backward_options(options: Any) -> dict[str, Any]:
    kept: dict[str, Any] = dict(options)
    if kept.pop("pattern") is not None:
        raise ContractError("attention: pattern: must be None where a gradient is taken")
    return kept


def _sinks_gradient(sinks: Any, dout: Any, out: Any, lse: Any) -> Any:
    """Return the gradient of the sink logits (H,): a sink's value is 0, so it only takes weight."""
    if sinks is None:
        return None
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # (..., H)
    weights = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(sinks - lse))
    return -jnp.sum(weights * delta, axis=tuple(range(lse.ndim - 1)))


_attend_dense = jax.custom_vjp(_run_dense, nondiff_argnums=(0,))
_attend_dense.defvjp(_dense_residuals, _dense_gradient)
_attend_varlen = jax.custom_vjp(_run_varlen, nondiff_argnums=(0,))
_attend_varlen.defvjp(_varlen_residuals, _varlen_gradient)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any = None,
    pattern: kernels.BlockSparse | kernels.Periodic | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """Attend within each sequence of a batch: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (B, Sq, H, D) array of float32, float16 or bfloat16
        D <= 256.
    k, v : (B, Sk, K, D) arrays of q's dtype
        H is a multiple of K: query head h reads head h // (H // K).
    causal : bool
        Query i sees keys 0 to Sk - Sq + i. Otherwise every query sees all keys.
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    window : int
        Each query sees only its last `window` keys, including its own; 0 means no limit. Requires
        `causal`.
    softcap : float
        Replace a scaled score s by softcap * tanh(s / softcap); 0 means no cap.
    sinks : (H,) array of float32, optional
        One extra logit per head that has no value.
    pattern : BlockSparse or Periodic, optional
        Further restricts the keys that each query sees. See `engine.kernels.attention_prefill`.
    deterministic : bool
        Compute the same bits of the gradient every time. False may be faster.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : (B, Sq, H, D) array of q's dtype
        0 for a query that sees no key.
    lse : (B, Sq, H) array of float32
        Natural logarithm of the sum of exp(score); -inf for a query without keys and sink. No
        gradient flows through it.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        When the call is traced. The message names the argument.

    Examples
    --------
    >>> q = k = jnp.ones((1, 2, 1, 4))
    >>> v = jnp.arange(8.0).reshape(1, 2, 1, 4)
    >>> attention(q, k, v, causal=True)[0, :, 0]
    Array([[0., 1., 2., 3.],
           [2., 3., 4., 5.]], dtype=float32)
    """
    call = TraceContract("attention")
    q = call.array("q", q, "B Sq H D", FLOATS)
    k = call.array("k", k, "B Sk K D", q.dtype)
    v = call.array("v", v, "B Sk K D", q.dtype)
    options = _checked_rule(call, causal, scale, window, softcap, pattern, deterministic)
    options |= {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    sinks = checked_sinks(call, sinks)
    arrays = varying_alike((q, k, v, sinks))
    return _result(_attend_dense(tuple(options.items()), *arrays), return_lse)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any = None,
    pattern: kernels.BlockSparse | kernels.Periodic | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """Attend within packed sequences of any lengths. See `attention` for the other parameters.

    Parameters
    ----------
    q : (Tq, H, D) array of float32, float16 or bfloat16
        Query tokens of all sequences, concatenated.
    k, v : (Tk, K, D) arrays of q's dtype
    cu_seqlens_q, cu_seqlens_k : (N + 1,) arrays of integers
        First row of each sequence in q and in k, then the end: they rise from 0 to Tq and to Tk.
        Checked on CPUs only; on GPUs they are clamped to the arrays.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths. They are part of the program, as shapes are.

    Returns
    -------
    out : (Tq, H, D) array of q's dtype
    lse : (Tq, H) array of float32
        Only with `return_lse`.

    Examples
    --------
    >>> q = k = jnp.ones((3, 1, 4))
    >>> v = jnp.arange(12.0).reshape(3, 1, 4)
    >>> starts = jnp.array([0, 1, 3])  # one token, then two
    >>> attention_varlen(q, k, v, starts, starts, 2, 2)[:, 0, 0]
    Array([0., 6., 6.], dtype=float32)
    """
    call = TraceContract("attention_varlen")
    q = call.array("q", q, "Tq H D", FLOATS)
    k = call.array("k", k, "Tk K D", q.dtype)
    v = call.array("v", v, "Tk K D", q.dtype)
    starts_q = call.integers("cu_seqlens_q", cu_seqlens_q, "N+1")
    starts_k = call.integers("cu_seqlens_k", cu_seqlens_k, "N+1")
    options = _checked_rule(call, causal, scale, window, softcap, pattern, deterministic)
    options["max_seqlen_q"] = check_count(call, "max_seqlen_q", max_seqlen_q)
    options["max_seqlen_k"] = check_count(call, "max_seqlen_k", max_seqlen_k)
    sinks = checked_sinks(call, sinks)
    arrays = varying_alike((q, k, v, starts_q, starts_k, sinks))
    return _result(_attend_varlen(tuple(options.items()), *arrays), return_lse)


def _checked_rule(
    call: TraceContract,
    causal: bool,
    scale: float | None,
    window: int,
    softcap: float,
    pattern: Any,
    deterministic: bool,
) -> dict[str, Any]:
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    call.check("window", causal or not window, "0 unless causal", window)
    return {
        "causal": bool(causal),
        "scale": rule.scale,
        "window": rule.window,
        "softcap": rule.softcap,
        "pattern": pattern_option(call, pattern),
        "deterministic": bool(deterministic),
    }


def _result(results: Any, return_lse: bool) -> Any:
    out, lse = results
    return (out, jax.lax.stop_gradient(lse)) if return_lse else out
