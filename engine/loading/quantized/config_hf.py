"""Read the quantization_config of GPTQ, AWQ, Hugging Face's fp8, gpt-oss and BitNet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.loading._fields import Fields
from engine.loading.quantized.config import QuantizationScheme, format_for, group_size_of
from engine.loading.quantized.config_ct import block_of
from engine.loading.quantized.module_rules import (
    EVERY_MODULE,
    ModuleRules,
    boundary_rules,
    pattern_of,
    texts_of,
)
from engine.loading.quantized.storage import Storage
from engine.weights import FORMATS

__all__ = ["awq_scheme", "bitnet_scheme", "fp8_scheme", "gptq_scheme", "mxfp4_scheme"]

_MAX_OVERRIDES = 256


def gptq_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of a GPTQ configuration."""
    key = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = fields.text(key, "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise fields.error(key, "gptq or gptq_v2")
    if fields.text("pack_dtype", "int32").removeprefix("torch.") != "int32":
        raise fields.error("pack_dtype", "int32")
    for key in ("is_marlin_format", "rotation", "adapter"):
        if fields.raw(key):
            raise fields.error(key, "absent, null or false (it is not supported)")
    form = FORMATS["int4_g128"]
    storage = Storage("gptq", form, bits=0, group_size=128, zero_minus_one=version == "gptq")
    storage = _overridden(fields, storage)
    groups = [*_overrides(fields, storage)]
    allowed = _allowed(fields)
    groups.append((allowed or EVERY_MODULE, storage))
    return QuantizationScheme("gptq", tuple(groups))


def _overridden(fields: Fields, storage: Storage) -> Storage:
    """Return `storage` with overrides from the keys bits, group_size, sym and desc_act."""
    bits = fields.integer("bits", 1, 64, storage.bits)
    if bits not in (4, 8):
        raise fields.error("bits", "4 or 8")
    group_size = group_size_of(fields, "group_size", storage.group_size or -1)
    symmetric = fields.flag("sym", storage.symmetric)
    return replace(
        storage,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        act_order=fields.flag("desc_act", storage.act_order),
        format=format_for(fields, "group_size", bits, group_size, symmetric=symmetric),
    )


def _overrides(fields: Fields, storage: Storage) -> list[tuple[ModuleRules, Storage | None]]:
    """Return the rules of `dynamic`: patterns, and the overrides for modules they match."""
    given = fields.raw("dynamic")
    if not given:
        return []
    if not isinstance(given, Mapping) or len(given) > _MAX_OVERRIDES:
        raise fields.error("dynamic", f"an object of at most {_MAX_OVERRIDES} patterns")
    found: list[tuple[ModuleRules, Storage | None]] = []
    for text, values in given.items():
        pattern = pattern_of(fields, "dynamic", text.removeprefix("-:").removeprefix("+:"))
        rules = ModuleRules(patterns=(pattern,))
        if text.startswith("-:"):
            found.append((rules, None))
        else:
            override = fields.beside({text[:80]: values}, "dynamic").child(text[:80])
            found.append((rules, _overridden(override, storage)))
    return found


def _allowed(fields: Fields) -> ModuleRules:
    """Return rules that select the quantized modules; empty rules select all."""
    key = "modules_in_block_to_quantize"
    given: Any = fields.raw(key)
    if not given:
        return ModuleRules()
    if isinstance(given, list) and all(isinstance(one, list) for one in given):
        given = [text for one in given for text in one]
    texts = texts_of(fields, key, given)
    suffixes = ("lm_head",) if fields.flag("lm_head", False) else ()
    return ModuleRules(substrings=texts, suffixes=suffixes)


def awq_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of an AWQ configuration.

    `modules_to_not_convert` is ignored: other readers disagree on matching, so tensors decide.
    """
    key = "version" if fields.has("version") else "format"
    if fields.text(key, "gemm").lower() != "gemm":
        raise fields.error(key, "gemm (gemv, gemv_fast and llm-awq are other layouts)")
    if fields.text("backend", "autoawq") == "llm-awq":
        raise fields.error("backend", "autoawq (llm-awq is another layout)")
    texts_of(fields, "modules_to_not_convert", fields.raw("modules_to_not_convert"))
    bits_key = "bits" if fields.has("bits") else "w_bit"
    if fields.integer(bits_key, 1, 64) != 4:
        raise fields.error(bits_key, "4")
    size_key = "group_size" if fields.has("group_size") else "q_group_size"
    group_size = group_size_of(fields, size_key, 128)
    symmetric = not fields.flag("zero_point", True)
    form = format_for(fields, size_key, 4, group_size, symmetric=symmetric)
    storage = Storage("awq", form, 4, group_size, symmetric=symmetric)
    return QuantizationScheme("awq", ((EVERY_MODULE, storage),))


def fp8_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of Hugging Face's and DeepSeek's fp8 configuration."""
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", "e4m3")
    if fields.text("scale_fmt", "float") not in ("float", "ue8m0"):
        raise fields.error("scale_fmt", "float or ue8m0")
    if fields.text("expert_dtype", "fp8") != "fp8":
        raise fields.error("expert_dtype", "fp8")
    activations = fields.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise fields.error("activation_scheme", "dynamic or static")
    block = None
    if fields.has("weight_block_size"):
        block = block_of(fields, "weight_block_size", fields.raw("weight_block_size"))
    key = "modules_to_not_convert" if fields.has("modules_to_not_convert") else "ignored_layers"
    form = FORMATS["fp8" if block is None else "fp8_block"]
    storage = Storage("fp8", form, block=block, activations=activations)
    ignored = boundary_rules(fields, key, fields.raw(key))
    return QuantizationScheme("fp8", ((EVERY_MODULE, storage),), ignored)


def mxfp4_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of gpt-oss; `read_mxfp4_experts` reads its experts."""
    texts_of(fields, "modules_to_not_convert", fields.raw("modules_to_not_convert"))
    return QuantizationScheme("mxfp4")


def bitnet_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of BitNet: packed ternary matrices, and activations in 8 bits."""
    layout = fields.text("linear_class", "bitlinear")
    if layout not in ("bitlinear", "autobitlinear"):
        raise fields.error("linear_class", "bitlinear or autobitlinear")
    if fields.text("quantization_mode", "offline") != "offline":
        raise fields.error("quantization_mode", "offline (weights that are ternary in the file)")
    if fields.flag("use_rms_norm", False):
        raise fields.error("use_rms_norm", "false (norms of the model itself are read)")
    storage = Storage(layout, FORMATS["int8"], bits=2, activations="dynamic")
    key = "modules_to_not_convert"
    ignored = boundary_rules(fields, key, fields.raw(key))
    return QuantizationScheme("bitnet", ((EVERY_MODULE, storage),), ignored)
