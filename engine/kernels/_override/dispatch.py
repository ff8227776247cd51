"""Every public op is called through a dispatcher, which counts the call and finds overrides.

Outside a model and an `override` block nothing is active, and the op is called right away. What is
active belongs to the context (`contextvars`): a thread, or an asyncio task.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from engine.errors import ContractError, EngineError
from engine.kernels._contract import shown_argument

__all__ = [
    "ACTIVE",
    "OPS",
    "Active",
    "active_overrides",
    "add_runs",
    "by_position",
    "count",
    "dispatched",
    "recorded_runs",
    "refuse_non_arrays",
    "run",
    "without_overrides",
]

OpT = TypeVar("OpT", bound=Callable[..., Any])

OPS: dict[str, Callable[..., Any]] = {}
"""The ops themselves, without dispatcher, by name."""


class Active:
    """What the calls of ops in a context go through.

    Parameters
    ----------
    overrides : Overrides
    runs : dict of str to int
        Number of runs by label, counted up by each call.
    owner : object
        The `ModelKernels` that was activated; None for an `override` block outside a model.
    """

    __slots__ = ("calls", "overrides", "owner", "runs")

    def __init__(self, overrides: Any, runs: dict[str, int], owner: Any = None) -> None:
        self.overrides = overrides
        self.calls: Mapping[str, Callable[..., Any]] = overrides.calls
        self.runs = runs
        self.owner = owner


ACTIVE: ContextVar[Active | None] = ContextVar("active_kernels", default=None)

_dispatchers: dict[str, Callable[..., Any]] = {}


def active_overrides() -> Any:
    """Return the table of overrides that is active here, which has a hash, or None."""
    active = ACTIVE.get()
    return None if active is None else active.overrides


@contextlib.contextmanager
def without_overrides() -> Iterator[None]:
    """Call the catalog's own ops in this block."""
    token = ACTIVE.set(None)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def dispatched(op: OpT) -> OpT:
    """Return the dispatcher of a public op; it has the op's signature and documentation."""
    name = op.__name__
    active_now = ACTIVE.get

    @functools.wraps(op)
    def call(*args: Any, **options: Any) -> Any:
        active = active_now()
        try:
            if active is None:
                return op(*args, **options)
            instead = active.calls.get(name)
            if instead is not None:
                return instead(*args, **options)
            runs = active.runs
            runs[name] = runs.get(name, 0) + 1
            return op(*args, **options)
        except (TypeError, ValueError) as error:
            if not isinstance(error, EngineError):
                _refuse_kinds(op, args, options, error)
            raise

    OPS[name] = op
    _dispatchers[name] = call
    return call  # type: ignore[return-value]


_WANTED = {"bool": "True or False", "int": "an int", "float": "a number", "str": "a str"}


def _refuse_kinds(
    op: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], error: Exception
) -> None:
    """Raise a ContractError for an argument that is no number or word, of a call that failed.

    An array has no truth value, and a list, which has no hash, is not looked up in a table.
    """
    kinds = inspect.signature(op).parameters
    for name, value in (*zip(kinds, args, strict=False), *options.items()):
        kind = str(kinds[name].annotation).removesuffix(" | None") if name in kinds else ""
        if kind not in _WANTED:
            continue
        is_array = hasattr(value, "shape") and getattr(value, "size", 1) != 1
        if is_array or (kind == "str" and not isinstance(value, str | None)):
            what = f"must be {_WANTED[kind]}; got {shown_argument(value)}"
            raise ContractError(f"{op.__name__}: {name}: {what}") from error


def run(name: str, *args: Any, **options: Any) -> Any:
    """Call the op `name` as `engine.kernels.<name>` does."""
    return _dispatchers[name](*args, **options)


def refuse_non_arrays(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise the error of the op `name` if an argument that must be an array is not.

    What runs instead of an op has no contract: it would fail on the argument in some other way.
    """
    places, keywords = _array_names(name)
    given = zip(places, args, strict=False)
    if all(_may_be_array(value) for is_array, value in given if is_array) and all(
        _may_be_array(value)
        for key, value in options.items()
        if key in keywords and value is not None
    ):
        return
    OPS[name](*args, **options)


def by_position(
    name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move arguments of the op `name` to their positions, up to the first that is missing."""
    names = [*itertools.takewhile(options.__contains__, _positional(name)[len(args) :])]
    rest = {key: value for key, value in options.items() if key not in names}
    return (*args, *(options[key] for key in names)), rest


@functools.cache
def _positional(name: str) -> tuple[str, ...]:
    kinds = inspect.signature(OPS[name]).parameters.values()
    return tuple(p.name for p in kinds if p.kind is not p.KEYWORD_ONLY)


def _may_be_array(value: Any) -> bool:
    return hasattr(value, "shape") or hasattr(value, "__dlpack__") or type(value) is tuple


@functools.cache
def _array_names(name: str) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Return which positional arguments of an op are arrays, and the names of all that are."""
    kinds = inspect.signature(OPS[name]).parameters
    names = {n for n, p in kinds.items() if p.annotation == "Any"} - {"out_dtype", "peers"}
    positional = [n for n, p in kinds.items() if p.kind is not p.KEYWORD_ONLY]
    return tuple(n in names for n in positional), frozenset(names)


def count(label: str) -> None:
    """Count a run of the kernel `label`."""
    if (active := ACTIVE.get()) is not None:
        active.runs[label] = active.runs.get(label, 0) + 1


def add_runs(runs: Mapping[str, int], times: int = 1) -> None:
    """Count `times` replays of what `recorded_runs` yielded."""
    if (active := ACTIVE.get()) is not None:
        for label, number in runs.items():
            active.runs[label] = active.runs.get(label, 0) + number * times


@contextlib.contextmanager
def recorded_runs() -> Iterator[dict[str, int]]:
    """Count the runs in this block in a dict of their own: a plan or a graph repeats them."""
    runs: dict[str, int] = {}
    active = ACTIVE.get()
    if active is None:
        yield runs
        return
    token = ACTIVE.set(Active(active.overrides, runs, active.owner))
    try:
        yield runs
    finally:
        ACTIVE.reset(token)
