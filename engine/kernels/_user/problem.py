"""A call as numbers: sizes, dtypes and the chip, from which the launches are chosen.

`Problem` is what a definition's `launch` receives. It is made with or without arrays, so that the
choice can be tested, and every variant compiled, without a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError
from engine.kernels._launch import ceil_div
from engine.kernels._user.signature import DTYPES

__all__ = ["CHIPS", "REGISTERS", "Chip", "Launch", "Problem", "Scratch", "TensorMapOf"]

REGISTERS = 65536
"""Registers of a multiprocessor from sm_80 on; one block may have them all."""

_MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_CLUSTER = 16


@dataclass(frozen=True)
class Chip:
    """The GPU of a problem.

    Attributes
    ----------
    arch : str
        Architecture, such as "sm_90a".
    sm_count : int
        Number of multiprocessors.
    max_shared_bytes : int
        Shared memory of a block in bytes, at most.
    """

    arch: str
    sm_count: int
    max_shared_bytes: int

    @property
    def capability(self) -> int:
        """Ten times the compute capability: 80, 90, 100."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def has_clusters(self) -> bool:
        """Whether it supports clusters and programmatic dependent launch."""
        return self.capability >= 90


CHIPS: dict[str, Chip] = {
    "sm_80": Chip("sm_80", 108, 163 << 10),  # A100
    "sm_86": Chip("sm_86", 84, 99 << 10),  # A40
    "sm_89": Chip("sm_89", 128, 99 << 10),  # RTX 4090
    "sm_90a": Chip("sm_90a", 132, 227 << 10),  # H100, H200
    "sm_100": Chip("sm_100", 148, 227 << 10),  # B200
    "sm_103": Chip("sm_103", 148, 227 << 10),  # B300
    "sm_120": Chip("sm_120", 170, 99 << 10),  # RTX 5090
}
"""A common GPU of each architecture, for problems made without a GPU."""


@dataclass(frozen=True)
class TensorMapOf:
    """A kernel argument: the tensor map (TMA descriptor) of an array of the call.

    Attributes
    ----------
    array : str
    box : tuple of int
        Elements of a TMA box along each axis of the array.
    swizzle : int
        Span of the swizzle in bytes: 0, 32, 64 or 128.
    l2_promotion : int
        Bytes that L2 fetches at a time: 0, 64, 128 or 256.
    """

    array: str
    box: tuple[int, ...]
    swizzle: int = 128
    l2_promotion: int = 128


