"""Attention on JAX's arrays: dense batches, packed sequences, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype
from engine.integrations.jax._operators import Shapes, Struct, define, like, varying_alike
from engine.integrations.jax._patterns import pattern_of, pattern_option
from engine.kernels._attention import ScoreRule, check_count, check_heads
from engine.kernels._contract import MIRROR_FLOATS
from engine.kernels._prepared_call import constant

__all__ = ["attention", "attention_varlen"]


def _out_and_lse(q: Any, *_: Any, **__: Any) -> Shapes:
    return [like(q), Struct(q.shape[:-1], accumulation_dtype(q))]


def _input_gradients(dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Shapes:
    return [like(a) for a in (q, k, v)]


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
    """Packed sequences (T, H, D). `deterministic` and `max_seqlen_k` are for the gradient."""
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


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    pattern: Any,
    **options: Any,
) -> Any:
    return kernels.attention_backward(
        *(dout, q, k, v, out, lse),
        dlse=dlse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        pattern=pattern_of(pattern),
        **options,
    )


def _dense_forward(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    arrays: Any = (*_packed(q, k, v), *_starts(q, k), sinks)
    return _forward(*arrays, **options)


def _dense_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, **options: Any
) -> Any:
    arrays: Any = (*_packed(dout, q, k, v, out, lse, dlse), *_starts(q, k))
    return _backward(*arrays, **options)


def _packed(*arrays: Any) -> tuple[Any, ...]:
    """Return (B, S, ...) arrays as (B * S, ...)."""
    return tuple(
        None if a is None else a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in arrays
    )


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
    "attention_backward", _dense_backward, _input_gradients, rows=tuple(range(7)), merges=True
)
_VARLEN = define("attention_varlen", _forward, _out_and_lse)
_VARLEN_BACKWARD = define("attention_varlen_backward", _backward, _input_gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    options: Any, returns_lse: bool, q: Any, k: Any, v: Any, starts: Any, sinks: Any
) -> Any:
    """Return (out,) or (out, lse); `starts` is empty for a dense batch (B, S, H, D)."""
    if starts:
        results = _VARLEN(q, k, v, *starts, sinks, **dict(options))
    else:
        results = _DENSE(q, k, v, sinks, **dict(options))
    return results[: 1 + returns_lse]


def _residuals(options: Any, returns_lse: bool, *arrays: Any) -> Any:
    results = _attend(options, True, *arrays)
    return results[: 1 + returns_lse], (arrays, results)


def _gradient(options: Any, returns_lse: bool, kept: Any, cotangents: Any) -> Any:
    (q, k, v, starts, sinks), (out, lse) = kept
    dout, dlse = cotangents if returns_lse else (*cotangents, None)
    arrays = (dout, q, k, v, out, lse, dlse)
    if starts:
        gradients = _VARLEN_BACKWARD(*arrays, *starts, **dict(options))
    else:
        gradients = _DENSE_BACKWARD(*arrays, **dict(options))
    no_gradients = jax.tree.map(lambda _: None, starts)
    return (*gradients, no_gradients, _sinks_gradient(sinks, dout, out, lse, dlse))


_attend.defvjp(_residuals, _gradient)


def _sinks_gradient(sinks: Any, dout: Any, out: Any, lse: Any, dlse: Any) -> Any:
    """Return the gradient of the sink logits (H,): a sink takes weight, and its value is 0.

    In jnp, so that a batch of gradients (`vmap`) remains one call of the kernel for q, k and v.
    """
    if sinks is None:
        return None
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)  # (..., H)
    weights = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(sinks - lse))
    change = weights * ((0.0 if dlse is None else dlse) - delta)
    return jnp.sum(change, axis=tuple(range(lse.ndim - 1)))


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
    q : (B, Sq, H, D) array of float32, float16 or bfloat16; on CPUs also float64
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
    sinks : (H,) array, optional
        One extra logit per head that has no value: it adds exp(sink) to the softmax denominator.
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
    lse : (B, Sq, H) array of float32 (float64 for float64)
        Natural logarithm of the sum of exp(score), including exp(sink). Differentiable.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        When the call is traced. The message names the argument.

    Notes
    -----
    Differentiable with respect to q, k, v and sinks. There is no second derivative.

    Examples
    --------
    >>> q = k = jnp.ones((1, 2, 1, 4))
    >>> v = jnp.arange(8.0).reshape(1, 2, 1, 4)
    >>> attention(q, k, v, causal=True)[0, :, 0]
    Array([[0., 1., 2., 3.],
           [2., 3., 4., 5.]], dtype=float32)
    """
    call = TraceContract("attention")
    q = call.array("q", q, "B Sq H D", MIRROR_FLOATS)
    k = call.array("k", k, "B Sk K D", q.dtype)
    v = call.array("v", v, "B Sk K D", q.dtype)
    options = _checked_rule(call, causal, scale, window, softcap, pattern, deterministic)
    options |= {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    return _run(call, options, return_lse, q, k, v, (), sinks)


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
    lse : (Tq, H) array
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
    q = call.array("q", q, "Tq H D", MIRROR_FLOATS)
    k = call.array("k", k, "Tk K D", q.dtype)
    v = call.array("v", v, "Tk K D", q.dtype)
    starts_q = call.integers("cu_seqlens_q", cu_seqlens_q, "N+1")
    starts_k = call.integers("cu_seqlens_k", cu_seqlens_k, "N+1")
    options = _checked_rule(call, causal, scale, window, softcap, pattern, deterministic)
    options["max_seqlen_q"] = check_count(call, "max_seqlen_q", max_seqlen_q)
    options["max_seqlen_k"] = check_count(call, "max_seqlen_k", max_seqlen_k)
    return _run(call, options, return_lse, q, k, v, (starts_q, starts_k), sinks)


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


def _run(
    call: TraceContract,
    options: dict[str, Any],
    return_lse: bool,
    q: Any,
    k: Any,
    v: Any,
    starts: tuple[Any, ...],
    sinks: Any,
) -> Any:
    if sinks is not None:
        sinks = call.array("sinks", sinks, "H", MIRROR_FLOATS).astype(accumulation_dtype(q))
    q, k, v, sinks, *starts_ = varying_alike((q, k, v, sinks, *starts))
    results = _attend(tuple(options.items()), bool(return_lse), q, k, v, tuple(starts_), sinks)
    return results if return_lse else results[0]
