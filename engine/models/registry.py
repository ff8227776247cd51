"""All supported model families, by Hugging Face's model_type and by .gguf architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError, did_you_mean
from engine.models.afmoe import AFMOE
from engine.models.apertus import APERTUS
from engine.models.arcee import ARCEE
from engine.models.bailing_hybrid import BAILING_HYBRID
from engine.models.bailing_linear import BAILING_MOE_LINEAR, BAILING_MOE_V2_5
from engine.models.bamba import BAMBA
from engine.models.bitnet import BITNET
from engine.models.cohere2 import COHERE, COHERE2
from engine.models.cohere2_moe import COHERE2_MOE
from engine.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from engine.models.dots1 import DOTS1
from engine.models.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from engine.models.exaone import EXAONE
from engine.models.exaone4 import EXAONE4, EXAONE_MOE
from engine.models.falcon import FALCON
from engine.models.falcon_h1 import FALCON_H1
from engine.models.family import Family
from engine.models.flex_olmo import FLEX_OLMO
from engine.models.gemma import GEMMA
from engine.models.gemma2 import GEMMA2, VAULTGEMMA
from engine.models.gemma3 import GEMMA3
from engine.models.gemma3n import GEMMA3N
from engine.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from engine.models.glm4 import GLM, GLM4
from engine.models.glm4_moe import GLM4_MOE
from engine.models.glm4_moe_lite import GLM4_MOE_LITE
from engine.models.gpt2 import GPT2
from engine.models.gpt_bigcode import GPT_BIGCODE
from engine.models.gpt_neo import GPT_NEO
from engine.models.gpt_neox import GPT_NEOX
from engine.models.gpt_oss import GPT_OSS
from engine.models.granite import GRANITE, GRANITE_SWA
from engine.models.granitemoe import GRANITEMOE, GRANITEMOE_SWA, GRANITEMOESHARED
from engine.models.granitemoehybrid import GRANITEMOEHYBRID
from engine.models.helium import HELIUM
from engine.models.hunyuan_v1 import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from engine.models.hy_v3 import HY_V3
from engine.models.hyperclovax import HYPERCLOVAX
from engine.models.internlm3 import INTERNLM3, IQUESTCODER
from engine.models.jais2 import JAIS2
from engine.models.kimi_linear import KIMI_LINEAR
from engine.models.lfm2 import LFM2, LFM2_MOE, LFM3
from engine.models.llama import LLAMA
from engine.models.llama4 import LLAMA4_TEXT
from engine.models.longcat_flash import LONGCAT_FLASH
from engine.models.mellum import MELLUM
from engine.models.mimo import MIMO
from engine.models.mimo_v2_flash import MIMO_V2_FLASH
from engine.models.minicpm3 import MINICPM3
from engine.models.minimax_m2 import MINIMAX_M2
from engine.models.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from engine.models.mistral4 import MISTRAL4
from engine.models.mixtral import MIXTRAL
from engine.models.nanochat import NANOCHAT
from engine.models.nemotron import NEMOTRON
from engine.models.nemotron_h import NEMOTRON_H
from engine.models.olmo import OLMO
from engine.models.olmo2 import OLMO2, OLMO3
from engine.models.olmo_hybrid import OLMO_HYBRID
from engine.models.olmoe import OLMOE
from engine.models.opt import OPT
from engine.models.persimmon import PERSIMMON
from engine.models.phi import PHI
from engine.models.phi3 import PHI3
from engine.models.phimoe import PHIMOE
from engine.models.qwen2 import QWEN2
from engine.models.qwen2_moe import QWEN2_MOE
from engine.models.qwen3 import QWEN3
from engine.models.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from engine.models.qwen3_moe import QWEN3_MOE
from engine.models.qwen3_next import QWEN3_NEXT
from engine.models.qwen_vl import (
    QWEN2_5_VL_TEXT,
    QWEN2_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
)
from engine.models.sarvam import SARVAM_MLA, SARVAM_MOE
from engine.models.seed_oss import SEED_OSS
from engine.models.smollm3 import SMOLLM3
from engine.models.solar_open import SOLAR_OPEN
from engine.models.stablelm import STABLELM
from engine.models.starcoder2 import STARCODER2
from engine.models.wrappers import WRAPPERS, Wrapper
from engine.models.youtu import YOUTU

__all__ = ["FAMILIES", "family", "family_of_gguf", "type_of", "wrapper"]

_DENSE = (
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    QWEN2,
    MIMO,
    QWEN3,
    PHI3,
    GEMMA3,
    GRANITE,
    OLMO2,
    OLMO3,
    GEMMA2,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    SMOLLM3,
    GLM4,
    STARCODER2,
    STABLELM,
    COHERE2,
    PHI,
    ARCEE,
    NEMOTRON,
    JAIS2,
    GPT_NEOX,
    HUNYUAN_V1_DENSE,
    APERTUS,
    OLMO,
    NANOCHAT,
    GEMMA,
    VAULTGEMMA,
    GLM,
    SEED_OSS,
    ERNIE4_5,
    EXAONE4,
    HELIUM,
    HYPERCLOVAX,
    QWEN3_5_TEXT,
    LFM2,
    NEMOTRON_H,
    OLMO_HYBRID,
    YOUTU,
    MINICPM3,
    BITNET,
    FALCON_H1,
    EXAONE,
    INTERNLM3,
    IQUESTCODER,
    COHERE,
    BAMBA,
    GRANITE_SWA,
    LFM3,
    PERSIMMON,
    FALCON,
    GPT2,
    OPT,
    GPT_BIGCODE,
    GPT_NEO,
)
_SPARSE = (
    QWEN2_MOE,
    QWEN3_MOE,
    MIXTRAL,
    OLMOE,
    GRANITEMOE,
    GPT_OSS,
    GLM4_MOE,
    AFMOE,
    HUNYUAN_V1_MOE,
    DOTS1,
    SOLAR_OPEN,
    MINIMAX_M2,
    HY_V3,
    ERNIE4_5_MOE,
    EXAONE_MOE,
    MELLUM,
    FLEX_OLMO,
    GRANITEMOESHARED,
    COHERE2_MOE,
    MIMO_V2_FLASH,
    QWEN3_NEXT,
    QWEN3_5_MOE_TEXT,
    LFM2_MOE,
    GRANITEMOEHYBRID,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    GLM4_MOE_LITE,
    LONGCAT_FLASH,
    KIMI_LINEAR,
    BAILING_HYBRID,
    MISTRAL4,
    BAILING_MOE_V2_5,
    BAILING_MOE_LINEAR,
    PHIMOE,
    SARVAM_MOE,
    SARVAM_MLA,
    GRANITEMOE_SWA,
)

_OF_WRAPPERS = (
    QWEN2_VL_TEXT,
    QWEN2_5_VL_TEXT,
    QWEN3_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    LLAMA4_TEXT,
)

FAMILIES: dict[str, Family] = {
    known.model_type: known for known in (*_DENSE, *_SPARSE, *_OF_WRAPPERS)
}


_SPARSE_ATTENTION = " (its sparse attention selects keys with an indexer, which is not supported)"
_ALIBI = " (its attention has ALiBi instead of rope, which is not supported)"
_HINTS = {
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "jamba": " (its layers are Mamba-1, which is not supported)",
    "zamba2": " (its layers share blocks that read the embedding too, which is not supported)",
    "deepseek_v32": _SPARSE_ATTENTION,
    "glm_moe_dsa": _SPARSE_ATTENTION,
    "glm5_next": _SPARSE_ATTENTION,
    "minimax": " (its residual stream is the normalised one, which is not supported)",
}


def family(model_type: object) -> Family:
    """Return the family called `model_type`.

    Raises
    ------
    ConfigError
        If it is not supported; the message says what is missing, or names the nearest one.

    Examples
    --------
    >>> family("qwen2").qkv_bias
    True
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    known = (*FAMILIES, *WRAPPERS)
    hint = ""
    if isinstance(model_type, str):
        hint = _HINTS.get(model_type) or did_you_mean(model_type, known)
    wanted = f"one of the {len(known)} in docs/models.md"
    raise ConfigError(f"model_type must be {wanted}; got {model_type!r:.80}{hint}")


