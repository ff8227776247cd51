"""A linear layer: the weight's format selects the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from engine import kernels
from engine.device import empty_like
from engine.dtypes import FLOAT_NAMES
from engine.errors import WeightsError
from engine.kernels.gemm.launch import sums_in_parts
from engine.layers.arrays import HoldsArrays, arrays_of
from engine.layers.norm import Norm, QuantizedRows
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import STACKED

__all__ = ["PRODUCTS", "Adapter", "Linear", "NormedLinear", "Product"]


@dataclass(frozen=True)
class Product:
    """The ops that multiply by a weight of one format.

    Attributes
    ----------
    plain : callable
        ``plain(x, weight, bias=, residual=, activation=, out=, out_dtype=, deterministic=)``:
        activation(x Wᵀ + b) + residual, the contract of `kernels.gemm`. If it sends, also `peers=`.
    of_normed : callable
        ``of_normed(x, norm, weight, bias=, activation=, out=)``: the product of ``norm(x)``. Of
        dense weights also `deterministic=`.
    sends : bool
        Whether `plain` may send rows of its result to other ranks.
    """

    plain: Callable[..., Any]
    of_normed: Callable[..., Any]
    sends: bool = False


class Adapter(HoldsArrays, Protocol):
    """Computes a layer's products in place of the ops of its format; see `Product`."""

    def plain(self, x: Any, weight: Weight, **options: Any) -> Any:
        """Return activation(x Wᵀ + b) + residual."""

    def of_normed(self, x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
        """Return the product of ``norm(x)``."""


def _dense(x: Any, weight: Weight, **options: Any) -> Any:
    # pdl is safe: no kernel writes the weight or the bias, which are read before the wait.
    return kernels.gemm(x, weight.data, pdl=True, **options)


def _dense_of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
    return kernels.rmsnorm_gemm(
        x, norm.weight, weight.data, eps=norm.eps, weight_offset=norm.offset, pdl=True, **options
    )


def _packed(x: Any, weight: Weight, **options: Any) -> Any:
    return kernels.gemm_wna16(x, weight, pdl=True, **options)


def _packed_of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
    return kernels.rmsnorm_gemm_wna16(
        x, norm.weight, weight, eps=norm.eps, weight_offset=norm.offset, pdl=True, **options
    )


def _in_8_bits(op: Callable[..., Any]) -> Product:
    """Return the ops of a format with both operands in 8 bits.

    `op` quantizes x, unless a norm has done so already.
    """

    def plain(x: Any, weight: Weight, *, out_dtype: Any = None, **options: Any) -> Any:
        if isinstance(x, QuantizedRows):
            out_dtype = x.dtype if out_dtype is None else out_dtype
            x, options["x_scales"] = x.codes, x.scales
        return op(x, weight.data, weight.scales, out_dtype=out_dtype, pdl=True, **options)

    def of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
        options |= {"norm_weight": norm.weight, "eps": norm.eps, "weight_offset": norm.offset}
        return op(x, weight.data, weight.scales, pdl=True, **options)

    return Product(plain, of_normed, sends=True)


def _stacked(
    x: Any,
    weight: Weight,
    *,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> Any:
    """Multiply by each part of a stacked weight, and write the results side by side.

    With "swiglu", gate and up may be in different parts, so the product is rounded to x's dtype
    before the activation.
    """
    is_gated = activation == "swiglu"
    y = out
    if y is None or is_gated:
        y = empty_like(x, out_dtype, (x.shape[0], weight.shape[0]))
    for part, rows in _parts(weight):
        PRODUCTS[part.format.name].plain(
            x,
            part,
            bias=None if bias is None else bias[rows],
            residual=None if residual is None or is_gated else residual[:, rows],
            activation=None if is_gated else activation,
            out=y[:, rows],
            out_dtype=out_dtype,
            deterministic=deterministic,
        )
    return kernels.swiglu(y, out=out) if is_gated else y


def _stacked_of_normed(
    x: Any, norm: Norm, weight: Weight, *, bias: Any = None, activation: str | None = None
) -> Any:
    """Multiply norm(x) by each part of a stacked weight; every product computes the norm itself."""
    is_gated = activation == "swiglu"
    y = empty_like(x, None, (x.shape[0], weight.shape[0]))
    for part, rows in _parts(weight):
        PRODUCTS[part.format.name].of_normed(
            x,
            norm,
            part,
            bias=None if bias is None else bias[rows],
            activation=None if is_gated else activation,
            out=y[:, rows],
        )
    return kernels.swiglu(y) if is_gated else y


def _parts(weight: Weight) -> Iterator[tuple[Weight, slice]]:
    """Yield each part of a stacked weight, and its rows."""
    first = 0
    for part in weight.parts:
        yield part, slice(first, first + part.shape[0])
        first += part.shape[0]


_DENSE = Product(_dense, _dense_of_normed, sends=True)

PRODUCTS: dict[str, Product] = {
    **dict.fromkeys(FLOAT_NAMES, _DENSE),
    **dict.fromkeys(
        (name for name, form in FORMATS.items() if form.is_packed),
        Product(_packed, _packed_of_normed),
    ),
    "fp8": _in_8_bits(kernels.gemm_fp8),
    "fp8_block": _in_8_bits(kernels.gemm_fp8),
    "int8": _in_8_bits(kernels.gemm_int8),
    STACKED.name: Product(_stacked, _stacked_of_normed),
}
"""The ops for each weight format, by its name."""


class Linear:
    """y = x Wᵀ + b.

    Parameters
    ----------
    weight : Weight
        (out, in).
    bias : Weight, optional
        (out,), dense, in x's dtype.
    deterministic : bool
        Batch invariance: a token's bits do not depend on the rest of the batch.

    Attributes
    ----------
    product : Product
        Computes the products; an adapter replaces it.

    Raises
    ------
    WeightsError
        If no op supports the weight's format.
    """

    __slots__ = ("_adapter", "bias", "deterministic", "product", "weight")

    def __init__(
        self, weight: Weight, bias: Weight | None = None, *, deterministic: bool = False
    ) -> None:
        if weight.format.name not in PRODUCTS:
            raise WeightsError(
                f"weight must have a format of {', '.join(PRODUCTS)}; got {weight.format.name!r}"
            )
        self.weight = weight
        self.bias = None if bias is None else bias.data
        self.deterministic = deterministic
        self.product = PRODUCTS[weight.format.name]
        self._adapter: Adapter | None = None

    @property
    def input_format(self) -> Format | None:
        """Weight format that the preceding norm may quantize its output for; None: x as it is."""
        return self.weight.format if self._adapter is None else None

    @property
    def sums_in_parts(self) -> bool:
        """Whether `residual` and `of_normed` return the bits of separate kernels."""
        return self.deterministic and self.product is _DENSE and sums_in_parts(self.weight.data)

    def adapt(self, adapter: Adapter) -> None:
        """Let `adapter` compute the products from now on; it reads x in its own dtype."""
        self._adapter = adapter
        self.product = Product(adapter.plain, adapter.of_normed)

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(weight=self.weight, adapter=self._adapter)
        if self.bias is not None:
            yield "bias", self.bias

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return activation(x Wᵀ + b), (T, out), in `out_dtype` or x's dtype.

        Parameters
        ----------
        x : (T, in) array or QuantizedRows
            Quantized rows need a weight format with both operands in 8 bits.
        activation : str, optional
            With "swiglu", the matrix is gate_up and the result has shape (T, out / 2).
        out_dtype : dtype, optional
        residual : (T, out) array, optional
            The result is added to it in place; it is also the return value.
        """
        return self.product.plain(
            x,
            self.weight,
            bias=self.bias,
            residual=residual,
            activation=activation,
            out=residual,
            out_dtype=out_dtype,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of the product that do not depend on the call."""
        return {"deterministic": self.deterministic}

    def of_normed(self, x: Any, norm: Norm, *, activation: str | None = None) -> Any:
        """Return activation(norm(x) Wᵀ + b). For few tokens it is one kernel."""
        options: dict[str, Any] = {"bias": self.bias, "activation": activation}
        if self.sums_in_parts:
            options["deterministic"] = True
        return self.product.of_normed(x, norm, self.weight, **options)


class NormedLinear(Linear):
    """A linear layer that normalises its input first (BitNet).

    Parameters
    ----------
    norm : Norm
    linear : Linear
    """

    __slots__ = ("linear", "norm")

    def __init__(self, norm: Norm, linear: Linear) -> None:
        bias = None if linear.bias is None else Weight.dense(linear.bias)
        super().__init__(linear.weight, bias, deterministic=linear.deterministic)
        self.norm = norm
        self.linear = linear

    @property
    def input_format(self) -> Format | None:
        """None: the norm reads x as it is."""
        return None

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(norm=self.norm, linear=self.linear)

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return the product of norm(x), which overwrites `x` (T, in). See `Linear`."""
        x = self.norm(x, out=x)
        options = {"activation": activation, "out_dtype": out_dtype, "residual": residual}
        return self.linear(x, **options)
