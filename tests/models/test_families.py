"""The declarations of families: complete tables of names, and a registry with clear errors."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.hf_config import config_from_dict
from engine.loading.weight_table import weight_shapes
from engine.loading.weights import dummy_weights
from engine.models.decoder import Decoder
from engine.models.family import Family
from engine.models.registry import FAMILIES, family, family_of_gguf
from engine.models.wrappers import WRAPPERS

ARCHITECTURES = sorted(kind.gguf_arch for kind in FAMILIES.values() if kind.gguf_arch)
EXTRA = {"mamba_n_heads": 4, "mamba_n_groups": 2}  # of hybrids
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(kind: Family, **keys) -> ModelConfig:
    return config_from_dict({"model_type": kind.model_type, **SIZES, **keys})


def test_the_registry_resolves_what_it_lists():
    assert {"gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"} <= FAMILIES.keys()
    for name, kind in FAMILIES.items():
        assert family(name) is kind and kind.model_type == name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *[("qwen3-moe", "qwen3_moe"), ("Llama", "llama"), ("mistral4_text", "mistral4")],
        *[("", ""), (None, ""), (3, ""), (["llama"], ""), ("x" * 10_000, "")],
    ],
)
def test_an_unknown_model_type_is_refused_with_the_nearest_known_one(name, near):
    with pytest.raises(ConfigError, match=r"must be one of the \d+ in docs/models.md; ") as error:
        family(name)
    assert str(error.value).endswith(f"; did you mean '{near}'?" if near else f"; got {name!r:.80}")


def test_the_page_lists_every_model_type():
    listed = (Path(__file__).parents[2] / "docs/models.md").read_text()
    assert not [name for name in (*FAMILIES, *WRAPPERS) if f"`{name}`" not in listed]


@pytest.mark.parametrize(("name", "reason"), [("mpt", "has ALiBi"), ("jamba", "are Mamba-1")])
def test_a_model_type_that_cannot_be_supported_says_why(name, reason):
    with pytest.raises(ConfigError, match=f"got '{name}' .*{reason}.* is not supported"):
        family(name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_of_gguf_files(arch):
    assert family_of_gguf(arch).gguf_arch == arch


@pytest.mark.parametrize("arch", ["bert", "", None, 3])
def test_an_unknown_architecture_lists_the_known_ones(arch):
    with pytest.raises(ConfigError, match=f"must be one of {', '.join(ARCHITECTURES)};"):
        family_of_gguf(arch)


def filled(table, config: ModelConfig) -> dict[tuple[str, str], set[str]]:
    """Return the parts of each weight, in each form, that the tensors of `table` fill."""
    result: dict[tuple[str, str], set[str]] = {}
    for template in table:
        for _, target, _ in template.expand(num_layers=1, num_experts=1):
            if str(target) in weight_shapes(config):
                result.setdefault((str(target), template.form), set()).update(
                    re.split("[|+]", template.part)
                )
    return result


@pytest.mark.parametrize("kind", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("biases", [False, True])
def test_every_row_of_every_weight_has_exactly_one_name(kind, biases):
    keys = {"attention_bias": biases, "mlp_bias": biases, "tie_word_embeddings": False}
    # The only layer has attention, or what replaces it.
    types = kind.mixers.kinds if kind.mixers else ()
    keys |= {"q_lora_rank": 8} if kind.mla else {}
    configs = [config_of(kind, **keys, **EXTRA, layer_types=[one]) for one in types]
    configs = configs or [config_of(kind, **keys)]
    for config, table in itertools.product(configs, (kind.names, kind.gguf_names)):
        found = filled(table, config)
        wanted = set(weight_shapes(config))
        if not config.norm_weight:
            wanted = {name for name in wanted if not name.endswith("norm")}
        assert not table or {target for target, _ in found} == wanted
        for (target, _), parts in found.items():
            splits = ("qkv", {"q", "k", "v"}), ("shared_gate_up", {"shared_gate", "shared_up"})
            splits += ("experts_gate_up", {"expert_gate", "expert_up"}), ("gate_up", {"gate", "up"})
            gates = ("z_latent", "a_latent") if "delta_z_up" in str(wanted) else ("z", "a")
            splits += (("delta_in", {f"delta_{one}" for one in ("q", "k", "v", "b", *gates)}),)
            splits += (("lightning_in", {f"lightning_{one}" for one in "qkvg"}),)
            splits += (("delta_conv", {f"delta_{one}" for one in "qkv"}),)
            latents = {"mla_q", "mla_q_latent", "mla_kv_latent"}
            latents |= {"mla_gate"} if kind.mla_gate else set()
            splits += (("mla_in", latents),)
            splits += ("mla_q_up", {"mla_q_of_latent"}), ("mla_kv_up", {"mla_kv"})
            split = next((parts for kind, parts in splits if kind in target), set())
            if config.moe is not None and not config.moe.is_gated and len(split) == 2:
                split = {part for part in split if part.endswith("up")}
            assert parts - {"attn_gate"} in ({""}, split), target
        names = [(name.checkpoint, name.form) for name in table]
        assert len(set(names)) == len(names)


def test_only_files_of_llama_keep_interleaved_rows():
    """llama.cpp's converter permutes q and k for "llama" (and so Mistral) and its relatives.

    GLM-4, ERNIE 4.5 and Cohere 2 have them so in every file.
    """
    permuted = {"llama", "mistral", "granite", "smollm3", "glm4", "cohere2", "mixtral"}
    permuted |= {"granitemoe", "ernie4_5", "ernie4_5_moe", "ministral3", "glm"}
    permuted |= {"granitemoeshared"}
    assert {n for n, kind in FAMILIES.items() if kind.gguf_interleaved_rope} == permuted


def test_the_page_of_models_has_a_row_for_every_family():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (`[\w-]+`|no) \|$", page, re.MULTILINE)
    wrappers = [row for row in rows if row[0] in WRAPPERS]
    assert sorted(name for name, _ in rows) == sorted((*FAMILIES, *WRAPPERS))
    for name, arch in (row for row in rows if row not in wrappers):
        reads = {kind.gguf_arch for kind in FAMILIES.values()} & {arch.strip("`")}
        assert bool(reads) == bool(FAMILIES[name].gguf_names), name


def test_a_factor_on_branches_needs_norms_that_apply_it():
    config = replace(config_of(family("olmo2")), branch_scale=0.5)
    with pytest.raises(ConfigError, match=r"branch_scale must be 1 without pre_norms; got 0\.5"):
        Decoder(config, dummy_weights(config), 16)


def test_declared_differences():
    assert config_of(family("qwen2")).qkv_bias and not config_of(family("qwen2")).o_bias
    assert config_of(family("qwen3")).qk_norm and config_of(family("qwen3")).head_dim == 128
    gemma = config_of(family("gemma3_text"))
    assert gemma.post_norms and gemma.norm_weight_offset == 1.0 and gemma.tie_word_embeddings
    assert config_of(family("phi3")).rms_norm_eps == 1e-5
    for name in ("llama", "mistral", "phi3"):
        plain = config_of(family(name))
        assert not (plain.qkv_bias or plain.qk_norm or plain.post_norms), name
