"""Scales of the keys and values in a quantized KV cache, by KV cache dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import to_numpy
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import ConfigError

__all__ = ["KVScales"]

_LEAST = np.finfo(np.float32).smallest_subnormal
_LARGEST = np.finfo(np.float32).max

Saved = tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]
"""Scales by KV cache dtype, and their sources."""


class KVScales:
    """The scales of a model's keys and values: (num_layers, 2, K) for each KV cache dtype.

    They are changed in place, so that captured graphs see the change.

    Parameters
    ----------
    xp : module
        Array module.
    num_layers, num_kv_heads : int

    Attributes
    ----------
    sources : dict of str to str
        Origin of the scales of each dtype; "" if they are not set. Unset scales are 1, which only
        e4m3 supports.
    """

    def __init__(self, xp: Any, num_layers: int, num_kv_heads: int) -> None:
        self._xp = xp
        # Rows are padded to whole 16-byte words: layers that share a plan need equal alignment.
        padded = -(-num_kv_heads // 4) * 4
        scales = xp.ones((len(KV_CODE_DTYPES), num_layers, 2, padded), np.float32)
        self._arrays = dict(zip(KV_CODE_DTYPES, scales[..., :num_kv_heads], strict=True))
        self.sources = dict.fromkeys(KV_CODE_DTYPES, "")

    def of_layer(self, index: int, num_heads: int | None = None) -> dict[str, tuple[Any, Any]]:
        """Return the scales (K,) of a layer's keys and values, by KV cache dtype.

        `num_heads`: K of this layer, if layers differ; by default the model's.
        """
        layers = {name: array[index, :, :num_heads] for name, array in self._arrays.items()}
        return {name: (keys, values) for name, (keys, values) in layers.items()}

    def of(self, kv_dtype: str) -> Any:
        """Return the scales of pages of dtype `kv_dtype`, (num_layers, 2, K)."""
        return self._arrays[kv_dtype]

    def set(
        self,
        scales: Any,
        kv_dtype: str,
        source: str,
        *,
        also_others: bool = True,
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        """Set the scales of pages of dtype `kv_dtype`. Existing pages are not converted.

        Parameters
        ----------
        scales : (num_layers, 2, K) array_like of float
            On the host.
        kv_dtype : str
            A name in KV_CODE_DTYPES.
        source : str
            Origin of the scales.
        also_others : bool
            Also set the scales of the other dtypes, so that all can represent the same maximum.
        heads : (int, int, int), optional
            (first, last, count): `scales` covers `count` heads, of which [first, last) are set.

        Raises
        ------
        ConfigError
            If a scale is not positive and finite, or the shape differs.
        """
        values = self._checked(scales, heads)
        for name in KV_CODE_DTYPES if also_others else (kv_dtype,):
            ratio = KV_CODE_DTYPES[kv_dtype].largest / KV_CODE_DTYPES[name].largest
            given = np.clip(values.astype(np.float64) * ratio, _LEAST, _LARGEST)
            self._arrays[name][...] = self._xp.asarray(given.astype(np.float32))
            self.sources[name] = source

    def saved(self) -> Saved:
        """Return copies of all scales on the host, and their sources."""
        arrays = {name: np.array(to_numpy(array)) for name, array in self._arrays.items()}
        return arrays, dict(self.sources)

    def restore(self, saved: Saved) -> None:
        """Set all scales to those of `saved`, of a model with the same shape."""
        arrays, sources = saved
        for name, array in arrays.items():
            self._arrays[name][...] = self._xp.asarray(array)
        self.sources = dict(sources)

    def set_peaks(self, peaks: Any, kv_dtype: str, source: str) -> None:
        """Set scales so that the largest value of `kv_dtype` represents `peaks`; 1 for a peak of 0.

        Raises
        ------
        ConfigError
            If a peak is infinite.
        """
        largest = np.float32(KV_CODE_DTYPES[kv_dtype].largest)
        scales = np.where(peaks > 0, peaks / largest, np.float32(1))
        self.set(scales, kv_dtype, source, also_others=False)

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
