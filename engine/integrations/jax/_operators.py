"""Ops of the catalog as operations of JAX: tracing, lowering, vmap.

`define` makes one from a function that calls `engine.kernels` on arrays. JAX sees one primitive,
which is lowered to a call of an FFI target: on CPUs the function runs on NumPy arrays over XLA's
buffers, so the mirrors compute; on GPUs its launches are prepared and repeated (`_handlers.py`).

A call's attribute is a string that holds all that the handler needs, so a compiled program also
works in another process (a compilation cache, an exported program).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Struct
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from engine.errors import EngineError

__all__ = ["OPERATORS", "Operator", "Options", "Shapes", "decode", "define"]
__all__ += ["Struct", "like", "set_lowering", "spread", "target_name", "varying_alike"]

Options = tuple[tuple[str, Any], ...]
"""Keyword arguments that are fixed when a call is traced, sorted by name."""

Shapes = list[Struct]


def like(array: Any) -> Struct:
    """Return the struct of an array, or of a result with its shape and dtype."""
    return Struct(array.shape, array.dtype)


@dataclass(frozen=True)
class Operator:
    """An operation of JAX. Called with arrays (None for an absent one) and options.

    Attributes
    ----------
    name : str
    function : callable
        Takes the arrays, then the options by name; calls ops of the catalog and returns one new
        array or a tuple of them.
    results : callable
        Takes the arrays' ShapeDtypeStructs and the options; returns those of the results. The
        function's results may have another shape of that size.
    rows : tuple of int
        Arguments that accept a mapped axis of vmap. If others are mapped, the call is repeated.
    merges : bool
        Whether the mapped axis is merged with their first axis, and with that of the results;
        otherwise it is one more leading axis.
    aliases : mapping of int to int
        Argument that the function writes to -> result. The function does not return it.
    formula : callable, optional
        The function in jnp, for batches that cannot be folded; without it the call is repeated.
    pairs : tuple of int
        Arguments (..., 2) of int32 that the function takes as (...) of int64, little-endian.
    """

    name: str
    function: Callable[..., Any]
    results: Callable[..., Shapes]
    rows: tuple[int, ...] = ()
    merges: bool = False
    aliases: Mapping[int, int] = field(default_factory=dict)
    formula: Callable[..., Any] | None = None
    pairs: tuple[int, ...] = ()

    def __call__(self, *arrays: Any, **options: Any) -> tuple[jax.Array, ...]:
        """Return the results, always a tuple."""
        given = tuple(array is not None for array in arrays)
        results = _primitive.bind(
            *(array for array in varying_alike(arrays) if array is not None),
            name=self.name,
            given=given,
            options=tuple(sorted(options.items())),
        )
        return tuple(results)


OPERATORS: dict[str, Operator] = {}
"""Every operator, by name."""


def define(name: str, function: Callable[..., Any], results: Any, **rest: Any) -> Operator:
    """Define an operator; its FFI targets are registered when the package is imported."""
    operator = Operator(name, function, results, **rest)
    OPERATORS[name] = operator
    return operator


def target_name(name: str) -> str:
    """Return the FFI target of an operator, as it stands in a compiled program."""
    return f"engine.{name}"


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Within `shard_map`, let all arrays vary over the mesh axes that any of them varies over.

    So the gradient of an argument that the devices share, such as a weight, is summed over them.
    """
    axes = [frozenset() if a is None else jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*axes)
    return [
        a if a is None or own == union else jax.lax.pcast(a, tuple(union - own), to="varying")
        for a, own in zip(arrays, axes, strict=True)
    ]


def _encode(name: str, given: tuple[bool, ...], options: Options) -> str:
    return json.dumps([name, given, options])


