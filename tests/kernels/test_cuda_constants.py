"""Constants shared by Python and CUDA: the values must be equal in both.

Values that vary are passed to the compiler with -D. These constants never vary, and as macros they
would only lengthen every module's cache key.
"""

from __future__ import annotations

import importlib
import re

import pytest

from engine.kernels import _peer_memory, _quantize
from engine.kernels._module import source_dir
from engine.kernels.gemm import config as gemm_config
from engine.kernels.gemm import skinny
from engine.kernels.moe_gemm import portable as moe_portable
from engine.kernels.moe_wgrad import portable as wgrad_portable

_FP8_TILE = "attention_prefill/attention_prefill_fp8_tile_sm90.cuh"
_FEW_ROUTED = "rmsnorm_moe_route/rmsnorm_moe_route_few_tokens.cu"

# Module and name in engine.kernels; file or folder in cuda_src, and the name there.
CONSTANTS = [
    ("_peer_memory.MAX_RANKS", "common", "kMaxRanks"),
    ("_peer_memory.NUM_BUFFERS", "common", "kBuffers"),
    ("_quantize.GROUP", "common/coded_row.cuh", "kGroup"),
    ("attention_backward.sm90._KEYS", "attention_backward", "kKeys"),
    ("attention_backward.sm90._STAGES", "attention_backward", "kStages"),
    ("attention_backward.problem._SINK_TOKENS", "attention_backward", "kSinkTokens"),
    ("attention_decode.portable._COMBINE_THREADS", "attention_decode", "kCombineThreads"),
    ("attention_decode.portable._SPLIT_GRAIN", "attention_decode", "kSplitGrain"),
    ("attention_prefill_fp8.sm90._KEYS", _FP8_TILE, "kKeys"),
    ("attention_prefill_fp8.sm90._Q_STAGES", _FP8_TILE, "kQStages"),
    ("cross_entropy._MAX_CLUSTER", "cross_entropy.cu", "kMaxCluster"),
    ("embedding._ROWS", "embedding.cu", "kRows"),
    ("embedding_backward._ROWS", "embedding_backward.cu", "kRows"),
    ("embedding_backward._STORES", "embedding_backward.cu", "kStores"),
    ("embedding_backward._THREADS", "embedding_backward.cu", "kThreads"),
    ("gated_delta.chunks.CHUNK", "common/sequence_chunks.cuh", "kChunkTokens"),
    ("gated_delta.chunks._PANEL", "gated_delta", "kPanelColumns"),
    ("gated_delta.chunks._PREPARE_THREADS", "gated_delta", "kPrepareThreads"),
    ("gated_delta.steps._COLUMNS", "gated_delta", "kColumns"),
    ("gated_delta.steps._MAX_NORM_THREADS", "gated_delta", "kMaxNormThreads"),
    ("gated_delta.steps._THREADS", "gated_delta/gated_delta.cu", "kThreads"),
    ("gated_norm._THREADS", "gated_norm.cu", "kThreads"),
    ("gemm.skinny._STEP_K", "gemm/skinny_block.cuh", "kStepK"),
    ("kv_copy._THREADS", "kv_copy.cu", "kThreads"),
    ("kv_swap._THREADS", "kv_swap.cu", "kThreads"),
    ("merge_states._THREADS", "merge_states.cu", "kThreads"),
    ("head_gemm._COLUMNS", "head_gemm.cu", "kColumns"),
    ("head_gemm._STAGES", "head_gemm.cu", "kStages"),
    ("_lora.THREADS", "lora", "kThreads"),
    ("lora_expand.MAX_PARTS", "lora", "kMaxParts"),
    ("lora_expand._COLUMNS", "lora/lora_expand.cu", "kColumns"),
    ("lora_expand._VECTOR", "lora", "kQuad"),
    ("lora_shrink._COLUMNS", "lora/lora_shrink.cu", "kColumns"),
    ("lora_shrink._STAGES", "lora", "kStages"),
    ("mamba2.chunks.CHUNK", "common/sequence_chunks.cuh", "kChunkTokens"),
    ("mamba2.chunks._PAD", "mamba2", "kPad"),
    ("mamba2.steps._THREADS", "mamba2/mamba2.cu", "kThreads"),
    ("mla_decode.combine._THREADS", "mla_decode", "kCombineThreads"),
    ("mla_store._ITEMS", "mla_store.cu", "kItems"),
    ("mla_store._MAX_LATENT", "mla_store.cu", "kMaxLatent"),
    ("mla_store._THREADS", "mla_store.cu", "kThreads"),
    ("moe_activation_backward._THREADS", "moe_activation_backward.cu", "kThreads"),
    ("moe_combine._THREADS", "moe_combine.cu", "kThreads"),
    ("moe_gemm.few_tokens.MAX_PAIRS", "moe_gemm", "kMaxPairs"),
    ("moe_gemm.portable._ROW_BYTES", "common", "kTileRowBytes"),
    ("moe_gemm.sm90._RECORDS", "moe_gemm", "kRecords"),
    ("moe_route.MAX_EXPERTS", "moe_gemm", "kMaxExperts"),
    ("moe_route.MAX_TOP_K", "common/moe_route.cuh", "kMaxTopK"),
    ("moe_route._THREADS", "common/moe_place.cuh", "kPlaceThreads"),
    ("moe_route_backward._THREADS", "moe_route_backward.cu", "kThreads"),
    ("moe_sort._THREADS", "common/moe_place.cuh", "kPlaceThreads"),
    ("moe_wgrad.portable._ROW_BYTES", "common", "kTileRowBytes"),
    ("moe_wgrad.sm90._SLAB_ROWS", "moe_wgrad", "kSlabRows"),
    ("moe_wgrad.sm90._STAGES", "moe_wgrad", "kStages"),
    ("qk_norm_rope_store._HEADS_AT_ONCE", "qk_norm_rope_store.cu", "kHeads"),
    ("rmsnorm_moe_route._THREADS", "rmsnorm_moe_route/rmsnorm_moe_route.cu", "kThreads"),
    ("rmsnorm_moe_route._THREADS", _FEW_ROUTED, "kThreads"),
    ("rmsnorm_moe_route._TOKENS", _FEW_ROUTED, "kTokens"),
    ("rmsnorm_moe_route._GROUP", _FEW_ROUTED, "kGroup"),
    ("rmsnorm_moe_route._STEP", _FEW_ROUTED, "kStep"),
    ("rmsnorm_moe_route._PART", _FEW_ROUTED, "kPart"),
    ("rmsnorm_moe_route._ROW_PAD", _FEW_ROUTED, "kRowPad"),
    ("rmsnorm_moe_route._LOGIT_PAD", _FEW_ROUTED, "kLogitPad"),
    ("rope._HEADS_AT_ONCE", "rope.cu", "kHeads"),
    ("sample._CHOOSE_THREADS", "sample/row_list.cuh", "kThreads"),
    ("sample._MAX_SEGMENTS", "sample", "kMaxSegments"),
    ("sample._MAX_WALKS", "sample", "kMaxWalks"),
    ("sample._SCAN_THREADS", "sample", "kScanThreads"),
    ("sample._SEGMENT", "sample", "kSegment"),
    ("scale_rows._ROWS", "scale_rows.cu", "kRows"),
    ("scale_rows._THREADS", "scale_rows.cu", "kThreads"),
]


