"""The signature of a user's kernel: arguments and results, with symbolic shapes and dtypes.

    x: (T, N) float, scale: (T,) float32, eps: float32 = 1e-6 -> (T, N) like x

`parse_signature` reads it; `docs/your_kernel.md` has the grammar.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import FLOAT_NAMES, np_dtype
from engine.errors import ConfigError
from engine.kernels._user.expressions import Expression
from engine.kernels._user.names import is_reserved

__all__ = ["BATCH", "DTYPES", "ArrayArg", "ScalarArg", "Signature", "parse_signature", "split_list"]

BATCH = "batch"
"""Symbol of "...": the product of the leading axes."""

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np_dtype(name) for name in FLOAT_NAMES},
    "float64": np.dtype(np.float64),
    **{
        f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "bool": np.dtype(np.bool_),
}
"""Dtypes of arguments, by name."""

_GROUPS = {"float": FLOAT_NAMES}
_OTHER_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
}
"""Names of dtypes elsewhere -> ours."""
_MODIFIERS = {"strided": "is_strided", "inout": "is_inout", "zeroed": "is_zeroed"}
_RESERVED = {BATCH, "out", "like", *FLOAT_NAMES}


@dataclass(frozen=True)
class ArrayArg:
    """An array argument or result.

    Attributes
    ----------
    name : str
    dims : tuple of Expression
        Sizes of its axes, without the leading ones that "..." stands for.
    has_batch : bool
        Whether the shape begins with "...".
    dtypes : tuple of str
        Dtypes that it may have.
    like : str
        Argument whose dtype it has; "" if `dtypes` decides.
    is_scalar_t : bool
        Whether its dtype is the file's `scalar_t`.
    is_optional, is_strided, is_inout, is_zeroed : bool
        Null if omitted; passed with any strides; written in place; set to 0 before the launch.
    """

    name: str
    dims: tuple[Expression, ...]
    has_batch: bool
    dtypes: tuple[str, ...]
    like: str = ""
    is_scalar_t: bool = False
    is_optional: bool = False
    is_strided: bool = False
    is_inout: bool = False
    is_zeroed: bool = False

    @property
    def shape_text(self) -> str:
        """The shape as it was declared, such as "(T, 2*F)"."""
        dims = [*["..."] * self.has_batch, *(dim.text for dim in self.dims)]
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


@dataclass(frozen=True)
class ScalarArg:
    """A number passed by value; `default` is None if it must be given."""

    name: str
    dtype: str
    default: Any = None


@dataclass(frozen=True)
class Signature:
    """The arguments of a kernel, in the order of a call, and its results."""

    text: str
    args: tuple[ArrayArg | ScalarArg, ...]
    outputs: tuple[ArrayArg, ...]

    @property
    def arrays(self) -> tuple[ArrayArg, ...]:
        """The array arguments."""
        return tuple(arg for arg in self.args if isinstance(arg, ArrayArg))

    @property
    def scalars(self) -> tuple[ScalarArg, ...]:
        """The scalar arguments."""
        return tuple(arg for arg in self.args if isinstance(arg, ScalarArg))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the shapes, in the order in which they appear."""
        found: dict[str, None] = {}
        for array in (*self.arrays, *self.outputs):
            if array.has_batch:
                found[BATCH] = None
            for dim in array.dims:
                found.update(dict.fromkeys(sorted(dim.symbols)))
        return tuple(found)

    @property
    def scalar_dtypes(self) -> tuple[str, ...]:
        """Dtypes that the file's `scalar_t` may be: those of its `float` arrays.

        Without any it is the dtype of the first array of floats, or float32.
        """
        arrays = (*self.arrays, *self.outputs)
        groups = [array.dtypes for array in arrays if array.is_scalar_t]
        if groups:
            return tuple(n for n in FLOAT_NAMES if all(n in group for group in groups))
        fixed = [a.dtypes[0] for a in arrays if a.dtypes and a.dtypes[0] in FLOAT_NAMES]
        return (fixed[0] if fixed else "float32",)


