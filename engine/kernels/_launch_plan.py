"""Launch plans: a layer's kernel launches, recorded once and replayed for layers of its kind.

Layers of one kind launch the same kernels with the same scalar arguments; only the addresses of
their arrays differ. Preparing a launch in Python takes 30 to 100 us, repeating it 3 us. So a plan
records the launches of one layer and replays them for the others:

    with making_plan() as builder:
        layer(...)
    plan = builder.finish([("qkv.weight", array.data.ptr, array.nbytes), ...])
    plan.run([array.data.ptr for array in arrays_of_another_layer])

An entry is a kernel launch or a call of a host function on addresses. Work that is not one of the
engine's kernels (a collective, a copy on another stream) goes through `plan_call`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from engine.errors import LaunchPlanError
from engine.kernels._prepared_launch import PreparedLaunch
from engine.kernels._tensor_map import map_source, tensor_map_of
from engine.plan_array import unwrapped

__all__ = ["HostCall", "KernelLaunch", "LaunchPlan", "PlanBuilder", "active_builder"]
__all__ += ["making_plan", "plan_call"]

Place = tuple[int, int]
"""Index of one of a plan's arrays, and an offset into it in bytes."""

_local = threading.local()


class KernelLaunch:
    """A kernel launch; some of its arguments are addresses inside a layer's arrays.

    Parameters
    ----------
    name : str
        The kernel's entry point.
    launch : PreparedLaunch
    pointers : sequence of (argument index, Place)
    maps : sequence of (argument index, Place, tuple)
        Tensor maps, each with its encoding parameters other than the address.
    """

    __slots__ = ("_hosts", "_maps", "launch", "name", "places")

    def __init__(
        self,
        name: str,
        launch: PreparedLaunch,
        pointers: Sequence[tuple[int, Place]],
        maps: Sequence[tuple[int, Place, tuple[Any, ...]]],
    ) -> None:
        self.name = name
        self.launch = launch
        self.places: dict[int, Place] = dict(pointers)
        self.places |= {index: place for index, place, _ in maps}
        self._hosts = [(launch.host(index), *place) for index, place in pointers]
        self._maps = list(maps)

    def run(self, addresses: Sequence[int]) -> None:
        """Launch with the plan's arrays at `addresses`."""
        for host, place, offset in self._hosts:
            host[()] = addresses[place] + offset
        for index, (place, offset), rest in self._maps:
            self.launch.set_value(index, tensor_map_of(addresses[place] + offset, *rest))
        self.launch.launch()


class HostCall:
    """A call of a host function on addresses.

    Parameters
    ----------
    name : str
    function : callable
        Called with one address per argument.
    arguments : sequence of (int, Place or None)
        Address, and its `Place` in the plan's arrays; None if all layers share the address.
    """

    __slots__ = ("_arguments", "_function", "name", "places")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[int, Place | None]],
    ) -> None:
        self.name = name
        self.places = {i: place for i, (_, place) in enumerate(arguments) if place is not None}
        self._function = function
        self._arguments = list(arguments)

    def run(self, addresses: Sequence[int]) -> None:
        """Call with the plan's arrays at `addresses`."""
        self._function(
            *(
                a if place is None else addresses[place[0]] + place[1]
                for a, place in self._arguments
            )
        )


class LaunchPlan:
    """The launches of one kind of layer, in order.

    SAFETY: the plan keeps the arrays that all layers share alive, so that their memory is not
    reused. It is bound to the stream on which it was recorded.

    Attributes
    ----------
    arrays : tuple of str
        Names of the arrays, in the order of the addresses passed to `run`.
    entries : tuple of KernelLaunch or HostCall
    """

    __slots__ = ("_kept", "_runs", "arrays", "entries")

    def __init__(
        self, arrays: Sequence[str], entries: Sequence[KernelLaunch | HostCall], kept: Any
    ) -> None:
        self.arrays = tuple(arrays)
        self.entries = tuple(entries)
        self._runs = tuple(entry.run for entry in entries)
        self._kept = kept

    def __str__(self) -> str:
        """One line per entry: its name, and the array of each argument that is an address."""
        lines = []
        for entry in self.entries:
            where = [
                f"{index}={self.arrays[place]}{f'+{offset}' if offset else ''}"
                for index, (place, offset) in sorted(entry.places.items())
            ]
            lines.append(f"{entry.name}({', '.join(where)})")
        return "\n".join(lines)

    def run(self, addresses: Sequence[int]) -> None:
        """Repeat the launches with the arrays at `addresses`, in the order of `arrays`."""
        for run in self._runs:
            run(addresses)


