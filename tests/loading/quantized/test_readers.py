"""Codes and scales of every scheme against the numbers of an independent packer."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import engine
from engine.errors import WeightsError
from engine.loading.quantized import QuantizedCheckpoint, QuantizedRows, load_scheme, read_rows
from engine.loading.safetensors import SafetensorsFile, open_safetensors
from engine.weights import FORMATS, unpack_weight
from tests.golden.quantized import CASES, CONFIG, LINEARS, make, make_linear, write_safetensors

FORMAT_NAMES = {
    "ct_int4": "int4_g128", "ct_int4_asymmetric": "int4_g32_zp", "ct_int4_g64": "int4_g64",
    "ct_int4_g256": "int4_g128", "ct_int4_channel": "int4_g128",
    "ct_int4_float32_scales": "int4_g128", "ct_int4_act_order": "int4_g64",
    "ct_int8_packed": "int8_g128", "ct_int8_packed_channel": "int8_g128",
    "ct_int8_packed_asymmetric": "int8_g64_zp", "ct_int8": "int8",
    "ct_int8_weight_only": "int8_g128", "ct_int8_groups": "int8_g128", "ct_fp8_tensor": "fp8",
    "ct_int4_bytes": "int4_g64",
    "ct_fp8_channel": "fp8", "ct_fp8_block": "fp8_block", "ct_mixed": "int4_g64",
    "ct_mxfp4": "mxfp4",
    "gptq": "int4_g128",
    "gptq_no_g_idx": "int4_g128", "gptq_zero_g_idx": "int4_g64", "gptq_channel": "int4_g128",
    "gptq_asymmetric": "int4_g32_zp", "gptq_v2": "int4_g128", "gptq_v2_asymmetric": "int4_g128_zp",
    "gptq_act_order": "int4_g64", "gptq_act_order_asymmetric": "int4_g128_zp",
    "gptq_8": "int8_g128",
    "gptq_8_asymmetric": "int8_g32_zp", "gptq_old_file": "int4_g128", "awq": "int4_g128_zp",
    "awq_g64": "int4_g64_zp", "awq_symmetric": "int4_g128", "awq_old_file": "int4_g128_zp",
    "bitnet": "int8", "bitnet_bitlinear": "int8",
    "fp8": "fp8", "fp8_static": "fp8", "fp8_block": "fp8_block", "fp8_block_ue8m0": "fp8_block",
}  # fmt: skip
Q = "model.layers.1.self_attn.q_proj"


def opened(path):
    return QuantizedCheckpoint(open_safetensors(path), load_scheme(path))


def parts_of(rows: QuantizedRows) -> list[np.ndarray]:
    return [value for value in (rows.codes, rows.scales, rows.offsets) if value is not None]


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A case's name, its checkpoint and the twin's."""
    folder = tmp_path_factory.mktemp("quantized")
    quantized, twin = make(folder, request.param)
    return request.param, opened(quantized), open_safetensors(twin)


def test_every_number_is_the_twins(pair):
    _, checkpoint, twin = pair
    assert sorted(checkpoint.names()) == sorted(twin.names())
    for name in twin.names():
        assert checkpoint.shape(name) == twin.shape(name)
        rows = checkpoint.shape(name)[0]
        np.testing.assert_array_equal(checkpoint.read(name, 0, rows), twin.view(name))


def test_formats(pair):
    case, checkpoint, _ = pair
    assert checkpoint.format_of(f"{Q}.weight").name == FORMAT_NAMES[case]
    assert checkpoint.format_of("lm_head.weight") is None
    assert checkpoint.format_of("model.norm.weight") is None
    assert checkpoint.read_rows("lm_head.weight", 0, 4) is None


def test_rows_and_columns_are_those_of_the_whole(pair):
    _, checkpoint, twin = pair
    whole = checkpoint.read_rows(f"{Q}.weight", 0, 256)
    some = checkpoint.read_rows(f"{Q}.weight", 5, 23)
    for one, other in zip(parts_of(some), parts_of(whole.take(slice(5, 23))), strict=True):
        np.testing.assert_array_equal(one, other)
    if whole.permutation is not None:
        with pytest.raises(WeightsError, match=r"q_proj.*which cannot be divided"):
            checkpoint.read_rows(f"{Q}.weight", 5, 23, (0, 128))
        return
    part = checkpoint.read_rows(f"{Q}.weight", 5, 23, (128, 256))
    np.testing.assert_array_equal(part.numbers(), twin.view(f"{Q}.weight")[5:23, 128:])


