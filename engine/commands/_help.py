"""Help of the commands: each option with its default, whole or only what matches a word."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import did_you_mean

__all__ = ["HELP_TEXT", "HelpFormatter", "matching_help"]

HELP_TEXT = "print this help; --help=WORD: options and groups that match; --help=groups: the groups"
_LIST_WORDS = ("groups", "listgroup")  # ours, and vLLM's


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds each option's default, unless its text has the word "default".

    Parameters
    ----------
    prog : str
    defaults : callable, optional
        Returns the defaults of options that the parser does not set itself, by their names.
    """

    def __init__(self, prog: str, defaults: Callable[[], Mapping[str, Any]] = dict) -> None:
        super().__init__(prog, max_help_position=32)
        self._defaults = defaults
        self._values: Mapping[str, Any] | None = None

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if "default" in text or is_switch or not action.option_strings:
            return text
        value = action.default
        if value is argparse.SUPPRESS:
            if self._values is None:  # they may be slow to import, so only now
                self._values = self._defaults()
            value = self._values.get(action.dest)
        shown = _shown(value)
        return f"{text} (default: {shown})" if shown else text


def _shown(value: Any) -> str:
    """Return a default as it is given on the command line; "" for none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value).replace("%", "%%")


Group = tuple[str, list[argparse.Action]]
"""Title and options."""


def matching_help(groups: list[Group], formatter: HelpFormatter, word: str) -> str:
    """Return the help of the options and groups whose names contain `word`.

    If there is none, of the options whose texts contain it.

    Parameters
    ----------
    groups : list of Group
    formatter : HelpFormatter
    word : str
        Compared without case; "_" is as good as "-". "groups" lists the titles.

    Raises
    ------
    ValueError
        If nothing matches; the message names the nearest option, or the groups.
    """
    if word in _LIST_WORDS:
        return "".join(f"{title} ({len(actions)})\n" for title, actions in groups if actions)
    wanted = word.lower().replace("_", "-")
    found = _select(groups, lambda title, one: wanted in f"{title} {' '.join(one.option_strings)}")
    found = found or _select(groups, lambda _, one: word.lower() in (one.help or "").lower())
    if not found:
        titles = [title for title, actions in groups if actions]
        names = [name for _, own in groups for one in own for name in one.option_strings]
        known = [name.lstrip("-") for name in names] + [title.lower() for title in titles]
        hint = did_you_mean(wanted, known, f"groups: {', '.join(titles)}")
        raise ValueError(f"no option matches {word!r:.100}{hint}")
    for title, actions in found:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _select(groups: list[Group], matches: Callable[[str, argparse.Action], bool]) -> list[Group]:
    """Return the groups with the options for which `matches(title in lower case, option)`."""
    found = [(title, [one for one in own if matches(title.lower(), one)]) for title, own in groups]
    return [(title, own) for title, own in found if own]
