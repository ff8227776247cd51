"""Shapes of a model's fused weights, and the rows that each checkpoint tensor fills."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np

from engine.config import GatedDeltaConfig, Mamba2Config, MlaConfig, ModelConfig, MoeConfig
from engine.errors import WeightsError
from engine.loading.kv_scales import is_kv_scale
from engine.models.family import SECOND, TensorName, WeightName
from engine.models.tensor_layout import ROWS, Layout, scales_name
from engine.weights import WHOLE, Shard

__all__ = [
    "ADAPTABLE",
    "OUTPUT_NAMES",
    "PLAIN_NORM",
    "XIELU_KINDS",
    "Placement",
    "RotatedRows",
    "expected_tensors",
    "matrix_placements",
    "part_bounds",
    "place_tensors",
    "shard_axis",
    "shard_pieces",
    "weight_shapes",
]

PLAIN_NORM = "delta_norm"
"""Kind of the norm whose weight `norm_weight_offset` is not added to."""

# Precomputed tables in old checkpoints and .gguf files; the engine computes its own.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    r"|transformer\.h\.\d+\.attn\.(attention\.)?(bias|masked_bias)"
    r"|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,6})\.")
_MTP_LAYER = re.compile(r"model\.mtp_layers\.(\d{1,6})\.")
_MTP = re.compile(r"(model\.)?mtp\.|model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.")
OUTPUT_NAMES = ("lm_head.weight", "output.weight", "embed_out.weight")
"""Names of the output matrix, which a tied model's checkpoint may hold too."""
# Tensors of a layer that reads another layer's keys and values: checkpoints may hold them.
_EXPERT = re.compile(r"model\.layers\.\d{1,6}\.mlp\.experts\.(\d{1,6})\.")
_KEY_VALUE = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


XIELU_KINDS = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta", "xielu_eps")
"""The numbers of a layer's xIELU, of one element each."""

# Fused weights sharded by rows -> the parts that make up the rows.
_ROW_PARTS = {
    "qkv": ("q", "k", "v", "attn_gate"),
    "sinks": ("q_head",),
    "q_head_norm": ("q_head",),
    "k_head_norm": ("k_head",),
    "delta_in": (
        *("delta_q", "delta_k", "delta_v", "delta_z", "delta_a"),
        *("delta_z_latent", "delta_a_latent", "delta_b"),
    ),
    "delta_z_up": ("delta_v",),
    "delta_a_up": ("delta_dt",),
    "delta_conv": ("delta_q", "delta_k", "delta_v"),
    "delta_decay": ("delta_b",),
    "delta_dt": ("delta_dt",),
    "lightning_in": ("lightning_q", "lightning_k", "lightning_v", "lightning_g"),
    "lightning_norm": ("lightning_q",),
    "conv_in": ("conv_b", "conv_c", "conv_x"),
    "conv_taps": ("conv_x",),
    "mamba_in": ("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt"),
    "mamba_conv": ("mamba_x", "mamba_b", "mamba_c"),
    "mamba_norm": ("mamba_x",),
    "mamba_decay": ("mamba_dt",),
    "mamba_skip": ("mamba_dt",),
    "mamba_step": ("mamba_dt",),
    "mla_in": ("mla_q_latent", "mla_q", "mla_kv_latent", "mla_gate"),
    "mla_q_up": ("mla_q_of_latent",),
    "mla_kv_up": ("mla_kv",),
    "gate_up": ("gate", "up"),
    "up": ("up",),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "experts_gate_up": ("expert_gate", "expert_up"),
}
_ROW_PARTS |= {
    SECOND + kind: _ROW_PARTS[kind] for kind in ("mla_in", "mla_q_up", "mla_kv_up", "gate_up")
}
_UNGATED_PARTS = {"shared_gate_up": ("shared_up",), "experts_gate_up": ("expert_up",)}
# Weights sharded by columns -> the part that produces these input features.
_COLUMN_PART = {
    "o": "heads",
    "delta_out": "delta_v",
    "lightning_out": "lightning_q",
    "conv_out": "conv_x",
    "mamba_out": "mamba_x",
    "mla_out": "mla_v",
    "down": "gate",
    "shared_down": "shared_gate",
    "experts_down": "expert_gate",
}
_COLUMN_PART |= {SECOND + kind: _COLUMN_PART[kind] for kind in ("mla_out", "down")}
ADAPTABLE = (
    *("qkv", "o", "gate_up", "up", "down", "mla_in", "mla_q_up", "mla_out"),
    *("delta_in", "delta_out", "lightning_in", "lightning_out", "conv_in", "conv_out"),
    *("mamba_in", "mamba_out"),
)
"""Kinds of the matrices that a LoRA adapter may change: those of `layers.linear.Linear`."""

_EXPERTS = "experts_"  # prefix of weights with a leading expert axis
_VOCABULARY = ("embed", "lm_head", "lm_head_bias")


def shard_axis(kind: str, *, by_output: bool = False, expert_parallel: bool = False) -> int | None:
    """Return the axis along which weights of this kind are sharded; None if they are not.

    With `by_output` no matrix is sharded along its input features; with `expert_parallel` expert
    weights are sharded along the expert axis only. See `Shard`.

    Examples
    --------
    >>> [shard_axis(kind) for kind in ("qkv", "gate_up_bias", "down", "embed", "attn_norm")]
    [0, 0, 1, 0, None]
    >>> [shard_axis(f"experts_{kind}") for kind in ("gate_up", "gate_up_bias", "down", "down_bias")]
    [1, 1, 2, None]
    >>> [shard_axis(kind, by_output=True) for kind in ("o", "down_bias", "experts_down")]
    [0, 0, 1]
    >>> shard_axis("experts_down_bias", expert_parallel=True)
    0
    """
    first = int(kind.startswith(_EXPERTS))
    if first and expert_parallel:
        return 0
    if by_output and kind.removesuffix("_bias") in _COLUMN_PART:
        return first
    if kind.removesuffix("_bias") in _ROW_PARTS or kind in _VOCABULARY:
        return first
    return first + 1 if kind in _COLUMN_PART else None


