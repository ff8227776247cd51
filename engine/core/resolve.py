"""`resolve`: complete the engine's options for a loaded model, with a reason for each default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine import env
from engine.cache.block_plan import MemoryBudget, plan_num_blocks
from engine.cache.kv_cache import KVGeometry
from engine.cache.layer_cache import layer_caches
from engine.cache.memory_pool import device_memory, format_bytes
from engine.cache.state_plan import CacheSizes, fitting_num_seqs, plan_num_slots
from engine.config import ModelConfig
from engine.device import Device
from engine.distributed.links import SlotShape
from engine.drafts import MAX_STATE_QUERY_LEN
from engine.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.kernels._override.scope import ModelKernels
from engine.layers.collectives import buffer_bytes
from engine.runner.cuda_graph import batch_sizes
from engine.runner.memory_sizes import DraftSizes, activation_bytes, feature_bytes
from engine.scheduler.config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.speculative.draft_pages import num_spare_blocks

__all__ = [
    "ResolvedConfig",
    "budget_with_states",
    "can_link",
    "default_budget",
    "default_num_seqs",
    "resolve",
]

# Keep a CPU step from lasting seconds; fill the chip on a GPU.
_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_SEQUENCES = {"cpu": 16, "cuda": 256}
# On the CPU, the KV cache competes for memory with the user's other programs.
_UTILIZATION = {"cpu": 0.5, "cuda": 0.9}
_HOST_STATE_SHARE = 1 / 4  # share of the swap space for states


class DraftModel(Protocol):
    """Properties of a draft model or draft head that `resolve` reads."""

    @property
    def config(self) -> ModelConfig:
        """Model configuration."""

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, and of the KV cache unless it is quantized."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs the draft reads."""


class ServedModel(DraftModel, Protocol):
    """Properties of `Model` that `resolve` reads."""

    @property
    def device(self) -> Device:
        """Device that holds the weights."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model was loaded for, in tokens."""

    @property
    def deterministic(self) -> bool:
        """Whether the model was loaded with `deterministic=True`."""

    @property
    def whole_config(self) -> ModelConfig:
        """Architecture of the whole model, of which `config` may be a shard or a stage."""

    @property
    def has_patterns(self) -> bool:
        """Whether some layers have an attention pattern."""

    @property
    def num_adapter_slots(self) -> int:
        """Number of LoRA adapters that one step may use."""

    @property
    def kernels(self) -> ModelKernels:
        """Overrides of ops."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that share each layer (tensor parallel)."""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""

    def stage_sizes(
        self, options: Mapping[str, Any], feature_layers: Sequence[int]
    ) -> Sequence[CacheSizes]:
        """Return what each other stage has room for.

        `options` are the fields of `EngineConfig`, `feature_layers` the layers that a draft head
        reads.
        """


@dataclass(frozen=True)
class ResolvedConfig:
    """Every value the engine runs with, and the reason for each one the user left out."""

    scheduler: SchedulerConfig
    geometry: KVGeometry
    seed: int
    async_scheduling: bool
    is_debug: bool
    cuda_graphs: bool
    speculative: SpeculativeConfig | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def with_reason(self, name: str, reason: str) -> ResolvedConfig:
        """Return a copy with one more reason; `self` if `reason` is empty."""
        return replace(self, reasons={**self.reasons, name: reason}) if reason else self


