"""`Op`: an op of the user's own. `define` (`define.py`) makes it.

A call binds the arguments (`binding.py`), asks the definition for its launches (`problem.py`), and
matches each kernel's parameters with the signature by name (`arguments.py`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from engine import device
from engine.errors import (
    ConfigError,
    ContractError,
    DeviceError,
    DTypeError,
    EngineError,
    LaunchPlanError,
    ShapeError,
    unknown_keyword,
)
from engine.kernels._chip import limits_of, sm_count
from engine.kernels._contract import shown_argument
from engine.kernels._launch_plan import plan_call
from engine.kernels._memory import is_same, overlaps
from engine.kernels._module import CompiledModule, compile_all, current_architecture
from engine.kernels._user.arguments import LaunchArguments
from engine.kernels._user.binding import Bound, bind, call_key, dtype_text, is_aligned
from engine.kernels._user.cuda_source import CudaText, Source
from engine.kernels._user.expressions import Expression
from engine.kernels._user.launch_failure import explained
from engine.kernels._user.module import UserModule, can_run
from engine.kernels._user.problem import CHIPS, Chip, Launch, Problem, Scratch
from engine.kernels._user.signature import (
    DTYPES,
    ArrayArg,
    Signature,
)
from engine.plan_array import PlanArray

__all__ = ["Definition", "Op", "current_chip"]

_MAX_SEEN = 1024  # calls whose checks are kept
_HALVES = (DTYPES["float16"], DTYPES["bfloat16"])


@dataclass(frozen=True)
class Definition:
    """What `define` got, parsed. See there.

    Attributes
    ----------
    file : str
        Python file of the definition; "" in a notebook or a console.
    """

    name: str
    signature: Signature
    reference: Callable[..., Any]
    source: Source
    launch: Callable[[Problem], Launch | Sequence[Launch]]
    entry: str
    where: tuple[Expression, ...]
    requires: str
    alignment: int
    in_place: tuple[str, ...]
    reduction: Expression
    tolerance: tuple[float, float] | None
    flops: Expression | None
    nbytes: Expression | None
    inputs: Mapping[str, Callable[..., Any]]
    sizes: Mapping[str, Sequence[int]]
    bench: tuple[Mapping[str, int], ...]
    file: str


class Op:
    """A function on arrays: NumPy in, the reference; CuPy in, the kernel. `define` makes it.

    Attributes
    ----------
    definition : Definition
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._names = tuple(arg.name for arg in definition.signature.args)
        self._defaults = {
            arg.name: None if isinstance(arg, ArrayArg) else arg.default
            for arg in definition.signature.args
            if (arg.is_optional if isinstance(arg, ArrayArg) else arg.default is not None)
        }
        self.__name__ = definition.name
        self.__qualname__ = definition.name
        self.__doc__ = _documentation(definition)
        self.__signature__ = _python_signature(definition.signature)
        self._seen: dict[tuple[Any, ...], Bound] = {}  # checked calls, without their arrays
        self._launches = lru_cache(maxsize=1024)(self._choose)
        self._matched = lru_cache(maxsize=1024)(self._match)

    def __repr__(self) -> str:
        return f"<kernels.Op {self.name}({self.signature.text})>"

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.definition.name

    @property
    def signature(self) -> Signature:
        """Arguments and results."""
        return self.definition.signature

    @property
    def reference(self) -> Callable[..., Any]:
        """The NumPy formula."""
        return self.definition.reference

    @property
    def source(self) -> Source:
        """The CUDA source."""
        return self.definition.source

    def __call__(self, /, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Check the arguments, and run the reference (NumPy) or the kernel (CuPy).

        Parameters
        ----------
        *args, **kwargs
            The signature's arguments, by position or by name.
        out : array or tuple of arrays, optional
            Arrays for the results.

        Returns
        -------
        array or tuple of arrays
            The results; without any, the arguments that were written in place, None for omitted
            ones.

        Raises
        ------
        ShapeError, DTypeError, ContractError
            If an argument violates the signature.
        CompileError
            If the CUDA source does not compile.
        """
        bound = self._bind(args, kwargs)
        if bound.contract.on_cpu:
            return self._run_reference(bound, self._outs(out))
        index = next(v for v in bound.values.values() if device.is_cupy_array(v)).device.id
        cuda = device.cupy().cuda
        if index == cuda.runtime.getDevice():
            return self._run_kernel(bound, self._outs(out), index)
        with cuda.Device(index):
            return self._run_kernel(bound, self._outs(out), index)

    def problem(self, *args: Any, **kwargs: Any) -> Problem:
        """Return the problem of a call with these arguments (NumPy arrays: on an H100)."""
        bound = self._bind(args, kwargs)
        if bound.contract.on_cpu:
            return self._problem(bound, CHIPS["sm_90a"], is_aligned=True)
        return self._problem(bound, current_chip(), self._aligned(bound))

    def example_problem(
        self,
        sizes: Mapping[str, int],
        dtype: str = "",
        *,
        arch: str = "sm_90a",
        is_aligned: bool = True,
        dtypes: Mapping[str, str] | None = None,
        **scalars: Any,
    ) -> Problem:
        """Return a problem without arrays.

        Parameters
        ----------
        sizes : mapping of str to int
            A size for every symbol.
        dtype : str
            The file's `scalar_t`; by default the first that the signature allows.
        arch : str
            Architecture, a key of CHIPS.
        is_aligned : bool
            See `Problem`.
        dtypes : mapping, optional
            Dtypes of arrays that may have several; by default the first.
        **scalars
            Scalar arguments without a default.

        Raises
        ------
        ConfigError
            If a size or a scalar is missing, or the signature does not allow the dtype.
        """
        allowed = self.signature.scalar_dtypes
        dtype = dtype or allowed[0]
        if dtype not in allowed:
            raise ConfigError(f"{self.name}: dtype: must be of {', '.join(allowed)}; got {dtype!r}")
        found = {s.name: scalars.get(s.name, s.default) for s in self.signature.scalars}
        found |= {name: sizes[name] for name in found if name in sizes}
        missing = [name for name, value in found.items() if value is None]
        missing += [s for s in self.signature.symbols if s not in sizes and s not in found]
        if missing or arch not in CHIPS:
            wanted = f"sizes: must have {missing[0]!r}" if missing else f"arch: one of {[*CHIPS]}"
            raise ConfigError(f"{self.name}: {wanted}; got {dict(sizes)}, arch {arch!r}")
        chosen = {
            a.name: self._example_dtype(a, dtype, dtypes or {}) for a in self.signature.arrays
        }
        return Problem(
            self.name,
            tuple((s, sizes[s] if s in sizes else found[s]) for s in self.signature.symbols),
            tuple(found.items()),
            dtype,
            tuple(chosen.items()),
            is_aligned,
            CHIPS[arch],
        )

    def _example_dtype(self, array: ArrayArg, dtype: str, dtypes: Mapping[str, str]) -> str:
        if array.like:
            [other] = [other for other in self.signature.arrays if other.name == array.like]
            return self._example_dtype(other, dtype, dtypes)
        return dtype if array.is_scalar_t else dtypes.get(array.name, array.dtypes[0])

    def launches(self, problem: Problem) -> tuple[Launch, ...]:
        """Return the launches of a problem.

        Raises
        ------
        ConfigError
            If the definition returns something else, or the chip cannot run it.
        """
        return self._launches(problem)

    def modules(self, problem: Problem) -> tuple[UserModule, ...]:
        """Return the modules that the launches of a problem need."""
        text = self.source.current()
        launches = self.launches(problem)
        return tuple(dict.fromkeys(self._module(text, problem, one) for one in launches))

    def compile(self, problem: Problem) -> list[CompiledModule]:
        """Compile what a problem needs, for its architecture; needs no GPU.

        Returns
        -------
        list of CompiledModule
            With each kernel's registers, spilled bytes and shared memory (`entries`).

        Raises
        ------
        CompileError
            With NVRTC's messages.
        """
        self.match(problem)
        return compile_all(self.modules(problem), problem.arch)

    def match(self, problem: Problem) -> tuple[LaunchArguments, ...]:
        """Match the parameters of each launch's kernel with the signature; needs no GPU.

        Raises
        ------
        ConfigError
            If a kernel is missing, has a parameter that nothing provides, or one of another type.
        """
        return self._matched(problem, self.source.current())

    def flops(self, problem: Problem) -> float:
        """Return the operations of a problem; 0 if the definition does not state them."""
        count = self.definition.flops
        return 0.0 if count is None else float(count.value(_numbers(problem)))

    def nbytes(self, problem: Problem) -> float:
        """Return the bytes a problem must move: as stated, or every array once, `inout` twice."""
        if self.definition.nbytes is not None:
            return float(self.definition.nbytes.value(_numbers(problem)))
        dtypes = dict(problem.dtypes)
        given = (array for array in self.signature.arrays if problem.has(array.name))
        total = 0
        for array in (*given, *self.signature.outputs):
            dtype = dtypes.get(array.like or array.name)
            size = problem["batch"] if array.has_batch else 1
            for dim in array.dims:
                size *= dim.value(problem.values)
            each = DTYPES[dtype or (problem.dtype if array.is_scalar_t else array.dtypes[0])]
            total += size * each.itemsize * (2 if array.is_inout else 1)
        return float(total)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        if len(args) > len(self._names):
            raise ContractError(
                f"{self.name}: takes {len(self._names)} arguments, {', '.join(self._names)}; "
                f"got {len(args)}"
            )
        values = dict(zip(self._names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self._names:
                raise unknown_keyword(self.name, name, (*self._names, "out"))
            if name in values:
                raise ContractError(f"{self.name}: {name}: was given twice")
            values[name] = value
        for name in self._names:
            if name not in values:
                if name not in self._defaults:
                    raise ContractError(f"{self.name}: {name}: must be given")
                values[name] = self._defaults[name]
        return self._checked({name: values[name] for name in self._names})

    def _checked(self, values: dict[str, Any]) -> Bound:
        """Check the arguments; those of a call like an earlier one were."""
        key = call_key(values)
        if key is not None and (seen := self._seen.get(key)) is not None:
            return seen.again(values)
        bound = bind(self.name, self.signature, self.definition.where, values)
        arrays = [array.name for array in self.signature.arrays]
        if key is not None and all(bound.values[name] is values[name] for name in arrays):
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            numbers = {s.name: bound.values[s.name] for s in self.signature.scalars}
            self._seen[key] = replace(bound, values=numbers)  # keeps no array alive
        return bound

    def _outs(self, out: Any) -> tuple[Any, ...]:
        count = len(self.signature.outputs)
        outs = out if isinstance(out, tuple) else (out,) * count if out is None else (out,)
        if len(outs) != count:
            wanted = f"a tuple of {count} arrays" if count > 1 else "an array" if count else "None"
            got = f"{len(outs)} arrays" if isinstance(out, tuple) else shown_argument(out)
            raise ContractError(f"{self.name}: out: must be {wanted}; got {got}")
        return outs

    def _check_apart(self, written: Mapping[str, Any]) -> None:
        """Refuse arrays to write that overlap: what is in both would be of either."""
        given = [(name, array) for name, array in written.items() if array is not None]
        for (name, array), (other, another) in itertools.combinations(given, 2):
            if overlaps(array, another):
                raise ContractError(
                    f"{self.name}: {other}: must not overlap {name}, which is written, too; "
                    f"got arrays of shapes {array.shape} and {another.shape} in the same memory"
                )

    # The reference.

    def _run_reference(self, bound: Bound, outs: tuple[Any, ...]) -> Any:
        inout = {a.name: bound.values[a.name] for a in self.signature.arrays if a.is_inout}
        written = {name: array for name, array in inout.items() if array is not None}
        self._check_apart(written)
        for array in self.signature.outputs:
            bound.shape(array)  # an error of the sizes, before one of the reference
        args = [_widened(bound.values[name], is_written=name in written) for name in self._names]
        try:
            returned = self.reference(*args)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise ContractError(
                f"{self.name}: the reference modifies an argument: let it copy, or declare the "
                "argument inout"
            ) from error
        self._check_returned(returned, [args[self._names.index(name)] for name in written])
        results = self._results(bound, returned)
        targets = [
            bound.contract.target(out, result, array.name, layout=_layout(array))
            for out, result, array in zip(outs, results, self.signature.outputs, strict=True)
        ]
        outputs = zip(self.signature.outputs, outs, targets, strict=True)
        given = {a.name: target for a, out, target in outputs if out is not None}
        self._check_apart(written | given)
        for name, array in written.items():
            array[...] = args[self._names.index(name)].astype(array.dtype)
        filled = [bound.contract.fill(*pair) for pair in zip(targets, results, strict=True)]
        return _returned(filled or [*inout.values()])

    def _check_returned(self, returned: Any, written: Sequence[Any]) -> None:
        """Without results, refuse a new array: it would be dropped, and nothing is in place."""
        if self.signature.outputs:
            return
        several = returned if isinstance(returned, tuple | list) else (returned,)
        for each in several:
            if isinstance(each, np.ndarray) and not any(
                np.may_share_memory(each, array) for array in written
            ):
                names = ", ".join(a.name for a in self.signature.arrays if a.is_inout)
                raise ContractError(
                    f"{self.name}: its reference must write {names} in place, as in "
                    f"{self.signature.text!r}; it returned a new array of shape {each.shape}"
                )

    def _results(self, bound: Bound, returned: Any) -> list[Any]:
        """Check what the reference returned, and round it once to the declared dtypes."""
        outputs = self.signature.outputs
        if not outputs:
            return []
        values = (
            returned if len(outputs) > 1 and isinstance(returned, tuple | list) else (returned,)
        )
        if len(values) != len(outputs):
            raise ContractError(
                f"{self.name}: its reference must return {len(outputs)} arrays, as in "
                f"{self.signature.text!r}; got {len(values)}"
            )
        arrays = [given for given in bound.values.values() if isinstance(given, np.ndarray)]
        results: list[Any] = []
        for array, value in zip(outputs, values, strict=True):
            if value is None:
                raise ContractError(
                    f"{self.name}: its reference must return {array.name}; it returned None"
                )
            if isinstance(value, tuple):
                raise ContractError(
                    f"{self.name}: its reference must return one array, {array.name}; "
                    f"it returned a tuple of {len(value)}"
                )
            result = _as_array(value)
            if result.dtype.kind not in "biufV":  # V: bfloat16
                raise DTypeError(
                    f"{self.name}: its reference must return real numbers, {array.name}; "
                    f"got {result.dtype}"
                )
            shape = bound.shape(array)
            if result.shape != shape:
                raise ShapeError(
                    f"{self.name}: its reference must return {array.name} of shape "
                    f"{array.shape_text} = {shape}; got {result.shape}"
                )
            is_shared = any(np.may_share_memory(result, other) for other in (*arrays, *results))
            copy = True if is_shared else None
            results.append(np.array(result, bound.dtype_of(array), order="C", copy=copy))
        return results

    # The kernel.

    def _run_kernel(self, bound: Bound, outs: tuple[Any, ...], index: int) -> Any:
        arrays = {a.name: self._at_alignment(bound, a) for a in self.signature.arrays}
        bound.values |= arrays
        results = {}
        targets = {}
        copies = []
        for array, out in zip(self.signature.outputs, outs, strict=True):
            new, given = self._target(bound, array, out)
            results[array.name] = new
            targets[array.name] = new if given is None else given
            copies += [] if given is None else [(given, new)]
        inout = {a.name: arrays[a.name] for a in self.signature.arrays if a.is_inout}
        written = [array for array in inout.values() if array is not None]
        self._check_apart(inout | targets)
        arrays |= self._copies(arrays, written)
        if any(array.size for array in (*results.values(), *written)):
            aligned = self._aligned(bound) and all(map(is_aligned, results.values()))
            problem = self._problem(bound, _chip(index), is_aligned=aligned)
            for array in self.signature.outputs:
                if array.is_zeroed:
                    _set_zero(results[array.name])
            self._launch(problem, arrays | results)
        for given, new in copies:
            given[...] = new
        final = dict(results)
        for array, out in zip(self.signature.outputs, outs, strict=True):
            final[array.name] = results[array.name] if out is None else out
        return _returned([*final.values()] or [*inout.values()])

    def _copies(self, arrays: Mapping[str, Any], written: Sequence[Any]) -> dict[str, Any]:
        """Return copies of the arguments that overlap one which is written.

        A kernel may read them after it has begun to write.
        """
        copies = {}
        for array in self.signature.arrays:
            value = arrays[array.name]
            if value is None or array.is_inout:
                continue
            is_in_place = array.name in self.definition.in_place
            clashes = [each for each in written if overlaps(value, each)]
            if is_in_place and all(is_same(value, each) for each in clashes):
                continue
            if clashes and isinstance(value, PlanArray):
                raise LaunchPlanError(
                    f"{self.name}: {array.name}: must not overlap an argument that is written; "
                    "name it in_place, if the kernel reads each element before it writes there"
                )
            if clashes:
                copies[array.name] = value.copy()
        return copies

    def _at_alignment(self, bound: Bound, array: ArrayArg) -> Any:
        """Return the argument, copied if the kernel's accesses need a better alignment."""
        value = bound.values[array.name]
        alignment = self.definition.alignment
        if value is None or alignment <= 1 or value.data.ptr % alignment == 0:
            return value
        if array.is_inout or isinstance(value, PlanArray):
            raise ContractError(
                f"{self.name}: {array.name}: must start at a multiple of {alignment} bytes; "
                f"got address {value.data.ptr:#x}"
            )
        return value.copy()

    def _target(self, bound: Bound, array: ArrayArg, out: Any) -> tuple[Any, Any]:
        """Return the array that the kernel writes, and `out` if that is another one.

        A kernel may read its arguments after it has begun to write: unless the definition lists an
        argument as `in_place`, an `out` that overlaps one gets the result last.
        """
        layout = _layout(array)
        new = bound.contract.output(
            array.name, out, bound.shape(array), bound.dtype_of(array), layout=layout
        )
        if out is None:
            return new, None
        clashes = [
            other.name
            for other in self.signature.arrays
            if (value := bound.values[other.name]) is not None
            and overlaps(new, value)
            and not (other.name in self.definition.in_place and is_same(new, value))
        ]
        misaligned = new.data.ptr % max(self.definition.alignment, 1) != 0
        if not clashes and not misaligned:
            return new, None
        if isinstance(new, PlanArray):
            raise LaunchPlanError(
                f"{self.name}: out: overlaps {', '.join(clashes) or 'nothing, but is misaligned'}; "
                "name it in_place, if the kernel reads each element before it writes there"
            )
        return bound.contract.output(array.name, None, new.shape, new.dtype), new

    def _aligned(self, bound: Bound) -> bool:
        arrays = [v for v in bound.values.values() if device.is_cupy_array(v)]
        return all(map(is_aligned, arrays))

    def _problem(self, bound: Bound, chip: Chip, is_aligned: bool) -> Problem:
        problem = bound.problems.get((chip, is_aligned))
        if problem is None:
            values = bound.values
            given = [a for a in self.signature.arrays if values[a.name] is not None]
            problem = Problem(
                self.name,
                tuple(bound.sizes.items()),
                tuple((s.name, values[s.name]) for s in self.signature.scalars),
                bound.dtype,
                tuple((a.name, dtype_text(values[a.name].dtype)) for a in given),
                is_aligned,
                chip,
            )
            bound.problems[chip, is_aligned] = problem
        return problem

    def _launch(self, problem: Problem, arrays: dict[str, Any]) -> None:
        scratch: dict[Scratch, Any] = {}
        for arguments in self.match(problem):
            launch = arguments.launch
            for each in arguments.scratch:
                if each not in scratch:
                    scratch[each] = _allocate(each, arrays)
            try:
                arguments.kernel.launch(
                    arguments.module,
                    launch.grid,
                    launch.block,
                    launch.shared,
                    cluster=launch.cluster,
                    pdl=launch.pdl,
                    **arguments.values(arrays, scratch),
                )
            except Exception as error:
                if isinstance(error, EngineError) and not isinstance(error, DeviceError):
                    raise
                about = (arguments.module, arguments.kernel.entry, problem.chip)
                raise explained(error, self.name, launch, *about) from error

    def _choose(self, problem: Problem) -> tuple[Launch, ...]:
        requires = self.definition.requires
        if not can_run(requires, problem.arch):
            raise DeviceError(f"{self.name}: requires {requires}; this GPU is {problem.arch}")
        chosen = self.definition.launch(problem)
        several = chosen if isinstance(chosen, list | tuple) else (chosen,)
        launches = tuple(several)
        if not launches or not all(isinstance(one, Launch) for one in launches):
            raise ConfigError(
                f"{self.name}: launch: must return what call.grid1d or call.grid returns, or "
                f"several of them; got {chosen!r}"
            )
        for launch in launches:
            launch.check(self.name, problem.chip)
        return launches

    def _match(self, problem: Problem, text: CudaText) -> tuple[LaunchArguments, ...]:
        return tuple(
            LaunchArguments(
                self.name,
                self.signature,
                problem,
                launch,
                text,
                launch.entry or self.definition.entry,
                self._module(text, problem, launch),
            )
            for launch in self.launches(problem)
        )

    def _module(self, text: CudaText, problem: Problem, launch: Launch) -> UserModule:
        types = tuple(
            (f"{array.name}_t", _C_TYPES[problem.dtype_of(array.name)])
            for array in self.signature.arrays
            if len(array.dtypes) > 1 and not array.is_scalar_t and problem.has(array.name)
        )
        return UserModule(
            text.label,
            problem.dtype,
            launch.defines,
            text.digest,
            types,
            self.definition.requires,
            text.text,
            text.folder,
        )


_C_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float64": "double",
    "bool": "bool",
    **{f"int{bits}": ctype for bits, ctype in ((8, "signed char"), (16, "short"), (32, "int"))},
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}


