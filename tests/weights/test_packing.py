"""Packed weights: every code where the layout says, and back; values as the formulas have them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from engine.errors import WeightsError
from engine.weights import FORMATS, pack_weight, unpack_weight
from engine.weights.packing import pack_codes, tile_groups, unpack_codes, untile_groups


def _code(planes, bits, row, column):
    """Read one code by the formulas in `packing`'s docstring."""
    data, high = planes
    tile = row // 16, column // 64
    g, hi = row % 8, row % 16 // 8
    step, inner = column % 64 // 16, column % 16
    lane, j, e = 4 * g + inner % 8 // 2, hi + 2 * (inner // 8), inner % 2
    words = data.view("<u4")[tile]
    if bits == 8:
        word = words.reshape(2, 32, 4)[step // 2, lane, 2 * (step % 2) + j // 2]
        return int(word) >> (8 * (j % 2 + 2 * e)) & 255
    code = int(words.reshape(32, 4)[lane, step]) >> (4 * (j + 4 * e)) & 15
    if bits == 5:
        code |= (int(high.view("<u4")[tile][lane]) >> (j + 4 * step + 16 * e) & 1) << 4
    if bits == 6:
        word = int(high.view("<u4")[tile].reshape(32, 2)[lane, step // 2])
        code |= (word >> (2 * (j + 4 * (step % 2) + 8 * e)) & 3) << 4
    return code


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("shape", [(16, 64), (37, 200), (1, 1)])
def test_codes_lie_where_the_layout_says(bits, shape):
    codes = np.random.default_rng(0).integers(0, 1 << bits, shape).astype(np.uint8)
    planes = pack_codes(codes.view(np.int8) if bits == 8 else codes, bits)
    for row, column in np.ndindex(*shape):
        assert _code(planes, bits, row, column) == codes[row, column]
    back = unpack_codes(*planes, bits, shape)
    np.testing.assert_array_equal(back.view(np.uint8), codes)


def test_groups_lie_where_the_layout_says():
    values = np.random.default_rng(0).standard_normal((37, 3, 2))
    tiled = tile_groups(values)
    for row, group in np.ndindex(37, 3):
        place = tiled[row // 16, group, row % 8, row // 8 % 2]
        np.testing.assert_array_equal(place, values[row, group])
    np.testing.assert_array_equal(untile_groups(tiled, 37), values)


def _groups(values, form, columns):
    return np.repeat(values.astype(np.float32), form.group, axis=1)[:, :columns]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.is_packed])
def test_values_are_the_formulas(name):
    form, rng = FORMATS[name], np.random.default_rng(1)
    rows, columns = 21, 512 if form.super_block else 100
    groups = -(-columns // form.group)
    signed = form.bits == 8
    codes = rng.integers(0, 1 << form.bits, (rows, columns)).astype(np.uint8)
    codes = codes.view(np.int8) if signed else codes
    if form.code == "e2m1":
        scales = rng.integers(120, 134, (rows, groups)).astype(np.uint8)
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        numbers = np.array([*table, *(-v for v in table)], np.float32)[codes]
        wanted = numbers * _groups(np.exp2(scales - 127.0), form, columns)
        made = pack_weight(form, codes, scales)
    elif form.super_block:
        scales = rng.integers(0, 64, (rows, groups)).astype(np.int8 if form.zero else np.uint8)
        mins = rng.integers(0, 64, (rows, groups)).astype(np.uint8) if form.offset else None
        supers = rng.random((rows, 2, 2) if form.offset else (rows, 2)).astype(np.float16)
        both = supers if form.offset else supers[..., None]
        per = 256 // form.group
        scale = np.repeat(both[..., 0].astype(np.float32), per, axis=1) * scales
        wanted = (codes - np.float32(form.zero)) * _groups(scale, form, columns)
        if mins is not None:
            low = np.repeat(both[..., 1].astype(np.float32), per, axis=1) * mins
            wanted = wanted - _groups(low, form, columns)
        made = pack_weight(form, codes, scales, mins, supers)
    else:
        scales = rng.random((rows, groups)).astype(np.float16)
        offsets = None
        wanted = codes.astype(np.float32) - form.zero
        if form.offset == "zero":
            offsets = rng.integers(0, 16, (rows, groups))
            wanted = wanted - _groups(offsets, form, columns)
        wanted = wanted * _groups(scales, form, columns)
        if form.offset == "min":
            offsets = rng.standard_normal((rows, groups)).astype(np.float16)
            wanted = wanted + _groups(offsets, form, columns)
        made = pack_weight(form, codes, scales, offsets)
    assert made.shape == (rows, columns)
    np.testing.assert_allclose(unpack_weight(made), wanted, rtol=1e-6, atol=1e-6)


def test_a_permutation_is_undone():
    form, rng = FORMATS["int4_g32"], np.random.default_rng(2)
    codes = rng.integers(0, 16, (16, 64)).astype(np.uint8)
    scales = rng.random((16, 2)).astype(np.float16)
    order = rng.permutation(64).astype(np.int32)
    plain = unpack_weight(pack_weight(form, codes, scales))
    ordered = unpack_weight(pack_weight(form, codes, scales, permutation=order))
    np.testing.assert_array_equal(ordered[:, order], plain)


def test_q4_0_is_ggufs():
    array = np.random.default_rng(3).standard_normal((40, 512)).astype(np.float32)
    raw = quants.quantize(array, GGMLQuantizationType.Q4_0)
    blocks = raw.reshape(40, -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    nibbles = blocks[..., 2:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(40, 512)
    made = unpack_weight(pack_weight(FORMATS["q4_0"], codes, scales))
    np.testing.assert_array_equal(made, quants.dequantize(raw, GGMLQuantizationType.Q4_0))


def test_shapes_are_checked():
    codes, scales = np.zeros((16, 64), np.uint8), np.ones((16, 2), np.float16)
    with pytest.raises(WeightsError, match=r"scales must have shape \(16, 2\); got \(16, 3\)"):
        pack_weight(FORMATS["int4_g32"], codes, np.ones((16, 3), np.float16))
    with pytest.raises(WeightsError, match="offsets of int4_g32 must be None"):
        pack_weight(FORMATS["int4_g32"], codes, scales, scales)
    with pytest.raises(WeightsError, match=r"super_scales must have shape \(16, 1, 2\); got None"):
        small = np.ones((16, 2), np.uint8)
        pack_weight(FORMATS["q4_k"], codes, small, small)
    with pytest.raises(WeightsError, match="bits must be 4, 5, 6 or 8; got 3"):
        pack_codes(codes, 3)
