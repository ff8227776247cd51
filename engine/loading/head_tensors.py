"""Checked access to a draft head's tensors; each is read exactly once."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import Device
from engine.dtypes import np_dtype
from engine.errors import WeightsError
from engine.loading.safetensors import open_safetensors

__all__ = ["HeadTensors"]

_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class HeadTensors:
    """The safetensors checkpoint of a draft head.

    Parameters
    ----------
    directory : str or path
    device : Device
    dtype : str
        Dtype of the arrays that `read` returns.

    Attributes
    ----------
    path : Path
        Path of the checkpoint, for messages.

    Raises
    ------
    WeightsError
        If the weights are missing or a file is damaged.
    """

    def __init__(self, directory: str | PathLike[str], device: Device, dtype: str) -> None:
        self._file = open_safetensors(directory)
        self.path = self._file.path
        self._device = device
        self._dtype = np_dtype(dtype)
        self._unread = set(self._file.names())

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def read(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return tensor `name`, which must have this shape.

        Raises
        ------
        WeightsError
            If it is missing, has another shape, does not hold floats, or overflows float16.
        """
        return self._device.xp.asarray(self._rows(name, shape))

    def integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return int64 tensor `name`, on the host."""
        self._check(name, shape)
        if (dtype := self._file.dtype(name)) != "I64":
            raise WeightsError(f"{self.path}: tensor {name!r} must be I64; got {dtype}")
        return self._file.view(name)

    def layer(self, prefix: str, config: ModelConfig, width: int) -> dict[str, Any]:
        """Return the weights of a `HeadLayer` under `prefix`; q, k and v have `width` columns."""
        c = config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = {
            "qkv": [count * c.head_dim for count in heads],
            "o": [c.hidden_size],
            "gate_up": [c.intermediate_size] * 2,
            "down": [c.hidden_size],
        }
        columns = {"qkv": width, "o": c.num_heads * c.head_dim, "gate_up": c.hidden_size}
        columns["down"] = c.intermediate_size
        has_bias = {"qkv": c.qkv_bias, "o": c.o_bias, "gate_up": c.mlp_bias, "down": c.mlp_bias}
        weights = {}
        for kind, names in _LINEARS.items():
            full = [f"{prefix}{name}" for name in names]
            weights[kind] = self._stacked(full, "weight", rows[kind], (columns[kind],))
            if has_bias[kind]:
                weights[f"{kind}_bias"] = self._stacked(full, "bias", rows[kind], ())
        weights["mlp_norm"] = self.read(
            f"{prefix}post_attention_layernorm.weight", (c.hidden_size,)
        )
        for name in ("q_norm", "k_norm") if c.qk_norm else ():
            weights[name] = self.read(f"{prefix}self_attn.{name}.weight", (c.head_dim,))
        return weights

    def ignore(self, *names: str, prefix: str | None = None) -> None:
        """Exempt `names`, and tensors whose names lack `prefix`, from the check in `finish`."""
        self._unread -= set(names)
        if prefix is not None:
            self._unread = {name for name in self._unread if name.startswith(prefix)}

    def finish(self, what: str) -> None:
        """Reject tensors that were neither read nor ignored.

        Raises
        ------
        WeightsError
            If any remain; the message names some of them.
        """
        if self._unread:
            names = ", ".join(sorted(self._unread)[:4])
            raise WeightsError(f"{self.path}: tensors that {what} does not have: {names}")

    def _stacked(
        self, names: list[str], kind: str, rows: list[int], columns: tuple[int, ...]
    ) -> Any:
        parts = [
            self._rows(f"{name}.{kind}", (count, *columns))
            for name, count in zip(names, rows, strict=True)
        ]
        return self._device.xp.asarray(np.concatenate(parts))

    def _rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a host copy of a tensor, converted to the dtype."""
        self._check(name, shape)
        with np.errstate(over="ignore"):
            array = np.array(self._file.read(name, 0, shape[0]), self._dtype)
        if self._dtype == np.float16 and not np.isfinite(array).all():
            raise WeightsError(
                f"{self.path}: tensor {name!r} must have finite values up to 65504 for dtype "
                "float16; it has others. Use bfloat16 or float32"
            )
        return array

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._file:
            raise WeightsError(f"{self.path}: a tensor is missing: {name}")
        if (got := self._file.shape(name)) != shape:
            raise WeightsError(
                f"{self.path}: tensor {name!r} must have shape {shape}, as the config says; got "
                f"{got}"
            )
        self._unread.discard(name)
