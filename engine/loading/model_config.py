"""`load_config`: the configuration in a folder in Hugging Face's layout or in a .gguf file."""

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
        A directory with a config.json (and optionally a generation_config.json, whose end-of-text
        ids take precedence, as in Hugging Face), or a .gguf file.

    Raises
    ------
    ConfigError
        If a file is missing or damaged, a key is missing, a value is invalid, or the model needs
        something that is not implemented.
    WeightsError
        If the .gguf file is damaged.
    """
    return load_gguf_config(path) if Path(path).suffix == ".gguf" else load_hf_config(path)