# Keys of Kimi delta attention in a config.json of Ling 3.
_KDA_KEYS = ("kda_safe_gate", "kda_lower_bound", "no_kda_lora", "short_conv_kernel_size")


def type_of(values: Mapping[str, Any]) -> object:
    """Return the model_type of a config.json; Ling 2.5 and 3 use one name for two models.

    Examples
    --------
    >>> type_of({"model_type": "bailing_hybrid", "group_norm_size": 4})
    'bailing_moe_v2_5'
    """
    name = values.get("model_type")
    is_older = "group_norm_size" in values and not any(key in values for key in _KDA_KEYS)
    return BAILING_MOE_V2_5.model_type if name == "bailing_hybrid" and is_older else name


def wrapper(model_type: object) -> Wrapper | None:
    """Return the wrapper called `model_type`; None for text models and unknown types.

    Examples
    --------
    >>> wrapper("gemma3").text
    'gemma3_text'
    """
    return WRAPPERS.get(model_type) if isinstance(model_type, str) else None


def family_of_gguf(architecture: object) -> Family:
    """Return the family that reads .gguf files of `architecture`.

    Raises
    ------
    ConfigError
        If it is not supported; the message lists those that are.
    """
    known = {one.gguf_arch: one for one in FAMILIES.values() if one.gguf_arch}
    if isinstance(architecture, str) and architecture in known:
        return known[architecture]
    raise ConfigError(
        f"general.architecture must be one of {', '.join(sorted(known))}; got {architecture!r:.80}"
    )
