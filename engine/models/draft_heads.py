"""Draft heads on the target model's hidden states: EAGLE-3 and MTP.

A head is one layer with a KV cache of its own. At position i it reads the embedding of token i + 1
and the target's features of token i, and predicts token i + 2. For tokens that the target has not
computed yet, the head's own output replaces the features, so that it can draft several tokens in a
row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engine import kernels
from engine.config import ModelConfig
from engine.device import array_module
from engine.layers.attention import Attention, AttentionParams
from engine.layers.batch import ForwardBatch
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mla import Mla
from engine.layers.mlp import MLP
from engine.layers.norm import Norm
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.rope_tables import RopeTable
from engine.weights import Weight

__all__ = ["DraftHead", "DraftTarget", "Eagle3Config", "Eagle3Head", "HeadLayer", "MtpHead"]

Pages = tuple[Any, Any]
"""(k_pages, v_pages) of the head, both (P, K, block_size, D)."""

_FLOAT32 = np.dtype(np.float32)


class DraftTarget(Protocol):
    """Members of the target model that draft heads use; `Decoder` implements them."""

    @property
    def xp(self) -> Any:
        """Array module."""

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length in tokens."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the target."""

    @property
    def embed(self) -> Callable[[Any], Any]:
        """Lookup of token ids (T,): embeddings (T, N)."""

    @property
    def final_norm(self) -> Callable[[Any], Any]:
        """Final norm: from the last layer's residual stream (T, N) to hidden states (T, N)."""

    def logits(self, hidden: Any) -> Any:
        """Return the logits (R, V) float32 of hidden states (R, N)."""