def test_fused_rows_become_a_weight(pair):
    case, checkpoint, twin = pair
    names = [Q.replace("q_proj", f"{one}_proj.weight") for one in "qkv"]
    rows = QuantizedRows.concat(
        [checkpoint.read_rows(name, 0, checkpoint.shape(name)[0]) for name in names]
    )
    wanted = np.concatenate([twin.view(name) for name in names])
    weight = rows.to_weight()
    assert weight.shape == (512, 256) and weight.format.name == FORMAT_NAMES[case]
    if case == "ct_int4_float32_scales":  # rounded to float16
        np.testing.assert_allclose(unpack_weight(weight), wanted, rtol=2**-11, atol=0)
    else:
        np.testing.assert_array_equal(unpack_weight(weight), wanted)


def test_mixed_precision(tmp_path):
    checkpoint = opened(make(tmp_path, "ct_mixed")[0])
    assert checkpoint.format_of("model.layers.0.mlp.up_proj.weight").name == "fp8"
    assert checkpoint.scheme.formats == ("int4_g64", "fp8")


ODD = {
    "ct_int4": (13, 130), "ct_int4_asymmetric": (13, 43), "ct_int4_channel": (5, 7),
    "ct_int8_packed_asymmetric": (7, 70), "ct_int8": (3, 5), "ct_int8_weight_only": (3, 5),
    "fp8_block": (192, 140), "fp8_block_ue8m0": (130, 257), "fp8": (3, 5), "ct_fp8_channel": (3, 5),
    "gptq": (8, 136), "gptq_asymmetric": (16, 40), "awq": (8, 131), "awq_g64": (16, 65),
    "gptq_act_order": (8, 72),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_sizes_that_no_group_divides(tmp_path, case):
    tensors, numbers = make_linear(case, ODD[case])
    write_safetensors(tmp_path / "x.safetensors", {f"m.{k}": v for k, v in tensors.items()})
    quantized, _ = make(tmp_path, case)
    checkpoint = QuantizedCheckpoint(open_safetensors(tmp_path), load_scheme(quantized))
    assert list(checkpoint.names()) == ["m.weight"] and checkpoint.shape("m.weight") == ODD[case]
    rows = checkpoint.read_rows("m.weight", 0, ODD[case][0])
    np.testing.assert_array_equal(rows.numbers(), numbers)
    np.testing.assert_array_equal(unpack_weight(rows.to_weight()), numbers)
    empty = checkpoint.read_rows("m.weight", 2, 2)
    assert empty.shape == (0, ODD[case][1]) and empty.numbers().shape == empty.shape


def test_experts_are_modules_like_others(tmp_path):
    tensors, numbers = make_linear("ct_int4", (64, 128))
    module = "model.layers.3.mlp.experts.17.gate_proj"
    stored = {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    write_safetensors(tmp_path / "x.safetensors", stored)
    scheme = load_scheme(make(tmp_path, "ct_int4")[0])
    rows = read_rows(open_safetensors(tmp_path), scheme, module)
    np.testing.assert_array_equal(rows.numbers(), numbers)


def test_a_bias_that_only_the_writer_has(tmp_path):
    tensors, _ = make_linear("gptq", (64, 128))
    stored = {f"m.{kind}": tensor for kind, tensor in tensors.items()}
    stored |= {"m.bias": ("F16", np.zeros(64)), "n.bias": ("F16", np.zeros(64))}
    stored |= {"o.bias": ("F16", np.arange(64)), "o.qweight": tensors["qweight"]}
    write_safetensors(tmp_path / "x.safetensors", stored)
    scheme = load_scheme(make(tmp_path, "gptq")[0])
    checkpoint = QuantizedCheckpoint(open_safetensors(tmp_path), scheme)
    assert [name for name in checkpoint.names() if checkpoint.is_spare_bias(name)] == ["m.bias"]


def test_take_orders_rows(tmp_path):
    checkpoint = opened(make(tmp_path, "gptq_asymmetric")[0])
    rows = checkpoint.read_rows(f"{Q}.weight", 0, 256)
    order = np.arange(256)[::-1]
    np.testing.assert_array_equal(rows.take(order).numbers(), rows.numbers()[::-1])


def test_parts_that_do_not_fit(tmp_path):
    checkpoint = opened(make(tmp_path, "gptq_act_order")[0])
    q, o = (checkpoint.read_rows(f"model.layers.0.self_attn.{x}_proj.weight", 0, 4) for x in "qo")
    with pytest.raises(WeightsError, match="same order of columns; got different g_idx"):
        QuantizedRows.concat([q, o])
    other = opened(make(tmp_path, "awq")[0]).read_rows(f"{Q}.weight", 0, 4)
    with pytest.raises(WeightsError, match="same format; got int4_g64 and int4_g128_zp"):
        QuantizedRows.concat([q, other])
    blocks = opened(make(tmp_path, "fp8_block")[0]).read_rows(f"{Q}.weight", 0, 256)
    with pytest.raises(WeightsError, match="must have a multiple of 128 rows"):
        QuantizedRows.concat([blocks.take(slice(0, 64)), blocks.take(slice(128, 256))]).to_weight()


def test_float32_scales_keep_as_much_as_16_bits_can():
    def dtype_of(*scales):
        values = np.array([scales], np.float32)
        codes = np.ones((1, 128 * len(scales)), np.uint8)
        return QuantizedRows(FORMATS["int4_g128"], codes, values).to_weight().scales.dtype.name

    assert dtype_of(0.1, 0.0) == "float16"
    assert dtype_of(0.1, 1e-7) == "bfloat16"  # no normal float16
    assert dtype_of(0.1, 1e6) == "bfloat16"
    assert dtype_of(0.5, 1.5) == "bfloat16"  # exact


def test_parts_with_scales_of_different_dtypes():
    codes = np.ones((1, 32), np.uint8)
    one = QuantizedRows(FORMATS["int4_g32"], codes, np.array([[0.1]], np.float16))
    two = QuantizedRows(FORMATS["int4_g32"], codes, np.array([[0.1]], ml_dtypes.bfloat16))
    both = QuantizedRows.concat([one, two])
    wanted = np.concatenate([one.numbers(), two.numbers()])
    np.testing.assert_array_equal(both.numbers(), wanted)
    np.testing.assert_array_equal(unpack_weight(both.to_weight()), wanted)


def test_the_packers_model_is_complete():
    assert set(FORMAT_NAMES) == set(CASES)
    assert len(LINEARS) == 7 and CONFIG["num_hidden_layers"] == 2


def test_stored_zeros_of_awq_count_without_zero_point(tmp_path):
    """As AutoAWQ's and vLLM's kernels subtract them, whatever the configuration says."""
    quantized, twin = make(tmp_path, "awq")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["zero_point"] = False
    (quantized / "config.json").write_text(json.dumps(config))
    checkpoint, wanted = opened(quantized), open_safetensors(twin)
    assert checkpoint.format_of(f"{Q}.weight").name == "int4_g128_zp"
    for name in wanted.names():
        got = checkpoint.read(name, 0, checkpoint.shape(name)[0])
        np.testing.assert_array_equal(got, wanted.view(name))
    logits = []
    for folder in (quantized, twin):
        model = engine.load(folder, device="cpu", dtype="float32")
        logits.append(model.step([[5, 9, 3, 7]], model.new_cache(1, 8), logits="all"))
    assert np.abs(logits[0] - logits[1]).max() < 1e-3 * logits[1].std()


@pytest.mark.parametrize(
    ("case", "dtype", "zero"),
    [("ct_int4", "I32", -2004318072), ("ct_int8_packed", "I32", -2139062144), ("ct_int4", "I8", 0)],
)
def test_zero_points_of_symmetric_weights_must_be_zero(tmp_path, case, dtype, zero):
    tensors, numbers = make_linear(case, (64, 128))
    scheme = load_scheme(make(tmp_path, case)[0])
    zeros = np.full((8, 1), zero, np.int32 if dtype == "I32" else np.int8)
    for i, value in enumerate((zero, zero + 1)):
        zeros[3] = value
        stored = {f"m.{k}": t for k, t in {**tensors, "weight_zero_point": (dtype, zeros)}.items()}
        path = tmp_path / f"{i}.safetensors"
        write_safetensors(path, stored)
        if value == zero:
            rows = read_rows(SafetensorsFile(path), scheme, "m")
            np.testing.assert_array_equal(rows.numbers(), numbers)
        else:
            with pytest.raises(WeightsError, match=r"'m\.weight_zero_point' must hold zeros"):
                read_rows(SafetensorsFile(path), scheme, "m")
