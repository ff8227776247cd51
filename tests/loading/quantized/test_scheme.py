"""quantization_config of every method: what is read, and what is refused by name."""

from __future__ import annotations

import copy
import json
import time

import pytest

from engine.checks import warn_once
from engine.errors import ConfigError
from engine.loading.quantized import load_scheme, scheme_from_dict
from tests.golden.quantized import CASES

UP = "model.layers.0.mlp.up_proj"
CT = CASES["ct_int4"].config
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def ct(weights=None, group=None, **top):
    config = copy.deepcopy(CT)
    config["config_groups"]["group_0"] |= group or {}
    config["config_groups"]["group_0"]["weights"] |= weights or {}
    return {**config, **top}


REFUSED = {
    "method": (
        {"quant_method": "bitsandbytes"},
        "quant_method must be one of compressed-tensors, gptq, awq, fp8, mxfp4, bitnet; got "
        "'bitsandbytes'",
    ),
    "bitnet, online": (
        {"quant_method": "bitnet", "quantization_mode": "online"},
        "quantization_mode must be offline .*; got 'online'",
    ),
    "bitnet, norms": (
        {"quant_method": "bitnet", "use_rms_norm": True},
        "use_rms_norm must be false .*; got True",
    ),
    "bitnet, others": (
        {"quant_method": "bitnet", "linear_class": "linear"},
        "linear_class must be bitlinear or autobitlinear; got 'linear'",
    ),
    "no method": ({}, "quant_method must be a string; got nothing"),
    "method of another type": ({"quant_method": 4}, "quant_method must be a string; got 4"),
    "nvfp4": (ct(format="nvfp4-pack-quantized"), "format must be one of pack-quantized, .*nvfp4"),
    "marlin": (ct(format="marlin-24"), "format must be one of .*; got 'marlin-24'"),
    "rotations": (ct(transform_config={"u": {}}), "transform_config must be absent"),
    "sparsity": (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config must be ab"),
    "no groups": ({**CT, "config_groups": None}, "config_groups must be an object"),
    "3 bits": (ct({"num_bits": 3}), "weights: num_bits must be 4 or 8; got 3"),
    "groups of 16": (ct({"group_size": 16}), "group_size must be -1 or a multiple of 32; got 16"),
    "no size": (ct({"group_size": 0}), "group_size must be -1 or a multiple of 32; got 0"),
    "strategy": (
        ct({"strategy": "tensor_group"}),
        "strategy must be one of tensor, channel, group",
    ),
    "4-bit floats": (ct({"type": "float"}), "weights: type must be int, or float with 8 bits"),
    "act-order": (ct({"actorder": "odd"}), "actorder must be one of"),
    "outputs": (
        ct(group={"output_activations": {"num_bits": 8}}),
        "output_activations must be abs",
    ),
    "group format": (ct(group={"format": "dense"}), "format must be one of pack-quantized"),
    "targets": (ct(group={"targets": "Linear"}), "targets must be a list"),
    "pattern": (ct(ignore=["re:*"]), "ignore must be of valid regular expressions"),
    "slow pattern": (ct(ignore=["re:(a+)+$"]), "ignore must be of patterns with at most"),
    "slow pattern, too": (
        ct(ignore=["re:" + "a?" * 60]),
        "ignore must be of patterns with at most",
    ),
    "preset": (ct(config_groups={"NVFP4": ["Linear"]}), "NVFP4 must be an object, or its name one"),
    "int8 with zero points": (
        {
            **CASES["ct_int8"].config,
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"},
                }
            },
        },
        "symmetric must be true in a format without packing",
    ),
    "fp8 activations of int8": (
        {
            **CASES["ct_int8"].config,
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "strategy": "channel"},
                    "input_activations": {"type": "float"},
                }
            },
        },
        "input_activations must be absent, or of 8 bits and type int",
    ),
    "gptq: 3 bits": ({**GPTQ, "bits": 3}, "bits must be 4 or 8; got 3"),
    "gptq: no bits": ({"quant_method": "gptq"}, "bits must be 4 or 8; got nothing"),
    "gptq: groups": (
        {**GPTQ, "group_size": 48},
        "group_size must be -1 or a multiple of 32; got 48",
    ),
    "gptq: marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or"),
    "gptq: marlin flag": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format must be absent"),
    "gptq: int8 words": ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype must be int32; got 'int8'"),
    "gptq: rotation": ({**GPTQ, "rotation": "hadamard"}, "rotation must be absent"),
    "gptq: dynamic": ({**GPTQ, "dynamic": {"+:x": {"bits": 2}}}, r"dynamic: \+:x: bits must be 4"),
    "gptq: dynamic pattern": ({**GPTQ, "dynamic": {"(": {}}}, "dynamic must be of valid regular"),
    "gptq: dynamic value": ({**GPTQ, "dynamic": {"x": 4}}, "dynamic: x must be an object; got 4"),
    "gptq: flag": ({**GPTQ, "sym": 1}, "sym must be true or false; got 1"),
    "awq: gemv": ({**AWQ, "version": "gemv"}, "version must be gemm .*; got 'gemv'"),
    "awq: gemv_fast": ({**AWQ, "version": "GEMV_FAST"}, "version must be gemm"),
    "awq: llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend must be autoawq"),
    "awq: 8 bits": ({**AWQ, "bits": 8}, "bits must be 4; got 8"),
    "awq: list": ({**AWQ, "modules_to_not_convert": "x"}, "modules_to_not_convert must be a list"),
    "fp8: e5m2": ({**FP8, "fmt": "e5m2"}, "fmt must be e4m3; got 'e5m2'"),
    "fp8: blocks": ({**FP8, "weight_block_size": [64, 128]}, "weight_block_size must be two mult"),
    "fp8: block": ({**FP8, "weight_block_size": 128}, "weight_block_size must be two multiples"),
    "fp8: fp4": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype must be fp8; got 'fp4'"),
    "fp8: scale": ({**FP8, "scale_fmt": "odd"}, "scale_fmt must be float or ue8m0"),
    "fp8: activations": (
        {**FP8, "activation_scheme": "odd"},
        "activation_scheme must be dynamic or",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    config, match = REFUSED[case]
    with pytest.raises(ConfigError, match=match):
        scheme_from_dict(config)


def storage(config, module=UP):
    return scheme_from_dict(config).storage_of(module)


def test_compressed_tensors_by_name_then_pattern_then_class():
    group = CT["config_groups"]["group_0"]
    weights = group["weights"]
    groups = {
        "a": {**group, "weights": {**weights, "group_size": 32}},
        "b": {**group, "targets": ["re:.*mlp"], "weights": {**weights, "group_size": 64}},
        "c": {**group, "targets": [UP], "weights": {**weights, "num_bits": 8}},
        "d": {**group, "targets": ["re:.*o_proj$"], "weights": None},
    }
    scheme = scheme_from_dict({**CT, "config_groups": groups, "ignore": ["lm_head", "re:.*gate$"]})

    def name(module):
        found = scheme.storage_of(module)
        return None if found is None else found.format.name

    assert name(UP) == "int8_g128" and name("x.mlp.down_proj") == "int4_g64"
    assert name("x.q_proj") == "int4_g32" and name("x.mlp.gate_proj") == "int4_g64"
    assert name("lm_head") is name("x.mlp.gate") is name("x.o_proj") is None
    assert name("model.lm_head") == "int4_g32"  # names are whole ones


def test_presets():
    presets = {
        "W4A16": "int4_g128",
        "W4A16_ASYM": "int4_g128_zp",
        "W8A16": "int8_g128",
    }
    for preset, form in presets.items():
        assert storage(ct(config_groups={preset: ["Linear"]})).format.name == form
    fp8 = {**CT, "format": "float-quantized", "config_groups": {"FP8_DYNAMIC": ["Linear"]}}
    assert storage(fp8).format.name == "fp8" and storage(fp8).activations == "dynamic"
    int8 = {**CT, "format": "int-quantized", "config_groups": {"W8A8": ["Linear"]}}
    assert storage(int8).format.name == "int8"


def test_harmless_keys_and_defaults():
    assert storage(ct(transform_config={}, sparsity_config={"format": "dense"})).format.name
    implied = ct({"strategy": None, "group_size": -1})
    assert storage(implied).format.name == "int4_g128" and storage(implied).group_size == 0
    assert storage(ct(group={"input_activations": {"num_bits": 8, "dynamic": True}})).activations
    tokens = {"num_bits": 8, "type": "float", "dynamic": True}
    w4afp8 = ct({"group_size": 64}, {"input_activations": tokens}, format="int-quantized")
    assert storage(w4afp8).format.name == "int4_g64"  # activations stay in 16 bits
    tensors = {**CASES["ct_fp8_block"].config}
    tensors = json.loads(json.dumps(tensors).replace("[128, 128]", '"128x128"'))
    assert storage(tensors).block == (128, 128)


def test_gptq():
    given = storage({**GPTQ, "desc_act": True, "sym": False})
    assert given.act_order and not given.symmetric and given.zero_minus_one
    assert given.format.name == "int4_g128_zp"
    assert not storage({**GPTQ, "checkpoint_format": "gptq_v2"}).zero_minus_one
    assert not storage({**GPTQ, "format": "gptq_v2"}).zero_minus_one
    dynamic = {"-:.*down": {}, "+:.*up": {"bits": 8, "group_size": 64}, ".*up": {"bits": 4}}
    config = {**GPTQ, "dynamic": dynamic}
    assert storage(config).format.name == "int8_g64"
    assert storage(config, "x.down_proj") is None
    assert storage(config, "x.gate_proj").format.name == "int4_g128"
    config = {**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]], "lm_head": True}
    assert storage(config) and storage(config, "lm_head") and not storage(config, "x.o_proj")


