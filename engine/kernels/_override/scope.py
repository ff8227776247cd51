"""`override`: a block with other kernels. `ModelKernels`: the kernels of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any

from engine.errors import ConfigError
from engine.kernels import _module
from engine.kernels._override.dispatch import ACTIVE, Active
from engine.kernels._override.table import NO_OVERRIDES, Overrides

__all__ = ["ModelKernels", "current_overrides", "forbid_override", "override"]

_SCOPE: ContextVar[Overrides] = ContextVar("kernel_overrides", default=NO_OVERRIDES)


@contextlib.contextmanager
def override(
    op: str | None = None, function: Callable[..., Any] | str | None = None, /, **functions: Any
) -> Iterator[None]:
    """Run a function in place of an op of the catalog, within the `with` block.

    It holds for this thread (or asyncio task): calls of `engine.kernels.<op>`, and the steps of
    models and engines. Blocks may be nested; the innermost one comes first. To override an op of
    one model for good, or in several processes, use ``LLM(..., kernels={op: function})``.

    Parameters
    ----------
    op : str
        Name of the op: "rmsnorm", "swiglu", "sample", ...
    function : callable or str
        An op of `engine.kernels.define`, or a function on NumPy or CuPy arrays, or "file.py:name".
        It takes the op's positional arguments, and those of its keywords that it needs.
    **functions
        More ops: ``override(rmsnorm=f, swiglu=g)``.

    Raises
    ------
    ConfigError, UnknownOptionError
        If there is no such op, or the value is no function.

    Notes
    -----
    Keywords that the function lacks are left out if they have their default value, or only say how
    to launch a kernel (`pdl`, `num_splits`, ...). A keyword that brings in another op is computed
    by that op: a residual, an activation. Any other one is a ConfigError when it is given. A result
    of the wrong shape or dtype is a ContractError. A fused op that contains the overridden one
    (`rmsnorm_gemm`) runs as its parts.

    Where the function calls the op that it replaces, the op itself runs.

    The step that an engine computes first after a change drops its prefix cache.

    Examples
    --------
    >>> import numpy as np
    >>> from engine import kernels
    >>> with kernels.override("silu", lambda x: np.maximum(x, 0)):
    ...     kernels.silu(np.array([[-1.0, 2.0]], np.float32))
    array([[0., 2.]], dtype=float32)
    """
    if op is None and function is not None:
        raise ConfigError(f"override: op must be the name of an op; got None, for {function!r}")
    given = functions if op is None else {op: function, **functions}
    added = Overrides.from_option(given, "override")
    outer = ACTIVE.get()
    below = Active(NO_OVERRIDES, {}) if outer is None else outer
    inner = Active(below.overrides.merged(added), below.runs, below.owner)
    tokens = _SCOPE.set(_SCOPE.get().merged(added)), ACTIVE.set(inner)
    try:
        with _module.uncounted():  # other kernels than the model's are compiled
            yield
    finally:
        _SCOPE.reset(tokens[0])
        ACTIVE.reset(tokens[1])


def current_overrides() -> Overrides:
    """Return the table that calls of ops go through."""
    active = ACTIVE.get()
    return NO_OVERRIDES if active is None else active.overrides


def forbid_override(num_processes: int) -> None:
    """Raise if an `override` block is open: other processes would not know of it.

    Raises
    ------
    ConfigError
    """
    if num_processes > 1 and _SCOPE.get():
        raise ConfigError(
            f"override must be replaced by LLM(..., kernels=) in a model of {num_processes} "
            f"processes: a block holds for its own process only; got {_SCOPE.get()}"
        )


class _Activation:
    """Makes `active` active in a `with` block; a class, since generators cost some microseconds."""

    __slots__ = ("_active", "_token")

    def __init__(self, active: Active) -> None:
        self._active = active
        self._token: Token[Active | None] | None = None

    def __enter__(self) -> None:
        self._token = ACTIVE.set(self._active)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        ACTIVE.reset(self._token)


class ModelKernels:
    """The overrides of a model, and how often each kernel ran in it.

    Parameters
    ----------
    overrides : Overrides

    Attributes
    ----------
    runs : dict of str to int
        Op, or "op=function" where it is overridden -> number of runs, replays of launch plans and
        CUDA graphs included.
    """

    def __init__(self, overrides: Overrides = NO_OVERRIDES) -> None:
        self.overrides = overrides
        self.runs: dict[str, int] = {}
        self._active = Active(overrides, self.runs, self)

    def active(self) -> _Activation:
        """Return a context in which calls of ops go through the overrides, and are counted."""
        outer = ACTIVE.get()
        if outer is not None and outer.owner is self:
            return _Activation(outer)
        scope = _SCOPE.get()
        if not scope:
            return _Activation(self._active)
        return _Activation(Active(self.overrides.merged(scope), self.runs, self))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let calls go through the overrides, as `active`; their compilations are no defect."""
        with self.active(), _module.uncounted() if self.overrides else contextlib.nullcontext():
            yield
