"""moe_gemm on Hopper with both operands in e4m3 (`moe_gemm_sm90.cu`)."""

from __future__ import annotations

from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER_DTYPES, is_hopper
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map_2d
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.kernels.moe_gemm.quantized_sm90 import FILE, byte_maps, launch_module
from engine.kernels.moe_gemm.sm90 import MoeTileConfig
from engine.kernels.moe_route import MAX_EXPERTS
from engine.weights import FORMATS

__all__ = [
    "CODES_CONFIGS",
    "QUANTIZING_CONFIGS",
    "choose_config",
    "is_supported",
    "launch",
    "specs",
]

_WEIGHT_KIND = 3  # kCodes in CUDA
_BLOCK = (128, 128)  # rows and columns of the weight per scale
_SLAB_BYTES = 128
_MMA_ROWS = 64

# Tiles for few and for many tokens per expert.
CODES_CONFIGS = (MoeTileConfig(1, 48, 1, blocks=2), MoeTileConfig(2, 80, 1))
# The same for results that are quantized: two warpgroups have the 128 columns of a scale.
QUANTIZING_CONFIGS = (MoeTileConfig(2, 48, 1), MoeTileConfig(2, 80, 1))
_MANY_FROM = 32  # above this average of tokens per expert, use the larger tile


def choose_config(num_pairs: int, num_experts: int, *, quantizes_out: bool) -> MoeTileConfig:
    """Choose the tile for `num_pairs` pairs (token, expert).

    Examples
    --------
    >>> few, many = (choose_config(pairs, 128, quantizes_out=False) for pairs in (2048, 8192))
    >>> few.tokens, many.tokens, choose_config(2048, 128, quantizes_out=True).warpgroups
    (48, 80, 2)
    """
    configs = QUANTIZING_CONFIGS if quantizes_out else CODES_CONFIGS
    return configs[num_pairs > _MANY_FROM * num_experts]


def specs(dtype: str, formats: tuple[str, ...]) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for weights of `formats`."""
    if dtype not in HOPPER_DTYPES or not any(FORMATS[name].block == _BLOCK for name in formats):
        return ()
    plain = [_spec(config, dtype, quantizes_out=False) for config in CODES_CONFIGS]
    return (*plain, *(_spec(config, dtype, quantizes_out=True) for config in QUANTIZING_CONFIGS))


def _spec(config: MoeTileConfig, dtype: str, *, quantizes_out: bool) -> ModuleSpec:
    macros = config.macros(*_bytes(config))
    own = (("WEIGHT_KIND", _WEIGHT_KIND), ("QUANTIZES_OUT", int(quantizes_out)))
    return ModuleSpec(FILE, dtype, (*macros.items(), *own))


def _bytes(config: MoeTileConfig) -> tuple[int, int]:
    """Return the bytes per stage of the weight, and of the scales."""
    return config.rows * config.depth * _SLAB_BYTES, config.depth * 4 * (4 + config.tokens)


def is_supported(operands: MoeOperands, dtype: Any) -> bool:
    """Tell whether the kernel supports this device and these operands, x quantized from `dtype`."""
    weight = operands.weight
    out = operands.out
    num_experts, num_rows, k = weight.shape
    if not is_hopper(dtype_name(dtype)) or num_experts > MAX_EXPERTS:
        return False
    if weight.num_elements == 0 or out.size == 0:
        return False
    if operands.activation is not None and num_rows // 2 % _MMA_ROWS:
        return False  # each m-tile of up needs a single scale
    if operands.out_scales is not None and (operands.activation is None or num_rows % 256):
        return False  # a tile is 128 gate rows and their up rows
    sizes = (k, out.shape[-1] * out.itemsize, int(out.data.ptr), int(weight.data.data.ptr))
    is_new = operands.x.itemsize > 1  # x is not yet quantized
    return (is_new or int(operands.x.data.ptr) % 16 == 0) and all(s % 16 == 0 for s in sizes)


def launch(
    operands: MoeOperands, codes: Any, scales: Any, dtype: Any, *, has_routing: bool
) -> None:
    """Launch on CuPy arrays; `codes` and `scales` are the rows of x, quantized from `dtype`.

    `has_routing`: see `launch_module`.
    """
    quantizes_out = operands.out_scales is not None
    config = choose_config(
        operands.expected_pairs, operands.weight.shape[0], quantizes_out=quantizes_out
    )
    launch_module(
        _spec(config, dtype_name(dtype), quantizes_out=quantizes_out),
        config,
        config.shared_bytes(*_bytes(config)),
        operands,
        byte_maps(operands.weight),
        has_routing=has_routing,
        map_x=tensor_map_2d(codes, "uint8", (config.box_rows, _SLAB_BYTES)),
        x=codes,
        x_scales=scales,
    )
