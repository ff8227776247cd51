"""Kernel launches with typed arguments; every kernel launch goes through this module.

CuPy passes a Python int as `long long` and a float as `double`, whatever the kernel declares. So
each kernel declares its parameters here, by name and C type, and every argument is cast to them.

    _KERNEL = Kernel("rmsnorm_kernel", "x:ptr num_rows:i64 n:i32 eps:f32")
    _KERNEL.launch(spec, grid, block, x=x, num_rows=8, n=64, eps=1e-6)

A kernel with many parameters takes them in one struct (`_params.py`); launches look the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from engine import device
from engine.errors import ContractError
from engine.kernels._chip import DEFAULT_SHARED_BYTES, limits_of
from engine.kernels._launch_plan import active_builder
from engine.kernels._module import ModuleSpec, load_module
from engine.kernels._params import ParamStruct
from engine.kernels._prepared_launch import PreparedLaunch, max_active_clusters

__all__ = ["KERNELS", "Kernel", "ceil_div", "round_up"]

_PORTABLE_CLUSTER = 8  # maximum blocks per cluster on every GPU with clusters
_NON_PORTABLE_CLUSTER_SIZE = 14  # CUfunction_attribute: more of them are allowed
_NULL = np.uint64(0)

_CASTS: dict[str, Callable[[Any], Any]] = {
    "ptr": lambda value: _NULL if value is None else value,
    "i32": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
    "b8": np.bool_,
    "tmap": lambda value: value,
}

KERNELS: list[Kernel] = []
"""Every kernel declared by the imported modules."""


class Kernel:
    """A kernel entry point. Several modules may define it, for example one per dtype.

    Parameters
    ----------
    entry : str
        Name of the `extern "C" __global__` function.
    params : str
        Its parameters in order, "name:type" separated by spaces. Types are ptr (None is a null
        pointer), i32, i64, u32, u64, f32, f64, b8 (bool) and tmap (a map of `_tensor_map.py`, by
        value).
    struct : str, optional
        Name of the C struct that holds the parameters; the kernel takes it by value, as its only
        argument.

    Attributes
    ----------
    struct : ParamStruct or None
        The struct's layout.
    """

    def __init__(self, entry: str, params: str, struct: str | None = None) -> None:
        self.entry = entry
        names, kinds = zip(*(item.split(":") for item in params.split()), strict=True)
        self._names: tuple[str, ...] = names
        self._casts = tuple(_CASTS[kind] for kind in kinds)
        self._has_maps = "tmap" in kinds
        self.struct = None if struct is None else ParamStruct(struct, names, kinds)
        self._functions: dict[tuple[ModuleSpec, int], Any] = {}
        # Dynamic shared memory allowed so far, in bytes, by module and device.
        self._shared_limits: dict[tuple[ModuleSpec, int], int] = {}
        self._large_clusters: set[tuple[ModuleSpec, int]] = set()
        KERNELS.append(self)

    @property
    def num_arguments(self) -> int:
        """Number of arguments of the CUDA function."""
        return 1 if self.struct is not None else len(self._names)

    def launch(
        self,
        spec: ModuleSpec,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_mem: int = 0,
        *,
        cluster: int = 1,
        pdl: bool = False,
        **args: Any,
    ) -> None:
        """Launch on the current device and stream; an empty grid launches nothing.

        Parameters
        ----------
        cluster : int
            Blocks per cluster. With 1 the kernel's own cluster attribute applies, if any.
        pdl : bool
            Programmatic dependent launch, if the device supports it: the kernel may start before
            the preceding one has ended. SAFETY: it must call `pdl_wait` before it accesses memory
            that other kernels write.
        **args
            The kernel's arguments, by name.

        Raises
        ------
        ContractError
            If an argument is missing or unknown.
        OverflowError
            If an integer does not fit its C type.
        """
        if 0 in grid:
            return
        values = self._values(args)
        index = device.cupy().cuda.runtime.getDevice()
        function = self._function(spec, shared_mem, index, cluster)
        pdl = pdl and limits_of(index).has_clusters
        builder = active_builder()
        is_special = pdl or cluster > 1 or self.struct is not None or self._has_maps
        if not is_special and builder is None:
            function(grid, block, values, shared_mem=shared_mem)
            return
        launch = PreparedLaunch(
            function.kernel.ptr,
            grid,
            block,
            shared_mem,
            values,
            struct=self.struct,
            cluster=cluster,
            pdl=pdl,
        )
        if builder is None or not builder.is_dry:
            launch.launch()
        if builder is not None:
            builder.add_launch(self.entry, launch, values)

    def resident_blocks(self, spec: ModuleSpec, num_threads: int, shared_mem: int) -> int:
        """Return how many blocks a multiprocessor holds at once, as the driver computes it."""
        cuda = device.cupy().cuda
        function = self._function(spec, shared_mem, cuda.runtime.getDevice())
        count = cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return int(count(function.kernel.ptr, num_threads, shared_mem))

    def resident_clusters(
        self, spec: ModuleSpec, num_threads: int, shared_mem: int, cluster: int
    ) -> int:
        """Return how many clusters of `cluster` blocks the device holds at once."""
        index = device.cupy().cuda.runtime.getDevice()
        function = self._function(spec, shared_mem, index, cluster)
        return max_active_clusters(function.kernel.ptr, num_threads, shared_mem, cluster)

    def _values(self, args: dict[str, Any]) -> tuple[Any, ...]:
        if len(args) != len(self._names):
            self._wrong_arguments(args)
        try:
            if self.struct is not None:  # ParamStruct.pack casts them
                return tuple([args[name] for name in self._names])
            return tuple(
                cast(args[name]) for name, cast in zip(self._names, self._casts, strict=True)
            )
        except KeyError:
            self._wrong_arguments(args)

    def _function(self, spec: ModuleSpec, shared_mem: int, index: int, cluster: int = 1) -> Any:
        function = self._functions.get((spec, index))
        if function is None:
            function = load_module(spec).get_function(self.entry)
            self._functions[spec, index] = function
            # Static shared memory counts towards the limit too.
            limit = DEFAULT_SHARED_BYTES - function.shared_size_bytes
            self._shared_limits[spec, index] = limit
        if shared_mem > self._shared_limits[spec, index]:
            function.max_dynamic_shared_size_bytes = shared_mem
            self._shared_limits[spec, index] = shared_mem
        if cluster > _PORTABLE_CLUSTER and (spec, index) not in self._large_clusters:
            allow = device.cupy().cuda.driver.funcSetAttribute
            allow(function.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE, 1)
            self._large_clusters.add((spec, index))
        return function

    def _wrong_arguments(self, args: dict[str, Any]) -> NoReturn:
        missing = sorted(set(self._names) - set(args))
        unknown = sorted(set(args) - set(self._names))
        raise ContractError(f"{self.entry}: missing arguments {missing}, unknown {unknown}")


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up.

    Examples
    --------
    >>> ceil_div(9, 4)
    3
    """
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`.

    Examples
    --------
    >>> round_up(2112, 128)
    2176
    """
    return ceil_div(size, multiple) * multiple
