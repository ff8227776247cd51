"""The recurrence, one token after the other: `cuda_src/mamba2/mamba2.cu`."""

from __future__ import annotations

from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._elementwise import is_aligned
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.mamba2.problem import PARAMS, STATE_BITS

__all__ = ["launch", "spec"]

_THREADS = 128  # kThreads in CUDA
_ROWS_PER_BLOCK = 32  # kWarps * kRows in CUDA
_LANES = 32
_COLUMNS = (2, 4, 8)  # of a state row, per lane
_KERNELS = {
    (access, columns): Kernel(f"mamba2_{access}_{columns}", PARAMS, struct="Mamba2Params")
    for access in ("vector", "scalar")
    for columns in _COLUMNS
}


def spec(dtype: str, state_dtype: str) -> ModuleSpec:
    """Return the module for one dtype of activations and of states."""
    return ModuleSpec("mamba2/mamba2.cu", dtype, (("STATE_BITS", STATE_BITS[state_dtype]),))


def launch(args: dict[str, Any], *, max_steps: int, pdl: bool) -> None:
    """Launch the kernel on sequences of at most `max_steps` tokens."""
    columns = next(one for one in _COLUMNS if one * _LANES >= args["state_size"])
    fits = args["state_size"] % 8 == 0 and is_aligned(args["b"], args["c"], args["states"])
    blocks = ceil_div(args["head_dim"], _ROWS_PER_BLOCK)
    _KERNELS["vector" if fits else "scalar", columns].launch(
        spec(dtype_name(args["x"].dtype), dtype_name(args["states"].dtype)),
        (args["state_slots"].shape[0], args["num_heads"], blocks),
        (_THREADS,),
        pdl=pdl,
        **args,
        max_steps=max_steps,
    )
