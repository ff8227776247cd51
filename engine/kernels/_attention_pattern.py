"""Attention patterns for attention_prefill: which keys a query sees, by its position."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import device
from engine.errors import ContractError
from engine.kernels._contract import Contract
from engine.kernels._prepared_call import constant

__all__ = ["PARAMS", "BlockSparse", "Pattern", "Periodic", "arguments", "check", "numbered"]

# Extra parameters of the kernels that support patterns. See `arguments`.
PARAMS = (
    " pattern_blocks:ptr pattern_words:i32 pattern_num_q:i32 pattern_num_k:i32 pattern_q:i32 "
    "pattern_k:i32 pattern_offset:i32"
)
_MAX = 2**30
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Numbered:
    """Immutable, and known by a number to callers whose arguments must be numbers or arrays.

    Attributes
    ----------
    number : int
        1 or more, unique in this process.
    """

    number: int

    def _take_number(self) -> None:
        object.__setattr__(self, "number", next(_numbers))
        _by_number[self.number] = self

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def numbered(number: int) -> Any:
    """Return the pattern with this number, or None for 0.

    Raises
    ------
    ContractError
        If the pattern no longer exists.
    """
    pattern = _by_number.get(number)
    if number and pattern is None:
        raise ContractError(
            "attention pattern: its object has been deleted; keep it as long as what uses it"
        )
    return pattern


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(_Numbered):
    """Block-sparse attention, given by a mask over (query block, key block).

    Parameters
    ----------
    mask : (NQ, NK) array_like of bool, on the host
        Row i marks the key blocks that queries at positions ``i * block_q`` to
        ``(i + 1) * block_q - 1`` see. Queries beyond the mask see no keys; keys beyond it are
        hidden.
    block_q, block_k : int
        Queries and keys per block, 1 or more. Multiples of 128 are fastest, because no tile is
        then partly masked.

    Raises
    ------
    ContractError
        If the mask is not a 2-d array of bool, or a size is not an int from 1 to 2**30 - 1.

    Notes
    -----
    The bits are copied to each device on first use and cached there, so create each pattern once.

    Examples
    --------
    >>> BlockSparse(np.tril(np.ones((4, 4), bool)), 128, 128).mask.shape
    (4, 4)
    """

    mask: Any
    block_q: int
    block_k: int
    _words: dict[int, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        call = Contract("BlockSparse")
        call.check("mask", not isinstance(self.mask, np.ma.MaskedArray), "plain", "a masked array")
        mask = np.array(self.mask)
        ok = mask.ndim == 2 and mask.dtype == bool
        call.check("mask", ok, "an array of bool with two axes", f"{mask.dtype} {mask.shape}")
        mask.flags.writeable = False
        object.__setattr__(self, "mask", mask)
        for name in ("block_q", "block_k"):
            object.__setattr__(self, name, _check_int(call, name, getattr(self, name), 1, _MAX - 1))
        self._take_number()

    def __reduce__(self) -> Any:
        return BlockSparse, (self.mask, self.block_q, self.block_k)

    def __repr__(self) -> str:
        (rows, columns) = self.mask.shape
        seen = self.mask.sum()
        return f"BlockSparse({seen} of {rows} x {columns}, {self.block_q}, {self.block_k})"

    def words(self) -> Any:
        """Return the mask's bits on the current device: (NQ, ceil(NK / 32)) uint32."""
        cupy = device.cupy()
        where = cupy.cuda.runtime.getDevice()
        if where not in self._words:
            num_q, num_k = self.mask.shape
            padded = np.zeros((num_q, -(-num_k // 32) * 32), bool)
            padded[:, :num_k] = self.mask
            bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
            self._words[where] = constant(bits)
        return self._words[where]


@dataclass(frozen=True)
class Periodic(_Numbered):
    """Periodic attention: query i sees key j if (i - j + offset) mod period < width.

    With offset 0 this is a sliding window of `width` keys that repeats every `period` keys into the
    past. With ``offset = width // 2`` the window is centred on the query: in a lattice with rows of
    `period` sites it covers a site's neighbours.

    Parameters
    ----------
    period : int
        1 to 2**30 - 1. Only whole tiles (128 queries by 64 to 128 keys) are skipped, so a pattern
        saves time only if ``period - width`` is well above 256.
    width : int
        1 to `period`.
    offset : int
        0 to ``period - 1``.

    Raises
    ------
    ContractError
        If an argument is not an int or is out of range.

    Examples
    --------
    >>> Periodic(period=4096, width=1024).offset
    0
    """

    period: int
    width: int
    offset: int = 0

    def __post_init__(self) -> None:
        call = Contract("Periodic")
        period = _check_int(call, "period", self.period, 1, _MAX - 1)
        width = _check_int(call, "width", self.width, 1, period)
        offset = _check_int(call, "offset", self.offset, 0, period - 1)
        for name, value in (("period", period), ("width", width), ("offset", offset)):
            object.__setattr__(self, name, value)
        self._take_number()

    def __reduce__(self) -> Any:
        return Periodic, (self.period, self.width, self.offset)


Pattern = BlockSparse | Periodic


def _check_int(call: Contract, name: str, value: Any, low: int, high: int) -> int:
    """Check an int and return it as a Python int: NumPy's uint64 would make positions floats."""
    return call.integer(name, value, low, high)


def check(call: Contract, pattern: Any) -> None:
    """Check the argument `pattern` of an op."""
    is_pattern = isinstance(pattern, Pattern | None)
    call.check("pattern", is_pattern, "BlockSparse, Periodic or None", type(pattern).__name__)


def arguments(pattern: Pattern | None) -> dict[str, Any]:
    """Return the kernel arguments named in PARAMS; without a pattern, null and zeros."""
    numbers: tuple[Any, ...]
    if pattern is None:
        numbers = (None, 0, 0, 0, 0, 0, 0)
    elif isinstance(pattern, Periodic):
        numbers = (None, 0, 0, 0, pattern.period, pattern.width, pattern.offset)
    else:
        words = pattern.words()
        sizes = (words.shape[1], *pattern.mask.shape)
        numbers = (words, *sizes, pattern.block_q, pattern.block_k, 0)
    names = [item.split(":")[0] for item in PARAMS.split()]
    return dict(zip(names, numbers, strict=True))
