"""Ops of the catalog as operators of `torch.library`: registration, and calls on tensors.

`define` registers one: a function that calls `engine.kernels` on arrays becomes
`torch.ops.engine.<name>`. On CPU tensors it runs on NumPy arrays, so the mirrors compute. On CUDA
tensors its launches are prepared once per layout of the arguments (`kernels/_prepared_call.py`) and
repeated on the current stream; results and scratch come from torch's allocator, as any tensor does.

An eager call on plain CUDA tensors skips the dispatcher, to save time on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine import device
from engine.errors import ConfigError, ContractError, LaunchPlanError
from engine.integrations.torch._tensors import array_of, layout_of, tensor_of, torch_dtype
from engine.integrations.torch._transforms import (
    Function,
    is_transformed,
    looped,
    operator_of,
    transformed_function,
)
from engine.kernels._override.dispatch import active_overrides
from engine.kernels._prepared_call import ALIGNMENT, PreparedCall, constant, prepare
from engine.plan_array import NotContiguousError, PlanArray

__all__ = ["Operator", "contiguous", "define", "define_composite", "int_constant", "new_array"]
__all__ += ["on_tensors", "to_autocast_dtype"]

_library = torch.library.Library("engine", "DEF")
_local = threading.local()
_MAX_CALLS = 4096  # prepared calls kept per thread
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# A build of torch without CUDA has none of these.
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""Allocates a CUDA tensor from its size, strides and dtype."""


def define(
    schema: str,
    function: Function,
    fake: Function,
    *,
    backward: Function | None = None,
    setup_context: Function | None = None,
    vmap: Function | None = None,
) -> Operator:
    """Register an operator and return what calls it.

    Parameters
    ----------
    schema : str
        "name(Tensor x, ...) -> Tensor", in torch's schema language.
    function : callable
        Called with the operator's arguments, arrays of the catalog in place of tensors. It calls
        ops of the catalog, and returns new arrays: one, or a tuple as in the schema; or None, if it
        writes to its arguments, which the schema marks with "!".
    fake : callable
        Called with the operator's arguments; returns empty tensors like the results.
    backward, setup_context : callable, optional
        See `torch.library.register_autograd`. Without `backward` a derivative is an error that
        names the operator.
    vmap : callable, optional
        See `torch.library.register_vmap`; by default `looped`.
    """
    name = schema.split("(")[0]
    qualified = f"engine::{name}"
    backward = _no_derivative(name) if backward is None else backward
    vmap = looped(name) if vmap is None else vmap
    operator = Operator(name, function, backward, setup_context, vmap)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _on_cpu(function), "CPU")
    _library.impl(name, operator.launch, "CUDA")
    torch.library.register_fake(qualified, _on_one_device(name, fake), lib=_library)
    if "!" not in schema:  # torch knows no derivative of an operator that writes to its arguments
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=_library
        )
        torch.library.register_vmap(qualified, vmap, lib=_library)
    operator.overload = getattr(torch.ops.engine, name).default
    return operator


def define_composite(
    schema: str,
    function: Function,
    fake: Function,
    *,
    backward: Function | None = None,
    setup_context: Function | None = None,
) -> Function:
    """Register an operator whose function calls torch on tensors, and return what calls it.

    It writes to none of its arguments, and `vmap` runs it once per element of the mapped axis. See
    `define` for the parameters.
    """
    name, arguments = schema.split("(", 1)
    backward = _no_derivative(name) if backward is None else backward
    operator = torch.library.custom_op(
        f"engine::{name}", function, mutates_args=(), schema=f"({arguments}"
    )
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=setup_context)
    operator.register_vmap(looped(name))
    transformed_function(name, backward, setup_context, looped(name))
    return lambda *args: operator_of(name)(*args)


def _on_one_device(name: str, fake: Function) -> Function:
    def run(*args: Any) -> Any:
        _check_devices(name, [value for value in args if isinstance(value, torch.Tensor)])
        return fake(*args)

    return run


