"""How a model is split between ranks: `Shard` splits every layer, `Stage` the list of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from engine.checks import shown_with_type
from engine.errors import ConfigError

__all__ = ["ALL_LAYERS", "WHOLE", "Shard", "Stage", "stage_sizes"]


@dataclass(frozen=True)
class Stage:
    """Layers [first, last) of `num_layers`: one pipeline stage.

    The first stage holds the embedding (the last one too with `has_embedding`), the last one the
    final norm and the output layer.

    Attributes
    ----------
    first, last, num_layers : int
        All 0 means every layer of the model.
    has_embedding : bool
        Whether the last stage holds the embedding as well, for a draft head.

    Examples
    --------
    >>> stages = [Stage.of(index, 3, 7) for index in range(3)]
    >>> [(stage.first, stage.last) for stage in stages]
    [(0, 3), (3, 5), (5, 7)]
    >>> Stage.of(1, 2, 7, [5, 2])
    Stage(first=5, last=7, num_layers=7, has_embedding=False)
    """

    first: int = 0
    last: int = 0
    num_layers: int = 0
    has_embedding: bool = False

    @classmethod
    def of(
        cls, index: int, count: int, num_layers: int, sizes: Sequence[int] | None = None
    ) -> Stage:
        """Return stage `index` of `count`, which have `sizes` layers.

        By default they are of equal size; the first stages may have one extra layer.

        Raises
        ------
        ConfigError
            If there are fewer layers than stages, or `sizes` do not add up to the layers.
        """
        if sizes is not None and sum(sizes) != num_layers:
            raise ConfigError(
                f"pipeline_layers must add up to {num_layers}, the layers; got "
                f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
            )
        if num_layers < count:
            raise ConfigError(
                f"pipeline_parallel_size must be at most {num_layers}, the layers; got {count}"
            )
        if sizes is None:
            each, rest = divmod(num_layers, count)
            sizes = [each + (stage < rest) for stage in range(count)]
        first = sum(sizes[:index])
        return cls(first, first + sizes[index], num_layers)

    @property
    def layers(self) -> slice:
        """Slice that selects this stage from a sequence with one item per layer of the model."""
        return slice(self.first, self.last or None)

    @property
    def is_first(self) -> bool:
        """Tell whether the stage starts with the embedding."""
        return self.first == 0

    @property
    def embeds(self) -> bool:
        """Tell whether the stage holds the embedding."""
        return self.is_first or self.has_embedding

    @property
    def is_last(self) -> bool:
        """Tell whether the stage ends with the output layer."""
        return self.last == self.num_layers

    def has(self, name: str, *, is_tied: bool) -> bool:
        """Tell whether a weight is in this stage; the last one holds a tied embedding too."""
        if name.startswith("layers."):
            return not self.num_layers or self.first <= int(name.split(".")[1]) < self.last
        if name == "embed":
            return self.embeds or (self.is_last and is_tied)
        if name in ("embed_norm", "embed_positions"):
            return self.is_first
        return self.is_last

    def local_name(self, name: str) -> str:
        """Return a weight's name with this stage's layers numbered from 0.

        Examples
        --------
        >>> Stage(2, 4, 4).local_name("layers.3.qkv"), Stage(2, 4, 4).local_name("lm_head")
        ('layers.1.qkv', 'lm_head')
        """
        if not name.startswith("layers."):
            return name
        layer, kind = name.split(".")[1:]
        return f"layers.{int(layer) - self.first}.{kind}"


ALL_LAYERS = Stage()


def stage_sizes(given: Any) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, given as integers or as "17,15".

    Raises
    ------
    ConfigError
        If one is not a positive integer.

    Examples
    --------
    >>> stage_sizes("17,15"), stage_sizes([2, 1]), stage_sizes(None)
    ((17, 15), (2, 1), None)
    """
    if given is None:
        return None
    parts = given
    if isinstance(given, str):
        parts = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
    is_list = isinstance(parts, Sequence) and not isinstance(parts, bytes)
    sizes = tuple(parts) if is_list else ()
    is_whole = all(isinstance(size, Integral) and not isinstance(size, bool) for size in sizes)
    if not is_whole or min(sizes, default=0) < 1:
        raise ConfigError(
            "pipeline_layers must be positive integers, such as [17, 15] or '17,15'; got "
            f"{shown_with_type(given)}"
        )
    return tuple(map(int, sizes))


