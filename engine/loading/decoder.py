"""Build a decoder from checkpoint or random weights: the whole model, or one rank's shard."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from engine.checks import shown
from engine.config import ModelConfig
from engine.dtypes import np_dtype
from engine.errors import ConfigError
from engine.kernels._override.scope import ModelKernels
from engine.layers.collectives import Collectives
from engine.layers.lora import AdapterSlots
from engine.loading.download import ModelSource
from engine.loading.load_config import LoadConfig
from engine.loading.lora import adapter_bounds
from engine.loading.mlp_padding import pad_mlps
from engine.loading.page_calibration import take_checkpoint_scales
from engine.loading.shared_experts import join_shared_experts
from engine.loading.weights import dummy_weights, load_weights
from engine.models.decoder import Decoder
from engine.models.kernel_set import prepare_kernels
from engine.models.sharding import ParallelParts, WholeParts, local_config
from engine.weights import ALL_LAYERS, FORMATS, Shard, Stage, Weight

__all__ = ["check_arguments", "load_decoder"]

_RANK_STEP = 16  # ranks of adapters are padded to a multiple of it


def check_arguments(model: Any, load_format: Any, config: Any) -> None:
    """Check `model`, `load_format` and `config`, the arguments of `load` not validated elsewhere.

    Raises
    ------
    ConfigError
        If an argument is invalid; the message names the first one.
    """
    if not isinstance(load_format, str) or load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be 'auto' or 'dummy'; got {shown(load_format)}")
    if config is not None and not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig; got {type(config).__name__}")
    if not isinstance(model, str | PathLike) or not str(model):
        raise ConfigError(f"model must be a name or a path; got {shown(model)}")


def load_decoder(
    source: ModelSource | None,
    config: ModelConfig,
    options: LoadConfig,
    collectives: Collectives | None = None,
    *,
    stage: Stage = ALL_LAYERS,
    model_kernels: ModelKernels,
    patterns: Mapping[int, Any],
    progress: bool = False,
) -> Decoder:
    """Return a decoder with a checkpoint's weights and KV cache scales.

    Parameters
    ----------
    source : ModelSource or None
        The model's files.
    config : ModelConfig
        Configuration of the whole model.
    options : LoadConfig
    collectives : Collectives, optional
        Collectives of the tensor-parallel group; this rank loads only its shard.
    stage : Stage
        The layers to load.
    model_kernels : ModelKernels
        Overrides of ops.
    patterns : mapping of int to (BlockSparse or Periodic)
        Layer -> its attention pattern.
    progress : bool
        Show progress bars on stderr.

    Raises
    ------
    ConfigError, WeightsError, OutOfMemoryError
        If the model cannot be sharded, the files cannot be used, or the device is out of memory.
    """
    device = options.device
    dtype = options.dtype
    shard = Shard(stage=stage)
    parts = WholeParts(config, stage)
    local = local_config(config, shard)
    heads = slice(None)
    if collectives is not None:
        how = options.deterministic, options.enable_expert_parallel
        shard = Shard(collectives.rank, collectives.size, *how, stage)
        parts = ParallelParts(config, shard, collectives)
        local = local_config(config, shard)
        heads = slice(*shard.cut_shared("num_key_value_heads", config.num_kv_heads))
    weights = _weights(source, config, options, shard, progress=progress)
    # No second mapping may hold the weights: those that are replaced below must be freed.
    weights = {stage.local_name(name): weight for name, weight in weights.items()}
    if not stage.embeds:
        weights.pop("embed", None)  # tied: on this stage it serves only as lm_head
    device.activate()
    # by_output shards all-gather the MLP features, so their count must stay unpadded.
    if device.is_cuda and not (shard.by_output and not shard.is_whole):
        pad_mlps(weights, local, device, dtype)
    if collectives is None:
        join_shared_experts(weights, local, device)
    adapters = None
    if options.enable_lora:
        adapters = AdapterSlots(
            device.xp,
            options.max_loras,
            -(-options.max_lora_rank // _RANK_STEP) * _RANK_STEP,
            adapter_bounds(config, weights, shard),
            np_dtype(dtype),
        )
    decoder = Decoder(
        local,
        weights,
        options.max_model_len,
        deterministic=options.deterministic,
        parts=parts,
        stage=stage,
        model_kernels=model_kernels,
        patterns=patterns,
        adapters=adapters,
    )
    if device.is_cuda:
        formats = dict.fromkeys(form for weight in weights.values() for form in weight.formats())
        prepare_kernels(
            local,
            dtype,
            device,
            formats=formats,
            is_shared=collectives is not None,
            has_patterns=bool(decoder.patterns),
            has_adapters=adapters is not None,
            deterministic=options.deterministic,
            progress=progress,
        )
    if options.load_format != "dummy" and source is not None:
        take_checkpoint_scales(decoder.kv_scales, source.path, config, heads, stage.layers)
    return decoder


def _weights(
    source: ModelSource | None,
    config: ModelConfig,
    options: LoadConfig,
    shard: Shard,
    *,
    progress: bool,
) -> dict[str, Weight]:
    form = FORMATS.get(options.quantization or "")
    if options.load_format == "dummy" or source is None:
        return dummy_weights(
            config,
            device=options.device,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            quantization=form,
            shard=shard,
        )
    return load_weights(
        source,
        config,
        device=options.device,
        dtype=options.dtype,
        quantization=form,
        keeps_formats=options.quantization != "none",
        deterministic=options.deterministic,
        shard=shard,
        max_model_len=options.max_model_len,
        progress=progress,
    )
