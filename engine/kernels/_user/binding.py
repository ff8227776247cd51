"""The arguments of one call of a user's op, checked against its signature."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from engine.checks import shown
from engine.device import is_cupy_array
from engine.errors import ConfigError, ContractError, ShapeError
from engine.kernels._contract import Contract
from engine.kernels._user.expressions import Expression
from engine.kernels._user.signature import (
    BATCH,
    DTYPES,
    ArrayArg,
    ScalarArg,
    Signature,
)
from engine.plan_array import PlanArray

__all__ = ["Bound", "bind", "call_key", "dtype_text", "is_aligned"]

_NUMBERS = (type(None), bool, int, float)
VECTOR_BYTES = 16  # widest access of a thread


@dataclass
class Bound:
    """Checked arguments.

    Attributes
    ----------
    contract : Contract
        Knows the array module.
    values : dict
        Array, number, or None for an omitted array, by argument.
    sizes : dict of str to int
        Value of every symbol.
    lead : tuple of int
        Axes that "..." stands for.
    dtype : str
        The file's `scalar_t`; "" until an array decides it.
    problems : dict
        For `Op`: the problems of calls like this one, by chip and alignment.
    shapes : dict
        Shapes of the results of such calls, by name.
    """

    contract: Contract
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    lead: tuple[int, ...] = ()
    dtype: str = ""
    problems: dict[Any, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def again(self, values: dict[str, Any]) -> Bound:
        """Return the checked arguments of another call with an equal `call_key`.

        `self.values` has the numbers only.
        """
        values = values | self.values
        contract = self.contract.again()
        shared = (self.sizes, self.lead, self.dtype, self.problems, self.shapes)
        return Bound(contract, values, *shared)

    def shape(self, array: ArrayArg) -> tuple[int, ...]:
        """Return the shape of a result.

        Raises
        ------
        ShapeError
            If a size is no integer, or negative.
        """
        if (known := self.shapes.get(array.name)) is not None:
            return known
        shape = [*self.lead] if array.has_batch else []
        for dim in array.dims:
            size = dim.value(self.sizes)
            if not isinstance(size, int) or size < 0:
                raise ShapeError(
                    f"{self.contract.op}: {array.name}: {dim.text} must be an integer of at least "
                    f"0; got {size} for {_shown(self.sizes, dim.symbols)}"
                )
            shape.append(size)
        self.shapes[array.name] = tuple(shape)
        return self.shapes[array.name]

    def dtype_of(self, array: ArrayArg) -> np.dtype[Any]:
        """Return the dtype of a result."""
        if array.like:
            dtype: np.dtype[Any] = self.values[array.like].dtype
            return dtype
        return DTYPES[self.dtype if array.is_scalar_t else array.dtypes[0]]


def call_key(values: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what the checks of `bind` depend on, without the addresses and the content.

    None if an argument is neither a plain NumPy or CuPy array nor a number.
    """
    parts: list[Any] = []
    for value in values.values():
        kind = type(value)
        if kind is np.ndarray:
            is_writeable = value.flags.writeable
            parts.append((kind, value.shape, value.strides, value.dtype, is_writeable))
        elif kind in _NUMBERS or issubclass(kind, np.generic):
            parts.append((kind, value or repr(value)))  # 0.0 and -0.0 are equal
        elif is_cupy_array(value) and kind is not PlanArray:
            parts.append((value.device.id, value.shape, value.strides, value.dtype))
        else:
            return None
    return tuple(parts)


def bind(
    op: str, signature: Signature, where: Sequence[Expression], values: dict[str, Any]
) -> Bound:
    """Check `values`, which has every argument by name, and derive the sizes.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        The message names the argument, what the signature says and what was given.
    """
    contract = Contract(op)
    bound = Bound(contract)
    for scalar in signature.scalars:
        number = _number(contract, scalar, values[scalar.name])
        bound.values[scalar.name] = number
        if scalar.name in signature.symbols:
            bound.sizes[scalar.name] = contract.bind(scalar.name, int(number), scalar.name)
    for array in sorted(signature.arrays, key=lambda array: array.like != ""):
        bound.values[array.name] = _array(bound, array, values[array.name])
    names = ", ".join(array.name for array in signature.arrays)
    contract.check(names, contract.xp is not None, "given, at least one of them", None)
    bound.dtype = bound.dtype or signature.scalar_dtypes[0]
    _derive_sizes(bound, signature)
    known = bound.sizes | {scalar.name: bound.values[scalar.name] for scalar in signature.scalars}
    for condition in where:
        if not condition.value(known):
            raise ContractError(
                f"{op}: {', '.join(sorted(condition.symbols))}: must satisfy {condition.text}; "
                f"got {_shown(known, condition.symbols)}"
            )
    return bound


