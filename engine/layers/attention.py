"""Self-attention over a paged KV cache: project, rotate, store, attend, project back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module, empty_like
from engine.errors import ContractError
from engine.kernels._quantized_kv import kv_dtype_of
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.norm import Norm, QuantizedRows
from engine.weights import Format

__all__ = ["Attention", "AttentionParams", "SharedAttention"]

# Minimum tokens to quantize the heads' outputs in the decode kernel: of one token, the output
# projection reads them as they are.
_CODED_FROM = 2


@dataclass(frozen=True)
class AttentionParams:
    """Sizes and score options of one layer's attention.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim : int
        H, K and D.
    scale : float
        Factor on q·k.
    window : int
        Sliding window in keys, the query's own included; 0 is full attention.
    softcap : float
        c in c·tanh(s/c), applied to scores; 0 turns it off.
    v_head_dim : int
        Features of a head's values, of which v has D with others behind them; 0 means D.
    clip : float
        Limit of the absolute values of q, k and v; 0 turns it off.
    norm_after_rope : bool
        q and k are rotated first, then normalised.
    gate : str
        "sigmoid" multiplies the heads' outputs by sigmoid(g), g from rows of `qkv`;
        "sigmoid_heads" has a g per head, "" no gate.
    deterministic : bool
        Batch invariance: a token's bits depend on neither the batch nor the chunk size.
    pattern : BlockSparse or Periodic, optional
        Further restricts the keys that a query sees, by their positions.
    chunk : int
        Keys per chunk of chunked attention, which `pattern` also says; 0 is no chunk.
    values_from_keys : bool
        v is the key projection's output, before k's norm and rope.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    v_head_dim: int = 0
    clip: float = 0.0
    norm_after_rope: bool = False
    gate: str = ""
    deterministic: bool = False
    pattern: Any = None
    chunk: int = 0
    values_from_keys: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the decode kernel supports the layer's rule for one new token per sequence."""
        if self.deterministic:
            return self.pattern is None and not self.chunk
        has_chunks = self.chunk > 0 and self.chunk & (self.chunk - 1) == 0
        return self.pattern is None or has_chunks


