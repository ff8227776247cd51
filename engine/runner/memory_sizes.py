"""Upper bounds for a model's memory in bytes, from its configuration and step limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.cache.block_plan import MemoryBudget
from engine.cache.memory_pool import format_bytes
from engine.config import ModelConfig
from engine.dtypes import itemsize
from engine.layers.mla import MAX_EXPANDED
from engine.layers.moe import SUMMED_NEXT
from engine.runner.cuda_graph import batch_sizes

__all__ = ["DraftSizes", "activation_bytes", "feature_bytes"]


@dataclass(frozen=True)
class DraftSizes:
    """Memory of a draft model or draft head.

    Attributes
    ----------
    config : ModelConfig
    dtype : str
    weight_bytes, bytes_per_block : int
    num_spare_blocks : int
        Extra blocks for drafts, beyond their requests' own blocks.
    feature_bytes : int
        Size of the target features the head reads (`feature_bytes`).
    """

    config: ModelConfig
    dtype: str
    weight_bytes: int
    bytes_per_block: int
    num_spare_blocks: int
    feature_bytes: int = 0

    def __str__(self) -> str:
        spare = self.num_spare_blocks * self.bytes_per_block
        features = f", {format_bytes(self.feature_bytes)} for the model's features"
        return (
            f"weights {format_bytes(self.weight_bytes)}, {format_bytes(self.bytes_per_block)} for "
            f"each block, {format_bytes(spare)} for drafts beyond their requests' blocks"
            + (features if self.feature_bytes else "")
        )

    def added_to(
        self, memory: MemoryBudget, num_tokens: int, num_seqs: int, has_graphs: bool
    ) -> MemoryBudget:
        """Return the target's budget `memory` with this draft added; the two never run at once.

        `num_tokens`, `num_seqs`: limits of a step.
        """
        rows = 2 * batch_sizes(num_seqs)[-1]
        graphs = activation_bytes(self.config, self.dtype, rows, rows) if has_graphs else 0
        activations = activation_bytes(self.config, self.dtype, num_tokens, num_seqs)
        spare = self.num_spare_blocks * self.bytes_per_block
        return replace(
            memory,
            others=max(0, memory.others - self.weight_bytes),
            activations=max(memory.activations, activations),
            drafts=self.weight_bytes + spare + self.feature_bytes + graphs,
        )


def activation_bytes(model: ModelConfig, dtype: str, num_tokens: int, num_rows: int) -> int:
    """Estimate the peak activation bytes of one step.

    The largest live set is the residual stream, all intermediates of one layer (layers of a kind
    share the first one's memory, see `models/layer_plans.py`), and the logits with the sampler's
    copy of them.
    """
    mlp = 3 * model.intermediate_size if model.has_mlp else 0  # gate, up, and their product
    if model.moe is not None:  # gate · up and the output of each of a token's experts
        pairs = model.moe.top_k * (model.moe.intermediate_size + model.hidden_size)
        scaled = model.hidden_size if model.moe.scales_input else 0
        mlp = max(mlp, pairs + scaled + 3 * model.moe.shared_size)
    attention = 2 * model.qkv_dim
    if (delta := model.gated_delta) is not None:  # projected, convolved, and the heads' outputs
        gates = delta.value_dim + delta.decay_dim if delta.gate_rank else 0
        attention = max(attention, delta.in_dim + gates + delta.conv_dim + delta.value_dim)
    if (lightning := model.lightning) is not None:  # projected, and the heads' outputs, gated
        attention = max(attention, 6 * lightning.inner_dim)
    if (conv := model.short_conv) is not None:  # projected, and the outputs of its convolutions
        attention = max(attention, (3 + len(conv.convolutions)) * conv.num_channels)
    if (mamba := model.mamba2) is not None:
        recurrent = 2 * (mamba.conv_dim + mamba.inner_dim)
        is_joint = "attention_mamba2" in model.layer_kinds
        attention = attention + recurrent if is_joint else max(attention, recurrent)
    expanded = 0
    if (mla := model.mla) is not None:  # absorbed queries and results; expanded keys and values
        attention = max(attention, 2 * model.num_heads * (mla.kv_rank + model.head_dim))
        keys = model.max_position_embeddings * model.num_heads * model.head_dim
        expanded = 3 * min(MAX_EXPANDED, keys) * itemsize(dtype)
    rows = 4 * model.hidden_size
    if (per_layer := model.per_layer_input) is not None:  # of all layers, and their context
        rows += 2 * model.num_layers * per_layer.size
    if model.altup is not None:  # the streams, and their predictions
        rows += 2 * model.altup.num_streams * model.hidden_size
    if "shortcut" in model.layer_kinds:  # the experts' output, while the second half runs
        rows += model.hidden_size
    passed = 0
    if model.moe is not None:  # outputs that the next layer sums, a shared expert's among them
        num_outputs = model.moe.top_k + (model.moe.shared_size > 0)
        passed = min(num_tokens, SUMMED_NEXT[-1]) * num_outputs * model.hidden_size
    per_token = (rows + mlp + attention) * itemsize(dtype)
    per_row = 4 * 4 * model.vocab_size
    others = expanded + passed * itemsize(dtype)
    return math.ceil(1.1 * (num_tokens * per_token + num_rows * per_row + others))


def feature_bytes(
    model: ModelConfig,
    dtype: str,
    num_layers: int,
    num_tokens: int,
    num_graph_tokens: int,
    num_steps: int = 2,
) -> int:
    """Return the bytes of the features of `num_layers` layers (`FeatureTap`).

    In a single process a step's features live until the next step has computed its own; all graphs
    share one set.

    Parameters
    ----------
    model : ModelConfig
    dtype : str
    num_layers : int
    num_tokens, num_graph_tokens : int
        Maximum tokens per step, outside graphs and in a graph.
    num_steps : int
        Steps whose features live at a time.

    Examples
    --------
    >>> feature_bytes(ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128), "float16", 3, 100, 10)
    40320
    """
    rows = num_steps * num_tokens + num_graph_tokens
    return num_layers * rows * model.hidden_size * itemsize(dtype)
