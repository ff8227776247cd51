"""Plan a model's use of device memory, and the pages that fit, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.block_plan import MemoryBudget
from engine.cache.kv_cache import KVGeometry
from engine.cache.memory_pool import format_bytes
from engine.config import ModelConfig
from engine.core.resolve import budget_with_states, default_budget, default_num_seqs
from engine.loading.load_config import LoadConfig
from engine.loading.weight_memory import weight_dtype
from engine.loading.weight_table import weight_shapes
from engine.loading.weights import held_formats
from engine.models.family import SECOND
from engine.models.rope_tables import rope_bytes
from engine.runner.memory_sizes import DraftSizes
from engine.speculative.draft_pages import num_spare_blocks
from engine.weights import FORMATS, Format, dense_format

__all__ = ["MemoryPlan", "PagePlan", "StateNeed", "WeightGroup", "plan_memory"]

# Group of weights -> kinds of weights. A trailing "_" matches every kind with this prefix.
_GROUPS = {
    "experts": ("experts_", "router", "router_", "moe_latent_"),
    "shared experts": ("shared_",),
    "embeddings": ("embed", "embed_positions", "embed_per_layer"),
    "output layer": ("lm_head",),
    "MLPs": ("gate_up", "up", "down", "xielu_"),
    "attention": ("qkv", "o", "sinks", "mla_"),
    "layers with states": ("delta_", "conv_", "mamba_", "lightning_"),
    "residual streams": ("per_layer_", "altup_", "laurel_", "layer_scale"),
}
_NORMS = "norms"


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one purpose: their bytes and formats."""

    name: str
    num_bytes: int
    formats: tuple[str, ...]


@dataclass(frozen=True)
class PagePlan:
    """Pages of one dtype: bytes per token, and the number of tokens that fit."""

    dtype: str
    bytes_per_token: int
    num_tokens: int


@dataclass(frozen=True)
class StateNeed:
    """Recurrent states: bytes per request, and the number of requests that may run."""

    bytes_per_request: int
    num_requests: int

    def __str__(self) -> str:
        size = format_bytes(self.bytes_per_request)
        return f"{size} for each of {self.num_requests} requests, and snapshots"


@dataclass(frozen=True)
class MemoryPlan:
    """Use of a device's memory.

    Attributes
    ----------
    weights : tuple of WeightGroup
        Bytes of the weights by purpose.
    rope_bytes : int
        Bytes of the rope tables.
    budget : MemoryBudget
        Budget of an engine with default options and exclusive use of the device; its weights
        include the rope tables.
    pages : tuple of PagePlan
        Pages in the model's dtype and, unless they hold latents, in 8 bits.
    max_model_len : int
        Maximum number of tokens per sequence.
    draft : DraftSizes or None
        Sizes of a draft model; `pages` include its pages.
    states : StateNeed or None
        For a model with recurrent layers; the budget counts their slots.
    """

    weights: tuple[WeightGroup, ...]
    rope_bytes: int
    budget: MemoryBudget
    pages: tuple[PagePlan, ...]
    max_model_len: int
    draft: DraftSizes | None = None
    states: StateNeed | None = None

    @property
    def fits(self) -> bool:
        """Whether the weights and the activations fit."""
        return self.budget.left >= 0

    def __str__(self) -> str:
        budget = self.budget
        rows = [("weights", sum(group.num_bytes for group in self.weights), "")]
        rows += [(f"  {each.name}", each.num_bytes, ", ".join(each.formats))
                 for each in self.weights]  # fmt: skip
        rows.append(("rope tables", self.rope_bytes, f"for {self.max_model_len} tokens"))
        rows.append(("activations", budget.activations, "at most, with default options"))
        if self.draft is not None:
            rows.append(("draft model", budget.drafts, str(self.draft)))
        if self.states is not None:
            rows.append(("states", budget.states, str(self.states)))
        share = f"{100 * budget.utilization:.3g} % of {format_bytes(budget.total)} are used"
        rows.append(("left for pages", budget.left, share))
        lines = [
            f"{name:18} {format_bytes(size):>11}  {note}".rstrip() for name, size, note in rows
        ]
        for each in self.pages:
            requests = each.num_tokens // self.max_model_len
            lines.append(
                f"  {each.dtype + ' pages':16} {each.num_tokens:>11,}  tokens of "
                f"{format_bytes(each.bytes_per_token)}: {requests} requests of {self.max_model_len}"
            )
        if not self.fits:
            lines.append(f"does not fit: {format_bytes(-budget.left)} are missing")
        return "\n".join(lines)


