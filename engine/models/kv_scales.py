"""Scales of keys and values, for pages of codes: one set for each kind of codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import KV_CODE_DTYPES
from engine.errors import ConfigError

__all__ = ["KVScales"]

_LEAST = np.finfo(np.float32).smallest_subnormal
_LARGEST = np.finfo(np.float32).max


class KVScales:
    """The scales of a model's keys and values, (num_layers, 2, K) for each kind of codes.

    They are changed in place, so that captured graphs see it.

    Parameters
    ----------
    xp : module
        Of the arrays.
    num_layers, num_kv_heads : int

    Attributes
    ----------
    sources : dict of str to str
        Where the scales of each kind of codes come from; "": they are not set, which only e4m3 can
        do without. Its scales are then 1.
    """

    def __init__(self, xp: Any, num_layers: int, num_kv_heads: int) -> None:
        self._xp = xp
        # Rows are padded to whole 16-byte words: the layers of a plan must be aligned alike.
        padded = -(-num_kv_heads // 4) * 4
        scales = xp.ones((len(KV_CODE_DTYPES), num_layers, 2, padded), np.float32)
        self._arrays = dict(zip(KV_CODE_DTYPES, scales[..., :num_kv_heads], strict=True))
        self.sources = dict.fromkeys(KV_CODE_DTYPES, "")

    def of_layer(self, index: int) -> dict[str, tuple[Any, Any]]:
        """Return the scales (K,) of a layer's keys and values, by codes."""
        return {name: (array[index, 0], array[index, 1]) for name, array in self._arrays.items()}

    def of(self, codes: str) -> Any:
        """Return the scales of pages of these codes, (num_layers, 2, K)."""
        return self._arrays[codes]

    def set(
        self,
        scales: Any,
        codes: str,
        source: str,
        *,
        also_others: bool = True,
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        """Set the scales of pages of `codes`. Pages written before are not converted.

        Parameters
        ----------
        scales : (num_layers, 2, K) array_like of float
            On the host.
        codes : str
            A name of KV_CODE_DTYPES.
        source : str
            Where they come from.
        also_others : bool
            Give the other codes scales with the same largest numbers.
        heads : (int, int, int), optional
            First, last, count: `scales` are of this many heads, of which these have [first, last).

        Raises
        ------
        ConfigError
            Naming the layer of the first scale that is not positive and finite, or the shape.
        """
        values = self._checked(scales, heads)
        for name in KV_CODE_DTYPES if also_others else (codes,):
            ratio = KV_CODE_DTYPES[codes].largest / KV_CODE_DTYPES[name].largest  # 1 for `codes`
            given = np.clip(values.astype(np.float64) * ratio, _LEAST, _LARGEST)
            self._arrays[name][...] = self._xp.asarray(given.astype(np.float32))
            self.sources[name] = source

    def set_peaks(self, peaks: Any, codes: str, source: str) -> None:
        """Set the scales of `codes` so that the largest number is `peaks`; 1 where that is 0.

        Raises
        ------
        ConfigError
            If a peak is infinite.
        """
        largest = np.float32(KV_CODE_DTYPES[codes].largest)
        scales = np.where(peaks > 0, peaks / largest, np.float32(1))
        self.set(scales, codes, source, also_others=False)

    def _checked(
        self, scales: Any, heads: tuple[int, int, int] | None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        given = np.asarray(scales)
        wanted = next(iter(self._arrays.values())).shape
        first, last, count = heads or (0, wanted[2], wanted[2])
        wanted = *wanted[:2], count
        if given.shape != wanted or given.dtype.kind not in "fiu":
            raise ConfigError(
                f"kv_scales must be numbers of shape {wanted} (layers, k and v, "
                f"key/value heads); got {given.dtype} {given.shape}"
            )
        values = given.astype(np.float32)
        bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            layer, which, head = (int(i) for i in bad[0])
            raise ConfigError(
                f"{'kv'[which]}_scale of layer {layer}, head {head} must be positive and finite; "
                f"got {given[layer, which, head]!s}"
            )
        return values[..., first:last]
