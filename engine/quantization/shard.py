"""The part of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

__all__ = ["WHOLE", "Shard"]


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts.

    Raises
    ------
    ConfigError
        If there is no such part.

    Examples
    --------
    >>> Shard(1, 4).cut("features", 12), Shard().cut("features", 12)
    ((3, 6), (0, 12))
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not (type(self.index) is int and type(self.count) is int and self.count >= 1):
            raise ConfigError(
                f"a shard must be two whole numbers; got {self.index!r}, {self.count!r}"
            )
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard index must be in [0, {self.count}); got {self.index}")

    @property
    def is_whole(self) -> bool:
        """Tell whether there is only one part."""
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

    def cut_padded(self, size: int) -> tuple[int, int, int]:
        """Return this part's range [first, last), and its length including padding."""
        part = -(-size // self.count)
        first = min(self.index * part, size)
        return first, min(first + part, size), part

    def cut_shared(self, name: str, size: int) -> tuple[int, int]:
        """As `cut`, but if there are more parts than items, several parts share an item.

        Raises
        ------
        ConfigError
            If neither divides the other.
        """
        if size >= self.count or self.count % size:
            return self.cut(name, size)
        first = self.index * size // self.count
        return first, first + 1


WHOLE = Shard()
