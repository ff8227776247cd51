"""Links between the stages of one host, whose GPUs write into each other's memory.

Each stage copies its activations to the next stage's device, and the last stage the ids that it
samples to the first one's. The receiving streams wait for them, so every stage launches a step as
soon as it is announced, and a step may follow one whose ids no host knows yet.

A step's activations are in slot ``step % num_slots``. There is one slot more than stages, and at
most as many steps are in flight: when a step is announced, the one that used its slot before has
been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.device import Device
from engine.distributed.inbox import Inbox, Outbox
from engine.dtypes import np_dtype
from engine.errors import ContractError, DeviceError

__all__ = ["NO_LAST_IDS", "LastIds", "Links", "SlotShape"]
__all__ += ["join_links", "num_fused_tokens", "open_links"]

_ALIGNMENT = 256  # bytes; alignment of each array in a slot


class LastIds(NamedTuple):
    """Tokens of a step whose ids only the devices hold.

    Attributes
    ----------
    posted : int
        Count to wait for; see `Links.wait_for_ids`.
    tokens, rows : (n,) int64
        Indices of the tokens, and the rows of `last_ids` that hold their ids.
    """

    posted: int
    tokens: Any
    rows: Any


NO_LAST_IDS = LastIds(0, np.zeros(0, np.int64), np.zeros(0, np.int64))


class SlotShape(NamedTuple):
    """Room for the activations of the steps in flight.

    Attributes
    ----------
    num_slots : int
    num_arrays : int
        Arrays a step: the delta, the residual stream and the features.
    max_tokens, hidden_size : int
        Largest shape of an array.
    dtype : str
    """

    num_slots: int
    num_arrays: int
    max_tokens: int
    hidden_size: int
    dtype: str

    @classmethod
    def of(
        cls, num_stages: int, num_features: int, max_tokens: int, hidden_size: int, dtype: str
    ) -> SlotShape:
        """Return the room for steps of `max_tokens` tokens.

        Examples
        --------
        >>> SlotShape.of(2, 0, 8192, 4096, "bfloat16").num_bytes >> 20
        384
        """
        return cls(num_stages + 1, 2 + num_features, max_tokens, hidden_size, dtype)

    @property
    def array_bytes(self) -> int:
        """Bytes from one array of a slot to the next."""
        size = self.max_tokens * self.hidden_size * np_dtype(self.dtype).itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.num_arrays * self.array_bytes

    def offset(self, step: int, index: int) -> int:
        """Return the offset of array `index` of a step."""
        return (step % self.num_slots * self.num_arrays + index) * self.array_bytes


class Links:
    """One stage's links with the others.

    Parameters
    ----------
    device : Device
    shape : SlotShape
    has_previous : bool
        Whether a stage sends its activations to this one.
    num_ids : int
        Length of `RequestRows.last_ids`, which the first stage receives; 0 in the others.

    Attributes
    ----------
    handles : tuple of bytes
        Of the memory for activations and for ids, for the senders; b"" for none.
    last_ids : (num_ids,) int32 array on the device, or None
        The ids received.

    Raises
    ------
    DeviceError
        If the device's memory cannot be shared.
    """

    def __init__(
        self, device: Device, shape: SlotShape, *, has_previous: bool, num_ids: int = 0
    ) -> None:
        self._device = device
        self._shape = shape
        self._entering = Inbox(device, shape.num_bytes) if has_previous else None
        self._ids = Inbox(device, 4 * num_ids) if num_ids else None
        self._next: Outbox | None = None
        self._first: Outbox | None = None
        self._num_posted = 0
        self._num_plain = 0  # up to so many tokens, the previous stage sends no delta
        self.last_ids = None if self._ids is None else self._ids.memory.view(np.int32)
        self.handles = tuple(b"" if i is None else i.handle for i in (self._entering, self._ids))

    def connect(self, following: bytes, ids: bytes, num_plain: int) -> None:
        """Map the memory of the other stages.

        Parameters
        ----------
        following : bytes
            Handle of the next stage's memory for activations; b"" in the last stage.
        ids : bytes
            Handle of the first stage's memory for ids; b"" in all but the last stage.
        num_plain : int
            Steps of up to so many tokens enter this stage without a delta; see `num_fused_tokens`.

        Raises
        ------
        DeviceError
            If the device cannot map them.
        """
        self._num_plain = num_plain
        if following:
            self._next = Outbox(self._device, following)
        if ids:
            self._first = Outbox(self._device, ids)

    def send(self, step: int, activations: Sequence[Any]) -> None:
        """Send the delta or None, the residual stream and the features of a step, each (T, N).

        Later work on the current stream may overwrite them.

        Raises
        ------
        ContractError
            If they do not fit a slot.
        """
        assert self._next is not None
        for index, array in enumerate(activations):
            if array is not None:
                if array.shape[0] > self._shape.max_tokens:
                    raise ContractError(
                        f"activations must have at most {self._shape.max_tokens} tokens, which "
                        f"the links hold; got {array.shape[0]}"
                    )
                self._next.write(self._shape.offset(step, index), array)
        self._next.post(step)

    def receive(self, step: int, num_tokens: int, num_padded: int) -> list[Any]:
        """Let later work on the current stream wait for a step's activations; return them.

        Parameters
        ----------
        step, num_tokens : int
        num_padded : int
            Tokens that the previous stage computed.

        Returns
        -------
        list of array
            The delta or None, the residual stream and room for the features: (num_tokens, N) each,
            valid until the step has been read.
        """
        assert self._entering is not None
        self._entering.wait(step)
        shape = self._shape
        width = shape.hidden_size
        dtype = np_dtype(shape.dtype)
        size = num_tokens * width * dtype.itemsize
        starts = [shape.offset(step, index) for index in range(shape.num_arrays)]
        memory = self._entering.memory
        found = [memory[at : at + size].view(dtype).reshape(num_tokens, width) for at in starts]
        if num_padded <= self._num_plain:
            found[0] = None
        return found

    def post_ids(self, last_ids: Any) -> int:
        """Send `last_ids` to the first stage; return the count to wait for (`wait_for_ids`).

        The first stage may be reading ids meanwhile: these do not change, it has the same already.
        """
        assert self._first is not None
        self._num_posted += 1
        self._first.write(0, last_ids)
        self._first.post(self._num_posted)
        return self._num_posted

    def wait_for_ids(self, count: int) -> None:
        """Let later work on the first stage's stream wait for ids; 0: for none."""
        if self._ids is not None and count:
            self._ids.wait(count)

    def abort(self) -> None:
        """End the waits of all streams; callable from any thread."""
        for inbox in (self._entering, self._ids):
            if inbox is not None:
                inbox.abort()

    def disconnect(self) -> None:
        """Unmap the memory of the other stages."""
        for outbox in (self._next, self._first):
            if outbox is not None:
                outbox.close()

    def close(self) -> None:
        """Free the memory; no stage may have it mapped any more, or have a process."""
        self.disconnect()
        for inbox in (self._entering, self._ids):
            if inbox is not None:
                inbox.close()


def open_links(
    device: Device, shape: SlotShape, *, has_previous: bool, num_ids: int = 0
) -> tuple[Links | None, str]:
    """Return a stage's links and "", or None and the reason why it can have none."""
    try:
        return Links(device, shape, has_previous=has_previous, num_ids=num_ids), ""
    except DeviceError as error:
        return None, str(error)


def join_links(links: Links, following: bytes, ids: bytes, num_plain: int) -> str:
    """Call `Links.connect`; return the reason why it failed, or ""."""
    try:
        links.connect(following, ids, num_plain)
    except DeviceError as error:
        return str(error)
    return ""


def num_fused_tokens(layers: Iterable[Any], most: int) -> int:
    """Return the number of tokens, at most `most`, up to which the layers leave no delta.

    That is so if none enters them.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> layer = SimpleNamespace(is_fused=lambda num_tokens: num_tokens <= 2)
    >>> num_fused_tokens([layer], 8), num_fused_tokens([layer], 1), num_fused_tokens([object()], 8)
    (2, 1, 0)
    """
    tests = [getattr(layer, "is_fused", None) for layer in layers]
    count = 0
    while count < most and all([test is not None and test(count + 1) for test in tests]):
        count += 1
    return count
