"""The engine's layers in the layout of the kernels library; loaded by path, not imported."""

from . import layers

__all__ = ["layers"]
