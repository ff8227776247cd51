"""A user's function under the contract of an op of the catalog."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from engine.checks import shown
from engine.device import empty_like
from engine.errors import ConfigError, ContractError
from engine.kernels._override.arrays import contiguous, copy_into, in_rows, is_same, overlaps
from engine.kernels._override.dispatch import (
    ACTIVE,
    OPS,
    Active,
    by_position,
    count,
    refuse_non_arrays,
)
from engine.kernels._override.fused import SENDERS, Options, Step, stepwise
from engine.kernels._override.results import (
    RESULTS,
    ROUTERS,
    WRITERS,
    check_results,
    sample_result,
)
from engine.kernels._user.op import Op
from engine.reference import Routing

__all__ = ["Override", "name_of"]

# Keywords that only affect where or how a kernel runs, or how fast.
_LAUNCH = frozenset(
    (
        *("max_seqlen_q", "max_seqlen_k", "max_context_len", "num_splits", "pdl", "total_tokens"),
        *("deterministic", "num_experts", "is_late"),
        *("load", "slots"),  # these count the tokens of experts
        "out_dtype",  # the dtype of the result is compared
    )
)
_OUTPUTS = ("out", "residual_out")
# A sampler replaces these rules by its own.
_SELECTION = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_logprobs")
)
_ROWWISE = frozenset(("rmsnorm", "silu", "gelu", "relu", "swiglu", "geglu", "residual_add"))


class Override:
    """Calls the user's function where the catalog's op `op` is called.

    Keywords that the function lacks are dropped if they have their default value or only affect
    the launch. If one brings in a part that is an op of its own, that op runs separately. Within
    the function, `op` is the catalog's.

    Parameters
    ----------
    op : str
        Name of the op.
    function : callable
        Takes the op's positional arguments, and any of its keywords.
    table : Overrides
        The table that this override belongs to.
    """

    def __init__(self, op: str, function: Callable[..., Any], table: Any) -> None:
        self.op = op
        self.function: Any = function
        self.label = f"{op}={name_of(function)}"
        self._table = table
        kinds = inspect.signature(OPS[op]).parameters
        self._defaults = {name: p.default for name, p in kinds.items()}
        self._positional = [n for n, p in kinds.items() if p.kind is not p.KEYWORD_ONLY]
        self._accepted, needed = _keywords(function, len(self._positional))
        _check_signature(op, function, self._positional, needed)
        self._needed = {n: self._defaults[n] for n in needed}
        args = function.signature.arrays if isinstance(function, Op) else ()
        self._inout = {arg.name for arg in args if arg.is_inout}
        # Arguments of an op that it would copy if they were not contiguous.
        self._packed = {arg.name for arg in args if not arg.is_strided and not arg.is_inout}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function with what it accepts, and return what the op would return."""
        refuse_non_arrays(self.op, args, options)
        args, options = by_position(self.op, args, options)
        if self.op in SENDERS:  # the function may change what the catalog's op would have sent
            options.pop("peers", None)
        return stepwise(self.op, self._is_taken_off, self._run, *args, **options)

    def _is_taken_off(self, step: Step, options: Options) -> bool:
        return self._table.has_any(step.parts(options)) or any(
            self._is_lacking(name, options[name]) for name in step.keywords if name in options
        )

    def _is_lacking(self, name: str, value: Any) -> bool:
        """Tell whether a keyword has a meaning that the function does not know."""
        if self._takes(name) or name in _LAUNCH or name in _OUTPUTS:
            return False
        if self.op == "sample" and name in _SELECTION:
            return False
        return not _is_default(value, self._defaults.get(name))

    def _takes(self, name: str) -> bool:
        return self._accepted is None or name in self._accepted

    def _run(self, *args: Any, **options: Any) -> Any:
        lacking = {n: value for n, value in options.items() if self._is_lacking(n, value)}
        if lacking:
            asked = ", ".join(f"{name}={_brief(value)}" for name, value in lacking.items())
            raise ConfigError(
                f"kernels[{self.op!r}]: {name_of(self.function)} must take "
                f"{', '.join(f'{name}=' for name in lacking)} to run in this model, which calls "
                f"{self.op} with {asked}"
            )
        outputs = {n: options.pop(n) for n in _OUTPUTS if options.get(n) is not None}
        args = self._spared(args, outputs)
        inputs = args, options
        own = {n: o for n, o in outputs.items() if self._takes(n) and self._may_write(o, inputs)}
        kept = self._needed | {n: v for n, v in options.items() if self._takes(n)}
        if self.op in _ROWWISE:
            result = self._call_on_rows(args, kept, own)
        else:
            result = self._call(args, kept | own)
        return self._finished(result, args, options, outputs, own)

    def _spared(self, args: tuple[Any, ...], outputs: Options) -> tuple[Any, ...]:
        """Copy arguments that the function writes in place, where the op would leave them alone."""
        if not self._inout or self.op in WRITERS:
            return args
        targets = _targets(outputs, 2)
        spared = list(args)
        for index, arg in enumerate(self.function.signature.args[: len(args)]):
            array = args[index]
            if arg.name in self._inout and not any(is_same(array, out) for out in targets):
                spared[index] = copy_into(empty_like(array), array)
        return tuple(spared)

    def _call_on_rows(self, args: tuple[Any, ...], options: Options, outputs: Options) -> Any:
        """Call the function with arrays (R, N) in place of (..., N)."""
        shape = args[0].shape[:-1]
        args = tuple(in_rows(array) if array.ndim > 1 else array for array in args)
        if options.get("residual") is not None:
            options = options | {"residual": in_rows(options["residual"])}
        if len(shape) == 1:
            return self._call(args, options | outputs)
        result = self._call(args, options)
        if isinstance(result, tuple):
            return tuple(y.reshape(*shape, y.shape[-1]) for y in result)
        return result.reshape(*shape, result.shape[-1]) if hasattr(result, "reshape") else result

    def _call(self, args: tuple[Any, ...], options: Options) -> Any:
        """Call the function; calls of `op` that it makes are the catalog's."""
        if self._packed:
            names = self.function.signature.args
            pairs = [(arg.name in self._packed, a) for arg, a in zip(names, args, strict=False)]
            args = tuple(contiguous(array) if is_packed else array for is_packed, array in pairs)
        count(self.label)
        active = ACTIVE.get()
        assert active is not None  # an override is found there
        token = ACTIVE.set(Active(self._table.without(self.op), active.runs, active.owner))
        try:
            return self.function(*args, **options)
        except ContractError as error:
            if not isinstance(self.function, Op):
                raise
            raise type(error)(f"kernels[{self.op!r}]: {error}") from error
        finally:
            ACTIVE.reset(token)

    def _may_write(self, out: Any, inputs: tuple[tuple[Any, ...], Options]) -> bool:
        """Tell whether the function may write its result there: over no input it still reads."""
        arrays = out if isinstance(out, tuple | list) else (out,)
        if not isinstance(self.function, Op):
            return not any(overlaps(array, inputs) for array in arrays)
        places = self.function.definition.in_place
        pairs = zip(self.function.signature.args, inputs[0], strict=False)
        same = [a for arg, a in pairs if arg.name in places and is_same(arrays[0], a)]
        others = [a for a in inputs[0] if not any(a is one for one in same)]
        return not any(
            overlaps(array, (others, inputs[1])) or not array.flags.c_contiguous for array in arrays
        )

    def _finished(
        self,
        result: Any,
        args: tuple[Any, ...],
        options: Options,
        outputs: dict[str, Any],
        own: dict[str, Any],
    ) -> Any:
        """Check the results, and copy them to the outputs that the function did not write."""
        if self.op == "sample" and not isinstance(result, tuple):
            return sample_result(result, args[0], options.get("num_logprobs"))
        if self.op in WRITERS:
            return None
        if result is None and own:  # it has written them
            result = tuple(own.values()) if len(own) > 1 else next(iter(own.values()))
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        given = dict(zip(self._positional, args, strict=False))
        check_results(self.op, name_of(self.function), results, self._defaults | given | options)
        pairs = zip(results, _targets(outputs, len(results)), strict=True)
        settled = [_settled(one, target, (args, options)) for one, target in pairs]
        if self.op in ROUTERS:
            return Routing(*settled)
        if len(settled) == 1 and (self.op in RESULTS or type(result) is not tuple):
            return settled[0]
        return tuple(settled) if type(result) is tuple else result  # a named tuple stays as it is


