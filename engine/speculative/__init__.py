"""Speculative decoding: draft proposers, and the controller that decides how many are verified.

The engine owns a `Speculation`, which `make_speculation` builds from a `SpeculativeConfig`. It does
not change the output tokens.
"""

from engine.speculative.config import SpeculativeConfig
from engine.speculative.counts import SpeculationStats
from engine.speculative.make import make_speculation
from engine.speculative.speculation import Speculation

__all__ = ["Speculation", "SpeculationStats", "SpeculativeConfig", "make_speculation"]
