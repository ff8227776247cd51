"""Token ids from a caller: copied to the host, and checked there."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.checks import length_of, shown
from engine.device import cupy, is_cupy_array, to_numpy
from engine.errors import RequestError

__all__ = ["checked_sequence", "checked_token_ids"]

_MAX_ROWS_READ = 1 << 20  # maximum number of rows; longer arguments are rejected before the copy


def checked_token_ids(
    token_ids: Any, batch_size: int, vocab_size: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return token ids as a (B, T) int32 array on the host.

    Parameters
    ----------
    token_ids : (B, T) array of any int dtype, or nested list
        NumPy, CuPy, or anything with `__dlpack__` or `__cuda_array_interface__`.
    batch_size, vocab_size : int
        B and V.

    Raises
    ------
    RequestError
        If the shape is not (B, T), T is 0, the dtype is not an integer, or an id is outside [0, V).

    Examples
    --------
    >>> checked_token_ids([[1, -1]], 1, 100)
    Traceback (most recent call last):
    ...
    engine.errors.RequestError: token_ids[0, 1] must be in [0, 100), the vocabulary; got -1
    """
    rows = length_of(token_ids)
    if rows is not None and rows > max(batch_size, _MAX_ROWS_READ):
        raise RequestError(
            f"token_ids must have B = {batch_size} rows, as the cache; got {shown(rows)}"
        )
    ids = _on_host("token_ids", token_ids)
    if ids.ndim != 2 or ids.shape[0] != batch_size or not ids.shape[1]:
        raise RequestError(
            f"token_ids must have shape (B, T) with B = {batch_size} (rows of the cache) and "
            f"T >= 1; got {ids.shape}"
        )
    return _in_vocabulary("token_ids", ids, vocab_size)


def checked_sequence(
    token_ids: Any, vocab_size: int, name: str = "token_ids"
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the token ids of one sequence as a (T,) int32 array on the host.

    Parameters
    ----------
    token_ids : (T,) array of any int dtype, or list
        See `checked_token_ids`.
    vocab_size : int
    name : str
        Name of the argument, for messages.

    Raises
    ------
    RequestError
        If the shape is not (T,), T is 0, the dtype is not an integer, or an id is outside [0, V).

    Examples
    --------
    >>> checked_sequence([1, -1], 100, "token_ids[3]")
    Traceback (most recent call last):
    ...
    engine.errors.RequestError: token_ids[3][1] must be in [0, 100), the vocabulary; got -1
    """
    ids = _on_host(name, token_ids)
    if ids.ndim != 1 or not ids.size:
        raise RequestError(f"{name} must have shape (T,) with T >= 1; got {ids.shape}")
    return _in_vocabulary(name, ids, vocab_size)


def _in_vocabulary(
    name: str, ids: np.ndarray[Any, Any], vocab_size: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    if ids.dtype.kind not in "iu":
        raise RequestError(f"{name} must be integers; got {ids.dtype}")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        raise RequestError(
            f"{name}{first} must be in [0, {vocab_size}), the vocabulary; got {ids[tuple(first)]}"
        )
    return ids.astype(np.int32)


def _on_host(name: str, token_ids: Any) -> np.ndarray[Any, Any]:
    if isinstance(token_ids, np.ndarray) or is_cupy_array(token_ids):
        return to_numpy(token_ids)
    if hasattr(token_ids, "__dlpack__"):  # it waits for the stream that writes them
        on_gpu = token_ids.__dlpack_device__()[0] == 2  # kDLCUDA
        return to_numpy((cupy() if on_gpu else np).from_dlpack(token_ids))
    if hasattr(token_ids, "__cuda_array_interface__"):
        return to_numpy(cupy().asarray(token_ids))
    try:
        return np.asarray(token_ids)
    except ValueError as error:
        raise RequestError(f"{name} must be rows of equal length; got {error}") from None
