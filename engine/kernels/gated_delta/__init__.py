"""Gated delta rule: recurrence for a few tokens, chunks of 64 for many."""

from engine.kernels.gated_delta.gated_delta import gated_delta, specs

__all__ = ["gated_delta", "specs"]
