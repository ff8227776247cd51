"""Multi-head latent attention: one cached latent per token, from which all heads are projected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine import kernels
from engine.config import MlaConfig
from engine.device import array_module, empty_like
from engine.errors import ContractError
from engine.layers.arrays import arrays_of
from engine.layers.attention import AttentionParams
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["MAX_EXPANDED", "Mla"]

# Prefills expand the cached latents to keys and values of some heads at a time: up to this many
# values, twice, for keys and for values.
MAX_EXPANDED = 1 << 27
# A single prefilled sequence of up to this many tokens is decoded instead: it then reads its cached
# latents without expanding them.
_MAX_ABSORBED = 32


class Mla:
    """One layer's attention.

    A token's cache is its latent c, normalised, and one rotated key. Head h has the key
    [Wk_h c | k_rope] and the value Wv_h c. Decodes use the absorbed form: the query is multiplied
    by Wk_h^T, and attention's result by Wv_h, so that all heads attend to the latents themselves.
    Prefills expand the latents to keys and values.

    Parameters
    ----------
    config : MlaConfig
    params : AttentionParams
        Heads of this rank, each with keys of its own once they are expanded; scale.
    in_proj : Linear
        Rows of the query's latent (or, if `q_up` is None, of the queries), the latent of keys and
        values, the shared key and, with a `head_gate`, each head's gate.
    kv_norm : Norm
    kv_up : (H (nope + v), L) array
        Wk_h and Wv_h of every head.
    o : Linear
        (N, H v).
    cos_sin : (P, R) float32 array
    q_norm, q_up : Norm, Linear, optional
        Norm of the query's latent, and its up-projection (H (nope + R), Lq).
    q_factors : (P,) float32 array, optional
        Factor on the queries at each position.

    References
    ----------
    DeepSeek-AI: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    __slots__ = (
        "config",
        "cos_sin",
        "in_proj",
        "kv_norm",
        "kv_up",
        "o",
        "params",
        "q_factors",
        "q_norm",
        "q_up",
    )

    sinks = None

    def __init__(
        self,
        config: MlaConfig,
        params: AttentionParams,
        in_proj: Linear,
        kv_norm: Norm,
        kv_up: Any,
        o: Linear,
        cos_sin: Any,
        q_norm: Norm | None = None,
        q_up: Linear | None = None,
        q_factors: Any = None,
    ) -> None:
        self.config = config
        self.params = params
        self.in_proj = in_proj
        self.kv_norm = kv_norm
        self.kv_up = kv_up
        self.o = o
        self.cos_sin = cos_sin
        self.q_norm = q_norm
        self.q_up = q_up
        self.q_factors = q_factors

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield "cos_sin", self.cos_sin
        yield "kv_up", self.kv_up
        yield from arrays_of(in_proj=self.in_proj, kv_norm=self.kv_norm, o=self.o)
        yield from arrays_of(q_norm=self.q_norm, q_up=self.q_up)
        if self.q_factors is not None:
            yield "q_factors", self.q_factors

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        pages: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Store the latents of `x` (T, N) in `pages` (P, 1, block_size, L + R); return (T, N).

        See `Mixer`.
        """
        q, gate = self._stored(x, batch, pages, norm)
        heads = self._joined(self._attend(q, batch, pages), gate)
        if rows is not None:
            heads = kernels.embedding(rows, heads)
        return self.o(heads, residual=residual)

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Tell whether a call launches only kernels: a launch plan can then replay it.

        A prefill also computes where its sequences begin. On the CPU nothing is replayed, but a
        deterministic layer must decode token by token.
        """
        is_decode = batch.num_decodes == batch.num_sequences
        return is_decode and array_module(self.kv_up) is not np

    def store(self, x: Any, batch: ForwardBatch, pages: Any) -> None:
        """Store the latents of `x` (T, N) in the pages, without attention."""
        self._stored(x, batch, pages)

    def project(self, x: Any, rope_positions: Any) -> tuple[Any, Any, Any]:
        """Return q, k (T, H, nope + R) and v (T, H, v), expanded and rotated; store nothing."""
        c = self.config
        width = c.kv_rank + c.rope_dim
        pages = array_module(self.kv_up).zeros((1, 16, width), self.kv_up.dtype)
        nowhere = np.full(x.shape[0], -1, np.int64)
        q, kv, _ = self._rows(x)
        places = (rope_positions, self.cos_sin, pages, nowhere)
        weight = self.kv_norm.weight
        kernels.mla_store(q[..., c.nope_dim :], kv, weight, *places, eps=self.kv_norm.eps)
        self._scale(q, rope_positions)
        k, v = self._expanded(kv, slice(None))
        return q, k, v[..., : c.v_dim]

    def joined(self, heads: Any, x: Any) -> Any:
        """Return the input of `o` for the heads' outputs (T, H, v) and the input `x` (T, N)."""
        return self._joined(heads, self._rows(x)[2] if self.config.head_gate else None)

    def _joined(self, heads: Any, gate: Any) -> Any:
        """Return the heads' outputs side by side, gated."""
        heads = heads.reshape(heads.shape[0], -1)
        return heads if gate is None else kernels.sigmoid_gate(heads, gate, out=heads)

    def _stored(
        self, x: Any, batch: ForwardBatch, pages: Any, norm: Norm | None = None
    ) -> tuple[Any, Any]:
        """Return the rotated queries (T, H, nope + R) and the gate; store the latents."""
        c = self.config
        q, kv, gate = self._rows(x, norm)
        kernels.mla_store(
            q[..., c.nope_dim :],
            kv,
            self.kv_norm.weight,
            batch.rope_positions,
            self.cos_sin,
            pages[:, 0],
            batch.slot_mapping,
            eps=self.kv_norm.eps,
        )
        self._scale(q, batch.rope_positions)
        return q, gate

    def _scale(self, q: Any, rope_positions: Any) -> None:
        """Multiply the queries (T, H, nope + R) by the factors of their positions, in place."""
        if self.q_factors is not None:
            # A lookup by an op, which a launch plan records.
            factors = kernels.embedding(rope_positions, self.q_factors[:, None])
            rows = q.reshape(q.shape[0], -1)
            kernels.scale_rows(rows, factors[:, 0], out=rows)

    def _rows(self, x: Any, norm: Norm | None = None) -> tuple[Any, Any, Any]:
        """Return q (T, H, nope + R), latents with keys (T, L + R), and the gate (T, H) or None.

        They are not rotated, and may be views of fused rows.
        """
        c = self.config
        fused = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        end = fused.shape[1] - (self.params.num_heads if c.head_gate else 0)
        start = end - c.cache_dim
        q = fused[:, :start]
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q = q.reshape(x.shape[0], self.params.num_heads, c.nope_dim + c.rope_dim)
        return q, fused[:, start:end], fused[:, end:] if c.head_gate else None

    @property
    def _up(self) -> Any:
        """The up-projection by head, (H, nope + v, L)."""
        c = self.config
        return self.kv_up.reshape(self.params.num_heads, c.nope_dim + c.v_dim, c.kv_rank)

    def _attend(self, q: Any, batch: ForwardBatch, pages: Any) -> Any:
        """Return the heads' results (T, H, v)."""
        if batch.tree_mask is not None:
            raise ContractError("a batch for latent attention must have no tree_mask; got one")
        out = empty_like(q, None, (*q.shape[:2], self.config.v_dim))
        num = batch.num_decodes
        if self.params.deterministic and not self.can_plan(batch):
            self._decode_by_token(q, batch, pages, out)
            return out
        if num:
            self._decode(q, batch, pages, num, batch.query_len, out)
        if num < batch.num_sequences:
            is_short = q.shape[0] <= _MAX_ABSORBED and batch.num_sequences == 1
            if is_short:
                self._decode(q, batch, pages, 1, q.shape[0], out)
            else:
                self._prefill(q, batch, pages, out)
        return out

    def _decode(
        self, q: Any, batch: ForwardBatch, pages: Any, num: int, query_len: int, out: Any
    ) -> None:
        """Attend from the first `num` sequences, of `query_len` tokens each."""
        rows = num * query_len
        where = {
            "block_tables": batch.block_tables[:num],
            "context_lens": batch.context_lens[:num],
            "num_splits": 1 if self.params.deterministic else None,
        }
        shape = num, query_len
        self._absorbed(q[:rows], pages, shape, batch.max_context_len, out[:rows], **where)

    def _decode_by_token(self, q: Any, batch: ForwardBatch, pages: Any, out: Any) -> None:
        """Attend from every token as a sequence of its own: the same bits in any batch.

        Prefills are decoded too, since expanded keys and values round differently.
        """
        xp = array_module(q)
        tokens = xp.arange(q.shape[0])
        rows = xp.searchsorted(batch.cu_seqlens_q[1:], tokens, side="right")
        where = {
            "block_tables": batch.block_tables[rows],
            "context_lens": batch.positions + np.int32(1),
            "num_splits": 1,
        }
        self._absorbed(q, pages, (q.shape[0], 1), batch.max_context_len, out, **where)

    def _absorbed(
        self, q: Any, pages: Any, shape: tuple[int, int], longest: int, out: Any, **where: Any
    ) -> None:
        """Attend to the latents; q (B Q, H, nope + R), `shape` (B, Q), out (B Q, H, v).

        SAFETY: with pdl, mla_decode reads tables and lengths before the preceding kernel has ended;
        `mla_store`, which ran before it, has waited for the kernels that write them.
        """
        c = self.config
        up = self._up
        absorbed = kernels.head_gemm(
            q[..., : c.nope_dim], up[:, : c.nope_dim].transpose(0, 2, 1), pdl=True
        )
        latents = kernels.mla_decode(
            absorbed.reshape(*shape, *absorbed.shape[1:]),
            q[..., c.nope_dim :].reshape(*shape, q.shape[1], c.rope_dim),
            pages[:, 0],
            scale=self.params.scale,
            max_context_len=longest,
            pdl=True,
            **where,
        )
        kernels.head_gemm(latents.reshape(absorbed.shape), up[:, c.nope_dim :], pdl=True, out=out)

    def _prefill(self, q: Any, batch: ForwardBatch, pages: Any, out: Any) -> None:
        """Attend from the other sequences, with keys and values expanded for some heads at a time.

        The latents of all their tokens are gathered from the pages, the cached ones too.
        """
        n = batch.num_decodes
        first = batch.num_decode_tokens
        lens = batch.context_lens[n:]
        starts = array_module(lens).zeros(lens.shape[0] + 1, np.int32)
        lens.cumsum(out=starts[1:])
        num_keys = batch.num_prefill_keys
        rows = empty_like(q, None, (num_keys, 1, pages.shape[3]))
        kernels.kv_gather(
            pages,
            pages,
            batch.block_tables[n:],
            lens,
            starts,
            total_tokens=num_keys,
            out=(rows, rows),
        )
        width = self.config.nope_dim + self.config.rope_dim
        step = max(1, MAX_EXPANDED // max(1, num_keys * width))
        for head in range(0, self.params.num_heads, step):
            heads = slice(head, min(head + step, self.params.num_heads))
            k, v = self._expanded(rows[:, 0], heads)
            kernels.attention_prefill(
                q[first:, heads],
                k,
                v,
                cu_seqlens_q=batch.prefill_cu_seqlens_q,
                cu_seqlens_k=starts,
                scale=self.params.scale,
                max_seqlen_q=batch.max_seqlen_q,
                out=out[first:, heads],
            )

    def _expanded(self, rows: Any, heads: slice) -> tuple[Any, Any]:
        """Return k (T, h, nope + R) and v (T, h, v) of some heads, from latents and keys `rows`."""
        c = self.config
        up = self._up[heads]
        latents = rows[:, : c.kv_rank]
        product = kernels.gemm(latents, up.reshape(-1, c.kv_rank))
        product = product.reshape(rows.shape[0], up.shape[0], -1)
        k = kernels.mla_expand(product, rows[:, c.kv_rank :], nope_dim=c.nope_dim)
        return k, product[..., c.nope_dim :]
