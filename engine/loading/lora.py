"""LoRA adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter names the matrices of a Hugging Face checkpoint. They are found in the same table as the
checkpoint's own tensors, so that fused weights, tensor-parallel shards and reordered rows need no
code of their own: rows of B are placed as rows of the matrix are, columns of A as its columns.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.cache.pinned_memory import pinned_array, room, views
from engine.checks import shown
from engine.config import ModelConfig
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from engine.layers.lora import AdaptedProduct
from engine.loading._fields import Fields
from engine.loading.safetensors import SafetensorsFile
from engine.loading.tensor_reader import half_split
from engine.loading.weight_table import ADAPTABLE, Placement, matrix_placements, part_bounds
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
_MAX_GROUPS = 4  # of a pattern: the time to match "(a|b)(c|d)…" grows exponentially with them
_MAX_ALTERNATIVES = 64  # "|" in a pattern

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
    matrices : dict of str to (array, array, array or None)
        Weight name -> A (P·R, K), B (N, R) with the scale folded in, and the bias (N,) it adds.
    serial : int
        Number of this load: one path loaded twice may hold other values.
    """

    name: str
    path: Path
    rank: int
    matrices: dict[str, tuple[Array, Array, Array | None]]
    serial: int

    def pinned(self, xp: Any) -> LoraAdapter:
        """Return the adapter in page-locked memory: copies to a slot do not wait for the host.

        `xp` is `cupy`, with its current device.
        """
        triples = self.matrices.values()
        arrays = [array for triple in triples for array in triple if array is not None]
        copies = views(pinned_array(room(arrays), xp), arrays)
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = array
        left = iter(copies)
        matrices = {
            name: (next(left), next(left), None if bias is None else next(left))
            for name, (_, _, bias) in self.matrices.items()
        }
        return replace(self, matrices=matrices)


def adapter_bounds(
    config: ModelConfig, weights: Mapping[str, Weight], shard: Shard = WHOLE
) -> dict[str, tuple[int, ...]]:
    """Return the ends of the parts of every weight that an adapter may change, by name."""
    found = {}
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if name.startswith("layers.") and kind in ADAPTABLE:
            layer = int(name.split(".")[1])
            found[name] = part_bounds(kind, config, weight.shape[0], shard, layer)
    return found


