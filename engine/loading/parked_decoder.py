"""`ParkedDecoder`: what a sleeping model keeps to build its decoder again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.checks import shown
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.decoder import load_decoder
from engine.loading.download import ModelSource
from engine.loading.host_copies import HostCopies
from engine.loading.load_config import LoadConfig
from engine.models.decoder import Decoder
from engine.weights import Weight

__all__ = ["ParkedDecoder", "check_level"]

_ARRAYS = ("data", "scales", "high", "super_scales", "permutation")


def check_level(level: Any) -> None:
    """Check the level of a sleep.

    Raises
    ------
    ConfigError
        If it is neither 1 nor 2.
    """
    if isinstance(level, bool) or level not in (1, 2):
        raise ConfigError(f"level must be 1 or 2; got {shown(level)}")


class ParkedDecoder:
    """The options of a decoder in one process, and copies of its weights on the host.

    Adapters are on the host already; `build` writes them to their slots again.

    Parameters
    ----------
    decoder : Decoder
        It is not kept: its memory becomes free with its last reference.
    host : HostCopies or None
        Where the weights are copied to; None: `build` reads the checkpoint again.

    Attributes
    ----------
    num_bytes : int
        Bytes of the copies.
    """

    def __init__(self, decoder: Decoder, host: HostCopies | None) -> None:
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
        self._adapters = None if decoder.adapters is None else decoder.adapters.parked()
        self._host = host
        self._weights = None if host is None else _moved(decoder.weights, host.take)
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
        options.device.activate()
        if self._host is None or self._weights is None:
            decoder = load_decoder(
                source,
                config,
                options,
                model_kernels=self._kernels,
                patterns=self._patterns,
            )
        else:
            try:
                decoder = Decoder(
                    self._local_config,
                    _moved(self._weights, self._host.restore),
                    self._max_model_len,
                    model_kernels=self._kernels,
                    patterns=self._patterns,
                    adapters=None if self._adapters is None else self._adapters.parked(),
                    **self._options,
                )
            finally:
                self._host.wait()  # the layers are made while the weights are copied
        if decoder.adapters is not None and self._adapters is not None:
            decoder.adapters.restore(self._adapters)
        decoder.kv_scales.restore(self._kv_scales)
        return decoder


def _moved(
    weights: Mapping[str, Weight], move: Callable[[Sequence[Any]], Sequence[Any]]
) -> dict[str, Weight]:
    """Return the weights with their arrays moved; those that are shared stay shared."""
    arrays = {id(array): array for weight in weights.values() for array in _arrays(weight)}
    moved = dict(zip(arrays, move(list(arrays.values())), strict=True))
    known: dict[int, Weight] = {}
    return {name: _replaced(weight, moved, known) for name, weight in weights.items()}


def _replaced(weight: Weight, moved: Mapping[int, Any], known: dict[int, Weight]) -> Weight:
    """Return a weight with the array `moved[id(array)]` in place of each of its arrays.

    `known`: the result for each weight, by its id, so that shared parts stay shared. (A nested
    function that calls itself would keep the arrays until the next garbage collection.)
    """
    if id(weight) not in known:
        parts = tuple(_replaced(part, moved, known) for part in weight.parts)
        changes: dict[str, Any] = {"parts": parts}
        for name in _ARRAYS:
            if (array := getattr(weight, name)) is not None:
                changes[name] = moved[id(array)]
        known[id(weight)] = replace(weight, **changes)
    return known[id(weight)]


def _arrays(weight: Weight) -> Iterator[Any]:
    for part in weight.parts:
        yield from _arrays(part)
    for name in _ARRAYS:
        if (array := getattr(weight, name)) is not None:
            yield array
