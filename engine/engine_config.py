"""The engine's options, as given by the user and as resolved, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from engine import env
from engine.cache.block_plan import MemoryBudget, plan_num_blocks
from engine.cache.kv_cache import KVGeometry, kv_dtype
from engine.cache.memory_pool import device_memory
from engine.checks import shown
from engine.config import ModelConfig
from engine.device import Device
from engine.distributed.connection import parse_address
from engine.errors import ConfigError, unknown_keyword
from engine.layers.collectives import buffer_bytes
from engine.option_ranges import OPTIONS, checked_option
from engine.runner.cuda_graph import batch_sizes
from engine.runner.memory_sizes import DraftSizes, activation_bytes, feature_bytes, geometry_of
from engine.scheduler.config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.speculative.draft_pages import num_spare_blocks

__all__ = ["EngineConfig", "ResolvedConfig"]

# A step on the CPU should not last seconds; on a GPU it should fill the chip.
_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_SEQUENCES = {"cpu": 16, "cuda": 256}
# On the CPU the pages compete for memory with the user's other programs.
_UTILIZATION = {"cpu": 0.5, "cuda": 0.9}

_SCHEDULER_OPTIONS = {
    "enable_prefix_caching": "prefix_caching",
    "max_blocks_per_salt": "max_blocks_per_salt",
    "max_prefill_chunk": "max_prefill_chunk",
    "max_draft_tokens": "max_draft_tokens",
    "scheduling_policy": "policy",
    "priority_window": "priority_window",
    "max_num_queued_requests": "max_num_queued_requests",
    "max_num_queued_tokens": "max_num_queued_tokens",
    "watermark": "watermark",
    "preemption_mode": "preemption",
    "recompute_us_per_token": "recompute_us_per_token",
    "swap_us_per_block": "swap_us_per_block",
}
"""Options passed on to the scheduler unchanged -> their names there."""


class ServedModel(Protocol):
    """What `EngineConfig.resolve` must know of a loaded model."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def device(self) -> Device:
        """Where it computes."""

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, and of pages unless they hold codes."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence that it was loaded for."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""

    @property
    def deterministic(self) -> bool:
        """Whether it was loaded with `deterministic=True`."""

    @property
    def num_ranks(self) -> int:
        """Processes that share its layers."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages that have its layers."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input it reads as a draft."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are served; frozen. `resolve()` derives what is left out.

    Parameters
    ----------
    max_model_len : int, optional
        Maximum tokens of one request, prompt and output; the model's own limit if left out.
    max_num_seqs : int, optional
        Maximum number of running requests; 256 on CUDA, 16 on the CPU.
    max_num_batched_tokens : int, optional
        Token budget of one step; 8192 on CUDA, 512 on the CPU.
    kv_cache_dtype : str
        "auto": pages of the activations' dtype; "fp8" (e4m3) or "int8": of codes, half as much
        memory as 16 bits, with a scale for each layer and key/value head (`Model.set_kv_scales`).
    block_size : int
        Tokens per KV block: 16, 32, 64 or 128.
    num_blocks : int, optional
        Number of KV blocks; if left out, as many as fit or can ever be used.
    memory_utilization : float, optional
        Share of the device's memory for weights, activations and pages; 0.9 on CUDA, 0.5 on the
        CPU. vLLM's name `gpu_memory_utilization` is accepted too.
    seed : int
        Seeds the requests that have no seed of their own.
    enable_prefix_caching : bool
        Keep computed prefixes, and share their blocks among requests with a common prefix.
    max_blocks_per_salt : int, optional
        Maximum blocks kept for one `cache_salt`, so that no tenant can evict all others.
    max_prefill_chunk : int
        Maximum tokens of one prompt in one step; 0 = as many as the budget allows.
    max_draft_tokens : int
        Maximum draft tokens of a request that one step verifies (`Scheduler.propose`); CUDA graphs
        are captured for steps with none and with this many. 0: what `speculative_config` says.
    speculative_config : mapping, callable or SpeculativeConfig, optional
        How drafts are proposed, as vLLM's: {"method": "ngram", "num_speculative_tokens": 8}; or a
        callable. None proposes none.
    scheduling_policy : str
        "fcfs" = first come, first served; "lpm" = longest cached prefix first, within a window.
    priority_window : int
        How many arrivals one level of priority is worth; 0 ignores priorities.
    max_num_queued_requests, max_num_queued_tokens : int, optional
        Limits of the waiting queue; a request beyond them raises `QueueFullError`.
    watermark : float
        Share of the blocks that an admission must leave free for running requests to grow into.
    swap_space_gb : float
        Host memory, in GiB, for blocks of preempted requests and evicted prefixes; 0 is none.
    preemption_mode : str
        How a preempted request is restored: "recompute", "swap" or "auto" (the cheaper one).
    recompute_us_per_token, swap_us_per_block : float, optional
        The costs that "auto" compares, in microseconds: of one prompt token, and of swapping one
        block out and back in. A cost left out is measured once, when the engine is constructed,
        so that the choice never depends on a clock while requests run.
    async_scheduling : bool, optional
        Launch each step before the token ids of the previous one are on the host: outputs come one
        step later. On by default on CUDA, off on the CPU.
    cuda_graphs : bool, optional
        Replay decode steps from CUDA graphs, captured when the engine is constructed. On by
        default on CUDA; off launches kernel by kernel. Not available on the CPU.
    step_timeout : float, optional
        Seconds after which a step counts as stuck: it is logged, with the engine's state.
    raise_on_timeout : bool
        Whether such a step also raises a `StepTimeoutError`.
    tensor_parallel_size : int
        Processes among which the model is divided, each with a GPU or on the CPU. They are
        started by `LLM`, `LLMEngine.from_name` and the commands.
    pipeline_parallel_size : int
        Stages among which the layers are divided, each with `tensor_parallel_size` processes. The
        last one is the engine's; the others are started likewise.
    distributed_executor_backend : str, optional
        "ray": the other stages are actors in a cluster of Ray, on hosts of their own if there are
        enough. "mp", as by default: they are processes on this host.
    pipeline_address : str, optional
        "HOST:PORT" where stages on other hosts connect (`engine stage`), which are then not
        started here.
    collective_timeout : float
        Seconds after which a process that does not come to a common operation ends all of them.
    debug : bool, optional
        Check all block tables before each step and all invariants after it, and fill freed blocks
        with NaN; slow. The default is the value of `ENGINE_DEBUG`.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    UnknownOptionError
        If a keyword is none of the above.

    Examples
    --------
    >>> EngineConfig(max_num_seqs=0)
    Traceback (most recent call last):
    ...
    engine.errors.ConfigError: max_num_seqs must be a whole number in [1, 65536], or None; got 0
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float | None = None
    seed: int = 0
    enable_prefix_caching: bool = True
    max_blocks_per_salt: int | None = None
    max_prefill_chunk: int = 0
    max_draft_tokens: int = 0
    speculative_config: Any = None
    scheduling_policy: str = "fcfs"
    priority_window: int = 256
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    watermark: float = 0.01
    swap_space_gb: float = 0.0
    preemption_mode: str = "auto"
    recompute_us_per_token: float | None = None
    swap_us_per_block: float | None = None
    async_scheduling: bool | None = None
    cuda_graphs: bool | None = None
    step_timeout: float | None = None
    raise_on_timeout: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    pipeline_address: str | None = None
    collective_timeout: float = 60.0
    debug: bool | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], others: Iterable[str] = ()) -> EngineConfig:
        """Build from keywords; an unknown one raises an error that names the nearest.

        `others` are keywords that the caller handles itself, as further candidates for the nearest.
        """
        given = dict(options)
        if "gpu_memory_utilization" in given:
            if "memory_utilization" in given:
                raise ConfigError("give memory_utilization or gpu_memory_utilization, not both")
            given["memory_utilization"] = given.pop("gpu_memory_utilization")
        if (replicas := given.pop("data_parallel_size", 1)) != 1:
            raise ConfigError(
                "data_parallel_size must be 1, since this is one engine: for more, use "
                "'engine serve --data-parallel-size', or a process with an LLM for each GPU; "
                f"got {shown(replicas)}"
            )
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_keyword("LLM", name, [*known, "gpu_memory_utilization", *others])
        return cls(**given)

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, checked_option(name, getattr(self, name)))
        speculative = SpeculativeConfig.from_option(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        if speculative is not None and not self.max_draft_tokens:
            object.__setattr__(self, "max_draft_tokens", speculative.num_tokens)
        if self.preemption_mode == "swap" and not self.swap_space_gb:
            raise ConfigError("preemption_mode='swap' needs a swap_space_gb above 0; got 0.0")
        if self.raise_on_timeout and self.step_timeout is None:
            raise ConfigError("raise_on_timeout needs a step_timeout; got None")
        self._check_pipeline()

    def resolve(self, model: ServedModel, draft: ServedModel | None = None) -> ResolvedConfig:
        """Derive every value left out, with the reason for each.

        Parameters
        ----------
        model : ServedModel
            Its weights are already on the device.
        draft : ServedModel, optional
            What proposes drafts; so are its weights. It has pages for as many tokens as the model.

        Raises
        ------
        ConfigError, OutOfMemoryError
            If the options contradict the model, or the pages do not fit.
        """
        device = model.device
        reasons = dict[str, str]()
        self._check_ranks(model)
        length = self._length(model.max_model_len, reasons)
        seqs = self._or_default("max_num_seqs", _SEQUENCES[device.kind], device, reasons)
        budget = max(_BATCHED_TOKENS[device.kind], seqs)
        tokens = self._or_default("max_num_batched_tokens", budget, device, reasons)
        has_graphs = self._has_graphs(device, reasons)
        memory = self._memory(model, tokens, seqs, has_graphs)
        geometry = geometry_of(
            model.config, self.block_size, kv_dtype(self.kv_cache_dtype, model.dtype)
        )
        per_block = 0
        if draft is not None:
            sizes = self._draft_sizes(model, draft, tokens, seqs, has_graphs)
            memory = sizes.added_to(memory, tokens, seqs, has_graphs)
            per_block = sizes.bytes_per_block
            reasons["draft_model"] = str(sizes)
        plan = plan_num_blocks(
            memory,
            geometry,
            max_model_len=length,
            max_num_seqs=seqs,
            num_blocks=self.num_blocks,
            draft_bytes_per_block=per_block,
        )
        reasons["num_blocks"] = plan.reason
        is_debug = env.debug() if self.debug is None else self.debug
        scheduler = SchedulerConfig(
            num_blocks=plan.num_blocks,
            max_model_len=length,
            block_size=self.block_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            num_host_blocks=self._host_blocks(geometry, reasons),
            # Only the decode kernel supports trees, but not with a sliding window; and its order
            # of summation depends on the batch.
            draft_trees=not model.deterministic and not any(model.config.layer_windows),
            debug=is_debug,
            **{theirs: getattr(self, ours) for ours, theirs in _SCHEDULER_OPTIONS.items()},
        )
        is_async = self._is_async(device, reasons)
        return ResolvedConfig(
            scheduler,
            geometry,
            self.seed,
            is_async,
            is_debug,
            has_graphs,
            self.speculative_config,
            reasons,
        )

    def _check_ranks(self, model: ServedModel) -> None:
        if self.tensor_parallel_size != model.num_ranks:
            raise ConfigError(
                f"tensor_parallel_size must be {model.num_ranks}, the number of processes that "
                f"share this model (LLMEngine.from_name starts them); got "
                f"{self.tensor_parallel_size}"
            )
        if self.pipeline_parallel_size != model.num_stages:
            raise ConfigError(
                f"pipeline_parallel_size must be {model.num_stages}, the number of stages that "
                f"have this model's layers (LLMEngine.from_name starts them); got "
                f"{self.pipeline_parallel_size}"
            )

    def _check_pipeline(self) -> None:
        """Refuse what several pipeline stages cannot do."""
        size = self.pipeline_parallel_size
        where = self.pipeline_address
        if where is not None and (size == 1 or self.distributed_executor_backend is not None):
            raise ConfigError(
                "pipeline_address must be left out with one stage, and with a "
                f"distributed_executor_backend; got {shown(where)}"
            )
        if size == 1 and self.distributed_executor_backend == "ray":
            raise ConfigError(
                "distributed_executor_backend must be 'mp' or left out with "
                "pipeline_parallel_size=1: ranks are in one host; got 'ray'"
            )
        if size == 1:
            return
        for name in ("speculative_config", "max_draft_tokens"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} must be left out with pipeline_parallel_size={size}: drafts follow "
                    f"the tokens that are in flight; got {shown(getattr(self, name))}"
                )
        if self.cuda_graphs:
            raise ConfigError(
                f"cuda_graphs must be False or left out with pipeline_parallel_size={size}; "
                "got True"
            )
        try:
            if where is not None:
                parse_address(where)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"pipeline_address: {error}") from None

    def _host_blocks(self, geometry: KVGeometry, reasons: dict[str, str]) -> int:
        count = int(self.swap_space_gb * 2**30) // geometry.bytes_per_block
        if self.swap_space_gb:
            reasons["num_host_blocks"] = f"{count}: as many as fit into {self.swap_space_gb:g} GiB"
        return count

    def _is_async(self, device: Device, reasons: dict[str, str]) -> bool:
        if self.async_scheduling is not None:
            return self.async_scheduling
        reasons["async_scheduling"] = f"{device.is_cuda}: the default on {device.kind}"
        return device.is_cuda

    def _has_graphs(self, device: Device, reasons: dict[str, str]) -> bool:
        if self.cuda_graphs is None and self.pipeline_parallel_size > 1:
            reasons["cuda_graphs"] = "False: there are several pipeline stages"
            return False
        if self.cuda_graphs is None:
            reasons["cuda_graphs"] = f"{device.is_cuda}: the default on {device.kind}"
            return device.is_cuda
        if self.cuda_graphs and not device.is_cuda:
            raise ConfigError(f"cuda_graphs must be False or left out on {device}; got True")
        return self.cuda_graphs

    def _length(self, model_length: int, reasons: dict[str, str]) -> int:
        if self.max_model_len is None:
            reasons["max_model_len"] = f"{model_length}: the model's own"
            return model_length
        if self.max_model_len > model_length:
            raise ConfigError(
                f"max_model_len must be at most {model_length}, which the model was loaded for; "
                f"got {self.max_model_len}"
            )
        return self.max_model_len

    def _or_default(self, name: str, default: int, device: Device, reasons: dict[str, str]) -> int:
        value: int | None = getattr(self, name)
        if value is not None:
            return value
        reasons[name] = f"{default}: the default on {device.kind}"
        return default

    def _draft_sizes(
        self, model: ServedModel, draft: ServedModel, tokens: int, seqs: int, has_graphs: bool
    ) -> DraftSizes:
        per_block = geometry_of(draft.config, self.block_size, draft.dtype).bytes_per_block
        num_spare = seqs * num_spare_blocks(self.block_size, self.max_draft_tokens)
        num_layers = len(set(draft.feature_layers))
        rows = batch_sizes(seqs)[-1] * (1 + self.max_draft_tokens) if has_graphs else 0
        features = feature_bytes(model.config, model.dtype, num_layers, tokens, rows)
        return DraftSizes(
            draft.config, draft.dtype, draft.weight_bytes, per_block, num_spare, features
        )

    def _memory(self, model: ServedModel, tokens: int, seqs: int, has_graphs: bool) -> MemoryBudget:
        total, free = device_memory(model.device)
        if not model.device.is_cuda:  # the ranks share it
            count = model.num_ranks * self.pipeline_parallel_size
            total = total // count
            free = free // count
        rows, seqs = (n * (1 + self.max_draft_tokens) for n in (batch_sizes(seqs)[-1], seqs))
        graphs = activation_bytes(model.config, model.dtype, rows, rows) if has_graphs else 0
        activations = activation_bytes(model.config, model.dtype, tokens, seqs)
        buffers = buffer_bytes(model.num_ranks) if model.device.is_cuda else 0
        return MemoryBudget(
            total=total,
            others=max(0, total - free - model.weight_bytes - buffers),
            weights=model.weight_bytes,
            activations=activations + graphs,
            utilization=self.memory_utilization or _UTILIZATION[model.device.kind],
            collectives=buffers,
        )


@dataclass(frozen=True)
class ResolvedConfig:
    """Every value the engine runs with, and the reason for each one that the user left open."""

    scheduler: SchedulerConfig
    geometry: KVGeometry
    seed: int
    async_scheduling: bool
    is_debug: bool
    cuda_graphs: bool
    speculative: SpeculativeConfig | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def with_reason(self, name: str, reason: str) -> ResolvedConfig:
        """Return the same with one more reason; itself if that is ""."""
        return replace(self, reasons={**self.reasons, name: reason}) if reason else self


def default_budget(
    model: ModelConfig,
    dtype: str,
    kind: str,
    total: int,
    weight_bytes: int,
    draft: DraftSizes | None = None,
    num_ranks: int = 1,
) -> MemoryBudget:
    """Return the budget of an engine with default options that has `total` bytes for itself.

    Parameters
    ----------
    model : ModelConfig
    dtype : str
    kind : str
        "cpu" or "cuda".
    total, weight_bytes : int
    draft : DraftSizes, optional
        For `default_num_seqs(kind)` requests.
    num_ranks : int
        GPUs that share each layer, of which `model` is one's part.
    """
    seqs = default_num_seqs(kind)
    tokens = max(_BATCHED_TOKENS[kind], seqs)
    activations = activation_bytes(model, dtype, tokens, seqs)
    if kind == "cuda":
        rows = batch_sizes(seqs)[-1]
        activations += activation_bytes(model, dtype, rows, rows)  # of the graphs
    buffers = buffer_bytes(num_ranks) if kind == "cuda" else 0
    budget = MemoryBudget(
        total, 0, weight_bytes, activations, _UTILIZATION[kind], collectives=buffers
    )
    return draft.added_to(budget, tokens, seqs, kind == "cuda") if draft is not None else budget


def default_num_seqs(kind: str) -> int:
    """Return the maximum number of running requests by default; `kind`: "cpu" or "cuda"."""
    return _SEQUENCES[kind]
