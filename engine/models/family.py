"""`Family`: declares a model family by its config.json defaults and tensor names.

A family is data, not code: `loading/hf_config.py` reads config.json with it, `loading/weights.py`
finds tensors by its tables of names, and `models/decoder.py` knows no families.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.models.mixer_family import MixerFamily
from engine.models.moe_family import MoeFamily
from engine.models.mtp_family import MtpFamily
from engine.models.tensor_layout import ROWS, Layout

__all__ = [
    "GGUF_NORM_BIASES",
    "GGUF_PACKED_MLP_NAMES",
    "GGUF_PACKED_NAMES",
    "GGUF_SPLIT_NAMES",
    "HF_ATTENTION_NAMES",
    "HF_LAYER_NAMES",
    "HF_NAMES",
    "HF_NORM_BIASES",
    "HF_UNGATED_LAYER_NAMES",
    "SECOND",
    "Family",
    "RopeRule",
    "TensorName",
    "WeightName",
    "WindowRule",
    "linear_names",
    "own_norm_names",
]

WindowRule = Literal[
    "never",
    "every_layer",
    "switched",
    "max_window_layers",
    "even_layers",
    "pattern",
    "layers_without_rope",
    "layer_types",
    "last_layers",
    "pattern_after_dense",
    "pattern_from_first",
    "first_and_pattern",
    "attention_types",
]
RopeRule = Literal[
    "all",
    "none",
    "no_rope_layers",
    "windows",
    "windows_if_set",
    "windows_and_dense",
    "position_embedding_type",
    "rope_theta",
    "layer_rope_theta",
]


SECOND = "second_"
"""Prefix of the kinds of the weights of a layer's second attention and MLP."""


class WeightName(NamedTuple):
    """The engine's name of a weight, possibly fused from several tensors.

    Attributes
    ----------
    kind : str
        "qkv", "experts_down", "embed", ...
    layer : int or None
        Index of the layer; None for weights outside of layers.

    Examples
    --------
    >>> str(WeightName("qkv", 3)), str(WeightName("embed"))
    ('layers.3.qkv', 'embed')
    """

    kind: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"layers.{self.layer}.{self.kind}"


class TensorName(NamedTuple):
    """A checkpoint tensor, and the weight that it is loaded into.

    Attributes
    ----------
    checkpoint : str
        The tensor's name in the file: "{i}" is the layer, "{e}" the expert, or the row of a matrix
        whose rows are tensors.
    kind : str
        Kind of the engine weight. See `WeightName`.
    part : str
        Rows of the weight to fill: "q", "k", "v", "gate", "up", "shared_gate", "shared_up",
        "expert_gate", "expert_up", ..., or "" for all. "q|k|v": the tensor has, head by head, a
        head's rows of each of these parts; "q+k": all rows of one part, then of the next.
    layout : Layout
        Storage layout of the experts' matrices, or of a `Conv1D`.
    form : str
        Name of this form, if the family's checkpoints store a weight in several forms. A weight is
        read in the first form for which the checkpoint holds a tensor, or in one with that tensor
        of which it holds all; among forms with the same names, in the first one whose shapes fit.
    third : int
        0, 1 or 2: the tensor has this third of the rows of `part`, whatever they belong to. -1: all
        of them.
    num_unread : int
        Number of rows in front that belong to no weight.
    """

    checkpoint: str
    kind: str
    part: str = ""
    layout: Layout = ROWS
    form: str = ""
    third: int = -1
    num_unread: int = 0

    def expand(
        self, num_layers: int, num_experts: int = 0
    ) -> Iterator[tuple[str, WeightName, int | None]]:
        """Yield (name in the file, engine's name, expert or None) for each layer and expert.

        Examples
        --------
        >>> list(TensorName("blk.{i}.{e}.up", "experts_gate_up", "expert_up").expand(1, 2))[1]
        ('blk.0.1.up', WeightName(kind='experts_gate_up', layer=0), 1)
        """
        layers = range(num_layers) if "{i}" in self.checkpoint else (None,)
        experts = range(num_experts) if "{e}" in self.checkpoint else (None,)
        for layer, expert in itertools.product(layers, experts):
            name = self.checkpoint.replace("{i}", str(layer)).replace("{e}", str(expert))
            yield name, WeightName(self.kind, layer), expert


