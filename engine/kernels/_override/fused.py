"""Fused ops as their parts: where a part is overridden, or an override lacks a keyword.

A keyword may bring a part into an op: ``gemm(activation="swiglu")`` contains `swiglu`. A `Step`
takes it off: it calls the op without the keyword, and the part before or after it. An op such as
`rmsnorm_gemm` consists of parts altogether: `WHOLES` composes it. Parts that cannot be taken out
are named in `KEPT`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.device import array_module, empty_like
from engine.kernels._attention import even_starts
from engine.kernels._override.arrays import copy_into
from engine.kernels._override.dispatch import run

__all__ = ["KEPT", "SENDERS", "STEPS", "WHOLES", "Step", "stepwise"]

Options = dict[str, Any]
Rest = Callable[..., Any]
Parts = Callable[[Options], Collection[str]]

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Step:
    """A part of an op that its keywords bring in.

    Attributes
    ----------
    keywords : tuple of str
        The part runs if the first one is given.
    parts : callable
        ``parts(options)``: names of the ops it consists of; empty if it cannot be taken off.
    split : callable
        ``split(rest, args, options)``: the op, with ``rest(*args, **options)`` for what remains.
    """

    keywords: tuple[str, ...]
    parts: Parts
    split: Callable[[Rest, tuple[Any, ...], Options], Any]

    def is_in(self, options: Options) -> bool:
        """Tell whether a call with these keywords contains the part, and it can be taken off."""
        return options.get(self.keywords[0]) is not None and bool(self.parts(options))


def stepwise(
    op: str,
    is_wanted: Callable[[Step, Options], bool],
    rest: Rest,
    *args: Any,
    **options: Any,
) -> Any:
    """Take off the steps of `op` that are wanted, the last one first; call `rest` without them."""
    for step in STEPS.get(op, ()):
        if step.is_in(options) and is_wanted(step, options):
            return step.split(partial(stepwise, op, is_wanted, rest), args, options)
    return rest(*args, **options)


def _without(options: Options, *names: str) -> Options:
    return {name: value for name, value in options.items() if name not in names}


# ---- steps

_ACTIVATIONS: dict[str, tuple[str, Options]] = {
    "swiglu": ("swiglu", {}),
    "geglu": ("geglu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "relu": ("relu", {}),
}


def _activations(options: Options) -> Collection[str]:
    known = _ACTIVATIONS.get(options["activation"])
    if known is None or options.get("scatter"):  # routing weights are multiplied after it
        return ()
    return (known[0],)


def _activate(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    if options.get("residual") is not None:  # it is added after the activation
        return _add(partial(_activate_rest, rest), args, options)
    if options.get("quantize_out"):
        return _quantize_out(partial(_activate_rest, rest), args, options)
    op, more = _ACTIVATIONS[options["activation"]]
    y = rest(*args, **_without(options, "activation", "out"))
    return run(op, y, out=options.get("out"), **more)


def _activate_rest(rest: Rest, *args: Any, **options: Any) -> Any:
    return _activate(rest, args, options)


def _add(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    y = rest(*args, **_without(options, "residual", "out"))
    return run("residual_add", y, options["residual"], out=options.get("out"))


def _add_first(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    """Add the residual of `rmsnorm` or `rmsnorm_quantize`, then normalise the sum."""
    x, *others = args
    h = run("residual_add", x, options["residual"], out=options.get("residual_out"))
    y = rest(h, *others, **_without(options, "residual", "residual_out", "x_scale"))
    return (*y, h) if isinstance(y, tuple) else (y, h)


def _normalise(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    x, *others = args
    norm = {name: options[name] for name in ("eps", "weight_offset") if name in options}
    y = run("rmsnorm", x, options["norm_weight"], **norm)
    return rest(y, *others, **_without(options, "norm_weight", *norm))


def _store_new_token(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    """Rotate and store the new token of each sequence, then attend to the pages."""
    q, k_pages, v_pages = args
    q = copy_into(empty_like(q), q)  # rotated in place
    run(
        "qk_norm_rope_store",
        q[:, 0],
        options["k"][:, 0],
        options["v"][:, 0],
        options["positions"],
        options["cos_sin"],
        k_pages,
        v_pages,
        options["slot_mapping"],
        **{name: options[name] for name in (*_NORMS, *_SCALES) if name in options},
    )
    return rest(q, k_pages, v_pages, **_without(options, *_NEW_TOKEN, *_NORMS))


_NEW_TOKEN = ("k", "v", "positions", "cos_sin", "slot_mapping")
_NORMS = ("q_weight", "k_weight", "eps", "weight_offset")
_SCALES = ("k_scale", "v_scale")


def _store_parts(options: Options) -> Collection[str]:
    if any(options.get(name) is None for name in _NEW_TOKEN):  # the op tells what is missing
        return ()
    weights = (options.get("q_weight"), options.get("k_weight"))
    norm = ("rmsnorm",) if any(weight is not None for weight in weights) else ()
    return ("qk_norm_rope_store", "rope", "kv_store", *norm)


def _quantize_out(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    return run("quantize_rows", rest(*args, **_without(options, "quantize_out")), group=128)


def _quantize_x(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    x, *others = args
    codes, scales = run("quantize_rows", x, group=128)
    given = {"x_scales": scales, "out_dtype": x.dtype}
    return rest(codes, *others, **(_without(options, "quantize_x") | given))


def _quantize_heads(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    heads = rest(*args, **_without(options, "quantize_out"))
    heads, *lse = heads if isinstance(heads, tuple) else (heads,)
    (batch, queries, num_heads, head_dim) = heads.shape
    rows = heads.reshape(batch * queries, num_heads * head_dim)
    codes, scales = run("quantize_rows", rows, group=128)
    return (codes.reshape(heads.shape), scales.reshape(batch, queries, scales.shape[1]), *lse)


def _quantize_normed(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    y, routing, *h = rest(*args, **_without(options, "quantize_out"))
    return (y, routing, *run("quantize_rows", y, group=128), *h)


def _quantize_sum(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    y, h = rest(*args, **_without(options, "dtype", "group"))
    coded = {name: options[name] for name in ("dtype", "group") if name in options}
    return (*run("quantize_rows", y, **coded), h)


def _normalise_after(rest: Rest, args: tuple[Any, ...], options: Options) -> Any:
    """Compute the normalised rows of `rmsnorm_quantize` from the sum, or from x."""
    results = rest(*args, **_without(options, "normed_out"))
    x, weight = args
    h = x if options.get("residual") is None else results[2]
    norm = {name: options[name] for name in ("eps", "weight_offset") if name in options}
    run("rmsnorm", h, weight, out=options["normed_out"], **norm)
    return results


def _quantized(name: str) -> Parts:
    return lambda options: ("quantize_rows",) if options.get(name) else ()


def _always(*parts: str) -> Parts:
    return lambda options: parts


def _unscaled(options: Options) -> Collection[str]:
    return ("residual_add",) if options.get("x_scale", 1.0) == 1.0 else ()


_ADD = Step(("residual",), _always("residual_add"), _add)
_ADD_FIRST = Step(("residual", "residual_out"), _unscaled, _add_first)
_ACTIVATE = Step(("activation",), _activations, _activate)
_NORMALISE = Step(("norm_weight", "eps", "weight_offset"), _always("rmsnorm"), _normalise)
_QUANTIZE_OUT = Step(("quantize_out",), _quantized("quantize_out"), _quantize_out)
_QUANTIZE_X = Step(("quantize_x",), _quantized("quantize_x"), _quantize_x)
_QUANTIZE_HEADS = Step(("quantize_out",), _quantized("quantize_out"), _quantize_heads)
_QUANTIZE_NORMED = Step(("quantize_out",), _quantized("quantize_out"), _quantize_normed)
_QUANTIZE_SUM = Step(("dtype", "group"), _quantized("dtype"), _quantize_sum)
_NORMED_OUT = Step(("normed_out",), _always("rmsnorm"), _normalise_after)
_STORE = Step((*_NEW_TOKEN, *_NORMS), _store_parts, _store_new_token)

STEPS: dict[str, tuple[Step, ...]] = {
    "gemm": (_ADD, _ACTIVATE),
    "gemm_wna16": (_ADD, _ACTIVATE),
    "gemm_fp8": (_ADD, _ACTIVATE, _NORMALISE),
    "gemm_int8": (_ADD, _ACTIVATE, _NORMALISE),
    "rmsnorm_gemm": (_ACTIVATE,),
    "rmsnorm_gemm_wna16": (_ACTIVATE,),
    "moe_gemm": (_QUANTIZE_OUT, _ACTIVATE, _QUANTIZE_X),
    "moe_gemm_combine": (_ADD, _QUANTIZE_X),
    "moe_combine": (_ADD,),
    "rmsnorm": (_ADD_FIRST,),
    "rmsnorm_quantize": (_NORMED_OUT, _ADD_FIRST),
    "rmsnorm_moe_route": (_QUANTIZE_NORMED, _ADD_FIRST),
    "moe_combine_rmsnorm": (_QUANTIZE_SUM,),
    "attention_decode": (_QUANTIZE_HEADS, _STORE),
}
"""Op -> its steps, from the last one computed to the first."""


# ---- whole ops


def _rmsnorm_gemm(product: str, x: Any, norm_weight: Any, weight: Any, **options: Any) -> Any:
    norm = {name: options.pop(name) for name in ("eps", "weight_offset") if name in options}
    return run(product, run("rmsnorm", x, norm_weight, **norm), weight, **options)


def _rmsnorm_quantize(
    x: Any,
    weight: Any,
    *,
    dtype: str = "fp8",
    group: int = 0,
    normed_out: Any = None,
    **options: Any,
) -> Any:
    normed = run("rmsnorm", x, weight, out=normed_out, **options)
    y, *h = normed if isinstance(normed, tuple) else (normed,)
    return (*run("quantize_rows", y, dtype=dtype, group=group), *h)


def _rmsnorm_moe_route(
    x: Any,
    norm_weight: Any,
    weight: Any,
    top_k: int,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Any = None,
    quantize_out: bool = False,
    bias: Any = None,
    pdl: bool = False,
    out: Any = None,
    residual_out: Any = None,
    **routing: Any,
) -> Any:
    norm: Options = {"eps": eps, "weight_offset": weight_offset}
    if residual is not None:
        norm |= {"residual": residual, "residual_out": residual_out}
    if quantize_out:
        y = empty_like(x) if out is None else out
        others = run("rmsnorm_quantize", x, norm_weight, group=128, normed_out=y, **norm)
    else:
        normed = run("rmsnorm", x, norm_weight, out=out, **norm)
        y, *others = normed if isinstance(normed, tuple) else (normed,)
    logits = run("gemm", y, weight, bias=bias, out_dtype=_FLOAT32, pdl=pdl)
    return (y, run("moe_route", logits, top_k, **routing), *others)


def _route_parts(options: Options) -> Collection[str]:
    added = () if options.get("residual") is None else ("residual_add",)
    coded = ("rmsnorm_quantize", "quantize_rows") if options.get("quantize_out") else ()
    return ("rmsnorm", "gemm", "moe_route", *added, *coded)


def _moe_combine_rmsnorm(
    pairs: Any,
    residual: Any,
    weight: Any,
    *,
    dtype: str | None = None,
    group: int = 0,
    is_late: bool = False,
    **norm: Any,
) -> Any:
    x = run("moe_combine", pairs)
    if dtype is None:
        return run("rmsnorm", x, weight, residual=residual, is_late=is_late, out=x, **norm)
    coded = {"dtype": dtype, "group": group}
    return run("rmsnorm_quantize", x, weight, residual=residual, **coded, **norm)


def _sum_parts(options: Options) -> Collection[str]:
    coded = ("rmsnorm_quantize", "quantize_rows") if options.get("dtype") else ()
    return ("moe_combine", "residual_add", "rmsnorm", *coded)


def _all_reduce_rmsnorm(x: Any, peers: Any, residual: Any, weight: Any, **options: Any) -> Any:
    total = run("all_reduce", x, peers)
    return run("rmsnorm", total, weight, residual=residual, **options)


def _swiglu_quantize(x: Any, **options: Any) -> Any:
    return run("quantize_rows", run("swiglu", x), **options)


def _combine_parts(options: Options) -> Collection[str]:
    return ("moe_gemm", "moe_combine", "residual_add", *_quantized("quantize_x")(options))


def _moe_gemm_combine(
    x: Any,
    weight: Any,
    routing: Any,
    *,
    shared: Any = None,
    shared_gate: Any = None,
    residual: Any = None,
    out: Any = None,
    **options: Any,
) -> Any:
    pairs = run("moe_gemm", x, weight, routing, scatter=True, **options)
    pairs = pairs.reshape(*routing.experts.shape, pairs.shape[1])
    others = {"shared": shared, "shared_gate": shared_gate, "residual": residual}
    return run("moe_combine", pairs, out=out, **others)


def _qk_norm_rope_store(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    cos_sin: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    q_weight: Any = None,
    k_weight: Any = None,
    v_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm_after_rope: bool = False,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    q_factors: Any = None,
) -> None:
    def normed(x: Any, weight: Any, out: Any = None) -> Any:
        if weight is None:
            return x
        return run("rmsnorm", x, weight, eps=eps, weight_offset=weight_offset, out=out)

    query, key = (q, k) if norm_after_rope else (normed(q, q_weight), normed(k, k_weight))
    out = (q, empty_like(k))  # k itself is only read
    _, key = run("rope", query, key, positions, cos_sin, interleaved=interleaved, out=out)
    if norm_after_rope:
        normed(q, q_weight, q)
        key = normed(key, k_weight, key)
    if q_factors is not None:
        rows = q.reshape(len(q), q.shape[1] * q.shape[2])
        copy_into(q, run("scale_rows", rows, q_factors[positions]).reshape(q.shape))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    run("kv_store", key, normed(v, v_weight), k_pages, v_pages, slot_mapping, **scales)


def _prompt_parts(options: Options) -> Collection[str]:
    return ("attention_prefill",) if options.get("deterministic") else ()


def _decode_as_prompts(q: Any, k_pages: Any, v_pages: Any, **options: Any) -> Any:
    """Store new tokens, if any; then every sequence is a prompt of Q tokens, with one split."""
    if options.get("k") is not None:
        return _store_new_token(_decode_as_prompts, (q, k_pages, v_pages), options)
    (batch, queries) = q.shape[:2]
    if array_module(q) is np:
        starts = np.arange(batch + 1, dtype=np.int32) * np.int32(queries)
    else:
        starts = even_starts(q.device.id, batch, queries)
    result = run(
        "attention_prefill",
        q.reshape(batch * queries, *q.shape[2:]),
        k_pages,
        v_pages,
        cu_seqlens_q=starts,
        max_seqlen_q=queries,
        num_splits=1,
        **{name: options[name] for name in _PROMPT_OPTIONS if name in options},
    )
    results = result if isinstance(result, tuple) else (result,)
    out, *lse = (one.reshape(q.shape[: one.ndim + 1]) for one in results)
    if options.get("out") is not None:
        out = copy_into(options["out"], out)
    return (out, *lse) if lse else out


_PROMPT_OPTIONS = (
    *("block_tables", "context_lens", "scale", "window", "softcap", "sinks", *_SCALES),
    "return_lse",
)


def _head_parts(options: Options) -> Collection[str]:
    weights = (options.get(f"{name}_weight") for name in "qkv")
    norm = ("rmsnorm",) if any(weight is not None for weight in weights) else ()
    factors = () if options.get("q_factors") is None else ("scale_rows",)
    return ("rope", "kv_store", *norm, *factors)


WHOLES: dict[str, tuple[Parts, Callable[..., Any]]] = {
    "rmsnorm_gemm": (_always("rmsnorm", "gemm"), partial(_rmsnorm_gemm, "gemm")),
    "rmsnorm_gemm_wna16": (
        _always("rmsnorm", "gemm_wna16"),
        partial(_rmsnorm_gemm, "gemm_wna16"),
    ),
    "rmsnorm_quantize": (_always("rmsnorm", "residual_add", "quantize_rows"), _rmsnorm_quantize),
    "rmsnorm_moe_route": (_route_parts, _rmsnorm_moe_route),
    "moe_combine_rmsnorm": (_sum_parts, _moe_combine_rmsnorm),
    "all_reduce_rmsnorm": (_always("all_reduce", "residual_add", "rmsnorm"), _all_reduce_rmsnorm),
    "swiglu_quantize": (_always("swiglu", "quantize_rows"), _swiglu_quantize),
    "moe_gemm_combine": (_combine_parts, _moe_gemm_combine),
    "qk_norm_rope_store": (_head_parts, _qk_norm_rope_store),
    "attention_decode": (_prompt_parts, _decode_as_prompts),
}
"""Fused op -> its parts, given its keywords, and the op composed of them."""

SENDERS = ("gemm", "gemm_fp8", "gemm_int8")
"""Ops with a keyword `peers`: they may send rows of their result, as the kernel computes them."""

KEPT: Mapping[str, tuple[str, ...]] = {
    "quantize_rows": ("gemm_fp8", "gemm_int8"),
    "dequantize": ("gemm_wna16", "moe_gemm"),
    "permute_columns": ("gemm_wna16", "rmsnorm_gemm_wna16"),
    "gemm": ("gemm_wna16",),
    "merge_states": ("attention_decode", "attention_prefill"),
    "rmsnorm_quantize": ("gemm_fp8", "gemm_int8"),
    "gated_norm": ("gated_delta",),
    "rmsnorm": ("mla_store",),
    "rope": ("mla_store",),
}
"""Op -> ops that contain it and keep it: within their kernels it is not an op of its own."""
