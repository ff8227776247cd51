"""KV pages as views: every op on pages equals itself on contiguous pages, in any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.kernels._pages import PageRows
from engine.testing import cases
from engine.testing.cases_attention import (
    PAGE_LAYOUTS,
    AttentionCase,
    as_codes,
    cu_seqlens,
    in_layout,
    paged_cache,
)
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close

# Clusters of each size, the persistent schedule, many rows, and heads that only the portable
# kernel supports; every block size.
_DECODE = (
    AttentionCase((1,), (700,), 32, 8, 128, block_size=16),
    AttentionCase((1,) * 5, (0, 63, 65, 127, 5000), 8, 2, 64, block_size=32),
    AttentionCase((1,) * 12, (*range(126, 131), 0, 1, 900, 513, 77, 0, 3), 14, 2, 128, 64),
    AttentionCase((1,) * 70, tuple(range(0, 700, 10)), 8, 4, 128, block_size=16),
    AttentionCase((1,) * 70, tuple(range(0, 700, 10)), 8, 4, 64, block_size=128, window=90),
    AttentionCase((4, 4), (300, 64), 16, 2, 128, block_size=16, softcap=5.0),
    AttentionCase((8,), (1500,), 16, 2, 64, block_size=16),
    AttentionCase((3, 3), (100, 2), 8, 1, 96, block_size=16),
)
_PREFILL = (
    AttentionCase((70, 33), (70, 200), 4, 2, 64, block_size=16),
    AttentionCase((129, 17, 1), (640, 17, 300), 8, 2, 128, block_size=16),
    AttentionCase((5, 300), (900, 300), 8, 8, 128, block_size=32, window=50),
    AttentionCase((40, 200), (70, 2000), 8, 1, 256, block_size=64, softcap=5.0),
    AttentionCase((129,), (640,), 4, 2, 96, block_size=128),
    AttentionCase((20, 3), (40, 50), 2, 2, 80, block_size=16),
)


def _pages(case, codes, dtype="bfloat16"):
    """Return contiguous pages, tables and lengths, and the scales by name if quantized."""
    sizes = case.num_kv_heads, case.block_size, case.head_dim
    source = "float32" if codes else dtype
    k, v, tables, lens = paged_cache(case.lens_k, *sizes, source, seed=3)
    if not codes:
        return (k, v), (tables, lens), {}
    (k, k_scale), (v, v_scale) = as_codes(k, 5, codes), as_codes(v, 6, codes)
    return (k, v), (tables, lens), {"k_scale": k_scale, "v_scale": v_scale}


def _on(xp, named):
    return {name: cases.to_module(xp, array) for name, array in named.items()}


@pytest.mark.grid("codes", ["", "fp8"])
@pytest.mark.grid("case", _DECODE, ids=str)
@pytest.mark.grid("layout", PAGE_LAYOUTS)
def test_decode(xp, layout, case, codes, tier):
    pages, where, scales = _pages(case, codes)
    shape = (len(case.lens_q), case.lens_q[0], case.num_heads, case.head_dim)
    q = cases.normal(shape, "bfloat16", seed=1)
    where = dict(zip(("block_tables", "context_lens"), where, strict=True)) | scales
    want = reference.attention_decode(q, *pages, **where, **case.rule)
    views = in_layout(xp, *pages, layout)
    got = kernels.attention_decode(
        cases.to_module(xp, q),
        *views,
        **_on(xp, where),
        **case.rule,
        max_context_len=max(case.lens_k),
    )
    assert_close(got, want, reduction=case.reduction)


@pytest.mark.grid("codes", ["", "int8"])
@pytest.mark.grid("case", _PREFILL, ids=str)
@pytest.mark.grid("layout", PAGE_LAYOUTS)
def test_prefill(xp, layout, case, codes, tier):
    """With the bits that contiguous pages give."""
    pages, where, scales = _pages(case, codes)
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), "bfloat16", seed=1)
    where = dict(zip(("block_tables", "context_lens"), where, strict=True)) | scales
    where["cu_seqlens_q"] = cu_seqlens(case.lens_q)
    q_xp = cases.to_module(xp, q)
    rule = {**_on(xp, where), **case.rule, "max_seqlen_q": max(case.lens_q)}
    got = kernels.attention_prefill(q_xp, *in_layout(xp, *pages, layout), **rule)
    if layout[-1] == "0" or (layout[-1] == "8" and not codes):  # aligned rows: the same kernel
        want = kernels.attention_prefill(q_xp, *cases.to_module(xp, *pages), **rule)
        np.testing.assert_array_equal(to_numpy(got), to_numpy(want))
    want = reference.attention_prefill(q, *pages, **where, **case.rule)
    assert_close(got, want, reduction=case.reduction)


@pytest.mark.grid("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("codes", ["", "fp8"])
@pytest.mark.parametrize("op", ["kv_store", "qk_norm_rope_store", "attention_decode"])
def test_stores(xp, layout, codes, op):
    """Rows go to their slots, and nothing else in the buffer changes."""
    case = AttentionCase((1,) * 7, (1, 30, 5, 17, 2, 33, 90), 6, 2, 64, block_size=16)
    pages, (tables, lens), scales = _pages(case, codes)
    slots = tables[np.arange(7), (lens - 1) // 16].astype(np.int64) * 16 + (lens - 1) % 16
    slots[2] = -1
    qkv = cases.normal((7, 10, 64), "bfloat16", seed=4)
    at = {"positions": np.arange(7, dtype=np.int32), "cos_sin": cos_sin_table(9, 64)}
    if op == "attention_decode":
        at |= {"block_tables": tables, "context_lens": lens}

    def run(module, where, views):
        rows = cases.to_module(where, qkv).copy()
        q, k, v = rows[:, :6], rows[:, 6:8], rows[:, 8:]
        gslots = cases.to_module(where, slots)
        others = _on(where, at)
        if op == "kv_store":
            module.kv_store(k, v, *views, gslots, **_on(where, scales))
        elif op == "qk_norm_rope_store":
            arrays = others["positions"], others["cos_sin"]
            module.qk_norm_rope_store(q, k, v, *arrays, *views, gslots, **_on(where, scales))
        else:
            others |= _on(where, scales) | {"slot_mapping": gslots}
            return module.attention_decode(q[:, None], *views, k=k[:, None], v=v[:, None], **others)
        return q

    views = in_layout(xp, *pages, layout)
    want = run(reference, np, pages)
    buffer = views[0].base
    before = to_numpy(buffer).copy()
    got = run(kernels, xp, views)
    assert_close(got, want, reduction=154)
    for view, page in zip(views, pages, strict=True):
        assert_close(view.copy(), page, reduction=64)
    changed = (to_numpy(buffer).view(np.uint8) != before.view(np.uint8)).reshape(buffer.size, -1)
    assert 0 < changed.any(axis=1).sum() <= 2 * 6 * 2 * 64


def test_page_rows():
    """One coordinate per token and head; a box never ends beyond the buffer."""
    for layout in PAGE_LAYOUTS[:-1]:
        pages, _ = in_layout(np, *np.zeros((2, 5, 3, 32, 64), np.float16), layout)
        rows = PageRows.of(pages)
        assert rows.is_supported
        assert rows.has_adjacent_tokens == (layout in ("P2KND0", "KP2ND0"))
        start = pages.__array_interface__["data"][0]
        for page, head, token in np.ndindex(5, 3, 32):
            row = page * rows.page + head * rows.head + token * rows.token
            found = pages[page, head, token].__array_interface__["data"][0]
            assert found == start + row * rows.row_bytes
        tokens, size = rows.map_sizes(16)
        last = 4 * rows.page + 2 * rows.head + 16 * rows.token
        assert (tokens, size) == (16, last + 1)


def test_page_rows_of_unusual_pages():
    pages = np.zeros((5, 3, 32, 64), np.float16)
    assert not PageRows.of(pages[::-1]).is_supported
    assert not PageRows.of(pages[:0]).is_supported
    one = PageRows.of(pages[:1, ::2][:, :1])  # strides of axes of size 1 do not count
    assert (one.page, one.head, one.token, one.row_bytes) == (0, 0, 1, 128)
    far = np.lib.stride_tricks.as_strided(pages, strides=(2**39, 2**10, 128, 2))
    assert not PageRows.of(far).is_supported


def test_contract(xp):
    pages = xp.zeros((2, 4, 3, 16, 8), np.float32)
    rows, slots = xp.zeros((2, 3, 8), np.float32), xp.zeros(2, np.int64)
    store = kernels.kv_store
    with pytest.raises(ShapeError, match=r"kv_store: v_pages: must have the strides of k_pages, "):
        store(rows, rows, pages[0], xp.zeros((4, 3, 32, 8), np.float32)[:, :, ::2], slots)
    with pytest.raises(ShapeError, match="k_pages: its last axis must be contiguous; got strides"):
        store(rows, rows, *pages[..., ::-1], slots)
    if xp is np:
        pages.flags.writeable = False
        with pytest.raises(ContractError, match="k_pages: must be writeable"):
            store(rows, rows, *pages, slots)


@pytest.mark.gpu
def test_clusters_copy_strided_tokens(cp, monkeypatch):
    """The bits of a cluster depend on the layout only through the order of a tile's keys."""
    case = replace(_DECODE[0], lens_k=(5000,))
    pages, where, _ = _pages(case, "")
    q = cases.to_module(cp, cases.normal((1, 1, 32, 128), "bfloat16", seed=1))
    tables, lens = cases.to_module(cp, *where)
    results = [
        to_numpy(
            kernels.attention_decode(
                q, *in_layout(cp, *pages, layout), block_tables=tables, context_lens=lens
            )
        )
        for layout in ("PKN2D0", "P2NKD0", "PLN2KD0")
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
