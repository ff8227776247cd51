"""Decode attention, the newest tokens against KV pages: configurations and launches."""

from engine.kernels.attention_decode.attention_decode import (
    attention_decode,
    choose_num_splits,
    choose_tile,
    specs,
)

__all__ = ["attention_decode", "choose_num_splits", "choose_tile", "specs"]
