"""The part of a model that one rank holds: `Shard` of every layer, and `Stage` of all layers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

__all__ = ["ALL_LAYERS", "WHOLE", "Shard", "Stage"]


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage: [first, last) of `num_layers`.

    The first stage holds the embedding, the last one the final norm and the output layer.

    Attributes
    ----------
    first, last, num_layers : int
        All 0 for every layer of a model.

    Examples
    --------
    >>> stages = [Stage.of(index, 3, 7) for index in range(3)]
    >>> [(stage.first, stage.last) for stage in stages]
    [(0, 3), (3, 5), (5, 7)]
    """

    first: int = 0
    last: int = 0
    num_layers: int = 0

    @classmethod
    def of(cls, index: int, count: int, num_layers: int) -> Stage:
        """Return stage `index` of `count`; the first ones may have one layer more.

        Raises
        ------
        ConfigError
            If there are fewer layers than stages.
        """
        if num_layers < count:
            raise ConfigError(
                f"pipeline_parallel_size must be at most {num_layers}, the layers; got {count}"
            )
        each, rest = divmod(num_layers, count)
        first, last = (i * each + min(i, rest) for i in (index, index + 1))
        return cls(first, last, num_layers)

    @property
    def layers(self) -> slice:
        """Slice of this stage's items in a sequence with one item per layer of the model."""
        return slice(self.first, self.last or None)

    @property
    def is_first(self) -> bool:
        """Tell whether the stage begins with the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Tell whether the stage ends with the output layer."""
        return self.last == self.num_layers

    def has(self, name: str, *, is_tied: bool) -> bool:
        """Tell whether a weight is in this stage; the last one holds a tied embedding as well."""
        if name.startswith("layers."):
            return not self.num_layers or self.first <= int(name.split(".")[1]) < self.last
        if name == "embed":
            return self.is_first or (self.is_last and is_tied)
        return self.is_last

    def local_name(self, name: str) -> str:
        """Return a weight's name with the layers numbered from 0.

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


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts.

    Attributes
    ----------
    index, count : int
    by_output : bool
        Divide every matrix by its output features, so that no sum crosses parts. Otherwise the
        second matrix of a pair (the output of attention, down) is divided by its input features.
    expert_parallel : bool
        Divide a mixture by experts, which stay whole. Otherwise each expert is divided.
    stage : Stage
        The layers that are divided.

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
        """Tell whether there is only one part of each layer."""
        return self.count == 1

    def cut(self, name: str, size: int) -> tuple[int, int]:
        """Return this part's range [first, last) of `size` items.

        Raises
        ------
        ConfigError
            If they cannot be divided evenly; `name` says what the items are.
        """
        if size % self.count:
            raise ConfigError(f"{name} must be a multiple of {self.count} shards; got {size}")
        part = size // self.count
        return self.index * part, (self.index + 1) * part

    def cut_experts(self, num_experts: int) -> tuple[int, int]:
        """Return this part's range [first, last) of experts: all without `expert_parallel`.

        The parts are as even as they can be.

        Raises
        ------
        ConfigError
            If there are fewer experts than parts.

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
        """Return this part's range [first, last), and its length including padding."""
        part = -(-size // self.count)
        first = min(self.index * part, size)
        return first, min(first + part, size), part

    def cut_shared(self, name: str, size: int) -> tuple[int, int]:
        """Return this part's range; if there are more parts than items, several share one.

        See `cut`.

        Raises
        ------
        ConfigError
            If neither divides the other.
        """
        if size >= self.count or self.count % size:
            return self.cut(name, size)
        first = self.index * size // self.count
        return first, first + 1

    def cut_heads(
        self, num_heads: int, num_kv_heads: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return this part's ranges of query heads and of key/value heads.

        If there are more parts than key/value heads, several parts hold the same one. With
        `by_output` they also hold all of its query heads, since products of fewer heads may round
        differently.

        Raises
        ------
        ConfigError
            If they cannot be divided.

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
