"""Mamba-2's selective state space: recurrence for a few tokens, chunks of 64 for many."""

from engine.kernels.mamba2.mamba2 import mamba2, specs

__all__ = ["mamba2", "specs"]