def linear_names(checkpoint: str, kind: str, part: str = "") -> tuple[TensorName, TensorName]:
    """Name a weight and its bias. A bias is read only if the config declares it."""
    return (
        TensorName(f"{checkpoint}.weight", kind, part),
        TensorName(f"{checkpoint}.bias", f"{kind}_bias", part),
    )


def own_norm_names(names: Iterable[TensorName], norm: str = "norm") -> tuple[TensorName, ...]:
    """Return `names` with QK-norms that have a weight per head, in tensors "q_<norm>.weight"."""
    own = {f"{part}_norm": (f"{part}_head_norm", f"{part}_head") for part in "qk"}
    return tuple(
        TensorName(name.checkpoint.replace("_norm.", f"_{norm}."), *own[name.kind])
        if name.kind in own
        else name
        for name in names
    )


HF_NAMES: tuple[TensorName, ...] = (
    TensorName("model.embed_tokens.weight", "embed"),
    TensorName("model.norm.weight", "final_norm"),
    TensorName("lm_head.weight", "lm_head"),
    TensorName("model.layers.{i}.input_layernorm.weight", "attn_norm"),
    *linear_names("model.layers.{i}.self_attn.o_proj", "o"),
    *linear_names("model.layers.{i}.mlp.down_proj", "down"),
)
"""Names in a Hugging Face checkpoint that nearly all families share."""

HF_ATTENTION_NAMES: tuple[TensorName, ...] = (
    *linear_names("model.layers.{i}.self_attn.q_proj", "qkv", "q"),
    *linear_names("model.layers.{i}.self_attn.k_proj", "qkv", "k"),
    *linear_names("model.layers.{i}.self_attn.v_proj", "qkv", "v"),
    TensorName("model.layers.{i}.self_attn.q_norm.weight", "q_norm"),
    TensorName("model.layers.{i}.self_attn.k_norm.weight", "k_norm"),
)
"""Separate projections of q, k and v, and the norms of q and k that some configs declare."""

HF_LAYER_NAMES: tuple[TensorName, ...] = (
    *HF_ATTENTION_NAMES,
    *linear_names("model.layers.{i}.mlp.gate_proj", "gate_up", "gate"),
    *linear_names("model.layers.{i}.mlp.up_proj", "gate_up", "up"),
)
"""The attention's names, and separate projections of gate and up."""

HF_UNGATED_LAYER_NAMES: tuple[TensorName, ...] = (
    *HF_ATTENTION_NAMES,
    *linear_names("model.layers.{i}.mlp.up_proj", "up"),
)
"""The same for an MLP without a gate."""

HF_NORM_BIASES: tuple[TensorName, ...] = (
    TensorName("model.norm.bias", "final_norm_bias"),
    TensorName("model.layers.{i}.input_layernorm.bias", "attn_norm_bias"),
    TensorName("model.layers.{i}.post_attention_layernorm.bias", "mlp_norm_bias"),
)
"""Biases of the LayerNorms before attention and MLP, and of the final one."""

_GGUF_NAMES: tuple[TensorName, ...] = (
    TensorName("token_embd.weight", "embed"),
    TensorName("output_norm.weight", "final_norm"),
    TensorName("output.weight", "lm_head"),
    TensorName("blk.{i}.attn_norm.weight", "attn_norm"),
    TensorName("blk.{i}.ffn_norm.weight", "mlp_norm"),
    *linear_names("blk.{i}.attn_output", "o"),
    *linear_names("blk.{i}.ffn_down", "down"),
)

