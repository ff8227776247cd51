"""Gradients of attention (flash attention, backward pass): configurations and launches."""

from engine.kernels.attention_backward.attention_backward import (
    attention_backward,
    choose_tile,
    specs,
)

__all__ = ["attention_backward", "choose_tile", "specs"]
