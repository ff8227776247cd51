"""`load_config`: read the configuration of a Hugging Face folder or a .gguf file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from engine.config import ModelConfig
from engine.loading.gguf_config import load_gguf_config
from engine.loading.hf_config import load_hf_config

__all__ = ["load_config"]


def load_config(path: str | PathLike[str]) -> ModelConfig:
    """Read the configuration of the model at `path`.

    Parameters
    ----------
    path : str or path
        A .gguf file, or a directory with a config.json. End-of-text ids in a generation_config.json
        take precedence, as in Hugging Face.

    Raises
    ------
    ConfigError
        If a file is missing or damaged, a key is missing, a value is invalid, or the model needs
        an unimplemented feature.
    WeightsError
        If the .gguf file is damaged.
    """
    return load_gguf_config(path) if Path(path).suffix == ".gguf" else load_hf_config(path)
