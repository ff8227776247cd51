"""`Overrides`: which functions run in place of which ops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from types import MethodType
from typing import Any

from engine.checks import shown_with_type
from engine.errors import ConfigError, unknown_keyword
from engine.kernels._override.adapt import Override, name_of
from engine.kernels._override.dispatch import OPS, by_position, count, refuse_non_arrays
from engine.kernels._override.fused import KEPT, SENDERS, STEPS, WHOLES, Options, Step, stepwise
from engine.kernels._override.places import load_place, place_of
from engine.kernels._user.op import Op

__all__ = ["NO_OVERRIDES", "Overrides"]

_log = logging.getLogger(__name__)

# SAFETY: with pdl, attention reads tables and older keys before it waits. The catalog's ops before
# it let it start only once these are written; a user's kernel in their place may trigger earlier.
_ATTENTION = ("attention_decode", "attention_prefill")
_BEFORE_ATTENTION = ("embedding", "qk_norm_rope_store", "rope", "kv_store")
# Rows that a product has sent are summed by the catalog's ops only.
_SUMS = ("all_reduce", "all_reduce_rmsnorm")


class Overrides:
    """A frozen table: op -> the function that runs instead, and what follows for fused ops.

    Tables with the same functions are equal: graphs are kept by table.

    Parameters
    ----------
    functions : mapping of str to callable

    Attributes
    ----------
    functions : dict of str to callable
    calls : dict of str to callable
        What runs instead of an op: an override, or a fused op as its parts.
    is_planned : bool
        Whether a launch plan can record every function: ops can, Python functions cannot.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = dict(sorted(functions.items()))
        self._key = tuple((op, _identity(function)) for op, function in self.functions.items())
        self.calls: dict[str, Callable[..., Any]] = {}
        self._without: dict[str, Overrides] = {}
        for op in {*STEPS, *WHOLES, *_ATTENTION} if functions else ():
            self.calls[op] = partial(self._in_parts, op)
        for op, function in self.functions.items():
            self.calls[op] = Override(op, function, self)
        self.is_planned = all(isinstance(f, Op) for f in self.functions.values())

    @classmethod
    def from_option(cls, given: Any, what: str = "kernels") -> Overrides:
        """Build a table from the user's mapping of names to functions or "file.py:name".

        Raises
        ------
        ConfigError, UnknownOptionError
            If a name is not an op's, or a value is no function; the message names it.
        """
        if given is None:
            return NO_OVERRIDES
        if isinstance(given, Overrides):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{what} must be a mapping of ops to functions; got {shown_with_type(given)}"
            )
        functions = {}
        for op, function in given.items():
            if op not in OPS:
                raise unknown_keyword(what, str(op), OPS)
            name = f"{what}[{op!r}]"
            if isinstance(function, str):
                function = load_place(name, function)
            if not callable(function):
                raise ConfigError(f"{name} must be a function; got {shown_with_type(function)}")
            functions[op] = function
        return cls(functions)

    def merged(self, other: Overrides) -> Overrides:
        """Return a table in which `other` comes first."""
        if not other or self == other:
            return self
        return _merged(self, other) if self else other

    def without(self, op: str) -> Overrides:
        """Return a table without `op`: what holds within its own override."""
        if op not in self._without:
            others = {name: f for name, f in self.functions.items() if name != op}
            self._without[op] = Overrides(others)
        return self._without[op]

    def places(self) -> dict[str, str]:
        """Return "file.py:name" of each function, for other processes.

        Raises
        ------
        ConfigError
            If one is not at module level of a file.
        """
        return {op: place_of(f"kernels[{op!r}]", f) for op, f in self.functions.items()}

    def warn_of_kept(self, runs: Collection[str]) -> None:
        """Log which ops of a model contain an overridden op and keep their own.

        `runs` has the kernels that ran in a trial of the model.
        """
        for op, function in self.functions.items():
            if kept := [other for other in KEPT.get(op, ()) if other in runs]:
                _log.warning(
                    "kernels[%r]: %s runs where the model calls %s; not within %s",
                    *(op, name_of(function), op, ", ".join(kept)),
                )

    def warn_of_unused(self, runs: Collection[str]) -> None:
        """Log which functions did not run in a trial of the model, given the kernels that did."""
        for op, function in self.functions.items():
            if f"{op}={name_of(function)}" not in runs:
                _log.warning(
                    "kernels[%r]: %s did not run when the model was tried: "
                    "a prefill, a decode and the sampler do not call %s",
                    *(op, name_of(function), op),
                )

    def __bool__(self) -> bool:
        return bool(self.functions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overrides) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return ", ".join(f"{op}={name_of(f)}" for op, f in self.functions.items())

    def has_any(self, ops: Collection[str]) -> bool:
        """Tell whether one of these ops is overridden."""
        return any(op in self.functions for op in ops)

    def _in_parts(self, op: str, /, *args: Any, **options: Any) -> Any:
        """Run a fused op or attention; parts of it that are overridden run on their own."""
        refuse_non_arrays(op, args, options)
        args, options = by_position(op, args, options)
        if op in _ATTENTION and self.has_any(_BEFORE_ATTENTION):
            options["pdl"] = False
        if op in SENDERS and self.has_any(_SUMS):
            options.pop("peers", None)
        if op in WHOLES:
            parts, compose = WHOLES[op]
            if self.has_any(parts(options)):
                return compose(*args, **options)
        return stepwise(op, self._is_taken_off, partial(_counted, op), *args, **options)

    def _is_taken_off(self, step: Step, options: Options) -> bool:
        return self.has_any(step.parts(options))


def _counted(op: str, /, *args: Any, **options: Any) -> Any:
    count(op)
    return OPS[op](*args, **options)


def _identity(function: Any) -> tuple[int, ...]:
    """Return a key of a function; a method is made anew by each ``object.method``."""
    if isinstance(function, MethodType):
        return id(function.__self__), id(function.__func__)
    return (id(function),)


@lru_cache(maxsize=64)
def _merged(first: Overrides, second: Overrides) -> Overrides:
    return Overrides(first.functions | second.functions)


NO_OVERRIDES = Overrides({})
