"""A checked call of attention_backward, as both tiers launch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.kernels._attention import ScoreRule
from engine.kernels._attention_pattern import Pattern
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import counters

__all__ = ["BackwardProblem"]

_SINKS = Kernel(
    "attention_backward_sinks",
    "sinks:ptr lse:ptr delta:ptr partial:ptr dsinks:ptr counter:ptr total_q:i32 num_heads:i32",
    struct="AttentionBackwardSinksParams",
)
_SINK_TOKENS = 256  # tokens per block
_SINK_HEADS = 32  # heads per block, one per lane


@dataclass(frozen=True)
class BackwardProblem:
    """Arguments of attention_backward: checked arrays on one device, and bounds of the lengths.

    Attributes
    ----------
    inputs : dict
        dout, q, k, v, out and lse.
    starts : dict
        cu_seqlens_q and cu_seqlens_k.
    grads : dict
        dq, dk and dv.
    sinks, dsinks, dlse : arrays or None
    max_q, max_k : int
        Upper bounds of the sequence lengths, at most the number of tokens.
    """

    inputs: dict[str, Any]
    starts: dict[str, Any]
    grads: dict[str, Any]
    causal: bool
    rule: ScoreRule
    pattern: Pattern | None
    sinks: Any
    dsinks: Any
    dlse: Any
    max_q: int
    max_k: int
    deterministic: bool

    @property
    def num_statistics(self) -> int:
        """Number of pairs (query token, head)."""
        total_q, num_heads, _ = self.inputs["q"].shape
        return int(total_q * num_heads)

    @property
    def sink_floats(self) -> int:
        """Floats of scratch for `launch_sinks`; 0 without sinks."""
        return 0 if self.sinks is None else self._sink_blocks * self.inputs["q"].shape[1]

    @property
    def _sink_blocks(self) -> int:
        return max(1, ceil_div(self.inputs["q"].shape[0], _SINK_TOKENS))

    def launch_sinks(self, spec: ModuleSpec, delta: Any, partial: Any) -> None:
        """Compute dsinks from delta (Tq, H) in the scratch `partial`; without sinks, nothing."""
        if self.sinks is None:
            return
        total_q, num_heads, _ = self.inputs["q"].shape
        groups = ceil_div(num_heads, _SINK_HEADS)
        _SINKS.launch(
            spec,
            (self._sink_blocks, groups),
            (256,),
            sinks=self.sinks,
            lse=self.inputs["lse"],
            delta=delta,
            partial=partial,
            dsinks=self.dsinks,
            counter=counters(groups),
            total_q=total_q,
            num_heads=num_heads,
        )
