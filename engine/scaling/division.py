"""Ways to divide a model over GPUs, and one GPU's part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.weight_table import weight_shapes
from engine.models.sharding import check_support, local_config
from engine.weights import ALL_LAYERS, Format, Shard, Stage

__all__ = ["Division", "divisions", "stages"]


@dataclass(frozen=True)
class Division:
    """A division of a model over `num_gpus` GPUs.

    Attributes
    ----------
    tensor, pipeline, data : int
        Tensor-parallel ranks, pipeline stages, and replicas.
    expert : bool
        Expert parallel: each rank holds a subset of the experts, not a slice of every expert.
    layers : tuple of int, optional
        Number of layers of each stage; by default as equal as possible.

    Examples
    --------
    >>> str(Division(4, 1, 2)), Division(4, 1, 2).num_gpus
    ('tp 4 x dp 2', 8)
    >>> str(Division(1, 2, layers=(17, 15)))
    'pp 2 (17 + 15)'
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" ({' + '.join(map(str, self.layers))})"
        sizes = (("tp", self.tensor, ""), ("pp", self.pipeline, layers), ("dp", self.data, ""))
        named = [f"{name} {size}{more}" for name, size, more in sizes if size > 1]
        return " x ".join(named or ["1 GPU"]) + (" (ep)" if self.expert else "")

    def shard(self, config: ModelConfig, stage: int) -> Shard:
        """Return the part of `config` on the fullest GPU of pipeline stage `stage`.

        That of the last rank: with expert parallelism, no rank has more experts.
        """
        layers = ALL_LAYERS
        if self.pipeline > 1:
            layers = Stage.of(stage, self.pipeline, config.num_layers, self.layers)
        return Shard(self.tensor - 1, self.tensor, expert_parallel=self.expert, stage=layers)

    def check(self, config: ModelConfig, gpus_per_host: int, form: Format | None = None) -> None:
        """Check that the model permits this division.

        Parameters
        ----------
        config : ModelConfig
            The whole model.
        gpus_per_host : int
            Maximum tensor-parallel ranks.
        form : Format, optional
            Weight format of the layers' matrices; its blocks are not divided.

        Raises
        ------
        ConfigError
            If it does not; the message states the reason.
        """
        if self.tensor > gpus_per_host:
            raise ConfigError(
                f"tensor parallel ranks must be in one host of {gpus_per_host}; got {self.tensor}"
            )
        if self.pipeline > config.num_layers:
            raise ConfigError(
                f"pipeline stages must be at most {config.num_layers}, the layers; "
                f"got {self.pipeline}"
            )
        if self.expert and config.moe is None:
            raise ConfigError("expert parallel ranks need a model with experts")
        weight_shapes(config, Shard(0, self.tensor, expert_parallel=self.expert))
        check_support(config, self.shard(config, 0))
        if form is not None and form.block is not None and self.tensor > 1:
            _check_blocks(config, self, form.block[0], form.super_block or form.block[1])


def _check_blocks(config: ModelConfig, division: Division, high: int, wide: int) -> None:
    """Raise unless a rank's part of a matrix is whole blocks of `high` rows x `wide` columns."""
    local = _local(config, replace(division.shard(config, 0), stage=ALL_LAYERS))
    sizes = {"query heads": local.num_heads * local.head_dim}
    if local.gated_delta is not None:
        sizes["value heads"] = local.gated_delta.value_dim
    if local.lightning is not None:
        sizes["heads of lightning attention"] = local.lightning.inner_dim
    if config.has_mlp:
        sizes["intermediate_size"] = local.intermediate_size
    if local.moe is not None:
        if not division.expert:
            sizes["the width of an expert"] = local.moe.intermediate_size
        sizes["the width of the shared expert"] = local.moe.shared_size
    for name, size in sizes.items():
        block = max(high, wide)
        if block and size % block:
            raise ConfigError(
                f"{name}: a rank's part must be a multiple of the format's block of {block}; "
                f"got {size}"
            )


def divisions(config: ModelConfig, num_gpus: int) -> Iterator[Division]:
    """Yield every division over `num_gpus` GPUs, including those that the model does not permit.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 4, 4, 2, 8, 48, 128)
    >>> [str(each) for each in divisions(config, 4)]
    ['dp 4', 'pp 2 x dp 2', 'pp 4', 'tp 2 x dp 2', 'tp 2 x pp 2', 'tp 4']
    """
    for tensor in _factors(num_gpus):
        for pipeline in _factors(num_gpus // tensor):
            data = num_gpus // tensor // pipeline
            yield Division(tensor, pipeline, data)
            if config.moe is not None and tensor > 1:
                yield Division(tensor, pipeline, data, expert=True)


def _factors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def stages(config: ModelConfig, division: Division) -> list[ModelConfig]:
    """Return one GPU's part of the model in each pipeline stage, as a configuration.

    Heads, features, experts and vocabulary are one rank's (with expert parallelism, the most
    experts of any rank); the layers are the stage's. Every part includes the embeddings and the
    output layer, whichever stage holds them.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 3, 4, 2, 8, 48, 128)
    >>> [(c.num_layers, c.num_heads, c.vocab_size) for c in stages(config, Division(4, 2))]
    [(2, 1, 16), (1, 1, 16)]
    """
    return [_local(config, division.shard(config, index)) for index in range(division.pipeline)]


def _local(config: ModelConfig, shard: Shard) -> ModelConfig:
    local = local_config(config, shard)
    moe = local.moe
    if moe is not None:
        first, last = shard.cut_experts(moe.num_experts)
        moe = replace(moe, num_experts=last - first) if any(moe.sparse_layers) else None
    return replace(local, moe=moe, vocab_size=shard.cut_padded(config.vocab_size)[2])
