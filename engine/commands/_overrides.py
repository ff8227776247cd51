"""The options `--kernels` and `--logits-processors`, shared by the commands that generate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError

__all__ = [
    "KERNELS_HELP",
    "PROCESSORS_HELP",
    "add_override_arguments",
    "override_options",
    "parsed_overrides",
]

KERNELS_HELP = "run a kernel of your own in place of an op: swiglu=my_op.py:my_swiglu; repeatable"
PROCESSORS_HELP = "apply my_file.py:function to the logits of every request; repeatable"


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--kernels", action="append", metavar="OP=FILE:NAME", help=KERNELS_HELP)
    parser.add_argument(
        "--logits-processors", action="append", metavar="FILE:NAME", help=PROCESSORS_HELP
    )


def override_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `LLM`; empty without the options."""
    names = ("kernels", "logits_processors")
    given = {name: getattr(arguments, name, None) for name in names}
    return parsed_overrides({name: value for name, value in given.items() if value is not None})


def parsed_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Return "kernels" and "logits_processors" of `options`, with absolute paths.

    `kernels` is a list of "op=file:name", or a table of a TOML file.

    Raises
    ------
    ConfigError
        If a value has another form, or an op has two kernels.
    """
    parsed: dict[str, Any] = {}
    if "kernels" in options:
        given = options["kernels"]
        pairs = given.items() if isinstance(given, dict) else map(_pair, _texts("kernels", given))
        places: dict[str, str] = {}
        for op, place in pairs:
            if op in places:
                raise ConfigError(f"kernels must name each op once; got {shown(op)} twice")
            places[op] = _absolute(f"kernels[{op!r}]", place)
        parsed["kernels"] = places
    if "logits_processors" in options:
        name = "logits_processors"
        parsed[name] = [_absolute(name, place) for place in _texts(name, options[name])]
    return parsed


def _texts(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{name} must be a list; got {shown(given)}")
    return list(given)


def _pair(text: Any) -> tuple[str, str]:
    op, equals, place = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not equals:
        raise ConfigError(f"--kernels must be OP=FILE.py:NAME; got {shown(text)}")
    return op.strip(), place.strip()


def _absolute(name: str, place: Any) -> str:
    path, colon, function = place.rpartition(":") if isinstance(place, str) else ("", "", "")
    if not colon or not path.endswith(".py"):
        raise ConfigError(f"{name} must be FILE.py:NAME; got {shown(place)}")
    return f"{Path(path).resolve()}:{function}"