def _settled(result: Any, target: Any, inputs: Any) -> Any:
    """Return `result` in `target`, or in memory that is not an input's."""
    if target is not None:
        return copy_into(target, result)
    if hasattr(result, "strides") and overlaps(result, inputs):
        return copy_into(empty_like(result), result)
    return result


def name_of(function: Any) -> str:
    """Return the name of an op or a function, for messages and counters."""
    if isinstance(function, partial):
        return name_of(function.func)
    for attribute in ("name", "__name__"):
        if isinstance(name := getattr(function, attribute, None), str):
            return name
    return type(function).__name__


def _keywords(function: Any, num_positional: int) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return the names a function accepts as keywords, None if any; and those without a default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in, or a CuPy kernel
        return frozenset(), frozenset()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {p.name for p in places[:num_positional]}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.kind in kinds and p.name not in taken]
    needed = frozenset(p.name for p in named if p.default is p.empty)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, needed
    return frozenset(p.name for p in named), needed


def _check_signature(
    op: str, function: Any, positional: Collection[str], needed: Collection[str]
) -> None:
    """Raise if no call of `op` suits the function: arguments it lacks, or others that it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in, or a CuPy kernel
        return
    keywords = inspect.signature(OPS[op]).parameters
    by_position = ", ".join(positional)
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        places = [p for p in parameters[: len(positional)] if p.kind is p.POSITIONAL_OR_KEYWORD]
        for name in (p.name for p in places):
            if name in keywords and name not in positional:
                raise ConfigError(
                    f"kernels[{op!r}]: {name_of(function)}{signature} gets ({by_position}) by "
                    f"position, and {name} as a keyword, too: rename its {name}"
                )
    try:
        signature.bind(*positional, **dict.fromkeys(name for name in needed if name in keywords))
    except TypeError as error:
        known = ", ".join(name for name in keywords if name not in positional) or "none"
        raise ConfigError(
            f"kernels[{op!r}]: {name_of(function)}{signature} must accept "
            f"({by_position}) by position, and others by name ({known}): {error}"
        ) from error


def _is_default(value: Any, default: Any) -> bool:
    if value is None or value is default:
        return value is default
    return isinstance(value, bool | int | float | str) and bool(value == default)


def _targets(outputs: dict[str, Any], count: int) -> list[Any]:
    """Return the array that each result is copied to, or None."""
    out = outputs.get("out")
    targets = list(out) if isinstance(out, tuple | list) else [out]
    targets += [None] * (count - len(targets))
    if "residual_out" in outputs and targets:
        targets[-1] = outputs["residual_out"]
    return targets[:count]


def _brief(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    return shown(value)
