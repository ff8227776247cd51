"""Blocks of .gguf files as codes and scales, against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.gguf_quants import FORMATS
from engine.loading.quantized import QuantizedCheckpoint, QuantizedRows
from engine.loading.quantized.gguf import GGUF_FORMATS
from engine.weights import unpack_weight

KINDS = [Type[name] for name in GGUF_FORMATS]
ROWS, COLUMNS = 24, 512
# Offsets of the float16 scales in a block.
SCALES = {kind: (0, 2) for kind in KINDS} | {Type.Q6_K: (208,), Type.MXFP4: ()}
SCALES |= dict.fromkeys((Type.Q8_0, Type.Q4_0, Type.Q5_0), (0,))


def random_rows(kind: Type, shape=(ROWS, COLUMNS)) -> np.ndarray:
    """Return rows of random blocks (rows, bytes): all codes and factors appear."""
    rng = np.random.default_rng(int(kind))
    block, itemsize = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    blocks = rng.integers(0, 256, (count, itemsize), np.uint8)
    if kind == Type.MXFP4:
        blocks[:, 0] = rng.integers(100, 150, count)
    for place in SCALES[kind]:
        scale = rng.standard_normal(count).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks.reshape(*shape[:-1], -1)


@pytest.fixture
def write(tmp_path):
    def make(raw, kind) -> QuantizedCheckpoint:
        path = tmp_path / "x.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("w", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return QuantizedCheckpoint(GgufFile(path))

    return make


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(write, kind):
    raw = random_rows(kind)
    checkpoint = write(raw, kind)
    wanted = gguf.dequantize(raw, kind)
    assert checkpoint.format_of("w").name == kind.name.lower()
    rows = checkpoint.read_rows("w", 0, ROWS)
    np.testing.assert_array_equal(rows.numbers(), wanted)
    np.testing.assert_array_equal(unpack_weight(rows.to_weight()), wanted)
    np.testing.assert_array_equal(checkpoint.read("w", 0, ROWS), wanted)
    part = checkpoint.read_rows("w", 3, 9, (256, 512))
    np.testing.assert_array_equal(part.numbers(), wanted[3:9, 256:])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_in_another_order_and_joined(write, kind):
    raw = random_rows(kind)
    rows = write(raw, kind).read_rows("w", 0, ROWS)
    order = np.random.default_rng(0).permutation(ROWS)
    wanted = gguf.dequantize(raw, kind)
    joined = QuantizedRows.concat([rows.take(order), rows.take(slice(0, 4))])
    np.testing.assert_array_equal(joined.numbers(), wanted[[*order, 0, 1, 2, 3]])
    np.testing.assert_array_equal(unpack_weight(joined.to_weight()), joined.numbers())


def test_matrices_of_experts_are_rows_one_below_the_other(write):
    raw = random_rows(Type.Q4_0, (3, 8, 64))
    checkpoint = write(raw, Type.Q4_0)
    assert checkpoint.shape("w") == (3, 8, 64)
    rows = checkpoint.read_rows("w", 8, 16)
    np.testing.assert_array_equal(rows.numbers(), gguf.dequantize(raw, Type.Q4_0)[1])


def test_plain_tensors_have_no_codes(write):
    checkpoint = write(np.ones((4, 32), np.float32), None)
    assert checkpoint.format_of("w") is None and checkpoint.read_rows("w", 0, 4) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
def test_scales_that_are_no_numbers(write, kind, bits):
    itemsize = FORMATS[kind].itemsize
    for place in SCALES[kind] or (0,):
        raw = random_rows(kind)
        blocks = raw.reshape(ROWS, -1, itemsize)
        blocks[7, 1, place : place + 2] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
        if kind == Type.MXFP4:
            blocks[7, 1, 0] = 255
        with pytest.raises(WeightsError, match=r"tensor 'w' must have finite scales; .*row 7 "):
            write(raw, kind).read_rows("w", 0, ROWS)


def test_a_scale_of_zero_is_that_of_tiny_numbers(write):
    raw = random_rows(Type.Q4_0)
    raw[0, :2] = 0
    assert not write(raw, Type.Q4_0).read_rows("w", 0, 1).numbers()[0, :32].any()


def test_ranges_inside_a_block(write):
    checkpoint = write(random_rows(Type.Q4_K), Type.Q4_K)
    for columns in ((128, 512), (0, 128), (0, 768), (256, 256)):
        with pytest.raises(WeightsError, match=r"'w' has blocks of 256 columns, which cannot be"):
            checkpoint.read_rows("w", 0, 4, columns)
