"""Heads of keys from expanded latents: `cuda_src/mla_expand.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import is_aligned, named_strides, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["mla_expand", "specs"]

_THREADS = 256  # kThreads in CUDA
_PARAMS = (
    "up:ptr k_rope:ptr k:ptr up_stride_t:i64 up_stride_h:i64 k_rope_stride_t:i64 "
    "num_heads:i32 nope:i32 rope:i32"
)
_VECTOR = Kernel("mla_expand_vector", _PARAMS, struct="MlaExpandParams")
_SCALAR = Kernel("mla_expand_scalar", _PARAMS, struct="MlaExpandParams")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("mla_expand.cu", dtype),)


def mla_expand(up: Any, k_rope: Any, *, nope_dim: int) -> Any:
    """Lay out the keys of every head for `attention_prefill`, which reads the values in place.

    Parameters
    ----------
    up : (T, H, nope_dim + V) array of float32, float16 or bfloat16 (NumPy: or float64)
        The latents, multiplied by the up-projection: a head's key without its rotated part, then
        its value.
    k_rope : (T, R) array of up's dtype
        The rotated key that all heads share. Rows may lie apart.
    nope_dim : int

    Returns
    -------
    k : (T, H, nope_dim + R) array of up's dtype
        [key | k_rope].

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Examples
    --------
    >>> import numpy as np
    >>> mla_expand(np.array([[[1.0, 2.0]]]), np.array([[5.0, 6.0]]), nope_dim=1)
    array([[[1., 5., 6.]]])
    """
    call = Contract("mla_expand")
    up = call.array("up", up, "T H U", MIRROR_FLOATS, layout="rows")
    k_rope = call.array("k_rope", k_rope, "T R", up.dtype, layout="rows")
    nope_dim = call.integer("nope_dim", nope_dim, 1, call["U"] - 1, f"from 1 to {call['U'] - 1}")
    if call.on_cpu:
        return reference.mla_expand(up, k_rope, nope_dim=nope_dim)
    k = call.output("k", None, (call["T"], call["H"], nope_dim + call["R"]), up.dtype)
    sizes = (nope_dim, call["R"])
    is_vector = all(size % vector_width(up) == 0 for size in sizes) and is_aligned(up, k_rope)
    (_VECTOR if is_vector else _SCALAR).launch(
        specs(dtype_name(up.dtype))[0],
        (call["T"],),
        (_THREADS,),
        pdl=True,
        **named_strides("th", up=up),
        **named_strides("t", k_rope=k_rope),
        up=up,
        k_rope=k_rope,
        k=k,
        num_heads=call["H"],
        nope=nope_dim,
        rope=call["R"],
    )
    return k
