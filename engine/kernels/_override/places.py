"""Functions and patterns by place, "file.py:name", for the user and for other processes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.kernels._override.adapt import name_of
from engine.kernels._user.files import load_name
from engine.kernels._user.op import Op

__all__ = ["load_place", "place_of"]


def load_place(what: str, place: str) -> Callable[..., Any]:
    """Return the function "file.py:name"; `what` names the option in errors.

    The file is run as a module of its own. Only files that the user names are ever loaded.

    Raises
    ------
    ConfigError
        If there is no such file or name, or the file fails.
    """
    try:
        function: Callable[..., Any] = load_name(place)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    return function


def place_of(what: str, function: Any) -> str:
    """Return "file.py:name" of a function, op or pattern, for another process to load.

    Raises
    ------
    ConfigError
        If it is not at module level of a file.
    """
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        found = [name for name, value in names.items() if value is function]
        if found and _defines(module, function):
            return f"{Path(str(module.__file__)).resolve()}:{found[0]}"
    raise ConfigError(
        f"{what}: each process loads {name_of(function)!r} itself, so it must be at module level "
        "of a file other than the main program, or be given as 'file.py:name'"
    )


def _defines(module: Any, function: Any) -> bool:
    """Tell whether a module, other than the main program, is the file that defines a function."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return False
    if isinstance(function, Op):
        return bool(function.definition.file == file)
    owner = inspect.getmodule(function)
    return owner is module or not callable(function)