class DraftHead(Protocol):
    """A draft head; all arrays are on the target's device."""

    @property
    def config(self) -> ModelConfig:
        """Config of the head's layer; the vocabulary is the target's."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads (`ForwardBatch.features`)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's own arrays."""

    def combine(self, features: Sequence[Any]) -> Any:
        """Return the state (T, N) computed from features (T, Nt) of each of `feature_layers`."""

    def store(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> None:
        """Compute and store the keys and values of `token_ids` (T,).

        `state` (T, N) holds the state of the token before each of them.
        """

    def forward(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> Any:
        """Store keys and values, and return the states (T, N) of `token_ids`. See `store`."""

    def logits(self, state: Any) -> Any:
        """Return the logits (T, V) float32 of the next tokens; -inf for those it cannot draft."""


class HeadLayer:
    """The attention and the MLP of a draft head.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to array
        "qkv", "o", "gate_up", "down", "mlp_norm"; optionally biases of matrices ("qkv_bias", ...);
        "q_norm" and "k_norm" with qk_norm. May hold further weights of the head.
    max_model_len : int
        Maximum sequence length in tokens.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], max_model_len: int) -> None:
        self._weights = weights
        params = AttentionParams(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attn_scale or config.head_dim**-0.5,
        )
        xp = array_module(weights["qkv"])
        q_norm = self._norm(config, "q_norm") if config.qk_norm else None
        k_norm = self._norm(config, "k_norm") if config.qk_norm else None
        self._rope = RopeTable(xp, config.rope, max_model_len)
        qkv = self._linear("qkv")
        o = self._linear("o")
        self.attn = Attention(params, qkv, o, self._rope.array, q_norm, k_norm)
        self.mlp_norm = self._norm(config, "mlp_norm")
        self.mlp = MLP(self._linear("gate_up"), self._linear("down"), config.activation)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and the rope table."""
        return sum(int(a.nbytes) for a in (*self._weights.values(), self.attn.cos_sin))

    def __call__(self, x: Any, residual: Any, batch: ForwardBatch, pages: Pages) -> Any:
        """Return the output (T, N) for `x`, the input of attention; overwrite `residual`."""
        self._extend_rope(batch)
        x, residual = self.mlp_norm.add(self.attn(x, batch, *pages), residual)
        return kernels.residual_add(self.mlp(x), residual, out=residual)

    def store(self, x: Any, batch: ForwardBatch, pages: Pages) -> None:
        """Compute and store the keys and values of `x` only."""
        self._extend_rope(batch)
        self.attn.store(x, batch, *pages)

    def _extend_rope(self, batch: ForwardBatch) -> None:
        # Rope positions are not key indices, so `max_context_len` does not bound them.
        on_host = batch.on_host or batch
        self._rope.extend(int(on_host.rope_positions.max()) + 1)

    def _linear(self, name: str) -> Linear:
        bias = self._weights.get(f"{name}_bias")
        return Linear(
            Weight.dense(self._weights[name]), None if bias is None else Weight.dense(bias)
        )

    def _norm(self, config: ModelConfig, name: str) -> Norm:
        return Norm(self._weights[name], config.rms_norm_eps, config.norm_weight_offset)


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and options of an EAGLE-3 head.

    Attributes
    ----------
    layer : ModelConfig
        Config of its layer; `vocab_size` is the target's.
    draft_vocab_size : int
        Size of the draft vocabulary.
    feature_layers : tuple of int
        Layers of the target whose inputs are concatenated.
    target_hidden_size : int
        Nt, the target's hidden size.
    norm_before_residual : bool
        The residual stream starts from the normalised state instead of the state.
    """

    layer: ModelConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False


class Eagle3Head:
    """An EAGLE-3 head: state = fc(features), x = [norm(embedding), norm(state)].

    Parameters
    ----------
    config : Eagle3Config
    weights : mapping of str to array
        Weights of `HeadLayer`, "qkv" with 2N columns, and "fc" (N, F·Nt), "attn_norm",
        "hidden_norm", "final_norm" (N,). "embed" (V, N) and "lm_head" (Vd, N) may be missing:
        then the target's are used. "target_ids" (Vd,) int64 maps tokens of the draft vocabulary to
        the target's; without it the vocabularies are equal.
    target : DraftTarget
    """

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Any], target: DraftTarget
    ) -> None:
        layer = config.layer
        self._config = config
        self._weights = dict(weights)
        self._target = target
        self._layer = HeadLayer(layer, weights, target.max_model_len)
        self._fc = Linear(Weight.dense(weights["fc"]))
        self._embed: Callable[[Any], Any] = target.embed
        if "embed" in weights:
            self._embed = Embedding(Weight.dense(weights["embed"]))
        self._lm_head = Linear(Weight.dense(weights["lm_head"])) if "lm_head" in weights else None
        norms = (Norm(weights[name], layer.rms_norm_eps) for name in _EAGLE3_NORMS)
        self._embed_norm, self._hidden_norm, self._final_norm = norms

    @property
    def config(self) -> ModelConfig:
        """Config of the head's layer; the vocabulary is the target's."""
        return self._config.layer

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads."""
        return self._config.feature_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's own weights and rope table."""
        return self._layer.num_bytes

    def combine(self, features: Sequence[Any]) -> Any:
        """Return fc of the concatenated features."""
        return self._fc(self._target.xp.concatenate(features, axis=1))

    def store(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> None:
        """Compute and store the keys and values of `token_ids` (T,).

        `state` (T, N) holds the state of the token before each of them.
        """
        self._layer.store(self._inputs(token_ids, state)[0], batch, pages)

    def forward(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> Any:
        """Store keys and values, and return the states (T, N); `state` is overwritten."""
        return self._layer(*self._inputs(token_ids, state), batch, pages)

    def logits(self, state: Any) -> Any:
        """Return the logits (T, V) float32 of the next tokens; -inf for those it cannot draft."""
        hidden = self._final_norm(state)
        if self._lm_head is None:
            return self._target.logits(hidden)
        logits = self._lm_head(hidden, out_dtype=_FLOAT32)
        ids = self._weights.get("target_ids")
        if ids is None:
            return logits
        shape = logits.shape[0], self._config.layer.vocab_size
        full = self._target.xp.full(shape, -np.inf, np.float32)
        full[:, ids] = logits
        return full

    def _inputs(self, token_ids: Any, state: Any) -> tuple[Any, Any]:
        """Return the input of attention (T, 2N), and the residual stream (T, N)."""
        hidden = self._hidden_norm(state)
        x = self._target.xp.concatenate([self._embed_norm(self._embed(token_ids)), hidden], axis=1)
        return x, hidden if self._config.norm_before_residual else state


_EAGLE3_NORMS = ("attn_norm", "hidden_norm", "final_norm")


class MtpHead:
    """An MTP head: x = proj([norm(state), norm(embedding)]), then a layer of the model and a norm.

    The first state is the target's hidden state after its final norm. Embedding and output layer
    are the target's.

    Parameters
    ----------
    layer : Decoder
        A pipeline stage with the head's only layer.
    weights : mapping of str to array
        "proj" (N, 2N), "embed_norm", "hidden_norm", "final_norm" (N,).
    target : DraftTarget
    zero_first : bool
        The embedding at position 0 is 0.
    """

    def __init__(
        self,
        layer: Decoder,
        weights: Mapping[str, Any],
        target: DraftTarget,
        *,
        zero_first: bool = False,
    ) -> None:
        c = self.config = layer.config
        self._target = target
        self._stage = layer
        self._weights = dict(weights)
        self._zero_first = zero_first
        self._proj = Linear(Weight.dense(weights["proj"]))
        self._embed_norm, self._hidden_norm, self._final_norm = (
            Norm(weights[name], c.rms_norm_eps, c.norm_weight_offset) for name in _MTP_NORMS
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The residual stream that leaves the target's last layer."""
        return (self._target.num_layers,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's own weights and rope table."""
        return self._stage.num_bytes + sum(int(a.nbytes) for a in self._weights.values())

    def combine(self, features: Sequence[Any]) -> Any:
        """Return the target's final hidden states."""
        return self._target.final_norm(features[0])

    def store(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> None:
        """Compute and store the keys and values of `token_ids` (T,).

        `state` (T, N) holds the state of the token before each of them.
        """
        x = self._inputs(token_ids, state, batch)
        [layer] = self._stage.layers
        assert isinstance(layer, DecoderLayer) and isinstance(layer.attn, Attention | Mla)
        store: Callable[..., None] = layer.attn.store
        store(layer.attn_norm(x), batch, *pages)

    def forward(self, token_ids: Any, state: Any, batch: ForwardBatch, pages: Pages) -> Any:
        """Store keys and values, and return the states (T, N) of `token_ids`."""
        x = self._inputs(token_ids, state, batch)
        delta, residual = self._stage.run_stage(replace(batch, entering=(None, x)), [pages])
        if delta is None:
            return self._final_norm(residual)
        return self._final_norm.add(delta, residual)[0]

    def logits(self, state: Any) -> Any:
        """Return the logits (T, V) float32 of the next tokens."""
        return self._target.logits(state)

    def _inputs(self, token_ids: Any, state: Any, batch: ForwardBatch) -> Any:
        """Return the residual stream (T, N)."""
        _extend_ropes(self._stage, batch)
        embedding = self._embed_norm(self._target.embed(token_ids))
        if self._zero_first:
            embedding *= (batch.rope_positions != 0).astype(embedding.dtype)[:, None]
        both = [self._hidden_norm(state), embedding]
        return self._proj(self._target.xp.concatenate(both, axis=1))


_MTP_NORMS = ("embed_norm", "hidden_norm", "final_norm")


def _extend_ropes(layer: Decoder, batch: ForwardBatch) -> None:
    # Rope positions are not key indices, so `max_context_len` does not bound them.
    on_host = batch.on_host or batch
    layer.extend_ropes(int(on_host.rope_positions.max()) + 1)
