"""Gated delta net: linear attention with a state per value head instead of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.config import GatedDeltaConfig
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mixer import state_places
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["GatedDelta"]


class GatedDelta:
    """One layer's gated delta net.

    The input projection computes all that a token contributes: q, k and v, which pass a short
    causal convolution and SiLU, the output's gate z, the decays a, and per value head the update
    strength b. With a `gate_rank`, it computes a latent of z and one of a instead.

    Parameters
    ----------
    config : GatedDeltaConfig
        Sizes, of this rank's heads.
    in_proj : Linear
        (in_dim, N): the rows of q, k, v, z, a and b.
    conv : (2 Hk dk + Hv dv, conv_size) array
        Taps of every channel of q, k and v.
    decay : (Hv,) array of float32
        Logarithm of each head's decay rate.
    dt : (Hv,) or (Hv, dk) array of float32
        Bias of the time steps a.
    norm : Norm
        Norm of each head's output, (dv,).
    o : Linear
        Output projection (N, Hv dv).
    z_up, a_up : Linear, optional
        Projections of the latents of z and a: (Hv dv, gate_rank), (Hv dk, gate_rank).

    References
    ----------
    Yang et al.: Gated Delta Networks, arXiv:2412.06464; Kimi Team: Kimi Linear, arXiv:2510.26692.
    """

    __slots__ = (*("a_up", "config", "conv", "decay", "dt", "in_proj", "norm", "o", "z_up"),)

    def __init__(
        self,
        config: GatedDeltaConfig,
        in_proj: Linear,
        conv: Any,
        decay: Any,
        dt: Any,
        norm: Norm,
        o: Linear,
        z_up: Linear | None = None,
        a_up: Linear | None = None,
    ) -> None:
        self.config = config
        self.in_proj = in_proj
        self.conv = conv
        self.decay = decay
        self.dt = dt
        self.norm = norm
        self.o = o
        self.z_up = z_up
        self.a_up = a_up

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield "conv", self.conv
        yield "decay", self.decay
        yield "dt", self.dt
        yield from arrays_of(in_proj=self.in_proj, norm=self.norm, o=self.o)
        yield from arrays_of(z_up=self.z_up, a_up=self.a_up)

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        conv_states: Any,
        states: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Update the states, and return the output (T, N) for `x` (T, N). See `Mixer`.

        `conv_states` (S, conv_size - 1, channels) holds the last inputs of the convolution,
        `states` (S, Hv, dv, dk) the state of every value head, for each of S slots.
        """
        c = self.config
        projected = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        num_tokens = projected.shape[0]
        z, a = self._gates(projected)
        places = state_places(batch)
        mixed = kernels.causal_conv(
            projected[:, : c.conv_dim],
            self.conv,
            states=conv_states,
            activation="silu",
            pdl=True,
            **places,
        )
        heads = kernels.gated_delta(
            mixed[:, : c.key_dim].reshape(num_tokens, -1, c.key_head_dim),
            mixed[:, c.key_dim : 2 * c.key_dim].reshape(num_tokens, -1, c.key_head_dim),
            mixed[:, 2 * c.key_dim :].reshape(num_tokens, -1, c.value_head_dim),
            a,
            projected[:, -c.num_value_heads :],
            a_log=self.decay,
            dt_bias=self.dt,
            states=states,
            beta_scale=c.beta_scale,
            gate_bound=c.gate_bound,
            z=z,
            norm_weight=self.norm.weight,
            norm_eps=self.norm.eps,
            norm_activation=c.norm_activation,
            max_seqlen_q=batch.max_seqlen_q,
            deterministic=self.in_proj.deterministic,
            pdl=True,
            **places,
        )
        heads = heads.reshape(num_tokens, -1)
        if rows is not None:
            heads = kernels.embedding(rows, heads)
        return self.o(heads, residual=residual)

    def _gates(self, projected: Any) -> tuple[Any, Any]:
        """Return the output's gate (T, Hv, dv), and the decays (T, Hv) or (T, Hv, dk)."""
        c = self.config
        gates = projected[:, c.conv_dim : -c.num_value_heads]
        if self.z_up is not None and self.a_up is not None:
            z = self.z_up(gates[:, : c.gate_rank])
            a = self.a_up(gates[:, c.gate_rank :])
        else:
            z = gates[:, : c.value_dim]
            a = gates[:, c.value_dim :]
        z = z.reshape(z.shape[0], -1, c.value_head_dim)
        return z, a.reshape(a.shape[0], -1, c.key_head_dim) if c.channel_gate else a
