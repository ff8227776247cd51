"""Attention on tensors: dense batches, packed sequences, torch's own signature."""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.errors import ContractError, ShapeError
from engine.integrations.torch._attention_operators import ATTENTION
from engine.integrations.torch._core import to_autocast_dtype
from engine.integrations.torch._tensors import accumulation_dtype
from engine.kernels._attention_pattern import Pattern

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    pattern: Pattern | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """Attend within each sequence of a batch: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (B, Sq, H, D) tensor of float32, float16 or bfloat16 (on the CPU also float64)
        D <= 256. Views are not copied if their last axis is contiguous and either B and S or, as in
        a transposed (B, H, S, D) tensor, B and H can be merged.
    k, v : (B, Sk, K, D) tensors of q's dtype
        H is a multiple of K: query head h reads head h // (H // K).
    causal : bool
        Query i sees keys 0 to Sk - Sq + i: the last query sees all keys. This differs from torch's
        `is_causal` if Sq != Sk.
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    window : int
        Each query sees only its last `window` keys, including its own; 0 means no limit. Requires
        `causal`.
    softcap : float
        Replace a scaled score s by softcap * tanh(s / softcap); 0 means no cap.
    sinks : (H,) tensor, optional
        One extra logit per head that has no value: it adds exp(sink) to the softmax denominator.
        Differentiable.
    pattern : engine.kernels.BlockSparse or engine.kernels.Periodic, optional
        Further restricts the keys that each query sees. See `engine.kernels.attention_prefill`.
        Create it once, and keep it as long as compiled code or a captured graph uses it. Both
        refer to it by a number of this process: do not save an exported program with a pattern.
    deterministic : bool
        Return the same gradients every time. False lets the kernels add to dq in any order.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : (B, Sq, H, D) tensor of q's dtype
        In the memory order of q, if that is not copied. 0 for a query that sees no key.
    lse : (B, Sq, H) tensor of float32 (float64 for float64)
        Natural logarithm of the sum of exp(score), including exp(sink). Differentiable.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract of `engine.kernels.attention_prefill`.

    Notes
    -----
    Under autocast q, k and v are cast to its dtype. There is no second derivative.

    Examples
    --------
    >>> q = torch.ones(1, 2, 1, 4)
    >>> v = torch.tensor([0.0, 2.0])[:, None, None].expand(1, 2, 1, 4)
    >>> attention(q, q, v, causal=True)[0, :, 0]
    tensor([[0., 0., 0., 0.],
            [1., 1., 1., 1.]])
    """
    for name, x, axes in (("q", q, "Sq, H"), ("k", k, "Sk, K"), ("v", v, "Sk, K")):
        if x.dim() != 4:
            wanted = f"attention: {name}: must have shape (B, {axes}, D)"
            raise ShapeError(f"{wanted}; got {tuple(x.shape)}")
    options = (causal, scale, window, softcap, pattern, deterministic)
    out, lse = _dense(q, k, v, sinks, options, heads_first=False)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    pattern: Pattern | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """Attend within packed sequences. See `attention` for the other parameters.

    Parameters
    ----------
    q : (Tq, H, D) tensor
        Query tokens of all sequences, concatenated; heads and tokens may be strided.
    k, v : (Tk, K, D) tensors
    cu_seqlens_q, cu_seqlens_k : (N+1,) tensors of int32
        First row of each sequence in q and in k, then the end: they rise from 0 to Tq and to Tk.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the sequence lengths; nothing is read back from the GPU. Round them up: each
        new pair prepares the launches again.

    Returns
    -------
    out : (Tq, H, D) tensor of q's dtype
    lse : (Tq, H) tensor of float32 (float64 for float64)

    Examples
    --------
    >>> q = torch.ones(3, 1, 4)
    >>> ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> attention_varlen(q, q, q, ends, ends, 2, 2, causal=True)[:, 0, 0]
    tensor([1., 1., 1.])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            wanted = f"attention_varlen: {name}: must have shape (tokens, heads, D)"
            raise ShapeError(f"{wanted}; got {tuple(x.shape)}")
    options = (causal, scale, window, softcap, pattern, deterministic)
    q, k, v = to_autocast_dtype(q, k, v)
    starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = ATTENTION(q, k, v, _as_logits(sinks, q), *starts, *_checked(options, False))
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend as `torch.nn.functional.scaled_dot_product_attention` does, without mask or dropout.

    Parameters
    ----------
    query : (..., H, L, E) tensor of float32, float16 or bfloat16 (on the CPU also float64)
    key, value : (..., K, S, E) tensors of query's dtype
    attn_mask : None
        A mask is an error: use `is_causal`, or `attention` with a window or a pattern.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Query i sees keys 0 to i. L > S is an error.
    scale : float, optional
        Factor on the scores, by default E**-0.5.
    enable_gqa : bool
        Allow H to be a multiple of K.

    Returns
    -------
    out : (..., H, L, E) tensor of query's dtype

    Raises
    ------
    ContractError
        If an argument is not supported; see also `attention`.

    Examples
    --------
    >>> x = torch.ones(1, 1, 2, 4)
    >>> torch.equal(scaled_dot_product_attention(x, x, x, is_causal=True), x)
    True
    """
    _check(attn_mask is None, "attn_mask", "None (see attention(window=, pattern=))", "a tensor")
    _check(dropout_p == 0, "dropout_p", "0", dropout_p)
    _check_leading_axes(query=query, key=key, value=value)
    heads = query.shape[-3]
    kv_heads = key.shape[-3]
    wanted = f"True for {heads} heads of query and {kv_heads} of key"
    _check(enable_gqa or heads == kv_heads, "enable_gqa", wanted, enable_gqa)
    length = query.shape[-2]
    if is_causal and key.shape[-2] != length:
        wanted = f"False for {length} queries and {key.shape[-2]} keys"
        _check(key.shape[-2] > length, "is_causal", wanted, is_causal)
        key = key[..., :length, :]
        value = value[..., :length, :]
    q, k, v = (_four_axes(x) for x in (query, key, value))
    options = (is_causal, scale, 0, 0.0, None, True)
    out, _ = _dense(q, k, v, None, options, heads_first=True)
    return out if query.dim() == 4 else out.reshape(query.shape)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: tuple[Any, ...],
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within a dense batch; lse is (B, S, H) in any case."""
    q, k, v = to_autocast_dtype(q, k, v)
    tensors = (q, k, v)
    if q.shape[0] == 0:  # merged with the heads, it would leave no head
        is_swapped = heads_first
    else:
        is_swapped = not all(map(_merges, tensors)) and all(map(_merges_if_swapped, tensors))
    if is_swapped:
        heads_first = not heads_first
        tensors = tuple(x.transpose(1, 2) for x in tensors)
    sinks = _as_logits(sinks, q)
    if sinks is not None and heads_first:
        batch, heads = tensors[0].shape[:2]
        if sinks.shape != (heads,):
            wanted = f"attention: sinks: must have shape ({heads},), the heads of q"
            raise ShapeError(f"{wanted}; got {tuple(sinks.shape)}")
        sinks = sinks.repeat(batch)
    packed = (None, None, 0, 0)
    out, lse = ATTENTION(*tensors, sinks, *packed, *_checked(options, heads_first))
    if heads_first:
        lse = lse.transpose(0, 1)
    return out.transpose(1, 2) if is_swapped else out, lse


def _merges(x: torch.Tensor) -> bool:
    """Tell whether the first two axes of x can be merged without a copy."""
    return bool(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))


def _merges_if_swapped(x: torch.Tensor) -> bool:
    return bool(x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2))


def _checked(options: tuple[Any, ...], heads_first: bool) -> tuple[Any, ...]:
    """Return the operator's arguments from `causal` on, in its order."""
    causal, scale, window, softcap, pattern, deterministic = options
    number = 0 if pattern is None else pattern.number
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return causal, scale, window, softcap, number, heads_first, deterministic


def _as_logits(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if sinks is None:
        return None
    return sinks.to(accumulation_dtype(q.dtype))


def _four_axes(x: torch.Tensor) -> torch.Tensor:
    """Merge or add leading axes: (..., H, S, D) -> (B, H, S, D)."""
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _check_leading_axes(**tensors: torch.Tensor) -> None:
    """Check what `_four_axes` would merge: (2, 3) and (3, 2) sequences would pass for equal."""
    lead = tensors["query"].shape[:-3]
    for name, x in tensors.items():
        shape = tuple(x.shape)
        wanted = "of at least three axes, (..., heads, tokens, E)"
        _check(len(shape) >= 3, name, wanted, shape)
        if x.dim() != 4 or len(lead) != 1:  # else the operator names the axis
            wanted = f"of the leading axes {tuple(lead)} of query"
            _check(x.shape[:-3] == lead, name, wanted, shape)


def _check(ok: bool, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise ContractError(f"scaled_dot_product_attention: {name}: must be {wanted}; got {got!r}")
