"""Keywords of functions and dataclasses: shown to `inspect.signature`, checked with a hint."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from engine.errors import unknown_keyword

__all__ = ["checks_keywords", "takes_keywords"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type[Any])


def takes_keywords(*parameters: Iterable[inspect.Parameter]) -> Callable[[FunctionT], FunctionT]:
    """Show `parameters` in a function's signature, in place of its ``**options``.

    Only the first parameter of a name is shown. The function itself is unchanged.

    Examples
    --------
    >>> def load(*, device="auto", dtype="auto"): ...
    >>> @takes_keywords(inspect.signature(load).parameters.values())
    ... def generate(model, **options): ...
    >>> inspect.signature(generate)
    <Signature (model, *, device='auto', dtype='auto')>
    """

    def decorate(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = {p.name: p for p in own}
        for parameter in (p for group in parameters for p in group):
            shown.setdefault(parameter.name, parameter)
        found: Any = function
        found.__signature__ = signature.replace(parameters=list(shown.values()))
        return function

    return decorate


def checks_keywords(cls: ClassT, elsewhere: Mapping[str, str] | None = None) -> ClassT:
    """Have a dataclass reject an unknown keyword with the nearest known one.

    `elsewhere`: see `unknown_keyword`.

    Raises
    ------
    UnknownOptionError
        By the constructor.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @checks_keywords
    ... @dataclass
    ... class Point:
    ...     width: int = 0
    >>> Point(widht=1)
    Traceback (most recent call last):
    ...
    engine.errors.UnknownOptionError: Point got an unknown keyword 'widht'; did you mean 'width'?
    """
    construct = cls.__init__
    known = frozenset(field.name for field in fields(cls))

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise unknown_keyword(cls.__name__, name, known, elsewhere)
        construct(self, *args, **options)

    cls.__init__ = checked
    return cls
