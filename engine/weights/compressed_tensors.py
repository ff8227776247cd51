"""The compressed-tensors layout: tensors of a quantized matrix, and its config.json entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import WeightsError
from engine.weights.formats import FORMATS, Format
from engine.weights.quantize import Codes

__all__ = ["STORABLE", "layout_fault", "quantization_config", "storable_format", "stored_shapes"]
__all__ += ["stored_arrays"]

STORABLE: tuple[str, ...] = (
    *("fp8", "fp8_block", "int8"),
    *(name for name in FORMATS if name.startswith(("int4_g", "int8_g"))),
)
"""Names of the formats that a checkpoint can be written in."""

_ALIASES = {"int4": "int4_g128"}
_WORD = 32


def storable_format(name: str) -> Format:
    """Return the format called `name`; "int4" is "int4_g128".

    Raises
    ------
    WeightsError
        If checkpoints cannot be written in this format; the message lists the supported names.

    Examples
    --------
    >>> storable_format("int4").name
    'int4_g128'
    """
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if name not in STORABLE:
        known = ", ".join((*_ALIASES, *STORABLE))
        raise WeightsError(f"format must be one of {known}; got {name!r:.80}")
    return FORMATS[name]


def layout_fault(form: Format, shape: Sequence[int]) -> str:
    """Return why a matrix of this shape cannot be stored in the format; "" if it can.

    Other readers of this layout support only whole groups and blocks.

    Examples
    --------
    >>> layout_fault(FORMATS["int4_g128"], (64, 576))
    'must have a multiple of 128 columns for int4_g128; got 576'
    """
    assert form.block is not None
    for count, multiple, what in zip(shape, form.block, ("rows", "columns"), strict=True):
        if multiple and count % multiple:
            return f"must have a multiple of {multiple} {what} for {form.name}; got {count}"
    return ""


def stored_shapes(
    form: Format, shape: tuple[int, int], dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (dtype, shape) of each tensor that stores a matrix, by name suffix.

    `dtype` is the model's and also the dtype of stored scales.

    Examples
    --------
    >>> stored_shapes(FORMATS["int8"], (4, 64), "bfloat16")
    {'weight': ('int8', (4, 64)), 'weight_scale': ('bfloat16', (4, 1))}
    """
    rows, columns = shape
    if form.activations:
        code = "int8" if form.code == "int" else "float8_e4m3fn"
        assert form.block is not None
        high, wide = form.block
        scales = (rows, 1) if not wide else (-(-rows // high), -(-columns // wide))
        return {"weight": (code, shape), "weight_scale": (dtype, scales)}
    per_word = _WORD // form.bits
    groups = -(-columns // form.group)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight_packed": ("int32", (rows, -(-columns // per_word))),
        "weight_scale": (dtype, (rows, groups)),
        "weight_shape": ("int64", (2,)),
    }
    if form.offset:
        shapes["weight_zero_point"] = "int32", (-(-rows // per_word), groups)
    return shapes


def stored_arrays(form: Format, made: Codes, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that store a matrix, with dtypes and shapes as in `stored_shapes`."""
    codes = to_numpy(made.codes)
    scales = to_numpy(made.scales)
    if form.activations:
        scales = scales if scales.ndim == 2 else scales[:, None]
        codes = codes if form.code == "int" else codes.view(ml_dtypes.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales.astype(np_dtype(dtype))}
    arrays = {
        "weight_packed": _words(codes, form),
        "weight_scale": scales.astype(np_dtype(dtype)),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if form.offset:
        # One word packs the zero points of 8 rows, or of 4 rows for 8-bit codes.
        arrays["weight_zero_point"] = np.ascontiguousarray(_words(to_numpy(made.offsets).T, form).T)
    return arrays


def _words(codes: np.ndarray[Any, Any], form: Format) -> np.ndarray[Any, Any]:
    """Pack codes, as unsigned integers, into int32 words along the last axis, lowest bits first."""
    per_word = _WORD // form.bits
    rows, columns = codes.shape
    unsigned = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    unsigned[:, :columns] = codes.astype(np.int32) - form.code_range[0]
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(form.bits)
    words = (unsigned.reshape(rows, -1, per_word) << shifts).sum(axis=2, dtype=np.uint32)
    packed: np.ndarray[Any, Any] = words.view(np.int32)
    return packed


def quantization_config(form: Format, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the value of "quantization_config" in config.json.

    Parameters
    ----------
    form : Format
    ignore : sequence of str
        Names of the linear layers that are not quantized.
    """
    kind = "int" if form.code == "int" else "float"
    activations: dict[str, Any] | None = None
    if form.activations:
        activations = _arguments(kind, 8, strategy="token", dynamic=True)
        if form.group:
            activations |= {"strategy": "group", "group_size": form.group}
        layout = "int-quantized" if kind == "int" else "float-quantized"
        weights = _arguments(kind, 8, strategy="block" if form.group else "channel")
        weights["block_structure"] = list(form.block) if form.group and form.block else None
    else:
        layout = "pack-quantized"
        weights = _arguments(kind, form.bits, strategy="group", group_size=form.group)
        weights["symmetric"] = not form.offset
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None, "format": layout}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _arguments(kind: str, bits: int, **known: Any) -> dict[str, Any]:
    """Return the entry that describes one operand: defaults, overridden by `known`."""
    defaults: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": None}
    defaults |= {"group_size": None, "block_structure": None, "dynamic": False, "actorder": None}
    return {**defaults, **known}