def plan_memory(
    config: ModelConfig,
    load_config: LoadConfig,
    total: int,
    *,
    block_size: int = 16,
    draft: tuple[ModelConfig, LoadConfig] | None = None,
    num_drafts: int = 0,
    is_rounded: bool = True,
) -> MemoryPlan:
    """Plan the use of `total` bytes of memory. Nothing is allocated.

    Parameters
    ----------
    config : ModelConfig
        The model's configuration.
    load_config : LoadConfig
        Resolved loading options; of the device, only the kind matters.
    total : int
        Bytes of the device.
    block_size : int
        Tokens per page.
    draft : (ModelConfig, LoadConfig), optional
        A draft model's configuration and loading options.
    num_drafts : int
        Maximum number of drafts per request.
    is_rounded : bool
        Whether loading rounds to the model's quantized format: the files have another. A CPU holds
        such weights dense.

    Examples
    --------
    >>> from engine.device import CPU
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> plan = plan_memory(config, LoadConfig(CPU, "float16", 128, "auto"), 1 << 20)
    >>> [(group.name, group.num_bytes) for group in plan.weights][:2]
    [('MLPs', 9216), ('attention', 6144)]
    >>> [(page.dtype, page.bytes_per_token) for page in plan.pages]
    [('float16', 64), ('8-bit', 32)]
    """
    dtype = load_config.dtype
    length = load_config.max_model_len
    kind = load_config.device.kind
    groups = _weight_groups(config, load_config, is_rounded=is_rounded)
    tables = rope_bytes(config, length)
    weights = sum(group.num_bytes for group in groups) + tables
    beside = None if draft is None else _draft_sizes(*draft, block_size, num_drafts)
    budget = default_budget(config, dtype, kind, total, weights, beside)
    geometry = KVGeometry.of_model(config, dtype, block_size)
    (budget, seqs) = budget_with_states(budget, geometry, default_num_seqs(kind))
    of_drafts = 0 if beside is None else beside.bytes_per_block // block_size
    pages = []
    names = {"auto": dtype} if config.mla is not None else {"auto": dtype, "fp8": "8-bit"}
    for kv_cache_dtype, name in names.items():
        in_pages = KVGeometry.of_model(config, dtype, block_size, kv_cache_dtype).bytes_per_token
        per_token = max(1, in_pages + of_drafts)
        blocks = max(0, budget.left) // (per_token * block_size)
        pages.append(PagePlan(name, per_token, blocks * block_size))
    states = StateNeed(geometry.bytes_per_slot, seqs) if geometry.has_states else None
    return MemoryPlan(groups, tables, budget, tuple(pages), length, beside, states)


def _draft_sizes(
    config: ModelConfig, load_config: LoadConfig, block_size: int, num_drafts: int
) -> DraftSizes:
    dtype = load_config.dtype
    groups = _weight_groups(config, load_config, is_rounded=False)
    weights = sum(group.num_bytes for group in groups)
    weights += rope_bytes(config, load_config.max_model_len)
    per_block = KVGeometry.of_model(config, dtype, block_size).bytes_per_block
    seqs = default_num_seqs(load_config.device.kind)
    num_spare = seqs * num_spare_blocks(block_size, num_drafts)
    return DraftSizes(config, dtype, weights, per_block, num_spare)


def _weight_groups(
    config: ModelConfig, how: LoadConfig, *, is_rounded: bool
) -> tuple[WeightGroup, ...]:
    """Return the non-empty groups, largest first; tied embeddings count once."""
    dtype = how.dtype
    form = FORMATS.get(how.quantization or "")
    quantized: dict[str, Format] = {}
    if form is not None:
        quantized = held_formats(config, form, how.device, dtype, is_rounded=is_rounded)
    shapes = weight_shapes(config)
    if config.tie_word_embeddings and "lm_head" not in quantized:
        del shapes["lm_head"]
    sizes: dict[str, int] = {}
    formats: dict[str, dict[str, None]] = {}
    for name, shape in shapes.items():
        group = _group_of(name.rpartition(".")[2])
        chosen = quantized.get(name) or dense_format(weight_dtype(name, dtype))
        sizes[group] = sizes.get(group, 0) + chosen.num_bytes(shape)
        formats.setdefault(group, {})[chosen.name] = None
    order = sorted(sizes, key=lambda group: -sizes[group])
    return tuple(WeightGroup(group, sizes[group], tuple(formats[group])) for group in order)


def _group_of(kind: str) -> str:
    """Return the group of a kind of weight.

    Examples
    --------
    >>> [_group_of(kind) for kind in ("o", "o_bias", "experts_down", "q_norm", "final_norm_bias")]
    ['attention', 'attention', 'experts', 'norms', 'norms']
    """
    if "norm" in kind:
        return _NORMS
    matrix = kind.removeprefix(SECOND).removesuffix("_bias")
    for group, kinds in _GROUPS.items():
        if any(matrix == each or (each[-1] == "_" and matrix.startswith(each)) for each in kinds):
            return group
    return _NORMS