def test_fp8_lists():
    texts = ["lm_head", "model.layers.1", "mlp.gate", "model.layers.(2|3).mlp"]
    config = {**FP8, "modules_to_not_convert": texts}
    skipped = ("lm_head", "model.layers.1.o_proj", "x.mlp.gate", "model.layers.3.mlp.up_proj")
    for module in (*skipped, "model.layers.1"):
        assert storage(config, module) is None
    for module in (UP, "x.mlp.gate_proj", "model.layers.11.o_proj", "model.layers.4.mlp.up_proj"):
        assert storage(config, module).format.name == "fp8_block"
    assert storage({**FP8, "ignored_layers": ["lm_head"]}, "lm_head") is None


def test_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_scheme(tmp_path) is None and load_scheme(tmp_path / "x.gguf") is None
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    assert load_scheme(tmp_path).method == "gptq"
    (tmp_path / "quantize_config.json").write_text('{"w_bit": 4, "q_group_size": 64}')
    assert load_scheme(tmp_path).method == "awq"
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    assert load_scheme(tmp_path).formats == ("fp8_block",)
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": CT}))
    assert load_scheme(tmp_path).method == "compressed-tensors"
    (tmp_path / "config.json").write_text('{"quantization_config": 3}')
    with pytest.raises(ConfigError, match=r"config.json: quantization_config must be an object"):
        load_scheme(tmp_path)
    assert scheme_from_dict({"quant_method": "mxfp4"}).formats == ()