GGUF_SPLIT_NAMES: tuple[TensorName, ...] = (
    *_GGUF_NAMES,
    *linear_names("blk.{i}.attn_q", "qkv", "q"),
    *linear_names("blk.{i}.attn_k", "qkv", "k"),
    *linear_names("blk.{i}.attn_v", "qkv", "v"),
    TensorName("blk.{i}.attn_q_norm.weight", "q_norm"),
    TensorName("blk.{i}.attn_k_norm.weight", "k_norm"),
    *linear_names("blk.{i}.ffn_gate", "gate_up", "gate"),
    *linear_names("blk.{i}.ffn_up", "gate_up", "up"),
    TensorName("blk.{i}.post_attention_norm.weight", "post_attn_norm"),
    TensorName("blk.{i}.post_ffw_norm.weight", "post_mlp_norm"),
)
"""Names in a .gguf with separate projections."""

GGUF_PACKED_NAMES: tuple[TensorName, ...] = (
    *_GGUF_NAMES,
    *linear_names("blk.{i}.attn_qkv", "qkv"),
    # NOTE: packed gate and up are stored under the name of up.
    *linear_names("blk.{i}.ffn_up", "gate_up"),
)
"""Names in a .gguf with packed projections (phi3)."""

GGUF_PACKED_MLP_NAMES: tuple[TensorName, ...] = (
    *(name for name in GGUF_SPLIT_NAMES if "ffn_gate" not in name.checkpoint and not name.part),
    *(name for name in GGUF_SPLIT_NAMES if name.kind in ("qkv", "qkv_bias")),
    *linear_names("blk.{i}.ffn_up", "gate_up"),
)
"""Names in a .gguf with separate q, k and v, and packed gate and up (glm4)."""

GGUF_NORM_BIASES: tuple[TensorName, ...] = (
    TensorName("output_norm.bias", "final_norm_bias"),
    TensorName("blk.{i}.attn_norm.bias", "attn_norm_bias"),
    TensorName("blk.{i}.ffn_norm.bias", "mlp_norm_bias"),
)
"""Biases of the LayerNorms before attention and MLP, and of the final one, in a .gguf."""


