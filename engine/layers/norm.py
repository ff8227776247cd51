"""RMSNorm, alone or fused with the addition to the residual stream; and no norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels

__all__ = ["NoNorm", "Norm"]


class Norm:
    """y = x / rms(x) · (weight + offset).

    Parameters
    ----------
    weight : (N,) array
    eps : float
        Added to the mean square.
    offset : float
        Added to `weight` (Gemma: 1).
    branch_scale : float
        Factor on what `add` adds to the residual stream (Granite).
    """

    __slots__ = ("branch_scale", "eps", "offset", "weight")

    def __init__(
        self, weight: Any, eps: float, offset: float = 0.0, branch_scale: float = 1.0
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self.branch_scale = branch_scale

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array it holds."""
        yield "weight", self.weight

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return `x` (..., N) normalised; in `out` if given (which may be `x`)."""
        return kernels.rmsnorm(x, self.weight, eps=self.eps, weight_offset=self.offset, out=out)

    def add(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return (norm(h), h) of h = branch_scale * x + residual, in place of `x` and `residual`.

        SAFETY: nothing else may hold a view of `x` or `residual` (T, N), or read them afterwards.
        """
        y, h = kernels.rmsnorm(
            x,
            self.weight,
            eps=self.eps,
            residual=residual,
            x_scale=self.branch_scale,
            weight_offset=self.offset,
            out=x,
            residual_out=residual,
        )
        return y, h


class NoNorm(Norm):
    """Takes the place of a `Norm` where a family has none; `add` still adds."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, 0.0)

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield nothing: it holds no array."""
        return iter(())

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return `x` itself."""
        return x

    def add(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return (x + residual) twice, the same array, written to `residual` in place."""
        h = kernels.residual_add(x, residual, out=residual)
        return h, h
