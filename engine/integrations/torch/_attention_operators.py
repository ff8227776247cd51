"""The operators of attention with a derivative: `torch.ops.engine.attention` and its gradients.

A dense batch is not copied if two of its axes can be merged: (B, S, H, D) becomes packed sequences
(B*S, H, D), and (B, H, S, D) one sequence with B*H heads, (S, B*H, D).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine import kernels
from engine.dtypes import accumulation_dtype
from engine.integrations.torch import _tensors
from engine.integrations.torch._core import contiguous, define, int_constant, new_array
from engine.integrations.torch._transforms import looped, operator_of
from engine.kernels._attention_pattern import numbered
from engine.kernels._contract import MIRROR_FLOATS, Contract

__all__ = ["ATTENTION"]

# Arguments after the tensors. q is (B, S, H, D), or (B, H, S, D) if `heads_first`, or (T, H, D)
# with cu_seqlens; lse is (B, S, H), (S, B, H) or (T, H). With `heads_first` sinks are (B*H,).
# Without cu_seqlens, max_seqlen is ignored.
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, float? scale, int window, "
    "float softcap, int pattern, bool heads_first, bool deterministic"
)


class _Options(NamedTuple):
    """Arguments after the tensors, in the order of `_OPTIONS`."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    scale: float | None
    window: int
    softcap: float
    pattern: int
    heads_first: bool
    deterministic: bool

    def rule(self) -> dict[str, Any]:
        """Return the kernels' arguments that define the scores."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "pattern": numbered(self.pattern),
        }


def _attention(
    q: Any, k: Any, v: Any, sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *rest: Any
) -> tuple[Any, Any]:
    options = _Options(*rest)
    heads_first = options.heads_first
    if cu_seqlens_q is None:
        _check_batch(q, k, v, heads_first)
    out = new_array(q.shape, q.dtype, q)
    lse = new_array(_statistics_shape(q.shape, heads_first), accumulation_dtype(q.dtype), q)
    sequences = _sequences(q, k, cu_seqlens_q, cu_seqlens_k, options)
    del sequences["max_seqlen_k"]  # only the backward pass bounds it
    kernels.attention_prefill(
        _rows(q, heads_first),
        _rows(k, heads_first),
        _rows(v, heads_first),
        **sequences,
        **options.rule(),
        sinks=sinks,
        out=_rows(out, heads_first),
        return_lse=True,
        lse_out=_statistics(lse, heads_first),
    )
    return out, lse


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    sinks: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *rest: Any,
) -> tuple[Any, ...]:
    options = _Options(*rest)
    heads_first = options.heads_first
    grads = {
        f"d{name}": new_array(x.shape, x.dtype, q) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    rows: Any = [_rows(x, heads_first) for x in (dout, q, k, v, out)]
    results = kernels.attention_backward(
        *rows,
        _statistics(lse, heads_first),
        **_sequences(q, k, cu_seqlens_q, cu_seqlens_k, options),
        **options.rule(),
        sinks=sinks,
        dlse=None if dlse is None else _statistics(dlse, heads_first),
        deterministic=options.deterministic,
        **{name: _rows(x, heads_first) for name, x in grads.items()},  # type: ignore[misc]
    )
    return (*grads.values(), *results[3:])


def _check_batch(q: Any, k: Any, v: Any, heads_first: bool) -> None:
    """Check the axes of a dense batch, which the kernels see merged."""
    call = Contract("attention")
    q_axes, k_axes = ("B H Sq D", "B K Sk D") if heads_first else ("B Sq H D", "B Sk K D")
    call.array("q", q, q_axes, MIRROR_FLOATS, layout="any")
    call.array("k", k, k_axes, q.dtype, layout="any")
    call.array("v", v, k_axes, q.dtype, layout="any")


def _rows(x: Any, heads_first: bool) -> Any:
    """Return (B, S, H, D), or (B, H, S, D) if `heads_first`, as a view (tokens, heads, D)."""
    if x.size and (0 in x.strides or x.strides[-1] != x.itemsize):
        x = contiguous(x)  # TMA does not support the stride 0 of an expanded tensor
    if x.ndim == 3:
        return x
    merged = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return merged.transpose(1, 0, 2) if heads_first else merged


def _statistics(x: Any, heads_first: bool) -> Any:
    """Return (B, S, H), or (S, B, H) if `heads_first`, as (tokens, heads)."""
    if x.ndim == 2:
        return x
    a, b, c = x.shape
    return contiguous(x).reshape(*((a, b * c) if heads_first else (a * b, c)))


def _statistics_shape(shape: Any, heads_first: bool) -> tuple[int, ...]:
    """Return the shape of lse for a q of this shape."""
    if heads_first:
        return (shape[2], shape[0], shape[1])
    return tuple(shape[:-1])


def _sequences(
    q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: _Options
) -> dict[str, Any]:
    """Return the kernels' arguments that locate the sequences of a dense or a packed batch."""
    max_seqlen_q = options.max_seqlen_q
    max_seqlen_k = options.max_seqlen_k
    if cu_seqlens_q is None:
        (count, max_seqlen_q) = (1, q.shape[2]) if options.heads_first else q.shape[:2]
        max_seqlen_k = k.shape[2 if options.heads_first else 1]
        cu_seqlens_q = int_constant([i * max_seqlen_q for i in range(count + 1)], q)
        cu_seqlens_k = int_constant([i * max_seqlen_k for i in range(count + 1)], q)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def _options_of(arguments: tuple[Any, ...]) -> _Options:
    return _Options(*arguments[-len(_Options._fields) :])


