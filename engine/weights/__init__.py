"""`Weight`: a tensor operand, with its number format and shard."""

from engine.weights.formats import FORMATS, Format, dense_format, format_of
from engine.weights.shard import ALL_LAYERS, WHOLE, Shard, Stage, stage_sizes
from engine.weights.values import pack_weight, unpack_weight
from engine.weights.weight import Weight

__all__ = ["FORMATS", "WHOLE", "Format", "Shard", "Weight", "dense_format", "format_of"]
__all__ += ["ALL_LAYERS", "Stage", "pack_weight", "stage_sizes", "unpack_weight"]
