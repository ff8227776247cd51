"""Quantized checkpoints: quantization schemes, and readers for codes and scales."""

from engine.loading.quantized.reader import QuantizedCheckpoint, read_rows
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.scheme import QuantizationScheme, load_scheme, scheme_from_dict

__all__ = ["QuantizationScheme", "QuantizedCheckpoint", "QuantizedRows"]
__all__ += ["load_scheme", "read_rows", "scheme_from_dict"]