def resolve(
    config: EngineConfig,
    model: ServedModel,
    draft: DraftModel | None = None,
    *,
    num_features: int = 0,
) -> ResolvedConfig:
    """Derive every value that `config` leaves out, and record why.

    Parameters
    ----------
    config : EngineConfig
    model : ServedModel
        Its weights are already on the device.
    draft : DraftModel, optional
        Its weights are already on the device too; its KV cache holds as many tokens as the model's.
    num_features : int
        Layers whose inputs a pipeline stage keeps or passes on for another stage's draft head.

    Raises
    ------
    ConfigError, OutOfMemoryError
        If the options contradict the model, or the KV cache does not fit.
    """
    device = model.device
    reasons = dict[str, str]()
    _check_ranks(config, model)
    length = _length(config, model.max_model_len, reasons)
    seqs = _or_default(config, "max_num_seqs", _SEQUENCES[device.kind], device, reasons)
    budget = max(_BATCHED_TOKENS[device.kind], seqs)
    tokens = _or_default(config, "max_num_batched_tokens", budget, device, reasons)
    has_graphs = _has_graphs(config, model, reasons)
    geometry = KVGeometry.of_model(
        model.config, model.dtype, config.block_size, config.kv_cache_dtype, config.state_dtype
    )
    has_states = any(cache.states for cache in layer_caches(model.whole_config, model.dtype))
    if has_states:
        config = _with_default_drafts(config, reasons)
        _check_states(config, model)
    memory = _memory(config, model, tokens, seqs, has_graphs, num_features)
    if geometry.has_states and config.max_num_seqs is None:
        seqs = _num_seqs_with_states(seqs, geometry, memory, reasons)
    per_block = 0
    if draft is not None:
        sizes = _draft_sizes(config, model, draft, tokens, seqs, has_graphs)
        memory = sizes.added_to(memory, tokens, seqs, has_graphs)
        per_block = sizes.bytes_per_block
        reasons["draft_model"] = str(sizes)
    num_slots = _num_slots(config, geometry, memory, seqs, reasons)
    memory = replace(memory, states=num_slots * geometry.bytes_per_slot)
    plan = plan_num_blocks(
        memory,
        geometry,
        max_model_len=length,
        max_num_seqs=seqs,
        num_blocks=config.num_blocks,
        draft_bytes_per_block=per_block,
    )
    reasons["num_blocks"] = plan.reason
    num_host = _num_host(config, geometry, plan.num_blocks, seqs, reasons)
    own = CacheSizes(plan.num_blocks, num_host[0], num_slots, num_host[1])
    layers = () if draft is None else draft.feature_layers
    stages = [own, *model.stage_sizes(vars(config), layers)]
    least = CacheSizes.least(stages)
    if least.num_blocks < plan.num_blocks:
        reasons["num_blocks"] = f"{least.num_blocks}: the least of {len(stages)} stages"
    if least.num_state_slots:
        seqs = min(seqs, least.num_state_slots)
    is_debug = env.debug() if config.debug is None else config.debug
    scheduler = SchedulerConfig(
        num_blocks=least.num_blocks,
        max_model_len=length,
        block_size=config.block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_draft_tokens=config.max_draft_tokens,
        max_adapters=model.num_adapter_slots,
        draft_trees=_supports_trees(model) and not least.num_state_slots,  # states follow a chain
        watermark=config.watermark,
        policy=config.scheduling_policy,
        priority_window=config.priority_window,
        prefix_caching=config.enable_prefix_caching,
        max_blocks_per_salt=config.max_blocks_per_salt,
        num_host_blocks=least.num_host_blocks,
        num_state_slots=least.num_state_slots,
        num_host_state_slots=least.num_host_state_slots,
        state_interval=config.state_snapshot_interval,
        blocks_per_state_slot=geometry.bytes_per_slot / max(1, geometry.bytes_per_block),
        preemption=config.preemption_mode,
        recompute_us_per_token=config.recompute_us_per_token,
        swap_us_per_block=config.swap_us_per_block,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        debug=is_debug,
    )
    return ResolvedConfig(
        scheduler,
        geometry,
        config.seed,
        _is_async(config, device, reasons),
        is_debug,
        has_graphs,
        config.speculative_config,
        reasons,
    )


def _supports_trees(model: ServedModel) -> bool:
    """Tell whether the attention kernels of `model` verify trees of drafts.

    Trees need the decode kernel, but its summation order depends on the batch, and it does not
    support trees with a sliding window. Patterns need the prefill kernel, and latent attention has
    a kernel without trees.
    """
    config = model.whole_config
    is_special = model.deterministic or model.has_patterns or config.mla is not None
    return not is_special and not any(config.layer_windows)


