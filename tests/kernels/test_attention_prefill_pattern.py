"""attention_prefill with patterns: both kernels against the mirror, the mirror against loops."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import CompileError, ContractError
from engine.kernels import BlockSparse, Periodic, _nvrtc
from engine.kernels._module import compile_module
from engine.kernels.attention_prefill import sm90 as prefill_sm90
from engine.kernels.attention_prefill import specs as prefill_specs
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, cu_seqlens, paged_cache
from engine.testing.tolerances import assert_close

_PATTERNS = [
    BlockSparse(np.random.default_rng(0).random((6, 7)) < 0.4, 64, 64),
    BlockSparse(np.random.default_rng(1).random((4, 3)) < 0.5, 128, 128),
    BlockSparse(np.random.default_rng(2).random((30, 80)) < 0.3, 17, 7),  # aligned with no tile
    BlockSparse(np.random.default_rng(3).random((2, 2)) < 0.5, 100, 100),  # fewer keys than exist
    BlockSparse(np.zeros((4, 4), bool), 128, 128),
    BlockSparse(np.ones((4, 4), bool), 128, 128),
    Periodic(300, 40),
    Periodic(300, 41, 20),
    Periodic(7, 3, 2),
    Periodic(1, 1),
    Periodic(2**29, 30),
    # A thread's keys end up to 7 before its tile's. One span of 128, 96 or 64 keys; and just short.
    Periodic(168, 40, 160),
    Periodic(160, 40, 9),
    Periodic(136, 40, 7),
    Periodic(128, 40, 70),
    Periodic(96, 40, 95),
    BlockSparse(np.random.default_rng(4).random((12, 4)) < 0.5, 33, 128),
]
_SPIN = """extern "C" __global__ void spin(long long clocks) {
  for (long long end = clock64() + clocks; clock64() < end;) {}
}"""
_CASE = AttentionCase((200, 70, 0, 1), (200, 390, 5, 129), 4, 2)


def _sees(pattern, position, key):
    if isinstance(pattern, Periodic):
        return (position - key + pattern.offset) % pattern.period < pattern.width
    row, column = position // pattern.block_q, key // pattern.block_k
    rows, columns = pattern.mask.shape
    return 0 <= row < rows and column < columns and bool(pattern.mask[row, column])


def _inputs(case, dtype):
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), dtype, seed=1)
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q)}
    if case.block_size:
        sizes = case.num_kv_heads, case.block_size, case.head_dim
        k, v, where["block_tables"], where["context_lens"] = paged_cache(
            case.lens_k, *sizes, dtype, seed=2
        )
    else:
        shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
        k, v = cases.normal(shape, dtype, seed=3), cases.normal(shape, dtype, seed=4)
        where["cu_seqlens_k"] = cu_seqlens(case.lens_k)
    return q, k, v, where


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", _PATTERNS, ids=str)
def test_mirror_is_the_formula(pattern, causal):
    q, k, v, where = _inputs(_CASE, "float32")
    out, lse = reference.attention_prefill(
        q, k, v, **where, causal=causal, pattern=pattern, return_lse=True
    )
    q_ends, k_ends = where["cu_seqlens_q"], where["cu_seqlens_k"]
    for b in range(len(_CASE.lens_q)):
        n, m = _CASE.lens_q[b], _CASE.lens_k[b]
        for i in range(0, n, 13):
            position = m - n + i if causal else i
            last = position if causal else m - 1
            seen = [j for j in range(last + 1) if _sees(pattern, position, j)]
            keys = k[k_ends[b] : k_ends[b] + m][seen].astype(np.float64)
            values = v[k_ends[b] : k_ends[b] + m][seen].astype(np.float64)
            for h in range(_CASE.num_heads):
                s = keys[:, h // 2] @ q[q_ends[b] + i, h].astype(np.float64) / 8
                got = out[q_ends[b] + i, h], lse[q_ends[b] + i, h]
                if not seen:
                    assert (got[0] == 0).all() and np.isneginf(got[1])
                    continue
                p = np.exp(s - s.max())
                np.testing.assert_allclose(got[0], p @ values[:, h // 2] / p.sum(), atol=1e-5)
                np.testing.assert_allclose(got[1], s.max() + np.log(p.sum()), atol=1e-5)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(
    ("head_dim", "block_size", "causal"), [(64, 0, True), (128, 16, True), (80, 0, False)]
)
@pytest.mark.grid("pattern", _PATTERNS, ids=str)
def test_matches_mirror(xp, pattern, head_dim, block_size, causal, dtype, tier):
    case = AttentionCase(_CASE.lens_q, _CASE.lens_k, 4, 2, head_dim, block_size)
    q, k, v, where = _inputs(case, dtype)
    rule = {"causal": causal, "pattern": pattern, "return_lse": True}
    want, want_lse = reference.attention_prefill(q, k, v, **where, **rule)
    out, buffer = cases.guarded(xp, q.shape, q.dtype)
    moved = {name: xp.asarray(array) for name, array in where.items()}
    got, lse = kernels.attention_prefill(*cases.to_module(xp, q, k, v), **moved, **rule, out=out)
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("options", [{"window": 50}, {"softcap": 5.0}, {"num_splits": 3}], ids=str)
@pytest.mark.grid("pattern", [_PATTERNS[0], _PATTERNS[6]], ids=str)
@pytest.mark.grid("head_dim", [64, 96, 128, 192, 256])
def test_goes_with_the_other_options(xp, head_dim, pattern, options):
    case = AttentionCase((300, 33), (700, 33), 8, 1, head_dim)
    q, k, v, where = _inputs(case, "bfloat16")
    rule = {name: value for name, value in options.items() if name != "num_splits"}
    want = reference.attention_prefill(q, k, v, **where, **rule, pattern=pattern)
    moved = {name: xp.asarray(array) for name, array in where.items()}
    got = kernels.attention_prefill(
        *cases.to_module(xp, q, k, v), **moved, **options, pattern=pattern
    )
    assert_close(got, want, reduction=case.reduction)


def test_a_pattern_that_hides_nothing_changes_nothing(xp):
    q, k, v, where = _inputs(_CASE, "float32")
    moved = {name: xp.asarray(array) for name, array in where.items()}
    plain = kernels.attention_prefill(*cases.to_module(xp, q, k, v), **moved)
    for pattern in (_PATTERNS[5], Periodic(9, 9)):
        got = kernels.attention_prefill(*cases.to_module(xp, q, k, v), **moved, pattern=pattern)
        np.testing.assert_array_equal(to_numpy(got), to_numpy(plain))


@pytest.mark.gpu
def test_skipped_keys_are_not_read(cp, tier):
    """NaN in K and V that no query sees: a mask applied after P V would spread it."""
    n = 1024
    q, k, v = (cases.normal((n, 2, 64), "bfloat16", seed) for seed in range(3))
    k[256:768], v[256:768] = np.nan, np.nan
    mask = np.ones((8, 8), bool)
    mask[:, 2:6] = False
    seen = np.r_[0:256, 768:n]
    lens, few = cu_seqlens([n]), cu_seqlens([len(seen)])
    want = reference.attention_prefill(
        q, k[seen], v[seen], cu_seqlens_q=lens, cu_seqlens_k=few, causal=False
    )
    got = kernels.attention_prefill(
        *cases.to_module(cp, q, k, v),
        cu_seqlens_q=cp.asarray(lens),
        cu_seqlens_k=cp.asarray(lens),
        causal=False,
        pattern=BlockSparse(mask, 128, 128),
    )
    assert_close(got, want, reduction=n + 64)


@pytest.mark.gpu
def test_a_pattern_may_be_dropped_before_its_kernel_has_run(cp):
    """The next one's bits, copied on a stream of their own, must not take its memory."""
    n = 256
    lens = cp.asarray(cu_seqlens([n]))
    rule = {"cu_seqlens_q": lens, "cu_seqlens_k": lens, "causal": False, "max_seqlen_q": n}
    arrays = cases.to_module(cp, *(cases.normal((n, 2, 64), "bfloat16", seed) for seed in range(3)))
    seen, hidden = np.ones((2, 2), bool), np.zeros((2, 2), bool)
    want = kernels.attention_prefill(*arrays, **rule, pattern=BlockSparse(seen, 128, 128))
    spin = cp.RawKernel(_SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))  # loads it
    cp.cuda.Device().synchronize()
    spin((1,), (1,), (np.int64(10**8),))
    got = kernels.attention_prefill(*arrays, **rule, pattern=BlockSparse(seen, 128, 128))
    BlockSparse(hidden, 128, 128).words()
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_compiles_without_spills(dtype, arch):
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(str(error))
    specs = [s for s in prefill_specs(dtype, patterns=True) if dict(s.defines).get("PATTERN")]
    assert specs
    for spec in specs:
        if spec.supports(arch):
            compiled = compile_module(spec, arch)
            assert not any(entry.spill_bytes or entry.stack_bytes for entry in compiled.entries)
            assert "serialized" not in compiled.log


