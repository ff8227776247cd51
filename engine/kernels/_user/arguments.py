"""The parameters of a kernel, matched by name with a call's arrays, sizes and values."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import numpy as np

from engine.errors import ConfigError, ContractError
from engine.kernels._launch import Kernel
from engine.kernels._tensor_map import box_error, tensor_map
from engine.kernels._user.cuda_source import CudaText, Param
from engine.kernels._user.module import UserModule
from engine.kernels._user.problem import Launch, Problem, Scratch, TensorMapOf
from engine.kernels._user.signature import ArrayArg, Signature

__all__ = ["LaunchArguments"]

# C types of a pointer that state the dtype of the elements. Others (uint4, void) may view any.
_ELEMENTS = {
    "float32": {"float"},
    "float16": {"__half", "half"},
    "bfloat16": {"__nv_bfloat16", "nv_bfloat16"},
    "float64": {"double"},
    "int8": {"int8_t", "signed char", "char"},
    "uint8": {"uint8_t", "unsigned char"},
    "int16": {"int16_t", "short"},
    "uint16": {"uint16_t", "unsigned short"},
    "int32": {"int32_t", "int", "signed int"},
    "uint32": {"uint32_t", "unsigned int", "unsigned"},
    "int64": {"int64_t", "long long", "long long int"},
    "uint64": {"uint64_t", "unsigned long long", "size_t"},
    "bool": {"bool"},
}
_DTYPE_OF = {ctype: dtype for dtype, ctypes in _ELEMENTS.items() for ctype in ctypes}
_STRIDE = re.compile(r"(\w+)_stride_(\d+)")
_MAP_DTYPES = {"int8": "uint8", "bool": "uint8"}  # same bytes


class LaunchArguments:
    """The kernel of one launch, and where its arguments come from.

    Parameters
    ----------
    op : str
    signature : Signature
    problem : Problem
    launch : Launch
    text : CudaText
    entry : str
        Name of the kernel.
    module : UserModule

    Attributes
    ----------
    kernel : Kernel
    launch : Launch
    module : UserModule
    scratch : tuple of Scratch

    Raises
    ------
    ConfigError
        If the kernel has a parameter that nothing provides, or whose type does not fit.
    """

    def __init__(
        self,
        op: str,
        signature: Signature,
        problem: Problem,
        launch: Launch,
        text: CudaText,
        entry: str,
        module: UserModule,
    ) -> None:
        self._where = f"{text.label}: {entry}"
        self._signature = signature
        self._problem = problem
        self._args = dict(launch.args)
        self.launch = launch
        self.module = module
        params = text.entry(entry).params
        if launch.pdl and "pdl_wait" not in text.text:
            raise ConfigError(
                f"{op}: launch: pdl=True needs a kernel that calls pdl_wait() (common/pdl.cuh); "
                f"{text.label} has none"
            )
        self._arrays: dict[str, str] = {}
        self._strides: dict[str, tuple[str, int]] = {}
        self._maps: dict[str, TensorMapOf] = {}
        self._scratch: dict[str, Scratch] = {}
        self._numbers: dict[str, Any] = {}
        for param in params:
            self._place(param)
        unused = set(self._args) - {param.name for param in params}
        if unused:
            names = ", ".join(str(param) for param in params)
            raise ConfigError(
                f"{op}: launch: args must name parameters of {entry} ({names}); "
                f"got {sorted(unused)[0]!r}"
            )
        self.scratch = tuple(self._scratch.values())
        self.kernel = _kernel(entry, " ".join(f"{param.name}:{param.kind}" for param in params))

    def values(self, arrays: Mapping[str, Any], scratch: Mapping[Scratch, Any]) -> dict[str, Any]:
        """Return the arguments, by parameter; `arrays` has the call's arguments and results."""
        values = dict(self._numbers)
        for param, name in self._arrays.items():
            values[param] = arrays[name]
        for param, (name, axis) in self._strides.items():
            array = arrays[name]
            values[param] = 0 if array is None else array.strides[axis] // array.itemsize
        for param, wanted in self._maps.items():
            values[param] = self._map(param, wanted, arrays[wanted.array])
        for param, each in self._scratch.items():
            values[param] = scratch[each]
        return values

    def _place(self, param: Param) -> None:
        """Record where the parameter's value comes from, after checking its type."""
        name = param.name
        value = self._args.get(name)
        stride = _STRIDE.fullmatch(name)
        if name in self._args:
            self._place_given(param, value)
        elif array := self._array(name):
            self._check_pointer(param, array)
            self._arrays[name] = name
        elif stride and (array := self._array(stride[1])):
            self._check_stride(param, array, int(stride[2]))
            self._strides[name] = (stride[1], int(stride[2]))
        elif name in self._problem.values:
            self._numbers[name] = self._number(param, self._problem[name])
        else:
            arrays = [a.name for a in (*self._signature.arrays, *self._signature.outputs)]
            known = [*arrays, *self._problem.values, *self._args]
            raise ConfigError(
                f"{self._where}: parameter {name!r} must be one of {', '.join(known)}, or be "
                "passed by the launch (args=)"
            )

    def _place_given(self, param: Param, value: Any) -> None:
        if isinstance(value, Scratch):
            if not param.is_pointer:
                self._refuse(param, "a pointer, for scratch memory")
            if self._stated(param) not in (None, value.dtype):
                ctype = min(sorted(_ELEMENTS[value.dtype]), key=len)
                self._refuse(param, f"a pointer to {ctype}: the scratch memory is {value.dtype}")
            self._scratch[param.name] = value
        elif isinstance(value, TensorMapOf):
            if param.kind != "tmap":
                self._refuse(param, "const __grid_constant__ TensorMap, for a tensor map")
            if self._array(value.array) is None:
                raise ConfigError(f"{self._where}: tensor_map: no array is called {value.array!r}")
            self._check_map(value)
            self._maps[param.name] = value
        elif self._array(param.name):
            raise ConfigError(
                f"{self._where}: {param.name} is an array of the signature, which args cannot "
                f"replace; got {value!r}"
            )
        elif isinstance(value, bool | int | float | np.number | np.bool_):
            self._numbers[param.name] = self._number(param, value)
        else:
            raise ConfigError(
                f"{self._where}: {param.name}: args must be numbers, call.tensor_map(...) or "
                f"call.scratch(...); got {value!r}"
            )

    def _check_map(self, wanted: TensorMapOf) -> None:
        array = self._array(wanted.array)
        dtype = None if array is None else self._dtype(array)
        if array is None or dtype is None:  # it was omitted
            return
        dtype = _MAP_DTYPES.get(dtype, dtype)
        why = box_error(dtype, wanted.box, wanted.swizzle, wanted.l2_promotion)
        if not why and not array.has_batch and len(array.dims) != len(wanted.box):
            why = f"its box must have an axis for each of {array.shape_text}; it is {wanted.box}"
        if why:
            raise ConfigError(f"{self._where}: the tensor map of {wanted.array}: {why}")

    def _array(self, name: str) -> ArrayArg | None:
        for array in (*self._signature.arrays, *self._signature.outputs):
            if array.name == name:
                return array
        return None

    def _check_pointer(self, param: Param, array: ArrayArg) -> None:
        if not param.is_pointer:
            self._refuse(param, "a pointer, since it is an array")
        is_written = array in self._signature.outputs or array.is_inout
        if is_written and param.is_const:
            self._refuse(param, "not const, since the kernel writes it")
        dtype = self._dtype(array)
        if dtype is not None and self._stated(param) not in (None, dtype):
            self._refuse(param, self._pointer_to(array, dtype))

    def _stated(self, param: Param) -> str | None:
        """Return the dtype that the type of a pointer states; None if it may view any."""
        said = dict(self.module.types).get(param.ctype, param.ctype)
        return self.module.dtype if said == "scalar_t" else _DTYPE_OF.get(said)

    def _pointer_to(self, array: ArrayArg, dtype: str) -> str:
        if array.is_scalar_t or self._is_like_scalar(array):
            return f"a pointer to scalar_t: the array is {dtype}"
        ctype = min(sorted(_ELEMENTS[dtype]), key=len)
        return f"a pointer to {ctype}: the signature says {dtype}, whatever scalar_t is"

    def _dtype(self, array: ArrayArg) -> str | None:
        """Return the dtype of an array; None if it was omitted."""
        name = array.like or array.name
        if self._problem.has(name):
            return self._problem.dtype_of(name)
        if array in self._signature.arrays:
            return None
        return self._problem.dtype if array.is_scalar_t else array.dtypes[0]

    def _is_like_scalar(self, array: ArrayArg) -> bool:
        other = self._array(array.like)
        return other is not None and other.is_scalar_t

    def _check_stride(self, param: Param, array: ArrayArg, axis: int) -> None:
        if not array.is_strided:
            raise ConfigError(
                f"{self._where}: parameter {param.name!r}: {array.name} must be marked 'strided' "
                "in the signature"
            )
        if axis >= len(array.dims):
            raise ConfigError(
                f"{self._where}: parameter {param.name!r}: {array.name} has {len(array.dims)} axes"
            )
        if param.kind not in ("i64", "i32"):
            self._refuse(param, "int64_t, since it is a stride in elements")

    def _number(self, param: Param, value: Any) -> Any:
        kind = param.kind
        if kind in ("ptr", "tmap"):
            self._refuse(param, f"a number: it is {value!r}")
        if kind == "b8":
            return bool(value)
        if kind[0] == "f":
            return float(value)
        try:
            number = operator.index(value)
        except TypeError:
            self._refuse(param, f"float or double: it is {value!r}")
        limits = np.iinfo(f"{'u' if kind[0] == 'u' else ''}int{kind[1:]}")
        if not limits.min <= number <= limits.max:
            self._refuse(param, f"int64_t, since {number} does not fit")
        return number

    def _map(self, param: str, wanted: TensorMapOf, array: Any) -> Any:
        dtype = self._problem.dtype if array is None else str(array.dtype)
        steps = array.strides[:-1]
        is_right = array.data.ptr % 16 == 0 and all(step % 16 == 0 for step in steps)
        if not is_right or array.ndim != len(wanted.box) or array.strides[-1] != array.itemsize:
            raise ContractError(
                f"{self._where}: {param}: a tensor map needs an address and rows at multiples of "
                f"16 bytes, contiguous rows, and {len(wanted.box)} axes; got {wanted.array} of "
                f"shape {array.shape}, strides {array.strides}, at {array.data.ptr:#x}"
            )
        return tensor_map(
            int(array.data.ptr),
            _MAP_DTYPES.get(dtype, dtype),
            array.shape[::-1],
            steps[::-1],
            wanted.box[::-1],
            promote=wanted.l2_promotion,
            swizzle=wanted.swizzle,
        )

    def _refuse(self, param: Param, wanted: str) -> NoReturn:
        raise ConfigError(f"{self._where}: parameter `{param}` must be {wanted}")


@cache
def _kernel(entry: str, params: str) -> Kernel:
    """Return the kernel, one for all problems: it keeps the loaded functions."""
    return Kernel(entry, params)
