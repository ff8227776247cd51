"""Read the quantization_config of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.loading._fields import Fields
from engine.loading.quantized.config import (
    QuantizationScheme,
    format_for,
    group_size_of,
    warn_unread,
)
from engine.loading.quantized.module_rules import (
    EVERY_MODULE,
    ModuleRules,
    patterns_of,
    texts_of,
)
from engine.loading.quantized.storage import Storage
from engine.weights import FORMATS

__all__ = ["compressed_tensors_scheme"]

_MXFP4 = "mxfp4-pack-quantized"
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", _MXFP4)
_ACT_ORDERS = (None, False, True, "group", "dynamic", "weight", "static")

_MAX_GROUPS = 256
_CLASS = "Linear"  # target that selects every linear module by class

_TOKENS_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_TOKENS_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_PRESETS: dict[str, dict[str, Any]] = {
    "W8A16": {"weights": _INT8},
    "W4A16": {"weights": _INT4},
    "W4A16_ASYM": {"weights": {**_INT4, "symmetric": False}},
    "W8A8": {"weights": _INT8, "input_activations": _TOKENS_INT8},
    "INT8": {"weights": _INT8, "input_activations": _TOKENS_INT8},
    "FP8": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    },
    "FP8_DYNAMIC": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": _TOKENS_FP8,
    },
}


def compressed_tensors_scheme(fields: Fields) -> QuantizationScheme:
    """Return the scheme of a configuration with `config_groups`."""
    for key in ("transform_config", "sparsity_config"):
        given = fields.raw(key)
        if given and not (isinstance(given, Mapping) and given.get("format") == "dense"):
            raise fields.error(key, "absent, null or empty (it is not supported)")
    default = fields.text("format", "")
    if default and default not in (*_FORMATS, "mixed-precision", "dense"):
        raise fields.error("format", f"one of {', '.join(_FORMATS)}, mixed-precision")
    fields.child("config_groups")
    groups = fields.raw("config_groups")
    if len(groups) > _MAX_GROUPS:
        raise fields.error("config_groups", f"an object of at most {_MAX_GROUPS} groups")
    found = [
        group for name, value in groups.items() for group in _group(fields, name, value, default)
    ]
    found.sort(key=lambda group: group[0])
    ignore = texts_of(fields, "ignore", fields.raw("ignore"))
    return QuantizationScheme(
        "compressed-tensors",
        tuple((rules, storage) for _, rules, storage in found),
        _name_rules(fields, "ignore", ignore),
    )


def _group(
    fields: Fields, name: str, given: Any, default: str
) -> list[tuple[int, ModuleRules, Storage | None]]:
    """Return (rank, rules, storage) of a group; exact names rank before patterns, then classes."""
    short = name[:80]
    groups = fields.beside({short: given}, "config_groups")
    if isinstance(given, list):
        if name not in _PRESETS:
            raise groups.error(short, f"an object, or its name one of {', '.join(_PRESETS)}")
        groups = fields.beside({short: {**_PRESETS[name], "targets": given}}, "config_groups")
    group = groups.child(short)
    targets = texts_of(group, "targets", group.raw("targets"))
    storage = _storage(group, default) if group.has("weights") else None
    warn_unread(group)
    exact = _name_rules(group, "targets", tuple(one for one in targets if one != _CLASS))
    parts = [(0, ModuleRules(names=exact.names)), (1, ModuleRules(patterns=exact.patterns))]
    if _CLASS in targets:
        parts.append((2, EVERY_MODULE))
    return [(rank, rules, storage) for rank, rules in parts if rules]


def _name_rules(fields: Fields, key: str, texts: tuple[str, ...]) -> ModuleRules:
    """Return rules built from exact names and from patterns prefixed with "re:"."""
    return ModuleRules(
        names=frozenset(text for text in texts if not text.startswith("re:")),
        patterns=patterns_of(fields, key, (text[3:] for text in texts if text.startswith("re:"))),
    )


def _storage(group: Fields, default: str) -> Storage:
    """Return the storage of one group's modules."""
    stored = group.text("format", "" if default == "mixed-precision" else default)
    if stored not in _FORMATS:
        raise group.error("format", f"one of {', '.join(_FORMATS)}, here or for all groups")
    if group.has("output_activations"):
        raise group.error("output_activations", "absent or null (they are not quantized)")
    weights = group.child("weights")
    kind = weights.text("type", "int")
    if kind not in ("int", "float") or (kind == "float") > (stored != "pack-quantized"):
        raise weights.error("type", "int, or float with 8 bits in another format than packed")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "false (weights have stored scales)")
    act_order = weights.raw("actorder")
    if act_order not in _ACT_ORDERS:
        raise weights.error("actorder", "one of null, true, false, group, dynamic, weight, static")
    if stored == _MXFP4:
        return _mxfp4_storage(weights, _activations(group, "float", strict=False))
    if kind == "float":
        return _float_storage(weights, _activations(group, "float", strict=True))
    if stored == "float-quantized":
        raise weights.error("type", "float, since the format is float-quantized")
    is_packed = stored == "pack-quantized"
    return _int_storage(group, weights, is_packed, act_order in (True, "group", "dynamic"))