class Attention:
    """One layer's attention.

    Parameters
    ----------
    params : AttentionParams
    qkv : Linear
        ((H + 2K)·D, N): the rows of q, k and v, then H·D or H of an output gate; with
        `values_from_keys` ((H + K)·D, N).
    o : Linear
        (N, H·D).
    cos_sin : (P, R) float32 array
        Rope table: a row of [cos | sin] per position.
    q_norm, k_norm : Norm, optional
        QK-norm, applied before rope unless `params` says otherwise; both have the same eps and
        offset. A weight (D,) normalises each head, a longer one all heads together, (H, D) each
        head by its own (`HeadNorm`).
    sinks : (H,) float32 array, optional
        Attention sinks: one extra logit in each head's softmax, without a value.
    kv_scales : mapping of str to (k_scale, v_scale), optional
        Scales of a quantized KV cache, by kv_cache_dtype: two (K,) float32 arrays.
    v_factor : (1,) float32 array, optional
        Factor on the values, applied to the heads' outputs; needed with a `v_head_dim`.
    q_factors : (P,) float32 array, optional
        Factors on the rotated queries, by position.
    v_norm : Norm, optional
        Norm of v, per head; with the eps and offset of `q_norm`.
    """

    __slots__ = (
        *("cos_sin", "k_norm", "kv_scales", "norms_first", "norms_whole_rows", "o", "params"),
        *("q_factors", "q_norm", "qkv", "sinks", "v_factor", "v_norm"),
    )

    def __init__(
        self,
        params: AttentionParams,
        qkv: Linear,
        o: Linear,
        cos_sin: Any,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        sinks: Any = None,
        kv_scales: Mapping[str, tuple[Any, Any]] | None = None,
        q_factors: Any = None,
        v_norm: Norm | None = None,
        v_factor: Any = None,
    ) -> None:
        self.params = params
        self.qkv = qkv
        self.o = o
        self.cos_sin = cos_sin
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sinks = sinks
        self.kv_scales = dict(kv_scales or {})
        self.q_factors = q_factors
        self.v_norm = v_norm
        self.v_factor = v_factor
        self.norms_whole_rows = self.norms_first = False
        if q_norm is not None:
            is_whole = q_norm.weight.shape[-1] != params.head_dim
            # A limit applies to the normalised rows, also of a single head.
            self.norms_whole_rows = is_whole or params.clip > 0
            # The ops that apply rope fuse RMSNorms of heads only.
            self.norms_first = self.norms_whole_rows or q_norm.subtract_mean

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.qkv.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield "cos_sin", self.cos_sin
        for name in ("sinks", "q_factors", "v_factor"):
            if (array := getattr(self, name)) is not None:
                yield name, array
        for kv_dtype, scales in self.kv_scales.items():
            for name, scale in zip("kv", scales, strict=True):
                yield f"{kv_dtype}.{name}_scale", scale
        yield from arrays_of(qkv=self.qkv, o=self.o, q_norm=self.q_norm, k_norm=self.k_norm)
        yield from arrays_of(v_norm=self.v_norm)

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        k_pages: Any,
        v_pages: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Store the keys and values of `x` (T, N) in the pages, and return the output (T, N).

        With a `norm`, the input is ``norm(x)``. With a `residual`, which may be `x`, the output is
        added to it. With `rows` (R,) int32, only these tokens are passed to the output projection:
        (R, N).
        """
        q, k, v, gate = self._rows(x, norm)
        if self._stores_while_decoding(batch, q):
            new = {"k": k[:, None], "v": v[:, None], "positions": batch.rope_positions}
            new |= {"cos_sin": self.cos_sin, "slot_mapping": batch.slot_mapping}
            new["quantize_out"] = rows is None and self._quantizes(len(q))
            heads = self._decode(q, batch, k_pages, v_pages, **new, **self._norms())
            if isinstance(heads, QuantizedRows):
                return self.o(heads, residual=residual)
        else:
            places = (batch.rope_positions, self.cos_sin, k_pages, v_pages, batch.slot_mapping)
            options = self._norms() | self._factors() | self._scales(k_pages)
            kernels.qk_norm_rope_store(q, k, v, *places, **options)
            heads = self._attend(q, batch, k_pages, v_pages)
        heads = self._joined(heads, gate)
        if rows is not None:
            heads = kernels.embedding(rows, heads)
        return self.o(heads, residual=residual)

    def store(self, x: Any, batch: ForwardBatch, k_pages: Any, v_pages: Any) -> None:
        """Store the keys and values of `x` (T, N) in the pages, without attention."""
        q, k, v, _ = self._rows(x)
        places = (batch.rope_positions, self.cos_sin, k_pages, v_pages, batch.slot_mapping)
        options = self._norms() | self._factors() | self._scales(k_pages)
        kernels.qk_norm_rope_store(q, k, v, *places, **options)

    def project(self, x: Any, rope_positions: Any) -> tuple[Any, Any, Any]:
        """Return the rotated q (T, H, D) and k (T, K, D), and v (T, K, D); store nothing."""
        query, key, value, _ = self._rows(x)
        if self.v_norm is not None:
            value = self.v_norm(value)
        is_late = self.params.norm_after_rope
        if not is_late:
            self._norm_heads(query, key)
        kernels.rope(query, key, rope_positions, self.cos_sin, out=(query, key))
        if is_late:
            self._norm_heads(query, key)
        if self.q_factors is not None:
            rows = query.reshape(query.shape[0], -1)
            query = kernels.scale_rows(rows, self.q_factors[rope_positions]).reshape(query.shape)
        return query, key, value

    def _norm_heads(self, query: Any, key: Any) -> None:
        """Apply QK-norm in place, if there is one and `_rows` has not applied it."""
        if self.q_norm is not None and self.k_norm is not None and not self.norms_first:
            self.q_norm(query, out=query)
            self.k_norm(key, out=key)

    def joined(self, heads: Any, x: Any) -> Any:
        """Return the input of `o` for the heads' outputs (T, H, D) and the input `x` (T, N)."""
        return self._joined(heads, self._rows(x)[3] if self.params.gate else None)

    def _joined(self, heads: Any, gate: Any) -> Any:
        """Return the heads' outputs side by side, cut to their values' width, scaled and gated."""
        num_tokens = heads.shape[0]
        if self.v_factor is not None:
            rows = heads.reshape(-1, heads.shape[2])[:, : self.params.v_head_dim or None]
            heads = kernels.scale_rows(rows, self.v_factor)
        heads = heads.reshape(num_tokens, -1)
        return heads if gate is None else kernels.sigmoid_gate(heads, gate, out=heads)

    def _rows(self, x: Any, norm: Norm | None = None) -> tuple[Any, Any, Any, Any]:
        """Return q (T, H, D), k and v (T, K, D), not yet rotated, and the gate or None.

        They are views of fused rows, or new arrays of normalised heads. A QK-norm that no op fuses
        with rope is applied here: LayerNorms, and norms over all heads together.
        """
        h = self.params.num_heads
        k = self.params.num_kv_heads
        d = self.params.head_dim
        fused = self.qkv(x) if norm is None else self.qkv.of_normed(x, norm)
        if self.q_norm is not None and self.k_norm is not None and self.norms_whole_rows:
            query = fused[:, : h * d]
            key = fused[:, h * d : (h + k) * d]
            self.q_norm(query, out=query)
            self.k_norm(key, out=key)
        if self.params.clip:
            fused = kernels.clamp(fused, -self.params.clip, self.params.clip, out=fused)
        gate = None
        if self.params.gate:
            gate = fused[:, (h + 2 * k) * d :]
            fused = fused[:, : (h + 2 * k) * d]
        rows = fused.reshape(x.shape[0], -1, d)
        first = h if self.params.values_from_keys else h + k
        query = rows[:, :h]
        key = rows[:, h : h + k]
        if self.norms_first and not self.norms_whole_rows:
            assert self.q_norm is not None and self.k_norm is not None
            query = self.q_norm(query)
            key = self.k_norm(key)
        return query, key, rows[:, first : first + k], gate

    def _decodes(self, q: Any) -> bool:
        """Tell whether the decode kernel computes decodes.

        With `deterministic` only the GPU's has the bits of the prefill kernel.
        """
        p = self.params
        return p.decodes and not (p.deterministic and array_module(q) is np)

    def _stores_while_decoding(self, batch: ForwardBatch, q: Any) -> bool:
        """Tell whether the decode kernel also stores k and v: each sequence has one new token."""
        is_all = batch.num_decodes == batch.num_sequences and batch.query_len == 1
        p = self.params
        is_plain = not p.norm_after_rope and self.q_factors is None and self.v_norm is None
        return is_all and self._decodes(q) and is_plain

    def _quantizes(self, num_tokens: int) -> bool:
        """Tell whether the decode kernel quantizes its result for the output projection."""
        form = self.o.input_format
        has_codes = form is not None and form.activations == "fp8" and form.activation_group == 128
        p = self.params
        is_plain = not p.gate and self.v_factor is None and not p.deterministic
        return has_codes and is_plain and num_tokens >= _CODED_FROM

    def _norms(self) -> dict[str, Any]:
        """Return the per-head QK-norm as keywords of the op that applies rope."""
        if self.q_norm is None or self.k_norm is None or self.norms_first:
            return {}
        norms = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight}
        if self.v_norm is not None:
            norms["v_weight"] = self.v_norm.weight
        norms |= {"eps": self.q_norm.eps, "weight_offset": self.q_norm.offset}
        return norms | ({"norm_after_rope": True} if self.params.norm_after_rope else {})

    def _factors(self) -> dict[str, Any]:
        """Return the factors on queries as a keyword of `qk_norm_rope_store`; {} without."""
        return {} if self.q_factors is None else {"q_factors": self.q_factors}

    def _scales(self, pages: Any) -> dict[str, Any]:
        """Return the scales of a quantized KV cache as keywords of an op; {} for other pages."""
        if not (kv_dtype := kv_dtype_of(pages.dtype)):
            return {}
        k_scale, v_scale = self.kv_scales[kv_dtype]
        return {"k_scale": k_scale, "v_scale": v_scale}

    def _rule(self, pages: Any) -> dict[str, Any]:
        """Return the keywords that both attention kernels share: scores, softmax, scales."""
        p = self.params
        rule: dict[str, Any] = {"scale": p.scale, "window": p.window, "softcap": p.softcap}
        return rule | {"sinks": self.sinks} | self._scales(pages)

    def _pattern(self) -> dict[str, Any]:
        """Return the pattern as a keyword of `attention_prefill`."""
        return {} if self.params.pattern is None else {"pattern": self.params.pattern}

    def _chunk(self) -> dict[str, Any]:
        """Return the chunk as a keyword of `attention_decode`."""
        return {"chunk": self.params.chunk} if self.params.chunk else {}

    def _attend(self, q: Any, batch: ForwardBatch, k_pages: Any, v_pages: Any) -> Any:
        """Compute decodes with the decode kernel, and other sequences with the prefill kernel.

        With `deterministic` on a GPU, both have one order of sums.
        """
        p = self.params
        if not self._decodes(q) or (p.chunk and batch.query_len > 1):
            return self._attend_in_one(q, batch, k_pages, v_pages)
        if batch.num_decodes == 0:
            return self._prefill(q, batch, k_pages, v_pages)
        out = empty_like(q)
        self._decode(q, batch, k_pages, v_pages, out)
        if batch.num_decodes < batch.num_sequences:
            self._prefill(q, batch, k_pages, v_pages, out)
        return out

    def _attend_in_one(self, q: Any, batch: ForwardBatch, k_pages: Any, v_pages: Any) -> Any:
        """Compute every token with the prefill kernel, or separately.

        Only this kernel knows patterns, and chunks for several tokens of a sequence. On the CPU the
        order of summation in BLAS depends on the shapes of the matrices, so each token is decoded
        separately if that matters.
        """
        p = self.params
        self._check_no_tree(batch)
        is_by_token = array_module(q) is np and (p.pattern is None or (p.deterministic and p.chunk))
        if not is_by_token:
            return kernels.attention_prefill(
                q,
                k_pages,
                v_pages,
                cu_seqlens_q=batch.cu_seqlens_q,
                block_tables=batch.block_tables,
                context_lens=batch.context_lens,
                max_seqlen_q=batch.max_seqlen_q,
                num_splits=1,
                **self._rule(k_pages),
                **self._pattern(),
            )
        rows = np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens_q))
        result = kernels.attention_decode(
            q[:, None],
            k_pages,
            v_pages,
            block_tables=batch.block_tables[rows],
            context_lens=batch.positions + np.int32(1),
            **self._rule(k_pages),
            **self._chunk(),
        )
        return result[:, 0]

    def _check_no_tree(self, batch: ForwardBatch) -> None:
        if batch.tree_mask is not None:
            raise ContractError("a batch with a tree_mask needs deterministic=False; got True")

    def _decode(
        self,
        q: Any,
        batch: ForwardBatch,
        k_pages: Any,
        v_pages: Any,
        out: Any = None,
        *,
        quantize_out: bool = False,
        **new: Any,
    ) -> Any:
        """Run the decode kernel; `new` holds the new keys and values if the kernel stores them.

        With `quantize_out` return `QuantizedRows` (T, H·D) instead of (T, H, D).
        SAFETY: with pdl this kernel may start before its predecessor has ended. It reads tables,
        lengths, slots, positions and older keys before it waits. These were written before
        `embedding` or `qk_norm_rope_store`, whichever ran last; both wait for their predecessor
        before they trigger the next launch. `rope`, which may run after them, never triggers it.
        """
        n = batch.num_decodes
        num_tokens = batch.num_decode_tokens
        shape = n, batch.query_len, *q.shape[1:]
        if self.params.deterministic:
            self._check_no_tree(batch)
            new["deterministic"] = True
        result = kernels.attention_decode(
            q[:num_tokens].reshape(shape),
            k_pages,
            v_pages,
            block_tables=batch.block_tables[:n],
            context_lens=batch.context_lens[:n],
            **self._rule(k_pages),
            **self._chunk(),
            max_context_len=batch.max_context_len,
            tree_mask=batch.tree_mask,
            pdl=True,
            out=None if out is None else out[:num_tokens].reshape(shape),
            quantize_out=quantize_out,
            **new,
        )
        if quantize_out:
            codes, scales = (one.reshape(num_tokens, -1) for one in result)
            return QuantizedRows(codes, scales, q.dtype)
        return result.reshape(num_tokens, *q.shape[1:])

    def _prefill(
        self,
        q: Any,
        batch: ForwardBatch,
        k_pages: Any,
        v_pages: Any,
        out: Any = None,
    ) -> Any:
        """Run the prefill kernel for all sequences but the decodes."""
        n = batch.num_decodes
        num_tokens = batch.num_decode_tokens
        return kernels.attention_prefill(
            q[num_tokens:],
            k_pages,
            v_pages,
            cu_seqlens_q=batch.prefill_cu_seqlens_q,
            block_tables=batch.block_tables[n:],
            context_lens=batch.context_lens[n:],
            **self._rule(k_pages),
            **self._pattern(),
            max_seqlen_q=batch.max_seqlen_q,
            num_splits=1 if self.params.deterministic else None,
            out=None if out is None else out[num_tokens:],
        )


class SharedAttention(Attention):
    """Attention of a layer that reads the keys and values which an earlier layer has stored.

    Its `qkv` is (H·D, N), the rows of q, and its pages are the earlier layer's. Parameters: see
    `Attention`.
    """

    __slots__ = ()

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        k_pages: Any,
        v_pages: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Return the output (T, N) for `x` (T, N); store nothing. See `Attention`."""
        heads = self._attend(self._queries(x, batch, norm), batch, k_pages, v_pages)
        heads = heads.reshape(heads.shape[0], -1)
        if rows is not None:
            heads = kernels.embedding(rows, heads)
        return self.o(heads, residual=residual)

    def _queries(self, x: Any, batch: ForwardBatch, norm: Norm | None) -> Any:
        """Return the normalised and rotated q (T, H, D)."""
        p = self.params
        q = self.qkv(x) if norm is None else self.qkv.of_normed(x, norm)
        q = q.reshape(x.shape[0], p.num_heads, p.head_dim)
        if self.q_norm is not None:
            self.q_norm(q, out=q)
        no_keys = q[:, :0]
        kernels.rope(q, no_keys, batch.rope_positions, self.cos_sin, out=(q, no_keys))
        return q