def can_link(config: EngineConfig, *, is_cuda: bool) -> bool:
    """Tell whether pipeline stages may be linked: they use GPUs of this host.

    See `engine.distributed.links`.
    """
    return is_cuda and config.is_one_host and config.pipeline_parallel_size > 1


def default_budget(
    model: ModelConfig,
    dtype: str,
    kind: str,
    total: int,
    weight_bytes: int,
    draft: DraftSizes | None = None,
    num_ranks: int = 1,
    num_stages: int = 1,
    max_num_seqs: int | None = None,
) -> MemoryBudget:
    """Return the memory budget of an engine with default options, given `total` bytes.

    Parameters
    ----------
    model : ModelConfig
    dtype : str
    kind : str
        "cpu" or "cuda".
    total, weight_bytes : int
    draft : DraftSizes, optional
        Sized for `default_num_seqs(kind)` requests.
    num_ranks : int
        GPUs that share each layer; `model` is one rank's shard.
    num_stages : int
        Pipeline stages on one host; `model` is one stage's part.
    max_num_seqs : int, optional
        Maximum number of running requests; by default `default_num_seqs(kind)`.
    """
    seqs = max_num_seqs or default_num_seqs(kind)
    tokens = max(_BATCHED_TOKENS[kind], seqs)
    has_graphs = kind == "cuda"
    slots = SlotShape.of(num_stages, 0, tokens, model.hidden_size, dtype)
    budget = MemoryBudget(
        total,
        0,
        weight_bytes,
        _activation_bytes(model, dtype, tokens, seqs, has_graphs),
        _UTILIZATION[kind],
        collectives=buffer_bytes(num_ranks) if kind == "cuda" else 0,
        links=slots.num_bytes if kind == "cuda" and num_stages > 1 else 0,
    )
    return budget if draft is None else draft.added_to(budget, tokens, seqs, has_graphs)


def budget_with_states(
    budget: MemoryBudget, geometry: KVGeometry, max_num_seqs: int
) -> tuple[MemoryBudget, int]:
    """Return `budget` with the state slots of recurrent layers, and the requests that may run.

    `max_num_seqs`: limit of the requests; lowered as an engine does that is given none.
    """
    size = geometry.bytes_per_slot
    if not size:
        return budget, max_num_seqs
    seqs = fitting_num_seqs(max_num_seqs, size, budget.left)
    plan = plan_num_slots(size, budget.left, max_num_seqs=seqs)
    return replace(budget, states=plan.num_bytes), seqs


def default_num_seqs(kind: str) -> int:
    """Return the default maximum number of running requests; `kind`: "cpu" or "cuda"."""
    return _SEQUENCES[kind]


def _check_ranks(config: EngineConfig, model: ServedModel) -> None:
    if config.tensor_parallel_size != model.num_ranks:
        raise ConfigError(
            f"tensor_parallel_size must be {model.num_ranks}, the number of processes that "
            f"share this model (LLMEngine.from_name starts them); got "
            f"{config.tensor_parallel_size}"
        )
    if config.pipeline_parallel_size != model.num_stages:
        raise ConfigError(
            f"pipeline_parallel_size must be {model.num_stages}, the number of stages that "
            f"have this model's layers (LLMEngine.from_name starts them); got "
            f"{config.pipeline_parallel_size}"
        )


def _with_default_drafts(config: EngineConfig, reasons: dict[str, str]) -> EngineConfig:
    """Return `config` with no more drafts than recurrent layers verify, if none were asked for."""
    drafts = config.speculative_config
    most = MAX_STATE_QUERY_LEN - 1
    if config.max_draft_tokens <= most:
        return config
    is_default = drafts is not None and drafts.has_default_num_tokens
    if not is_default or config.max_draft_tokens != drafts.num_tokens:
        return config
    reasons["max_draft_tokens"] = f"{most}: as many as recurrent layers verify"
    return replace(config, max_draft_tokens=most)


