"""LoRA adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter names the matrices of a Hugging Face checkpoint. They are found in the same table as the
checkpoint's own tensors, so that fused weights, tensor-parallel shards and reordered rows need no
code of their own: rows of B are placed as rows of the matrix are, columns of A as its columns.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine import threads
from engine.cache.pinned_memory import room, views
from engine.checks import shown
from engine.config import ModelConfig
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from engine.layers.lora import AdaptedProduct
from engine.loading._fields import Fields
from engine.loading.safetensors import SafetensorsFile
from engine.loading.tensor_reader import half_split
from engine.loading.weight_table import (
    ADAPTABLE,
    OUTPUT_NAMES,
    Placement,
    matrix_placements,
    part_bounds,
)
from engine.model_files import is_present, read_json
from engine.models.registry import family
from engine.models.wrappers import text_name
from engine.weights import WHOLE, Shard, Weight

__all__ = ["LoraAdapter", "adapter_bounds", "read_adapter"]

Array = np.ndarray[Any, Any]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_DTYPES = ("F32", "F16", "BF16")
_MAX_RANK = 4096
_PEFT_ALPHA = 8.0  # lora_alpha of a configuration without one
_MAX_ALPHA = sys.float_info.max  # JSON's 1e400 is read as infinity
_MAX_GROUPS = 4  # groups in a pattern: the time to match "(a|b)(c|d)…" is exponential in them
_MAX_ALTERNATIVES = 64  # "|" in a pattern
_PIECE_BYTES = 16 << 20  # bytes of host memory that a thread allocates at once
_MAX_WORKERS = 4  # threads that read; more would compete with the engine's for the interpreter

_PREFIX = re.compile(r"^(base_model\.model\.)?")
_TENSOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|base_layer)(\.default)?\.(?P<part>weight|bias)"
)
_BIAS = re.compile(r"(?P<module>.+)\.bias")
# Key of adapter_config.json -> what an adapter that sets it would need.
_UNSUPPORTED = {
    "use_dora": "DoRA's magnitudes",
    "fan_in_fan_out": "transposed matrices",
    "modules_to_save": "weights beside the adapter's",
    "layer_replication": "repeated layers",
    "megatron_config": "Megatron's layers",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "matrices outside of linear layers",
    "use_qalora": "pooled inputs",
    "alora_invocation_tokens": "activation by a token",
}
# Values of init_lora_weights that subtract the first A and B from the model's own matrices.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_serial = itertools.count(1)


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter in host memory, laid out as its slot on the device is.

    Attributes
    ----------
    name : str
    path : Path
    rank : int
        Largest rank of its matrices.
    matrices : mapping of str to (array, array, array or None)
        Weight name -> A (P·R, K), B (N, R) with the scale folded in, and the bias (N,) it adds.
    serial : int
        Number of this load: one path loaded twice may hold other values.
    """

    name: str
    path: Path
    rank: int
    matrices: Mapping[str, tuple[Array, Array, Array | None]]
    serial: int


def adapter_bounds(
    config: ModelConfig, weights: Mapping[str, Weight], shard: Shard = WHOLE
) -> dict[str, tuple[int, ...]]:
    """Return the ends of the parts of every weight that an adapter may change, by name.

    Layers have numbers of the shard's stage, as in `weights`; `config` is the whole model's.
    """
    found = {}
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if name.startswith("layers.") and kind in ADAPTABLE:
            layer = shard.stage.first + int(name.split(".")[1])
            found[name] = part_bounds(kind, config, weight.shape[0], shard, layer)
    return found


