"""fp8 experts of a layer in one tensor, or with their scales in one: names as of single matrices.

transformers 5 quantizes experts that it holds as one tensor, "<block>.gate_up_proj" (E, N, K), and
adds "<...>_scale_inv" and "<...>_activation_scale". For some models it writes the experts apart,
but not their scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile

__all__ = ["name_fused_experts"]

_Checkpoint = SafetensorsFile | SafetensorsDirectory

_SCALES = "_scale_inv"
_ENDS = {"": ".weight", _SCALES: ".weight_scale_inv", "_activation_scale": ".activation_scale"}
# Tensor of all experts -> an expert's matrices in it, one above the other.
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def name_fused_experts(checkpoint: _Checkpoint) -> None:
    """Name tensors as `ModuleTensors` expects: "<module>.weight" and "<module>.weight_scale_inv".

    The module is that of all experts, or an expert's matrix if the checkpoint holds these.
    """
    scaled = [name.removesuffix(_SCALES) for name in checkpoint.names() if name.endswith(_SCALES)]
    fused = [name for name in scaled if name in checkpoint and len(checkpoint.shape(name)) > 2]
    names = {name + end: name + kind for name in fused for end, kind in _ENDS.items()}
    if names:
        checkpoint.rename(lambda name: names.get(name, name))
    for name in scaled:
        if name not in fused and (parts := dict(_parts(checkpoint, name))):
            checkpoint.divide(f"{name}{_SCALES}", parts)


def _parts(checkpoint: _Checkpoint, name: str) -> Iterator[tuple[str, tuple[int, tuple[int, ...]]]]:
    """Yield the parts of the scales of all experts that belong to matrices in the checkpoint."""
    block, _, kind = name.rpartition(".")
    matrices = _MATRICES.get(kind, ())
    shape = checkpoint.shape(f"{name}{_SCALES}")
    if len(shape) != 3:
        return
    num_experts, rows, columns = shape
    count = len(matrices) if rows > 1 else 1  # a single row of scales is for all matrices
    for expert in range(num_experts):
        for index, matrix in enumerate(matrices):
            module = f"{block}.{expert}.{matrix}"
            scales = f"{module}.weight_scale_inv"
            is_alone = f"{module}.weight" in checkpoint and scales not in checkpoint
            if is_alone and rows % count == 0:
                own = rows // count, columns
                yield scales, (expert * rows * columns + index % count * math.prod(own), own)
