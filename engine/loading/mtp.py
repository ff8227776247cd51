"""Load the MTP head of a checkpoint: a further layer of the model, behind a projection.

The layer is loaded as the model's own layers are, from the same files: with its experts, its gates,
and in its stored format. See `engine.models.mtp_family`.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.dtypes import np_dtype
from engine.errors import ConfigError, WeightsError
from engine.loading.head_tensors import HeadTensors
from engine.loading.hf_config import load_hf_config
from engine.loading.load_config import LoadConfig
from engine.loading.quantized import QuantizedCheckpoint, load_scheme
from engine.loading.safetensors import open_safetensors
from engine.loading.weights import load_weights
from engine.models.decoder import Decoder
from engine.models.draft_heads import DraftTarget, MtpHead
from engine.models.mtp_family import MtpFamily
from engine.models.registry import FAMILIES, family
from engine.models.sharding import local_config
from engine.weights import Shard, Stage

__all__ = ["load_mtp_config", "load_mtp_head"]

_SAME = ("hidden_size", "vocab_size")


def load_mtp_config(directory: str | PathLike[str], target: ModelConfig) -> ModelConfig:
    """Return the config of the model in `directory` with the head's layer appended.

    Raises
    ------
    ConfigError
        If no MTP head of a known layout is declared, or a size differs from the target's (the
        message then names both sizes).
    """
    config = load_hf_config(directory)
    where = Path(directory) / "config.json"
    kind = family(config.model_type)
    if kind.mtp is None:
        known = sorted(name for name, one in FAMILIES.items() if one.mtp is not None)
        raise ConfigError(
            f"{where}: model_type must be {' or '.join(map(repr, known))} for an MTP head; "
            f"got {config.model_type!r}"
        )
    if kind.extra_layers and not config.num_extra_layers:
        raise ConfigError(f"{where}: {kind.extra_layers} must be at least 1; got 0")
    if any(config.layer_windows):
        raise ConfigError(f"{where}: use_sliding_window must be false for an MTP head; got true")
    if config.rope.scaling == "longrope":
        raise ConfigError(f"{where}: rope_scaling must not be longrope in a draft head")
    for key in _SAME:
        if (got := getattr(config, key)) != (wanted := getattr(target, key)):
            raise ConfigError(f"{where}: {key} must be that of the model, {wanted}; got {got}")
    return _appended(config)


def load_mtp_head(
    directory: str | PathLike[str], config: ModelConfig, options: LoadConfig, target: DraftTarget
) -> MtpHead:
    """Load the first MTP layer.

    Parameters
    ----------
    directory : str or path
    config : ModelConfig
        From `load_mtp_config`.
    options : LoadConfig
        The target's.
    target : DraftTarget

    Raises
    ------
    WeightsError
        If a file is damaged, or a tensor of the layer is missing, unexpected, or has the wrong
        shape or dtype.
    """
    kind = family(config.model_type).mtp
    assert kind is not None
    n = config.num_layers - 1
    stage = Stage(n, n + 1, n + 2)  # a stage in the middle has neither embedding nor output layer
    shard = Shard(stage=stage)
    device = options.device
    weights = load_weights(
        directory,
        config,
        device=device,
        dtype=options.dtype,
        keeps_formats=options.quantization != "none",
        deterministic=options.deterministic,
        shard=shard,
        max_model_len=options.max_model_len,
        mtp=kind,
    )
    layer = Decoder(
        local_config(config, shard),
        {stage.local_name(name): weight for name, weight in weights.items()},
        options.max_model_len,
        deterministic=options.deterministic,
        stage=stage,
    )
    own = _own_tensors(directory, config, kind, n, device, options.dtype)
    return MtpHead(layer, own, target, zero_first=kind.zero_first)


def _appended(config: ModelConfig) -> ModelConfig:
    """Return the config with one more layer: full attention, and experts if the model has any.

    That of a model with shortcut layers is half of one of them, without the experts.
    """
    kind = "attention" if config.mla is None else "mla"
    added: dict[str, Any] = {"layer_windows": 0, "rope_layers": True, "layer_kinds": kind}
    lists: dict[str, Any] = {name: getattr(config, name) for name in added}
    longer: dict[str, Any] = {
        name: (*values, added[name]) for name, values in lists.items() if values
    }
    moe = config.moe
    if moe is not None:
        top_k = moe.layer_top_k and (*moe.layer_top_k, moe.layer_top_k[-1])
        is_sparse = "shortcut" not in config.layer_kinds
        moe = replace(moe, sparse_layers=(*moe.sparse_layers, is_sparse), layer_top_k=top_k)
    return replace(
        config,
        num_layers=config.num_layers + 1,
        num_extra_layers=max(0, config.num_extra_layers - 1),
        moe=moe,
        **longer,
    )


def _dequantized(
    directory: str | PathLike[str], name: str, shape: tuple[int, int], device: Any, dtype: str
) -> Any:
    """Return a quantized matrix as numbers (fp8 checkpoints of LongCat); None if it is not."""
    scheme = load_scheme(directory)
    checkpoint = QuantizedCheckpoint(open_safetensors(directory), scheme)
    if scheme is None or checkpoint.format_of(name) is None:
        return None
    if (got := checkpoint.shape(name)) != shape:
        raise WeightsError(f"{checkpoint.path}: tensor {name!r} must have shape {shape}; got {got}")
    numbers = checkpoint.read(name, 0, checkpoint.shape(name)[0])
    return device.xp.asarray(numbers.astype(np_dtype(dtype)))


def _own_tensors(
    directory: str | PathLike[str],
    config: ModelConfig,
    kind: MtpFamily,
    n: int,
    device: Any,
    dtype: str,
) -> dict[str, Any]:
    """Return the head's projection and norms under `MtpHead`'s names."""
    tensors = HeadTensors(directory, device, dtype)
    size = config.hidden_size
    weights = {
        name: tensors.read(f"{getattr(kind, name).format(n=n)}.weight", (size,))
        for name in ("embed_norm", "hidden_norm", "final_norm")
    }
    name = f"{kind.proj.format(n=n)}.weight"
    proj = _dequantized(directory, name, (size, 2 * size), device, dtype)
    if proj is None:
        proj = tensors.read(name, (size, 2 * size))
    if kind.embedding_first:
        proj = device.xp.concatenate([proj[:, size:], proj[:, :size]], axis=1)
    return weights | {"proj": proj}