def parse_signature(text: str, name: str) -> Signature:
    """Parse a signature.

    Parameters
    ----------
    text : str
        Arguments, "->", results.
    name : str
        Name of the op, for errors.

    Raises
    ------
    ConfigError
        If the text does not follow the grammar; the message quotes the part at fault.

    Examples
    --------
    >>> signature = parse_signature("x: (..., 2F) float, eps: float32 = 1 -> (..., F) like x", "f")
    >>> signature.symbols, [output.shape_text for output in signature.outputs]
    (('batch', 'F'), ['(..., F)'])
    """
    if not isinstance(text, str):
        raise ConfigError(f"{name}: signature: must be a string; got {text!r}")
    if ";" in text:
        raise ConfigError(f"{name}: signature: commas separate arguments; got ';' in {text!r}")
    left, arrow, right = text.partition("->")
    args = tuple(_argument(part, name) for part in split_list(left))
    if not arrow and not any(isinstance(arg, ArrayArg) and arg.is_inout for arg in args):
        raise ConfigError(
            f"{name}: signature: must have '->' before the results, or an argument marked inout; "
            f"got {text!r}"
        )
    outputs = tuple(_result(part, name, index) for index, part in enumerate(split_list(right)))
    signature = Signature(" ".join(text.split()), args, outputs)
    _check(signature, name)
    return signature


def split_list(text: str) -> Iterator[str]:
    """Yield the parts between the commas that no bracket encloses."""
    depth = 0
    part = ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += char
    if part.strip():
        yield part.strip()


def _argument(part: str, op: str) -> ArrayArg | ScalarArg:
    found = re.fullmatch(r"(\w+)\s*:\s*(.*)", part, re.DOTALL)
    if not found:
        raise ConfigError(f"{op}: signature: an argument must be 'name: ...'; got {part!r}")
    name, rest = found.groups()
    _check_name(name, op)
    if not rest.startswith("("):
        return _scalar(name, rest, op)
    array = _array(name, rest, op)
    if array.is_zeroed:
        raise ConfigError(
            f"{op}: signature: {name}: only a result may be 'zeroed'; an argument keeps its values"
        )
    return array


def _result(part: str, op: str, index: int) -> ArrayArg:
    name, colon, rest = part.partition(":")
    if not colon:
        name = "out" if index == 0 else f"out{index + 1}"
        rest = part
    else:
        _check_name(name.strip(), op)
    array = _array(name.strip(), rest.strip(), op)
    if array.is_optional or array.is_inout:
        raise ConfigError(
            f"{op}: signature: result {name.strip()!r} is always written; got {part!r}"
        )
    return array


def _array(name: str, text: str, op: str) -> ArrayArg:
    found = re.fullmatch(r"\((.*)\)\s*([^()=]*?)\s*(=\s*None)?", text, re.DOTALL)
    if not found or not found[2]:
        raise ConfigError(
            f"{op}: signature: {name}: must be '(sizes) dtype', with '= None' if it is optional; "
            f"got {text!r}"
        )
    dims, has_batch = _dims(name, found[1], op)
    words = found[2].split()
    like = ""
    dtypes: tuple[str, ...] = ()
    if words[0] == "like" and len(words) > 1:
        like = words[1]
        words = words[2:]
    else:
        dtypes = _dtypes(name, words[0], op)
        words = words[1:]
    flags = {}
    for word in words:
        if word not in _MODIFIERS:
            known = ", ".join(_MODIFIERS)
            raise ConfigError(f"{op}: signature: {name}: must be one of {known}; got {word!r}")
        flags[_MODIFIERS[word]] = True
    if len(flags) > 1 and "is_zeroed" in flags:
        raise ConfigError(f"{op}: signature: {name}: 'zeroed' excludes other words; got {words}")
    if has_batch and "is_strided" in flags:
        raise ConfigError(
            f"{op}: signature: {name}: 'strided' must have no '...', since a kernel's parameters "
            f"name the axis of each stride; got {text!r}"
        )
    is_scalar_t = len(dtypes) > 1 and set(dtypes) <= set(FLOAT_NAMES)
    is_optional = found[3] is not None
    return ArrayArg(
        name, dims, has_batch, dtypes, like, is_scalar_t, is_optional=is_optional, **flags
    )


def _dims(name: str, text: str, op: str) -> tuple[tuple[Expression, ...], bool]:
    parts = [part for part in split_list(text) if part]
    has_batch = bool(parts) and parts[0] == "..."
    where = f"{op}: signature: {name}"
    dims = tuple(Expression(part, where) for part in parts[has_batch:])
    for dim in dims:
        if not dim.symbols and not (isinstance(size := dim.value({}), int) and size >= 0):
            raise ConfigError(f"{where}: a size must be an integer of at least 0; got {dim.text}")
    return dims, has_batch


def _dtypes(name: str, text: str, op: str) -> tuple[str, ...]:
    names = [dtype for part in text.split("|") for dtype in _GROUPS.get(part, (part,))]
    for dtype in names:
        if dtype not in DTYPES:
            known = ", ".join(("float", *DTYPES, "like NAME"))
            meant = _OTHER_NAMES.get(dtype)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ConfigError(
                f"{op}: signature: {name}: dtype must be of {known}; got {dtype!r}{hint}"
            )
    return tuple(dict.fromkeys(names))


