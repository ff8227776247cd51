"""The type of a weight: the format of its numbers, and the shard of the whole it holds."""

from engine.quantization.formats import FORMATS, Format, dense_format, format_of
from engine.quantization.shard import ALL_LAYERS, WHOLE, Shard, Stage
from engine.quantization.values import pack_weight, unpack_weight
from engine.quantization.weight import Weight

__all__ = ["FORMATS", "WHOLE", "Format", "Shard", "Weight", "dense_format", "format_of"]
__all__ += ["ALL_LAYERS", "Stage", "pack_weight", "unpack_weight"]