# Part -> another part with the same number of rows.
_TWINS = {
    "v": "k",
    "attn_gate": "q",
    "up": "gate",
    "shared_up": "shared_gate",
    "expert_up": "expert_gate",
    "delta_k": "delta_q",
    **dict.fromkeys(("lightning_k", "lightning_v", "lightning_g"), "lightning_q"),
    "conv_b": "conv_x",
    "conv_c": "conv_x",
    "mamba_z": "mamba_x",
    "mamba_c": "mamba_b",
}


def _features(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return, for each kind of MLP, the name of its feature count (for messages), and the count."""
    features: dict[str, tuple[str, int]] = {}
    if config.has_mlp:
        features["gate"] = "intermediate_size", config.intermediate_size
    if (moe := config.moe) is not None:
        features["expert_gate"] = "the width of an expert", moe.intermediate_size
        if moe.shared_size:
            features["shared_gate"] = "the width of the shared expert", moe.shared_size
    return features


def _parts_in(part: str) -> list[str]:
    """Return the parts that a name such as "q+k" or "q|k" joins."""
    return part.replace("|", "+").split("+")


class _Parts:
    """Parts of fused weights: their rows in the whole model and in one shard.

    Attention heads and MLP or expert features are divided evenly; with more shards than key/value
    heads, several shards hold the same head. The vocabulary is padded to equal parts. With
    `by_output`, the output features of all other matrices are divided too. With `expert_parallel`,
    expert features are not divided. Sizes are those of `layer`, if given.
    """

    def __init__(self, config: ModelConfig, shard: Shard, layer: int | None = None) -> None:
        self._row_parts = _ROW_PARTS
        if config.moe is not None and not config.moe.is_gated:
            self._row_parts = self._row_parts | _UNGATED_PARTS
        if layer is not None:
            self._row_parts = self._row_parts | {"qkv": config.qkv_parts(layer)}
            config = config.at(layer)
        d = config.head_dim
        self._factors = {name: (own, bias) for name, own, bias in config.weight_factors}
        self._by_output = shard.by_output and not shard.is_whole
        self._expert_parallel = shard.expert_parallel
        self.experts = (0, 0) if config.moe is None else shard.cut_experts(config.moe.num_experts)
        heads, kv_heads = shard.cut_heads(config.num_heads, config.num_kv_heads)
        self.whole = {"q_head": config.num_heads, "k_head": config.num_kv_heads}
        self.whole |= {"q": config.num_heads * d, "k": config.num_kv_heads * d}
        self.local = {
            "q_head": heads,
            "k_head": kv_heads,
            "q": (heads[0] * d, heads[1] * d),
            "k": (kv_heads[0] * d, kv_heads[1] * d),
        }
        v = self._v_head_dim = config.v_head_dim or d
        self._num_values = config.num_kv_heads * v
        self.whole["heads"] = config.num_heads * v
        self.local["heads"] = (heads[0] * v, heads[1] * v)
        self._kv_heads = kv_heads
        self.rotated_heads = RotatedRows(d, 0, config.rope.rotary_dim)
        columns = replace(self.rotated_heads, in_columns=True)
        self.rotated = {"q_head": columns, "k_head": columns}
        # Of parts that alternate with others head by head.
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads}
        if config.gated_delta is not None:
            self._add_delta(config.gated_delta, shard)
        if (lightning := config.lightning) is not None:  # divided by groups of heads
            first, last = shard.cut("group_norm_size", lightning.num_groups)
            size = self.whole["lightning_q"] = lightning.inner_dim
            each = size // lightning.num_groups
            self.local["lightning_q"] = first * each, last * each
        if (conv := config.short_conv) is not None:
            self.whole["conv_x"] = conv.num_channels
            self.local["conv_x"] = shard.cut("channels of the convolution", conv.num_channels)
        if config.mamba2 is not None:
            self._add_mamba(config.mamba2, shard)
        if config.mla is not None:
            self._add_mla(config.mla, config.num_heads, heads)
        for part, (key, features) in _features(config).items():
            is_divided = not (part == "expert_gate" and self._expert_parallel)
            self.whole[part] = features
            self.local[part] = shard.cut(key, features) if is_divided else (0, features)
        for twin, part in _TWINS.items():
            if part in self.whole:
                self.whole[twin] = self.whole[part]
                self.local[twin] = self.local[part]
                if part in self._heads:
                    self._heads[twin] = self._heads[part]
        if config.attn_gate != "sigmoid":  # a row per head, or no gate
            gate = "q_head" if config.attn_gate else ""
            self.whole["attn_gate"] = self.whole.get(gate, 0)
            self.local["attn_gate"] = self.local.get(gate, (0, 0))
        if self._by_output:
            n = self.whole["hidden"] = config.hidden_size
            self.local["hidden"] = shard.cut("hidden_size", n)

    def _add_delta(self, delta: GatedDeltaConfig, shard: Shard) -> None:
        """Add the parts of gated delta layers, which are divided by key heads."""
        count = delta.num_key_heads
        rank = delta.gate_rank
        first, last = shard.cut("linear_num_key_heads", count)
        whole = {"q": delta.key_dim, "v": delta.value_dim, "b": delta.num_value_heads}
        whole |= {"dt": delta.decay_dim, "z": delta.value_dim, "a": delta.decay_dim}
        if rank:
            whole |= {"z": 0, "a": 0}
        for part in ("delta_z_latent", "delta_a_latent"):
            self.whole[part] = rank
            self.local[part] = 0, rank
        for part, size in whole.items():
            each = size // count
            self.whole[f"delta_{part}"] = size
            self.local[f"delta_{part}"] = (first * each, last * each)
            self._heads[f"delta_{part}"] = count

    def _add_mamba(self, mamba: Mamba2Config, shard: Shard) -> None:
        """Add the parts of Mamba-2 layers, which are divided by groups."""
        count = mamba.num_groups
        first, last = shard.cut("mamba_n_groups", count)
        whole = {"x": mamba.inner_dim, "b": mamba.group_dim, "dt": mamba.num_heads}
        for part, size in whole.items():
            each = size // count
            self.whole[f"mamba_{part}"] = size
            self.local[f"mamba_{part}"] = (first * each, last * each)

    def _add_mla(self, mla: MlaConfig, num_heads: int, heads: tuple[int, int]) -> None:
        """Add the parts of latent attention: latents are not divided, the rest is, by heads."""
        first, last = heads
        d = mla.nope_dim + mla.rope_dim
        each = {"mla_q": d, "mla_q_of_latent": d, "mla_v": mla.v_dim}
        each |= {"mla_kv": mla.nope_dim + mla.v_dim, "mla_gate": int(mla.head_gate)}
        absent = "mla_q" if mla.q_rank else "mla_q_of_latent"
        for part, size in (each | {absent: 0}).items():
            self.whole[part] = num_heads * size
            self.local[part] = first * size, last * size
        for part, size in {"mla_q_latent": mla.q_rank, "mla_kv_latent": mla.cache_dim}.items():
            self.whole[part] = size
            self.local[part] = 0, size
        queries = RotatedRows(d, mla.nope_dim, mla.rope_dim)
        self.rotated |= {"mla_q": queries, "mla_q_of_latent": queries}
        self.rotated["mla_kv_latent"] = RotatedRows(mla.cache_dim, mla.kv_rank, mla.rope_dim)

    def factor(self, kind: str, row: int) -> float:
        """Return the factor on row `row` of a `kind` weight of the shard."""
        if not self._factors:
            return 1.0
        name = matrix = kind.removesuffix("_bias")
        for part in self._row_parts.get(matrix, ()):
            if 0 <= row < self.size(part):
                name = f"{matrix}.{part}"
            row -= self.size(part)
        pair = self._factors.get(name) or self._factors.get(matrix.removeprefix(SECOND), (1.0, 1.0))
        return pair[matrix != kind]

    def size(self, part: str) -> int:
        """Return the number of rows of a part in the shard."""
        first, last = self.local[part]
        return last - first

    def of_rows(self, kind: str) -> tuple[str, ...] | None:
        """Return the parts that form the rows of a `kind` weight; None if rows are not sharded."""
        matrix = kind.removesuffix("_bias")
        if self._by_output and matrix in _COLUMN_PART and not self._is_whole(kind):
            return ("hidden",)
        return self._row_parts.get(matrix)

    def has(self, kind: str, part: str) -> bool:
        """Tell whether a `kind` weight of this layer has a tensor for `part`."""
        fused = self._row_parts.get(kind.removesuffix("_bias"))
        return not part or fused is None or set(_parts_in(part)) <= set(fused)

    def rows(self, kind: str, whole: int = 0) -> int:
        """Return the row count of the shard's weight, or `whole` if rows are not sharded.

        For expert weights, the count is per expert.
        """
        parts = self.of_rows(kind)
        return whole if parts is None else sum(map(self.size, parts))

    def second_shape(self, kind: str, n: int) -> tuple[int, int]:
        """Return the shape of a pair's second matrix, with `n` output features."""
        part = _COLUMN_PART[kind]
        return self.rows(kind, n), self.whole[part] if self._by_output else self.size(part)

    def _is_whole(self, kind: str) -> bool:
        """Tell whether matrices of this kind stay unsharded (experts under expert parallelism)."""
        return self._expert_parallel and kind.startswith(_EXPERTS)

    def pieces(self, kind: str, part: str, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, start): copy tensor rows [first, last) to weight rows from `start`.

        The tensor holds `part` of the rows of a `kind` weight, or all `num_rows` rows (""). Parts
        that follow one another are named together, "q+k", as are parts that alternate head by head
        (or key head by key head): "q|k".
        """
        fused = self.of_rows(kind)
        if fused is None:
            yield 0, num_rows, 0
            return
        if "|" in part:
            yield from self._pieces_by_head(fused, part.split("|"))
            return
        if part == "v":
            yield from self._pieces_of_values(fused)
            return
        there = part.split("+") if part else fused
        before = 0
        start = self._start(fused, there[0])
        for one in there:
            first, last = self.local[one]
            if first < last:
                yield before + first, before + last, start
            before = before + self.whole[one]
            start = start + last - first

    def _pieces_by_head(
        self, fused: tuple[str, ...], parts: list[str]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a tensor that holds, for each head, its rows of each of `parts`."""
        count = self._heads[parts[-1]]
        before = 0
        for head in range(count):
            for part in parts:
                size = self.whole[part] // count
                first, last = self.local[part]
                low = max(first - head * size, 0)
                high = min(last - head * size, size)
                if low < high:  # several shards may hold the queries of one key
                    start = self._start(fused, part) + head * size + low - first
                    yield before + low, before + high, start
                before += size

    def _pieces_of_values(self, fused: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a tensor of values, whose heads may be narrower than those of k."""
        v = self._v_head_dim
        first, last = self._kv_heads
        d = self.size("k") // (last - first)
        start = self._start(fused, "v")
        if v == d:
            yield first * d, last * d, start
            return
        for head in range(first, last):
            yield head * v, (head + 1) * v, start + (head - first) * d

    def _start(self, fused: tuple[str, ...], part: str) -> int:
        """Return the first row of `part` in the shard's weight."""
        return sum(map(self.size, fused[: fused.index(part)]))

    def whole_rows(self, part: str, all_rows: int) -> int:
        """Return the number of rows of a tensor that holds `part` of a weight of `all_rows`."""
        if part == "v":
            return self._num_values
        return sum(self.whole[one] for one in _parts_in(part)) if part else all_rows

    def columns(self, kind: str, shard: Shard) -> tuple[int, int] | None:
        """Return the shard's column range of a `kind` weight; None for all columns."""
        is_divided = kind in _COLUMN_PART and not (shard.is_whole or shard.by_output)
        is_divided = is_divided and not self._is_whole(kind)
        return self.local[_COLUMN_PART[kind]] if is_divided else None


def weight_shapes(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every (fused) weight of a shard, (out, in) for a matrix.

    A tied model has "lm_head" too, the same weight as "embed". In a pipeline stage's shard, layers
    keep their global numbers.

    Raises
    ------
    ConfigError
        If the model cannot be divided into this many shards.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> weight_shapes(config)["layers.0.qkv"], weight_shapes(config, Shard(1, 4))["layers.0.qkv"]
    ((64, 32), (24, 32))
    """
    n = config.hidden_size
    table = (shard.cut_padded(config.vocab_size)[2], n)
    shapes: dict[str, tuple[int, ...]] = {"embed": table}
    for layer in range(config.num_layers):
        for kind, shape in _layer_shapes(config.at(layer), shard, layer).items():
            shapes[str(WeightName(kind, layer))] = shape
    shapes |= _entry_shapes(config)
    if config.embed_norm:
        shapes["embed_norm"] = (n,)
    shapes["final_norm"] = (n,)
    if config.norm_bias:
        shapes["final_norm_bias"] = (n,)
    if config.lm_head_bias:
        shapes["lm_head_bias"] = table[:1]
    shapes["lm_head"] = table
    stage = shard.stage
    is_tied = config.tie_word_embeddings
    return {name: shape for name, shape in shapes.items() if stage.has(name, is_tied=is_tied)}


def _entry_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights between the embedding, the layers and the final norm."""
    n = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.learned_positions:
        shapes["embed_positions"] = (config.max_position_embeddings, n)
    if (inputs := config.per_layer_input) is not None:
        width = config.num_layers * inputs.size
        shapes["embed_per_layer"] = (inputs.vocab_size, width)
        shapes |= {"per_layer_projection": (width, n), "per_layer_norm": (inputs.size,)}
    if (altup := config.altup) is not None:
        for stream in range(1, altup.num_streams):
            shapes |= {f"altup_entry_{stream}": (n, n), f"altup_exit_{stream}": (n, n)}
    return shapes


def _layer_shapes(config: ModelConfig, shard: Shard, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of one layer's weights."""
    parts = _Parts(config, shard, layer)
    n = config.hidden_size
    moe = config.moe_of(layer)
    has_pre_norms = config.has_pre_norms(layer)
    has_post_norms = config.has_post_norms(layer)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (n,)} if has_pre_norms else {}
    kind = config.kind(layer)
    if kind.startswith("attention"):
        shapes |= _attention_shapes(config, parts, has_keys=config.kv_source(layer) == layer)
    if kind != "attention":
        shapes |= _MIXER_SHAPES[kind.removeprefix("attention_")](config, parts)
    if config.single_branch:
        return shapes
    if has_post_norms:
        shapes["post_attn_norm"] = (n,)
    if has_pre_norms and config.has_mlp_norms:
        shapes["mlp_norm"] = (n,)
    if moe is None or moe.beside_mlp or kind == "shortcut":
        shapes |= _mlp_shapes(config, parts)
    if moe is not None:
        shapes |= _moe_shapes(moe, n, parts)
    if has_post_norms:
        shapes["post_mlp_norm"] = (n,)
    if config.norm_bias:
        norms = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")
        shapes |= {f"{name}_bias": (n,) for name in norms if name in shapes}
    return shapes | _stream_shapes(config)


def _attention_shapes(
    config: ModelConfig, parts: _Parts, *, has_keys: bool
) -> dict[str, tuple[int, ...]]:
    n = config.hidden_size
    d = config.head_dim
    qkv = parts.rows("qkv")
    shapes: dict[str, tuple[int, ...]] = {"qkv": (qkv, n)}
    if config.qkv_bias:
        shapes["qkv_bias"] = (qkv,)
    if config.whole_qk_norm:
        shapes |= {"q_norm": (parts.whole["q"],), "k_norm": (parts.whole["k"],)}
    elif config.qk_norm and config.own_qk_norms:
        shapes |= {f"{part}_head_norm": (parts.size(f"{part}_head"), d) for part in "qk"}
    elif config.qk_norm and not config.bare_qk_norm:
        shapes["q_norm"] = (d,)
        if has_keys:
            shapes["k_norm"] = (d,)
        if config.norm_bias:
            shapes |= {f"{name}_bias": (d,) for name in ("q_norm", "k_norm") if name in shapes}
    if config.sinks:
        shapes["sinks"] = (parts.size("q_head"),)
    if config.inner_norms:
        shapes["o_norm"] = (parts.whole["heads"],)
    shapes["o"] = parts.second_shape("o", n)
    if config.o_bias:
        shapes["o_bias"] = shapes["o"][:1]
    return shapes


def _stream_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights that change its residual stream at the end."""
    n = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if (inputs := config.per_layer_input) is not None:
        shapes |= {"per_layer_gate": (inputs.size, n), "per_layer_output": (n, inputs.size)}
        shapes["per_layer_output_norm"] = (n,)
    if config.layer_scale:
        shapes["layer_scale"] = (1,)
    if (altup := config.altup) is not None:
        s = altup.num_streams
        shapes |= {"altup_router": (s, n), "altup_router_norm": (n,)}
        shapes |= {"altup_prediction": (s * s, s), "altup_correction": (s, s)}
        shapes |= {"laurel_left": (altup.laurel_rank, n), "laurel_right": (n, altup.laurel_rank)}
        shapes |= {"laurel_norm": (n,), "altup_scale": (n,)}
    return shapes


def _gated_delta_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    delta = config.gated_delta
    assert delta is not None
    n = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"delta_in": (parts.rows("delta_in"), n)}
    if delta.gate_rank:
        shapes |= {up: (parts.rows(up), delta.gate_rank) for up in ("delta_z_up", "delta_a_up")}
    shapes["delta_conv"] = parts.rows("delta_conv"), 1, delta.conv_size  # as a Conv1d stores it
    shapes |= {"delta_decay": (parts.size("delta_b"),), "delta_dt": (parts.size("delta_dt"),)}
    shapes["delta_norm"] = (delta.value_head_dim,)
    shapes["delta_out"] = parts.second_shape("delta_out", n)
    return shapes


def _lightning_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    lightning = config.lightning
    assert lightning is not None
    n = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"lightning_in": (parts.rows("lightning_in"), n)}
    if lightning.qk_norm:
        norms = ("lightning_q_norm", "lightning_k_norm")
        shapes |= dict.fromkeys(norms, (lightning.head_dim,))
    shapes["lightning_norm"] = (parts.rows("lightning_norm"),)
    shapes["lightning_out"] = parts.second_shape("lightning_out", n)
    return shapes


def _short_conv_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    conv = config.short_conv
    assert conv is not None
    n = config.hidden_size
    rows = parts.rows("conv_in")
    channels = parts.rows("conv_taps")
    out = parts.second_shape("conv_out", n)
    shapes: dict[str, tuple[int, ...]] = {"conv_in": (rows, n)}
    shapes["conv_taps"] = channels, 1, conv.conv_size  # as a Conv1d stores them
    shapes["conv_out"] = out
    if conv.bias:
        shapes |= {"conv_in_bias": (rows,), "conv_taps_bias": (channels,)}
        shapes["conv_out_bias"] = out[:1]
    return shapes


def _mamba2_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    mamba = config.mamba2
    assert mamba is not None
    n = config.hidden_size
    rows = parts.rows("mamba_in")
    channels = parts.rows("mamba_conv")
    heads = parts.size("mamba_dt")
    out = parts.second_shape("mamba_out", n)
    shapes: dict[str, tuple[int, ...]] = {"mamba_in": (rows, n)}
    shapes["mamba_conv"] = channels, 1, mamba.conv_size  # as a Conv1d stores them
    shapes |= dict.fromkeys(("mamba_decay", "mamba_skip", "mamba_step"), (heads,))
    shapes["mamba_out"] = out
    if mamba.norm != "none":
        shapes["mamba_norm"] = (parts.size("mamba_x"),)
    if mamba.conv_bias:
        shapes["mamba_conv_bias"] = (channels,)
    if mamba.proj_bias:
        shapes["mamba_in_bias"] = (rows,)
    if mamba.out_bias:
        shapes["mamba_out_bias"] = out[:1]
    return shapes


def _mla_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    mla = config.mla
    assert mla is not None
    n = config.hidden_size
    rows = parts.rows("mla_in")
    out = parts.second_shape("mla_out", n)
    shapes: dict[str, tuple[int, ...]] = {"mla_in": (rows, n)}
    if mla.q_rank:
        shapes["mla_q_norm"] = (mla.q_rank,)
        shapes["mla_q_up"] = parts.rows("mla_q_up"), mla.q_rank
    shapes["mla_kv_norm"] = (mla.kv_rank,)
    shapes["mla_kv_up"] = parts.rows("mla_kv_up"), mla.kv_rank
    shapes["mla_out"] = out
    if config.qkv_bias:
        shapes["mla_in_bias"] = (rows,)
    if config.o_bias:
        shapes["mla_out_bias"] = out[:1]
    return shapes


def _shortcut_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    """Return the shapes of both attentions, and of what comes with the second."""
    n = config.hidden_size
    attention = _mla_shapes(config, parts)
    second = {"attn_norm": (n,), "mlp_norm": (n,), **attention, **_mlp_shapes(config, parts)}
    return attention | {SECOND + kind: shape for kind, shape in second.items()}


def _mlp_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    n = config.hidden_size
    first = "gate_up" if config.gated_mlp else "up"
    rows = parts.rows(first)
    down = parts.second_shape("down", n)
    shapes: dict[str, tuple[int, ...]] = {first: (rows, n), "down": down}
    if config.inner_norms:
        shapes["down_norm"] = (parts.whole["gate"],)
    if config.activation == "xielu":
        shapes |= dict.fromkeys(XIELU_KINDS, (1,))
    if config.mlp_bias:
        shapes |= {f"{first}_bias": (rows,), "down_bias": down[:1]}
    return shapes


def _experts_shapes(config: ModelConfig, parts: _Parts) -> dict[str, tuple[int, ...]]:
    assert config.moe is not None
    return _moe_shapes(config.moe, config.hidden_size, parts)


_MIXER_SHAPES: dict[str, Callable[[ModelConfig, _Parts], dict[str, tuple[int, ...]]]] = {
    "gated_delta": _gated_delta_shapes,
    "lightning": _lightning_shapes,
    "short_conv": _short_conv_shapes,
    "mamba2": _mamba2_shapes,
    "mla": _mla_shapes,
    "shortcut": _shortcut_shapes,
    "moe": _experts_shapes,
    "mlp": _mlp_shapes,
}


def _moe_shapes(moe: MoeConfig, n: int, parts: _Parts) -> dict[str, tuple[int, ...]]:
    e = moe.num_choices
    gate_up = parts.rows("experts_gate_up")
    shapes: dict[str, tuple[int, ...]] = {"router": (e, n)}
    if moe.router_bias:
        shapes["router_bias"] = (e,)
    if moe.correction:
        shapes["router_correction"] = (e,)
    width = moe.latent_size or n
    down = parts.second_shape("experts_down", width)
    e = parts.experts[1] - parts.experts[0]
    shapes |= {"experts_gate_up": (e, gate_up, width), "experts_down": (e, *down)}
    if moe.latent_size:
        shapes |= {"moe_latent_in": (width, n), "moe_latent_out": (n, width)}
    if moe.latent_bias and moe.latent_size:
        shapes |= {"moe_latent_in_bias": (width,), "moe_latent_out_bias": (n,)}
    if moe.expert_bias:
        shapes |= {"experts_gate_up_bias": (e, gate_up), "experts_down_bias": (e, down[0])}
    if moe.shared_size:
        shapes["shared_gate_up"] = parts.rows("shared_gate_up"), n
        shapes["shared_down"] = parts.second_shape("shared_down", n)
    if moe.shared_size and moe.shared_bias:
        shapes |= {f"{kind}_bias": shapes[kind][:1] for kind in ("shared_gate_up", "shared_down")}
    if moe.shared_gate:
        shapes["shared_gate"] = (1, n)
    if moe.beside_mlp:
        norms = ("router_norm", "moe_norm", "post_moe_norm", "post_dense_norm")
        shapes |= {**dict.fromkeys(norms, (n,)), "router_scale": (moe.num_experts,)}
    return shapes


@dataclass(frozen=True)
class RotatedRows:
    """Rows of q and k that rope rotates: of every `period` rows, `count` from `first` on.

    `in_columns`: these are columns of a matrix with a row per head.
    """

    period: int
    first: int
    count: int
    in_columns: bool = False


@dataclass(frozen=True)
class Placement:
    """A copy of rows [first, last) of tensor `name` to the rows of `target` from `start`.

    Rows of an array with more than two dimensions are numbered across all its matrices.

    Attributes
    ----------
    name, target : str, WeightName
    shape : tuple of int
        Shape of the whole tensor.
    first, last, start : int
    columns : (int, int) or None
        Range of columns to copy; None for all.
    rotated : RotatedRows or None
        Which of the rows rope rotates; None for a tensor without such rows.
    layout : Layout
        Storage layout of expert matrices. `first`, `last` and `columns` are logical rows and
        columns, whatever the layout; rows are numbered across all experts.
    factor : float
        Factor on the values.
    """

    name: str
    target: WeightName
    shape: tuple[int, ...]
    first: int
    last: int
    start: int = 0
    columns: tuple[int, int] | None = None
    rotated: RotatedRows | None = None
    layout: Layout = ROWS
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Columns read per row."""
        if self.columns is not None:
            return self.columns[1] - self.columns[0]
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def num_rows(self) -> int:
        """Number of rows read."""
        return self.last - self.first

    @property
    def size(self) -> int:
        """Number of weights read."""
        return self.num_rows * self.width


def place_tensors(
    where: str,
    config: ModelConfig,
    table: Iterable[TensorName],
    found: Mapping[str, tuple[int, ...]],
    shard: Shard = WHOLE,
    *,
    is_spare: Callable[[str], bool] = lambda name: False,
    is_partial: bool = False,
    undivided: Container[str] = (),
) -> list[Placement]:
    """Return the placements of a checkpoint's tensors, in checkpoint order.

    Parameters
    ----------
    where : str
        The checkpoint's name, for messages.
    table : iterable of TensorName
        The family's tensor names.
    found : mapping
        Names and shapes of the checkpoint's tensors.
    shard : Shard
        The shard to load.
    is_spare : callable
        Predicate on tensor names: may this tensor be present, and ignored, if the model lacks it?
    is_partial : bool
        Whether tensors may be missing.
    undivided : container of str
        Quantized weights: of each, all tensors may be missing, but not some.

    Raises
    ------
    WeightsError
        If a tensor is missing or unexpected, or its shape does not match the config.
    """
    wanted = _wanted(config, table, found, shard)
    ignored = set(OUTPUT_NAMES) if config.tie_word_embeddings else set()
    unexpected = [
        name
        for name in found
        if name not in wanted
        and name not in ignored
        and not _IGNORED.fullmatch(name)
        and not _is_extra(config, name)
        and not _is_shared(config, name)
        and not _is_identity(config, name)
        and not is_spare(name)
        and not is_kv_scale(name)
    ]
    if not is_partial:
        _refuse(where, "missing", [name for name in wanted if name not in found])
    _refuse(where, f"not part of a {config.model_type} model with this config", unexpected)
    for name, (shape, _) in wanted.items():
        if name in found and found[name] not in _stored_shapes(shape):
            raise WeightsError(
                f"{where}: tensor {name!r} must have shape {shape}, as the config says; "
                f"got {found[name]}"
            )
    if is_partial:
        _refuse_parts(where, wanted, found, undivided)
    return [place for name in found if name in wanted for place in wanted[name][1]()]


def expected_tensors(
    config: ModelConfig, table: Iterable[TensorName]
) -> dict[str, tuple[tuple[int, ...], list[Placement]]]:
    """Return the shape and placements of each tensor of a checkpoint that does not exist yet.

    If the family stores a weight in several forms, it is the table's first one.
    """
    wanted = _wanted(config, table, {}, WHOLE)
    return {name: (shape, list(places())) for name, (shape, places) in wanted.items()}


def _stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes in which checkpoints store an array of `shape`.

    A vector may be stored as Kimi Linear's decay rates are, and a number without axes.
    """
    if len(shape) != 1:
        return (shape,)
    return shape, (1, 1, *shape, 1), *(((),) if shape == (1,) else ())


def _is_extra(config: ModelConfig, name: str) -> bool:
    """Tell whether a tensor belongs to multi-token prediction.

    Layers that are numbered after the model's own must be declared in the config.
    """
    if _MTP.match(name):
        return True
    if (layer := _MTP_LAYER.match(name)) is not None:  # numbered from 0
        return int(layer[1]) < config.num_extra_layers
    layer = _LAYER.match(name)
    index = int(layer[1]) - config.num_layers if layer else -1
    return 0 <= index < config.num_extra_layers


def _is_shared(config: ModelConfig, name: str) -> bool:
    """Tell whether a tensor makes keys or values in a layer that reads another layer's."""
    layer = _KEY_VALUE.match(name)
    index = int(layer[1]) if layer else config.num_layers
    return index < config.num_layers and config.kv_source(index) != index


def _is_identity(config: ModelConfig, name: str) -> bool:
    """Tell whether a tensor belongs to a zero-compute expert: transformers stores unused ones."""
    expert = _EXPERT.match(name)
    moe = config.moe
    if moe is None or expert is None:
        return False
    return moe.num_experts <= int(expert[1]) < moe.num_choices


def _refuse(where: str, fault: str, names: list[str]) -> None:
    if names:
        count = f"{len(names)} tensors are" if len(names) > 1 else "a tensor is"
        raise WeightsError(f"{where}: {count} {fault}: {_listed(names)}")


def _refuse_parts(
    where: str, wanted: _Wanted, found: Mapping[str, Any], undivided: Container[str]
) -> None:
    """Refuse codes without their scales, or scales alone, and a part of an `undivided` weight."""
    missing: dict[str, list[str]] = {}
    begun = set()
    for name, (_, places) in wanted.items():
        for place in islice(places(), 1):
            if place.layout.mxfp4:
                absent = {name, scales_name(name)} - found.keys()
                _refuse(where, "missing", [*absent] if len(absent) == 1 else [])
            target = str(place.target)
            if name in found:
                begun.add(target)
            else:
                missing.setdefault(target, []).append(name)
    for target, names in missing.items():
        if target in begun and target in undivided:
            raise WeightsError(
                f"{where}: weight {target!r}, which is quantized, must be updated whole: its "
                f"tensors must include {_listed(names)}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


# Tensor -> its shape, and a function that returns its placements. Placements are lazy because a
# damaged config.json can ask for far more tensors than the file holds.
_Wanted = dict[str, tuple[tuple[int, ...], Callable[[], Iterable[Placement]]]]


def _wanted(
    config: ModelConfig,
    table: Iterable[TensorName],
    found: Mapping[str, tuple[int, ...]],
    shard: Shard,
) -> _Wanted:
    """Return the shape and placements of every tensor that the checkpoint must have."""
    forms: dict[str, dict[str, _Wanted]] = {}  # weight -> form -> its tensors
    for form, target, tensors in _all_tensors(config, table, shard):
        forms.setdefault(str(target), {}).setdefault(form, {}).update(tensors)
    misfits = {
        form
        for alternatives in forms.values()
        for form, tensors in alternatives.items()
        if any(found.get(name, shape) != shape for name, (shape, _) in tensors.items())
    }
    wanted: _Wanted = {}
    for alternatives in forms.values():
        present = [form for form, names in alternatives.items() if names.keys() & found.keys()]
        first = alternatives[next(iter(present or alternatives))]
        # Forms may share names: another one with all of these in the checkpoint may be complete.
        stored = first.keys() & found.keys()
        others = (names for names in alternatives.values() if stored <= names.keys())
        first = next((names for names in others if names.keys() <= found.keys()), first)
        # Forms with the same names differ in shapes. A form fits if all of its tensors do, since a
        # single matrix may be square.
        alike = [form for form, names in alternatives.items() if names.keys() == first.keys()]
        wanted |= alternatives[min(alike, key=misfits.__contains__)]
    return wanted


def _all_tensors(
    config: ModelConfig, table: Iterable[TensorName], shard: Shard
) -> Iterator[tuple[str, WeightName, _Wanted]]:
    """Yield the form, target and tensors of each applicable name in the table."""
    shapes = weight_shapes(config)
    parts_of = cache(partial(_Parts, config, shard))
    num_experts = config.moe.num_experts if config.moe is not None else 0
    num_rows = {"q_head": config.num_heads, "k_head": config.num_kv_heads}
    if config.tie_word_embeddings:
        del shapes["lm_head"]
    for template in table:
        count = num_rows.get(template.part, num_experts)
        for name, target, expert in template.expand(config.num_layers, count):
            part = template.part
            layout = template.layout
            parts = parts_of(target.layer)
            if str(target) not in shapes or not parts.has(target.kind, part):
                continue
            whole = shapes[str(target)]
            if not parts.whole_rows(part, whole[0]):
                continue  # the config leaves this part out
            if target.kind.startswith(_EXPERTS):
                matrix = (parts.whole.get(part, whole[1]), *whole[2:])
                shape = layout.shape((whole[0], *matrix)) if expert is None else matrix
                tensor = Placement(name, target, shape, 0, 0, layout=layout)
                places = partial(_expert_places, tensor, part, expert, whole, parts, shard)
                extra = layout.companions(name, whole)
            else:
                shape = (parts.whole_rows(part, whole[0]), *whole[1:])
                extra = {}
                places = partial(_places, name, target, part, shape, parts, shard)
                if template.third >= 0:
                    first, last = _third(shape[0], template.third)
                    shape = (last - first, *shape[1:])
                    places = partial(_in_range, places, first, last, shape)
                if expert is not None:
                    shape = shape[1:]
                    places = partial(_as_row, places, expert, shape)
                if template.num_unread:
                    shape = (template.num_unread + shape[0], *shape[1:])
                    places = partial(_after, places, template.num_unread, shape)
                if layout.transposed and len(shape) > 1:
                    shape = shape[::-1]
                    places = partial(_transposed, places, shape, layout)
                elif layout.transposed:
                    shape = (1, *shape)
                    places = partial(_row_place, name, target, shape, layout)
            others: _Wanted = {other: (size, tuple) for other, size in extra.items()}
            yield template.form, target, {name: (shape, places), **others}


def _expert_places(
    tensor: Placement,
    part: str,
    expert: int | None,
    whole: tuple[int, ...],
    parts: _Parts,
    shard: Shard,
) -> Iterator[Placement]:
    """Yield the placements of a tensor that holds one expert, or all experts (None).

    Experts outside the shard are skipped.
    """
    kind = tensor.target.kind
    columns = parts.columns(kind, shard)
    if columns is None and tensor.layout != ROWS:  # the width cannot be read off the tensor's shape
        columns = 0, whole[2] if len(whole) > 2 else 1
    pieces = list(parts.pieces(kind, part, whole[1]))
    rows_in_tensor = parts.whole.get(part, whole[1])
    rows_in_weight = parts.rows(kind, whole[1])
    own = range(*parts.experts)
    for index in own if expert is None else (expert,) if expert in own else ():
        skipped = index * rows_in_tensor if expert is None else 0
        for first, last, start in pieces:
            yield replace(
                tensor,
                first=skipped + first,
                last=skipped + last,
                start=(index - own.start) * rows_in_weight + start,
                columns=columns,
            )


def _places(
    name: str,
    target: WeightName,
    part: str,
    shape: tuple[int, ...],
    parts: _Parts,
    shard: Shard,
) -> Iterator[Placement]:
    """Yield the placements of a tensor's rows in the shard."""
    if target.kind in _VOCABULARY:
        first, last, _ = shard.cut_padded(shape[0])
        yield Placement(name, target, shape, first, last)
        return
    columns = parts.columns(target.kind, shard)
    is_qkv = target.kind in ("qkv", "qkv_bias")
    num_rotated = parts.size("q") + parts.size("k") if is_qkv else 0
    for first, last, start in parts.pieces(target.kind, part, shape[0]):
        rotated = parts.rotated_heads if start < num_rotated else parts.rotated.get(part)
        factor = parts.factor(target.kind, start)
        yield Placement(name, target, shape, first, last, start, columns, rotated, factor=factor)


def _third(num_rows: int, index: int) -> tuple[int, int]:
    """Return the range of rows in a third; the last one has fewer if 3 does not divide them."""
    size = -(-num_rows // 3)
    return min(index * size, num_rows), min((index + 1) * size, num_rows)


def _in_range(
    places: Callable[[], Iterator[Placement]], first: int, last: int, shape: tuple[int, ...]
) -> Iterator[Placement]:
    """Yield the placements of a tensor that holds rows [first, last) of what `places` reads."""
    for place in places():
        begin = max(place.first, first)
        end = min(place.last, last)
        if begin < end:
            yield replace(
                place,
                shape=shape,
                first=begin - first,
                last=end - first,
                start=place.start + begin - place.first,
            )


def _after(
    places: Callable[[], Iterator[Placement]], num_unread: int, shape: tuple[int, ...]
) -> Iterator[Placement]:
    """Yield the placements of a tensor with `num_unread` rows in front of what `places` reads."""
    for place in places():
        first = place.first + num_unread
        yield replace(place, shape=shape, first=first, last=place.last + num_unread)


def _transposed(
    places: Callable[[], Iterator[Placement]], shape: tuple[int, ...], layout: Layout
) -> Iterator[Placement]:
    """Yield the placements of a matrix stored as (columns, rows), `shape`."""
    for place in places():
        columns = place.columns or (0, shape[0])
        yield replace(place, shape=shape, columns=columns, layout=layout)


def _as_row(
    places: Callable[[], Iterator[Placement]], row: int, shape: tuple[int, ...]
) -> Iterator[Placement]:
    """Yield the placement of a vector that holds row `row` of a matrix that `places` reads.

    A placement counts rows of 1 element, as in all vectors, so `start` is an element.
    """
    for place in places():
        if place.first <= row < place.last:
            start = (place.start + row - place.first) * shape[0]
            yield replace(place, shape=shape, first=0, last=shape[0], start=start)


def _row_place(
    name: str, target: WeightName, shape: tuple[int, ...], layout: Layout
) -> Iterator[Placement]:
    """Yield the placement of a vector that is stored as one row (1, n); it is never sharded."""
    yield Placement(name, target, shape, 0, shape[1], columns=(0, 1), layout=layout)


def part_bounds(
    kind: str, config: ModelConfig, num_rows: int, shard: Shard = WHOLE, layer: int | None = None
) -> tuple[int, ...]:
    """Return the end of each part in the `num_rows` rows of a shard's weight.

    An MLP's features may be padded: gate and up are the halves of the rows.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> part_bounds("qkv", config, 64), part_bounds("gate_up", config, 128)
    ((32, 48, 64), (64, 128))
    >>> part_bounds("o", config, 32)
    (32,)
    """
    if kind == "gate_up":
        return num_rows // 2, num_rows
    parts = _Parts(config, shard, layer)
    sizes = [parts.size(part) for part in parts.of_rows(kind) or ()]
    ends = tuple(np.cumsum([size for size in sizes if size]).tolist())
    return ends if ends and ends[-1] == num_rows else (num_rows,)


def matrix_placements(
    config: ModelConfig, table: Iterable[TensorName], shard: Shard = WHOLE
) -> dict[str, list[tuple[tuple[int, ...], Callable[[], Iterable[Placement]]]]]:
    """Return the shape and the placements of every matrix that a checkpoint may hold, by name.

    Shapes are (out, in), even of matrices that checkpoints store transposed. Forms of a checkpoint
    may share a name, with matrices of different shapes.
    """
    table = [name for name in table if not name.layout.transposed]
    found: dict[str, list[tuple[tuple[int, ...], Callable[[], Iterable[Placement]]]]] = {}
    for _, _, tensors in _all_tensors(config, table, shard):
        for name, (shape, places) in tensors.items():
            if len(shape) == 2:
                found.setdefault(name, []).append((shape, places))
    return found


def shard_pieces(
    kind: str,
    config: ModelConfig,
    shape: tuple[int, ...],
    shard: Shard,
    layer: int | None = None,
) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """Return a shard's row ranges and column range of a whole fused weight.

    Parameters
    ----------
    kind : str
        "qkv", ...
    config : ModelConfig
    shape : tuple of int
        Shape of the whole weight, or of one expert's matrix.
    shard : Shard
    layer : int, optional
        Index of the layer, if layers differ in their sizes.

    Returns
    -------
    (rows, columns)
        Row ranges [first, last), in order, and one column range; None for all columns. The last
        shard of a vocabulary may have fewer rows than the others.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> shard_pieces("qkv", config, (64, 32), Shard(1, 2))
    ([(16, 32), (40, 48), (56, 64)], None)
    """
    if kind in _VOCABULARY:
        first, last, _ = shard.cut_padded(shape[0])
        return [(first, last)], None
    parts = _Parts(config, shard, layer)
    rows = [(first, last) for first, last, _ in parts.pieces(kind, "", shape[0])]
    return rows, parts.columns(kind, shard)
