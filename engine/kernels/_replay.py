"""Launches that are kept, and made again with other arrays in the place of some.

The layers of a model launch the same kernels with the same numbers: what differs are addresses. To
work out a launch takes Python 30 to 100 us, to make it again 3. So one layer is launched through
the ops while a recording listens, and the others repeat it with their own weights and pages.

    with record() as recording:
        layer(...)
    recording.bind([(array.data.ptr, array.nbytes) for array in arrays_of_the_layer])
    recording.replay([array.data.ptr for array in arrays_of_another_layer])
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.kernels._prepared_launch import PreparedLaunch
from engine.kernels._tensor_map import map_source, tensor_map_of

__all__ = ["Recording", "active_recording", "record"]

_local = threading.local()


def active_recording() -> Recording | None:
    """Return the recording that listens to this thread's launches, if one does."""
    recording: Recording | None = getattr(_local, "recording", None)
    return recording


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Keep every launch that this thread makes inside, as it makes it."""
    previous, recording = active_recording(), Recording()
    _local.recording = recording
    try:
        yield recording
    finally:
        _local.recording = previous


class Recording:
    """Launches in their order.

    SAFETY: it holds the arrays they were given, so that no memory they use is given to anybody else
    as long as it lives; and it is bound to the stream on which it was made.
    """

    __slots__ = ("_kept", "_launches", "_steps")

    def __init__(self) -> None:
        self._launches: list[PreparedLaunch] = []
        self._kept: list[tuple[Any, ...]] = []
        self._steps: list[tuple[PreparedLaunch, list[Any], list[Any]]] = []

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, launch: PreparedLaunch, values: tuple[Any, ...]) -> None:
        """Keep a launch that was just made with these arguments."""
        self._launches.append(launch)
        self._kept.append(values)

    def bind(self, arrays: Sequence[tuple[int, int]]) -> bool:
        """Say which arrays, by address and bytes, are others in a replay.

        Returns
        -------
        bool
            False: what was recorded cannot be replayed, since an address could be taken for two of
            them, or lies inside one.
        """
        places = {pointer: index for index, (pointer, _) in enumerate(arrays)}
        spans = sorted(arrays)
        starts = [pointer for pointer, _ in spans]
        if len(places) < len(arrays):
            return False

        def is_inside(pointer: int) -> bool:
            start, size = spans[bisect_right(starts, pointer) - 1]
            return start < pointer < start + size

        for launch, values in zip(self._launches, self._kept, strict=True):
            pointers, maps = [], []
            for index, value in enumerate(values):
                is_map = isinstance(value, np.ndarray)
                if isinstance(value, np.generic):
                    continue
                pointer, *rest = map_source(value) if is_map else (int(value.data.ptr),)
                if pointer in places and is_map:
                    maps.append((index, places[pointer], rest))
                elif pointer in places:
                    pointers.append((launch.hosts[index], places[pointer]))
                elif is_inside(pointer):
                    return False
            self._steps.append((launch, pointers, maps))
        return True

    def replay(self, pointers: Sequence[int]) -> None:
        """Make the launches again with these addresses in the place of those of `bind`."""
        for launch, places, maps in self._steps:
            for host, place in places:
                host[()] = pointers[place]
            for index, place, rest in maps:
                launch.set_value(index, tensor_map_of(pointers[place], *rest))
            launch.launch()
