"""Module selection by the lists in a quantization_config; each method has its own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.loading._fields import Fields

__all__ = ["EVERY_MODULE", "NO_MODULE", "ModuleRules", "boundary_rules", "pattern_of"]
__all__ += ["patterns_of", "texts_of"]

_MAX_TEXTS = 1 << 15
_MAX_PATTERNS = 256
_MAX_LENGTH = 256
_MAX_NAME = 128
_MAX_CHOICES = 4
_MAX_GROUPS = 3
_CHOICES = re.compile(r"[*+{]|(?<!\()\?")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_PLAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ModuleRules:
    """Rules that select modules by name; a module is selected if any rule matches.

    Attributes
    ----------
    names : frozenset of str
        Exact names.
    patterns : tuple of compiled regular expressions
        Patterns that match at the start of a name.
    parents : frozenset of str
        Modules to select together with all their submodules.
    suffixes : tuple of str
        Suffixes of names.
    substrings : tuple of str
        Substrings of names; ("",) selects every module.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    parents: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    substrings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != NO_MODULE

    def match(self, module: str) -> bool:
        """Tell whether the module with this name is selected."""
        if module in self.names or module.endswith(self.suffixes):
            return True
        if any(text in module for text in self.substrings):
            return True
        if self.parents:
            parts = module.split(".")
            if any(".".join(parts[:end]) in self.parents for end in range(1, len(parts) + 1)):
                return True
        return len(module) <= _MAX_NAME and any(one.match(module) for one in self.patterns)


NO_MODULE = ModuleRules()
EVERY_MODULE = ModuleRules(substrings=("",))


def texts_of(fields: Fields, key: str, values: Any) -> tuple[str, ...]:
    """Return `values`, a list of strings under `key`, as a tuple; None becomes ().

    Raises
    ------
    ConfigError
        If `values` is anything else.
    """
    if values is None:
        return ()
    if (
        not isinstance(values, list | tuple)
        or len(values) > _MAX_TEXTS
        or not all(isinstance(one, str) and one for one in values)
    ):
        raise fields.error(key, f"a list of at most {_MAX_TEXTS} strings")
    return tuple(values)


def pattern_of(fields: Fields, key: str, text: str, end: str = "") -> re.Pattern[str]:
    """Compile the regular expression `text`; reject it if matching could be slow.

    Limits on repeats and groups bound the number of ways to match a short name, and thus the time.

    Raises
    ------
    ConfigError
        If it is invalid, or exceeds those limits.
    """
    if (
        len(text) > _MAX_LENGTH
        or len(_CHOICES.findall(text)) > _MAX_CHOICES
        or text.count("(") > _MAX_GROUPS
        or _REPEATED_GROUP.search(text)
    ):
        raise fields.error(
            key,
            f"of patterns with at most {_MAX_LENGTH} characters, {_MAX_CHOICES} of *, +, ? and {{, "
            f"and {_MAX_GROUPS} groups, none of them repeated",
        )
    try:
        return re.compile(f"(?:{text}){end}")
    except (re.error, OverflowError, RecursionError):
        raise fields.error(key, "of valid regular expressions") from None


def boundary_rules(fields: Fields, key: str, values: Any) -> ModuleRules:
    r"""Return Hugging Face's rules for modules that are not converted.

    A text matches as a plain suffix of the name, or as a regular expression anchored at its start
    that ends at a component boundary.

    Examples
    --------
    >>> rules = boundary_rules(Fields({}, ""), "", ["mlp.gate", "model.layers.1"])
    >>> [rules.match(f"model.layers.{one}") for one in ("1.mlp", "11.mlp", "2.mlp.gate")]
    [True, False, True]
    >>> rules.match("model.layers.2.mlp.gate_proj")
    False
    """
    texts = texts_of(fields, key, values)
    plain = [text for text in texts if _PLAIN.fullmatch(text)]
    others = [text for text in texts if not _PLAIN.fullmatch(text)]
    return ModuleRules(
        patterns=patterns_of(fields, key, others, r"(?:\.|$)"),
        parents=frozenset(plain),
        suffixes=texts,
    )


def patterns_of(
    fields: Fields, key: str, texts: Iterable[str], end: str = ""
) -> tuple[re.Pattern[str], ...]:
    """Apply `pattern_of` to each text."""
    texts = list(texts)
    if len(texts) > _MAX_PATTERNS:
        raise fields.error(key, f"a list of at most {_MAX_PATTERNS} patterns")
    return tuple(pattern_of(fields, key, text, end) for text in texts)
