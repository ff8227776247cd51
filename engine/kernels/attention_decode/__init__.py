"""attention_decode: the newest tokens against pages. `attention_decode.py` is the op."""

from engine.kernels.attention_decode.attention_decode import (
    attention_decode,
    choose_num_splits,
    choose_tile,
    specs,
)

__all__ = ["attention_decode", "choose_num_splits", "choose_tile", "specs"]
