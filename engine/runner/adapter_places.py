"""Places the LoRA adapters of running requests in the model's slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.errors import EngineError
from engine.layers.lora import NO_ADAPTER
from engine.loading.lora import LoraAdapter

__all__ = ["AdapterPlaces"]


class AdapterPlaces:
    """Which adapter each slot holds; an adapter stays in its slot until another one needs it.

    The scheduler runs requests of at most `num_slots` adapters at a time, so a slot whose adapter
    no running request has is always found.

    Parameters
    ----------
    model : RunnableModel
    num_slots : int

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> written = []
    >>> def write_adapter(adapter, slot):
    ...     written.append(slot)
    ...     model.num_adapter_writes += 1
    >>> model = SimpleNamespace(write_adapter=write_adapter, num_adapter_writes=0)
    >>> places = AdapterPlaces(model, 2)
    >>> first, second, third = (SimpleNamespace(serial=number) for number in (1, 2, 3))
    >>> [places.place(one, ()) for one in (first, second, first)], places.place(third, {1})
    ([0, 1, 0], 1)
    >>> written
    [0, 1, 1]
    """

    def __init__(self, model: Any, num_slots: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._num_writes = model.num_adapter_writes
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}  # adapter's serial -> slot; the least recently used first

    def restore(self, running: Callable[[], Mapping[int, LoraAdapter]]) -> None:
        """Write the adapters that running requests have again, if others were written since.

        Another engine with the same model may have done so. `running` returns slot -> adapter.
        """
        if self._model.num_adapter_writes == self._num_writes:
            return
        kept = running()
        self._slots = {adapter.serial: slot for slot, adapter in kept.items()}
        self._free = [slot for slot in range(self._num_slots - 1, -1, -1) if slot not in kept]
        for slot, adapter in kept.items():
            self._model.write_adapter(adapter, slot)
        self._num_writes = self._model.num_adapter_writes  # last: a failed step comes back

    def place(self, adapter: LoraAdapter | None, running: Collection[int]) -> int:
        """Return the slot of an adapter, after copying it there if it is in none.

        Parameters
        ----------
        adapter : LoraAdapter or None
        running : collection of int
            Serials of the adapters that running requests have, whose slots stay theirs.

        Raises
        ------
        EngineError
            If every slot is in use.
        """
        if adapter is None:
            return NO_ADAPTER
        slot = self._slots.pop(adapter.serial, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict(running)
            try:
                # SAFETY: steps in flight that use the slot's old adapter precede on the stream.
                self._model.write_adapter(adapter, slot)
                self._num_writes = self._model.num_adapter_writes
            except BaseException:
                self._free.append(slot)
                raise
        self._slots[adapter.serial] = slot
        return slot

    def _evict(self, running: Collection[int]) -> int:
        for serial, slot in self._slots.items():
            if serial not in running:
                del self._slots[serial]
                return slot
        raise EngineError(f"each of {len(self._slots)} adapter slots is in use by a request")