def _number(contract: Contract, scalar: ScalarArg, value: Any) -> bool | int | float:
    name = scalar.name
    if scalar.dtype == "bool":
        contract.check(name, isinstance(value, bool | np.bool_), "True or False", value)
        return bool(value)
    if scalar.dtype.startswith("float"):
        kinds = int | float | np.integer | np.floating
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        contract.check(name, is_number, "a number", value)
        try:
            return float(value)
        except OverflowError:
            raise ContractError(
                f"{contract.op}: {name}: must be a number in float64's range; got {shown(value)}"
            ) from None
    limits = np.iinfo(scalar.dtype)
    # Of arrays, `call_key` has the shape and not the value.
    is_array = hasattr(value, "shape") and not isinstance(value, np.generic)
    contract.check(name, not (is_array or isinstance(value, bool)), "an integer", value)
    try:
        number = operator.index(value)
    except TypeError:
        raise ContractError(f"{contract.op}: {name}: must be an integer; got {value!r}") from None
    ok = limits.min <= number <= limits.max
    contract.check(name, ok, f"an integer from {limits.min} to {limits.max}", number)
    return number


def _array(bound: Bound, array: ArrayArg, value: Any) -> Any:
    contract = bound.contract
    if value is None and array.is_optional:
        return None
    dtypes: Any = tuple(DTYPES[name] for name in array.dtypes)
    if array.like:
        other = bound.values[array.like]
        wanted = f"None without {array.like}, whose dtype it has"
        contract.check(array.name, other is not None, wanted, value)
        dtypes = other.dtype
    elif array.is_scalar_t and bound.dtype:
        dtypes = DTYPES[bound.dtype]
    tokens = ["*"] if array.has_batch else []
    shape = " ".join([*tokens, *(_token(dim) for dim in array.dims)])
    layout = "any" if array.is_strided else "C"
    check = contract.written if array.is_inout else contract.array
    checked = check(array.name, value, shape, dtypes, layout=layout)
    if array.is_scalar_t:
        bound.dtype = dtype_text(checked.dtype)  # later arrays must have it, too
    if array.has_batch:
        _bind_lead(bound, array, checked)
    return checked


def _bind_lead(bound: Bound, array: ArrayArg, checked: Any) -> None:
    lead = checked.shape[: checked.ndim - len(array.dims)]
    if BATCH not in bound.sizes:
        bound.lead = lead
        bound.sizes[BATCH] = math.prod(lead)
    elif lead != bound.lead:
        raise ShapeError(
            f"{bound.contract.op}: {array.name}: must have leading axes {bound.lead}; "
            f"got {tuple(checked.shape)}"
        )


def _token(dim: Expression) -> str:
    """Return the expression as a size that `Contract` binds: without spaces."""
    return dim.text.replace(" ", "")


def _derive_sizes(bound: Bound, signature: Signature) -> None:
    """Bind every symbol, also those that appear only inside an expression, and check the rest."""
    dims = [
        (array, dim)
        for array in signature.arrays
        if bound.values[array.name] is not None
        for dim in array.dims
    ]
    measured = bound.contract.dims
    for _, dim in dims:
        if dim.is_symbol:
            bound.sizes[dim.text] = measured[dim.text]
    for array, dim in dims:
        missing = dim.symbols - set(bound.sizes)
        if missing:
            found = dim.solve(bound.sizes, measured[_token(dim)])
            if found is None:
                size = measured[_token(dim)]
                wanted = f"no one {', '.join(sorted(missing))} makes {dim.text} = {size}"
                _refuse(bound, array, dim, wanted)
            bound.sizes[found[0]] = found[1]
    for array, dim in dims:
        if dim.symbols and dim.value(bound.sizes) != measured[_token(dim)]:
            size = measured[_token(dim)]
            wanted = f"{dim.text} = {dim.value(bound.sizes)}, but the axis has {size}"
            _refuse(bound, array, dim, wanted)
    for symbol in signature.symbols:
        bound.sizes.setdefault(symbol, 0)  # an axis of omitted arrays only


def _refuse(bound: Bound, array: ArrayArg, dim: Expression, wanted: str) -> NoReturn:
    known = _shown(bound.sizes, dim.symbols)
    raise ShapeError(
        f"{bound.contract.op}: {array.name}: must have shape {array.shape_text}"
        f"{f' with {known}' if known else ''}; {wanted}; "
        f"got {tuple(bound.values[array.name].shape)}"
    )


def _shown(sizes: Mapping[str, Any], symbols: Iterator[str] | frozenset[str]) -> str:
    return ", ".join(f"{name} = {sizes[name]}" for name in sorted(symbols) if name in sizes)


def dtype_text(dtype: Any) -> str:
    """Return the name in DTYPES of a dtype."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"dtype must be of {', '.join(DTYPES)}; got {dtype}")


def is_aligned(array: Any, alignment: int = VECTOR_BYTES) -> bool:
    """Tell whether a CuPy array and every row of it start at a multiple of `alignment` bytes."""
    return array.data.ptr % alignment == 0 and not any(
        [step % alignment for step in array.strides[:-1]]
    )
