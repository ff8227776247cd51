"""A linear layer; the op that multiplies is chosen by the format of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine import kernels
from engine.dtypes import FLOAT_NAMES
from engine.errors import WeightsError
from engine.layers.arrays import arrays_of
from engine.layers.codes import Codes
from engine.layers.norm import Norm
from engine.layers.stacked import stacked_product
from engine.weights import FORMATS, Weight
from engine.weights.formats import STACKED

__all__ = ["PRODUCTS", "Linear", "Product"]


@dataclass(frozen=True)
class Product:
    """The ops that multiply by weights of one format.

    Attributes
    ----------
    plain : callable
        ``plain(x, weight, bias=, residual=, activation=, out=, out_dtype=, deterministic=)``, with
        the semantics of `kernels.gemm`.
    of_normed : callable
        ``of_normed(x, norm, weight, bias=, activation=)``: the product of ``norm(x)``.
    """

    plain: Callable[..., Any]
    of_normed: Callable[..., Any]


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
    """Return the ops of a format of both operands; `op` quantizes x itself unless it is codes."""

    def plain(x: Any, weight: Weight, *, out_dtype: Any = None, **options: Any) -> Any:
        if isinstance(x, Codes):
            out_dtype = x.dtype if out_dtype is None else out_dtype
            x, options["x_scales"] = x.codes, x.scales
        return op(x, weight.data, weight.scales, out_dtype=out_dtype, pdl=True, **options)

    def of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
        options |= {"norm_weight": norm.weight, "eps": norm.eps, "weight_offset": norm.offset}
        return op(x, weight.data, weight.scales, pdl=True, **options)

    return Product(plain, of_normed)


def _stacked(x: Any, weight: Weight, **options: Any) -> Any:
    return stacked_product(lambda part: PRODUCTS[part.format.name].plain, x, weight, **options)


def _stacked_of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
    return _stacked(norm(x), weight, **options)


_DENSE = Product(_dense, _dense_of_normed)

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
"""Name of a weight's format -> the ops that multiply by it."""


class Linear:
    """y = x Wᵀ + b.

    Parameters
    ----------
    weight : Weight
        (out, in).
    bias : Weight, optional
        (out,), dense, in x's dtype.
    deterministic : bool
        Give each token the same bits in any batch.

    Raises
    ------
    WeightsError
        If no op multiplies by weights of this format.
    """

    __slots__ = ("_product", "bias", "deterministic", "weight")

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
        self._product = PRODUCTS[weight.format.name]

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array it holds."""
        yield from arrays_of({"weight": self.weight})
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
        """Return activation(x Wᵀ + b), (T, out), for `x` (T, in); in `out_dtype` or x's dtype.

        `x` may be `Codes` if the weight's format has the other operand in 8 bits, too.

        With a `residual` (T, out), the result is added to it in place and returned. With "swiglu",
        the matrix is gate_up and the result has shape (T, out / 2).
        """
        return self._product.plain(
            x,
            self.weight,
            bias=self.bias,
            residual=residual,
            activation=activation,
            out=residual,
            out_dtype=out_dtype,
            deterministic=self.deterministic,
        )

    def of_normed(self, x: Any, norm: Norm, *, activation: str | None = None) -> Any:
        """Return activation(norm(x) Wᵀ + b); in one kernel if there are few tokens."""
        return self._product.of_normed(x, norm, self.weight, bias=self.bias, activation=activation)
