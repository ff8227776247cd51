"""The MLP: down(act(gate x) · up x), or down(act(up x))."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

from engine import kernels
from engine.errors import ConfigError
from engine.layers.arrays import arrays_of
from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["MLP", "gated"]

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
_GATES = ("silu", *_GELU, "relu2")
_PLAIN = (*_GATES, "relu", "xielu")


class MLP:
    """Gate and up projections in one GEMM (SwiGLU may be fused into it), then down.

    Parameters
    ----------
    gate_up : Linear
        (2F, N): the rows of gate, then the rows of up; or (F, N), up alone.
    down : Linear
        (N, F).
    activation : str
        Activation of the gate, or of up: "silu", "gelu" (erf), "gelu_tanh", "relu2" (the square of
        ReLU), or without a gate "relu" or "xielu".
    is_gated : bool
        Whether `gate_up` includes a gate.
    coefficients : (4,) array of float32, optional
        Coefficients of `kernels.xielu`.
    sparsity : float
        Share of the gate's features to set to 0 (`kernels.gaussian_topk`); 0 keeps all. Only with a
        gate.

    Raises
    ------
    ConfigError
        If the activation is not supported.
    """

    __slots__ = ("activation", "coefficients", "cutoff", "down", "gate_up", "is_gated")

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        activation: str,
        *,
        is_gated: bool = True,
        coefficients: Any = None,
        sparsity: float = 0.0,
    ) -> None:
        known = _GATES if is_gated else _PLAIN
        if activation not in known:
            raise ConfigError(f"activation must be one of {', '.join(known)}; got {activation!r}")
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.is_gated = is_gated
        self.coefficients = coefficients
        self.cutoff = NormalDist().inv_cdf(sparsity) if sparsity else None

    @property
    def num_multiplied(self) -> int:
        """Number of matrix elements multiplied per token."""
        return self.gate_up.weight.num_elements + self.down.weight.num_elements

    @property
    def input_format(self) -> Format | None:
        """Weight format of the first product: the preceding norm may quantize its output for it."""
        return self.gate_up.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the MLP."""
        yield from arrays_of(gate_up=self.gate_up, down=self.down)
        if self.coefficients is not None:
            yield "coefficients", self.coefficients

    def __call__(
        self, x: Any, *, norm: Norm | None = None, residual: Any = None, slots: Any = None
    ) -> Any:
        """Return the MLP's output (T, N) for `x` (T, N), or for ``norm(x)``.

        With a `residual` (T, N), which may be `x`, the output is added to it. `slots` is ignored:
        only `MoE` counts tokens.
        """
        return self.down(self._gated(x, norm), residual=residual)

    def _gated(self, x: Any, norm: Norm | None) -> Any:
        """Return act(gate) * up, or act(up), (T, F)."""
        is_fused = self.activation == "silu" and self.is_gated and self.cutoff is None
        activation = "swiglu" if is_fused else None
        if norm is None:
            product = self.gate_up(x, activation=activation)
        else:
            product = self.gate_up.of_normed(x, norm, activation=activation)
        if activation is not None:
            return product
        if self.cutoff is not None:
            gate = product[:, : product.shape[1] // 2]
            kernels.gaussian_topk(gate, self.cutoff, out=gate)
        if self.is_gated and self.activation == "relu2":
            return kernels.relu(product, squared=True, gated=True)
        if self.is_gated:
            return gated(self.activation, product)
        if self.activation == "silu":
            return kernels.silu(product, out=product)
        if self.activation in ("relu", "relu2"):
            return kernels.relu(product, squared=self.activation == "relu2", out=product)
        if self.activation == "xielu":
            return kernels.xielu(product, self.coefficients, out=product)
        return kernels.gelu(product, approximate=_GELU[self.activation], out=product)


def gated(activation: str, x: Any, up: Any = None, out: Any = None) -> Any:
    """Return act(x) * up, in `out` if given; without `up`, `x` is rows of [gate | up]."""
    if activation == "silu":
        return kernels.swiglu(x, up=up, out=out)
    return kernels.geglu(x, up=up, approximate=_GELU[activation], out=out)
