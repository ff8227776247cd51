"""Decode graphs of ranks 1, 2, ...: they end with the logits, since rank 0 samples.

In a pipeline stage they begin and end with its activations, as rank 0's do; rank 0 broadcasts those
that the previous stage has sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.runner.cuda_graph import GraphKey
from engine.runner.features import FeatureTap
from engine.runner.request_rows import RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.stage_graphs import StageGraphs

__all__ = ["WorkerGraphs"]


class WorkerGraphs(StageGraphs):
    """Replays the same decode graphs as rank 0, from copies of its staging buffers.

    Parameters
    ----------
    model : Model
    kv_pages : sequence of tuple of array
        `KVCache.layers`.
    num_rows, max_blocks, block_size, max_model_len : int
        Same values as on rank 0.
    query_lens : sequence of int
    feature_layers : sequence of int
        Layers whose inputs rank 0 keeps: every rank takes part in their all-reduce.
    has_states : bool
        Whether the model has recurrent layers.
    """

    def __init__(
        self,
        model: Any,
        kv_pages: Sequence[tuple[Any, ...]],
        num_rows: int,
        max_blocks: int,
        block_size: int,
        max_model_len: int,
        query_lens: Sequence[int],
        feature_layers: Sequence[int],
        *,
        has_states: bool = False,
    ) -> None:
        super().__init__(
            model,
            kv_pages,
            RequestRows(
                num_rows,
                max_blocks,
                block_size,
                model.device,
                has_states=has_states,
                has_adapters=model.num_adapter_slots > 0,
            ),
            SamplingTable(1, model.config.vocab_size, (), model.device),
            block_size=block_size,
            max_model_len=max_model_len,
            query_lens=query_lens,
            new_features=FeatureTap(model, feature_layers).new_for_graphs,
        )

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