def _check_states(config: EngineConfig, model: ServedModel) -> None:
    """Reject options that contradict recurrent layers."""
    if config.max_draft_tokens >= MAX_STATE_QUERY_LEN:
        drafts = config.speculative_config
        is_own = drafts is None or drafts.num_tokens != config.max_draft_tokens
        name = "max_draft_tokens" if is_own else "speculative_config.num_speculative_tokens"
        raise ConfigError(
            f"{name} must be at most {MAX_STATE_QUERY_LEN - 1} for a model with recurrent layers; "
            f"got {config.max_draft_tokens}"
        )
    if model.deterministic and config.state_dtype == "bfloat16":
        raise ConfigError(
            "state_dtype must be 'auto' or 'float32' with deterministic=True: a state is rounded "
            "where a chunk ends, which depends on the batch; got 'bfloat16'"
        )


def _length(config: EngineConfig, model_length: int, reasons: dict[str, str]) -> int:
    if config.max_model_len is None:
        reasons["max_model_len"] = f"{model_length}: the model's own"
        return model_length
    if config.max_model_len > model_length:
        raise ConfigError(
            f"max_model_len must be at most {model_length}, which the model was loaded for; "
            f"got {config.max_model_len}"
        )
    return config.max_model_len


def _or_default(
    config: EngineConfig, name: str, default: int, device: Device, reasons: dict[str, str]
) -> int:
    value: int | None = getattr(config, name)
    if value is not None:
        return value
    reasons[name] = f"{default}: the default on {device.kind}"
    return default


def _has_graphs(config: EngineConfig, model: ServedModel, reasons: dict[str, str]) -> bool:
    device = model.device
    # TODO(37): tests/distributed/test_cuda.py fails with both on two GPUs, for a reason not known.
    if device.is_cuda and model.num_ranks > 1 and model.kernels.overrides:
        if config.cuda_graphs:
            raise ConfigError(
                "cuda_graphs must be False or left out with "
                f"tensor_parallel_size={model.num_ranks} and kernels={model.kernels.overrides}; "
                "got True"
            )
        reasons["cuda_graphs"] = f"False: {model.num_ranks} ranks, with overrides of kernels"
        return False
    if config.cuda_graphs is None:
        reasons["cuda_graphs"] = f"{device.is_cuda}: the default on {device.kind}"
        return device.is_cuda
    if config.cuda_graphs and not device.is_cuda:
        raise ConfigError(f"cuda_graphs must be False or left out on {device}; got True")
    return config.cuda_graphs


def _is_async(config: EngineConfig, device: Device, reasons: dict[str, str]) -> bool:
    if config.async_scheduling is not None:
        return config.async_scheduling
    reasons["async_scheduling"] = f"{device.is_cuda}: the default on {device.kind}"
    return device.is_cuda


