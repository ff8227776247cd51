"""Tensors as arrays of the catalog, without a copy: NumPy on the CPU, addresses on CUDA.

bfloat16 is reinterpreted as int16 on its way through NumPy, which has no such dtype of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.dtypes import BFLOAT16
from engine.errors import DTypeError
from engine.kernels._prepared_call import ALIGNMENT, ArrayLayout

__all__ = ["DTYPES", "accumulation_dtype", "array_of", "as_int32", "check_integers", "layout_of"]
__all__ += ["tensor_of", "torch_dtype"]

_LARGEST = 2**31 - 1  # largest int32

DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: BFLOAT16,
    torch.float64: np.dtype(np.float64),
    torch.float8_e4m3fn: np.dtype(np.uint8),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.uint32: np.dtype(np.uint32),
    torch.int64: np.dtype(np.int64),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
"""NumPy's dtype for each of torch's; fp8 codes are uint8 in the catalog.

It includes dtypes that no op supports: the op's error then names the argument.
"""

_TORCH = {dtype: name for name, dtype in DTYPES.items() if name != torch.float8_e4m3fn}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype for one of the catalog's."""
    return _TORCH[dtype]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def array_of(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor as a NumPy array over the same memory."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DTypeError(f"a tensor must be of {_names()}; got {tensor.dtype}")
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a NumPy array of the catalog as a CPU tensor over the same memory."""
    array = np.asarray(array, order="C")  # ascontiguousarray would add an axis to ()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def layout_of(tensor: torch.Tensor) -> ArrayLayout:
    """Return the layout of a CUDA tensor for a prepared call."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DTypeError(f"a tensor must be of {_names()}; got {tensor.dtype}")
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return ArrayLayout(tuple(tensor.shape), strides, dtype, tensor.data_ptr() % ALIGNMENT)


def check_integers(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise a DTypeError unless `tensor` is of int64 or int32, before it is cast."""
    if tensor.dtype not in (torch.int64, torch.int32):
        got = str(tensor.dtype).removeprefix("torch.")
        raise DTypeError(f"{op}: {name}: must be int64 or int32; got {got}")


def as_int32(ids: torch.Tensor) -> torch.Tensor:
    """Cast ids or positions; those that int32 does not hold stay outside any table."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-1, _LARGEST).int()


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
