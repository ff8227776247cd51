"""Quantized tensors with something wrong: an error that names the tensor."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.loading.quantized import read_rows, scheme_from_dict
from engine.loading.safetensors import SafetensorsFile
from tests.golden.quantized import CASES, make_linear, write_safetensors

SHAPE = (128, 256)


def read(tmp_path, case, change, shape=SHAPE):
    """Read a matrix of a case, whose tensors {kind: (dtype, array)} `change` has changed."""
    tensors, _ = make_linear(case, shape)
    tensors = {kind: (dtype, np.array(value)) for kind, (dtype, value) in tensors.items()}
    change(tensors)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {f"a.b.{kind}": tensor for kind, tensor in tensors.items()})
    return read_rows(SafetensorsFile(path), scheme_from_dict(config_of(case)), "a.b")


def config_of(case):
    return {"quant_method": "gptq" if "gptq" in case else "awq", **CASES[case].config}


def put(kind, index, value):
    def change(tensors):
        tensors[kind][1][index] = value

    return change


def without(kind):
    return lambda tensors: tensors.pop(kind)


def as_dtype(kind, dtype):
    def change(tensors):
        tensors[kind] = (dtype, tensors[kind][1].astype(np.float32))

    return change


def cut(kind, *index):
    def change(tensors):
        tensors[kind] = (tensors[kind][0], tensors[kind][1][index])

    return change


ROW, SHORT = slice(0, -1), (slice(None), slice(0, -1))
NAN, INF = float("nan"), float("inf")

SCALE_KINDS = {
    "ct_int4": "weight_scale",
    "ct_int8_packed_asymmetric": "weight_scale",
    "ct_int8": "weight_scale",
    "ct_int8_groups": "weight_scale",
    "ct_fp8_channel": "weight_scale",
    "ct_int4_float32_scales": "weight_scale",
    "gptq": "scales",
    "gptq_act_order": "scales",
    "awq": "scales",
    "fp8": "weight_scale",
    "fp8_block": "weight_scale_inv",
}


@pytest.mark.parametrize("case", SCALE_KINDS)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_scales_that_are_no_numbers(tmp_path, case, value):
    kind = SCALE_KINDS[case]
    with pytest.raises(WeightsError, match=rf"'a.b.{kind}' must have finite scales; got .*row 0"):
        read(tmp_path, case, put(kind, 0, value))


@pytest.mark.parametrize("case", SCALE_KINDS)
def test_a_scale_of_zero(tmp_path, case):
    kind = SCALE_KINDS[case]
    with pytest.raises(WeightsError, match=rf"'a.b.{kind}' may have a scale of 0 only for .*zeros"):
        read(tmp_path, case, put(kind, 0, 0.0))


def test_a_group_of_zeros_may_have_any_scale(tmp_path):
    def zero_group(tensors):
        tensors["weight_packed"][1][3, :16] = -0x77777778  # 0x88888888: codes of 0
        tensors["weight_scale"][1][3, 0] = 0

    rows = read(tmp_path, "ct_int4", zero_group)
    assert not rows.numbers()[3, :128].any() and rows.numbers()[3, 128:].any()

    def zero_row(tensors):
        tensors["weight"][1][5] = 0x80  # -0
        tensors["weight_scale"][1][5] = 0

    assert not read(tmp_path, "ct_fp8_channel", zero_row).numbers()[5].any()


def test_an_exponent_that_is_no_number(tmp_path):
    with pytest.raises(
        WeightsError, match=r"'a.b.weight_scale_inv' must have finite scales; got n"
    ):
        read(tmp_path, "fp8_block_ue8m0", put("weight_scale_inv", (0, 1), 255))


def test_a_code_that_is_no_number(tmp_path):
    with pytest.raises(WeightsError, match=r"'a.b.weight' must have finite .* NaN in row 7"):
        read(tmp_path, "fp8_block", put("weight", (7, 3), 0xFF))


ORDERS = {"ct_int4_act_order": "weight_g_idx", "gptq_act_order": "g_idx"}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("value", [-1, -(2**31), 4, 2**31 - 1])
def test_groups_out_of_range(tmp_path, case, value):
    match = rf"'a.b.{ORDERS[case]}' must be in \[0, 4\); got {value} \(column 9\)"
    with pytest.raises(WeightsError, match=match):
        read(tmp_path, case, put(ORDERS[case], 9, value))


@pytest.mark.parametrize("case", ORDERS)
def test_groups_of_other_sizes(tmp_path, case):
    def change(tensors):
        g_idx = tensors[ORDERS[case]][1]
        g_idx[np.flatnonzero(g_idx == 2)[0]] = 3

    match = rf"'a.b.{ORDERS[case]}' must name each group of 64 columns 64 times"
    with pytest.raises(WeightsError, match=match):
        read(tmp_path, case, change)


WRONG = {
    "no scales": ("ct_int4", without("weight_scale"), "'a.b.weight_scale' is missing"),
    "no shape": ("ct_int4", without("weight_shape"), "'a.b.weight_shape' is missing"),
    "no zeros": ("ct_int4_asymmetric", without("weight_zero_point"), "zero_point' is missing"),
    "no qzeros": ("gptq_asymmetric", without("qzeros"), "'a.b.qzeros' is missing"),
    "no qzeros, awq": ("awq", without("qzeros"), "'a.b.qzeros' is missing"),
    "no g_idx": ("gptq_act_order", without("g_idx"), "'a.b.g_idx' is missing.*desc_act"),
    "no weight": ("fp8", without("weight"), "'a.b.weight' is missing"),
    "no fp8 scale": ("fp8_block", without("weight_scale_inv"), "'a.b.weight_scale' is missing"),
    "no words": ("ct_int4", without("weight_packed"), "'a.b.weight_packed' is missing"),
    "no words, gptq": ("gptq", without("scales"), "'a.b.scales' is missing"),
    "groups": (
        "ct_int4",
        cut("weight_scale", *SHORT),
        r"scale' must have shape \(128, 2\).*128, 1",
    ),
    "rows": ("ct_int4", cut("weight_scale", ROW), r"scale' must have shape \(128, 2\).*127, 2"),
    "words": (
        "ct_int4",
        cut("weight_packed", *SHORT),
        r"packed' must have .*\[128, 256\]; got .*31",
    ),
    "word rows": ("ct_int4", cut("weight_packed", ROW), "packed' must have shape"),
    "zeros": ("ct_int4_asymmetric", cut("weight_zero_point", ROW), r"must have shape \(16, 8\)"),
    "gptq words": ("gptq", cut("qweight", ROW), r"qzeros.*|g_idx' must have shape \(248,\)"),
    "gptq groups": ("gptq", cut("scales", ROW), r"'a.b.scales' must have shape \(2, 128\); got"),
    "gptq zeros": ("gptq_asymmetric", cut("qzeros", *SHORT), r"qzeros' must have shape \(8, 16\)"),
    "gptq g_idx": ("gptq", cut("g_idx", ROW), r"g_idx' must have shape \(256,\); got \(255,\)"),
    "awq words": ("awq", cut("qweight", *SHORT), r"scales' must have shape \(2, 120\); got"),
    "awq groups": ("awq", cut("scales", ROW), r"scales' must have shape \(2, 128\); got"),
    "awq zeros": ("awq", cut("qzeros", *SHORT), r"qzeros' must have shape \(2, 16\); got"),
    "large byte": ("ct_int4_bytes", put("weight", (5, 2), 8), r"in \[-8, 7\] for 4 bits; got 8"),
    "small byte": ("ct_int4_bytes", put("weight", (0, 9), -9), r"in \[-8, 7\] .*; got -9"),
    "blocks": ("fp8_block", cut("weight_scale_inv", *SHORT), r"must have shape \(1, 2\); got"),
    "channels": ("ct_fp8_channel", cut("weight_scale", ROW), r"must have shape .*; got \(127, 1\)"),
    "float words": (
        "ct_int4",
        as_dtype("weight_packed", "F32"),
        "packed' must be one of I32; got F32",
    ),
    "float qweight": ("awq", as_dtype("qweight", "F32"), "qweight' must be one of I32; got F32"),
    "float g_idx": ("gptq", as_dtype("g_idx", "F32"), "g_idx' must be one of I32, I64; got F32"),
    "int scales": ("gptq", as_dtype("scales", "I32"), "must be one of F16, BF16, F32; got I32"),
    "bf16 fp8": ("fp8", as_dtype("weight", "BF16"), "weight' must be one of F8_E4M3; got BF16"),
    "other words": ("gptq", put("qzeros", (0, 0), 5), "qzeros' must be that of symmetric weights"),
    "stated": ("ct_int4", put("weight_shape", 1, 300), r"packed' must have shape.*\[128, 300\]"),
    "negative": ("ct_int4", put("weight_shape", 0, -1), r"packed' must have shape.*\[-1, 256\]"),
    "huge": ("ct_int4", put("weight_shape", 0, 2**62), r"packed' must have shape.*\[46116860184"),
    "empty": ("ct_int4", cut("weight_packed", slice(0, 0)), r"packed' must be a matrix"),
    "vector": ("fp8", cut("weight", 0), r"weight' must be a matrix; got shape \(256,\)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_tensors(tmp_path, fault):
    case, change, match = WRONG[fault]
    with pytest.raises(WeightsError, match=match):
        read(tmp_path, case, change)


DISAGREEMENTS = {
    "bits": ("gptq", {"bits": 8}, "must have shape"),
    "bits, packed": (
        "ct_int4",
        {"num_bits": 8},
        "weight_packed' must have shape .* numbers of 8 bits",
    ),
    "group size": (
        "gptq",
        {"group_size": 64},
        r"scales' must have shape \(4, 128\); got \(2, 128\)",
    ),
    "group size, packed": ("ct_int4", {"group_size": 32}, r"scale' must have shape \(128, 8\)"),
    "group size, awq": ("awq", {"group_size": 32}, r"scales' must have shape \(8, 128\)"),
    "one group": ("awq", {"group_size": -1}, r"scales' must have shape \(1, 128\)"),
    "symmetric": ("gptq_asymmetric", {"sym": True}, "qzeros' must be that of symmetric weights"),
    "blocks": ("fp8_block", {"weight_block_size": None}, r"must have shape .*; got \(1, 2\)"),
    "no blocks": (
        "fp8",
        {"weight_block_size": [128, 128]},
        r"must have shape \(1, 2\); got \(1,\)",
    ),
    "not converted": ("fp8", {"modules_to_not_convert": ["a"]}, "'a.b' are quantized, but"),
    "ignored": ("ct_int4", {"ignore": ["a.b"]}, "'a.b' are quantized, but"),
    "dynamic": ("gptq", {"dynamic": {"-:a": {}}}, "'a.b' are quantized, but"),
    "not in block": ("gptq", {"modules_in_block_to_quantize": [["c"]]}, "'a.b' are quantized, but"),
}


@pytest.mark.parametrize("fault", DISAGREEMENTS)
def test_tensors_and_configuration_disagree(tmp_path, fault):
    case, changes, match = DISAGREEMENTS[fault]
    config = config_of(case)
    if "config_groups" in config and "ignore" not in changes:
        group = config["config_groups"]["group_0"]
        weights = {**group["weights"], **changes}
        config = {**config, "config_groups": {"group_0": {**group, "weights": weights}}}
    else:
        config = {**config, **changes}
    tensors, _ = make_linear(case, SHAPE)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {f"a.b.{kind}": tensor for kind, tensor in tensors.items()})
    with pytest.raises(WeightsError, match=match):
        read_rows(SafetensorsFile(path), scheme_from_dict(config), "a.b")


def test_ranges(tmp_path):
    tensors, _ = make_linear("gptq", SHAPE)
    write_safetensors(tmp_path / "x", {f"a.b.{kind}": tensor for kind, tensor in tensors.items()})
    file, scheme = SafetensorsFile(tmp_path / "x"), scheme_from_dict(config_of("gptq"))
    with pytest.raises(WeightsError, match=r"'a.b' has 128 rows; got the range \[100, 129\)"):
        read_rows(file, scheme, "a.b", 100, 129)
    for columns in ((0, 257), (5, 5), (-128, 128)):
        with pytest.raises(WeightsError, match=r"'a.b.qweight' has 256 columns; got the range"):
            read_rows(file, scheme, "a.b", 0, 4, columns)
    with pytest.raises(WeightsError, match=r"groups of 128 columns, which cannot be divided"):
        read_rows(file, scheme, "a.b", 0, 4, (64, 256))
