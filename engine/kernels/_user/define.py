"""`define`: an op from a signature, a NumPy formula, a CUDA source and a launch."""

from __future__ import annotations

import inspect
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError
from engine.kernels._user.cuda_source import Source
from engine.kernels._user.expressions import Expression
from engine.kernels._user.op import Definition, Op
from engine.kernels._user.problem import Launch, Problem
from engine.kernels._user.signature import Signature, parse_signature, split_list

__all__ = ["define"]


def define(
    name: str,
    signature: str,
    *,
    reference: Callable[..., Any],
    source: str | Path,
    launch: Callable[[Problem], Launch | Sequence[Launch]],
    entry: str = "",
    where: str = "",
    requires: str = "",
    alignment: int = 1,
    in_place: str | Sequence[str] = (),
    reduction: str | int = 1,
    tolerance: tuple[float, float] | None = None,
    flops: str | int | None = None,
    nbytes: str | int | None = None,
    inputs: Mapping[str, Callable[..., Any]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    bench: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
) -> Op:
    """Define an op: a function on arrays with a NumPy reference and a CUDA kernel.

    Parameters
    ----------
    name : str
        Name of the op and, unless `entry` says otherwise, of its kernel.
    signature : str
        Arguments and results, such as "x: (T, N) float, scale: (T,) float32 -> (T, N) like x".
    reference : callable
        The formula in NumPy. It gets the arguments by position, 16-bit floats as float32; what it
        returns is rounded once to the declared dtypes.
    source : str or Path
        A .cu file, relative to the file of the definition, read again when it changes; or the text.
        The kernel is declared ``extern "C" __global__``. Its parameters are found by name: arrays,
        results (`out`), symbols, scalars, ``<array>_stride_<axis>`` in elements, and `args` of the
        launch.
    launch : callable
        Maps a `Problem` to a launch (`Problem.grid1d`, `Problem.grid`) or a sequence of them; a
        pure function.
    entry : str
        Name of the kernel, if it is not `name`.
    where : str
        Conditions on the sizes and scalars, such as "N % 8 == 0, N <= 4096, eps > 0".
    requires : str
        Architecture: "sm_90a" for Hopper alone, "sm_90" for it and later ones.
    alignment : int
        Bytes that the start of every array must be a multiple of: a misaligned one is copied.
    in_place : str or sequence of str
        Arguments that `out` may be: the kernel reads each element before it writes there.
    reduction : str or int
        Number of terms that are summed for an element of a result: selects the tolerance.
    tolerance : (float, float), optional
        Allowed error relative to the element, and to the result's rms, in place of the table's.
    flops, nbytes : str or int, optional
        Operations, and bytes moved, in the symbols and `itemsize`. By default every array is moved
        once.
    inputs : mapping, optional
        ``f(rng, call) -> array`` for arguments that cannot be drawn freely, such as indices.
    sizes : mapping, optional
        Sizes of a symbol that `check` tries.
    bench : mapping or sequence of mappings
        Sizes that `bench` measures.

    Returns
    -------
    Op

    Raises
    ------
    ConfigError
        If the definition contradicts itself; the message names the argument.

    Examples
    --------
    >>> import numpy as np
    >>> twice = define(
    ...     "twice",
    ...     "x: (N,) float -> (N,) like x",
    ...     reference=lambda x: 2 * x,
    ...     source=r'''
    ...     extern "C" __global__ void twice(const scalar_t* x, scalar_t* out, int64_t N) {
    ...       const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    ...       if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
    ...     }''',
    ...     launch=lambda call: call.grid1d(call["N"], 256),
    ... )
    >>> twice(np.arange(3, dtype=np.float32))
    array([0., 2., 4.], dtype=float32)
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"name: must be an identifier; got {name!r}")
    for label, function in (("reference", reference), ("launch", launch)):
        if not callable(function):
            raise ConfigError(f"{name}: {label}: must be callable; got {function!r}")
    _check_types(name, {"where": where, "entry": entry}, in_place, inputs, sizes, bench)
    file = sys._getframe(1).f_globals.get("__file__") or ""
    folder = Path(file).resolve().parent if file else Path.cwd()
    parsed = parse_signature(signature, name)
    _check_parameters(name, "reference", reference, [arg.name for arg in parsed.args])
    _check_parameters(name, "launch", launch, ("problem",))
    _check_numbers(name, parsed, tolerance, sizes or {})
    definition = Definition(
        name,
        parsed,
        reference,
        Source(source, name, folder),
        launch,
        entry or name,
        tuple(Expression(part, f"{name}: where") for part in split_list(where)),
        _known_arch(name, requires),
        _power_of_two(name, alignment),
        (in_place,) if isinstance(in_place, str) else tuple(in_place),
        Expression(reduction, f"{name}: reduction"),
        tolerance,
        None if flops is None else Expression(flops, f"{name}: flops"),
        None if nbytes is None else Expression(nbytes, f"{name}: nbytes"),
        dict(inputs or {}),
        dict(sizes or {}),
        (bench,) if isinstance(bench, Mapping) else tuple(bench),
        file,
    )
    _check_names(definition)
    return Op(definition)


def _check_parameters(
    name: str, label: str, function: Callable[..., Any], wanted: Sequence[str]
) -> None:
    """Check that a function can be called with these arguments by position."""
    try:
        parameters = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return
    try:
        parameters.bind(*wanted)
    except TypeError:
        raise ConfigError(
            f"{name}: {label}: must take the arguments ({', '.join(wanted)}) by position; "
            f"it takes {parameters}"
        ) from None


def _known_arch(name: str, requires: str) -> str:
    if not isinstance(requires, str) or not re.fullmatch(r"(sm_\d{2,3}a?)?", requires):
        raise ConfigError(
            f"{name}: requires: must be an architecture like sm_90 or sm_90a; got {requires!r}"
        )
    return requires


def _check_types(
    name: str, texts: Mapping[str, Any], in_place: Any, inputs: Any, sizes: Any, bench: Any
) -> None:
    """Check the types of arguments that would otherwise fail later, or be misread: `where`."""
    for label, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError(f"{name}: {label}: must be a str; got {shown(text)}")
    if not isinstance(in_place, str | Sequence):
        raise ConfigError(f"{name}: in_place: must name arguments; got {in_place!r}")
    for label, given in (("inputs", inputs), ("sizes", sizes)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{name}: {label}: must be a mapping; got {shown(given)}")
    several = [bench] if isinstance(bench, Mapping) else bench
    if not isinstance(several, Sequence) or not all(isinstance(one, Mapping) for one in several):
        raise ConfigError(
            f"{name}: bench: must be a mapping or a sequence of mappings; got {shown(bench)}"
        )


def _check_numbers(
    name: str,
    signature: Signature,
    tolerance: tuple[float, float] | None,
    sizes: Mapping[str, Sequence[int]],
) -> None:
    if tolerance is not None and not _are_tolerances(tolerance):
        raise ConfigError(
            f"{name}: tolerance: must be two numbers of at least 0, relative to the element and to "
            f"the rms of the result; got {tolerance!r}"
        )
    scalars = {scalar.name for scalar in signature.scalars}
    for symbol, values in sizes.items():
        is_several = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_several or not (symbol in scalars or all(map(_is_size, values))):
            raise ConfigError(
                f"{name}: sizes: must be several for {symbol}, such as (64, 1000); got {values!r}"
            )


def _are_tolerances(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    return is_pair and all(isinstance(one, numbers.Real) and float(one) >= 0.0 for one in given)


def _is_size(value: Any) -> bool:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and int(value) >= 0


def _power_of_two(name: str, alignment: int) -> int:
    if not isinstance(alignment, int) or alignment not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        raise ConfigError(
            f"{name}: alignment: must be a power of two up to 256 bytes; got {alignment!r}"
        )
    return alignment


def _check_names(definition: Definition) -> None:
    """Check that names in the definition are the signature's, and that what they name exists."""
    arrays = [array.name for array in definition.signature.arrays]
    scalars = [scalar.name for scalar in definition.signature.scalars if scalar.name]
    symbols = {*definition.signature.symbols, *scalars}
    for label, given, known in (
        ("in_place", definition.in_place, arrays),
        ("inputs", definition.inputs, [*arrays, *scalars]),
        ("sizes", definition.sizes, symbols),
        *(("bench", sizes, symbols) for sizes in definition.bench),
        *(("where", part.symbols, symbols) for part in definition.where),
        ("reduction", definition.reduction.symbols, symbols),
        *(
            (label, part.symbols, {*symbols, "itemsize"})
            for label, part in (("flops", definition.flops), ("nbytes", definition.nbytes))
            if part is not None
        ),
    ):
        for each in given:
            if each not in known:
                raise ConfigError(
                    f"{definition.name}: {label}: must name {', '.join(sorted(known))}; "
                    f"got {each!r}"
                )
    for argument, draw in definition.inputs.items():
        if not callable(draw):
            raise ConfigError(
                f"{definition.name}: inputs: must be callable for {argument}; got {shown(draw)}"
            )
    if not definition.source.current().entries:
        raise ConfigError(
            f'{definition.name}: source: has no kernel; declare one as extern "C" __global__ void '
            f"{definition.entry}(...)"
        )
