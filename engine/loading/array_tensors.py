"""`ArrayTensors`: arrays in memory, read as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown
from engine.device import cupy, is_cupy_array, to_numpy
from engine.dtypes import FLOAT_NAMES, np_dtype
from engine.errors import WeightsError
from engine.models.wrappers import text_name

__all__ = ["ArrayTensors", "as_arrays"]

_DTYPES = (*(np_dtype(name) for name in FLOAT_NAMES), np.dtype(np.float64))
_DLPACK_CPU = 1  # kDLCPU


class ArrayTensors:
    """Tensors by name; rows of a device array are copied to the host when they are read.

    Parameters
    ----------
    arrays : mapping of str to array
        A checkpoint's tensor names, as in its files, -> NumPy or CuPy arrays, or anything with
        `__dlpack__` or `__cuda_array_interface__`, of float32, float16, bfloat16 or float64.
    new_name : callable
        Returns a tensor's name in the text model alone; None leaves it out.

    Raises
    ------
    WeightsError
        If a name is no str, or a value no such array.
    """

    path = Path("arrays")

    def __init__(
        self, arrays: Mapping[str, Any], new_name: Callable[[str], str | None] = text_name
    ) -> None:
        self._arrays: dict[str, Any] = {}
        for name, value in arrays.items():
            if not isinstance(name, str):
                raise WeightsError(f"names of weights must be str; got {shown(name)}")
            if (own := new_name(name)) is not None:
                self._arrays[own] = _as_array(name, value)

    def names(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        shape: tuple[int, ...] = self._arrays[name].shape
        return shape

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Any:
        """Return rows [start, stop) as a view, on the array's device. See `read`."""
        array = self._arrays[name]
        view = array.reshape(1) if not array.ndim else array
        rows = (view if view.ndim < 3 else view.reshape(-1, view.shape[-1]))[start:stop]
        return rows if columns is None else rows[:, slice(*columns)]

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return rows [start, stop), on the host. See `SafetensorsFile.read`."""
        return np.asarray(to_numpy(self.rows(name, start, stop, columns)))


def as_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as NumPy or CuPy arrays, as `ArrayTensors` takes them; nothing is copied.

    On a GPU, later work on the current stream waits for this thread's stream that writes them.

    Raises
    ------
    WeightsError
        If a value is no such array.
    """
    return {name: _as_array(name, value) for name, value in values.items()}


def _as_array(name: str, value: Any) -> Any:
    """Return a value as a NumPy or CuPy array of numbers."""
    array = value
    if not isinstance(value, np.ndarray) and not is_cupy_array(value):
        try:
            # DLPack first: only it makes this stream wait for the one that writes the array.
            if hasattr(value, "__cuda_array_interface__") and not hasattr(value, "__dlpack__"):
                array = cupy().asarray(value)
            else:
                on_gpu = value.__dlpack_device__()[0] != _DLPACK_CPU
                array = (cupy() if on_gpu else np).from_dlpack(value)
        except (TypeError, AttributeError, BufferError, RuntimeError, ValueError) as error:
            got = type(value).__name__
            why = "" if isinstance(error, AttributeError) else f": {error}"
            raise WeightsError(f"weight {shown(name)} must be an array; got {got}{why}") from error
    if array.dtype not in _DTYPES:
        wanted = ", ".join(dtype.name for dtype in _DTYPES)
        raise WeightsError(f"weight {shown(name)} must be one of {wanted}; got {array.dtype}")
    return array
