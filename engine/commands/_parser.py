"""Command lines: options between positional arguments, hints for typing errors, the model."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from engine.commands._help import HELP_TEXT, HelpFormatter, matching_help
from engine.errors import ConfigError, did_you_mean

__all__ = [
    "MODEL_HELP",
    "CommandParser",
    "add_positional_model",
    "chosen_model",
    "option_name",
    "split_kind",
]

MODEL_HELP = "name, folder, .gguf file or hub id"


class CommandParser(argparse.ArgumentParser):
    """Parser of one command; the error about an unknown option names the nearest known one.

    `--help` shows the defaults of options, and `--help=WORD` only what matches.

    Parameters
    ----------
    shown_defaults : callable, optional
        See `HelpFormatter`.
    **options
        As of `ArgumentParser`.
    """

    def __init__(
        self, *, shown_defaults: Callable[[], Mapping[str, Any]] = dict, **options: Any
    ) -> None:
        super().__init__(add_help=False, **options)
        self._shown_defaults = shown_defaults
        self.add_argument("-h", "--help", action="help", default=argparse.SUPPRESS, help=HELP_TEXT)

    def _get_formatter(self) -> HelpFormatter:
        return HelpFormatter(self.prog, self._shown_defaults)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse `words`; options may stand between positional arguments.

        Raises
        ------
        SystemExit
            If they are invalid; argparse has printed why.
        """
        self.usage = self._short_usage()
        for word in itertools.takewhile(lambda word: word != "--", words):
            if word.startswith("--help="):
                self._print_matching(word.removeprefix("--help="))
        arguments, extra = self.parse_known_intermixed_args(words)
        if extra:
            options = [word.partition("=")[0] for word in extra if word.startswith("--")]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            hint = did_you_mean(options[0], known) if options else ""
            self.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
        return arguments

    def _print_matching(self, word: str) -> NoReturn:
        groups = [(group.title or "", group._group_actions) for group in self._action_groups]
        try:
            text = matching_help(groups, self._get_formatter(), word)
        except ValueError as error:
            self.error(str(error))
        self._print_message(text, sys.stdout)
        self.exit(0)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2; the usage only if an argument is missing.

        Missing options are found before missing positional arguments: the usage has all of both.
        """
        is_incomplete = message.startswith("the following arguments are required")
        hint = f"usage: {self.usage % {'prog': self.prog}}" if is_incomplete and self.usage else ""
        self.exit(2, f"{self.prog}: {message} ({hint or f'see {self.prog} --help'})\n")

    def _short_usage(self) -> str:
        """Return the usage with all positional arguments, and of the options the required ones."""
        needed = [one for one in self._actions if one.required or not one.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(None, needed, [], prefix="")
        words = formatter.format_help().strip().removeprefix(self.prog)
        return f"%(prog)s [options]{words}"


def option_name(name: str) -> str:
    """Return the option of an argument: "--max-len" of "max_len"."""
    return "--" + name.replace("_", "-")


def add_positional_model(parser: Any, help: str) -> None:
    """Declare the positional MODEL of a command that also has `--model`; see `chosen_model`."""
    parser.add_argument("named_model", nargs="?", metavar="MODEL", help=help)


def chosen_model(
    positional: str | None, option: str | None, default: str | None = "smollm2"
) -> str | None:
    """Return the model that is given as MODEL or as `--model MODEL`.

    Raises
    ------
    ConfigError
        If both are given, and differ.

    Examples
    --------
    >>> chosen_model("qwen3-0.6b", None), chosen_model(None, None)
    ('qwen3-0.6b', 'smollm2')
    """
    if positional is not None and option not in (None, positional):
        raise ConfigError(f"give one model; got {positional!r:.100} and --model {option!r:.100}")
    return next((name for name in (option, positional) if name is not None), default)


def split_kind(words: Sequence[str | None], kinds: Sequence[str]) -> tuple[str, str | None]:
    """Return the kind, by default the first, and the model, of words given in either order.

    Raises
    ------
    ConfigError
        If there are two models, or a word that is rather a kind with a typing error.

    Examples
    --------
    >>> split_kind(["smollm2", "prefill"], ["latency", "prefill"])
    ('prefill', 'smollm2')
    """
    given = [word for word in words if word is not None]
    kind = next((word for word in given if word in kinds), None)
    models = [word for word in given if word != kind]
    is_path = bool(models) and ("/" in models[0] or os.path.exists(models[0]))
    is_typo = kind is None and not is_path and any(did_you_mean(word, kinds) for word in models)
    if len(models) > 1 or is_typo:
        word = next((word for word in models if did_you_mean(word, kinds)), models[0])
        hint = did_you_mean(word, kinds)
        raise ConfigError(f"kind must be one of {', '.join(kinds)}; got {word!r:.100}{hint}")
    return kind or kinds[0], models[0] if models else None
