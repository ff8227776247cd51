"""Attention backend of SGLang: prefill and decode read its KV pool in place, as pages of tokens.

A batch is prepared in two parts, outside and inside of a CUDA graph, as sglang 0.5.23 asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from engine.errors import ConfigError
from engine.integrations import torch as ops
from engine.integrations.sglang import NAME
from engine.kernels._attention import BLOCK_SIZES

__all__ = ["EngineAttentionBackend"]


@dataclass(frozen=True)
class _Metadata:
    """Metadata of a batch, shared by its layers; page ids replace SGLang's token slots."""

    context_lens: torch.Tensor  # (B,) int32, keys of each sequence, the new ones included
    block_tables: torch.Tensor  # (B, NB) int32
    window_tables: torch.Tensor | None = None  # (B, NB) int32, for layers of the window pool
    window_loc: torch.Tensor | None = None  # (T,) int64, where such layers store the new tokens
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32; None means one query a sequence
    max_seqlen_q: int = 1


@dataclass(frozen=True)
class _Layer:
    """The constants of one attention layer."""

    scale: float
    window: int  # keys, 0 for all
    softcap: float
    in_window_pool: bool
    kv_scales: dict[str, torch.Tensor]  # k_scale and v_scale (K,) of an fp8 cache


class EngineAttentionBackend(AttentionBackend):
    """Attention of SGLang's `RadixAttention` layers.

    Parameters
    ----------
    runner : ModelRunner
        Read: page_size (16, 32, 64 or 128), dtype, kv_cache_dtype (equal, or float8_e4m3fn), the
        request-to-token table and the KV pool.

    Raises
    ------
    ConfigError
        If the server is configured for something that the backend does not compute: another page
        size, another quantized cache, MLA, speculative decoding, chunked local attention, context
        parallelism, or a unified memory pool.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        _check_runner(runner)
        self._pool = runner.token_to_kv_pool
        self._device = runner.device
        self._page_shift = runner.page_size.bit_length() - 1
        self._is_fp8 = runner.kv_cache_dtype == torch.float8_e4m3fn
        # The first token of each page: a view, read on the device alone.
        self._first_tokens = runner.req_to_token_pool.req_to_token[:, :: runner.page_size]
        self._has_window_pool = isinstance(self._pool, SWAKVPool) and self._pool.swa_layer_nums > 0
        self._layers: dict[int, _Layer] = {}
        self._static: _Metadata | None = None  # for CUDA graphs
        self.forward_metadata: _Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a batch that runs without a CUDA graph."""
        mode = forward_batch.forward_mode
        size = forward_batch.batch_size
        num_tokens = len(forward_batch.out_cache_loc)
        if mode.is_decode_or_idle():
            metadata = self._empty(size, num_tokens)
        else:
            lengths = forward_batch.extend_seq_lens
            starts = torch.zeros(size + 1, dtype=torch.int32, device=lengths.device)
            torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
            longest = max(map(int, forward_batch.extend_seq_lens_cpu))
            metadata = self._empty(size, num_tokens, cu_seqlens_q=starts, max_seqlen_q=longest)
        self._fill(metadata, forward_batch)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the metadata that CUDA graphs of at most `max_bs` sequences read."""
        self._static = self._empty(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Select the arrays of a decode batch's graph, which fills them itself."""
        static = self._static
        size = forward_batch.batch_size
        if static is None or not forward_batch.forward_mode.is_decode_or_idle():
            raise ConfigError(f"CUDA graphs decode only; got {forward_batch.forward_mode!r}")
        self.forward_metadata = _Metadata(
            static.context_lens[:size],
            static.block_tables[:size],
            None if static.window_tables is None else static.window_tables[:size],
            None if static.window_loc is None else static.window_loc[:size],
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute lengths and tables on the device; captured, and replayed with the graph."""
        assert self.forward_metadata is not None
        self._fill(self.forward_metadata, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the number of keys of sequences that pad a graph's batch."""
        return 1

    def _empty(self, size: int, num_tokens: int, **extend: Any) -> _Metadata:
        """Return uninitialised metadata of `size` sequences and `num_tokens` new tokens."""
        numbers = {"dtype": torch.int32, "device": self._device}
        shape = (size, self._first_tokens.shape[1])
        windows = {}
        if self._has_window_pool:
            windows = {
                "window_tables": torch.empty(shape, **numbers),
                "window_loc": torch.empty(num_tokens, dtype=torch.int64, device=self._device),
            }
        return _Metadata(
            torch.empty(size, **numbers), torch.empty(shape, **numbers), **windows, **extend
        )

    def _fill(self, metadata: _Metadata, forward_batch: Any) -> None:
        """Fill the metadata on the device; entries beyond a sequence's pages are never read."""
        size = len(metadata.context_lens)
        metadata.context_lens.copy_(forward_batch.seq_lens[:size])
        requests = forward_batch.req_pool_indices[:size]
        tables = torch.index_select(self._first_tokens, 0, requests, out=metadata.block_tables)
        if metadata.window_tables is not None and metadata.window_loc is not None:
            window_ids = self._pool.full_to_swa_index_mapping
            metadata.window_tables.copy_(window_ids[tables.long()] >> self._page_shift)
            metadata.window_loc.copy_(window_ids[forward_batch.out_cache_loc])
        tables.bitwise_right_shift_(self._page_shift)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Store and attend from one new token per sequence.

        Parameters
        ----------
        q : (B, H * D) tensor
        k, v : (B, K, D) tensors or None
        layer : RadixAttention
        forward_batch : ForwardBatch
        save_kv_cache : bool
            Store k and v into the pool first.
        **options
            sinks : (H,) tensor, optional

        Returns
        -------
        (B, H * D) tensor
        """
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        queries = q.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        return self._attend(queries, layer, options)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Store and attend from the new tokens of each sequence. See `forward_decode`."""
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        return self._attend(q.view(-1, layer.tp_q_head_num, layer.head_dim), layer, options)

    def _store(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: Any) -> None:
        assert self.forward_metadata is not None
        where = KVWriteLoc.for_batch(forward_batch, swa_loc=self.forward_metadata.window_loc)
        scales = (layer.k_scale, layer.v_scale) if self._is_fp8 else ()
        self._pool.set_kv_buffer(layer, where, k, v, *scales)

    def _attend(self, queries: torch.Tensor, layer: Any, options: dict[str, Any]) -> torch.Tensor:
        sinks = options.pop("sinks", None)
        for name, value in options.items():
            if value is not None and value is not False:
                raise ConfigError(f"attention of layer {layer.layer_id} cannot take {name}")
        own = self._layers.get(layer.layer_id)
        if own is None:
            own = self._layers[layer.layer_id] = self._constants(layer)
        metadata = self.forward_metadata
        assert metadata is not None
        tables = metadata.window_tables if own.in_window_pool else metadata.block_tables
        extend = {}
        if metadata.cu_seqlens_q is not None:
            extend["cu_seqlens_q"] = metadata.cu_seqlens_q
            extend["max_seqlen_q"] = metadata.max_seqlen_q
        out: torch.Tensor = ops.attention_paged(
            queries,
            self._pages(self._pool.get_key_buffer(layer.layer_id)),
            self._pages(self._pool.get_value_buffer(layer.layer_id)),
            tables,
            metadata.context_lens,
            scale=own.scale,
            window=own.window,
            softcap=own.softcap,
            sinks=sinks,
            **own.kv_scales,
            **extend,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a layer's keys or values as pages (P, K, page_size, D), a view.

        Buffers are (slots, K, D), or pages already with SGLANG_USE_HND_KVCACHE.
        """
        if buffer.dim() == 4:
            return buffer
        return buffer.unflatten(0, (-1, 1 << self._page_shift)).transpose(1, 2)

    def _constants(self, layer: Any) -> _Layer:
        """Return a layer's constants; raise if it needs an unsupported feature."""
        for name, wanted in (
            ("attn_type", AttentionType.DECODER),
            ("is_cross_attention", False),
            ("v_head_dim", layer.qk_head_dim),
            ("logit_capping_method", "tanh"),
            ("xai_temperature_len", -1),
        ):
            if (given := getattr(layer, name)) != wanted:
                raise ConfigError(f"{name} of layer {layer.layer_id} must be {wanted}; got {given}")
        window = layer.sliding_window_size  # keys before the query's own, or -1
        in_window_pool = self._has_window_pool and self._pool.layers_mapping[layer.layer_id][1]
        return _Layer(
            scale=layer.scaling,
            window=0 if window is None or window < 0 else window + 1,
            softcap=layer.logit_cap or 0.0,
            in_window_pool=in_window_pool,
            kv_scales=self._scales(layer) if self._is_fp8 else {},
        )

    def _scales(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return one scale per head, 1 if the checkpoint has none.

        SGLang warms up before it captures, so these fills are not part of a graph.
        """
        given = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        return {
            name: torch.full(
                (layer.tp_k_head_num,), 1.0 if scale is None else scale, device=self._device
            )
            for name, scale in given.items()
        }


def _check_runner(runner: Any) -> None:
    """Raise if the server's options need an unsupported feature."""
    if runner.page_size not in BLOCK_SIZES:
        raise ConfigError(
            f"page_size must be one of {BLOCK_SIZES}: start the server with --page-size 64; got "
            f"{runner.page_size}"
        )
    if runner.kv_cache_dtype not in (runner.dtype, torch.float8_e4m3fn):
        raise ConfigError(
            f"kv_cache_dtype must be {runner.dtype} or torch.float8_e4m3fn; got "
            f"{runner.kv_cache_dtype}"
        )
    parallel = get_parallel()
    for is_refused, name in (
        (runner.use_mla_backend, "latent attention (MLA)"),
        (not runner.spec_algorithm.is_none(), "speculative decoding"),
        (runner.attention_chunk_size is not None, "attention in chunks"),
        (runner.kv_index_translator.is_translating, "--enable-unified-memory"),
        (parallel.attn_cp_size > 1, "context parallelism"),
        (parallel.dcp_enabled, "decode context parallelism"),
    ):
        if is_refused:
            raise ConfigError(f"--attention-backend {NAME} does not support {name}")
