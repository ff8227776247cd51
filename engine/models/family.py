"""The declaration of a model family: defaults of its config.json and names of its tensors.

A family is data, not code: `loading/hf_config.py` reads the config.json according to it,
`loading/weights.py` finds the tensors by its tables of names, and `models/decoder.py` does not
know about families at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.models.moe_family import MoeFamily
from engine.models.tensor_layout import ROWS, Layout

__all__ = [
    "GGUF_NORM_BIASES",
    "GGUF_PACKED_MLP_NAMES",
    "GGUF_PACKED_NAMES",
    "GGUF_SPLIT_NAMES",
    "HF_LAYER_NAMES",
    "HF_NAMES",
    "HF_NORM_BIASES",
    "Family",
    "RopeRule",
    "TensorName",
    "WeightName",
    "WindowRule",
]

WindowRule = Literal[
    "never",
    "every_layer",
    "switched",
    "max_window_layers",
    "even_layers",
    "pattern",
    "layers_without_rope",
]
RopeRule = Literal["all", "no_rope_layers", "windows"]


class WeightName(NamedTuple):
    """The engine's name of a (fused) weight.

    Attributes
    ----------
    kind : str
        "qkv", "experts_down", "embed", ...
    layer : int or None
        Layer it belongs to; None for weights of the whole model.

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
    """The weight that one tensor of a checkpoint is loaded into.

    Attributes
    ----------
    checkpoint : str
        The tensor's name in the file; "{i}" stands for the layer, "{e}" for the expert.
    kind : str
        The engine's (fused) weight, as in `WeightName`.
    part : str
        The rows of that weight it fills: "q", "k", "v", "gate", "up", "shared_gate", "shared_up",
        "expert_gate", "expert_up", or "" for all.
    layout : Layout
        How it stores the experts' matrices.
    form : str
        Where a family's checkpoints name or lay out a weight in several ways: which of them this
        is. A weight is read in the first form of which the checkpoint has a tensor.
    """

    checkpoint: str
    kind: str
    part: str = ""
    layout: Layout = ROWS
    form: str = ""

    def expand(
        self, num_layers: int, num_experts: int = 0
    ) -> Iterator[tuple[str, WeightName, int | None]]:
        """Yield the name in the file, the engine's name, and the expert (None: not of one).

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


def _linear(checkpoint: str, kind: str, part: str = "") -> tuple[TensorName, TensorName]:
    """Name a weight and its bias; a bias is only read if the config has it."""
    return (
        TensorName(f"{checkpoint}.weight", kind, part),
        TensorName(f"{checkpoint}.bias", f"{kind}_bias", part),
    )


HF_NAMES: tuple[TensorName, ...] = (
    TensorName("model.embed_tokens.weight", "embed"),
    TensorName("model.norm.weight", "final_norm"),
    TensorName("lm_head.weight", "lm_head"),
    TensorName("model.layers.{i}.input_layernorm.weight", "attn_norm"),
    *_linear("model.layers.{i}.self_attn.o_proj", "o"),
    *_linear("model.layers.{i}.mlp.down_proj", "down"),
)
"""The names that every family shares in a Hugging Face checkpoint."""

HF_LAYER_NAMES: tuple[TensorName, ...] = (
    *_linear("model.layers.{i}.self_attn.q_proj", "qkv", "q"),
    *_linear("model.layers.{i}.self_attn.k_proj", "qkv", "k"),
    *_linear("model.layers.{i}.self_attn.v_proj", "qkv", "v"),
    TensorName("model.layers.{i}.self_attn.q_norm.weight", "q_norm"),
    TensorName("model.layers.{i}.self_attn.k_norm.weight", "k_norm"),
    *_linear("model.layers.{i}.mlp.gate_proj", "gate_up", "gate"),
    *_linear("model.layers.{i}.mlp.up_proj", "gate_up", "up"),
)
"""Separate projections, with norms of q and k where the config has them."""

HF_NORM_BIASES: tuple[TensorName, ...] = (
    TensorName("model.norm.bias", "final_norm_bias"),
    TensorName("model.layers.{i}.input_layernorm.bias", "attn_norm_bias"),
    TensorName("model.layers.{i}.post_attention_layernorm.bias", "mlp_norm_bias"),
)
"""The biases of LayerNorms before attention and MLP."""

_GGUF_NAMES: tuple[TensorName, ...] = (
    TensorName("token_embd.weight", "embed"),
    TensorName("output_norm.weight", "final_norm"),
    TensorName("output.weight", "lm_head"),
    TensorName("blk.{i}.attn_norm.weight", "attn_norm"),
    TensorName("blk.{i}.ffn_norm.weight", "mlp_norm"),
    *_linear("blk.{i}.attn_output", "o"),
    *_linear("blk.{i}.ffn_down", "down"),
)

GGUF_SPLIT_NAMES: tuple[TensorName, ...] = (
    *_GGUF_NAMES,
    *_linear("blk.{i}.attn_q", "qkv", "q"),
    *_linear("blk.{i}.attn_k", "qkv", "k"),
    *_linear("blk.{i}.attn_v", "qkv", "v"),
    TensorName("blk.{i}.attn_q_norm.weight", "q_norm"),
    TensorName("blk.{i}.attn_k_norm.weight", "k_norm"),
    *_linear("blk.{i}.ffn_gate", "gate_up", "gate"),
    *_linear("blk.{i}.ffn_up", "gate_up", "up"),
    TensorName("blk.{i}.post_attention_norm.weight", "post_attn_norm"),
    TensorName("blk.{i}.post_ffw_norm.weight", "post_mlp_norm"),
)
"""A .gguf with separate projections."""

GGUF_PACKED_NAMES: tuple[TensorName, ...] = (
    *_GGUF_NAMES,
    *_linear("blk.{i}.attn_qkv", "qkv"),
    # NOTE: a packed gate and up is stored under the name of up alone.
    *_linear("blk.{i}.ffn_up", "gate_up"),
)
"""A .gguf with packed projections (phi3)."""

GGUF_PACKED_MLP_NAMES: tuple[TensorName, ...] = (
    *(name for name in GGUF_SPLIT_NAMES if "ffn_gate" not in name.checkpoint and not name.part),
    *(name for name in GGUF_SPLIT_NAMES if name.kind in ("qkv", "qkv_bias")),
    *_linear("blk.{i}.ffn_up", "gate_up"),
)
"""A .gguf with separate q, k and v, and packed gate and up (glm4)."""

GGUF_NORM_BIASES: tuple[TensorName, ...] = (
    TensorName("output_norm.bias", "final_norm_bias"),
    TensorName("blk.{i}.attn_norm.bias", "attn_norm_bias"),
    TensorName("blk.{i}.ffn_norm.bias", "mlp_norm_bias"),
)
"""The biases of LayerNorms before attention and MLP, in a .gguf."""


@dataclass(frozen=True)
class Family:
    """One model_type, declared.

    Attributes
    ----------
    model_type : str
        Hugging Face's name.
    gguf_arch : str
        The `general.architecture` of a .gguf; "" if another family reads such files.
    names, gguf_names : tuple of TensorName
        Tensors of a safetensors checkpoint, and of a .gguf (none: such files are not read).
    defaults : mapping
        Values of keys missing from config.json (Hugging Face's defaults).
    qkv_bias, o_bias, mlp_bias, lm_head_bias : bool or str
        Whether the bias exists, or the key of config.json that tells.
    qk_norm, pre_norms, post_norms : bool
        Whether q and k are normed (or the key that tells); whether inputs and outputs of attention
        and MLP are.
    eps_key : str
        The key of the norms' epsilon.
    layer_norm, norm_bias : bool
        Whether norms subtract the mean (LayerNorm); whether they have a bias.
    gated_mlp : bool
        Whether the MLP has a gate: act(gate x) * up x, else act(up x).
    parallel : bool or str
        Whether attention and MLP have the same input and are added together, or the key that tells.
    whole_qk_norm : bool
        Whether q and k are normed over all heads together instead of per head.
    sinks : bool
        Whether every head has an attention sink.
    windows : str
        Which layers have a sliding window: "never", "every_layer" (if `sliding_window` is set),
        "switched" (every layer, if `use_sliding_window`), "max_window_layers" (from that layer on,
        if `use_sliding_window`), "even_layers" (those before `max_window_layers`, if
        `use_sliding_window`), "pattern" (all but every n-th) or "layers_without_rope" (these, if
        `use_sliding_window`). For all but the first and "switched", `layer_types` takes precedence
        if given.
    rope_layers : str
        Which layers rotate q and k: "all", "windows" (those with a sliding window), or
        "no_rope_layers" (as that key says with 1 and 0 per layer, else all but every
        `no_rope_layer_interval`-th).
    norm_weight_offset : float
        Added to every norm's weight.
    scale_embedding : bool
        Whether embeddings are multiplied with sqrt(hidden_size).
    multipliers : bool
        Whether config.json has Granite's four multipliers.
    logit_scale : str
        The key of a factor on the logits; "" if there is none.
    local_rope : bool
        Whether layers with a window have their own rope table.
    max_position_is_scaled : bool
        Whether `max_position_embeddings` already includes a linear rope factor.
    rope_aliases : mapping
        Rope types of old checkpoints -> what they mean in this family.
    interleaved_rope : bool
        Whether a checkpoint keeps the rotated rows of q and k in interleaved order: pair i is rows
        2i and 2i + 1 of a head, not i and i + R/2.
    gguf_interleaved_rope : bool
        Whether a .gguf does.
    moe : MoeFamily or None
        The layers with experts.
    extra_layers : str
        The key with the number of layers after the last, for predicting further tokens, which are
        not read; "" if there are none.
    unsupported : tuple of str
        Keys of config.json that change the result and are refused if set.
    """

    model_type: str
    names: tuple[TensorName, ...]
    gguf_names: tuple[TensorName, ...] = GGUF_SPLIT_NAMES
    gguf_arch: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    layer_norm: bool = False
    norm_bias: bool = False
    gated_mlp: bool = True
    parallel: bool | str = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    lm_head_bias: bool | str = False
    qk_norm: bool | str = False
    whole_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    sinks: bool = False
    windows: WindowRule = "never"
    rope_layers: RopeRule = "all"
    norm_weight_offset: float = 0.0
    scale_embedding: bool = False
    multipliers: bool = False
    logit_scale: str = ""
    local_rope: bool = False
    max_position_is_scaled: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False
    gguf_interleaved_rope: bool = False
    moe: MoeFamily | None = None
    extra_layers: str = ""
    unsupported: tuple[str, ...] = ()

    @property
    def has_partial_rope(self) -> bool:
        """Tell whether a model may rotate only some features of a head."""
        return "partial_rotary_factor" in self.defaults