def _check_devices(name: str, tensors: Sequence[torch.Tensor]) -> None:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        got = " and ".join(devices)
        raise ContractError(f"engine::{name}: all tensors must be on one device; got {got}")


def on_tensors(name: str, function: Function) -> Function:
    """Return a function of plain tensors that calls `function` on arrays; register no operator.

    `function` may write to its arguments, and returns () or new arrays. Operators that mix torch's
    products with ops of the catalog use it.
    """
    operator = Operator(name, function, _no_derivative(name), None, looped(name))
    on_cpu = _on_cpu(function)

    def run(*args: Any) -> Any:
        return operator.launch(*args) if args[0].is_cuda else on_cpu(*args)

    return run


class Operator:
    """Calls an operator by the shortest way that its arguments allow. See `define`.

    Attributes
    ----------
    overload : torch._ops.OpOverload
        The registered operator.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        backward: Function,
        setup_context: Function | None,
        vmap: Function,
    ) -> None:
        self.name = name
        self.overload: Any = None
        self._function = function
        self._eager = _eager_function(name, self.launch, backward, setup_context)
        self._transformed = transformed_function(name, backward, setup_context, vmap)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if is_transformed():
            return self._transformed.apply(*args)
        needs_grad = False
        for value in args:
            if isinstance(value, torch.Tensor):
                if type(value) not in _PLAIN or not value.is_cuda or value.is_neg():
                    return self.overload(*args)
                needs_grad = needs_grad or value.requires_grad
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return self.overload(*args)
        # For torch.jit.trace the dispatcher records the call; for an argument that is no tensor
        # it raises an error with the argument's name.
        if torch._C._get_tracing_state() or not isinstance(args[0], torch.Tensor):
            return self.overload(*args)
        if needs_grad and torch.is_grad_enabled():
            return self._eager(*args)
        return self.launch(*args)

    def launch(self, *args: Any) -> Any:
        """Run on plain CUDA tensors, on the current stream of their device."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        index = tensors[0].get_device()
        if index == _current_device():
            return self._launch(args, tensors, index)
        with torch.cuda.device(index):
            return self._launch(args, tensors, index)

    def _launch(self, args: tuple[Any, ...], tensors: list[Any], index: int) -> Any:
        key: list[Any] = [self.name, index, active_overrides()]
        for value in args:
            if isinstance(value, torch.Tensor):
                offset = value.data_ptr() % ALIGNMENT
                key += (value.shape, value.stride(), value.dtype, value.get_device(), offset)
            else:
                key.append(value)
        calls = _calls()
        call = calls.get(tuple(key))
        if call is None:
            call = _Call(self._prepared(args, tensors))
            if len(calls) >= _MAX_CALLS:
                calls.pop(next(iter(calls)))
            calls[tuple(key)] = call
        return call.run(tensors, index)

    def _prepared(self, args: tuple[Any, ...], tensors: list[Any]) -> PreparedCall:
        _check_devices(self.name, tensors)
        places = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]

        def on_arrays(*arrays: Any) -> Any:
            ready = list(args)
            for place, array in zip(places, arrays, strict=True):
                ready[place] = array
            return self._function(*ready)

        try:
            return prepare(on_arrays, [layout_of(tensor) for tensor in tensors])
        except LaunchPlanError as error:
            table = active_overrides()
            if table is None or table.is_planned:
                raise
            raise ConfigError(
                f"{self.name}: an override of CUDA tensors must be an op of kernels.define; got "
                f"functions for {', '.join(table.functions)}"
            ) from error


