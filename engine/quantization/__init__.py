"""The type of a weight: the format of its numbers, and the shard of the whole it holds."""

from engine.quantization.formats import FORMATS, Format, dense_format
from engine.quantization.shard import WHOLE, Shard
from engine.quantization.weight import Weight

__all__ = ["FORMATS", "WHOLE", "Format", "Shard", "Weight", "dense_format"]
