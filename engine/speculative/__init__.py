"""Speculative decoding: proposers of draft tokens, and the control of how many are verified.

The engine owns a `Speculation`, which `make_speculation` builds from a `SpeculativeConfig`. The
output tokens are the same as without it.
"""

from engine.speculative.config import SpeculativeConfig
from engine.speculative.counts import SpeculationStats
from engine.speculative.make import make_speculation
from engine.speculative.speculation import Speculation

__all__ = ["Speculation", "SpeculationStats", "SpeculativeConfig", "make_speculation"]