class _Call:
    """A prepared call that takes tensors and allocates its results."""

    __slots__ = ("_call", "_copied", "_results", "_run")

    def __init__(self, call: PreparedCall) -> None:
        self._call = call
        self._run = call.run
        self._copied = call.copied
        self._results = [
            (layout.shape, _element_strides(layout), torch_dtype(layout.dtype))
            for layout in call.results
        ]

    def run(self, tensors: list[torch.Tensor], index: int) -> Any:
        """Launch on the current stream of the current device `index`; return the results."""
        for i in self._copied:
            tensors[i] = tensors[i].contiguous()
        results = [_empty(*layout) for layout in self._results]
        addresses = [tensor.data_ptr() for tensor in tensors]
        addresses += [tensor.data_ptr() for tensor in results]
        call = self._call
        stream = _stream_of(index)
        scratch = counters = None
        if call.scratch_bytes:
            scratch = _empty((call.scratch_bytes,), (1,), torch.uint8)
        if call.num_counters:
            counters = _counters(call.num_counters, index, stream)
        self._run(addresses, stream, _address(scratch), _address(counters))
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _element_strides(layout: Any) -> tuple[int, ...]:
    return tuple(step // layout.dtype.itemsize for step in layout.strides)


def _eager_function(
    name: str, launch: Function, backward: Function, setup_context: Function | None
) -> Any:
    """Return the `apply` of the autograd function of an eager call.

    It is the base class's: `torch.autograd.Function.apply` only adds support for transforms, and
    none is active here.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        results = launch(*args)
        if setup_context is not None:
            setup_context(ctx, args, results)
        return results

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)
    return super(torch.autograd.Function, function).apply


def _no_derivative(name: str) -> Function:
    def backward(*_: Any) -> Any:
        raise NotImplementedError(f"engine::{name} has no derivative")

    return backward


def to_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point tensors (or None) to autocast's dtype, if autocast is enabled.

    Tensors of float64 stay, as torch's autocast leaves them.
    """
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if _is_cast(t) else t for t in tensors)


def _is_cast(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64


_constants: dict[tuple[int, bytes], Any] = {}


def int_constant(values: Sequence[int], like: Any) -> Any:
    """Return int32 `values` on the device of the array `like`; for the function of `define`.

    They are never freed: a captured graph reads them, and may outlive the prepared call.
    """
    array = np.array(values, np.int32)
    if isinstance(like, np.ndarray):
        return array
    key = (_current_device(), array.tobytes())
    if key not in _constants:
        _constants[key] = constant(array)
    return _constants[key]


def new_array(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Return a new array on the device of the array `like`; for the function of `define`."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    return PlanArray(device.cupy().empty(shape, dtype))


def contiguous(array: Any) -> Any:
    """Return an argument of the function of `define` in C order.

    On CUDA the caller makes the copy: the function is called again.
    """
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if not array.flags.c_contiguous:
        raise NotContiguousError(f"got strides {array.strides}", array)
    return array


def _on_cpu(function: Function) -> Function:
    def run(*args: Any) -> Any:
        arrays = [array_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        result = function(*arrays)
        if isinstance(result, tuple):
            return tuple(tensor_of(array) for array in result)
        return None if result is None else tensor_of(result)

    return run


def _calls() -> dict[Any, _Call]:
    try:
        calls: dict[Any, _Call] = _local.calls
    except AttributeError:
        calls = _local.calls = {}
    return calls


_zeros: dict[tuple[int, int], list[torch.Tensor]] = {}


def _counters(count: int, index: int, stream: int) -> torch.Tensor:
    """Return counters that are 0: a stream's own or, during a capture, the graph's own.

    Graphs may run concurrently. A stream's counters are allocated by CuPy: `torch.compile` makes
    the first call of a graph while torch allocates from the graph's pool, and nothing may stay
    there. They are never freed, since launches that have not run yet may use them.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
    kept = _zeros.setdefault((index, stream), [])
    if not kept or kept[-1].numel() < count:
        zeros = constant(np.zeros(max(count, 4096), np.int32))
        kept.append(torch.as_tensor(zeros, device=f"cuda:{index}"))
    return kept[-1]
