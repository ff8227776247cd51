"""Short causal convolution with states: `cuda_src/causal_conv.cu`, `reference/causal_conv.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import ROW_THREADS, element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._state_slots import STATE_PARAMS, StateSlots

__all__ = ["causal_conv", "specs"]

MAX_WIDTH = 4
_PARAMS = (
    f"{STATE_PARAMS} x:ptr x_stride:i64 weight:ptr bias:ptr in_gate:ptr in_gate_stride:i64 "
    "out_gate:ptr out_gate_stride:i64 out:ptr num_channels:i32 tokens_per_block:i32 is_silu:i32"
)
_KERNELS = {
    (access, width): Kernel(f"causal_conv_{access}_{width}", _PARAMS, struct="CausalConvParams")
    for access in ("vector", "scalar")
    for width in range(2, MAX_WIDTH + 1)
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("causal_conv.cu", dtype),)


def causal_conv(
    x: Any,
    weight: Any,
    *,
    states: Any,
    state_slots: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    state_targets: Any = None,
    snapshot_slots: Any = None,
    snapshot_offsets: Any = None,
    bias: Any = None,
    activation: str | None = None,
    in_gate: Any = None,
    out_gate: Any = None,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Convolve each channel with its last K inputs and keep the inputs that come next.

    Parameters
    ----------
    x : (T, C) array of float32, float16 or bfloat16 (NumPy: or float64)
        Inputs of all sequences, concatenated. A view whose last axis is contiguous is not copied.
    weight : (C, K) array of x's dtype
        2 <= K <= 4; the last column multiplies the newest input.
    states : (num_slots, K - 1, C) array of x's dtype
        Written in place: the last K - 1 inputs of a sequence, oldest first. A view with any stride
        between slots.
    state_slots : (B,) array of int32
        Slot that sequence b starts from. Not read if the sequence has no earlier tokens.
    cu_seqlens_q : (B+1,) array of int32
        Sequence b has tokens [cu_seqlens_q[b], cu_seqlens_q[b+1]) of x.
    context_lens : (B,) array of int32
        Length of each sequence including these tokens. If no tokens came before, the inputs before
        the first one are 0.
    state_targets : (B,) or (B, Q) array of int32, optional
        (B,): the slot for the state after the last token; by default `state_slots`. (B, Q): the
        slots for the states after each of at most Q tokens (drafts to verify); a sequence of more
        tokens writes its last state only, to the last of them. -1 writes nothing.
    snapshot_slots, snapshot_offsets : (B,) arrays of int32, optional
        Also write the state after the first snapshot_offsets[b] of these tokens to
        snapshot_slots[b]; -1 writes nothing.
    bias : (C,) array of x's dtype, optional
    activation : None or "silu"
    in_gate, out_gate : (T, C) arrays of x's dtype, optional
        Factors on the inputs, whose products are convolved and kept in the states, and on the
        result. Views like x.
    pdl : bool
        Programmatic dependent launch. The next kernel starts once the kernels before this one have
        ended.
    out : (T, C) array of x's dtype, optional
        Array for the result; must not overlap x.

    Returns
    -------
    out : (T, C) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and slots are checked on NumPy arrays; on the
        GPU a slot outside the states is not written, and reads as zeros.

    Notes
    -----
    Sums are float32, from the oldest input to the newest, and rounded once, after the factor
    `out_gate`; the products of `in_gate` and x are rounded before. A slot that a call
    writes may be read by the same sequence only.

    Examples
    --------
    >>> import numpy as np
    >>> states = np.zeros((1, 1, 1), np.float32)
    >>> call = {"states": states, "state_slots": np.array([0], np.int32)}
    >>> x, weight = np.array([[1.0], [2.0]], np.float32), np.array([[10.0, 1.0]], np.float32)
    >>> lens = {"cu_seqlens_q": np.array([0, 2], np.int32), "context_lens": np.array([2], np.int32)}
    >>> causal_conv(x, weight, **call, **lens).ravel(), states.ravel()
    (array([ 1., 12.], dtype=float32), array([2.], dtype=float32))
    """
    call = Contract("causal_conv")
    x = call.array("x", x, "T C", MIRROR_FLOATS, layout="rows")
    weight = call.array("weight", weight, "C K", x.dtype)
    width = call["K"]
    call.check("weight", 2 <= width <= MAX_WIDTH, f"of 2 to {MAX_WIDTH} columns", width)
    slots = StateSlots.checked(
        call,
        states,
        f"{width - 1} C",
        x.dtype,
        call["T"],
        state_slots=state_slots,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        state_targets=state_targets,
        snapshot_slots=snapshot_slots,
        snapshot_offsets=snapshot_offsets,
    )
    if bias is not None:
        bias = call.array("bias", bias, "C", x.dtype)
    if in_gate is not None:
        in_gate = call.array("in_gate", in_gate, "T C", x.dtype, layout="rows")
    if out_gate is not None:
        out_gate = call.array("out_gate", out_gate, "T C", x.dtype, layout="rows")
    call.check("activation", activation in (None, "silu"), "None or 'silu'", activation)
    if call.on_cpu:
        call.check_target(out, x.shape, x.dtype)
        options = {"activation": activation, "in_gate": in_gate, "out_gate": out_gate}
        result = reference.causal_conv(x, weight, **slots.arrays, bias=bias, **options)
        return call.finish(out, result)
    out = call.output("out", out, x.shape, x.dtype)
    gates = _gate_args(in_gate=in_gate, out_gate=out_gate)
    _launch(x, weight, bias, gates, slots, out, is_silu=activation == "silu", pdl=pdl)
    return out


def choose_tokens_per_block(num_tokens: int) -> int:
    """Return how many consecutive tokens a block convolves."""
    return 1 if num_tokens <= 1024 else 16


def _gate_args(**gates: Any) -> dict[str, Any]:
    """Return each gate and the elements between its rows, as kernel arguments."""
    strides = {
        f"{name}_stride": 0 if gate is None else element_strides(gate)[0]
        for name, gate in gates.items()
    }
    return {**gates, **strides}


def _launch(
    x: Any,
    weight: Any,
    bias: Any,
    gates: dict[str, Any],
    slots: StateSlots,
    out: Any,
    *,
    is_silu: bool,
    pdl: bool,
) -> None:
    num_tokens, num_channels = x.shape
    given = [gates[name] for name in ("in_gate", "out_gate") if gates[name] is not None]
    vectors = x, weight.reshape(-1), out, slots.states, *given
    fits = num_channels % vector_width(x) == 0 and is_aligned(*vectors)
    channels = num_channels // vector_width(x) if fits else num_channels
    tokens_per_block = choose_tokens_per_block(num_tokens)
    _KERNELS["vector" if fits else "scalar", weight.shape[1]].launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(num_tokens, tokens_per_block), ceil_div(channels, ROW_THREADS)),
        (ROW_THREADS,),
        pdl=pdl,
        x=x,
        x_stride=element_strides(x)[0],
        weight=weight,
        bias=bias,
        **gates,
        out=out,
        **slots.args,
        num_channels=num_channels,
        tokens_per_block=tokens_per_block,
        is_silu=is_silu,
    )