@lru_cache(maxsize=4096)
def decode(config: bytes) -> tuple[Operator, tuple[bool, ...], dict[str, Any]]:
    """Return the operator, which of its arguments are given, and the options of a call."""
    name, given, options = json.loads(config)
    return OPERATORS[name], tuple(given), {key: _hashable(value) for key, value in options}


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def spread(given: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call: its arrays in order, None for the absent ones."""
    remaining = iter(arrays)
    return [next(remaining) if is_given else None for is_given in given]


def _shapes(arrays: Sequence[Any], name: str, given: tuple[bool, ...], options: Options) -> Shapes:
    structs = [like(a) for a in arrays]
    return OPERATORS[name].results(*spread(given, structs), **dict(options))


_primitive = Primitive("engine")
_primitive.multiple_results = True
_compiled = jax.jit(_primitive.bind, static_argnames=("name", "given", "options"))


def _run(*arrays: Any, **call: Any) -> Any:
    with jax.disable_jit(False):  # else the compiled call would only bind the primitive again
        return _compiled(*arrays, **call)


_primitive.def_impl(_run)


def _abstract(*arrays: Any, **call: Any) -> Any:
    return [_like(arrays[0], struct) for struct in _shapes(arrays, **call)]


def _like(array: Any, struct: Struct) -> Any:
    """Return the abstract result: within `shard_map` it varies over the axes that `array` does."""
    sharding = jax.NamedSharding(array.sharding.mesh, PartitionSpec(*(None for _ in struct.shape)))
    kind = array.manual_axis_type
    return jax.core.ShapedArray(
        struct.shape, struct.dtype, sharding=sharding, manual_axis_type=kind
    )


_primitive.def_abstract_eval(_abstract)


def _lowered(scratch_bytes: Callable[..., int]) -> Any:
    """Return the lowering rule of a platform: an FFI call with one more result for scratch."""

    def call(*arrays: Any, name: str, given: tuple[bool, ...], options: Options) -> Any:
        config = _encode(name, given, options)
        results = _shapes(arrays, name, given, options)
        operator = OPERATORS[name]
        position = spread(given, range(len(arrays)))
        size = scratch_bytes(config, arrays, results)
        scratch = [Struct((size,), jnp.uint8)] if size else []
        run = jax.ffi.ffi_call(
            target_name(name),
            [*results, *scratch],
            input_output_aliases={position[i]: j for i, j in operator.aliases.items()},
        )
        return run(*arrays, config=config)[: len(results)]

    return mlir.lower_fun(call, multiple_results=True)


def set_lowering(platform: str, scratch_bytes: Callable[..., int]) -> None:
    """Lower calls on `platform`.

    Parameters
    ----------
    platform : "cpu" or "cuda"
    scratch_bytes : callable
        Takes a call's attribute, its arrays and the structs of its results; returns the bytes of
        scratch memory that XLA has to provide.
    """
    mlir.register_lowering(_primitive, _lowered(scratch_bytes), platform=platform)


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], *, name: str, given: tuple[bool, ...], options: Any
) -> Any:
    operator = OPERATORS[name]
    call = {"name": name, "given": given, "options": options}
    index = [i for i, is_given in enumerate(given) if is_given]
    mapped = {i for i, dim in zip(index, dims, strict=True) if dim is not None}
    fronted = [
        a if dim is None else jnp.moveaxis(a, dim, 0) for a, dim in zip(arrays, dims, strict=True)
    ]
    size = next(a.shape[0] for a, dim in zip(fronted, dims, strict=True) if dim is not None)
    if mapped <= set(operator.rows) and size:  # merged with none, no axis would have its length
        rows = [
            _with_rows(a, size, i in mapped, operator.merges) if i in operator.rows else a
            for i, a in zip(index, fronted, strict=True)
        ]
        results = _primitive.bind(*rows, **call)
        if operator.merges:
            results = [_split(a, size) for a in results]
    else:
        results = _unfolded(fronted, [i in mapped for i in index], call)
    return results, (0,) * len(results)


def _with_rows(array: Any, size: int, is_mapped: bool, merges: bool) -> Any:
    if not is_mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(size * array.shape[1], *array.shape[2:]) if merges else array


def _split(array: Any, size: int) -> Any:
    return array.reshape(size, array.shape[0] // size, *array.shape[1:])


def _unfolded(arrays: Sequence[Any], is_mapped: Sequence[bool], call: dict[str, Any]) -> Any:
    """Call once per element of the mapped axis, in a loop of XLA, or use the formula."""
    operator = OPERATORS[call["name"]]
    if operator.formula is not None:
        given = partial(spread, call["given"])
        formula = partial(operator.formula, **dict(call["options"]))
        in_axes = [0 if m else None for m in is_mapped]
        return jax.vmap(lambda *a: formula(*given(a)), in_axes=in_axes)(*arrays)

    def once(elements: Sequence[Any]) -> Any:
        remaining = iter(elements)
        mixed = (next(remaining) if m else a for m, a in zip(is_mapped, arrays, strict=True))
        return _primitive.bind(*mixed, **call)

    return jax.lax.map(once, [a for m, a in zip(is_mapped, arrays, strict=True) if m])


def _no_derivative(*_: Any, name: str, **__: Any) -> Any:
    raise EngineError(f"{name}: has no derivative")


batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _no_derivative
