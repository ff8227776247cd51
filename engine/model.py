"""`load` and `Model`: arrays in, arrays out.

    model = engine.load("smollm2")
    cache = model.new_cache(batch_size=1, max_tokens=512)
    logits = model.step([model.tokenizer.encode("Hello")], cache)  # (1, V) float32

Logits are NumPy arrays on the CPU and CuPy arrays on a GPU.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, Literal, NoReturn

import numpy as np

from engine import threads
from engine.cache.array_cache import Cache
from engine.cache.kv_cache import KVCache, KVGeometry, quantized_kv_dtype
from engine.cache.pinned_memory import pinned_array
from engine.cache.state_plan import CacheSizes
from engine.cache.swap import SwapSpace
from engine.checks import check_count, is_integer, shown
from engine.config import ModelConfig
from engine.device import Device, cupy, resolve_device, to_numpy
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import (
    ConfigError,
    EngineError,
    RequestError,
    WeightsError,
    unknown_keyword,
)
from engine.kernels._cpu import compiled
from engine.kernels._override.scope import ModelKernels
from engine.kernels._override.table import Overrides
from engine.layers.batch import ForwardBatch
from engine.layers.collectives import Collectives
from engine.layers.lora import NO_ADAPTER
from engine.layers.sampler import Sampler, SamplingBatch
from engine.layers.token_ids import checked_sequence, checked_token_ids
from engine.loading import page_calibration
from engine.loading.attention_pattern import layer_patterns
from engine.loading.classifier import read_classifier
from engine.loading.decoder import check_arguments, load_decoder
from engine.loading.download import ModelSource, resolve_model
from engine.loading.generation_config import sampling_defaults
from engine.loading.gguf import GgufFile
from engine.loading.host_copies import HostCopies
from engine.loading.load_config import LoadConfig, resolve_load_config
from engine.loading.lora import LoraAdapter, read_adapter
from engine.loading.model_config import load_config
from engine.loading.parked_decoder import ParkedDecoder, check_level
from engine.loading.pooling import default_pooling
from engine.loading.text_model import wrapper_of
from engine.loading.weight_update import WeightUpdate, open_update
from engine.model_files import is_present
from engine.models.chunks import active_chunk
from engine.models.decoder import Decoder, Pages
from engine.models.draft_heads import DraftTarget
from engine.models.kernel_set import prepare_quantized_kv
from engine.models.trace import Trace, trace_decoder
from engine.models.wrappers import text_name
from engine.runner.cuda_graph import DecodeGraphs
from engine.sampling_params import SamplingDefaults
from engine.signatures import takes_keywords
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.weights import ALL_LAYERS, Stage

__all__ = ["LOAD_OPTIONS", "Cache", "LoadConfig", "Model", "load"]

# Tokens per forward pass of `step`; longer inputs are split to bound activation memory.
_MAX_STEP_TOKENS = {"cpu": 512, "cuda": 8192}


# `load` stays beside the class it builds, since they are read together, and because a module
# `engine.load` would shadow the function.
@takes_keywords()
def load(
    model: str | PathLike[str] = "smollm2",
    *,
    device: str | Device = "auto",
    dtype: str = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    max_model_len: int | None = None,
    quantization: str | None = None,
    deterministic: bool = False,
    enable_expert_parallel: bool = False,
    enable_lora: bool = False,
    max_loras: int = 8,
    max_lora_rank: int = 16,
    kernels: Mapping[str, Any] | None = None,
    attention_pattern: Any = None,
    progress: bool | None = None,
    config: ModelConfig | None = None,
    collectives: Collectives | None = None,
    stage: Stage = ALL_LAYERS,
    **unknown: NoReturn,
) -> Model:
    """Load a model, or one rank's shard of it.

    Parameters
    ----------
    model : str or path
        "smollm2", a directory in Hugging Face layout, a .gguf file, or a hub id.
    device : str
        "cpu", "cuda", "cuda:<index>" or "auto" (CUDA if available; prints the choice on stderr).
        "cuda" never falls back to the CPU.
    dtype : str
        "float32", "float16", "bfloat16" (or the NumPy type of that name), or "auto": float32 on the
        CPU; on CUDA the checkpoint's dtype if it is float16 or bfloat16, otherwise bfloat16.
    load_format : str
        "auto" reads the weights; "dummy" generates random ones and needs only a configuration.
    max_model_len : int, optional
        Maximum tokens per sequence; by default, and at most, the model's own limit.
    quantization : str, optional
        Quantize the layers' matrices while reading them, one at a time: "fp8" or "int8" (both GEMM
        operands in 8 bits), "int4" (in groups of 128), or another format of
        `docs/quantization.md`. Embeddings and output layer keep `dtype`, except that the formats of
        .gguf files ("q8_0", "q6_k", "q4_0") quantize the output layer to "q6_k" ("q8_0" with
        "q8_0"), as such files do. None keeps the files' formats if products can read them: in
        16 bits on CUDA all; in float32 on the CPU all but those of experts; else only "fp8" and
        "int8". "none" dequantizes, as does `deterministic` on the CPU.
    deterministic : bool
        Batch invariance: a token's logits have the same bits in any batch, at any chunk size and
        after any recomputation, because no kernel's summation order depends on the batch. Slower
        for small batches.
    enable_expert_parallel : bool
        With several ranks, divide the experts among the ranks instead of dividing every expert.
    enable_lora : bool
        Reserve memory for LoRA adapters, which requests may name (`LoRARequest`).
    max_loras : int
        Number of adapters that one step may use.
    max_lora_rank : int
        Largest rank of an adapter.
    kernels : mapping of str to (callable or str), optional
        Overrides: op of the catalog -> the function that runs in its place in this model, or
        "file.py:name". See `engine.kernels.override`.
    attention_pattern : Periodic, BlockSparse, mapping of int to such, or str, optional
        Further restricts the keys that a query sees by their positions, in prefill and in decode:
        in all layers with full attention, or in the layers of the mapping. Every token is then
        computed by `engine.kernels.attention_prefill`; the KV cache cannot be quantized.
    progress : bool, optional
        Show progress bars on stderr; by default only if stderr is a terminal.
    config : ModelConfig, optional
        Replaces the model's own configuration. With load_format="dummy", `model` is then ignored
        and no files are needed.
    collectives : Collectives, optional
        Collectives between tensor-parallel ranks: each rank loads its shard of the weights, and all
        ranks must then make the same calls to the model's methods.
    stage : Stage
        Layers to load, for a pipeline stage. A stage computes only within an engine.

    Returns
    -------
    Model

    Raises
    ------
    UnknownOptionError
        If a keyword is not one of the above.
    DeviceError, ConfigError, WeightsError, DownloadError, OutOfMemoryError
        If the device is unavailable, or the configuration or the files cannot be used.
    CompileError
        If kernels cannot be compiled, on the CPU by the compiler that `ENGINE_CC` names.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> model = load(config=config, load_format="dummy", device="cpu")
    >>> cache = model.new_cache(batch_size=2, max_tokens=16)
    >>> model.step([[1, 2, 3], [4, 5, 6]], cache).shape
    (2, 64)
    """
    for name in unknown:
        raise unknown_keyword("load", name, LOAD_OPTIONS)
    check_arguments(model, load_format, config)
    overrides = Overrides.from_option(kernels)
    show = sys.stderr.isatty() if progress is None else progress
    place, why = resolve_device(device)
    source = None
    if config is None or load_format == "auto":
        source = resolve_model(model, progress=show)
        config = config or load_config(source)
    options = resolve_load_config(
        config,
        source,
        (place, why),
        dtype,
        load_format,
        max_model_len,
        quantization,
        deterministic,
        enable_expert_parallel,
        enable_lora,
        max_loras,
        max_lora_rank,
    )
    if not place.is_cuda:
        features = 2 * max(config.intermediate_size, config.hidden_size)
        threads.choose((features, config.hidden_size))
        if options.dtype == "float32":
            compiled.kernels()  # compiled now, not during the first request
    if device == "auto":
        what = f"{place} ({why})"
        if not place.is_cuda:
            what += f", {threads.current()}, {compiled.description()}"
        print(f"engine: device {what}, dtype {options.dtype}", file=sys.stderr)
    decoder = load_decoder(
        source,
        config,
        options,
        collectives,
        stage=stage,
        model_kernels=ModelKernels(overrides),
        patterns=layer_patterns(attention_pattern, config, options),
        progress=show,
    )
    loaded = Model(decoder, options, source)
    if collectives is None and stage == ALL_LAYERS:
        loaded.try_kernels()
    return loaded


_OF_A_RANK = ("collectives", "stage")  # set by `engine.parallel`, for one process of several
LOAD_OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(load).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in _OF_A_RANK
}
"""Keywords of `load` that `LLM` accepts too."""


class Model:
    """A loaded model, built by `load`. `source` is its directory or file, None without files.

    `new_cache` and `step` compute on arrays; the engine's runner calls `forward` and related
    methods. Methods that concern other ranks do nothing here; multi-rank models override them.

    Attributes
    ----------
    config : ModelConfig
    load_config : LoadConfig
        Device, dtype and maximum length, with reasons.
    num_ranks : int
        Number of tensor-parallel ranks.
    num_stages : int
        Number of pipeline stages.
    feature_layers : tuple of int
        Target layers whose inputs the model reads as a draft; only draft heads read any.
    classifier : Classifier or None
        The head of a model that classifies texts, in place of an output layer.
    """

    num_ranks = 1
    num_stages = 1
    feature_layers: tuple[int, ...] = ()

    def __init__(
        self, decoder: Decoder, load_config: LoadConfig, source: ModelSource | None = None
    ) -> None:
        self._decoder: Decoder | None = decoder
        self._parked: ParkedDecoder | None = None  # None unless the model sleeps
        self._host_copies = HostCopies(load_config.device)  # weights of a sleeping model
        self._earlier_expert_load: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self.config = decoder.config
        self.load_config = load_config
        self.source = source
        self.classifier = None
        if source is not None and load_config.load_format != "dummy":
            self.classifier = read_classifier(source.path, decoder.config.hidden_size)

    @property
    def decoder(self) -> Decoder:
        """The layers and their weights."""
        if self._decoder is None:
            if self._parked is not None:
                raise EngineError("the model is asleep, wake it up first")
            raise RequestError(f"{self!r} was closed")
        return self._decoder

    @property
    def kernels(self) -> ModelKernels:
        """Overrides of ops (`load`'s `kernels`), and how often each kernel ran in this process."""
        return self.decoder.kernels

    @property
    def whole_config(self) -> ModelConfig:
        """Architecture of the whole model, of which `config` may be a shard or a stage."""
        config, _ = self.decoder.parts.whole(self.config)
        return config

    @property
    def has_patterns(self) -> bool:
        """Tell whether some layers have an attention pattern, by `load`'s option or by chunks.

        Layers of other pipeline stages count.
        """
        config = self.whole_config
        layers = range(config.num_layers)
        has_chunks = any(active_chunk(config, layer, self.max_model_len) for layer in layers)
        return has_chunks or bool(self.decoder.patterns)

    @property
    def draft_target(self) -> DraftTarget:
        """Parts of the model that draft heads use, such as embeddings and output layer."""
        return self.decoder

    @property
    def name(self) -> str:
        """Name of the directory or file; "dummy" if the weights are random."""
        return self.source.path.name if self.source else "dummy"

    @property
    def device(self) -> Device:
        """Device that holds the weights and runs all computation."""
        return self.load_config.device

    @property
    def dtype(self) -> str:
        """Dtype of weights, activations and an unquantized KV cache, by name."""
        return self.load_config.dtype

    @property
    def max_model_len(self) -> int:
        """Maximum tokens per sequence."""
        return self.load_config.max_model_len

    @property
    def long_rope_offset(self) -> int:
        """First row of longrope's long factors in the rope table; 0 without longrope."""
        return self.decoder.long_rope_offset

    @property
    def short_rope_len(self) -> int:
        """Longest sequence that uses longrope's short factors, in tokens; 0 without longrope."""
        return self.decoder.short_rope_len

    @property
    def deterministic(self) -> bool:
        """Whether the model was loaded with `deterministic=True`."""
        return self.decoder.deterministic

    @property
    def num_adapter_slots(self) -> int:
        """Number of LoRA adapters that one step may use; 0 without `enable_lora`."""
        adapters = self.decoder.adapters
        return 0 if adapters is None else adapters.num_slots

    @property
    def adapter_kinds(self) -> tuple[str, ...]:
        """Kinds of the weights ("qkv") that adapters written so far change, sorted."""
        adapters = self.decoder.adapters
        return () if adapters is None else tuple(sorted(adapters.kinds))

    @property
    def captured_adapter_kinds(self) -> tuple[str, ...]:
        """Kinds of the weights in graphs with adapters that are captured at load; (): no graphs.

        Products without an adapter's matrices add zeros then, which may round otherwise: not in
        deterministic mode.
        """
        adapters = self.decoder.adapters
        if adapters is None or self.deterministic:
            return ()
        return tuple(sorted({name.rpartition(".")[2] for name in adapters.products}))

    def read_adapter(self, name: str, path: str | PathLike[str]) -> LoraAdapter:
        """Read a LoRA adapter in peft's format to host memory. See `loading.lora.read_adapter`.

        Raises
        ------
        ConfigError, WeightsError
            If the model was loaded without `enable_lora`, or the adapter does not fit it.
        """
        decoder = self.decoder
        if decoder.adapters is None:
            raise ConfigError(f"adapter {shown(name)} needs a model loaded with enable_lora=True")
        products = decoder.adapters.products
        biases = {
            weight: decoder.weights[f"{weight}_bias"].data
            for weight in products
            if f"{weight}_bias" in decoder.weights
        }
        config, shard = decoder.parts.whole(self.config)
        if not self.device.is_cuda:
            return read_adapter(name, path, config, products, shard, biases)
        return read_adapter(name, path, config, products, shard, biases, self._pinned)

    def _pinned(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return page-locked memory; callable from any thread."""
        self.device.activate()
        return pinned_array(num_bytes, self.device.xp)

    @property
    def num_adapter_writes(self) -> int:
        """Number of times that an adapter was written to a slot, by whichever engine."""
        adapters = self.decoder.adapters
        return 0 if adapters is None else adapters.num_writes

    def write_adapter(self, adapter: LoraAdapter, slot: int) -> None:
        """Copy an adapter to a slot on the device, in the order of the current stream.

        Parameters
        ----------
        adapter : LoraAdapter
            Result of `read_adapter`.
        slot : int
            From 0 to `num_adapter_slots` - 1.

        Raises
        ------
        ConfigError
            If the model has no such slot: none without `enable_lora`, else `max_loras`.
        """
        adapters = self.decoder.adapters
        count = self.num_adapter_slots
        if adapters is None or not (is_integer(slot) and 0 <= slot < count):
            raise ConfigError(f"slot must be in [0, {count}) (max_loras); got {shown(slot)}")
        adapters.write(int(slot), adapter.matrices)

    def update_weights(self, source: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, ...]:
        """Write new weights over the model's, in place; the arrays may change once it returns.

        The scales of a quantized KV cache stay; see `calibrate_kv_scales`.

        Parameters
        ----------
        source : str or path, or mapping of str to array
            A folder with safetensors, or arrays by their names in a Hugging Face checkpoint: NumPy,
            CuPy, or with `__dlpack__`. Tensors may be left out; a matrix that the option
            `quantization` quantized needs all its parts, and is quantized anew.

        Returns
        -------
        tuple of str
            Names of the weights that have changed.

        Raises
        ------
        WeightsError
            If a tensor is not the model's, has another shape or, in float16, infinite values; then
            nothing is written.
        EngineError
            If the files cannot be read any more while the weights are written.
        """
        if self.classifier is not None:
            raise WeightsError("the weights of a model with a classification head cannot change")
        return self.write_update(self.opened_update(source))

    def write_update(self, update: WeightUpdate) -> tuple[str, ...]:
        """Write checked weights, and return their names. See `update_weights`."""
        try:
            update.write()
        finally:
            self.decoder.refresh(update.names)
        return update.names

    def opened_update(self, source: str | PathLike[str] | Mapping[str, Any]) -> WeightUpdate:
        """Check new weights; see `update_weights`."""
        decoder = self.decoder
        config, shard = decoder.parts.whole(self.config)
        is_folder = self.source is not None and self.source.path.is_dir()
        wrapper = wrapper_of(self.source.path) if self.source is not None and is_folder else None
        return open_update(
            source,
            config,
            decoder.weights,
            self.device,
            self.load_config.quantization,
            shard,
            text_name if wrapper is None else wrapper.text_name,
        )

    @cached_property
    def weight_bytes(self) -> int:
        """Size of the weights and rope tables on the device, in bytes."""
        return self.decoder.num_bytes

    @property
    def has_tokenizer(self) -> bool:
        """Tell whether the model's files include a tokenizer."""
        source = self.source
        return source is not None and (
            source.kind == "gguf" or is_present(source.path / "tokenizer.json")
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded on first use.

        Raises
        ------
        ConfigError
            If the model was built from a configuration alone.
        """
        if self.source is None:
            raise ConfigError("the model has no tokenizer: it was made from a configuration alone")
        if self.source.kind == "gguf":
            return load_tokenizer(GgufFile(self.source.path).metadata)
        return load_tokenizer(self.source.path)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: the configuration's, then the tokenizer's end-of-turn ids."""
        own = self.tokenizer.eos_token_ids if self.has_tokenizer else ()
        found = dict.fromkeys((*self.config.eos_token_ids, *own))
        # The tokenizer's files may name others, which the configuration has warned of.
        return tuple(one for one in found if one < self.config.vocab_size)

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters of requests that leave them out; none without files."""
        if self.source is None:
            return SamplingDefaults()
        return sampling_defaults(self.source.path)

    @cached_property
    def pooling(self) -> str:
        """Pooling of embeddings whose request names none: "last" without files."""
        return "last" if self.source is None else default_pooling(self.source.path)

    @property
    def kv_scales(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Key and value scales of an "fp8" KV cache, (num_layers, 2, K), on the host."""
        return self.kv_scales_of("fp8")

    def kv_scales_of(self, kv_cache_dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the scales of an "fp8" or "int8" KV cache, (num_layers, 2, K), on the host."""
        decoder = self.decoder
        codes = quantized_kv_dtype(kv_cache_dtype)
        return np.array(to_numpy(decoder.parts.all_kv_heads(decoder.kv_scales.of(codes))))

    def set_kv_scales(self, scales: Any, kv_cache_dtype: str = "fp8") -> None:
        """Set the scales of the "fp8" or "int8" KV cache, and the other's to the same range.

        Invalidates caches filled before the call.

        Parameters
        ----------
        scales : (num_layers, 2, K) array_like of float
            For the keys and values of each head, above 0, on the host.
        kv_cache_dtype : str
            "fp8" or "int8": whose scales they are.

        Raises
        ------
        ConfigError
            If an argument is invalid.
        """
        own = self.decoder.parts.own_kv_heads
        codes = quantized_kv_dtype(kv_cache_dtype)
        self.decoder.kv_scales.set(scales, codes, "set by set_kv_scales", heads=own)

    def calibrate_kv_scales(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Calibrate the KV-cache scales: largest key and value magnitude per head, over sequences.

        Parameters
        ----------
        token_ids : sequence of sequences of int
            Sequences typical of the model's use.

        Raises
        ------
        RequestError
            If `token_ids` is empty, a sequence is empty or too long, or an id is outside [0, V).

        Notes
        -----
        A scale is the largest magnitude divided by the largest code, 448 for e4m3 or 127 for int8;
        it is 1 if all values are zero. Keys and values beyond the calibrated range saturate.
        """
        page_calibration.calibrate(self, self.decoder.kv_scales, token_ids)

    def prepare_pages(self, dtype: str) -> str:
        """Load the kernels for a quantized KV cache, and calibrate "int8" scales if missing.

        Returns the origin of the scales; "" if `dtype` is not quantized.
        """
        if dtype not in KV_CODE_DTYPES:
            return ""
        if self.has_patterns:
            raise ConfigError(
                "kv_cache_dtype must be 'auto' with an attention_pattern, or with chunks shorter "
                f"than max_model_len: its kernel reads no quantized keys; got {dtype}"
            )
        prepare_quantized_kv(
            self.config, self.dtype, dtype, self.device, deterministic=self.deterministic
        )
        return page_calibration.ensure_scales(self, self.decoder.kv_scales, dtype)

    def stage_sizes(
        self, options: Mapping[str, Any], feature_layers: Sequence[int]
    ) -> list[CacheSizes]:
        """Return what each other stage has room for.

        `options` are the fields of `EngineConfig`, `feature_layers` the layers that a draft head
        reads. A single-process model has no other stages.
        """
        return []

    def share_pages(self, kv_cache: KVCache, swap: SwapSpace | None) -> None:
        """Have the other ranks allocate the same KV cache; no-op in a single process."""

    @property
    def local_model(self) -> Model:
        """This process's shard; its forward passes are not announced to other ranks."""
        return self

    def share_graphs(self, graphs: DecodeGraphs, max_model_len: int, max_draft_tokens: int) -> None:
        """Have the other ranks capture the same graphs; no-op in a single process."""

    def check_ranks(self) -> None:
        """Verify that all ranks are alive; no-op in a single process."""

    def describe_ranks(self) -> str:
        """Describe the state of the other ranks; "" in a single process."""
        return ""

    def new_cache(
        self,
        batch_size: int,
        max_tokens: int,
        *,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        state_dtype: str = "auto",
        adapter_slots: Sequence[int | None] | None = None,
    ) -> Cache:
        """Return an empty paged KV cache, one sequence per row.

        Parameters
        ----------
        batch_size : int
            Number of rows.
        max_tokens : int
            Maximum tokens per row, up to `max_model_len`.
        block_size : int
            Tokens per page: 16, 32, 64 or 128.
        kv_cache_dtype : str
            "auto" is the model's dtype; "fp8" and "int8" quantize the cache (`prepare_pages`).
        state_dtype : str
            Dtype of recurrent states: "float32", "bfloat16", or "auto" = float32.
        adapter_slots : sequence of (int or None), optional
            Slot of the LoRA adapter that computes each row (`write_adapter`); None: no adapter.

        Raises
        ------
        ConfigError, OutOfMemoryError
            If a number is out of range, or the cache does not fit.
        """
        check_count("batch_size", batch_size, 2**20)
        check_count("max_tokens", max_tokens, self.max_model_len)
        geometry = KVGeometry.of_model(
            self.config, self.dtype, block_size, kv_cache_dtype, state_dtype
        )
        self.prepare_pages(geometry.dtype)
        slots = self._checked_slots(adapter_slots, batch_size)
        cache = self.make_cache(geometry, batch_size, max_tokens)
        cache.adapter_slots = slots
        return cache

    def _checked_slots(self, slots: Any, batch_size: int) -> np.ndarray[Any, Any] | None:
        """Return the adapter slot of each row of a cache; None if no row has an adapter."""
        if slots is None:
            return None
        given = list(slots)
        count = self.num_adapter_slots
        if count == 0 and any(one is not None for one in given):
            raise ConfigError("adapter_slots needs a model loaded with enable_lora=True")
        is_fine = all(one is None or (is_integer(one) and 0 <= one < count) for one in given)
        if len(given) != batch_size or not is_fine:
            raise ConfigError(
                f"adapter_slots must be {batch_size} slots in [0, {count}), or None; got "
                f"{shown(slots)}"
            )
        return np.array([NO_ADAPTER if one is None else one for one in given], np.int32)

    def make_cache(self, geometry: KVGeometry, batch_size: int, max_tokens: int) -> Cache:
        """Return an empty `Cache`. Checks nothing; the kernels must already be loaded."""
        cache = Cache(geometry, batch_size, max_tokens, self.device, owner=self.load_config)
        if 0 < self.short_rope_len < max_tokens:
            cache.keep_token_ids()
        return cache

    def step(self, token_ids: Any, cache: Cache, logits: Literal["last", "all"] = "last") -> Any:
        """Append tokens to every row of a cache and return logits.

        Parameters
        ----------
        token_ids : (B, T) array of any int dtype, or nested list
            NumPy, CuPy, or any object with `__dlpack__` or `__cuda_array_interface__`; T >= 1. The
            ids are checked on the host, so a CUDA array costs a synchronization.
        cache : Cache
            Created by this model's `new_cache`, with B rows; T tokens are appended to each.
        logits : str
            "last" returns logits for the last token of each row, "all" for every token.

        Returns
        -------
        (B, V) or (B, T, V) array of float32
            On the model's device.

        Raises
        ------
        RequestError
            If an id is outside [0, V), the shape is wrong, or the cache is too small. The cache
            then stays unchanged.

        Notes
        -----
        Longrope models rotate all keys of a row by its length after the call: with the short
        factors up to the training length, with the long factors beyond. The call that crosses it
        computes the row's earlier tokens anew.
        """
        if not isinstance(logits, str) or logits not in ("last", "all"):
            raise RequestError(f"logits must be 'last' or 'all'; got {shown(logits)}")
        if not isinstance(cache, Cache) or cache.owner is not self.load_config:
            raise RequestError("cache must be made by this model's new_cache")
        ids = checked_token_ids(token_ids, cache.batch_size, self.config.vocab_size)
        num_new = ids.shape[1]
        cache.check_room(num_new)
        self._rotate_anew(cache, num_new)
        chunk = max(1, _MAX_STEP_TOKENS[self.device.kind] // cache.batch_size)
        results = []
        for start in range(0, num_new, chunk):
            part = ids[:, start : start + chunk]
            is_wanted = logits == "all" or start + chunk >= num_new
            results.append(self._advance(part, cache, start, logits if is_wanted else "none"))
        cache.append(num_new, ids)
        if logits == "last":
            return results[-1]
        parts = [r.reshape(cache.batch_size, -1, r.shape[-1]) for r in results]
        return parts[0] if len(parts) == 1 else self.device.xp.concatenate(parts, axis=1)

    def try_kernels(self) -> None:
        """Run the overridden ops in prefills and decodes: compile them, find errors now.

        Some ops differ for one token and several.

        Raises
        ------
        EngineError
            If an override does not suit the model; the message names the op.
        """
        if not self.kernels.overrides:
            return
        with self.kernels.loading():
            # Experts of some formats multiply codes of x from nine tokens on.
            num_tokens = 2 if self.config.moe is None else 9
            for batch in (1, 2):
                cache = self.new_cache(batch, min(num_tokens + 1, self.max_model_len))
                logits = self.step([[0] * (cache.max_tokens - 1 or 1)] * batch, cache)
                if cache.max_tokens > 1:
                    self.step([[0]] * batch, cache)
                cache.close()
            Sampler()(logits[:1], SamplingBatch.greedy(self.device.xp, 1))
        self.kernels.overrides.warn_of_kept(self.kernels.runs)
        self.kernels.overrides.warn_of_unused(self.kernels.runs)
        self.kernels.runs.clear()

    def forward(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute one step on flat arrays, unchecked.

        Parameters
        ----------
        batch : ForwardBatch
            T tokens, on the model's device.
        kv_pages : sequence of tuples of array
            Per layer (k_pages, v_pages), both (P, K, block_size, D), or its states; written to.
            See `Decoder.forward`.

        Returns
        -------
        (R, V) array of float32
            Logits of the tokens `batch.logits_indices`, or of all T tokens.

        Raises
        ------
        RequestError, EngineError
            If the model was closed, or is asleep.
        """
        self.device.activate()
        return self.decoder.forward(batch, kv_pages)

    def hidden_states(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute one step up to the final norm; arguments and errors as for `forward`.

        Returns
        -------
        (R, N) array of the model's dtype
            Outputs of the final norm of the tokens `batch.logits_indices`, or of all T tokens.
        """
        self.device.activate()
        return self.decoder.hidden_states(batch, kv_pages)

    def run_stage(self, batch: ForwardBatch, kv_pages: Pages) -> tuple[Any, Any]:
        """Compute the layers of a stage before the last; arguments and errors as for `forward`.

        Returns
        -------
        (delta, residual) : (T, N) arrays of the model's dtype
            `ForwardBatch.entering` of the next stage; delta may be None.
        """
        self.device.activate()
        return self.decoder.run_stage(batch, kv_pages)

    def logits(self, hidden: Any) -> Any:
        """Return the logits (R, V) float32 for R rows of `hidden_states`."""
        return self.decoder.logits(hidden)

    def expert_load(self) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
        """Return the number of tokens routed to each expert since the model was loaded.

        Returns
        -------
        dict of int to (E,) array of int64
            By layer; empty for a dense model. After `close`, or while it sleeps, that of the last
            `sleep`. See `Decoder.expert_load`.
        """
        earlier = self._earlier_expert_load
        if self._decoder is None or self.config.moe is None:
            return dict(earlier)
        self.device.activate()
        layers = [i for i in range(self.config.num_layers) if self.config.moe_of(i) is not None]
        found = zip(layers, self._decoder.expert_load(), strict=True)
        return {layer: counts + earlier.get(layer, 0) for layer, counts in found}

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """Range [first, last) of experts per rank; () if each rank holds a shard of all."""
        return () if self._decoder is None else self._decoder.parts.expert_runs

    def trace(self, token_ids: Any) -> Trace:
        """Run one sequence, recording attention weights and residual streams.

        Parameters
        ----------
        token_ids : (T,) array or list of int
            One sequence.

        Returns
        -------
        Trace

        Raises
        ------
        RequestError
            If an id is outside [0, V).
        DeviceError
            If the model is not on the CPU.
        """
        ids = checked_sequence(token_ids, self.config.vocab_size)
        return trace_decoder(self.decoder, ids)

    def read_residual(self, hidden: Any) -> Any:
        """Return the logits (T, V) of residual streams (T, N), as if they left the last layer."""
        return self.logits(self.decoder.final_norm(hidden))

    def _advance(
        self, ids: Any, cache: Cache, offset: int, logits: Literal["last", "all", "none"]
    ) -> Any:
        batch = ForwardBatch.build(
            ids,
            (cache.lengths + offset).tolist(),
            cache.block_tables,
            cache.block_size,
            logits=logits,
            rope_offset=cache.rope_offsets,
            state_slots=cache.state_slots,
            adapter_slots=cache.adapter_slots,
        )
        return self.forward(batch.to(self.device), cache.pages)

    def _rotate_anew(self, cache: Cache, num_new: int) -> None:
        """Compute the tokens of rows anew that need other rope factors with `num_new` more."""
        wanted = self.decoder.rope_offsets(cache.lengths + num_new)
        chunk = _MAX_STEP_TOKENS[self.device.kind]
        for row in np.flatnonzero(wanted != cache.rope_offsets).tolist():
            cache.rope_offsets[row] = -1  # no key is valid until all are rotated
            ids = cache.token_ids[row : row + 1, : cache.lengths[row]]
            for start in range(0, ids.shape[1], chunk):
                batch = ForwardBatch.build(
                    ids[:, start : start + chunk],
                    [start],
                    cache.block_tables[row : row + 1],
                    cache.block_size,
                    logits="none",
                    rope_offset=wanted[row],
                    state_slots=None
                    if cache.state_slots is None
                    else cache.state_slots[row : row + 1],
                    adapter_slots=None
                    if cache.adapter_slots is None
                    else cache.adapter_slots[row : row + 1],
                )
                self.forward(batch.to(self.device), cache.pages)
            cache.rope_offsets[row] = wanted[row]

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and adapters until `wake_up`; everything else stays.

        Parameters
        ----------
        level : int
            1 copies the weights to host memory. On CUDA that memory is page-locked, and kept for
            the next sleep until one at level 2 or `close`. 2 drops the weights: `wake_up` reads
            the checkpoint again.

        Raises
        ------
        ConfigError
            If the model has several ranks or stages, or `level` is neither 1 nor 2.
        OutOfMemoryError
            If the host has no room for the weights; the model stays awake.
        EngineError
            If it sleeps already.
        """
        check_level(level)
        if self.num_ranks * self.num_stages > 1:
            raise ConfigError(
                "sleep needs a model in one process; got "
                f"{self.num_ranks} tensor-parallel ranks and {self.num_stages} pipeline stages"
            )
        decoder = self.decoder
        if level == 2:
            self._host_copies.free()
        adapted = () if decoder.adapters is None else decoder.adapters.products.values()
        found = (
            array for each in (*decoder.weights.values(), *adapted) for _, array in each.arrays()
        )
        arrays = [weakref.ref(array) for array in found]
        self._parked = ParkedDecoder(decoder, self._host_copies if level == 1 else None)
        self._earlier_expert_load = self.expert_load()
        del decoder, adapted, found
        self._decoder = None
        if any(array() is not None for array in arrays):
            gc.collect()  # it takes as long as copying gigabytes
        self.free_cached_memory()

    def wake_up(self) -> None:
        """Bring back the weights and adapters that `sleep` has freed; if awake, do nothing.

        Raises
        ------
        OutOfMemoryError, WeightsError
            If the device has no room, or the checkpoint cannot be read; the model stays asleep.
        """
        if self._parked is not None:
            self._decoder = self._parked.build(self.source, self.config, self.load_config)
            self._parked = None

    def close(self) -> None:
        """Free the weights; the model cannot be used afterwards."""
        self._parked = None
        self._host_copies.free()
        self._decoder = None
        self.free_cached_memory()

    def free_cached_memory(self) -> None:
        """Return the memory that CuPy keeps for later to the device; on the CPU, do nothing."""
        if self.device.is_cuda:
            self.device.activate()
            cupy().get_default_memory_pool().free_all_blocks()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.config.model_type} {self.name!r} {self.dtype} on {self.device}>"
