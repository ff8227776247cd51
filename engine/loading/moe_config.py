"""Convert the mixture-of-experts keys of a config.json to a `MoeConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.config import MoeConfig
from engine.kernels.moe_route import MAX_CHOICES, MAX_EXPERTS, MAX_MIXED, MAX_TOP_K
from engine.loading._fields import MAX_WIDTH, Fields
from engine.models.moe_family import MoeFamily

__all__ = ["is_dense", "moe_config"]

_MAX_TENSORS = 1 << 16  # maximum number of experts, summed over layers
_MAX_SHARED = 64
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROUTING_KEYS = ("n_group", "topk_group", "scoring_func", "topk_method")
_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_ACTIVATIONS = {"swiglu": _SILU, "geglu": _GELU, "relu2": ("relu2",)}


def moe_config(fields: Fields, kind: MoeFamily | None, num_layers: int) -> MoeConfig | None:
    """Return the experts' config for a family that declares `kind`; None for a dense model.

    Raises
    ------
    ConfigError
        If a key is missing or a number is out of range.
    """
    is_off = kind is not None and kind.enabled and not fields.flag(kind.enabled, False)
    if kind is None or is_off or is_dense(fields, kind):
        return None
    num_experts = _num_experts(fields, kind.num_experts, num_layers)
    sparse = _sparse_layers(fields, kind, num_layers)
    if not any(sparse):
        for key in (*_ROUTING_KEYS, kind.scale, kind.shared_width):
            fields.raw(key)  # without experts it does not matter
        return None

    def declared(value: bool | str) -> bool:
        return fields.flag(value, False) if isinstance(value, str) else value

    score, renormalize = _score(fields, kind, declared(kind.renormalize))
    width = fields.integer(kind.width, 1, MAX_WIDTH)
    shared_size = _shared_size(fields, kind, width)
    scale, shared_scale = _scales(fields, kind, shared_size)
    num_groups, top_groups = _groups(fields, kind, num_experts)
    num_identity = _num_identity(fields, kind, num_experts)
    most = 1 if kind.scales_input else min(num_experts + num_identity, MAX_TOP_K)
    top_ks = fields.per_layer("num_experts_per_tok", num_layers, 1, most)
    config = MoeConfig(
        num_experts=num_experts,
        top_k=max(top_ks),
        layer_top_k=top_ks if len(set(top_ks)) > 1 else (),
        intermediate_size=width,
        sparse_layers=sparse,
        score=score,
        jitter=_jitter(fields, score, num_experts, top_ks),
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
        sums_groups=kind.sums_groups,
        correction=declared(kind.correction),
        scales_input=kind.scales_input,
        shared_size=shared_size,
        shared_scale=shared_scale,
        shared_gate=kind.shared_gate,
        router_bias=kind.router_bias,
        expert_bias=kind.expert_bias,
        shared_bias=declared(kind.shared_bias),
        activation=kind.activation,
        beside_mlp=kind.beside_mlp,
        latent_size=_latent_size(fields, kind),
        latent_bias=bool(kind.latent_bias) and fields.flag(kind.latent_bias, False),
        num_identity=num_identity,
    )
    per_group = config.num_choices // num_groups
    if top_groups * per_group < config.top_k:
        raise fields.error("topk_group", f"groups of {per_group} with {config.top_k} experts")
    if kind.activation == "swiglu_clamped":
        alpha = fields.real("swiglu_alpha", 1e-3, 1e3, config.alpha)
        return replace(
            config, alpha=alpha, limit=fields.real("swiglu_limit", 1e-3, 1e6, config.limit)
        )
    known = _ACTIVATIONS[kind.activation]
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if fields.text(key, known[0]) not in known:
        raise fields.error(key, f"one of {', '.join(known)}, as the experts need")
    return config


def is_dense(fields: Fields, kind: MoeFamily) -> bool:
    """Tell whether a model of a family with experts has none."""
    return bool(kind.dense_width) and any(
        fields.has(key) and fields.raw(key) == 0 for key in _COUNT_KEYS
    )


def _num_experts(fields: Fields, default: int, num_layers: int) -> int:
    """Return the number of experts per layer; its key varies between families."""
    counts: dict[str, int] = {}
    for key in filter(fields.has, _COUNT_KEYS):
        first, *rest = set(fields.per_layer(key, num_layers, 1, MAX_EXPERTS))
        if rest:
            raise fields.error(key, "the same in all layers")
        counts[key] = first
    key, *others = counts or _COUNT_KEYS[:1]
    for other in others:
        if counts[key] != counts[other]:
            raise fields.error(key, f"{counts[other]}, as {other} says")
    count = counts.get(key, default)
    if count * num_layers > _MAX_TENSORS:
        raise fields.error(key, f"at most {_MAX_TENSORS // num_layers} (of {num_layers} layers)")
    return count


def _jitter(fields: Fields, score: str, num_experts: int, top_ks: Sequence[int]) -> float:
    """Return `MoeConfig.jitter`; check that the sparsemixer supports the experts."""
    if score != "sparsemixer":
        return 0.0
    if num_experts > MAX_MIXED:
        raise fields.error("num_local_experts", f"at most {MAX_MIXED} with a sparsemixer")
    if set(top_ks) != {2}:
        raise fields.error("num_experts_per_tok", "2 with a sparsemixer")
    jitter: float = fields.real("router_jitter_noise", 0.0, 1.0)
    return jitter


def _latent_size(fields: Fields, kind: MoeFamily) -> int:
    """Return the features of the experts' input; 0 if they are the token's."""
    return fields.integer(kind.latent_width, 1, MAX_WIDTH, 0) if kind.latent_width else 0


def _num_identity(fields: Fields, kind: MoeFamily, num_experts: int) -> int:
    """Return the number of zero-compute experts."""
    if not kind.identity_count:
        return 0
    if fields.text("zero_expert_type", "identity") != "identity":
        raise fields.error("zero_expert_type", "identity")
    count: int = fields.integer(kind.identity_count, 0, MAX_CHOICES - num_experts, 0)
    return count


def _groups(fields: Fields, kind: MoeFamily, num_experts: int) -> tuple[int, int]:
    """Return the number of expert groups, and the maximum number of groups per token."""
    if not kind.has_groups:
        return 1, 1
    num_groups = fields.integer("n_group", 1, num_experts, 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise fields.error("n_group", f"such that {num_experts} experts are in groups of 2 or more")
    top_groups = fields.integer("topk_group", 1, num_groups, 1)
    if not kind.choice_key:
        return num_groups, top_groups
    choice = fields.text(kind.choice_key, "greedy")
    if choice not in ("greedy", "group_limited_greedy"):
        raise fields.error(kind.choice_key, "greedy or group_limited_greedy")
    return (1, 1) if choice == "greedy" else (num_groups, top_groups)


def _shared_size(fields: Fields, kind: MoeFamily, width: int) -> int:
    """Return the shared expert's feature count; 0 for none."""
    if kind.shared_count:
        return width * fields.integer(kind.shared_count, 0, _MAX_SHARED, 0)
    least = int(kind.shared_gate)  # a gate needs an expert
    return fields.integer(kind.shared_width, least, MAX_WIDTH) if kind.shared_width else 0


