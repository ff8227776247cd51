"""Lightning attention: linear attention whose states decay at a constant rate per head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.config import LightningConfig
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mixer import state_places
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["Lightning"]


class Lightning:
    """One layer's lightning attention.

    A head's state S is updated to e^-r S + v k^T, and read as S q. That is Mamba-2's recurrence
    with a time step of 1 and no skip connection.

    Parameters
    ----------
    config : LightningConfig
        Sizes, of this rank's heads.
    in_proj : Linear
        (4 H D, N): the rows of q, k, v and the output's gate.
    rate : (H,) array of float32
        Logarithm of each head's decay rate r.
    zeros : (H,) array of float32
    cos_sin : (P, R) float32 array
    norm : Norm
        (H D,): norm of the output, over the heads of each group. It makes a factor on the queries
        one on its epsilon.
    o : Linear
        Output projection (N, H D).
    q_norm, k_norm : Norm, optional
        Norms of each head, (D,).

    References
    ----------
    Qin et al.: Lightning Attention-2, arXiv:2401.04658.
    """

    __slots__ = (
        *("config", "cos_sin", "in_proj", "k_norm", "norm", "o", "q_norm", "rate", "zeros"),
    )

    def __init__(
        self,
        config: LightningConfig,
        in_proj: Linear,
        rate: Any,
        zeros: Any,
        cos_sin: Any,
        norm: Norm,
        o: Linear,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        self.config = config
        self.in_proj = in_proj
        self.rate = rate
        self.zeros = zeros
        self.cos_sin = cos_sin
        self.norm = norm
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        for name in ("rate", "zeros", "cos_sin"):
            yield name, getattr(self, name)
        yield from arrays_of(in_proj=self.in_proj, norm=self.norm, o=self.o)
        yield from arrays_of(q_norm=self.q_norm, k_norm=self.k_norm)

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        states: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Update the states, and return the output (T, N) for `x` (T, N). See `Mixer`.

        `states` (S, H, D, D) holds the state of every head, for each of S slots.
        """
        c = self.config
        projected = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        q, k, v = (self._heads(projected, part) for part in range(3))
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm(q, out=q)
            self.k_norm(k, out=k)
        kernels.rope(q, k, batch.rope_positions, self.cos_sin, out=(q, k))
        heads = kernels.mamba2(
            v,
            projected[:, : c.num_heads],  # ignored: both bounds of a step are 1
            k,
            q,
            a_log=self.rate,
            d=self.zeros,
            dt_bias=self.zeros,
            states=states,
            dt_min=1.0,
            dt_max=1.0,
            max_seqlen_q=batch.max_seqlen_q,
            deterministic=self.in_proj.deterministic,
            pdl=True,
            **state_places(batch),
        )
        groups = heads.shape[0], c.num_groups, -1
        y = kernels.gated_norm(
            heads.reshape(groups),
            projected[:, 3 * c.inner_dim :].reshape(groups),
            self.norm.weight.reshape(c.num_groups, -1),
            eps=self.norm.eps,
            activation="sigmoid",
        )
        y = y.reshape(y.shape[0], -1)
        if rows is not None:
            y = kernels.embedding(rows, y)
        return self.o(y, residual=residual)

    def _heads(self, projected: Any, part: int) -> Any:
        """Return part q, k or v of the projection by head, (T, H, D)."""
        c = self.config
        rows = projected[:, part * c.inner_dim : (part + 1) * c.inner_dim]
        return rows.reshape(rows.shape[0], c.num_heads, c.head_dim)
