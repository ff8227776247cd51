"""Chunked attention (Llama 4): a query sees only the keys of its own chunk of positions.

The prefill kernel reads it as a pattern of blocks on the diagonal, the decode kernel as a number.
"""

from __future__ import annotations

import numpy as np

from engine.config import ModelConfig
from engine.kernels import BlockSparse
from engine.weights import Stage

__all__ = ["active_chunk", "chunk_patterns"]


def active_chunk(config: ModelConfig, layer: int, max_model_len: int) -> int:
    """Return the chunk of a layer; 0 if there is none that a sequence of `max_model_len` leaves."""
    chunk = config.chunk(layer)
    return chunk if chunk < max_model_len else 0


def chunk_patterns(config: ModelConfig, stage: Stage, max_model_len: int) -> dict[int, BlockSparse]:
    """Return the pattern of each layer with chunks, by its number in the whole model."""
    made: dict[int, BlockSparse] = {}  # chunk -> the pattern that its layers share
    found: dict[int, BlockSparse] = {}
    for layer in range(config.num_layers):
        if chunk := active_chunk(config, layer, max_model_len):
            if chunk not in made:
                diagonal = np.eye(-(-max_model_len // chunk), dtype=bool)
                made[chunk] = BlockSparse(diagonal, chunk, chunk)
            found[stage.first + layer] = made[chunk]
    return found
