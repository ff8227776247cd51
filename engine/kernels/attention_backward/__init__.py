"""attention_backward: gradients of attention. `attention_backward.py` is the op."""

from engine.kernels.attention_backward.attention_backward import (
    attention_backward,
    choose_tile,
    specs,
)

__all__ = ["attention_backward", "choose_tile", "specs"]