def read_adapter(
    name: str,
    path: str | PathLike[str],
    config: ModelConfig,
    products: Mapping[str, AdaptedProduct],
    shard: Shard = WHOLE,
    biases: Mapping[str, Any] | None = None,
    allocate: Callable[[int], Array] | None = None,
) -> LoraAdapter:
    """Read an adapter, and lay it out for the products of a shard.

    A pipeline stage checks the modules of its own layers, and of no layer; the other stages check
    the rest. Several threads allocate memory and convert the matrices.

    Parameters
    ----------
    name : str
        The adapter's name, for messages.
    path : str or path
        Its folder, or its file of safetensors.
    config : ModelConfig
        Configuration of the whole model.
    products : mapping of str to AdaptedProduct
        The products that an adapter may change, by weight name in the shard's stage.
    shard : Shard
    biases : mapping of str to array, optional
        Biases of the base model by weight name, which an adapter trained with biases replaces.
    allocate : callable, optional
        ``allocate(num_bytes)`` returns memory for matrices, an array of uint8; called from any
        thread. By default it is ordinary memory.

    Raises
    ------
    ConfigError, WeightsError
        If the files cannot be read, need what is not supported, or do not fit the model; the
        message names the adapter and the module.
    """
    folder = Path(path)
    file = folder / WEIGHTS_NAME
    if folder.suffix == ".safetensors":
        file = folder
        folder = folder.parent
    if not is_present(folder / CONFIG_NAME):
        raise ConfigError(
            f"adapter {shown(name)}: {folder} must be a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}, as peft saves them"
        )
    values = read_json(folder / CONFIG_NAME, root=folder)
    if any(one.layout.transposed for one in family(config.model_type).names):
        values = {**values, "fan_in_fan_out": None}  # says so of the base model: A and B are not
    scales = _Scales(values, f"adapter {shown(name)}: {CONFIG_NAME}")
    tensors = SafetensorsFile(file, folder)
    reader = _Reader(name, config, products, shard, biases or {})
    modules = _modules(name, tensors)
    for module, parts in modules.items():
        reader.add(module, parts, scales)
    ranks = (parts["lora_A"].shape[0] for parts in modules.values() if "lora_A" in parts)
    return LoraAdapter(
        name, Path(path), max(ranks, default=0), reader.read(allocate or _memory), next(_serial)
    )


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of the file, in the file's dtype.

    Attributes
    ----------
    name : str
    module : str
        Its module as the adapter calls it: a multimodal model's, for an adapter trained on one.
    stored : array
    """

    name: str
    module: str
    stored: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape: tuple[int, ...] = self.stored.shape
        return shape

    def values(self, adapter: str) -> Array:
        """Return its values in float32.

        Raises
        ------
        WeightsError
            If one is not finite.
        """
        values = self.stored.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise WeightsError(
                f"adapter {shown(adapter)}: tensor {shown(self.name)} must be finite"
            )
        return values


class _Scales:
    """Ranks and scales that an adapter_config.json declares.

    Raises
    ------
    ConfigError
        If the adapter is no LoRA, or needs what is not supported.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        fields = Fields(values, where)
        if fields.text("peft_type", "LORA") != "LORA":
            raise fields.error("peft_type", "'LORA'")
        for key, what in _UNSUPPORTED.items():
            if values.get(key):
                raise fields.error(key, f"left out ({what} are not supported)")
        if str(values.get("init_lora_weights")).startswith(_CHANGES_BASE):
            raise fields.error(
                "init_lora_weights",
                "true, as peft writes it with path_initial_model_for_weight_conversion (this "
                "initialization has changed the base model's matrices too)",
            )
        self._fields = fields
        self._rank = fields.integer("r", 1, _MAX_RANK)
        self._alpha = fields.real("lora_alpha", -_MAX_ALPHA, _MAX_ALPHA, _PEFT_ALPHA)
        self._is_rslora = fields.flag("use_rslora", False)
        self._ranks = self._patterns("rank_pattern", (int,))
        self._alphas = self._patterns("alpha_pattern", (int, float))

    def of(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the factor on their product.

        `module` is the adapter's own name for it, which peft's patterns are for.
        """
        rank = int(_by_pattern(self._ranks, module, self._rank))
        alpha = _by_pattern(self._alphas, module, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def _patterns(self, key: str, kinds: tuple[type, ...]) -> list[tuple[re.Pattern[str], float]]:
        """Return the patterns under `key`, each with its number, which is of one of `kinds`."""
        found = self._fields.raw(key) or {}
        if not isinstance(found, dict) or not all(
            type(value) in kinds and 0 < value <= _MAX_ALPHA for value in found.values()
        ):
            wanted = "numbers" if float in kinds else "whole numbers"
            raise self._fields.error(key, f"a map from names of modules to {wanted} above 0")
        return [(self._compiled(key, pattern), value) for pattern, value in found.items()]

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        """Return an expression for a module whose name is the pattern or ends with it."""
        is_quick = (
            re.fullmatch(r"[\w.\-^$\\|()\[\]]*", pattern)
            and pattern.count("(") <= _MAX_GROUPS
            and pattern.count("|") <= _MAX_ALTERNATIVES
        )
        try:
            if is_quick:
                return re.compile(rf"(?:.*\.)?(?:{pattern})$")
        except re.error:
            pass  # a single bracket, for example
        raise self._fields.error(
            key,
            f"a map from names of modules, or expressions of at most {_MAX_GROUPS} groups without "
            f"repetition, to numbers ({shown(pattern)} is none)",
        )


def _memory(num_bytes: int) -> Array:
    return np.empty(num_bytes, np.uint8)


def _times(values: Array, factor: float) -> Array:
    """Return float32 values times a factor; the same array for 1."""
    return values if factor == 1.0 else values * np.float32(factor)


def _by_pattern(
    patterns: Iterable[tuple[re.Pattern[str], float]], module: str, default: float
) -> float:
    """Return the value of the first pattern that matches a module's name."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _modules(name: str, tensors: SafetensorsFile) -> dict[str, dict[str, _Tensor]]:
    """Return the tensors of each module: "lora_A", "lora_B", and biases "lora_B.bias" and "bias".

    Raises
    ------
    WeightsError
        If a tensor belongs to no linear layer, has another dtype, or an A lacks its B.
    """
    modules: dict[str, dict[str, _Tensor]] = {}
    for stored in tensors.names():
        own = _PREFIX.sub("", stored, count=1)
        match = _TENSOR.fullmatch(own)
        if match is not None:
            kind = match["kind"]
            part = kind if match["part"] == "weight" else f"{kind}.bias".removeprefix("base_layer.")
        elif (match := _BIAS.fullmatch(own)) is not None:
            part = "bias"
        else:
            part = ""
        if match is None or part in ("base_layer", "lora_A.bias"):
            raise WeightsError(
                f"adapter {shown(name)}: tensor {shown(stored)} must be the lora_A, lora_B or bias "
                "of a linear layer; other weights are not supported"
            )
        if (dtype := tensors.dtype(stored)) not in _DTYPES:
            raise WeightsError(
                f"adapter {shown(name)}: tensor {shown(stored)} must be one of "
                f"{', '.join(_DTYPES)}; got {dtype}"
            )
        first, *_ = tensors.shape(stored) or (1,)
        tensor = _Tensor(stored, match["module"], tensors.read(stored, 0, first))
        parts = modules.setdefault(text_name(match["module"]), {})
        if parts.setdefault(part, tensor) is not tensor:
            raise WeightsError(
                f"adapter {shown(name)}: tensor {shown(stored)} must be the only {part} of its "
                "module; got another one"
            )
    for module, parts in modules.items():
        if ("lora_A" in parts) != ("lora_B" in parts):
            has, lacks = sorted(("lora_A", "lora_B"), key=parts.__contains__, reverse=True)
            raise WeightsError(
                f"adapter {shown(name)}: module {shown(module)} must have {lacks} beside {has}"
            )
    if not modules:
        raise WeightsError(f"adapter {shown(name)}: {tensors.path} must hold tensors; got none")
    return modules


class _Reader:
    """Lays out one adapter's modules: `add` checks each of them, `read` reads all.

    See `read_adapter`.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        products: Mapping[str, AdaptedProduct],
        shard: Shard,
        biases: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._config = config
        self._products = products
        self._shard = shard
        self._biases = biases
        table = matrix_placements(config, family(config.model_type).names, shard)
        # Adapters trained on a model without its output layer, as for embeddings, have names
        # without the "model." in front.
        self._table = {name.partition(".")[2]: forms for name, forms in table.items()} | table
        first = next(iter(products.values()))
        self._max_rank = first.rank
        self._dtype = first.a.dtype
        self._filled: dict[tuple[str, int], str] = {}  # (weight, part) -> the module of its A
        self._targets: dict[str, list[Any]] = {}  # weight -> a slot's arrays for it
        self._matrices: dict[str, tuple[Array, Array, Array]] = {}
        # Arguments of `_read`. (Partials of it would be a cycle, and keep the slots' memory.)
        self._modules: list[tuple[str, Mapping[str, _Tensor], float, list[Placement]]] = []

    def add(self, module: str, parts: Mapping[str, _Tensor], scales: _Scales) -> None:
        """Check the shapes and the places of a module.

        Raises
        ------
        WeightsError
            If the model has no such module, or the shapes or the rank do not fit it.
        """
        forms = self._table.get(f"{module}.weight", [])
        if not forms and f"{module}.weight" in OUTPUT_NAMES:
            raise self._unsupported(module)
        if not forms:
            raise self._error(module, f"is no linear layer of a {self._config.model_type} model")
        a = parts.get("lora_A")
        b = parts.get("lora_B")
        out = next(iter(parts.values())).shape[0] if b is None else b.shape[0]
        shape, make_places = next((form for form in forms if form[0][0] == out), forms[0])
        scale = 1.0
        if a is not None and b is not None:
            rank, scale = scales.of(a.module)
            if rank > self._max_rank:
                raise self._error(module, f"has rank {rank}; max_lora_rank is {self._max_rank}")
            wanted = (rank, shape[1]), (shape[0], rank)
            if (a.shape, b.shape) != wanted:
                raise self._error(
                    module,
                    f"must have lora_A {wanted[0]} and lora_B {wanted[1]}, by its rank {rank} and "
                    f"the model's matrix {shape}; got {a.shape} and {b.shape}",
                )
        for one in (parts.get("lora_B.bias"), parts.get("bias")):
            if one is not None and one.shape != shape[:1]:
                raise self._error(module, f"must have a bias {shape[:1]}; got {one.shape}")
        stage = self._shard.stage
        places = [place for place in make_places() if stage.has(str(place.target), is_tied=True)]
        for place in places:
            self._check(module, place, has_a=a is not None)
        self._modules.append((module, parts, scale, places))

    def read(self, allocate: Callable[[int], Array]) -> dict[str, tuple[Array, Array, Array]]:
        """Read all modules; return the matrices of each weight in memory of `allocate`.

        Raises
        ------
        WeightsError
            If a value is not finite, or too large.
        """
        count = min(_MAX_WORKERS, threads.available().count)
        with ThreadPoolExecutor(count) as pool:
            for made in pool.map(partial(self._allocated, allocate), self._pieces()):
                self._matrices |= made
            list(pool.map(self._read_some, range(count), [count] * count))
        return self._matrices

    def _check(self, module: str, place: Placement, *, has_a: bool) -> None:
        """Check that a weight has room for a module."""
        target = self._target(place)
        product = self._products.get(target)
        if product is None:
            raise self._unsupported(module)
        if target not in self._targets:
            self._targets[target] = [each[0] for each in (product.a, product.b, product.bias)]
        if has_a:
            key = target, self._part(place, product)
            if (other := self._filled.setdefault(key, module)) != module:
                raise self._error(
                    module, f"and {shown(other)} are parts of one matrix: not supported"
                )

    def _read_some(self, first: int, step: int) -> None:
        for arguments in self._modules[first::step]:
            self._read(*arguments)

    def _read(
        self, module: str, parts: Mapping[str, _Tensor], scale: float, places: Iterable[Placement]
    ) -> None:
        """Read a module to the rows of its places."""
        values = {part: tensor.values(self._name) for part, tensor in parts.items()}
        for part in ("lora_B", "lora_B.bias"):
            if part in values:
                values[part] = self._scaled(module, values[part], scale)
        for place in places:
            self._write(module, place, values)

    def _write(self, module: str, place: Placement, values: Mapping[str, Array]) -> None:
        """Write the rows of `place` to their weight."""
        target = self._target(place)
        product = self._products[target]
        rows: Any = slice(place.first, place.last)
        if self._config.interleaved_rope and place.rotated is not None:
            rows = half_split(np.arange(place.first, place.last), place.rotated)
        start = self._start(place, product)
        own = slice(start, start + place.last - place.first)
        a_out, b_out, bias_out = self._matrices[target]
        if "lora_A" in values:
            b = _times(values["lora_B"][rows], place.factor)
            self._store(module, b_out[own, : b.shape[1]], b)
            a = values["lora_A"]
            a = a if place.columns is None else a[:, slice(*place.columns)]
            first = self._part(place, product) * product.rank
            self._store(module, a_out[first : first + len(a), : a.shape[1]], a)
        # Ranks that sum their products hold the bias once.
        if place.columns is not None and self._shard.index > 0:
            return
        if (bias := values.get("lora_B.bias")) is not None:
            bias_out[own] += self._cast(module, _times(bias[rows], place.factor))
        if (whole := values.get("bias")) is not None:  # it replaces the model's
            base = self._biases.get(target)
            before = 0 if base is None else to_numpy(base)[own].astype(np.float32)
            bias_out[own] += self._cast(module, _times(whole[rows], place.factor) - before)

    def _target(self, place: Placement) -> str:
        """Return the name of a placement's weight in this stage."""
        return self._shard.stage.local_name(str(place.target))

    def _start(self, place: Placement, product: AdaptedProduct) -> int:
        """Return the first row of a placement in its weight, after the padding of an MLP."""
        if place.target.kind != "gate_up":
            return place.start
        layer = place.target.layer
        features = self._config.at(layer or 0).intermediate_size
        first, last = self._shard.cut("intermediate_size", features)
        is_second = place.start >= last - first
        return place.start + (product.bounds[0] - (last - first) if is_second else 0)

    def _part(self, place: Placement, product: AdaptedProduct) -> int:
        """Return the part of the weight that a placement begins in, whose A is the module's."""
        start = self._start(place, product)
        return sum(start >= end for end in product.bounds)

    def _pieces(self) -> list[list[str]]:
        """Return the names of the weights in pieces of `_PIECE_BYTES` or more."""
        pieces: list[list[str]] = []
        num_bytes = _PIECE_BYTES
        for name, arrays in self._targets.items():
            if num_bytes >= _PIECE_BYTES:
                pieces.append([])
                num_bytes = 0
            pieces[-1].append(name)
            num_bytes += room(arrays)
        return pieces

    def _allocated(
        self, allocate: Callable[[int], Array], names: Iterable[str]
    ) -> dict[str, tuple[Array, Array, Array]]:
        """Return zeros for the matrices of weights, side by side."""
        arrays = [array for name in names for array in self._targets[name]]
        memory = allocate(room(arrays))
        memory.fill(0)
        made = iter(views(memory, arrays))
        return dict(zip(names, zip(made, made, made, strict=True), strict=True))

    def _scaled(self, module: str, values: Array, scale: float) -> Array:
        """Return values times the adapter's scale.

        Raises
        ------
        WeightsError
            If a product is too large for float32.
        """
        try:
            with np.errstate(over="raise"):
                return _times(values, scale)
        except FloatingPointError:
            raise self._error(
                module, f"must have values that float32 holds after scaling; got scale {scale:g}"
            ) from None

    def _cast(self, module: str, values: Array) -> Array:
        """Return values in the dtype of the activations; see `_store`."""
        cast = np.empty(values.shape, self._dtype)
        self._store(module, cast, values)
        return cast

    def _store(self, module: str, target: Array, values: Array) -> None:
        """Write values to an array in the dtype of the activations.

        Raises
        ------
        WeightsError
            If a value does not fit.
        """
        with np.errstate(over="ignore"):
            target[...] = values
        if self._dtype == np.float16 and not np.isfinite(target).all():
            raise self._error(module, "must have values up to 65504 for dtype float16; got larger")

    def _unsupported(self, module: str) -> WeightsError:
        kinds = "attention, dense MLPs and recurrent layers"
        return self._error(module, f"must be a projection of {kinds}; others are not supported")

    def _error(self, module: str, fault: str) -> WeightsError:
        return WeightsError(f"adapter {shown(self._name)}: module {shown(module)} {fault}")
