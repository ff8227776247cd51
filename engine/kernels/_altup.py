"""Shared code of `altup_predict` and `altup_correct`."""

from __future__ import annotations

from typing import Any

from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["THREADS", "checked_streams", "kernels_of", "launch"]

THREADS = 256  # kThreads in CUDA
_MAX_STREAMS = 4  # kMaxStreams in CUDA


def kernels_of(op: str, struct: str, params: str) -> dict[str, Kernel]:
    """Return the kernels of an op; `params` are its own, before those that both have."""
    params += " router_norm:ptr router:ptr coefs:ptr own:ptr n:i32 num_streams:i32 eps:f32"
    return {width: Kernel(f"{op}_{width}", params, struct=struct) for width in ("vector", "scalar")}


def checked_streams(call: Contract, streams: Any) -> Any:
    """Return the checked streams (T, S, N), which are written."""
    streams = call.written("streams", streams, "T S N", FLOATS)
    count = call["S"]
    call.check("streams", 1 <= count <= _MAX_STREAMS, f"of 1 to {_MAX_STREAMS} streams", count)
    return streams


def launch(
    call: Contract,
    kernels: dict[str, Kernel],
    spec: ModuleSpec,
    *,
    streams: Any,
    coefs: Any,
    eps: float,
    **rows: Any,
) -> Any:
    """Launch a block per token and return `own` (T, N). `rows` are the arrays of N columns."""
    own = call.output("own", None, (call["T"], call["N"]), streams.dtype)
    present = [row for row in rows.values() if row is not None]
    fits = call["N"] % vector_width(streams) == 0 and is_aligned(own, streams, *present)
    kernels["vector" if fits else "scalar"].launch(
        spec,
        (call["T"],),
        (THREADS,),
        pdl=True,
        streams=streams,
        coefs=coefs,
        own=own,
        n=call["N"],
        num_streams=call["S"],
        eps=eps,
        **rows,
    )
    return own