def _num_host(
    config: EngineConfig, geometry: KVGeometry, num_blocks: int, seqs: int, reasons: dict[str, str]
) -> tuple[int, int]:
    """Return the numbers of blocks and of state slots on the host.

    Blocks of a stage without pages need no memory: it has one for each of the device's.
    """
    if not config.swap_space_gb:
        return 0, 0
    room = int(config.swap_space_gb * 2**30)
    num_slots = 0
    if geometry.has_states:
        num_slots = min(seqs, int(room * _HOST_STATE_SHARE) // geometry.bytes_per_slot)
    room -= num_slots * geometry.bytes_per_slot
    has_pages = geometry.bytes_per_block > 0
    count = room // geometry.bytes_per_block if has_pages else num_blocks
    if config.preemption_mode == "swap" and not count:
        size = format_bytes(geometry.bytes_per_block)
        raise ConfigError(
            f"swap_space_gb must have room for a block ({size}) with preemption_mode='swap'; got "
            f"{config.swap_space_gb:g} GiB"
        )
    reasons["num_host_blocks"] = f"{count}: as many as fit into {config.swap_space_gb:g} GiB"
    return count, num_slots


def _num_seqs_with_states(
    seqs: int, geometry: KVGeometry, memory: MemoryBudget, reasons: dict[str, str]
) -> int:
    """Return `seqs`, or fewer if their states would leave too little for pages."""
    fitting = fitting_num_seqs(seqs, geometry.bytes_per_slot, memory.left)
    if fitting < seqs:
        size = format_bytes(geometry.bytes_per_slot)
        reasons["max_num_seqs"] = f"{fitting}: each has {size} of states, half of what is left"
    return fitting


def _num_slots(
    config: EngineConfig,
    geometry: KVGeometry,
    memory: MemoryBudget,
    seqs: int,
    reasons: dict[str, str],
) -> int:
    """Return the number of state slots; 0 without recurrent layers."""
    if not geometry.has_states:
        return 0
    plan = plan_num_slots(
        geometry.bytes_per_slot,
        memory.left - (config.num_blocks or 0) * geometry.bytes_per_block,
        max_num_seqs=seqs,
        num_snapshots=config.num_state_snapshots,
        max_draft_tokens=config.max_draft_tokens,
        prefix_caching=config.enable_prefix_caching,
    )
    reasons["num_state_slots"] = plan.reason
    return plan.num_slots


def _memory(
    config: EngineConfig,
    model: ServedModel,
    tokens: int,
    seqs: int,
    has_graphs: bool,
    num_features: int,
) -> MemoryBudget:
    total, free = device_memory(model.device)
    if not model.device.is_cuda:  # ranks and stages share host memory
        count = model.num_ranks * config.pipeline_parallel_size
        total = total // count
        free = free // count
    query_len = 1 + config.max_draft_tokens
    buffers = buffer_bytes(model.num_ranks) if model.device.is_cuda else 0
    rows = batch_sizes(seqs)[-1] * query_len if has_graphs else 0
    features = feature_bytes(model.config, model.dtype, num_features, tokens, rows)
    hidden_size = model.config.hidden_size
    num_stages = config.pipeline_parallel_size
    slots = SlotShape.of(num_stages, num_features, tokens, hidden_size, model.dtype)
    return MemoryBudget(
        total=total,
        others=max(0, total - free - model.weight_bytes - buffers),
        weights=model.weight_bytes,
        activations=_activation_bytes(
            model.config, model.dtype, tokens, seqs, has_graphs, query_len
        )
        + features,
        utilization=config.memory_utilization or _UTILIZATION[model.device.kind],
        collectives=buffers,
        links=slots.num_bytes if can_link(config, is_cuda=model.device.is_cuda) else 0,
    )


def _activation_bytes(
    model: ModelConfig, dtype: str, tokens: int, seqs: int, has_graphs: bool, query_len: int = 1
) -> int:
    """Return the activation bytes of a step, plus those held by CUDA graphs."""
    rows = batch_sizes(seqs)[-1] * query_len
    graphs = activation_bytes(model, dtype, rows, rows) if has_graphs else 0
    return activation_bytes(model, dtype, tokens, seqs * query_len) + graphs


def _draft_sizes(
    config: EngineConfig,
    model: ServedModel,
    draft: DraftModel,
    tokens: int,
    seqs: int,
    has_graphs: bool,
) -> DraftSizes:
    per_block = KVGeometry.of_model(draft.config, draft.dtype, config.block_size).bytes_per_block
    num_spare = seqs * num_spare_blocks(config.block_size, config.max_draft_tokens)
    num_layers = len(set(draft.feature_layers))
    rows = batch_sizes(seqs)[-1] * (1 + config.max_draft_tokens) if has_graphs else 0
    # A pipeline keeps those of every step in flight, of the one just read, and of the one that it
    # computes.
    num_steps = 2 if model.num_stages == 1 else model.num_stages + 2
    features = feature_bytes(model.config, model.dtype, num_layers, tokens, rows, num_steps)
    return DraftSizes(draft.config, draft.dtype, draft.weight_bytes, per_block, num_spare, features)