def read_adapter(
    name: str,
    path: str | PathLike[str],
    config: ModelConfig,
    products: Mapping[str, AdaptedProduct],
    shard: Shard = WHOLE,
    biases: Mapping[str, Any] | None = None,
) -> LoraAdapter:
    """Read an adapter, and lay it out for the products of a shard.

    Parameters
    ----------
    name : str
        The adapter's name, for messages.
    path : str or path
        Its folder, or its file of safetensors.
    config : ModelConfig
        Configuration of the whole model.
    products : mapping of str to AdaptedProduct
        The products that an adapter may change, by weight name.
    shard : Shard
    biases : mapping of str to array, optional
        Biases of the base model by weight name, which an adapter trained with biases replaces.

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
    scales = _Scales(values, f"adapter {shown(name)}: {CONFIG_NAME}")
    tensors = SafetensorsFile(file, folder)
    reader = _Reader(name, config, products, shard, biases or {})
    modules = _modules(name, tensors)
    for module, parts in modules.items():
        reader.add(module, parts, scales)
    rank = max((len(parts["lora_A"]) for parts in modules.values() if "lora_A" in parts), default=0)
    return LoraAdapter(name, Path(path), rank, reader.matrices, next(_serial))


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
        self._alpha = fields.real("lora_alpha", -math.inf, math.inf, _PEFT_ALPHA)
        self._is_rslora = fields.flag("use_rslora", False)
        self._ranks = self._patterns("rank_pattern", (int,))
        self._alphas = self._patterns("alpha_pattern", (int, float))

    def of(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the factor on their product."""
        rank = int(_by_pattern(self._ranks, module, self._rank))
        alpha = _by_pattern(self._alphas, module, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def _patterns(self, key: str, kinds: tuple[type, ...]) -> list[tuple[re.Pattern[str], float]]:
        """Return the patterns under `key`, each with its number, which is of one of `kinds`."""
        found = self._fields.raw(key) or {}
        if not isinstance(found, dict) or not all(
            type(value) in kinds and value > 0 for value in found.values()
        ):
            wanted = "numbers" if float in kinds else "whole numbers"
            raise self._fields.error(key, f"a map from names of modules to {wanted} above 0")
        return [(self._compiled(key, pattern), value) for pattern, value in found.items()]

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        """Return an expression for a module whose name is the pattern or ends with it."""
        is_quick = (
            re.fullmatch(r"[\w.\-^$\\|()]*", pattern)
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


def _times(values: Array, factor: float) -> Array:
    """Return float32 values times a factor; the same array for 1."""
    return values if factor == 1.0 else values * np.float32(factor)


def _by_pattern(
    patterns: Iterable[tuple[re.Pattern[str], float]], module: str, default: float
) -> float:
    """Return the value of the first pattern that matches a module's name."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _modules(name: str, tensors: SafetensorsFile) -> dict[str, dict[str, Array]]:
    """Return the tensors of each module: "lora_A", "lora_B", and biases "lora_B.bias" and "bias".

    Raises
    ------
    WeightsError
        If a tensor belongs to no linear layer, is damaged, or an A lacks its B.
    """
    modules: dict[str, dict[str, Array]] = {}
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
        values = tensors.read(stored, 0, first).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise WeightsError(f"adapter {shown(name)}: tensor {shown(stored)} must be finite")
        parts = modules.setdefault(text_name(match["module"]), {})
        if parts.setdefault(part, values) is not values:
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
    """Lays out one adapter's modules. See `read_adapter`."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        products: Mapping[str, AdaptedProduct],
        shard: Shard,
        biases: Mapping[str, Any],
    ) -> None:
        self.matrices: dict[str, tuple[Array, Array, Array | None]] = {}
        self._name = name
        self._config = config
        self._products = products
        self._shard = shard
        self._biases = biases
        self._table = matrix_placements(config, family(config.model_type).names, shard)
        first = next(iter(products.values()))
        self._max_rank = first.rank
        self._dtype = first.a.dtype
        self._filled: dict[tuple[str, int], str] = {}  # (weight, part) -> the module of its A

    def add(self, module: str, parts: Mapping[str, Array], scales: _Scales) -> None:
        """Place the matrices and the bias of a module.

        Raises
        ------
        WeightsError
            If the model has no such module, or the shapes or the rank do not fit it.
        """
        forms = self._table.get(f"{module}.weight", [])
        if not forms:
            raise self._error(module, f"is no linear layer of a {self._config.model_type} model")
        a = parts.get("lora_A")
        b = parts.get("lora_B")
        out = next(iter(parts.values())).shape[0] if b is None else b.shape[0]
        shape, places = next((form for form in forms if form[0][0] == out), forms[0])
        scale = 1.0
        if a is not None and b is not None:
            rank, scale = scales.of(module)
            if rank > self._max_rank:
                raise self._error(module, f"has rank {rank}; max_lora_rank is {self._max_rank}")
            wanted = (rank, shape[1]), (shape[0], rank)
            if (a.shape, b.shape) != wanted:
                raise self._error(
                    module,
                    f"must have lora_A {wanted[0]} and lora_B {wanted[1]}, by its rank {rank} and "
                    f"the model's matrix {shape}; got {a.shape} and {b.shape}",
                )
            b = self._scaled(module, b, scale)
        bias = None
        if "lora_B.bias" in parts:
            bias = self._scaled(module, parts["lora_B.bias"], scale)
        whole = parts.get("bias")
        for one in (bias, whole):
            if one is not None and one.shape != shape[:1]:
                raise self._error(module, f"must have a bias {shape[:1]}; got {one.shape}")
        for place in places():
            self._place(module, place, a, b, bias, whole)

    def _place(
        self,
        module: str,
        place: Placement,
        a: Array | None,
        b: Array | None,
        bias: Array | None,
        whole: Array | None,
    ) -> None:
        """Copy the rows of `place` to their weight. `whole`: the bias that replaces the model's."""
        target = str(place.target)
        product = self._products.get(target)
        if product is None:
            kinds = "attention, dense MLPs and recurrent layers"
            raise self._error(module, f"must be a projection of {kinds}; others are not supported")
        rows: Any = slice(place.first, place.last)
        if self._config.interleaved_rope and place.rotated is not None:
            rows = half_split(np.arange(place.first, place.last), place.rotated)
        start = place.start + self._shift(place, product)
        own = slice(start, start + place.last - place.first)
        _, b_out, bias_out = self._matrices(target, product)
        if a is not None and b is not None:
            b_out[own, : b.shape[1]] = self._cast(module, _times(b[rows], place.factor))
            self._place_a(module, target, product, start, a, place.columns)
        # Ranks that sum their products hold the bias once.
        if place.columns is not None and self._shard.index > 0:
            return
        if bias is not None:
            bias_out[own] += self._cast(module, _times(bias[rows], place.factor))
        if whole is not None:
            base = self._biases.get(target)
            before = 0 if base is None else to_numpy(base)[own].astype(np.float32)
            bias_out[own] += self._cast(module, _times(whole[rows], place.factor) - before)

    def _place_a(
        self,
        module: str,
        target: str,
        product: AdaptedProduct,
        start: int,
        a: Array,
        columns: tuple[int, int] | None,
    ) -> None:
        """Copy A to the part of the weight that begins at or before row `start`."""
        part = sum(start >= end for end in product.bounds)
        other = self._filled.setdefault((target, part), module)
        if other != module:
            raise self._error(module, f"and {shown(other)} are parts of one matrix: not supported")
        given = a if columns is None else a[:, slice(*columns)]
        rank = product.rank
        rows = self.matrices[target][0][part * rank : part * rank + len(a)]
        rows[:, : given.shape[1]] = self._cast(module, given)

    def _shift(self, place: Placement, product: AdaptedProduct) -> int:
        """Return the number of padding rows before a placement in a padded MLP."""
        if place.target.kind != "gate_up":
            return 0
        layer = place.target.layer
        features = self._config.at(layer or 0).intermediate_size
        first, last = self._shard.cut("intermediate_size", features)
        return product.bounds[0] - (last - first) if place.start >= last - first else 0

    def _matrices(self, target: str, product: AdaptedProduct) -> tuple[Array, Array, Array]:
        """Return the arrays of a weight's adapter, zeros at first."""
        if target not in self.matrices:
            arrays = (product.a, product.b, product.bias)
            zeros = tuple(np.zeros(array.shape[1:], array.dtype) for array in arrays)
            self.matrices[target] = zeros[0], zeros[1], zeros[2]
        a, b, bias = self.matrices[target]
        assert bias is not None
        return a, b, bias

    def _scaled(self, module: str, values: Array, scale: float) -> Array:
        """Return values times the adapter's scale.

        Raises
        ------
        WeightsError
            If a product is too large for float32.
        """
        try:
            with np.errstate(over="raise"):
                scaled: Array = values * np.float32(scale)
        except FloatingPointError:
            raise self._error(
                module, f"must have values that float32 holds after scaling; got scale {scale:g}"
            ) from None
        return scaled

    def _cast(self, module: str, values: Array) -> Array:
        """Return values in the dtype of the activations.

        Raises
        ------
        WeightsError
            If a value does not fit.
        """
        with np.errstate(over="ignore"):
            cast: Array = values.astype(self._dtype)
        if self._dtype == np.float16 and not np.isfinite(cast).all():
            raise self._error(module, "must have values up to 65504 for dtype float16; got larger")
        return cast

    def _error(self, module: str, fault: str) -> WeightsError:
        return WeightsError(f"adapter {shown(self._name)}: module {shown(module)} {fault}")