def _fake(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    heads_first = _options_of(args).heads_first
    shape = _statistics_shape(q.shape, heads_first)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=_tensors.accumulation_dtype(q.dtype))


def _fake_backward(dout: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:3])


def _fake_sinks_backward(dout: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    sinks = args[6]
    return (*_fake_backward(dout, *args), sinks.new_empty(sinks.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.pattern = numbered(
        _Options(*ctx.options).pattern
    )  # a number does not keep its pattern alive
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens_q, cu_seqlens_k)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    *needed, needs_sinks = ctx.needs_input_grad[:4]
    operator = _SINKS_BACKWARD if needs_sinks else _BACKWARD
    grads = operator(
        *(dout, q, k, v, out, lse, dlse, sinks if needs_sinks else None),
        *(cu_seqlens_q, cu_seqlens_k, *ctx.options),
    )
    wanted = [grad if need else None for grad, need in zip(grads[:3], needed, strict=True)]
    return (*wanted, grads[3] if needs_sinks else None, *[None] * (2 + len(ctx.options)))


def _vmap(name: str, rows: range, statistics: tuple[int, ...], sinks: int) -> Any:
    """Return a vmap rule: the mapped axis of a dense batch becomes a part of its batch axis.

    `rows` and `statistics` are the positions of the arguments shaped like q and like lse; `sinks`
    is the position of the sinks.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        heads_first = _options_of(args).heads_first
        batch_axis = {i: 0 for i in rows} | {i: int(heads_first) for i in statistics}
        is_packed = args[sinks + 1] is not None
        size = info.batch_size
        is_shared = all(d is None or i in batch_axis for i, d in enumerate(in_dims))
        if is_packed or not is_shared or size == 0:  # no batch would leave no head to heads_first
            return looped(name)(info, in_dims, *args)
        ready = list(args)
        for i, axis in batch_axis.items():
            if args[i] is not None:
                ready[i] = _merged(args[i], in_dims[i], axis, size)
        if heads_first and args[sinks] is not None:
            ready[sinks] = args[sinks].repeat(size)
        results = operator_of(name)(*ready)
        axes = (0, int(heads_first)) if name == "attention" else (0, 0, 0)
        return tuple(x.unflatten(a, (size, -1)) for x, a in zip(results, axes, strict=True)), axes

    return rule


def _merged(x: torch.Tensor, dim: int | None, axis: int, size: int) -> torch.Tensor:
    """Return x with its mapped axis `dim`, or `size` copies, in front of its batch axis."""
    x = (
        x.movedim(dim, axis)
        if dim is not None
        else x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
    )
    return x.flatten(axis, axis + 1)


ATTENTION = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, "
    f"Tensor? cu_seqlens_k, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention,
    _fake,
    backward=_differentiate,
    setup_context=_setup,
    vmap=_vmap("attention", range(3), (), 3),
)
_GRADIENT_ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {_OPTIONS}"
)
_BACKWARD = define(
    f"attention_backward({_GRADIENT_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    vmap=_vmap("attention_backward", range(5), (5, 6), 7),
)
_SINKS_BACKWARD = define(
    f"attention_sinks_backward({_GRADIENT_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_sinks_backward,
)
