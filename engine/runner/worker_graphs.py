"""Decode graphs of ranks 1, 2, ...: they end with the logits, since rank 0 samples.

In a pipeline stage they begin and end with its activations, as rank 0's do; rank 0 broadcasts those
that the previous stage has sent.
"""

from __future__ import annotations

from typing import Any

from engine.runner.cuda_graph import GraphKey
from engine.runner.stage_graphs import StageGraphs

__all__ = ["WorkerGraphs"]


class WorkerGraphs(StageGraphs):
    """Replays the same decode graphs as rank 0, from copies of its staging buffers."""

    def compute(self, key: GraphKey) -> None:
        """Launch the kernels of a step up to the logits, or to a stage's activations."""
        self._forward(key)

    def replay_staged(self, key: GraphKey, staged: Any) -> None:
        """Replay a step from rank 0's staging buffer; an empty one repeats the previous step."""
        if not staged.size:
            self.replay(key)
            return
        buffer = self._inputs.load(staged)
        self.replay(key)
        self._inputs.release(buffer)
