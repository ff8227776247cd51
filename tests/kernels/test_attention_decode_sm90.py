"""attention_decode on Hopper: edge cases in both tiers, and configuration."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.kernels.attention_decode import sm90 as decode_sm90
from engine.kernels.attention_decode import specs
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, paged_cache
from engine.testing.tolerances import assert_close

_MANY = np.random.default_rng(0).integers(0, 700, 40)

# Few and many sequences (clusters, persistent CTAs), lengths near multiples of 128-key tiles, 16 to
# 64 rows, work tiles that begin and end inside a page.
_CASES = (
    AttentionCase((1,), (1000,), 32, 8, 128, block_size=16),
    AttentionCase((1,), (1,), 8, 2, 128, block_size=16),
    AttentionCase((1,) * 10, (0, 1, 15, 16, 17, 127, 128, 129, 255, 257), 8, 2, 128, block_size=16),
    AttentionCase((1,) * 6, (0, 127, 128, 129, 5000, 0), 8, 2, 64, block_size=32),
    AttentionCase((1,) * 40, tuple(_MANY.tolist()), 8, 2, 128, block_size=16),
    AttentionCase(
        (1,) * 300, (*_MANY.tolist(), *(0, 9, 0) * 20, *(0,) * 200), 32, 32, 64, block_size=16
    ),
    AttentionCase((2,) * 30, (0,) * 30, 8, 8, 128, block_size=16),
    AttentionCase((1,) * 80, (*_MANY.tolist(), *_MANY.tolist()), 4, 1, 64, block_size=64),
    AttentionCase((2,) * 5, (1, 2, 3, 200, 1000), 32, 8, 128, block_size=64),
    AttentionCase((8,) * 20, (300, 7, 0, 8, 129) * 4, 8, 2, 128, block_size=16),
    AttentionCase((8,) * 20, (700, 9) * 10, 16, 2, 128, block_size=16),
    AttentionCase((8,) * 20, (700, 9) * 10, 16, 2, 64, block_size=16),
    AttentionCase((3,) * 20, (2000, 20) * 10, 4, 2, 128, block_size=32, window=77),
    AttentionCase((1,) * 20, (400, 20) * 10, 4, 1, 128, block_size=128, softcap=5.0, scale=0.2),
    # Few sequences; query tokens are divided into 2, 2, 4, 4, 3 and 3 parts. Includes short ones.
    AttentionCase((8,), (1500,), 28, 7, 128, block_size=16),
    AttentionCase((8,) * 2, (0, 3), 12, 3, 128, block_size=16),
    AttentionCase((8,) * 3, (4, 5, 130), 8, 1, 128, block_size=16),
    AttentionCase((8,), (6,), 8, 1, 64, block_size=32),
    AttentionCase((3,), (900,), 32, 2, 64, block_size=16, window=100),
    AttentionCase((6,) * 2, (1100, 2), 8, 1, 128, block_size=16, window=3, softcap=4.0),
    # Clusters of four: one CTA per SM, then two.
    AttentionCase((1,) * 12, (*range(126, 131), 0, 1, 4000, 513, 77, 0, 3), 14, 2, 128, 16),
    AttentionCase((8,) * 2, (3, 2100), 32, 8, 128, block_size=64),
    AttentionCase((8,) * 2, (1300, 0), 64, 8, 64, block_size=16, window=300),
    AttentionCase((1,) * 15, (*range(60, 70), 0, 1, 1000, 513, 2), 28, 4, 128, block_size=16),
    AttentionCase((2,) * 15, (*range(60, 70), 0, 1, 1000, 513, 2), 28, 4, 64, block_size=32),
    AttentionCase((1,) * 10, (0, 4096, 1, 3000, 64, 65, 2000, 127, 129, 3), 16, 4, 128, 16),
    # Clusters of two.
    AttentionCase((1,) * 33, (*range(60, 70), 0, 1, 1000, *_MANY[:20]), 28, 4, 128, block_size=16),
    AttentionCase((2,) * 16, (*range(60, 70), 2, 3, 1000, 513, 2, 4), 28, 4, 64, block_size=32),
    AttentionCase((1,) * 10, (0, 4096, 1, 3000, 64, 65, 2000, 127, 129, 3), 32, 8, 128, 16),
    # Persistent, one CTA per SM.
    AttentionCase((1,) * 40, (1500, *_MANY[:39]), 12, 3, 128, block_size=16),
    AttentionCase((3,) * 40, (2000, *(_MANY[:39] + 3)), 12, 3, 64, block_size=32, window=77),
    # Equal lengths, on 132 multiprocessors: whole, in four parts, and shares that do not divide.
    AttentionCase((1,) * 40, (577,) * 40, 32, 4, 128, block_size=16),
    AttentionCase((1,) * 4, (5120,) * 4, 16, 8, 128, block_size=16),
    AttentionCase((2,) * 34, (800,) * 34, 8, 8, 64, block_size=16),
    # More than 32 sequences per lane of the scheduler.
    AttentionCase((1,) * 1100, tuple(np.resize((9, 0, 70, 0, 131), 1100).tolist()), 4, 2, 64, 16),
)


def _inputs(case, dtype):
    """Return q, key and value pages, block tables and lengths."""
    shape = (len(case.lens_q), case.lens_q[0], case.num_heads, case.head_dim)
    cache = paged_cache(
        case.lens_k, case.num_kv_heads, case.block_size, case.head_dim, dtype, seed=2
    )
    return cases.normal(shape, dtype, seed=1), *cache


def _run(op, xp, arrays, **keywords):
    q, k, v, tables, lens = cases.to_module(xp, *arrays)
    return op(q, k, v, block_tables=tables, context_lens=lens, **keywords)


@pytest.mark.gpu
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("case", _CASES, ids=range(len(_CASES)))
def test_both_tiers(cp, case, dtype, tier):
    arrays = _inputs(case, dtype)
    want, want_lse = _run(reference.attention_decode, np, arrays, **case.rule, return_lse=True)
    for num_splits in (None, 3):
        for _ in range(2):  # the first call must reset the counters to 0
            got, lse = _run(
                kernels.attention_decode,
                cp,
                arrays,
                **case.rule,
                num_splits=num_splits,
                return_lse=True,
            )
            assert_close(got, want, reduction=case.reduction)
            assert_close(lse, want_lse, reduction=case.reduction, name="lse")


@pytest.mark.gpu
def test_num_splits_makes_a_result_independent_of_the_batch(cp, tier):
    """A sequence has the same bits alone and in a batch."""
    case = AttentionCase((2,) * 30, (900, 40, 333) * 10, 8, 2, 128, block_size=16)
    q, k, v, tables, lens = cases.to_module(cp, *_inputs(case, "bfloat16"))
    whole = kernels.attention_decode(q, k, v, block_tables=tables, context_lens=lens, num_splits=5)
    for b in (0, 1, 2, 29):
        one = slice(b, b + 1)
        alone = kernels.attention_decode(
            q[one], k, v, block_tables=tables[one], context_lens=lens[one], num_splits=5
        )
        np.testing.assert_array_equal(to_numpy(alone), to_numpy(whole[one]))


def test_hopper_tiles_are_chosen_as_measured(monkeypatch):
    monkeypatch.setattr(decode_sm90, "sm_count", lambda: 132)

    def choice(batch, bound, num_queries=1, may_use_clusters=True):
        shape = batch, num_queries, 32, 128
        how = {"kv_dtype": "", "may_use_clusters": may_use_clusters}
        tile = decode_sm90._choose("bfloat16", shape, 8, bound, **how)
        return tile.box_keys, tile.row_tiles, tile.cluster, tile.ctas_per_sm

    assert choice(1, 1024) == choice(1, 2048) == (8, 1, 8, 1)
    assert choice(1, 2049) == choice(1, 16384) == (16, 1, 8, 1)
    assert choice(2, 1025) == choice(3, 4096) == (16, 1, 4, 1)
    assert choice(2, 1024) == choice(4, 1024) == choice(7, 4096) == (8, 1, 4, 2)
    assert choice(8, 1024) == choice(16, 1024) == choice(11, 4096) == (8, 1, 2, 2)
    assert choice(3, 4097) == choice(12, 1025) == choice(16, 16384) == (16, 1, 1, 1)
    assert choice(2, 4096, num_queries=8) == (16, 2, 4, 1)
    assert choice(4, 1024, num_queries=8) == (16, 2, 1, 1)
    assert choice(17, 1024) == choice(256, 16384) == (8, 1, 1, 2)
    assert choice(256, 1024, num_queries=8) == (16, 2, 1, 1)
    for batch in (1, 3, 200):  # the bits must not depend on the batch
        assert choice(batch, 1024, may_use_clusters=False) == (8, 1, 1, 2)


def test_tokens_are_divided_where_the_chip_has_room():
    for batch in (1, 2, 5, 16):
        for num_queries in range(1, 9):
            for kv_heads, group in ((1, 1), (1, 16), (2, 8), (4, 4), (8, 4), (8, 8)):
                parts = decode_sm90.choose_token_parts(
                    batch, num_queries, kv_heads * group, kv_heads, 132
                )
                rows = num_queries * group
                assert num_queries % parts == 0
                assert parts == 1 or batch * parts * kv_heads <= 15
                assert parts == 1 or -(-rows // parts // 16) < -(-rows // 16)
    assert decode_sm90.choose_token_parts(1, 8, 28, 7, 132) == 2
    assert decode_sm90.choose_token_parts(1, 8, 32, 8, 132) == 1  # 16 clusters are too many
    assert decode_sm90.choose_token_parts(1, 8, 16, 1, 132) == 8
    assert decode_sm90.choose_token_parts(3, 8, 8, 1, 132) == 4
    assert decode_sm90.choose_token_parts(1, 4, 32, 8, 132) == 1  # already a single row tile


def test_all_that_divided_tokens_launch_is_compiled_beforehand():
    wanted = set(specs("bfloat16", head_dim=128, num_rows=64))
    fewer = specs("bfloat16", head_dim=128, num_rows=32)
    assert {spec for spec in fewer if _is_whole_cluster(spec)} <= wanted


def _is_whole_cluster(spec):
    return int(dict(spec.defines).get("CLUSTER", 1)) == 8
