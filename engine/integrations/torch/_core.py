"""Ops of the catalog as operators of `torch.library`: registration, and calls on tensors.

`define` registers one: a function that calls `engine.kernels` on arrays becomes
`torch.ops.engine.<name>`. On CPU tensors it runs on NumPy arrays, so the mirrors compute. On CUDA
tensors its launches are prepared once per layout of the arguments (`kernels/_prepared_call.py`) and
repeated on the current stream; results and scratch come from torch's allocator, as any tensor does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.errors import ContractError
from engine.integrations.torch._tensors import array_of, layout_of, tensor_of, torch_dtype
from engine.kernels._prepared_call import ALIGNMENT, PreparedCall, constant, prepare

__all__ = ["define", "fold_rows", "int_constant", "looped", "no_gradient", "to_autocast_dtype"]

Function = Callable[..., Any]

_library = torch.library.Library("engine", "DEF")
_local = threading.local()
_MAX_CALLS = 4096  # prepared calls a thread keeps
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from CPU builds


def define(
    schema: str,
    function: Function,
    fake: Function,
    *,
    backward: Function | None = None,
    setup_context: Function | None = None,
    vmap: Function | None = None,
) -> Any:
    """Register an operator and return its overload.

    Parameters
    ----------
    schema : str
        "name(Tensor x, ...) -> Tensor", in torch's schema language.
    function : callable
        Called with the operator's arguments, arrays of the catalog in place of tensors. It calls
        ops of the catalog, and returns new arrays: one, or a tuple as in the schema.
    fake : callable
        Called with the operator's arguments; returns empty tensors like the results.
    backward, setup_context : callable, optional
        See `torch.library.register_autograd`. Without `backward` a derivative is an error that
        names the operator.
    vmap : callable, optional
        See `torch.library.register_vmap`.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _on_cpu(function), "CPU")
    _library.impl(name, _on_cuda(name, function), "CUDA")
    qualified = f"engine::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is None:
        backward = no_gradient(name)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)
    return getattr(torch.ops.engine, name).default


def no_gradient(name: str) -> Function:
    """Return the backward function of an operator that has no derivative: it raises."""

    def backward(*_: Any) -> Any:
        raise NotImplementedError(f"engine::{name} has no derivative")

    return backward


def int_constant(values: tuple[int, ...], like: Any) -> Any:
    """Return int32 `values` on the device of the array `like`; for use in `define`'s function."""
    array = np.array(values, np.int32)
    return array if isinstance(like, np.ndarray) else constant(array)


def fold_rows(name: str, *rows: int) -> Function:
    """Return a vmap rule: the arguments `rows` take the mapped axis as a leading axis.

    If another argument is mapped too, the operator runs once per element of the axis.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        if any(dim is not None and i not in rows for i, dim in enumerate(in_dims)):
            return looped(name)(info, in_dims, *args)
        ready = list(args)
        for i in rows:
            if isinstance(args[i], torch.Tensor):
                ready[i] = _leading(args[i], in_dims[i], info.batch_size)
        result = getattr(torch.ops.engine, name)(*ready)
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return vmap


def looped(name: str) -> Function:
    """Return a vmap rule that runs the operator once per element of the mapped axis."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        operator = getattr(torch.ops.engine, name)
        results = []
        for index in range(info.batch_size):
            taken = (
                a if dim is None else a.select(dim, index)
                for a, dim in zip(args, in_dims, strict=True)
            )
            results.append(operator(*taken))
        if isinstance(results[0], tuple):
            stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
            return stacked, (0,) * len(stacked)
        return torch.stack(results), 0

    return vmap


def _leading(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)


def to_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point tensors to autocast's dtype where autocast is enabled."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def _on_cpu(function: Function) -> Function:
    def run(*args: Any) -> Any:
        arrays = [array_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        result = function(*arrays)
        if isinstance(result, tuple):
            return tuple(tensor_of(array) for array in result)
        return tensor_of(result)

    return run


def _on_cuda(name: str, function: Function) -> Function:
    def run(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        index = tensors[0].get_device()
        if index == torch.cuda.current_device():
            return _launch(name, function, args, tensors, index)
        with torch.cuda.device(index):
            return _launch(name, function, args, tensors, index)

    return run


def _launch(
    name: str, function: Function, args: tuple[Any, ...], tensors: list[Any], index: int
) -> Any:
    """Run the operator on the current device `index`; its call is prepared if it is new."""
    key: tuple[Any, ...] = (name, index, *map(_key, args))
    calls = _calls()
    call = calls.get(key)
    if call is None:
        call = _prepared(name, function, args, tensors, index)
        if len(calls) >= _MAX_CALLS:
            calls.pop(next(iter(calls)))
        calls[key] = call
    for i in call.copied:
        tensors[i] = tensors[i].contiguous()
    device = tensors[0].device
    results = [
        torch.empty(layout.shape, dtype=torch_dtype(layout.dtype), device=device)
        for layout in call.results
    ]
    scratch = counters = None
    if call.scratch_bytes:
        scratch = torch.empty(call.scratch_bytes, dtype=torch.uint8, device=device)
    stream = _get_stream(index)
    if call.num_counters:
        counters = _counters(call.num_counters, device, stream)
    call.run(
        [tensor.data_ptr() for tensor in (*tensors, *results)],
        stream,
        0 if scratch is None else scratch.data_ptr(),
        0 if counters is None else counters.data_ptr(),
    )
    return tuple(results) if len(results) > 1 else results[0]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % ALIGNMENT
    return value


def _calls() -> dict[Any, PreparedCall]:
    try:
        calls: dict[Any, PreparedCall] = _local.calls
    except AttributeError:
        calls = _local.calls = {}
    return calls


def _prepared(
    name: str, function: Function, args: tuple[Any, ...], tensors: list[Any], index: int
) -> PreparedCall:
    for tensor in tensors:
        if tensor.get_device() != index:
            raise ContractError(
                f"engine::{name}: all tensors must be on one device; got {tensor.device} beside "
                f"cuda:{index}"
            )
    places = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]

    def on_arrays(*arrays: Any) -> Any:
        ready = list(args)
        for place, array in zip(places, arrays, strict=True):
            ready[place] = array
        return function(*ready)

    return prepare(on_arrays, [layout_of(tensor) for tensor in tensors])


_zeros: dict[tuple[Any, int], torch.Tensor] = {}


def _counters(count: int, device: torch.device, stream: int) -> torch.Tensor:
    """Return counters that are 0. A captured graph gets its own: it may run beside others."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    kept = _zeros.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _zeros[device, stream] = kept
    return kept