@pytest.mark.parametrize(
    ("pattern", "keys"), [(_PATTERNS[0], 64), (_PATTERNS[1], 128), (_PATTERNS[6], 128)], ids=str
)
def test_tiles_of_patterns(pattern, keys):
    for head_dim, want in ((64, 128), (80, 128), (128, keys), (192, 64), (256, 64)):
        tile = prefill_sm90.choose_hopper_tile("float16", head_dim, pattern)
        assert tile.is_patterned and tile.keys == want and tile.shared_bytes <= 227 * 1024


def test_more_heads_a_group_than_rows_of_a_tile(xp):
    """Pattern tiles have 128 rows, others up to 192; a token's heads must fit."""
    lens, pattern = xp.asarray(cu_seqlens([3])), Periodic(5, 2)
    q, k, v = (cases.normal((3, h, 64), "bfloat16", seed=h) for h in (150, 1, 1))
    got = kernels.attention_prefill(
        *cases.to_module(xp, q, k, v), cu_seqlens_q=lens, cu_seqlens_k=lens, pattern=pattern
    )
    starts = cu_seqlens([3])
    want = reference.attention_prefill(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, pattern=pattern
    )
    assert_close(to_numpy(got), to_numpy(want), reduction=3)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_numbers_of_numpy(xp, kind):
    """Positions divided by an unsigned integer would become floats."""
    q, k, v, where = _inputs(_CASE, "float32")
    moved = {name: xp.asarray(array) for name, array in where.items()}
    arrays, mask = cases.to_module(xp, q, k, v), _PATTERNS[2].mask
    for given, plain in (
        (Periodic(kind(100), kind(90), kind(99)), Periodic(100, 90, 99)),
        (BlockSparse(mask, kind(17), kind(7)), BlockSparse(mask, 17, 7)),
    ):
        assert repr(given) == repr(plain)
        got, want = (
            to_numpy(kernels.attention_prefill(*arrays, **moved, pattern=p)) for p in (given, plain)
        )
        np.testing.assert_array_equal(got, want)


def test_contract(xp):
    q = xp.ones((4, 2, 8), np.float32)
    lens = xp.asarray(cu_seqlens([4]))
    with pytest.raises(ContractError, match="pattern: must be BlockSparse, Periodic or None; got"):
        kernels.attention_prefill(q, q, q, cu_seqlens_q=lens, cu_seqlens_k=lens, pattern=3)
    with pytest.raises(ContractError, match="mask: must be an array of bool with two axes"):
        BlockSparse(np.ones((3, 3)), 16, 16)
    with pytest.raises(ContractError, match="block_k: must be an int from 1 to 1073741823; got 0"):
        BlockSparse(np.ones((3, 3), bool), 16, 0)
    with pytest.raises(ContractError, match="period: must be an int from 1 to 1073741823; got 2"):
        Periodic(2.5, 1)
    with pytest.raises(ContractError, match="width: must be an int from 1 to 8; got 9"):
        Periodic(8, 9)
    with pytest.raises(ContractError, match="offset: must be an int from 0 to 7; got -1"):
        Periodic(8, 2, -1)
