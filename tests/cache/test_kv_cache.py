"""The slab of pages, and how many blocks fit."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cache.block_plan import MemoryBudget, plan_num_blocks
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.layer_cache import LayerCache, PageShape, StateShape
from engine.cache.memory_pool import MemoryPool
from engine.config import ModelConfig
from engine.device import CPU, Device
from engine.errors import ConfigError, ContractError, DTypeError, OutOfMemoryError

SIZES = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8}
GEOMETRY = KVGeometry.uniform(**SIZES)


def build(xp, **changes):
    device = CPU if xp is np else Device("cuda")
    return KVCache(KVGeometry.uniform(**{**SIZES, **changes}), 5, MemoryPool(device))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layers_are_views_of_one_slab(xp, block_size, dtype):
    cache = build(xp, block_size=block_size, dtype=dtype)
    assert cache.slab.shape == (2, 2, 5, 3, block_size, 8)
    assert cache.slab.flags.c_contiguous and not cache.slab.any()
    assert cache.slab.nbytes == 5 * cache.geometry.bytes_per_block
    k_pages, v_pages = cache.layer(1)
    k_pages[4, 2, block_size - 1, 7] = 1
    v_pages[0] = 2
    assert float(cache.slab[1, 0, 4, 2, -1, 7]) == 1.0
    assert float(cache.page_slabs[0][3, 0].max()) == 2.0  # layer 1, v
    assert len(cache.layers) == 2 and cache.layers[1][0].flags.c_contiguous


LATENT = LayerCache((PageShape(1, 24),))
RECURRENT = LayerCache(states=(StateShape((6, 3), "bfloat16"), StateShape((2, 4, 8), "float32")))
MIXED = KVGeometry(
    (
        LayerCache.attention(2, 8),
        RECURRENT,
        LATENT,
        LayerCache.attention(4, 12, v_head_dim=8),
        LayerCache(source=0),
        LayerCache.attention(2, 8),
        RECURRENT,
    )
)


def mixed(xp):
    return KVCache(MIXED, 5, MemoryPool(CPU if xp is np else Device("cuda")), num_slots=3)


def test_layers_of_different_shapes_share_the_slabs_of_their_shapes(xp):
    cache = mixed(xp)
    shapes = [[array.shape for array in layer] for layer in cache.layers]
    assert shapes == [
        [(5, 2, 16, 8)] * 2,
        [(3, 6, 3), (3, 2, 4, 8)],
        [(5, 1, 16, 24)],
        [(5, 4, 16, 12), (5, 4, 16, 8)],
        [(5, 2, 16, 8)] * 2,
        [(5, 2, 16, 8)] * 2,
        [(3, 6, 3), (3, 2, 4, 8)],
    ]
    for number, array in enumerate(a for layer in cache.layers for a in layer):
        array[...] = number
    assert [[float(a[0].max()) for a in layer] for layer in cache.layers] == [
        *([7, 8], [2, 3], [4], [5, 6], [7, 8], [9, 10], [11, 12]),
    ]
    assert all(a.flags.c_contiguous for layer in cache.layers for a in layer)
    assert sum(slab.nbytes for slab in cache.page_slabs) == 5 * MIXED.bytes_per_block
    assert sum(slab.nbytes for slab in cache.state_slabs) == 3 * MIXED.bytes_per_slot
    assert MIXED.bytes_per_token == 4 * (4 * 16 + 24 + 4 * 20)
    assert MIXED.bytes_per_slot == 2 * (6 * 3 * 2 + 2 * 4 * 8 * 4)
    assert len(cache.page_slabs) == 4 and len(cache.state_slabs) == 2


def test_states_need_slots():
    with pytest.raises(ConfigError, match="num_slots must be at least 1 for these layers; got 0"):
        KVCache(MIXED, 5)
    assert KVCache(GEOMETRY, 5, num_slots=2).state_slabs == []


def test_poison_fills_exactly_the_freed_slots(xp):
    cache = mixed(xp)
    cache.poison_states([2])
    for slab in cache.state_slabs:
        assert xp.isnan(slab[:, 2].astype(np.float32)).all() and not slab[:, :2].any()
    assert not any(slab.any() for slab in cache.page_slabs)


@pytest.mark.parametrize("state_dtype", ["auto", "float32", "bfloat16", "float16"])
def test_state_dtypes(state_dtype):
    config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    if state_dtype == "float16":
        with pytest.raises(ConfigError, match="state_dtype must be one of 'auto', 'float32'"):
            KVGeometry.of_model(config, "bfloat16", state_dtype=state_dtype)
    else:
        geometry = KVGeometry.of_model(config, "bfloat16", 32, "fp8", state_dtype)
        assert geometry.layers == KVGeometry.uniform(1, 2, 8).layers and not geometry.has_states
        assert (geometry.block_size, geometry.dtype) == (32, "fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_slots_are_moved_in_all_layers(xp, dtype):
    """Also where a source is the target of another: all are read first."""
    cache = build(xp, dtype=dtype)
    values = np.random.default_rng(0).integers(0, 100, cache.slab.shape)
    cache.slab[...] = xp.asarray(values.astype(cache.slab.dtype))
    want = values.copy()
    sources, targets = [17, 40, 3, 79], [16, 17, 79, 0]
    for source, target in zip(sources, targets, strict=True):
        (a, b), (c, d) = divmod(source, 16), divmod(target, 16)
        want[:, :, c, :, d] = values[:, :, a, :, b]
    cache.move_slots(sources, targets)
    got = cache.slab if xp is np else cache.slab.get()
    np.testing.assert_array_equal(got.astype(np.int64), want)


def test_poison_fills_exactly_the_freed_blocks(xp):
    cache = build(xp)
    cache.poison([1, 3])
    cache.poison([])
    is_nan = xp.isnan(cache.slab).all(axis=(0, 1, 3, 4, 5))
    assert is_nan.tolist() == [False, True, False, True, False]
    assert not xp.isnan(cache.slab[:, :, [0, 2, 4]]).any()


def test_block_tables_are_checked():
    cache = build(np)
    cache.check_blocks([0, 4], "copies")
    for block in (-1, 5):
        with pytest.raises(ContractError, match=rf"^copies must .* in \[0, 5\); got {block}"):
            cache.check_blocks([0, block], "copies")


def test_close_returns_the_memory():
    pool = MemoryPool(CPU)
    cache = KVCache(GEOMETRY, 5, pool)
    cache.close()
    assert pool.used == 0 and cache.slab.nbytes == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_layers": 0}, ConfigError),
        ({"head_dim": -1}, ConfigError),
        ({"block_size": 17}, ConfigError),
        ({"dtype": "int4"}, DTypeError),
    ],
)
def test_bad_geometry(changes, error):
    with pytest.raises(error, match=next(iter(changes))):
        KVGeometry.uniform(**{**SIZES, **changes})


def test_bad_number_of_blocks():
    with pytest.raises(ConfigError, match="num_blocks must be at least 1; got 0"):
        KVCache(GEOMETRY, 0)


GIB = 1 << 30
LARGE = KVGeometry.uniform(
    num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"
)


def budget(**changes):
    fields = {"total": 140 * GIB, "others": GIB, "weights": 16 * GIB, "activations": 2 * GIB}
    return MemoryBudget(**{**fields, **changes})


def test_the_plan_is_what_fits_or_what_can_be_used():
    assert LARGE.bytes_per_block == 2 << 20
    plan = plan_num_blocks(budget(), LARGE, max_model_len=131072, max_num_seqs=256)
    assert plan.num_blocks == (int(140 * GIB * 0.9) - 19 * GIB) // (2 << 20)
    assert f"({plan.num_blocks * 16} tokens, 107.00 GiB)" in plan.reason
    assert "as many as fit into 107.00 GiB" in plan.reason
    plan = plan_num_blocks(budget(), LARGE, max_model_len=1000, max_num_seqs=4)
    assert plan.num_blocks == 4 * 63 and "4 requests of 1000 tokens" in plan.reason
    plan = plan_num_blocks(budget(), LARGE, max_model_len=1000, max_num_seqs=4, num_blocks=7)
    assert plan.reason == "7 blocks (112 tokens, 14.00 MiB): as asked for"
    assert plan.num_blocks == 7


def test_out_of_memory_lists_the_budget_and_what_would_fit():
    tight = budget(total=24 * GIB, others=2 * GIB)
    with pytest.raises(OutOfMemoryError) as caught:
        plan_num_blocks(tight, LARGE, max_model_len=131072, max_num_seqs=4)
    text = str(caught.value)
    for part in (
        "one request of max_model_len=131072 needs 16.00 GiB of KV cache",
        "24.00 GiB in total, of which 90% may be used",
        "others use 2.00 GiB, weights 16.00 GiB, activations 2.00 GiB",
        "left for the KV cache: 1.60 GiB",
        "enough for 13104 tokens",
        "max_model_len=13104",
        "free 14.40 GiB elsewhere",
    ):
        assert part in text, text
    assert "memory_utilization" not in text  # even 1 would not be enough
    plan_num_blocks(tight, LARGE, max_model_len=13104, max_num_seqs=4)


def test_out_of_memory_proposes_settings_that_work():
    tight = budget(total=24 * GIB, utilization=0.85)
    with pytest.raises(OutOfMemoryError, match=r"num_blocks=716; or memory_utilization=0.871"):
        plan_num_blocks(tight, LARGE, max_model_len=64, max_num_seqs=4, num_blocks=966)
    better = budget(total=24 * GIB, utilization=0.871)
    plan_num_blocks(better, LARGE, max_model_len=64, max_num_seqs=4, num_blocks=966)
    plan_num_blocks(tight, LARGE, max_model_len=64, max_num_seqs=4, num_blocks=716)


def test_out_of_memory_proposes_only_what_helps():
    geometry = KVGeometry.uniform(num_layers=32, num_kv_heads=8, head_dim=128)
    sizes = {"max_model_len": 4096, "max_num_seqs": 1}  # 1 GiB
    with pytest.raises(OutOfMemoryError, match='dtype="bfloat16", which halves'):
        plan_num_blocks(budget(total=20 * GIB), geometry, **sizes)
    large_steps = budget(activations=200 * GIB, weights=GIB)
    with pytest.raises(OutOfMemoryError, match=r"whose activations take 123\.00 GiB") as caught:
        plan_num_blocks(large_steps, geometry, **sizes)
    assert "bfloat16" not in str(caught.value)
    plan_num_blocks(budget(activations=123 * GIB, weights=GIB), geometry, **sizes)


def test_no_memory_is_left_for_blocks():
    full = budget(total=12 * GIB)
    with pytest.raises(
        OutOfMemoryError, match=r"enough for 0 tokens.*fit: free 8.20 GiB elsewhere"
    ):
        plan_num_blocks(full, LARGE, max_model_len=16, max_num_seqs=1)


@pytest.mark.parametrize("utilization", [0.0, 1.01, float("nan")])
def test_bad_utilization(utilization):
    with pytest.raises(ConfigError, match="utilization"):
        budget(utilization=utilization)
