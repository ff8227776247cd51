"""`ParkedDecoder`: what a sleeping model keeps to build its decoder again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import Device, to_numpy
from engine.loading.decoder import load_decoder
from engine.loading.download import ModelSource
from engine.loading.load_config import LoadConfig
from engine.models.decoder import Decoder
from engine.weights import Weight

__all__ = ["ParkedDecoder"]

_ARRAYS = ("data", "scales", "high", "super_scales", "permutation")


class ParkedDecoder:
    """The options of a decoder in one process, and copies of its weights on the host.

    Parameters
    ----------
    decoder : Decoder
        It is not kept: its memory becomes free with its last reference.
    keeps_weights : bool
        Whether to copy the weights; otherwise `build` reads the checkpoint again.

    Attributes
    ----------
    num_bytes : int
        Bytes of the copies.
    """

    def __init__(self, decoder: Decoder, *, keeps_weights: bool) -> None:
        self._local_config = decoder.config
        self._options: dict[str, Any] = {
            "deterministic": decoder.deterministic,
            "parts": decoder.parts,
            "stage": decoder.stage,
        }
        self._max_model_len = decoder.max_model_len
        self._kernels = decoder.kernels
        self._patterns = decoder.patterns
        self._kv_scales = decoder.kv_scales.saved()
        self._weights = _moved(decoder.weights, _on_host) if keeps_weights else None
        unique = {id(each): each for each in (self._weights or {}).values()}
        self.num_bytes = sum(weight.num_bytes for weight in unique.values())

    def build(
        self, source: ModelSource | None, config: ModelConfig, options: LoadConfig
    ) -> Decoder:
        """Return a decoder that computes what the parked one did.

        Parameters
        ----------
        source : ModelSource or None
            The model's files; read only if no weights were kept.
        config : ModelConfig
            Configuration of the model.
        options : LoadConfig
            The options that it was loaded with.

        Raises
        ------
        OutOfMemoryError, WeightsError
            If the device has no room, or the files cannot be read any more.
        """
        device = options.device
        device.activate()
        if self._weights is None:
            decoder = load_decoder(
                source,
                config,
                options,
                model_kernels=self._kernels,
                patterns=self._patterns,
            )
        else:
            decoder = Decoder(
                self._local_config,
                _moved(self._weights, lambda array: _on_device(array, device)),
                self._max_model_len,
                model_kernels=self._kernels,
                patterns=self._patterns,
                **self._options,
            )
        decoder.kv_scales.restore(self._kv_scales)
        return decoder


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    host = to_numpy(array)
    return host.copy() if host is array else host


def _on_device(array: np.ndarray[Any, Any], device: Device) -> Any:
    if not device.is_cuda:
        return array.copy()
    found = device.xp.empty(array.shape, array.dtype)
    found.set(np.ascontiguousarray(array))
    return found


def _moved(weights: Any, move: Any) -> dict[str, Weight]:
    """Return the weights with their arrays moved; those that are shared stay shared."""
    arrays: dict[int, Any] = {}
    known: dict[int, Weight] = {}

    def moved(weight: Weight) -> Weight:
        if id(weight) not in known:
            changes: dict[str, Any] = {"parts": tuple(map(moved, weight.parts))}
            for name in _ARRAYS:
                if (array := getattr(weight, name)) is not None:
                    if id(array) not in arrays:
                        arrays[id(array)] = move(array)
                    changes[name] = arrays[id(array)]
            known[id(weight)] = replace(weight, **changes)
        return known[id(weight)]

    return {name: moved(weight) for name, weight in weights.items()}
