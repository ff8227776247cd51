"""Attention backend of vLLM on the engine's paged kernels: decode, prefill and mixed batches.

vLLM sorts the requests that decode to the front of a batch. They go to `attention_decode`, the
rest, chunks of prompts, to `attention_prefill`; both read vLLM's pages where they lie. Nothing here
reads device memory, so the host never waits. A batch that only decodes can be captured in a CUDA
graph and padded: a request of length 0 has result 0.

Per layer the cache is one tensor (P, 2 K, block_size, D): the key heads, then the value heads. A
head's tokens in a page are adjacent, which the kernels prefer; they accept every other layout.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from engine.dtypes import dtype_name
from engine.errors import ConfigError
from engine.integrations.torch._tensors import DTYPES
from engine.integrations.vllm import _calls
from engine.kernels._attention import BLOCK_SIZES, MAX_HEAD_DIM
from engine.kernels._module import compile_all, current_architecture
from engine.kernels.attention_decode import specs as decode_specs
from engine.kernels.attention_prefill import specs as prefill_specs
from engine.kernels.kv_store import specs as store_specs

__all__ = ["EngineBackend", "EngineImpl", "EngineMetadata", "EngineMetadataBuilder"]

_NAME = "attention backend CUSTOM (engine)"
_FP8 = ("fp8", "fp8_e4m3")
_MIN_CONTEXT = 1024  # keys; contexts up to this length share one prepared launch


class EngineBackend(AttentionBackend):
    """Capabilities of the backend, which vLLM checks before it selects it."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", *_FP8)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[EngineImpl]:
        """Return the class of a layer's attention."""
        return EngineImpl

    @staticmethod
    def get_builder_cls() -> type[EngineMetadataBuilder]:
        """Return the class that builds a batch's metadata."""
        return EngineMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Return the supported page sizes (tokens); vLLM divides hybrid models' larger blocks."""
        return list(BLOCK_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; vLLM 0.24."""
        return num_blocks, 2 * num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of the axes in memory, pages first; vLLM 0.24."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the cache's spec with key heads before value heads; vLLM 0.33."""
        if spec.state_content_bytes is not None or spec.head_size_v != spec.head_size:
            raise ConfigError(
                f"{_NAME}: keys and values must have one head size and no packing of their own; "
                f"got {spec}"
            )
        return dataclasses.replace(
            spec,
            num_head_slots=2 * spec.num_kv_heads,
            state_content_bytes=spec.head_size * spec.dtype.itemsize,
        )

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return vLLM 0.33's layouts, those with adjacent tokens first."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        names = ("LBHNC", "BLHNC", "BHLNC", "LHBNC", "LBNHC", "BLNHC")
        return tuple(KVCacheLayout[name] for name in names)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Tell whether the kernels support the head size."""
        return 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Tell whether a head may have a sink."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Tell whether a layer may have a window; vLLM 0.33."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Tell whether pages may be moved by a connector: not tested."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Tell whether the card is supported: sm_80 and up."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Return the reason for refusing the combination of options, or None."""
        wanted = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype or "")
        if wanted not in (None, dtype):
            return f"a cache of {kv_cache_dtype} needs a model of that dtype, not {dtype}"
        return None


@dataclass
class EngineMetadata(AttentionMetadata):
    """A batch: first the requests that decode, then the chunks of prompts.

    Attributes
    ----------
    num_decodes, num_queries : int
        Requests that decode, and tokens of each.
    num_tokens : int
        Tokens of the batch, without padding.
    decode_tables, chunk_tables : (B, NB) tensors of int32
        Pages of the requests that decode, and of the others.
    decode_lens, chunk_lens : (B,) tensors of int32
    cu_seqlens_q : (B - num_decodes + 1,) tensor of int32
        First token of each chunk, from 0; None without chunks.
    max_query_len : int
        Upper bound of a chunk's tokens.
    max_context_len : int
        Upper bound of the lengths.
    """

    num_decodes: int
    num_queries: int
    num_tokens: int
    decode_tables: torch.Tensor
    chunk_tables: torch.Tensor
    decode_lens: torch.Tensor
    chunk_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_query_len: int
    max_context_len: int


class EngineMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of a batch, once a step for all layers of a kind."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise ConfigError(f"{_NAME}: calculate_kv_scales is not supported")
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if device.type == "cuda":
            self._compile_kernels(kv_cache_spec, vllm_config, device)

    def _compile_kernels(self, spec: Any, config: Any, device: torch.device) -> None:
        """Compile the kernels in parallel now, rather than one by one at their first launch."""
        num_heads = config.model_config.get_num_attention_heads(config.parallel_config)
        group = num_heads // spec.num_kv_heads
        dtype = dtype_name(DTYPES[config.model_config.dtype])
        kv_dtype = "fp8" if spec.dtype.itemsize == 1 else ""
        options = {"head_dim": spec.head_size, "kv_dtype": kv_dtype}
        wanted = [*prefill_specs(dtype, **options), *store_specs(dtype, **options)]
        for num_queries in (1, self.reorder_batch_threshold):
            wanted += decode_specs(dtype, **options, num_rows=num_queries * group)
        compile_all(wanted, current_architecture(device.index or 0), progress=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> EngineMetadata:
        """Return the metadata of a batch. Common prefixes are read by each request itself."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ConfigError(f"{_NAME}: attention must be causal; got causal={batch.causal}")
        num_decodes, num_queries = self._decodes(batch)
        first_token = num_decodes * num_queries
        starts = None
        if num_decodes < batch.num_reqs:
            starts = batch.query_start_loc[num_decodes:]
            starts = starts - first_token if first_token else starts
        return EngineMetadata(
            num_decodes=num_decodes,
            num_queries=num_queries,
            num_tokens=batch.num_actual_tokens,
            **_split("tables", batch.block_table_tensor, num_decodes),
            **_split("lens", batch.seq_lens, num_decodes),
            cu_seqlens_q=starts,
            max_query_len=batch.max_query_len,
            max_context_len=_rounded_up(batch.max_seq_len),
        )

    def _decodes(self, batch: Any) -> tuple[int, int]:
        """Return the number of leading requests that decode, and the tokens of each."""
        if batch.max_query_len == 1 and batch.num_actual_tokens == batch.num_reqs:
            return batch.num_reqs, 1
        lens = np.diff(batch.query_start_loc_cpu.numpy())
        num_queries = int(lens[0])
        if not 0 < num_queries <= self.reorder_batch_threshold:
            return 0, 0
        others = np.flatnonzero(lens != num_queries)
        return int(others[0]) if others.size else len(lens), num_queries

    def update_block_table(
        self, metadata: EngineMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> EngineMetadata:
        """Return the metadata of the same batch in another group of caches."""
        return dataclasses.replace(metadata, **_split("tables", blk_table, metadata.num_decodes))


class EngineImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ConfigError(f"{_NAME}: alibi_slopes is not supported")
        if attn_type != AttentionType.DECODER:
            raise ConfigError(f"{_NAME}: attn_type must be decoder; got {attn_type}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._float_sinks = sinks
        self._rule = (self.scale, sliding_window or 0, float(logits_soft_cap or 0.0))
        self._pages: tuple[Any, ...] = ()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks to float32, once the weights are loaded."""
        if self.sinks is not None:
            self._float_sinks = self.sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store new keys and values; vLLM passes more rows than slots if the batch is padded."""
        num_tokens = slot_mapping.shape[0]
        if key.shape[0] != num_tokens:
            key = key[:num_tokens]
            value = value[:num_tokens]
        _calls.STORE(key, value, *self._pages_of(layer, kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EngineMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `query` (T, H, D) to the cache; write and return `output` (T, H, D)."""
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError(f"{_NAME}: a quantized output is not supported")
        if attn_metadata is None:  # vLLM's profiling run
            return output.fill_(0)
        pages = self._pages_of(layer, kv_cache)
        batch = attn_metadata
        first_token = batch.num_decodes * batch.num_queries
        if batch.num_decodes:
            _calls.DECODE(
                _rows(query, 0, first_token),
                _rows(output, 0, first_token),
                *pages,
                self._float_sinks,
                batch.decode_tables,
                batch.decode_lens,
                batch.num_queries,
                batch.max_context_len,
                *self._rule,
            )
        if batch.cu_seqlens_q is not None:
            _calls.PREFILL(
                _rows(query, first_token, batch.num_tokens),
                _rows(output, first_token, batch.num_tokens),
                *pages,
                self._float_sinks,
                batch.chunk_tables,
                batch.chunk_lens,
                batch.cu_seqlens_q,
                batch.max_query_len,
                *self._rule,
            )
        return output

    def _pages_of(self, layer: Any, kv_cache: torch.Tensor) -> tuple[Any, ...]:
        """Return the pages of keys and of values, and their scales (K,), or None."""
        if not self._pages or self._pages[0] is not kv_cache:
            k_scale = v_scale = None
            pages = kv_cache
            if self.kv_cache_dtype in _FP8:
                pages = kv_cache.view(torch.uint8)
                k_scale, v_scale = (
                    scale.expand(self.num_kv_heads).contiguous()
                    for scale in (layer._k_scale, layer._v_scale)
                )
            k_pages, v_pages = pages.split(self.num_kv_heads, dim=1)
            self._pages = (kv_cache, k_pages, v_pages, k_scale, v_scale)
        return self._pages[1:]


def _split(name: str, tensor: torch.Tensor, num_decodes: int) -> dict[str, torch.Tensor]:
    """Return the rows of the requests that decode and of the others, by attribute's name."""
    return {f"decode_{name}": tensor[:num_decodes], f"chunk_{name}": tensor[num_decodes:]}


def _rows(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return rows `first` to `end`: the tensor itself if that is all, since a view costs time."""
    if first == 0 and end == tensor.shape[0]:
        return tensor
    return tensor[first:end]


def _rounded_up(length: int) -> int:
    """Return the next power of two: few distinct lengths need few prepared launches."""
    return max(_MIN_CONTEXT, 1 << (max(length, 1) - 1).bit_length())
