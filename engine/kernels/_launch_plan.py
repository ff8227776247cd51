"""Launch plans: what a layer launches, as a value that is made once and run for every layer alike.

The layers of one kind launch the same kernels with the same numbers; what differs is where their
arrays lie. To work out a launch takes Python 30 to 100 us, to make it again 3. So one layer is
called while a plan is made of its launches, and the plan is run for the others:

    with making_plan() as builder:
        layer(...)
    plan = builder.finish([("qkv.weight", array.data.ptr, array.nbytes), ...])
    plan.run([array.data.ptr for array in arrays_of_another_layer])

An entry is a kernel's launch or a call of a function on addresses: what is no kernel of the
engine's (a collective, a copy on another stream) goes through `plan_call`.
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
"""Which of a plan's arrays, and how many bytes into it."""

_local = threading.local()


class KernelLaunch:
    """A kernel's launch, some of whose arguments are addresses inside a layer's arrays.

    Parameters
    ----------
    name : str
        The kernel's entry point.
    launch : PreparedLaunch
    pointers : sequence of (argument's index, Place)
    maps : sequence of (argument's index, Place, tuple)
        Tensor maps, and what they are made of beside the address.
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
        self._hosts = [(launch.hosts[index], *place) for index, place in pointers]
        self._maps = list(maps)

    def run(self, addresses: Sequence[int]) -> None:
        """Launch with these addresses of the plan's arrays."""
        for host, place, offset in self._hosts:
            host[()] = addresses[place] + offset
        for index, (place, offset), rest in self._maps:
            self.launch.set_value(index, tensor_map_of(addresses[place] + offset, *rest))
        self.launch.launch()


class HostCall:
    """A call of a function on addresses.

    Parameters
    ----------
    name : str
    function : callable
        Called with one address for each argument.
    arguments : sequence of (int, Place or None)
        The address, and where it lies in the plan's arrays; None: it is the same for every layer.
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
        """Call with these addresses of the plan's arrays."""
        self._function(
            *(
                a if place is None else addresses[place[0]] + place[1]
                for a, place in self._arguments
            )
        )


class LaunchPlan:
    """What one kind of layer launches, in its order.

    SAFETY: it holds the arrays that are the same for every layer, so that their memory is nobody
    else's as long as it lives; and it is bound to the stream on which it was made.

    Attributes
    ----------
    arrays : tuple of str
        The names of the arrays whose addresses `run` takes, in this order.
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
        """One line an entry: its name, and which of its arguments are which arrays."""
        lines = []
        for entry in self.entries:
            where = [
                f"{index}={self.arrays[place]}{f'+{offset}' if offset else ''}"
                for index, (place, offset) in sorted(entry.places.items())
            ]
            lines.append(f"{entry.name}({', '.join(where)})")
        return "\n".join(lines)

    def run(self, addresses: Sequence[int]) -> None:
        """Make the launches with these addresses in the place of those of `arrays`."""
        for run in self._runs:
            run(addresses)


class PlanBuilder:
    """Collects what is launched while a plan is made."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add_launch(self, name: str, launch: PreparedLaunch, values: tuple[Any, ...]) -> None:
        """Take a launch that was just made with these arguments."""
        self._steps.append((name, launch, values))

    def add_call(self, function: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
        """Take a call that was just made on these arrays."""
        self._steps.append((getattr(function, "__name__", str(function)), function, arrays))

    def finish(self, arrays: Sequence[tuple[str, int, int]]) -> LaunchPlan:
        """Return the plan.

        Parameters
        ----------
        arrays : sequence of (name, address, bytes)
            What differs from layer to layer. Any other array stays what it was.

        Raises
        ------
        LaunchPlanError
            If two of them share memory: an address would not tell which one is meant.
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
    """Finds the array in which an address lies."""

    def __init__(self, arrays: Sequence[tuple[str, int, int]]) -> None:
        spans = sorted((start, size, index) for index, (_, start, size) in enumerate(arrays))
        for (start, size, index), (following, _, other) in itertools.pairwise(spans):
            if start + size > following:
                names = arrays[index][0], arrays[other][0]
                raise LaunchPlanError(
                    f"a layer's arrays must not share memory; {names[0]!r} and {names[1]!r} do"
                )
        self._spans = spans
        self._starts = [start for start, _, _ in spans]

    def find(self, address: int) -> Place | None:
        """Return the place of an address, or None if it is in no array."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, index = self._spans[at]
        return (index, address - start) if address < start + size else None


def _kernel_launch(
    name: str, launch: PreparedLaunch, values: tuple[Any, ...], places: _Places
) -> KernelLaunch:
    pointers, maps = [], []
    for index, value in enumerate(values):
        if isinstance(value, np.generic):
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
    """Return what takes this thread's launches into a plan, if one is being made."""
    builder: PlanBuilder | None = getattr(_local, "builder", None)
    return builder


@contextlib.contextmanager
def making_plan() -> Iterator[PlanBuilder]:
    """Take every launch that this thread makes inside, as it makes it."""
    previous, builder = active_builder(), PlanBuilder()
    _local.builder = builder
    try:
        yield builder
    finally:
        _local.builder = previous


def plan_call(function: Callable[..., Any], *arrays: Any) -> None:
    """Call ``function(*addresses)`` now, and again for each layer for which the plan is run.

    The door for what is no kernel of the engine's: a collective, a copy on another stream.

    Parameters
    ----------
    function : callable
        Takes the address of each array, and launches on the current stream or on one of its own.
    *arrays : CuPy array or PlanArray
    """
    function(*(int(array.data.ptr) for array in arrays))
    builder = active_builder()
    if builder is not None:
        builder.add_call(function, tuple(unwrapped(array) for array in arrays))
