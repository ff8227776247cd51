"""Sandbox for chat templates: Jinja's immutable sandbox, with Hugging Face's dialect.

A template comes with a model, so it is untrusted code. The sandbox keeps it away from Python's
internals and from modifying its arguments. It cannot limit time and memory, since a single filter
call may take any amount: the kernel limits them for the whole process (`template_worker`).
"""

from __future__ import annotations

import codecs
import datetime
import importlib
import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.content_marks import ContentMarks

__all__ = ["Sandbox", "inspect", "reason", "tojson"]

_REMOVED_FILTERS = (
    "attr",  # reads attributes
    "random",  # not reproducible
)
# Modules that Jinja and Python import on first use, when files can no longer be opened.
_IMPORTED_LATE = ("html", "jinja2.debug", "pprint", "textwrap", "unicodedata")
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict, range, Undefined)
_FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


for _name in _IMPORTED_LATE:
    importlib.import_module(_name)
codecs.lookup("unicode_escape")


def inspect(source: str) -> dict[str, Any]:
    """Return the variables that a template reads, and the texts that it holds.

    Returns
    -------
    dict
        "reads": sorted names of the variables it reads but does not set itself.
        "literals": the texts it holds, each once.
    """
    tree = Sandbox().parse(source)
    return {
        "reads": sorted(meta.find_undeclared_variables(tree)),
        "literals": sorted(
            {node.data for node in tree.find_all(nodes.TemplateData)}
            | {c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)}
        ),
    }


def reason(error: Exception) -> str:
    """Return why a template failed: the line, if known, and the error message."""
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    if not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}"
    return f"{where}: {text}"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with the dialect of chat templates.

    Parameters
    ----------
    max_chars : int
        Maximum length of the text that a template, block or macro produces.
    """

    def __init__(self, max_chars: int = 0) -> None:
        # Not optimized: constant folding would hide errors in the folded expressions.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printable,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self._max_chars = max_chars
        kept = {name: self.globals[name] for name in ("range", "namespace")}
        self.globals = kept | {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _dict,
        }
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = tojson

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template `source`, ready to render."""
        tree = self.parse(source)
        for node in tree.find_all(_FORBIDDEN_NODES):
            kind = type(node).__name__.lower()
            raise TemplateSyntaxError(f"a chat template must not {kind} another", node.lineno)
        return self.from_string(tree)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output pieces of a block or of the whole template."""
        found = []
        total = 0
        for piece in pieces:
            total += len(piece)
            if total > self._max_chars:
                raise SecurityError(
                    f"the template makes a text of more than {self._max_chars} characters"
                )
            found.append(piece)
        return "".join(found)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once; Jinja would continue with an undefined value that renders as empty."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")


class GenerationTag(Extension):
    """The tag ``{% generation %}`` ... ``{% endgeneration %}``, which marks text for training.

    It has no effect on prompts: the block is replaced by its body.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body, in its own scope."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _printable(value: Any) -> Any:
    """Return `value` if it may be rendered; a function's text would reveal an address."""
    if not isinstance(value, _PLAIN):
        raise SecurityError(f"a {type(value).__name__} must not be rendered")
    return value


def _raise_exception(message: Any = "") -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    marks: ContentMarks | None = None,
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja's own filter; marks stay."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii and marks is None,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not ensure_ascii or marks is None:
        return text
    return re.sub(r"[^\x00-\x7f]", lambda found: _ascii(found[0], marks), text)


def _ascii(char: str, marks: ContentMarks) -> str:
    plain = marks.unmark(char)
    return char if plain.isascii() else json.dumps(plain)[1:-1]