@dataclass(frozen=True)
class Scratch:
    """A kernel argument: memory of the call, shared by its launches that pass equal `Scratch`.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    zeroed : bool
        Set to 0 before the first launch.
    tag : str
        Tells two of equal shape apart.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    zeroed: bool = False
    tag: str = ""


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    grid, block : tuple of int
    shared : int
        Dynamic shared memory in bytes.
    cluster : int
        Blocks of a cluster, along the grid's first axis.
    pdl : bool
        Programmatic dependent launch: the kernel may start before the preceding one has ended, so
        it must call `pdl_wait()` (common/pdl.cuh) before it accesses memory.
    entry : str
        Name of the kernel; "" for the op's own.
    args : tuple of (str, value)
        Values of parameters that the signature does not name.
    defines : tuple of (str, int)
        Macros that the source is compiled with.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    cluster: int = 1
    pdl: bool = False
    entry: str = ""
    args: tuple[tuple[str, Any], ...] = ()
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        count = 1
        for size in self.block:
            count *= size
        return count

    def check(self, op: str, chip: Chip) -> None:
        """Raise a ConfigError if the chip cannot run it."""
        for name, sizes in (("grid", self.grid), ("block", self.block)):
            if not 1 <= len(sizes) <= 3 or not all(isinstance(n, int) and n >= 0 for n in sizes):
                raise ConfigError(
                    f"{op}: launch: {name} must be one to three integers; got {sizes!r}"
                )
        if any(size > most for size, most in zip(self.grid, _MAX_GRID, strict=False)):
            raise ConfigError(f"{op}: launch: grid must be at most {_MAX_GRID}; got {self.grid}")
        if not 1 <= self.num_threads <= _MAX_THREADS:
            raise ConfigError(
                f"{op}: launch: a block must have 1 to {_MAX_THREADS} threads; "
                f"got {self.block}, {self.num_threads} threads"
            )
        if not isinstance(self.shared, int) or not 0 <= self.shared <= chip.max_shared_bytes:
            raise ConfigError(
                f"{op}: launch: shared must be 0 to {chip.max_shared_bytes} bytes on "
                f"{chip.arch}; got {self.shared!r}"
            )
        if not isinstance(self.cluster, int) or not 1 <= self.cluster <= _MAX_CLUSTER:
            raise ConfigError(
                f"{op}: launch: cluster must be 1 to {_MAX_CLUSTER} blocks; got {self.cluster!r}"
            )
        for name, value in self.defines:
            if not isinstance(value, int):
                raise ConfigError(
                    f"{op}: launch: defines: {name} must be an integer; got {shown(value)}"
                )
        if self.cluster > 1 and (not chip.has_clusters or self.grid[0] % self.cluster):
            raise ConfigError(
                f"{op}: launch: a cluster of {self.cluster} needs sm_90 and a grid that it "
                f"divides; got {chip.arch}, grid {self.grid}"
            )


@dataclass(frozen=True)
class Problem:
    """The sizes of a call. ``call["T"]`` returns a size or a scalar argument.

    Attributes
    ----------
    op : str
    sizes : tuple of (str, int)
        Symbols of the signature.
    scalars : tuple of (str, number)
        Scalar arguments.
    dtype : str
        The file's `scalar_t`.
    dtypes : tuple of (str, str)
        Dtype of each array argument that was given.
    is_aligned : bool
        Whether every array, and every row of it, starts at a multiple of 16 bytes.
    chip : Chip
    """

    op: str
    sizes: tuple[tuple[str, int], ...]
    scalars: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float32"
    dtypes: tuple[tuple[str, str], ...] = ()
    is_aligned: bool = True
    chip: Chip = CHIPS["sm_90a"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """All fields; scalars as text, which tells 0.0 from -0.0."""
        scalars = repr(self.scalars)
        arrays = (self.dtype, self.dtypes, self.is_aligned)
        return (self.op, self.sizes, scalars, *arrays, self.chip)

    @cached_property
    def _hash(self) -> int:
        """A call looks its launches up by its problem, which calls like it share."""
        return hash(self._key)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Sizes and scalars, by name."""
        return dict(self.sizes) | dict(self.scalars)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            known = ", ".join(self.values)
            raise ConfigError(
                f"{self.op}: a size or scalar must be one of {known}; got {name!r}"
            ) from None

    def __getattr__(self, name: str) -> Any:
        text = f"a problem has no attribute {name!r}"
        if not name.startswith("_") and name in self.values:
            text += f"; a size or scalar is call[{name!r}]"
        raise AttributeError(text)

    def has(self, array: str) -> bool:
        """Tell whether the array argument was given: an optional one may be missing."""
        return array in dict(self.dtypes)

    def dtype_of(self, array: str) -> str:
        """Return the dtype of an array argument that was given."""
        dtypes = dict(self.dtypes)
        if array not in dtypes:
            raise ConfigError(
                f"{self.op}: an array argument must be one of {', '.join(dtypes)}; got {array!r}"
            )
        return dtypes[array]

    @property
    def itemsize(self) -> int:
        """Size of a `scalar_t` in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def arch(self) -> str:
        """Architecture, such as "sm_90a"; `capability` is a number to compare."""
        return self.chip.arch

    @property
    def capability(self) -> int:
        """Ten times the compute capability: 80, 86, 89, 90, 120. Clusters and TMA need 90."""
        return self.chip.capability

    @property
    def sm_count(self) -> int:
        """Number of multiprocessors."""
        return self.chip.sm_count

    @property
    def max_shared_bytes(self) -> int:
        """Shared memory of a block in bytes, at most."""
        return self.chip.max_shared_bytes

    def grid1d(self, num_items: int, threads: int = 256, **options: Any) -> Launch:
        """Return a launch of one thread for each of `num_items`. `options`: see `grid`."""
        for name, given, least in (("num_items", num_items, 0), ("threads", threads, 1)):
            value = _as_int(given)
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{self.op}: launch: {name} must be an integer of at least {least}; "
                    f"got {given!r}"
                )
        return self.grid((ceil_div(num_items, threads),), (threads,), **options)

    def grid(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *,
        shared: int = 0,
        cluster: int = 1,
        pdl: bool = False,
        entry: str = "",
        args: Mapping[str, Any] | None = None,
        defines: Mapping[str, int] | None = None,
    ) -> Launch:
        """Return a launch of `grid` blocks of `block` threads.

        Parameters
        ----------
        grid, block : int or up to three int
        shared : int
            Dynamic shared memory in bytes.
        cluster : int
            Blocks of a cluster, along the grid's first axis.
        pdl : bool
            Programmatic dependent launch: the kernel calls `pdl_wait()` before it accesses memory.
        entry : str
            Name of the kernel, if it is not the op's.
        args : mapping, optional
            Values of parameters that the signature does not name: numbers, `tensor_map(...)`,
            `scratch(...)`.
        defines : mapping, optional
            Macros; the source is compiled once for each set.

        Examples
        --------
        >>> call = Problem("copy", (("N", 1000),))
        >>> call.grid1d(call["N"], 256).grid
        (4,)
        """
        for name, given in (("args", args), ("defines", defines)):
            if not isinstance(given, Mapping | None) or not all(map(_is_name, given or ())):
                raise ConfigError(
                    f"{self.op}: launch: {name} must be a mapping with identifiers as keys; "
                    f"got {shown(given)}"
                )
        return Launch(
            _sizes(grid),
            _sizes(block),
            _as_int(shared),
            _as_int(cluster),
            pdl,
            entry,
            tuple((args or {}).items()),
            tuple((name, _as_int(value)) for name, value in (defines or {}).items()),
        )

    def tensor_map(
        self, array: str, box: Sequence[int], *, swizzle: int = 128, l2_promotion: int = 128
    ) -> TensorMapOf:
        """Return the tensor map of an array of the call, as a value for `args`.

        Parameters
        ----------
        array : str
            Name of an argument or result: float32, 16-bit float or 8-bit, 2 to 5 axes.
        box : sequence of int
            Elements of a TMA box along each axis of the array; elements outside the array are
            loaded as zeros.
        swizzle : 0, 32, 64 or 128
            Span of the swizzle in bytes, at least one row of the box; 0 for none.
        l2_promotion : 0, 64, 128 or 256
            Bytes that L2 fetches at a time.
        """
        return TensorMapOf(array, _sizes(box), swizzle, l2_promotion)

    def scratch(
        self,
        shape: int | Sequence[int],
        dtype: str = "float32",
        *,
        zeroed: bool = False,
        tag: str = "",
    ) -> Scratch:
        """Return memory for the call's launches, as a value for `args`.

        Launches of one call that pass equal values share the memory. `zeroed`: it is set to 0
        before the first of them. `tag` tells two of equal shape apart.

        Raises
        ------
        ConfigError
            If a size is no integer of at least 0, or an argument cannot have the dtype either.
        """
        sizes = _sizes(shape)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ConfigError(
                f"{self.op}: scratch: shape must be integers of at least 0; got {shape!r}"
            )
        if dtype not in DTYPES:
            raise ConfigError(
                f"{self.op}: scratch: dtype must be of {', '.join(DTYPES)}; got {dtype!r}"
            )
        return Scratch(sizes, dtype, zeroed, tag)


def _sizes(value: int | Sequence[int]) -> tuple[int, ...]:
    """Return a size, or several, as Python integers; what is no integer is left for the check."""
    return tuple(map(_as_int, value if isinstance(value, Sequence) else (value,)))


def _as_int(value: Any) -> Any:
    """Return an integer as Python's, and True as 1: JSON holds it, and "#if" reads it."""
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()
