"""Read a checkpoint's matrices, quantized or not, by module name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.quantized.awq import awq_shape, awq_storage, read_awq
from engine.loading.quantized.bitnet import bitnet_shape, read_bitnet
from engine.loading.quantized.compressed_tensors import (
    check_no_zero_points,
    int8_shape,
    packed_shape,
    read_int8,
    read_packed,
)
from engine.loading.quantized.config import QuantizationScheme
from engine.loading.quantized.fp8 import fp8_shape, read_fp8
from engine.loading.quantized.gguf import GGUF_FORMATS, read_gguf_rows
from engine.loading.quantized.gptq import gptq_shape, read_gptq
from engine.loading.quantized.mxfp4 import mxfp4_shape, read_mxfp4
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage
from engine.loading.quantized.tensors import ModuleTensors
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.weights import Format

__all__ = ["QuantizedCheckpoint", "read_rows"]

Array = np.ndarray[Any, Any]
_Safetensors = SafetensorsFile | SafetensorsDirectory
_Reader = Callable[[ModuleTensors, Storage, int, int, tuple[int, int] | None], QuantizedRows]
_Shape = Callable[[ModuleTensors, Storage], tuple[int, ...]]

_LAYOUTS: dict[str, tuple[_Shape, _Reader]] = {
    "packed": (packed_shape, read_packed),
    "int8": (int8_shape, read_int8),
    "fp8": (fp8_shape, read_fp8),
    "mxfp4": (mxfp4_shape, read_mxfp4),
    "gptq": (gptq_shape, read_gptq),
    "awq": (awq_shape, read_awq),
    "bitlinear": (bitnet_shape, read_bitnet),
    "autobitlinear": (bitnet_shape, read_bitnet),
}

# A module with one of these tensors is quantized.
_MARKS = ("weight_packed", "qweight", "weight_scale", "weight_scale_inv")
_MARK_DTYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_COMPANIONS = frozenset((
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    *("weight_g_idx", "weight_scale_inv", "weight_global_scale", "qweight", "qzeros", "scales"),
    *("g_idx", "input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
))  # fmt: skip
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")


def read_rows(
    checkpoint: _Safetensors,
    scheme: QuantizationScheme,
    module: str,
    first: int = 0,
    last: int | None = None,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows | None:
    """Read rows [first, last) of a module's matrix; None if the module is not quantized.

    Parameters
    ----------
    checkpoint : SafetensorsFile or SafetensorsDirectory
    scheme : QuantizationScheme
    module : str
        Module name, such as "model.layers.0.self_attn.q_proj".
    first, last : int
        Rows of the matrix (N, K), the transpose of GPTQ's and AWQ's layout; `last` None means N.
        Rows of all experts' matrices (E, N, K) are numbered across the experts.
    columns : (int, int), optional
        Range of columns [begin, end) to read, in whole groups of the format; must be all columns if
        the matrix has a permutation.

    Raises
    ------
    WeightsError
        If a tensor is missing, has the wrong shape or dtype, or holds invalid values; if the
        tensors contradict the configuration; or if `columns` cuts a group.
    """
    tensors = ModuleTensors(checkpoint, module)
    storage = _storage_of(tensors, scheme)
    if storage is None:
        return None
    shape_of, read = _LAYOUTS[storage.layout]
    num_rows = math.prod(shape_of(tensors, storage)[:-1])
    last = num_rows if last is None else last
    if not 0 <= first <= last <= num_rows:
        raise WeightsError(
            f"{checkpoint.path}: {shown(module)} has {num_rows} rows; got the range "
            f"[{first}, {last})"
        )
    return read(tensors, storage, first, last, columns)


def _is_quantized(tensors: ModuleTensors) -> bool:
    if any(tensors.has(kind) for kind in _MARKS):
        return True
    return tensors.has("weight") and tensors.dtype("weight") in _MARK_DTYPES


def _storage_of(tensors: ModuleTensors, scheme: QuantizationScheme | None) -> Storage | None:
    """Return the storage of a module; None if it is not quantized."""
    if not _is_quantized(tensors):
        return None
    storage = None if scheme is None else scheme.storage_of(tensors.module)
    if storage is None:
        raise WeightsError(
            f"{tensors.checkpoint.path}: the tensors of {shown(tensors.module)} are quantized, but "
            "the model's quantization_config does not say how, or says that they are not"
        )
    if storage.layout == "awq":
        return awq_storage(tensors, storage)
    if storage.symmetric and tensors.has("weight_zero_point"):
        check_no_zero_points(tensors, storage)
    return storage


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint that exposes quantized matrices under the names of plain ones.

    Attributes
    ----------
    checkpoint : SafetensorsFile, SafetensorsDirectory or GgufFile
    scheme : QuantizationScheme or None
        None for unquantized checkpoints and .gguf files.
    """

    checkpoint: _Safetensors | GgufFile
    scheme: QuantizationScheme | None = None

    @property
    def path(self) -> Path:
        """Path of the file, or of the index of a sharded checkpoint."""
        return self.checkpoint.path

    def names(self) -> Iterator[str]:
        """Yield the tensor names; a quantized module counts as one tensor, "<module>.weight".

        All experts of a layer in one tensor keep its name, "<module>". KV cache scales are left
        out.
        """
        if isinstance(self.checkpoint, GgufFile) or self.scheme is None:
            yield from self.checkpoint.names()
            return
        seen: set[str] = set()
        for name in self.checkpoint.names():
            module, _, kind = name.rpartition(".")
            if kind in _CACHE_SCALES:
                continue
            if kind in _COMPANIONS and _is_quantized(ModuleTensors(self.checkpoint, module)):
                weight = f"{module}.weight"
                is_fused = weight in self.checkpoint and len(self.checkpoint.shape(weight)) > 2
                name = module if is_fused else weight
            if name not in seen:
                seen.add(name)
                yield name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`; (N, K) for a matrix, however it is stored.

        Raises
        ------
        WeightsError
            See `read_rows`.
        """
        found = self._quantized(name)
        if found is None:
            return self.checkpoint.shape(name)
        tensors, storage = found
        return _LAYOUTS[storage.layout][0](tensors, storage)

    def format_of(self, name: str) -> Format | None:
        """Return the format of tensor `name`; None if it is not quantized."""
        if isinstance(self.checkpoint, GgufFile):
            tensor = self.checkpoint.tensors[name]
            return GGUF_FORMATS.get(tensor.format.name) if len(tensor.shape) > 1 else None
        found = self._quantized(name)
        return None if found is None else found[1].format

    def read_rows(
        self, name: str, first: int, last: int, columns: tuple[int, int] | None = None
    ) -> QuantizedRows | None:
        """Read rows of tensor `name`; None if it is not quantized. See `read_rows`."""
        if isinstance(self.checkpoint, GgufFile):
            return read_gguf_rows(self.checkpoint, name, first, last, columns)
        if self.scheme is None:
            return None
        module = name.removesuffix(".weight")
        return read_rows(self.checkpoint, self.scheme, module, first, last, columns)

    def read(
        self, name: str, first: int, last: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return rows of tensor `name` as numbers, in float32 if it is quantized."""
        if isinstance(self.checkpoint, GgufFile):
            return self.checkpoint.read(name, first, last, columns)
        rows = self.read_rows(name, first, last)
        if rows is None:
            return self.checkpoint.read(name, first, last, columns)
        return rows.numbers() if columns is None else rows.numbers()[:, slice(*columns)]

    def is_spare_bias(self, name: str) -> bool:
        """Tell whether `name` is an all-zero bias of a quantized matrix.

        Old GPTQ writers add one to every module, even if the model has no bias.
        """
        module, _, kind = name.rpartition(".")
        if isinstance(self.checkpoint, GgufFile) or self.scheme is None or kind != "bias":
            return False
        is_quantized = _is_quantized(ModuleTensors(self.checkpoint, module))
        return is_quantized and not self.checkpoint.view(name).any()

    def _quantized(self, name: str) -> tuple[ModuleTensors, Storage] | None:
        """Return a quantized matrix's tensors and storage; None for other tensors."""
        if isinstance(self.checkpoint, GgufFile) or self.scheme is None:
            return None
        module = name.removesuffix(".weight")
        if name == module and f"{name}.weight" not in self.checkpoint:
            return None
        tensors = ModuleTensors(self.checkpoint, module)
        storage = _storage_of(tensors, self.scheme)
        return None if storage is None else (tensors, storage)
