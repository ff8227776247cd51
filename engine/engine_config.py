"""The engine's options as plain values; `engine.core.resolve` derives omitted ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from os import PathLike
from typing import Any

from engine.cache.kv_cache import BLOCK_SIZES, KV_CACHE_DTYPES
from engine.cache.layer_cache import STATE_DTYPES
from engine.checks import shown, shown_with_type
from engine.distributed.connection import parse_address
from engine.drafts import MAX_QUERY_LEN
from engine.errors import ConfigError, RequestError, unknown_keyword
from engine.kernels._override.places import load_place
from engine.sampling_params import NumberRange
from engine.scheduler.config import POLICIES, PREEMPTIONS
from engine.signatures import checks_keywords
from engine.speculative.config import SpeculativeConfig
from engine.weights import stage_sizes

__all__ = ["CONFIG_OPTIONS", "EngineConfig"]

_INT32 = 2**31 - 1


def _number(default: Any, low: float, high: float, **kind: bool) -> Any:
    """Return a numeric field with this range; None is allowed if it is the default."""
    allowed = NumberRange(low, high, optional=default is None, **kind)
    return field(default=default, metadata={"range": allowed})


def _whole(default: Any, low: int, high: int) -> Any:
    """Return an integer field with this range; see `_number`."""
    return _number(default, low, high, integer=True)


def _choice(default: Any, *choices: Any) -> Any:
    """Return a field that must be one of `choices`."""
    return field(default=default, metadata={"choices": choices})


def _flag(default: bool | None) -> Any:
    """Return a bool field; None is allowed if it is the default."""
    return _choice(default, *dict.fromkeys((True, False, default)))


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's options; immutable. `engine.core.resolve` derives omitted values.

    Parameters
    ----------
    max_model_len : int, optional
        Maximum tokens per request, prompt plus output; by default the model's own limit.
    max_num_seqs : int, optional
        Maximum number of running requests; by default 256 on CUDA, 16 on the CPU.
    max_num_batched_tokens : int, optional
        Token budget of one step; by default 8192 on CUDA, 512 on the CPU.
    kv_cache_dtype : str
        "auto" uses the activations' dtype; "fp8" (e4m3) and "int8" quantize the KV cache to half
        the memory of 16 bits, with a scale per layer and KV head (`Model.set_kv_scales`).
    state_dtype : str
        Dtype of recurrent states: "float32", "bfloat16" (half the memory; each token rounds them),
        or "auto" = float32. For models with recurrent layers, as the next two options.
    num_state_snapshots : int, optional
        Number of snapshots of states for prefix caching; by default a quarter of the memory that
        the states of running requests leave.
    state_snapshot_interval : int
        Distance of these snapshots along a prompt, in tokens; 0 takes one only before a prompt's
        last token, where it parts from known prompts, and where its output ends.
    block_size : int
        Tokens per KV block: 16, 32, 64 or 128.
    num_blocks : int, optional
        Number of KV blocks; by default as many as fit, or as can ever be used.
    memory_utilization : float, optional
        Fraction of the device's memory for weights, activations and KV cache; by default 0.9 on
        CUDA, 0.5 on the CPU. vLLM's name `gpu_memory_utilization` is also accepted.
    seed : int
        Seed for requests that set none of their own.
    enable_prefix_caching : bool
        Keep computed prefixes, and share their blocks among requests with a common prefix.
    max_blocks_per_salt : int, optional
        Maximum blocks cached per `cache_salt`, so that no tenant can evict all others.
    max_prefill_chunk : int
        Maximum tokens per prompt in one step; 0 = limited by the budget only.
    max_draft_tokens : int
        Maximum draft tokens per request that one step verifies (`Scheduler.propose`); CUDA graphs
        are captured for steps without drafts and for steps with this many. 0 uses the number in
        `speculative_config`.
    speculative_config : mapping, callable or SpeculativeConfig, optional
        Source of drafts: vLLM's mapping, {"method": "ngram", "num_speculative_tokens": 8}, or a
        callable. None disables drafting.
    logits_processors : sequence of (callable or str), optional
        Applied to the logits of every request, before its own: functions as in
        `SamplingParams.logits_processors`, or "file.py:name".
    scheduling_policy : str
        "fcfs" = first come, first served; "lpm" = longest cached prefix first, within a window.
    priority_window : int
        Number of arrivals that one priority level outweighs; 0 ignores priorities.
    max_num_queued_requests, max_num_queued_tokens : int, optional
        Limits of the waiting queue; a request that would exceed them raises `QueueFullError`.
    watermark : float
        Fraction of the blocks an admission must leave free for running requests to grow into.
    swap_space_gb : float
        Host memory in GiB for blocks of preempted requests and evicted prefixes; 0 disables it.
    preemption_mode : str
        How to restore a preempted request: "recompute", "swap" or "auto" (the cheaper one).
    recompute_us_per_token, swap_us_per_block : float, optional
        Costs that "auto" compares, in microseconds: computing one prompt token, and swapping one
        block out and back in. Omitted costs are measured once, when the engine is constructed, so
        that decisions never depend on a clock while requests run.
    async_scheduling : bool, optional
        Launch each step before the previous one's token ids are on the host; outputs then arrive
        one step later. On by default on CUDA, off on the CPU.
    cuda_graphs : bool, optional
        Replay decode steps from CUDA graphs captured when the engine is constructed; if off, they
        are launched kernel by kernel. On by default on CUDA, unavailable on the CPU.
    step_timeout : float, optional
        Seconds after which a step counts as stuck and is logged with the engine's state.
    raise_on_timeout : bool
        Whether a stuck step also raises a `StepTimeoutError`.
    tensor_parallel_size : int
        Number of processes that share each layer, each on a GPU or on the CPU. `LLM`,
        `LLMEngine.from_name` and the commands start them.
    pipeline_parallel_size : int
        Number of stages that divide the layers, each with `tensor_parallel_size` processes. The
        engine's own process is the last stage; the others are started in the same way.
    pipeline_layers : sequence of int, or str, optional
        Number of layers of each stage, such as [17, 15] or "17,15"; by default as equal as
        possible. The last stage also has the output layer and samples.
    distributed_executor_backend : str, optional
        "ray" runs the other stages as actors in a Ray cluster, each on its own host if there are
        enough. "mp" (the default) runs them as processes on this host.
    pipeline_address : str, optional
        "HOST:PORT" that stages on other hosts connect to (`engine stage`); the engine then starts
        none itself.
    collective_timeout : float
        Seconds after which a collective that some process has not joined, or a step of pipeline
        stages that has not ended, ends all processes.
    lora_modules : mapping of str to str, or sequence of str, optional
        LoRA adapters to read at the start (`load`'s `enable_lora`): name -> path, or "NAME=PATH".
    debug : bool, optional
        Check all block tables before each step and all invariants after it, and fill freed blocks
        with NaN; slow. Defaults to `ENGINE_DEBUG`.

    Raises
    ------
    ConfigError
        If a value is out of range.
    UnknownOptionError
        If a keyword is not one of the above.

    Examples
    --------
    >>> EngineConfig(max_num_seqs=0)
    Traceback (most recent call last):
    ...
    engine.errors.ConfigError: max_num_seqs must be a whole number in [1, 65536], or None; got 0
    """

    max_model_len: int | None = _whole(None, 1, _INT32)
    max_num_seqs: int | None = _whole(None, 1, 2**16)
    max_num_batched_tokens: int | None = _whole(None, 1, _INT32)
    kv_cache_dtype: str = _choice("auto", *KV_CACHE_DTYPES)
    state_dtype: str = _choice("auto", *STATE_DTYPES)
    num_state_snapshots: int | None = _whole(None, 0, _INT32)
    state_snapshot_interval: int = _whole(4096, 0, _INT32)
    block_size: int = _whole(16, 16, 128)
    num_blocks: int | None = _whole(None, 1, _INT32)
    memory_utilization: float | None = _number(None, 0.0, 1.0, low_open=True)
    seed: int = _whole(0, 0, 2**63 - 1)
    enable_prefix_caching: bool = _flag(True)
    max_blocks_per_salt: int | None = _whole(None, 1, _INT32)
    max_prefill_chunk: int = _whole(0, 0, _INT32)
    max_draft_tokens: int = _whole(0, 0, MAX_QUERY_LEN - 1)
    speculative_config: Any = None
    logits_processors: Any = None
    scheduling_policy: str = _choice("fcfs", *POLICIES)
    priority_window: int = _whole(256, 0, _INT32)
    max_num_queued_requests: int | None = _whole(None, 1, 2**63 - 1)
    max_num_queued_tokens: int | None = _whole(None, 1, 2**63 - 1)
    watermark: float = _number(0.01, 0.0, 1.0)
    swap_space_gb: float = _number(0.0, 0.0, 2.0**20)
    preemption_mode: str = _choice("auto", *PREEMPTIONS)
    recompute_us_per_token: float | None = _number(None, 0.0, 1e12)
    swap_us_per_block: float | None = _number(None, 0.0, 1e12)
    async_scheduling: bool | None = _flag(None)
    cuda_graphs: bool | None = _flag(None)
    step_timeout: float | None = _number(None, 0.0, 1e9, low_open=True)
    raise_on_timeout: bool = _flag(False)
    tensor_parallel_size: int = _whole(1, 1, 64)
    pipeline_parallel_size: int = _whole(1, 1, 64)
    pipeline_layers: Any = None
    distributed_executor_backend: str | None = _choice(None, None, "mp", "ray")
    pipeline_address: str | None = None
    collective_timeout: float = _number(60.0, 0.0, 1e9, low_open=True)
    lora_modules: Any = None
    debug: bool | None = _flag(None)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], others: Iterable[str] = ()) -> EngineConfig:
        """Build from keywords; the error for an unknown keyword suggests the nearest known one.

        `others`: keywords the caller handles itself, also candidates for that suggestion.
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
        known = [*CONFIG_OPTIONS, "gpu_memory_utilization", *others]
        for name in given:
            if name not in CONFIG_OPTIONS:
                raise unknown_keyword("LLM", name, known)
        return cls(**given)

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, _checked(option, getattr(self, option.name)))
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {BLOCK_SIZES}; got {self.block_size}")
        speculative = SpeculativeConfig.from_option(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        if speculative is not None and not self.max_draft_tokens:
            object.__setattr__(self, "max_draft_tokens", speculative.num_tokens)
        if self.preemption_mode == "swap" and not self.swap_space_gb:
            raise ConfigError("preemption_mode='swap' needs a swap_space_gb above 0; got 0.0")
        if self.raise_on_timeout and self.step_timeout is None:
            raise ConfigError("raise_on_timeout needs a step_timeout; got None")
        processors = _processors(self.logits_processors)
        object.__setattr__(self, "logits_processors", processors)
        object.__setattr__(self, "lora_modules", _modules(self.lora_modules))
        object.__setattr__(self, "pipeline_layers", stage_sizes(self.pipeline_layers))
        self._check_pipeline()

    @property
    def is_one_host(self) -> bool:
        """Whether this process starts all ranks and stages on its host."""
        return self.pipeline_address is None and self.distributed_executor_backend != "ray"

    def _check_pipeline(self) -> None:
        """Reject options that contradict the number of pipeline stages."""
        size = self.pipeline_parallel_size
        layers = self.pipeline_layers
        if layers is not None and size == 1:
            raise ConfigError(
                "pipeline_layers must be left out with pipeline_parallel_size=1; got "
                f"{shown(list(layers))}"
            )
        if layers is not None and len(layers) != size:
            raise ConfigError(
                f"pipeline_layers must be {size} numbers, one for each stage "
                f"(pipeline_parallel_size); got {shown(list(layers))}"
            )
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
        try:
            if where is not None:
                parse_address(where)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"pipeline_address: {error}") from None


CONFIG_OPTIONS = dict(inspect.signature(EngineConfig).parameters)
"""Fields of `EngineConfig`, as keywords of `LLM` and `LLMEngine`."""


def _processors(given: Any) -> tuple[Any, ...]:
    """Return the logits processors, loaded if they are given as "file.py:name"."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(
            f"logits_processors must be a sequence of functions; got {shown_with_type(given)}"
        )
    name = "logits_processors"
    loaded = tuple(load_place(name, one) if isinstance(one, str) else one for one in given)
    for one in loaded:
        if not callable(one):
            raise ConfigError(f"logits_processors must be functions; got {shown_with_type(one)}")
    return loaded