def _widened(value: Any, *, is_written: bool) -> Any:
    """Return what the reference gets: halves as float32, arguments written in place as a copy.

    Other arrays are read-only: ``x *= 2`` in a reference would change the caller's array.
    """
    if not isinstance(value, np.ndarray):
        return value
    if is_written:
        return value.astype(np.float32) if value.dtype in _HALVES else value.copy()
    given = value.astype(np.float32) if value.dtype in _HALVES else value.view()
    given.flags.writeable = False
    return given


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except ValueError:  # lists of several lengths: an array of objects, which is refused
        return np.empty((), object)


def _returned(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _layout(array: ArrayArg) -> str:
    return "any" if array.is_strided else "C"


def _set_zero(array: Any) -> None:
    """Set a C-contiguous array to 0 on the current stream, also when a launch plan is replayed."""
    cuda = device.cupy().cuda
    nbytes = int(array.nbytes)

    def set_zero(address: int) -> None:
        cuda.runtime.memsetAsync(address, 0, nbytes, cuda.get_current_stream().ptr)

    if nbytes:
        plan_call(set_zero, array)


def _allocate(scratch: Scratch, arrays: Mapping[str, Any]) -> Any:
    new = device.cupy().empty(scratch.shape, DTYPES[scratch.dtype])
    if any(isinstance(array, PlanArray) for array in arrays.values()):
        new = PlanArray(new)
    if scratch.zeroed:
        _set_zero(new)
    return new


def current_chip() -> Chip:
    """Return the chip of the current CUDA device."""
    return _chip(device.cupy().cuda.runtime.getDevice())


@cache
def _chip(index: int) -> Chip:
    """Return the chip of CUDA device `index`, the current one."""
    return Chip(current_architecture(index), sm_count(), limits_of(index).shared_bytes)


def _numbers(problem: Problem) -> dict[str, Any]:
    return {**problem.values, "itemsize": problem.itemsize}


def _python_signature(signature: Signature) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = []
    for arg in signature.args:
        is_optional = arg.is_optional if isinstance(arg, ArrayArg) else arg.default is not None
        default = getattr(arg, "default", None) if is_optional else kinds.empty
        parameters.append(kinds(arg.name, kinds.POSITIONAL_OR_KEYWORD, default=default))
    if signature.outputs:
        parameters.append(kinds("out", kinds.KEYWORD_ONLY, default=None))
    return inspect.Signature(parameters)


def _documentation(definition: Definition) -> str:
    reference = definition.reference
    has_name = getattr(reference, "__name__", "<lambda>") != "<lambda>"  # a partial has none
    about = reference.__doc__ or "" if has_name else ""
    return f"{definition.name}({definition.signature.text})\n\n{inspect.cleandoc(about)}".rstrip()