def _sparse_layers(fields: Fields, kind: MoeFamily, num_layers: int) -> tuple[bool, ...]:
    """Return one flag per layer: whether it has experts."""
    if kind.lists_layers and fields.has("mlp_layer_types"):
        fields.raw("first_k_dense_replace")  # the list takes precedence
        return _listed_layers(fields, num_layers)
    if kind.sparse_layers == "all":
        return (True,) * num_layers
    if kind.sparse_layers == "interval":
        return _layers_at_interval(fields, num_layers)
    if kind.sparse_layers == "after_first":
        first = fields.integer("first_k_dense_replace", 0, 1 << 31)
        return tuple(i >= first for i in range(num_layers))
    if kind.sparse_layers == "moe_layers":
        return _moe_layers(fields, num_layers)
    if kind.sparse_layers == "layer_types":
        types = fields.raw("layer_types")
        return tuple(one == "moe" for one in types) if isinstance(types, list) else ()
    step = fields.integer("decoder_sparse_step", 1, 1 << 31, 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(one) is not int or one < 0 for one in dense):
        raise fields.error("mlp_only_layers", "a list of layers")
    left_out = set(dense)
    return tuple(i not in left_out and (i + 1) % step == 0 for i in range(num_layers))


def _listed_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    kinds = fields.raw("mlp_layer_types")
    known = ("dense", "sparse")
    is_list = isinstance(kinds, list) and all(one in known for one in kinds)
    if not is_list or len(kinds) != num_layers:
        raise fields.error("mlp_layer_types", f"{num_layers} of {' or '.join(known)}")
    return tuple(one == "sparse" for one in kinds)


def _layers_at_interval(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return the flags for every n-th layer from a first to a last (-1: the model's last)."""
    step = fields.integer("moe_layer_interval", 1, 1 << 31, 1)
    first = fields.integer("moe_layer_start_index", 0, 1 << 31, 0)
    last = fields.integer("moe_layer_end_index", -1, 1 << 31, -1)
    end = num_layers if last == -1 else last + 1
    return tuple(first <= i < end and (i + 1) % step == 0 for i in range(num_layers))


def _moe_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return the flags for `moe_layers` or, without it, `interleave_moe_layer_step`."""
    step = fields.integer("interleave_moe_layer_step", 1, 1 << 31, 1)
    listed = fields.raw("moe_layers")
    if listed is None:
        return tuple((i + 1) % step == 0 for i in range(num_layers))
    if not isinstance(listed, list) or any(type(one) is not int for one in listed):
        raise fields.error("moe_layers", "a list of layers")
    return tuple(i in listed for i in range(num_layers))


def _score(fields: Fields, kind: MoeFamily, renormalize: bool) -> tuple[str, bool]:
    """Return the function of the router's logits, and whether to divide by the weights' sum."""
    if not kind.score_key:
        return kind.score, renormalize
    score = fields.text(kind.score_key)
    if score not in ("softmax", "sigmoid"):
        raise fields.error(kind.score_key, "softmax or sigmoid")
    # A softmax over the chosen logits is one over all, divided by the chosen ones' sum.
    return score, renormalize or score == "softmax"


def _scales(fields: Fields, kind: MoeFamily, shared_size: int) -> tuple[float, float]:
    """Return the factors on the outputs of the experts, and of the shared one."""
    scale = fields.real(kind.scale, 1e-6, 1e6, 1.0) if kind.scale else 1.0
    if not kind.shared_sum or not shared_size:
        return scale, 1.0
    how = fields.text(kind.shared_sum)
    if how not in ("sum", "average"):
        raise fields.error(kind.shared_sum, "sum or average")
    return (0.5 * scale, 0.5) if how == "average" else (scale, 1.0)