def _scalar(name: str, text: str, op: str) -> ScalarArg:
    dtype, _, default = (part.strip() for part in text.partition("="))
    if dtype not in DTYPES or (DTYPES[dtype].itemsize < 4 and dtype != "bool"):
        known = "float32, float64, int32, int64, uint32, uint64, bool"
        raise ConfigError(
            f"{op}: signature: {name}: a scalar must have a dtype of {known}, and an array a "
            f"shape in parentheses, such as (T, N); got {text!r}"
        )
    return ScalarArg(name, dtype, _default(name, dtype, default, op) if default else None)


def _default(name: str, dtype: str, text: str, op: str) -> bool | int | float:
    if dtype == "bool" and text in ("True", "False"):
        return text == "True"
    try:
        if dtype.startswith("float"):
            return float(text)
        limits = np.iinfo(dtype)  # a ValueError for "bool"
        if limits.min <= (number := int(text)) <= limits.max:
            return number
    except ValueError:
        pass
    raise ConfigError(f"{op}: signature: {name}: its default must be {dtype}; got {text!r}")


def _check_name(name: str, op: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED:
        raise ConfigError(
            f"{op}: signature: a name must be an identifier other than "
            f"{', '.join(sorted(_RESERVED))}; got {name!r}"
        )
    if is_reserved(name):
        raise ConfigError(
            f"{op}: signature: {name!r} must have another name: C++ or CUDA reserves this one, and "
            "the kernel's parameter has the same"
        )


def _check(signature: Signature, op: str) -> None:
    names = [arg.name for arg in (*signature.args, *signature.outputs)]
    sizes = {scalar.name for scalar in signature.scalars if "int" in scalar.dtype}
    for name in names:
        if names.count(name) > 1 or name in set(signature.symbols) - sizes:
            raise ConfigError(f"{op}: signature: {name!r} must name one thing")
    if not signature.arrays:
        raise ConfigError(f"{op}: signature: must have an array argument; got {signature.text!r}")
    if not signature.outputs and not any(array.is_inout for array in signature.arrays):
        raise ConfigError(f"{op}: signature: must have a result after '->', or an inout argument")
    _check_dtypes(signature, op)
    _check_order(signature, op)
    bound = {s for array in signature.arrays for dim in array.dims for s in dim.symbols}
    bound |= {BATCH for array in signature.arrays if array.has_batch}
    for symbol in signature.symbols:
        if symbol not in bound | sizes:
            raise ConfigError(f"{op}: signature: no argument has an axis {symbol!r}")


_C_TYPES = {"scalar_t", "size_t", "ptrdiff_t", "wchar_t", "max_align_t", "nullptr_t", "clock_t"}
_C_TYPES |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64, "ptr")}


def _check_dtypes(signature: Signature, op: str) -> None:
    if not signature.scalar_dtypes:
        raise ConfigError(f"{op}: signature: its arrays of floats must have a dtype in common")
    arrays = {array.name: array for array in signature.arrays}
    for array in signature.arrays:
        if len(array.dtypes) > 1 and not array.is_scalar_t and f"{array.name}_t" in _C_TYPES:
            raise ConfigError(
                f"{op}: signature: {array.name!r} must have another name: its type in CUDA would "
                f"be {array.name}_t, which is another type; got {'|'.join(array.dtypes)}"
            )
    for array in (*signature.arrays, *signature.outputs):
        if array.like and (array.like not in arrays or arrays[array.like].like):
            known = ", ".join(name for name, other in arrays.items() if not other.like)
            raise ConfigError(
                f"{op}: signature: {array.name}: 'like' must name one of {known}; "
                f"got {array.like!r}"
            )
        if array.like and arrays[array.like].is_optional and not array.is_optional:
            raise ConfigError(
                f"{op}: signature: {array.name}: 'like' must name an argument that is always "
                f"given; got {array.like!r}, which may be omitted"
            )
    for array in signature.outputs:
        has_scalar_t = any(other.is_scalar_t for other in signature.arrays)
        if len(array.dtypes) > 1 and not (array.is_scalar_t and has_scalar_t):
            raise ConfigError(
                f"{op}: signature: {array.name}: a result must have one dtype, or be 'like' an "
                f"argument; got {'|'.join(array.dtypes)}"
            )


def _check_order(signature: Signature, op: str) -> None:
    """Arguments without a default come first, as in Python."""
    optional = ""
    for arg in signature.args:
        if arg.is_optional if isinstance(arg, ArrayArg) else arg.default is not None:
            optional = arg.name
        elif optional:
            raise ConfigError(
                f"{op}: signature: {arg.name!r}, which must be given, follows {optional!r}, which "
                "has a default"
            )