class PlanBuilder:
    """Records the launches and calls of a plan.

    Parameters
    ----------
    is_dry : bool
        Only record: nothing is launched or called, so the arrays need no memory.
    """

    def __init__(self, is_dry: bool = False) -> None:
        self.is_dry = is_dry
        self._steps: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add_launch(self, name: str, launch: PreparedLaunch, values: tuple[Any, ...]) -> None:
        """Record a launch that was just made with the arguments `values`."""
        self._steps.append((name, launch, values))

    def add_call(self, function: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
        """Record a call that was just made on `arrays`."""
        self._steps.append((getattr(function, "__name__", str(function)), function, arrays))

    def finish(self, arrays: Sequence[tuple[str, int, int]]) -> LaunchPlan:
        """Return the plan.

        Parameters
        ----------
        arrays : sequence of (name, address, bytes)
            The arrays that differ between layers. All other arrays are shared by the layers.

        Raises
        ------
        LaunchPlanError
            If two of them overlap: an address would then be ambiguous.
        """
        places = _Places(arrays)
        entries = [
            _kernel_launch(name, step, values, places)
            if isinstance(step, PreparedLaunch)
            else HostCall(name, step, [_argument(value, places) for value in values])
            for name, step, values in self._steps
        ]
        kept = [values for _, _, values in self._steps]
        return LaunchPlan([name for name, _, _ in arrays], entries, kept)


class _Places:
    """Maps addresses to the arrays that contain them."""

    def __init__(self, arrays: Sequence[tuple[str, int, int]]) -> None:
        spans = sorted((start, size, index) for index, (_, start, size) in enumerate(arrays))
        for (start, size, index), (following, _, other) in itertools.pairwise(spans):
            if start + size > following:
                names = arrays[index][0], arrays[other][0]
                raise LaunchPlanError(
                    f"a layer's arrays must not overlap; {names[0]!r} and {names[1]!r} do"
                )
        self._spans = spans
        self._starts = [start for start, _, _ in spans]

    def find(self, address: int) -> Place | None:
        """Return the array index and offset of `address`, or None if it is outside all arrays."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, index = self._spans[at]
        return (index, address - start) if address < start + size else None


def _kernel_launch(
    name: str, launch: PreparedLaunch, values: tuple[Any, ...], places: _Places
) -> KernelLaunch:
    pointers = []
    maps = []
    for index, value in enumerate(values):
        if value is None or isinstance(value, np.generic | int | float):
            continue
        if isinstance(value, np.ndarray):
            address, *rest = map_source(value)
            if (place := places.find(address)) is not None:
                maps.append((index, place, tuple(rest)))
        elif (place := places.find(int(value.data.ptr))) is not None:
            pointers.append((index, place))
    return KernelLaunch(name, launch, pointers, maps)


def _argument(array: Any, places: _Places) -> tuple[int, Place | None]:
    address = int(array.data.ptr)
    return address, places.find(address)


def active_builder() -> PlanBuilder | None:
    """Return the builder that records this thread's launches, or None."""
    builder: PlanBuilder | None = getattr(_local, "builder", None)
    return builder


@contextlib.contextmanager
def making_plan(is_dry: bool = False) -> Iterator[PlanBuilder]:
    """Record every launch that this thread makes in the `with` block. See `PlanBuilder`."""
    previous = active_builder()
    builder = PlanBuilder(is_dry)
    _local.builder = builder
    try:
        yield builder
    finally:
        _local.builder = previous


def plan_call(function: Callable[..., Any], *arrays: Any) -> None:
    """Call ``function(*addresses)`` now, and again each time the plan is run.

    For work that is not one of the engine's kernels: a collective, a copy on another stream.

    Parameters
    ----------
    function : callable
        Takes the address of each array; launches on the current stream or on one of its own.
    *arrays : CuPy array or PlanArray
    """
    builder = active_builder()
    if builder is None or not builder.is_dry:
        function(*(int(array.data.ptr) for array in arrays))
    if builder is not None:
        builder.add_call(function, tuple(unwrapped(array) for array in arrays))