@dataclass(frozen=True)
class Shard:
    """Rank `index`'s part of a model divided among `count` ranks.

    Attributes
    ----------
    index, count : int
    by_output : bool
        Column parallel only: divide every matrix by output features, so no sum is split between
        ranks. Otherwise the second matrix of a pair (attention output, down) is row parallel.
    expert_parallel : bool
        Expert parallel: each rank holds some of the experts whole. Otherwise every expert is split
        across all ranks.
    stage : Stage
        Layers to divide.

    Raises
    ------
    ConfigError
        If `index` is not below `count`.

    Examples
    --------
    >>> Shard(1, 4).cut("features", 12), Shard().cut("features", 12)
    ((3, 6), (0, 12))
    """

    index: int = 0
    count: int = 1
    by_output: bool = False
    expert_parallel: bool = False
    stage: Stage = ALL_LAYERS

    def __post_init__(self) -> None:
        if not (type(self.index) is int and type(self.count) is int and self.count >= 1):
            raise ConfigError(
                f"a shard must be two whole numbers; got {self.index!r}, {self.count!r}"
            )
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard index must be in [0, {self.count}); got {self.index}")

    @property
    def is_whole(self) -> bool:
        """Tell whether the layers are not divided (one rank)."""
        return self.count == 1

    def cut(self, name: str, size: int) -> tuple[int, int]:
        """Return this rank's range [first, last) of `size` items.

        Raises
        ------
        ConfigError
            If the items cannot be divided evenly; the message calls them `name`.
        """
        if size % self.count:
            raise ConfigError(f"{name} must be a multiple of {self.count} shards; got {size}")
        part = size // self.count
        return self.index * part, (self.index + 1) * part

    def cut_experts(self, num_experts: int) -> tuple[int, int]:
        """Return this rank's experts [first, last): all of them unless expert parallel.

        Ranks get as nearly equal shares as possible.

        Raises
        ------
        ConfigError
            If there are fewer experts than ranks.

        Examples
        --------
        >>> [Shard(index, 3, expert_parallel=True).cut_experts(8) for index in range(3)]
        [(0, 2), (2, 5), (5, 8)]
        """
        if not self.expert_parallel:
            return 0, num_experts
        if num_experts < self.count:
            raise ConfigError(
                f"experts must be at least {self.count}, one for each rank with whole experts; "
                f"got {num_experts}"
            )
        bounds = [index * num_experts // self.count for index in (self.index, self.index + 1)]
        return bounds[0], bounds[1]

    def cut_padded(self, size: int) -> tuple[int, int, int]:
        """Return this rank's range [first, last), and its length including padding."""
        part = -(-size // self.count)
        first = min(self.index * part, size)
        return first, min(first + part, size), part

    def cut_shared(self, name: str, size: int) -> tuple[int, int]:
        """Return this rank's range; if ranks outnumber items, several ranks share one.

        See `cut`.

        Raises
        ------
        ConfigError
            If neither count divides the other.
        """
        if size >= self.count or self.count % size:
            return self.cut(name, size)
        first = self.index * size // self.count
        return first, first + 1

    def cut_heads(
        self, num_heads: int, num_kv_heads: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return this rank's ranges of query heads and key/value heads.

        If ranks outnumber key/value heads, several ranks hold the same one. With `by_output` they
        also hold all its query heads, since GEMMs over fewer heads may round differently.

        Raises
        ------
        ConfigError
            If the heads cannot be divided.

        Examples
        --------
        >>> Shard(1, 4).cut_heads(8, 2), Shard(1, 4, by_output=True).cut_heads(8, 2)
        (((2, 4), (0, 1)), ((0, 4), (0, 1)))
        """
        if self.by_output and self.count > num_kv_heads:
            kv_heads = self.cut_shared("num_key_value_heads", num_kv_heads)
            group = num_heads // num_kv_heads
            return (kv_heads[0] * group, kv_heads[1] * group), kv_heads
        heads = self.cut("num_attention_heads", num_heads)
        return heads, self.cut_shared("num_key_value_heads", num_kv_heads)


WHOLE = Shard()
