"""`load_scheme`: read a checkpoint's quantization_config, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from engine.loading._fields import Fields
from engine.loading.quantized.config import QuantizationScheme, warn_unread
from engine.loading.quantized.config_ct import compressed_tensors_scheme
from engine.loading.quantized.config_hf import (
    awq_scheme,
    bitnet_scheme,
    fp8_scheme,
    gptq_scheme,
    mxfp4_scheme,
)
from engine.loading.text_model import text_values, wrapper_of
from engine.model_files import is_present, read_json

__all__ = ["QuantizationScheme", "load_scheme", "scheme_from_dict", "scheme_of"]

_METHODS: dict[str, Callable[[Fields], QuantizationScheme]] = {
    "compressed-tensors": compressed_tensors_scheme,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "fp8": fp8_scheme,
    "mxfp4": mxfp4_scheme,
    "bitnet": bitnet_scheme,
}

_OLD_FILES = ("quantize_config.json", "quant_config.json")
_MODELOPT_FILE = "hf_quant_config.json"
# Keys found only in AWQ files.
_AWQ_KEYS = ("w_bit", "q_group_size", "zero_point")


def load_scheme(directory: str | PathLike[str]) -> QuantizationScheme | None:
    """Return the quantization of the model in `directory`; None if it is not quantized.

    config.json holds it under `quantization_config` (older files: `compression_config`); old tools
    write a separate quantize_config.json or quant_config.json. None for a .gguf file, since each of
    its tensors has its own type.

    Raises
    ------
    ConfigError
        If a file is damaged or its scheme is not supported; the message names the key.
    """
    root = Path(directory)
    if root.suffix == ".gguf":
        return None
    found = _fields(root)
    return None if found is None else replace(scheme_of(*found), wrapper=wrapper_of(root))


def _fields(root: Path) -> tuple[Fields, str | None] | None:
    """Return the quantization's keys, and the method if they need not name it."""
    where = str(root / "config.json")
    values = text_values(read_json(root / "config.json", root=root), where)
    for key in ("quantization_config", "compression_config"):
        if values.get(key) not in (None, {}):
            fields = Fields(values, where).child(key)
            return fields, "compressed-tensors" if key == "compression_config" else None
    for name in _OLD_FILES:
        if is_present(root / name):
            old = read_json(root / name, root=root)
            method = "awq" if any(key in old for key in _AWQ_KEYS) else "gptq"
            return Fields(old, str(root / name)), method
    _refuse_modelopt(root)
    return None


def _refuse_modelopt(root: Path) -> None:
    """Refuse matrices that NVIDIA's modelopt has quantized; scales of pages alone are accepted."""
    path = root / _MODELOPT_FILE
    values = read_json(path, root=root).get("quantization") if is_present(path) else None
    if isinstance(values, Mapping) and values.get("quant_algo") is not None:
        raise Fields(values, str(path)).error(
            "quant_algo", f"null (matrices are read from files of {', '.join(_METHODS)} only)"
        )


def scheme_from_dict(
    values: Mapping[str, Any], where: str = "quantization_config"
) -> QuantizationScheme:
    """Return the scheme of a `quantization_config`.

    Parameters
    ----------
    values : mapping
        The JSON object.
    where : str
        Location of the object, for messages.

    Raises
    ------
    ConfigError
        If the scheme is not supported; the message names the key.

    Examples
    --------
    >>> scheme = scheme_from_dict({"quant_method": "gptq", "bits": 4, "group_size": 128})
    >>> scheme.storage_of("model.layers.0.mlp.up_proj").format.name
    'int4_g128'
    """
    return scheme_of(Fields(values, where))


def scheme_of(fields: Fields, default: str | None = None) -> QuantizationScheme:
    """Return the scheme of a `quantization_config`; `default` is the method if none is named.

    Raises
    ------
    ConfigError
        See `scheme_from_dict`.
    """
    if default is not None and not fields.has("quant_method"):
        method = default
    else:
        method = fields.text("quant_method")
    if method not in _METHODS:
        raise fields.error("quant_method", f"one of {', '.join(_METHODS)}")
    scheme = _METHODS[method](fields)
    warn_unread(fields)
    return scheme