@dataclass(frozen=True)
class Family:
    """Declaration of one model_type.

    Attributes
    ----------
    model_type : str
        Hugging Face's name.
    gguf_arch : str
        `general.architecture` of a .gguf; "" if another family reads such files.
    names, gguf_names : tuple of TensorName
        Tensors of a safetensors checkpoint, and of a .gguf (empty if not supported).
    defaults : mapping
        Hugging Face's defaults for keys missing from config.json.
    key_aliases : mapping
        The family's own name of a key -> the name that the other families have for it.
    idle_keys : tuple of str
        Keys that mean something in other families, and nothing in this one's files.
    qkv_bias, o_bias, mlp_bias, lm_head_bias : bool or str
        Whether the bias exists, or the config.json key of that flag.
    qk_norm, pre_norms, post_norms : bool or str
        QK-norm, norms before, and norms after attention and MLP; for the first and last, or the
        key of that flag.
    eps_key, rms_norm_key : str
        Key of the norms' epsilon; key of another one, whose presence makes LayerNorms RMSNorms.
    layer_norm, norm_weight, norm_bias : bool
        Norms are LayerNorms (the mean is subtracted); norms have a weight; norms have a bias.
    embed_norm : bool
        The embedding is normalised.
    learned_positions : bool
        See `ModelConfig.learned_positions`.
    mlp_width : str
        Key of the MLP's intermediate size; without it, that is `intermediate_size`.
    mlp_ratio : int
        Default of that key, as a multiple of `hidden_size`; 0: the key is required.
    multi_query : bool
        The flags `multi_query` and `new_decoder_architecture` decide the number of key/value heads
        (Falcon).
    gated_mlp : bool
        The MLP is act(gate x) * up x; otherwise act(up x).
    parallel : bool or str
        Attention and MLP read the same input, and both are added to it; or the key of that flag.
    parallel_norms : bool or str
        Each branch of a parallel block has a norm of its own; or the key of the number of norms,
        by default 2 with `new_decoder_architecture` and 1 without (Falcon).
    inner_norms : bool
        See `ModelConfig.inner_norms`.
    norms_by_kind : bool
        See `ModelConfig.norms_by_kind`.
    whole_qk_norm : bool
        QK-norm over all heads of q or k together instead of per head.
    own_qk_norms : bool
        Every head has a weight of QK-norm of its own; only with `layer_norm`.
    qk_norm_after_rope : bool
        q and k are rotated first, then normalised.
    bare_qk_norm : bool
        QK-norm has no weight, and only layers with rope have it.
    sinks : bool or str
        Every head has an attention sink; "windows": in layers with a window.
    windows : str
        Layers with a sliding window: "never", "every_layer" (if `sliding_window` is set),
        "switched" (every layer, if `use_sliding_window`), "max_window_layers" (from that layer on,
        if `use_sliding_window`), "even_layers" (those before `max_window_layers`, if
        `use_sliding_window`), "pattern" (all but every n-th, or the L of a string such as "LLLG"),
        "pattern_after_dense" (the same, counted after the dense layers, which have a pattern of
        their own), "pattern_from_first" (all but the first and every n-th after it),
        "layers_without_rope" (if `use_sliding_window`), "last_layers" (from `max_window_layers` on,
        without a switch), "first_and_pattern" (all but the first and every n-th), "attention_types"
        (those it or `attention_layers` calls "local": GPT-Neo) or "layer_types" (only those that
        key names). For all but "never" and "switched", `layer_types` takes precedence if given.
    past_window : str
        Key of the window without the query's own position, which takes precedence; "" for none.
    window_kv_factor : int
        Layers with a window have this many times the key/value heads.
    chunks : bool
        Layers with rope, or those that `layer_types` calls "chunked_attention", see only the keys
        of their own chunk of `attention_chunk_size` positions, if that is set.
    rope_layers : str
        Layers that rotate q and k: "all", "none", "windows" (those with a sliding window),
        "windows_if_set" (the same, but all layers if `sliding_window` is null), "windows_and_dense"
        (the same, and the dense ones, if their pattern is 1), "position_embedding_type" (all if
        that key is "rope", else none), "rope_theta" (none if that key is null), "layer_rope_theta"
        (that key lists the base of each layer's rope, or 0; without it, all layers) or
        "no_rope_layers" (that key lists 1 or 0 per layer; without it, all layers but every
        `no_rope_layer_interval`-th).
    norm_weight_offset : float
        Added to every norm's weight.
    scale_embedding : bool or str
        Multiply embeddings by sqrt(hidden_size), which is rounded to the weights' dtype first; or
        the key of that flag, then without rounding.
    attn_scale : float
        Factor on q·k if there is no `query_pre_attn_scalar`; 0 means 1/sqrt(head_dim).
    v_norm : bool
        Values are normalised per head, without a weight.
    layer_scale : bool
        Every layer scales the residual stream at its end.
    layers_differ : bool
        Key/value heads, head dims and MLP widths depend on the layer (`loading.layer_config`).
    last_is_full : bool
        The last layer has full attention, whatever `layer_types` says.
    multipliers : bool
        Whether config.json has Granite's four multipliers.
    depth_scales : bool
        Whether config.json has MiniCPM's factors: `scale_emb` on the embedding, `scale_depth` over
        the root of the number of layers on branches, and `dim_model_base` over the hidden size on
        logits.
    weight_multipliers : bool
        Whether config.json has Falcon-H1's multipliers. See `ModelConfig.weight_factors`.
    logit_scale : str
        Key of a factor on the logits; "" for none. It replaces Granite's divisor.
    local_rope : bool
        Sliding-window layers have their own rope table.
    max_position_is_scaled : bool
        Whether `max_position_embeddings` already includes a linear rope factor.
    rope_aliases, activation_aliases : mapping
        Rope types and activations of old checkpoints -> their meaning in this family.
    mrope : bool
        Positions have three axes, which are equal for text: the sections of the frequencies among
        them do not matter.
    rotary_dim : str
        Key of the number of rotated features of a head; "" for none.
    reversed_rope : bool
        q and k are rotated backwards.
    rope_mscales : bool
        The factors on cos and sin are longrope's `short_mscale` and `long_mscale`.
    rope_alpha : bool
        An `alpha` in rope parameters of type "dynamic" raises the base, at every length alike.
    q_scale : bool
        Rope parameters may hold `llama_4_scaling_beta`: a factor on queries that grows with their
        position.
    scales_unrotated_q : bool
        Unless `attn_temperature_tuning` is off, `attn_scale` and `floor_scale` say how queries grow
        with their position in layers without rope.
    interleaved_rope : bool or str
        Checkpoints store the rotated rows of q and k interleaved: pair i is rows 2i and 2i + 1 of a
        head instead of i and i + R/2; or the key of that flag, which is on by default.
    gguf_interleaved_rope : bool
        The same flag for .gguf files.
    mixers : MixerFamily or None
        Declaration of the layers that replace attention.
    mla : bool
        Every layer has multi-head latent attention, or those that `mixers` says.
    mla_gate : bool
        See `MlaConfig.head_gate`.
    latent_scales : bool
        Normalised latents are scaled up to the residual stream's size, unless `mla_scale_q_lora` or
        `mla_scale_kv_lora` is off.
    shortcut : bool
        Layers have two attentions and two MLPs. See `ModelConfig.layer_kinds`.
    attn_gate : str
        Gate of the attention's output. See `ModelConfig.attn_gate`.
    attn_gate_key : str
        Key of a flag, on by default, that turns the gate off; "" for none.
    moe : MoeFamily or None
        Declaration of the layers with experts.
    adjusts_width : bool
        The MLP's width is computed from `intermediate_size` (LFM2).
    extra_layers : str
        Key of the number of multi-token prediction layers after the last layer, which are not
        loaded with the model; "" for none.
    mtp : MtpFamily or None
        Declaration of such a layer, if it can be loaded as a draft head.
    """

    model_type: str
    names: tuple[TensorName, ...]
    gguf_names: tuple[TensorName, ...] = GGUF_SPLIT_NAMES
    gguf_arch: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    idle_keys: tuple[str, ...] = ()
    eps_key: str = "rms_norm_eps"
    rms_norm_key: str = ""
    layer_norm: bool = False
    norm_weight: bool = True
    embed_norm: bool = False
    learned_positions: bool = False
    norm_bias: bool = False
    mlp_width: str = "intermediate_size"
    mlp_ratio: int = 0
    multi_query: bool = False
    gated_mlp: bool = True
    parallel: bool | str = False
    parallel_norms: bool | str = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    lm_head_bias: bool | str = False
    qk_norm: bool | str = False
    whole_qk_norm: bool = False
    own_qk_norms: bool = False
    qk_norm_after_rope: bool = False
    bare_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool | str = False
    inner_norms: bool = False
    norms_by_kind: bool = False
    sinks: bool | Literal["windows"] = False
    windows: WindowRule = "never"
    past_window: str = ""
    window_kv_factor: int = 1
    chunks: bool = False
    rope_layers: RopeRule = "all"
    norm_weight_offset: float = 0.0
    scale_embedding: bool | str = False
    attn_scale: float = 0.0
    v_norm: bool = False
    layer_scale: bool = False
    layers_differ: bool = False
    last_is_full: bool = False
    multipliers: bool = False
    depth_scales: bool = False
    weight_multipliers: bool = False
    logit_scale: str = ""
    local_rope: bool = False
    max_position_is_scaled: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    reversed_rope: bool = False
    rope_mscales: bool = False
    rope_alpha: bool = False
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    mrope: bool = False
    rotary_dim: str = ""
    q_scale: bool = False
    scales_unrotated_q: bool = False
    interleaved_rope: bool | str = False
    gguf_interleaved_rope: bool = False
    mixers: MixerFamily | None = None
    mla: bool = False
    latent_scales: bool = False
    shortcut: bool = False
    mla_gate: bool = False
    attn_gate: str = ""
    attn_gate_key: str = ""
    moe: MoeFamily | None = None
    adjusts_width: bool = False
    extra_layers: str = ""
    mtp: MtpFamily | None = None

    @property
    def has_partial_rope(self) -> bool:
        """Whether a model may rotate only some of a head's features."""
        return "partial_rotary_factor" in self.defaults or bool(self.rotary_dim)
