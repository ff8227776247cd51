"""Read KV cache quantization scales from a checkpoint."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.errors import WeightsError
from engine.loading.text_model import open_model, text_values
from engine.model_files import is_present, read_json

__all__ = ["is_kv_scale", "read_kv_scales"]

# Tensor names used by compressed-tensors and by ModelOpt, including older names and packed
# projections; "kv" is one scale for both. Query scales and zero points (0 in a symmetric scheme)
# match but are ignored.
_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d{1,6})\.(?:self_attn|attn|mixer)\."
    r"(?:(?P<direct>[qkv]|kv)_(?P<kind>scale|zero_point)"
    r"|(?P<proj>[kv])_proj\.(?:output_scale|(?P=proj)_scale)"
    r"|qkv_proj\.(?P<packed>[kv])_scale)"
)


def is_kv_scale(name: str) -> bool:
    """Tell whether a tensor holds a KV cache quantization parameter.

    Examples
    --------
    >>> is_kv_scale("model.layers.0.self_attn.k_scale"), is_kv_scale("model.norm.weight")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def read_kv_scales(
    source: str | PathLike[str], config: ModelConfig
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], str] | None:
    """Read the KV cache scales of a Hugging Face model folder.

    Returns
    -------
    scales : (num_layers, 2, K) array of float32
        NaN if missing from the checkpoint.
    codes : str
        KV cache format the scales are for: "fp8" or "int8". The function returns None instead of
        the pair if the checkpoint has no scales or only those of unsupported formats, such as
        formats with zero points.

    Raises
    ------
    WeightsError
        If a scale is not positive and finite, its length is neither 1 nor K, or its layer does not
        exist in the model; the message names the tensor.
    """
    folder = Path(source)
    codes = _codes(folder) if folder.is_dir() else ""
    if not codes:
        return None
    checkpoint = open_model(folder)
    found = [(name, _NAME.fullmatch(name)) for name in checkpoint.names()]
    scales = np.full((config.num_layers, 2, config.num_kv_heads), np.nan, np.float32)
    for name, match in found:
        if match is None or match["kind"] == "zero_point" or match["direct"] == "q":
            continue
        layer = int(match["layer"])
        kind = match["direct"] or match["proj"] or match["packed"]
        if layer >= config.num_layers + config.num_extra_layers:
            last = config.num_layers - 1
            raise WeightsError(f"{folder}: tensor {name!r} must be of a layer from 0 to {last}")
        if layer < config.num_layers:
            rows = slice(0, 2) if kind == "kv" else "kv".index(kind)
            scales[layer, rows] = _checked(folder, name, checkpoint.view(name), config.num_kv_heads)
    return None if np.isnan(scales).all() else (scales, codes)


def _checked(folder: Path, name: str, value: Any, num_kv_heads: int) -> Any:
    """Return the checked scale, (1,) or (K,) float32."""
    scale = np.asarray(value).astype(np.float32).reshape(-1)
    if scale.size not in (1, num_kv_heads):
        raise WeightsError(
            f"{folder}: tensor {name!r} must have 1 value, or {num_kv_heads}, one for each "
            f"key/value head; got shape {value.shape}"
        )
    bad = scale[~(np.isfinite(scale) & (scale > 0))]
    if bad.size:
        raise WeightsError(
            f"{folder}: tensor {name!r} must be positive and finite; got {float(bad[0])!r}"
        )
    return scale


def _codes(folder: Path) -> str:
    """Return the format of the folder's KV scheme: "fp8" if it states none, "" if unsupported."""
    path = folder / "config.json"
    config = text_values(read_json(path)) if is_present(path) else {}
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if not isinstance(scheme, dict):
        return "fp8"
    if scheme.get("symmetric", True) is not True:
        return ""
    if scheme.get("num_bits", 8) != 8:
        return ""
    kind = scheme.get("type", "float")
    return {"int": "int8", "float": "fp8"}.get(kind, "") if isinstance(kind, str) else ""
