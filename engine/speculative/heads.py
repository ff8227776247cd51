"""Load the draft head named by `speculative_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.download import ModelSource, resolve_model
from engine.loading.eagle3 import load_eagle3_config, load_eagle3_weights
from engine.loading.mtp import load_mtp_config, load_mtp_head
from engine.models.draft_heads import DraftHead, Eagle3Head
from engine.speculative.config import SpeculativeConfig

__all__ = ["LoadedHead", "load_head"]


class LoadedHead:
    """A draft head, with the sizes used for memory planning.

    Attributes
    ----------
    head : DraftHead
        The layer and its weights.
    dtype : str
        Dtype of weights, activations and pages: the target's.
    feature_layers : tuple of int
        Layers of the target whose input the head reads.
    """

    def __init__(self, head: DraftHead, target: Any) -> None:
        self.head = head
        self.dtype: str = target.dtype
        self.feature_layers = head.feature_layers

    @property
    def config(self) -> ModelConfig:
        """Sizes of the head's layer."""
        return self.head.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights."""
        return self.head.num_bytes


def load_head(config: SpeculativeConfig, target: Any) -> LoadedHead:
    """Load the draft head of a `Model`, in the model's dtype and on its device.

    Raises
    ------
    ConfigError, WeightsError
        If the head does not match the target, or its files cannot be used.
    """
    for name, given in (("quantization", config.quantization), ("revision", config.revision)):
        if given is not None:
            raise ConfigError(
                f"speculative_config.{name} must be left out for method={config.method!r}; "
                f"got {given!r}"
            )
    if config.dtype not in (None, target.dtype):
        raise ConfigError(
            f"speculative_config.dtype must be that of the model, {target.dtype!r}, for "
            f"method={config.method!r}; got {config.dtype!r}"
        )
    folder = _folder(config, target)
    device = target.device
    dtype = target.dtype
    if config.method == "mtp":
        layers = load_mtp_config(folder, target.config)
        head = load_mtp_head(folder, layers, target.load_config, target.draft_target)
        return LoadedHead(head, target)
    sizes = load_eagle3_config(folder, target.config, target.draft_target.num_layers)
    weights = load_eagle3_weights(folder, sizes, device, dtype)
    return LoadedHead(Eagle3Head(sizes, weights, target.draft_target), target)


def _folder(config: SpeculativeConfig, target: Any) -> Path:
    """Return the head's folder: `config.model`, else the target's own."""
    source: ModelSource | None = target.source
    if config.model is not None:
        source = resolve_model(config.model)
    if source is None or source.kind == "gguf":
        got = "none: the model's weights are random" if source is None else repr(str(source.path))
        raise ConfigError(
            "speculative_config.model must be a folder with a config.json and safetensors for "
            f"method={config.method!r}; got {got}"
        )
    return source.path
