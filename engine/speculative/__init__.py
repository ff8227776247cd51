"""Speculative decoding: several tokens a step, and the same tokens as without.

`Speculation` is what the engine owns; `make_speculation` makes it from `SpeculativeConfig`.
"""

from engine.speculative.config import SpeculativeConfig
from engine.speculative.counts import SpeculationStats
from engine.speculative.make import make_speculation
from engine.speculative.speculation import Speculation

__all__ = ["Speculation", "SpeculationStats", "SpeculativeConfig", "make_speculation"]
