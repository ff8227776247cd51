"""gpt-oss's experts as codes and exponents, against the reader that dequantizes them."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.loading.quantized.mxfp4 import dequantize_mxfp4, read_mxfp4_experts
from engine.loading.safetensors import SafetensorsFile
from engine.weights import unpack_weight
from tests.golden.quantized import write_safetensors

BLOCKS, SCALES = "m.experts.gate_up_proj_blocks", "m.experts.gate_up_proj_scales"


def experts():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 8, 4, 16), np.uint8)
    return blocks, rng.integers(118, 130, (3, 8, 4), np.uint8)


def opened(tmp_path, blocks, scales, name=SCALES):
    tensors = {BLOCKS: ("U8", blocks), name: ("U8", scales)}
    write_safetensors(tmp_path / "x", tensors)
    return SafetensorsFile(tmp_path / "x")


@pytest.mark.parametrize("rows", [slice(0, 24), slice(8, 16, 2), slice(9, 16, 2)], ids=str)
@pytest.mark.parametrize("columns", [None, (32, 96)], ids=str)
def test_rows_of_experts(tmp_path, rows, columns):
    blocks, scales = experts()
    wanted = dequantize_mxfp4(blocks.reshape(24, 4, 16), scales.reshape(24, 4))
    found = read_mxfp4_experts(opened(tmp_path, blocks, scales), BLOCKS, rows, columns)
    np.testing.assert_array_equal(found.numbers(), wanted[rows, slice(*columns or (None,))])
    np.testing.assert_array_equal(unpack_weight(found.to_weight()), found.numbers())


def test_damaged(tmp_path):
    blocks, scales = experts()
    with pytest.raises(WeightsError, match=r"gate_up_proj_scales' is missing"):
        read_mxfp4_experts(opened(tmp_path, blocks, scales, "other"), BLOCKS, slice(0, 8))
    with pytest.raises(WeightsError, match=r"_blocks' must have shape .*\(3, 8, 3\)"):
        read_mxfp4_experts(opened(tmp_path, blocks, scales[..., :3]), BLOCKS, slice(0, 8))
    file = opened(tmp_path, blocks, scales)
    with pytest.raises(WeightsError, match=r"groups of 32 columns, which cannot be divided"):
        read_mxfp4_experts(file, BLOCKS, slice(0, 8), (16, 64))
    scales[0, 3, 1] = 255
    with pytest.raises(WeightsError, match=r"_scales' must have finite scales; got nan \(row 3"):
        read_mxfp4_experts(opened(tmp_path, blocks, scales), BLOCKS, slice(0, 8))