def _modules(given: Any) -> dict[str, str]:
    """Return LoRA adapters as name -> path.

    Raises
    ------
    ConfigError
        If they are given in another way, or two have one name.
    """
    if given is None:
        return {}
    pairs: list[tuple[Any, ...]]
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [tuple(one.split("=", 1)) if isinstance(one, str) else (one,) for one in given]
    else:
        pairs = list(given.items()) if isinstance(given, Mapping) else [(given,)]
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(one, str | PathLike) and str(one) for one in pair):
            raise ConfigError(
                f"lora_modules must map names to paths, or be NAME=PATH; got {shown(given)}"
            )
    found = {str(name): str(path) for name, path in pairs}
    if len(found) < len(pairs):
        raise ConfigError(f"lora_modules must have different names; got {shown(given)}")
    return found


def _checked(option: Field[Any], value: Any) -> Any:
    """Return a field's value, with numbers converted to the field's type.

    Raises
    ------
    ConfigError
        If the value is outside the field's range or choices.
    """
    if (allowed := option.metadata.get("range")) is not None:
        try:
            return allowed.check(option.name, value)
        except RequestError as error:
            raise ConfigError(str(error)) from None
    if (choices := option.metadata.get("choices")) is None:
        return value
    # Compare types too: 1 == True, but 1 is not a flag.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        wanted = ", ".join(map(repr, choices))
        raise ConfigError(f"{option.name} must be one of {wanted}; got {shown(value)}")
    return value
