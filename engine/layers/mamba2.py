"""Mamba-2: a selective state space per head instead of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.config import Mamba2Config
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mixer import state_places
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["Mamba2"]


class Mamba2:
    """One layer's selective state space.

    Parameters
    ----------
    config : Mamba2Config
        Sizes, of this rank's groups.
    in_proj : Linear
        (2 H P + 2 G N + H, N): the rows of the gate z, x, B, C and the time step.
    conv : (H P + 2 G N, conv_size) array
        Taps of every channel of x, B and C.
    conv_bias : (H P + 2 G N,) array or None
    decay, skip, step : (H,) arrays of float32
        Logarithm of each head's decay rate, factor of its skip connection, bias of its time step.
    norm : Norm or None
        (H P,): norm of the output, over the heads of each group.
    o : Linear
        Output projection (N, H P).

    References
    ----------
    Dao, Gu: Transformers are SSMs, arXiv:2405.21060.
    """

    __slots__ = (*("config", "conv", "conv_bias", "decay", "in_proj", "norm", "o", "skip", "step"),)

    def __init__(
        self,
        config: Mamba2Config,
        in_proj: Linear,
        conv: Any,
        conv_bias: Any,
        decay: Any,
        skip: Any,
        step: Any,
        norm: Norm | None,
        o: Linear,
    ) -> None:
        self.config = config
        self.in_proj = in_proj
        self.conv = conv
        self.conv_bias = conv_bias
        self.decay = decay
        self.skip = skip
        self.step = step
        self.norm = norm
        self.o = o

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        for name in ("conv", "conv_bias", "decay", "skip", "step"):
            if (array := getattr(self, name)) is not None:
                yield name, array
        yield from arrays_of(in_proj=self.in_proj, norm=self.norm, o=self.o)

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
        `states` (S, H, P, N) the state of every head, for each of S slots.
        """
        c = self.config
        projected = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        num_tokens = projected.shape[0]
        places = state_places(batch)
        last = c.inner_dim + c.conv_dim
        mixed = kernels.causal_conv(
            projected[:, c.inner_dim : last],
            self.conv,
            states=conv_states,
            bias=self.conv_bias,
            activation="silu",
            pdl=True,
            **places,
        )
        heads = kernels.mamba2(
            mixed[:, : c.inner_dim].reshape(num_tokens, -1, c.head_dim),
            projected[:, last:],
            mixed[:, c.inner_dim : -c.group_dim].reshape(num_tokens, -1, c.state_size),
            mixed[:, -c.group_dim :].reshape(num_tokens, -1, c.state_size),
            a_log=self.decay,
            d=self.skip,
            dt_bias=self.step,
            states=states,
            dt_min=c.dt_min,
            dt_max=c.dt_max,
            max_seqlen_q=batch.max_seqlen_q,
            deterministic=self.in_proj.deterministic,
            pdl=True,
            **places,
        )
        y = self._gated(heads.reshape(num_tokens, -1), projected[:, : c.inner_dim])
        if rows is not None:
            y = kernels.embedding(rows, y)
        return self.o(y, residual=residual)

    def _gated(self, heads: Any, gate: Any) -> Any:
        """Return the gated output of all heads (T, H P), normalised if the layer has a norm."""
        if self.norm is None:
            return kernels.swiglu(gate, up=heads)
        groups = len(heads), self.config.num_groups, -1
        y = kernels.gated_norm(
            heads.reshape(groups),
            gate.reshape(groups),
            self.norm.weight.reshape(self.config.num_groups, -1),
            eps=self.norm.eps,
            gate_first=self.config.norm == "gate_first",
        )
        return y.reshape(heads.shape)