def test_a_checkpoint_of_modelopt_is_refused_by_its_own_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "hf_quant_config.json"
    path.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quant_algo must be .*'NVFP4'"):
        load_scheme(tmp_path)
    for text in ('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}', "{}"):
        path.write_text(text)  # the pages' scales alone
        assert load_scheme(tmp_path) is None


def test_patterns_take_only_a_moment():
    worst = ct(ignore=["re:.*a.*a.*a.*b"])
    started = time.process_time()
    assert storage(worst, "a" * 128) is not None
    assert time.process_time() - started < 5


# Keys known to change what the tensors mean, or how they are found, with a value other than the
# default; "layout" and "activations" of the group stand for keys below `config_groups`.
READ = {
    "gptq": (
        GPTQ,
        {
            "bits": 8, "group_size": 64, "sym": False, "desc_act": True, "format": "gptq_v2",
            "checkpoint_format": "gptq_v2", "pack_dtype": "int8", "is_marlin_format": True,
            "rotation": "hadamard", "adapter": {"type": "lora"}, "dynamic": {"-:.*up": {}},
            "modules_in_block_to_quantize": [["self_attn.q_proj"]],
        },
    ),
    "awq": (
        AWQ,
        {
            "bits": 8, "group_size": 64, "zero_point": False, "version": "gemv",
            "backend": "llm-awq",
        },
    ),
    "awq, old names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128},
        {"w_bit": 8, "q_group_size": 64, "format": "gemv"},
    ),
    "fp8": (
        FP8,
        {
            "fmt": "e5m2", "scale_fmt": "odd", "expert_dtype": "fp4", "weight_block_size": None,
            "activation_scheme": "static", "modules_to_not_convert": ["up_proj"],
            "ignored_layers": ["up_proj"],
        },
    ),
    "compressed-tensors": (
        ct(),
        {
            "format": "int-quantized", "ignore": ["re:.*up_proj"], "transform_config": {"u": {}},
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
    ),
    "compressed-tensors, group": (
        CT["config_groups"]["group_0"],
        {
            "targets": ["re:.*down_proj"], "output_activations": {"num_bits": 8},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
            "format": "int-quantized",
        },
    ),
    "compressed-tensors, weights": (
        CT["config_groups"]["group_0"]["weights"],
        {
            "num_bits": 8, "type": "float", "symmetric": False, "strategy": "channel",
            "group_size": 64, "dynamic": True, "actorder": "group",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "key"), [(case, key) for case, (_, keys) in READ.items() for key in keys]
)
def test_a_key_changes_the_scheme_or_is_refused(case, key):
    plain, changes = READ[case]

    def scheme_of(values):
        if not case.startswith("compressed-tensors, "):
            return scheme_from_dict(values)
        return scheme_from_dict(ct(values) if "weights" in case else ct(None, values))

    wanted = scheme_of({}) if case.startswith("compressed-tensors, ") else scheme_of(plain)
    try:
        got = scheme_of({**plain, key: changes[key]})
    except ConfigError as error:
        assert f"{key} must be" in str(error)
    else:
        assert got != wanted


def test_an_unknown_key_is_a_warning(caplog):
    warn_once.cache_clear()
    known = {"true_sequential": True, "damp_percent": 0.1, "meta": {"quantizer": ["x:1"]}}
    assert scheme_from_dict({**GPTQ, **known, "new_rule": False}) == scheme_from_dict(GPTQ)
    assert not caplog.text
    scheme_from_dict({**GPTQ, "new_rule": 3})
    assert "quantization_config: new_rule is unknown and not read; got 3" in caplog.text
    scheme_from_dict(ct(group={"shuffle": [1]}))
    assert "shuffle is unknown and not read; got [1]" in caplog.text