def _text(place: str) -> str:
    path = source_dir() / place
    files = sorted(path.rglob("*.cu*")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize(("name", "place", "constant"), CONSTANTS, ids=lambda value: value)
def test_a_constant_is_the_same_in_both_languages(name: str, place: str, constant: str) -> None:
    module, _, attribute = name.rpartition(".")
    wanted = getattr(importlib.import_module(f"engine.kernels.{module}"), attribute)
    found = re.findall(rf"constexpr int [^;]*?\b{constant} = (\d+)\b", _text(place))
    assert found and {int(value) for value in found} == {wanted}


def _tiles(place: str, kernel: str) -> dict[str, tuple[int, ...]]:
    """Return the thread count and template arguments of each entry point of a tile template."""
    pattern = rf"\((?:op##_)?(\w+), (\w+), \d, {kernel}<([\d, ]+), (?:true|false)"
    return {
        name: (256 if threads == "kSimtThreads" else int(threads), *map(int, sizes.split(", ")))
        for name, threads, sizes in re.findall(pattern, _text(place))
    }


@pytest.mark.parametrize(
    ("place", "prefix", "tiles"),
    [
        ("gemm", "", (*gemm_config._HALF_TILES, gemm_config._HALF_UNALIGNED)),
        ("moe_gemm", "moe_gemm_", moe_portable.tile_configs("bfloat16")),
        ("moe_wgrad", "moe_wgrad_", wgrad_portable.tiles("bfloat16")),
    ],
    ids=["gemm", "moe_gemm", "moe_wgrad"],
)
def test_a_tile_of_the_tensor_cores_is_the_same_in_both_languages(place, prefix, tiles):
    # Templates with five numbers: block tile, warp tile, stages.
    found = _tiles(place, r"\w+_tile(?=<\d+, \d+, \d+, \d+, \d+, )")
    assert len(found) == len(tiles)
    for tile in tiles:
        threads, m, n, _, _, stages = found[prefix + tile.kernel]
        assert (threads, m, n, stages) == (tile.threads, tile.tile_m, tile.tile_n, tile.stages)


@pytest.mark.parametrize(
    ("place", "prefix", "tiles"),
    [
        ("gemm", "", (*gemm_config._FLOAT_TILES, gemm_config._FLOAT_UNALIGNED)),
        ("moe_gemm", "moe_gemm_", moe_portable.tile_configs("float32")),
        ("moe_wgrad", "moe_wgrad_", wgrad_portable.tiles("float32")),
    ],
    ids=["gemm", "moe_gemm", "moe_wgrad"],
)
def test_a_tile_of_the_cuda_cores_is_the_same_in_both_languages(place, prefix, tiles):
    # Two numbers: outputs per thread along both axes (16 threads along each); stages.
    found = _tiles(place, r"\w+_tile(?=<\d+, \d+, (?:true|false))")
    assert len(found) == len(tiles)
    for tile in tiles:
        threads, outputs, stages = found[prefix + tile.kernel]
        assert tile.tile_m == tile.tile_n == 16 * outputs
        assert (threads, stages) == (tile.threads, tile.stages)


def test_shapes_of_the_ring_kernels():
    found = re.findall(
        r"skinny_ring_(\d+), \d+, 1, \w+<SkinnyShape<(\d), (\d), (\d)>", _text("gemm")
    )
    shapes = [(s.tokens, s.tokens // 8, s.stages, s.buffers) for s in skinny._SHAPES]
    assert {tuple(map(int, each)) for each in found} == set(shapes)


@pytest.mark.parametrize(("number", "op"), _peer_memory.OPS.items())
def test_a_collective_has_the_number_of_its_name(number, op):
    assert f"constexpr int kOp = {number};" in _text(f"collectives/{op}.cu")


def test_sizes_of_the_row_kernels():
    found = re.findall(
        r"ENTRY\(op##_##codes##_(\d+), Codes, (\d+), (\d)\)", _text("common/coded_row.cuh")
    )
    sizes = {size: (int(threads) * int(vectors), int(threads)) for size, threads, vectors in found}
    assert sizes == _quantize.SIZES
