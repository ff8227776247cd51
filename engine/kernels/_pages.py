"""Layout of KV pages (P, K, block_size, D): checks, strides, and their TMA boxes.

The axes of pages, heads and tokens may lie in memory in any order and at any distance: k_pages and
v_pages may be two slices of one array, [P, K, block_size, 2 D] or [P, 2, block_size, K, D], of
another framework. Only the last axis must be contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ShapeError
from engine.kernels._contract import Contract
from engine.kernels._elementwise import element_strides
from engine.kernels._quantized_kv import page_dtypes

__all__ = ["PageRows", "checked_pages", "page_strides", "written_pages"]

_MAX_ROWS = 2**31 - 256  # page rows; larger numbers mean "no page" to the kernels


def checked_pages(
    call: Contract, pages: dict[str, Any], shape: str, dtype: np.dtype[Any]
) -> tuple[Any, Any]:
    """Return the checked arrays of K and V, given by name, for values of `dtype`.

    Nothing is copied: a copy would duplicate the whole cache.
    """
    (k_name, k), (v_name, v) = pages.items()
    k = _checked(call, k_name, k, shape, page_dtypes(dtype))
    v = _checked(call, v_name, v, shape, k.dtype)
    if _steps(k) != _steps(v):
        raise ShapeError(
            f"{call.op}: {v_name}: must have the strides of {k_name}, {k.strides}; got {v.strides}"
        )
    return k, v


def written_pages(
    call: Contract, k_pages: Any, v_pages: Any, shape: str, dtype: np.dtype[Any]
) -> tuple[Any, Any]:
    """Return the checked pages of an op that writes to them. See `checked_pages`."""
    k_pages, v_pages = checked_pages(call, {"k_pages": k_pages, "v_pages": v_pages}, shape, dtype)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        call.written(name, pages, shape, pages.dtype, layout="rows")
    return k_pages, v_pages


def _checked(call: Contract, name: str, value: Any, shape: str, dtype: Any) -> Any:
    pages = call.array(name, value, shape, dtype, layout="any")
    if pages.size and pages.strides[-1] != pages.itemsize:
        raise ShapeError(
            f"{call.op}: {name}: its last axis must be contiguous; got strides {pages.strides}"
        )
    return pages


def _steps(pages: Any) -> list[int]:
    """Return the strides of the leading axes in bytes; 0 for axes of size 1, whose index is 0."""
    sizes = pages.shape[:-1]
    return [step if n > 1 else 0 for step, n in zip(pages.strides[:-1], sizes, strict=True)]


def page_strides(pages: Any) -> dict[str, Any]:
    """Return the strides in elements, by kernel parameter name.

    Examples
    --------
    >>> page_strides(np.zeros((5, 2, 16, 64)))
    {'page_stride': 2048, 'head_stride': 1024, 'token_stride': 64}
    """
    names = ("page_stride", "head_stride", "token_stride")
    return dict(zip(names, element_strides(pages), strict=False))


@dataclass(frozen=True)
class PageRows:
    """Strides of pages in page rows, the outermost coordinate of their tensor map.

    A token and head starts at page row ``p * page + h * head + t * token``, in every layout.

    Attributes
    ----------
    page, head, token : int
        Strides in page rows.
    row_bytes : int
        Bytes between page rows: the greatest common divisor of the strides.
    token_bytes : int
        Bytes of a token and head.
    sizes : (int, int, int)
        P, K, block_size.
    """

    page: int
    head: int
    token: int
    row_bytes: int
    token_bytes: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, pages: Any) -> PageRows:
        """Return the page rows of pages.

        Examples
        --------
        >>> rows = PageRows.of(np.zeros((5, 2, 16, 64), np.float16))
        >>> rows.page, rows.head, rows.token, rows.row_bytes
        (32, 16, 1, 128)
        """
        page, head, token = _steps(pages)
        token_bytes = pages.shape[-1] * pages.itemsize
        row_bytes = math.gcd(page, head, token) or token_bytes
        return cls(
            page=page // row_bytes,
            head=head // row_bytes,
            token=token // row_bytes,
            row_bytes=row_bytes,
            token_bytes=token_bytes,
            sizes=tuple(pages.shape[:-1]),
        )

    @property
    def is_supported(self) -> bool:
        """Tell whether TMA can address the pages: at least one, and rows count up to int32."""
        steps = (self.page, self.head, self.token - 1)
        return min(self.sizes) > 0 and min(steps) >= 0 and self._last < _MAX_ROWS

    @property
    def has_adjacent_tokens(self) -> bool:
        """Tell whether a head's tokens in a page lie next to each other, as one run of bytes."""
        return self.token * self.row_bytes == self.token_bytes

    @property
    def _last(self) -> int:
        """Last page row."""
        pages, heads, tokens = self.sizes
        return (pages - 1) * self.page + (heads - 1) * self.head + (tokens - 1) * self.token

    def map_sizes(self, box_keys: int) -> tuple[int, int]:
        """Return the sizes of a map's axes of tokens, `box_keys`, and of page rows.

        A box starts at a multiple of `box_keys` tokens and never ends beyond the last row.
        """
        return box_keys, self._last - (box_keys - 1) * self.token + 1

    @property
    def map_strides(self) -> tuple[int, int]:
        """Strides in bytes of a map's axes of tokens and of page rows."""
        return self.token * self.row_bytes, self.row_bytes

    def launch_arguments(self) -> dict[str, Any]:
        """Return the strides by kernel parameter name."""
        return {"page_rows": self.page, "head_rows": self.head, "token_rows": self.token}
