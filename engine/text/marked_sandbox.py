"""The sandbox for templates whose arguments carry marks (`engine.text.content_marks`).

Marks pass through whatever only copies text. What looks at text gets it without marks: comparisons,
tests, searches and keys. What changes characters (``upper``, ``escape``) works on the text without
marks, and the result is marked again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from jinja2 import nodes, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from engine.text.content_marks import ContentMarks
from engine.text.template_sandbox import Sandbox, tojson

__all__ = ["MarkedSandbox"]

# Not names, so that templates cannot call them.
_PLAIN = "without marks"
_PLAIN_KEYS = "keys without marks"
_PRINTED = "as printed"
_COPYING = frozenset(
    ["center", "expandtabs", "format", "format_map", "join", "ljust", "rjust", "splitlines"]
)
"""Methods of str that may be called on marked texts."""
_COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", ">", "gt", "greaterthan"),
    *("<=", "le", ">=", "ge", "in", "lower", "upper"),
)
_CHANGING_FILTERS = (
    *("abs", "capitalize", "e", "escape", "filesizeformat", "float", "forceescape", "int", "lower"),
    *("pprint", "round", "striptags", "title", "truncate", "upper", "urlencode", "urlize"),
    *("wordcount", "wordwrap", "xmlattr"),
)


class MarkedSandbox(Sandbox):
    """A sandbox that sees marked texts as they were before.

    Parameters
    ----------
    max_chars : int
        See `Sandbox`.
    marks : ContentMarks
    """

    intercepted_binops = frozenset(["%", "+"])

    def __init__(self, max_chars: int, marks: ContentMarks) -> None:
        super().__init__(max_chars)
        self._marks = marks
        checked = self.finalize or (lambda value: value)
        self.finalize = lambda value: self._printed(checked(value))
        for name in _COMPARING_TESTS:
            self.tests[name] = self._on_plain(self.tests[name])
        for name in _CHANGING_FILTERS:
            self.filters[name] = self._on_plain(self.filters[name])
        self._join = self.filters["join"]
        self.filters |= {
            _PLAIN: marks.plain,
            _PLAIN_KEYS: self._plain_keys,
            _PRINTED: self._printed,
            "format": self._format,
            "join": self._joined,
            "replace": self._replace_filter,
            "string": lambda value: str(self._printed(value)),
            "tojson": functools.partial(tojson, marks=marks),
            "trim": lambda text, chars=None: self._method("strip", str(self._printed(text)), chars),
        }

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> Any:
        """Parse a template; its comparisons look at texts without marks."""
        return _Unmarking().visit(super().parse(source, name, filename))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function; methods that look at a text see it without marks."""
        self = __self
        obj = __obj
        owner = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str) and name not in _COPYING:
            obj = functools.partial(self._method, name, owner)
        elif isinstance(owner, dict) and args and isinstance(args[0], str):
            args = (self._key(owner, args[0]), *args[1:])
        elif name in ("format", "format_map"):
            args = self._all_printed(args)
            kwargs = self._all_printed(kwargs)
        return super().call(__context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left % right`` or ``left + right``."""
        if operator == "%" and isinstance(left, str):
            right = self._all_printed(right)
        elif isinstance(left, Markup) != isinstance(right, Markup):  # text beside ``|safe``
            left, right = map(self._escaped, (left, right))
        return super().call_binop(context, operator, left, right)

    def _escaped(self, value: Any) -> Any:
        return Markup(self.filters["escape"](value)) if isinstance(value, str) else value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item; a key may be marked where the object's is not."""
        if isinstance(obj, dict) and isinstance(argument, str):
            argument = self._key(obj, argument)
        return super().getitem(obj, argument)

    def _key(self, obj: dict[Any, Any], key: str) -> str:
        plain = self._marks.unmark(key)
        return next((k for k in (key, plain, self._marks.mark_key(plain)) if k in obj), plain)

    def _plain_keys(self, value: Any) -> Any:
        return self._marks.plain(list(value) if isinstance(value, dict) else value)

    def _printed(self, value: Any) -> Any:
        """Return a list or object as its text, and anything else unchanged."""
        if not isinstance(value, (list, tuple, dict)):
            return value
        plain = self._marks.plain(value)
        return str(value) if plain == value else self._marks.mark(str(plain))

    def _all_printed(self, values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(map(self._printed, values))
        if isinstance(values, dict):
            return {name: self._printed(value) for name, value in values.items()}
        return self._printed(values)

    def _on_plain(self, function: Any) -> Callable[..., Any]:
        """Call a filter or test with arguments without marks; mark its result again."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            plain = [self._marks.plain(value) for value in args]
            plain_kwargs = self._marks.plain(kwargs)
            found = function(*plain, **plain_kwargs)
            if not isinstance(found, str) or (plain == list(args) and plain_kwargs == kwargs):
                return found
            marked = next((a for a in args if isinstance(a, str)), "")
            return self._marks.like(str(found), marked)

        return called

    def _format(self, text: Any, *args: Any, **kwargs: Any) -> str:
        found: str = str(self._printed(text)) % self._all_printed(kwargs or args)
        return found

    @pass_eval_context
    def _joined(self, context: Any, value: Any, separator: str = "", attribute: Any = None) -> str:
        if attribute is None:
            value = [self._printed(item) for item in value]
        found: str = self._join(context, value, separator, attribute)
        return found

    def _replace_filter(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        texts = [str(self._printed(value)) for value in (text, old, new)]
        return self._replace(texts[0], texts[1], texts[2], -1 if count is None else count)

    def _method(self, name: str, text: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of str that looks at the text."""
        marks = self._marks
        if name == "replace":
            return self._replace(text, *args, **kwargs)
        plain = marks.unmark(text)
        found = getattr(plain, name)(*map(marks.plain, args), **marks.plain(kwargs))
        if plain == text:
            return found
        if name in ("split", "rsplit"):
            separator = marks.plain(args[0] if args else kwargs.get("sep"))
            if separator is None:
                return getattr(text, name)(*args, **kwargs)  # white space has no marks
            return _cut(text, found, len(separator))
        if name in ("partition", "rpartition"):
            return tuple(_cut(text, found, 0))
        if name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
            is_right = name in ("rstrip", "removesuffix")
            start = 0 if is_right else len(text) - len(found)
            if name == "strip":
                start = len(text) - len(plain.lstrip(*map(marks.plain, args)))
            return text[start : start + len(found)]
        return marks.like(found, text) if isinstance(found, str) else found

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        plain = self._marks.unmark(text)
        old = self._marks.plain(old)
        if plain == text or not old:
            return text.replace(old, new, count)
        return new.join(_cut(text, plain.split(old, count), len(old)))


class _Unmarking(NodeTransformer):
    """Makes comparisons and concatenations of a template look at texts as they were."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through(_PLAIN, node.expr)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = _through(_PLAIN_KEYS if is_search else _PLAIN, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through(_PRINTED, item) for item in node.nodes]
        return node


def _through(name: str, node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _cut(text: str, parts: Sequence[str], gap: int) -> list[str]:
    """Cut `text` to the lengths of `parts`, with `gap` characters between them."""
    ends = accumulate(len(part) + gap for part in parts)
    return [text[end - gap - len(part) : end - gap] for part, end in zip(parts, ends, strict=True)]
