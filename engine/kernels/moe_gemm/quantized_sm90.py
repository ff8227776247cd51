"""moe_gemm of quantized weights on Hopper (`cuda_src/moe_gemm/moe_gemm_sm90.cu`)."""

from __future__ import annotations

from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER_DTYPES, is_hopper
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map, tensor_map_2d
from engine.kernels.moe_gemm.formats import MAPS, base_of, bases, kind, plane_maps
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.kernels.moe_gemm.sm90 import MoeTileConfig
from engine.kernels.moe_route import MAX_EXPERTS
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import TILE_ROWS

__all__ = ["FILE", "QUANTIZED_CONFIGS", "choose_config", "is_supported", "launch", "specs"]
__all__ += ["byte_maps", "launch_module", "tiles"]

_KERNEL = Kernel(
    "moe_gemm_quantized_sm90",
    "map_data:tmap map_high:tmap map_scales:tmap map_supers:tmap map_x:tmap scales:ptr x:ptr "
    "x_scales:ptr order:ptr offsets:ptr pair_weights:ptr bias:ptr out:ptr out_scales:ptr "
    "num_experts:i32 num_rows:i32 k:i32 top_k:i32 activation:i32 alpha:f32 limit:f32 is_early:i32",
    struct="MoeGemmQuantizedSm90Params",
)
FILE = "moe_gemm/moe_gemm_sm90.cu"
_SLAB_K = 64
_MMA_ROWS = 64

_FEW = MoeTileConfig(2, 64, 2)
_SOME = MoeTileConfig(2, 128, 2)
_MANY = MoeTileConfig(2, 256, 1, mma_tiles=1)  # for packed weights only
_FEW_E2M1 = MoeTileConfig(3, 64, 2)  # other decoders need more registers
QUANTIZED_CONFIGS = (_FEW, _FEW_E2M1, _SOME, _MANY)
# Above these averages of tokens per expert, a larger tile pays.
_SOME_FROM = 48
_MANY_FROM = 112


def choose_config(num_pairs: int, num_experts: int, form: Format) -> MoeTileConfig:
    """Choose the tile for `num_pairs` pairs (token, expert) and weights of a format.

    Examples
    --------
    >>> choose_config(8, 128, FORMATS["mxfp4"]).rows, choose_config(8, 128, FORMATS["q4_k"]).rows
    (384, 256)
    """
    few, some, many = tiles(form)
    if num_pairs > _MANY_FROM * num_experts:
        return many
    return some if num_pairs > _SOME_FROM * num_experts else few


def tiles(form: Format) -> tuple[MoeTileConfig, MoeTileConfig, MoeTileConfig]:
    """Return the tiles for few, some and many tokens per expert."""
    few = _FEW_E2M1 if form.code == "e2m1" else _FEW
    return few, _SOME, _MANY if form.is_packed else _SOME


def specs(dtype: str, formats: tuple[str, ...]) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for weights of `formats`."""
    if dtype not in HOPPER_DTYPES:
        return ()
    found = []
    for form in (FORMATS[name] for name in formats if not FORMATS[name].is_dense):
        for base in bases(dtype, form):
            found += [_spec(config, base, form) for config in tiles(form)]
    return tuple(dict.fromkeys(found))


def _spec(config: MoeTileConfig, base: ModuleSpec, form: Format) -> ModuleSpec:
    macros = config.macros(_stage_bytes(config, form))
    weight_kind = ("WEIGHT_KIND", kind(form))
    return ModuleSpec(FILE, base.dtype, (*base.defines, *macros.items(), weight_kind))


def _stage_bytes(config: MoeTileConfig, form: Format) -> int:
    """Return the bytes of codes and scales per stage (kStageW in CUDA)."""
    k = config.depth * _SLAB_K
    tiles = config.rows // TILE_ROWS
    if not form.is_packed:
        return config.rows * k + -(-config.rows * 4 // 1024) * 1024
    values = 2 if form.offset else 1
    size = 1 if form.super_block or form.code == "e2m1" else 2
    tile = config.depth * ((1024 if form.bits == 8 else 512) + {5: 128, 6: 256}.get(form.bits, 0))
    tile += max(1, k // form.group) * TILE_ROWS * values * size
    tile += 32 * values if form.super_block else 0
    return -(-tiles * tile // 1024) * 1024


def is_supported(operands: MoeOperands) -> bool:
    """Tell whether the kernel supports the current device and these operands."""
    x = operands.x
    weight = operands.weight
    out = operands.out
    num_experts, num_rows, k = weight.shape
    if not is_hopper(dtype_name(x.dtype)) or num_experts > MAX_EXPERTS:
        return False
    if weight.num_elements == 0 or out.size == 0:
        return False
    if weight.format.is_packed and operands.activation is not None and num_rows % (2 * TILE_ROWS):
        return False  # a row tile would mix gate and up rows
    sizes = [x.shape[-1] * x.itemsize, out.shape[-1] * out.itemsize]
    sizes += [0 if weight.format.is_packed else k]
    arrays = (x, out, *(array for _, array in weight.arrays()))
    return all(size % 16 == 0 for size in (*sizes, *(int(array.data.ptr) for array in arrays)))


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays."""
    x = operands.x
    weight = operands.weight
    dtype = dtype_name(operands.x.dtype)
    config = choose_config(operands.expected_pairs, weight.shape[0], weight.format)
    launch_module(
        _spec(config, base_of(weight, dtype), weight.format),
        config,
        config.shared_bytes(_stage_bytes(config, weight.format)),
        operands,
        plane_maps(weight, config.depth) if weight.format.is_packed else byte_maps(weight),
        map_x=tensor_map_2d(x, dtype, (config.box_rows, _SLAB_K)),
        x=x,
        x_scales=None,
    )


def launch_module(
    spec: ModuleSpec,
    config: MoeTileConfig,
    shared_bytes: int,
    operands: MoeOperands,
    maps: dict[str, Any],
    *,
    has_routing: bool = False,
    **arguments: Any,
) -> None:
    """Launch a module with the weight's `maps` and the `arguments` that describe x.

    `has_routing` means that the routing is complete before the kernel can start.
    """
    weight = operands.weight
    pairs, columns = operands.out.shape
    is_gated = operands.activation is not None
    _KERNEL.launch(
        spec,
        (config.grid(pairs, weight.shape[0], columns, is_gated=is_gated),),
        (config.threads,),
        shared_bytes,
        pdl=True,  # the kernel waits before it accesses memory that others write
        is_early=operands.pdl and (operands.scatter or has_routing),
        scales=None if weight.format.is_packed else weight.scales,
        out_scales=operands.out_scales,
        **arguments,
        **maps,
        **operands.arguments(),
    )


def byte_maps(weight: Weight) -> dict[str, Any]:
    """Return the tensor maps of an unpacked weight; a box holds the rows of an m-tile."""
    num_experts, rows, k = weight.shape
    one = tensor_map(
        weight.data.data.ptr,
        "uint8",
        (k, rows, num_experts),
        (k, rows * k),
        (2 * _SLAB_K, _MMA_ROWS, 1),
        promote=128,
    )
    return dict.fromkeys(MAPS, one)