def _int_storage(group: Fields, weights: Fields, is_packed: bool, act_order: bool) -> Storage:
    bits = weights.integer("num_bits", 1, 64, 8)
    if bits not in (4, 8):
        raise weights.error("num_bits", "4 or 8")
    strategy, group_size = _strategy(weights, ("tensor", "channel", "group"))
    # Kernels with 8-bit activations need 8-bit weights with one scale per row.
    is_byte_rows = not is_packed and bits == 8 and strategy != "group"
    activations = _activations(group, "int", strict=is_byte_rows)
    symmetric = weights.flag("symmetric", True)
    if not symmetric and not is_packed:
        raise weights.error("symmetric", "true in a format without packing")
    form = format_for(weights, "group_size", bits, group_size, symmetric=symmetric)
    # Quantize both operands to 8 bits, if the configuration asks for it.
    if is_byte_rows and activations:
        form = FORMATS["int8"]
    return Storage(
        layout="packed" if is_packed else "int8",
        format=form,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        act_order=act_order,
        activations=activations,
    )


def _float_storage(weights: Fields, activations: str) -> Storage:
    weights_bits = weights.integer("num_bits", 1, 64, 8)
    if weights_bits != 8:
        raise weights.error("num_bits", "8 for floats")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "true for floats")
    strategy, _ = _strategy(weights, ("tensor", "channel", "block"))
    block = _block(weights) if strategy == "block" else None
    form = FORMATS["fp8" if block is None else "fp8_block"]
    return Storage("fp8", form, block=block, activations=activations)


def _mxfp4_storage(weights: Fields, activations: str) -> Storage:
    for key, wanted in (("num_bits", 4), ("type", "float"), ("group_size", 32)):
        if weights.raw(key) != wanted:
            raise weights.error(key, f"{wanted} in {_MXFP4}")
    return Storage("mxfp4", FORMATS["mxfp4"], 4, 32, activations=activations)


def _strategy(weights: Fields, known: tuple[str, ...]) -> tuple[str, int]:
    """Return the strategy, and the group size (0: one group per row)."""
    given = weights.raw("group_size")
    implied = "tensor" if given is None else "channel" if given == -1 else "group"
    strategy = weights.text("strategy", implied)
    if strategy not in known:
        raise weights.error("strategy", f"one of {', '.join(known)}")
    return strategy, group_size_of(weights, "group_size") if strategy == "group" else 0


def _block(weights: Fields) -> tuple[int, int]:
    """Return a block's (rows, columns)."""
    given = weights.raw("block_structure")
    if isinstance(given, str):
        sides = given.split("x")
        given = [int(side) if side.isdecimal() and len(side) < 9 else 0 for side in sides]
    return block_of(weights, "block_structure", given)


def block_of(fields: Fields, key: str, given: Any) -> tuple[int, int]:
    """Return a block's (rows, columns), multiples of 128, from a list of two integers.

    Raises
    ------
    ConfigError
        If `given` is anything else.
    """
    if (
        not isinstance(given, list)
        or len(given) != 2
        or any(type(side) is not int or not 0 < side <= 1 << 20 or side % 128 for side in given)
    ):
        raise fields.error(key, "two multiples of 128")
    return given[0], given[1]


def _activations(group: Fields, kind: str, *, strict: bool) -> str:
    """Return the quantization of the activations: "" (none), "dynamic" or "static".

    With `strict`, activations must have 8 bits and the weights' type.
    """
    if not group.has("input_activations"):
        return ""
    given = group.child("input_activations")
    bits = given.integer("num_bits", 1, 64, 8)
    if strict and (bits != 8 or given.text("type", "int") != kind):
        raise group.error("input_activations", f"absent, or of 8 bits and type {kind}")
    dynamic = given.raw("dynamic")
    if dynamic not in (None, False, True, "local"):
        raise given.error("dynamic", "true, false or local")
    return "dynamic" if dynamic else "static"
