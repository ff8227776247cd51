"""The sandbox in which chat templates run: no escape, and bounded time and memory.

A template comes with a model, so it is untrusted code. Jinja's immutable sandbox keeps it from
Python's internals and from modifying its arguments. In addition, every loop iteration and every
new text or container passes a checkpoint here and is charged to a `Budget`: a template that
doubles a string forty times fails after the twenty-fourth.

The checkpoints are inserted into the syntax tree before it is compiled, because in Jinja's own
code slices, literals and ``~`` never reach the environment.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_CHARS", "Budget", "Sandbox", "spending"]

MAX_CHARS = 16_000_000  # of one text, or of one container with its contents
MAX_TOTAL = 256_000_000  # characters created in one rendering, in total
MAX_SECONDS = 2.0  # of this thread's CPU time, which does not depend on the machine's load
_ITEM = 8  # charge for a number, or for an element of a container
_MAX_BITS = 4096  # of an integer
_LONG_WIDTH = re.compile(r"\*|\d{4,}")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*")

_REMOVED_FILTERS = frozenset(
    [
        "attr",  # reads attributes
        "random",  # not reproducible
        *("batch", "center", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr"),
    ]
)
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict, range, Undefined)
_FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class Budget:
    """What one rendering may still use; every checkpoint deducts from it."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._left = MAX_TOTAL
        # Containers are immutable in this sandbox, so sizes can be cached. The object is kept
        # alive with its size, so that no other object gets its id.
        self._sizes: dict[int, tuple[object, int]] = {}

    def tick(self) -> None:
        """Raise once `MAX_SECONDS` have passed."""
        if time.thread_time() > self._deadline:
            raise SecurityError(f"the template runs longer than {MAX_SECONDS:g} s")

    def reserve(self, chars: int) -> None:
        """Raise if a text of `chars` characters, about to be created, exceeds a limit."""
        self._check(chars)
        if chars > self._left:
            raise SecurityError(f"the template makes more than {MAX_TOTAL} characters")

    def charge(self, value: Any) -> Any:
        """Charge for `value`, a new text or container, and return it."""
        if isinstance(value, str):
            cost = len(value)
        elif isinstance(value, (list, tuple, dict)):
            cost = _ITEM * len(value)
        else:
            return value
        self._check(self.size(value))
        self.reserve(cost)
        self._left -= cost
        return value

    def size(self, value: Any) -> int:
        """Return the number of characters of `value` in full, counting shared parts repeatedly."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return _ITEM
        known = self._sizes.get(id(value))
        if known is None:
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            known = value, _ITEM + sum(map(self.size, parts))
            self._sizes[id(value)] = known
        return known[1]

    def _check(self, chars: int) -> None:
        if chars > MAX_CHARS:
            raise SecurityError(f"the template makes a text of more than {MAX_CHARS} characters")


_BUDGET: ContextVar[Budget] = ContextVar("chat_template_budget")


@contextlib.contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Charge everything rendered in the `with` block to `budget`."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the dialect of chat templates and with a budget.

    Parameters
    ----------
    functions : mapping of str to callable
        Functions that templates may call besides range and namespace.
    filters : mapping of str to callable
        Filters besides Jinja's own harmless ones.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], filters: Mapping[str, Callable[..., Any]]
    ) -> None:
        # Not optimized: constant folding would evaluate expressions without a budget.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printable,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        names = ("range", "namespace")
        self.globals = {name: self.globals[name] for name in names} | dict(functions)
        kept = {name: f for name, f in self.filters.items() if name not in _REMOVED_FILTERS}
        kept |= {"join": _join, "replace": _replace, "indent": _indent, "format": _format}
        self.filters = {name: _guarded(f) for name, f in (kept | dict(filters)).items()}

    def parse_guarded(self, source: str) -> nodes.Template:
        """Parse `source` and insert the checkpoints into its tree."""
        tree = self.parse(source)
        for node in tree.find_all(_FORBIDDEN_NODES):
            kind = type(node).__name__.lower()
            raise TemplateSyntaxError(f"a chat template must not {kind} another", node.lineno)
        guarded: nodes.Template = _Checkpoints().visit(tree)
        guarded.set_environment(self)
        return guarded

    def same(self, value: Any = None) -> Any:
        """Check the time and return `value`."""
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of output of a block or of the whole template."""
        budget, found, total = _BUDGET.get(), [], 0
        for piece in pieces:
            total += len(piece)
            budget.reserve(total)
            found.append(piece)
        return str(budget.charge("".join(found)))

    def tilde(self, *values: Any) -> str:
        """Implement the operator ``~``."""
        return self.concat(str(_printable(value)) for value in values)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once; Jinja would continue with an undefined value that renders as empty."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template, checking the budget before and after."""
        budget = _BUDGET.get()
        budget.tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(budget, owner, function.__name__, args)
        return budget.charge(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``+ * ** %`` within the budget."""
        budget = _BUDGET.get()
        if isinstance(left, str) and operator == "%":
            return _percent(left, right)
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            sized, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
                budget.reserve(budget.size(sized) * max(times, 0))
        return budget.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a `str.format` that refuses huge widths."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = str(value.__self__), value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            return _Formatter(self).vformat(text, args, kwargs)

        return bounded


class GenerationTag(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``, which mark text for training.

    They have no effect when a prompt is rendered: the block is its body.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body, in its own scope."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Checkpoints(NodeTransformer):
    """Inserts a call into every loop, and around whatever creates a text or a container."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("same", [], node.lineno)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("tilde", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(node)

    def _charged(self, node: nodes.Expr) -> nodes.Node:
        return _environment_call("same", [node], node.lineno)


def _environment_call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    # Not by name, which the template could rebind.
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if _LONG_WIDTH.search(format_spec):
            raise SecurityError(f"the format {format_spec[:40]!r} is too wide")
        return super().format_field(_printable(value), format_spec)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return filter `function` with checks of the budget before and after."""

    @functools.wraps(function)  # keeps Jinja's markers of what to pass first
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.tick()
        return budget.charge(function(*args, **kwargs))

    return checked


def _printable(value: Any) -> Any:
    """Return `value` if it may be rendered; functions and the like would show addresses."""
    if not isinstance(value, _PLAIN):
        raise SecurityError(f"a {type(value).__name__} must not be rendered")
    return value


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * max(right, 1) if operator == "**" else 0
    bits = left.bit_length() + right.bit_length() if operator == "*" else bits
    if bits > _MAX_BITS:
        raise SecurityError(f"the template makes a number of more than {_MAX_BITS} bits")


def _check_method(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Reserve the result of method `name` of `text`; return its arguments."""
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        width = max((arg for arg in args if isinstance(arg, int)), default=8)
        budget.reserve(width * max(text.count("\t"), 1))
    elif name == "replace" and len(args) >= 2:
        _reserve_replace(budget, text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        items = [_printable(item) for item in args[0]]
        budget.reserve(sum(map(budget.size, items)) + len(text) * len(items))
        return (items,)
    elif name in ("translate", "maketrans", "encode"):
        raise SecurityError(f"str.{name} is not allowed")
    return args


def _reserve_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.reserve(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join by attribute is not allowed; use map(attribute=...) before it")
    items = [_printable(item) for item in value]
    budget = _BUDGET.get()
    budget.reserve(sum(map(budget.size, items)) + len(str(d)) * len(items))
    return str(d).join(map(str, items))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(_printable(value)) for value in (s, old, new))
    _reserve_replace(_BUDGET.get(), text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent every line except the first and empty ones, as Jinja does."""
    text = str(_printable(s))
    size = len(width) if isinstance(width, str) else width
    _BUDGET.get().reserve(len(text) + size * (len(text.splitlines()) + 1))
    prefix = width if isinstance(width, str) else " " * width
    head, *lines = (text + "\n").splitlines()
    rest = [prefix + line if line or blank else line for line in lines]
    return (prefix if first else "") + "\n".join([head, *rest])


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    return _percent(str(_printable(value)), kwargs or args)


def _percent(text: str, values: Any) -> str:
    for field in _PERCENT_FIELD.findall(text):
        if _LONG_WIDTH.search(field.partition(")")[2] or field):
            raise SecurityError(f"the format {field[:40]!r} is too wide")
    budget = _BUDGET.get()
    items = values if isinstance(values, tuple) else (values,)
    parts = sum(budget.size(_printable(item)) for item in items)
    budget.reserve(len(text) + parts * max(text.count("%"), 1))
    return str(budget.charge(text % values))
