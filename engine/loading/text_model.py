"""The text model of a folder: its keys in config.json, and its tensors under their plain names.

A multimodal model keeps its text model's keys in `text_config` (old releases: among its own), and
the tensors below a prefix, beside those of other modules. See `engine.models.wrappers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile, open_safetensors
from engine.model_files import is_present, read_json
from engine.models.registry import FAMILIES, type_of, wrapper
from engine.models.wrappers import Wrapper

__all__ = ["open_model", "text_values", "wrapper_of"]

# Keys of the whole model that hold for its text model, and take precedence over `text_config`.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("dtype", "torch_dtype", "quantization_config", "compression_config"),
)


def text_values(values: Mapping[str, Any], where: str = "config") -> Mapping[str, Any]:
    """Return the config.json of the text model of a multimodal model; others are unchanged.

    Parameters
    ----------
    values : mapping
        The JSON object.
    where : str
        The file's name, for messages.

    Raises
    ------
    ConfigError
        If `text_config` is not an object.

    Examples
    --------
    >>> text_values({"model_type": "gemma3", "text_config": {"hidden_size": 64}})
    {'hidden_size': 64, 'model_type': 'gemma3_text'}
    """
    kind = wrapper(values.get("model_type"))
    if kind is None:
        return values
    text = values.get("text_config")
    if text is None:
        return {**values, "model_type": kind.text}
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config must be an object; got {shown(text)}")
    text = {key: value for key, value in text.items() if key not in kind.idle_keys}
    shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
    return {**text, **shared, "model_type": text.get("model_type") or kind.text}


def wrapper_of(directory: str | PathLike[str]) -> Wrapper | None:
    """Return the declaration of the multimodal model in `directory`; None for a text model."""
    path = Path(directory)
    if not is_present(path / "config.json"):
        return None
    return wrapper(read_json(path / "config.json", root=path).get("model_type"))


def open_model(directory: str | PathLike[str]) -> SafetensorsFile | SafetensorsDirectory:
    """Open the checkpoint in `directory` with the names of its text model, all below "model.".

    Of a multimodal model only the text model's tensors are left, and shards with none of them are
    not opened. Models without an output layer, such as those for embeddings, and GPT-2's first ones
    may be saved without the "model." or "transformer." that their family's names begin with.

    Raises
    ------
    WeightsError
        See `open_safetensors`.
    """
    kind = wrapper_of(directory)
    if kind is not None:
        rename = kind.text_name
        checkpoint = open_safetensors(directory, lambda name: rename(name) is not None)
        checkpoint.rename(rename)
    else:
        checkpoint = open_safetensors(directory)
        prefix, outputs = _missing_prefix(directory, checkpoint)
        if prefix:
            checkpoint.rename(lambda name: name if name.startswith(outputs) else prefix + name)
    return checkpoint


def _missing_prefix(
    directory: str | PathLike[str], checkpoint: SafetensorsFile | SafetensorsDirectory
) -> tuple[str, tuple[str, ...]]:
    """Return what the names lack in front, "" for nothing, and the beginnings of those that do not.

    The latter are the names of the output layer.
    """
    path = Path(directory) / "config.json"
    values = read_json(path, root=Path(directory)) if is_present(path) else {}
    kind = FAMILIES.get(str(type_of(values)))
    if kind is None:
        return "", ()
    outputs = tuple(
        one.checkpoint.removesuffix("weight") for one in kind.names if one.kind == "lm_head"
    )
    for one in kind.names:
        prefix, _, rest = one.checkpoint.partition(".")
        if one.kind == "embed" and rest in checkpoint:
            is_missing = not any(name.startswith(f"{prefix}.") for name in checkpoint.names())
            return (f"{prefix}." if is_missing else ""), outputs
    return "", ()
