"""State slots of recurrent ops: the arguments that say where states are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels._attention import checked_starts
from engine.kernels._contract import INT32, Contract
from engine.kernels._elementwise import element_strides

__all__ = ["STATE_PARAMS", "StateSlots"]

STATE_PARAMS = (
    "states:ptr slot_stride:i64 num_slots:i32 num_tokens:i32 cu_seqlens_q:ptr context_lens:ptr "
    "state_slots:ptr state_targets:ptr num_targets:i32 num_sequences:i32 snapshot_slots:ptr "
    "snapshot_offsets:ptr"
)
"""First parameters of a recurrent kernel, StateSlotParams in CUDA: `StateSlots.args`."""


@dataclass(frozen=True)
class StateSlots:
    """Checked arguments of one call: states (num_slots, ...) and the slots of each sequence."""

    num_tokens: int
    states: Any
    cu_seqlens_q: Any
    context_lens: Any
    state_slots: Any
    state_targets: Any
    snapshot_slots: Any
    snapshot_offsets: Any

    @classmethod
    def checked(
        cls, call: Contract, states: Any, shape: str, dtype: Any, num_tokens: int, **slots: Any
    ) -> StateSlots:
        """Check the arrays and, on the CPU, their values; `shape` is that of one state."""
        states = call.written("states", states, f"num_slots {shape}", dtype, layout="any")
        ok = states.shape[0] == 0 or states[0].flags.c_contiguous
        call.check("states", ok, "contiguous within a slot", states.strides)
        starts = checked_starts(call, "cu_seqlens_q", slots["cu_seqlens_q"], num_tokens)
        call.bind("B", starts.size - 1, "cu_seqlens_q")
        context_lens = call.array("context_lens", slots["context_lens"], "B", INT32)
        read = call.array("state_slots", slots["state_slots"], "B", INT32)
        found = cls(
            num_tokens,
            states,
            starts,
            context_lens,
            read,
            _checked_targets(call, slots["state_targets"], read),
            _optional(call, "snapshot_slots", slots["snapshot_slots"]),
            _optional(call, "snapshot_offsets", slots["snapshot_offsets"]),
        )
        is_paired = (found.snapshot_slots is None) == (found.snapshot_offsets is None)
        call.check("snapshot_offsets", is_paired, "given with snapshot_slots", "one of the two")
        if call.on_cpu:
            found._check_values(call)
        return found

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments by name, as the mirror expects them."""
        return {name: array for name, array in vars(self).items() if name != "num_tokens"}

    @property
    def args(self) -> dict[str, Any]:
        """The kernel's arguments: `STATE_PARAMS`."""
        return {
            **vars(self),
            "slot_stride": element_strides(self.states)[0],
            "num_slots": self.states.shape[0],
            "num_targets": 0 if self.state_targets.ndim == 1 else self.state_targets.shape[1],
            "num_sequences": self.state_slots.shape[0],
        }

    def _check_values(self, call: Contract) -> None:
        """Check the lengths and the slots (on a GPU this would synchronise)."""
        lens = np.diff(self.cu_seqlens_q)
        is_long = bool(np.all(self.context_lens >= lens))
        call.check("context_lens", is_long, f"at least {lens.tolist()}", self.context_lens.tolist())
        num_slots = self.states.shape[0]
        is_read = self.context_lens > lens
        _check_slots(call, "state_slots", self.state_slots[is_read], 0, num_slots)
        _check_slots(call, "state_targets", self.state_targets, -1, num_slots)
        if self.snapshot_slots is not None:
            _check_slots(call, "snapshot_slots", self.snapshot_slots, -1, num_slots)


def _checked_targets(call: Contract, targets: Any, read: Any) -> Any:
    if targets is None:
        return read
    shape = "B" if getattr(targets, "ndim", 1) == 1 else "B Q"
    targets = call.array("state_targets", targets, shape, INT32)
    has_last = targets.ndim == 1 or targets.shape[1] > 0
    call.check("state_targets", has_last, "a slot of the last state at least", targets.shape)
    return targets


def _optional(call: Contract, name: str, value: Any) -> Any:
    return None if value is None else call.array(name, value, "B", INT32)


def _check_slots(call: Contract, name: str, slots: Any, low: int, num_slots: int) -> None:
    ok = slots.size == 0 or (slots.min() >= low and slots.max() < num_slots)
    call.check(name, bool(ok), f"slots from {low} to {num_slots - 1}", slots.tolist())
