"""RMSNorm and LayerNorm, alone or fused with the residual addition and with quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine import kernels
from engine.device import array_module
from engine.errors import ConfigError
from engine.weights import Format

__all__ = ["HeadNorm", "NoNorm", "Norm", "QuantizedRows"]

_LARGE = 2.0**15  # a float16 number; adding 1 to its square is lost in float32


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of activations in 8 bits: a norm's output for a product with 8-bit operands.

    Attributes
    ----------
    codes : (T, N) array of uint8 (bits of e4m3) or int8
    scales : (T, 1) or (T, ceil(N / 128)) array of float32
    dtype : dtype
        Dtype of the rows before they were quantized.
    numbers : (T, N) array of `dtype`, optional
        These rows, if they were kept.
    """

    codes: Any
    scales: Any
    dtype: Any
    numbers: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, N)."""
        shape: tuple[int, ...] = self.codes.shape
        return shape


class Norm:
    """y = x / rms(x) · (weight + offset), or a LayerNorm.

    Parameters
    ----------
    weight : (N,) array
    eps : float
        Added to the mean square.
    offset : float
        Added to `weight` (Gemma: 1).
    branch_scale : float
        Factor on the branch's output when `add` adds it to the residual stream (Granite).
    subtract_mean : bool
        Subtract the mean of x first: a LayerNorm.
    bias : (N,) array, optional
        Added last; only with `subtract_mean`.
    """

    __slots__ = ("bias", "branch_scale", "eps", "offset", "subtract_mean", "weight")

    def __init__(
        self,
        weight: Any,
        eps: float,
        offset: float = 0.0,
        branch_scale: float = 1.0,
        *,
        subtract_mean: bool = False,
        bias: Any = None,
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self.branch_scale = branch_scale
        self.subtract_mean = subtract_mean
        self.bias = bias

    @property
    def is_plain(self) -> bool:
        """Whether a call is a plain row-wise RMSNorm, which other kernels can fuse."""
        return not self.subtract_mean

    @property
    def is_plain_add(self) -> bool:
        """Whether `add` adds and normalises as `kernels.rmsnorm` does, without a branch scale.

        Then `add_for` takes the outputs (T, k, N) of each token's experts, too, and sums them.
        """
        return self.is_plain and type(self) is Norm and self.branch_scale == 1.0

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the norm."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return `x` (..., N) normalised, written to `out` if given, which may be `x`."""
        return kernels.rmsnorm(x, self.weight, out=out, **self._options())

    def add(self, x: Any, residual: Any, *, is_late: bool = False) -> tuple[Any, Any]:
        """Return (norm(h), h), h = branch_scale * x + residual, in place of `x` and `residual`.

        `is_late`: see `kernels.rmsnorm`.
        SAFETY: nothing else may hold a view of `x` or `residual` (T, N), or read them afterwards.
        """
        y, h = kernels.rmsnorm(
            x,
            self.weight,
            residual=residual,
            x_scale=self.branch_scale,
            out=x,
            residual_out=residual,
            is_late=is_late,
            **self._options(),
        )
        return y, h

    def add_for(
        self, form: Format | None, x: Any, residual: Any, *, keeps_numbers: bool = False
    ) -> tuple[Any, Any]:
        """Add, normalise, and quantize the result for a product of weight format `form`.

        norm(h) is returned as `QuantizedRows` if the format has both operands in 8 bits; with
        `keeps_numbers` they have `numbers`. See `add`. `x` may be (T, k, N): see `is_plain_add`.
        """
        is_late = form is not None and form.is_packed
        coded: dict[str, Any] = {}
        if form is not None and form.activations and self.weight is not None:
            coded = {"dtype": form.activations, "group": form.activation_group}
        norm: dict[str, Any] = {"eps": self.eps, "weight_offset": self.offset}
        norm["residual_out"] = residual
        if x.ndim == 3:
            assert self.is_plain_add and not keeps_numbers
            norm |= coded or {"is_late": is_late}
            *y, h = kernels.moe_combine_rmsnorm(x, residual, self.weight, **norm)
            return QuantizedRows(y[0], y[1], x.dtype) if coded else y[0], h
        if not coded or self.subtract_mean:
            return self.add(x, residual, is_late=is_late)
        codes, scales, h = kernels.rmsnorm_quantize(
            x,
            self.weight,
            residual=residual,
            x_scale=self.branch_scale,
            normed_out=x if keeps_numbers else None,
            **coded,
            **norm,
        )
        return QuantizedRows(codes, scales, x.dtype, x if keeps_numbers else None), h

    def _options(self) -> dict[str, Any]:
        options = {"eps": self.eps, "weight_offset": self.offset}
        return options | {"subtract_mean": self.subtract_mean, "bias": self.bias}


class HeadNorm(Norm):
    """LayerNorm of heads, each with a weight of its own.

    Parameters
    ----------
    weight : (H, D) array
    eps : float
        Added to the variance.
    """

    __slots__ = ("_large", "_ones")

    def __init__(self, weight: Any, eps: float) -> None:
        super().__init__(weight, eps, subtract_mean=True)
        xp = array_module(weight)
        self._ones = xp.ones(weight.shape[1], weight.dtype)
        self._large = xp.full(weight.shape[1], _LARGE, weight.dtype)

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the norm."""
        yield from super().arrays()
        yield "ones", self._ones
        yield "large", self._large

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return `x` (T, H, D) normalised, written to `out` if given, which is C-contiguous."""
        y = kernels.rmsnorm(x, self._ones, eps=self.eps, subtract_mean=True)
        # A row of weights per head is an argument of `gated_norm` alone, which divides by
        # sqrt(mean(y^2) + eps) and multiplies by silu(gate). Here both are 2^15, since mean(y^2) is
        # at most 1: only the weights remain.
        gate = array_module(self._large).broadcast_to(self._large, y.shape)
        return kernels.gated_norm(
            y, gate, self.weight, eps=_LARGE**2, out=y if out is None else out
        )


class NoNorm(Norm):
    """Stand-in for families without a norm: the identity, and a residual addition.

    Raises
    ------
    ConfigError
        If `branch_scale` is not 1: no kernel would apply it.
    """

    __slots__ = ()

    def __init__(self, branch_scale: float = 1.0) -> None:
        if branch_scale != 1.0:
            raise ConfigError(f"branch_scale must be 1 without pre_norms; got {branch_scale}")
        super().__init__(None, 0.0)

    @property
    def is_plain(self) -> bool:
        """False: there is nothing to fuse."""
        return False

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield nothing: it holds no array."""
        return iter(())

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return `x` itself."""
        return x

    def add(self, x: Any, residual: Any, *, is_late: bool = False) -> tuple[Any, Any]:
        """Return (h, h), h = x + residual written to `residual` in place."""
        h = kernels.residual_add(x, residual, out=residual)
        return h, h
