"""Arithmetic on the sizes of a call: "2*F", "N // 32", "2*M*N*K", "N % 8 == 0".

A text is parsed by `ast` and walked here: only numbers, symbols, + - * / // % **, comparisons,
`and`, `or`, and the functions of FUNCTIONS.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ConfigError

__all__ = ["FUNCTIONS", "Expression"]

Number = int | float

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
"""Functions that an expression may call."""


def _divide(a: Number, b: Number) -> Number:
    """Return a / b; of two integers only if it is one, since a size is."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Expression:
    """An expression in named sizes.

    Parameters
    ----------
    text : str or int or float
        "2F" is read as "2*F", but "2e3" is a number.
    where : str
        Place of the text, for errors.

    Attributes
    ----------
    text : str
    symbols : frozenset of str

    Raises
    ------
    ConfigError
        If the text is no such expression.

    Examples
    --------
    >>> Expression("ceil_div(N, 32) + 1").value({"N": 65})
    4
    >>> Expression("2F").solve({}, 64)
    ('F', 32)
    """

    def __init__(self, text: str | Number, where: str = "expression") -> None:
        self.text = re.sub(r"\b(\d+)(?=[A-Za-z_])(?![eE][+-]?\d|_\d)", r"\1*", str(text).strip())
        self._where = where
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except SyntaxError:
            raise self._invalid(self.text) from None
        for node in ast.walk(self._tree):
            self._check(node)
        called = {n.func for n in ast.walk(self._tree) if isinstance(n, ast.Call)}
        self.symbols = frozenset(
            node.id
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Name) and node not in called
        )

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    @property
    def is_symbol(self) -> bool:
        """Whether it is one symbol and nothing else."""
        return isinstance(self._tree, ast.Name)

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """Return its value: a number, or a bool if it compares.

        Raises
        ------
        ConfigError
            If `sizes` lacks a symbol, a divisor is 0, a float overflows, or the value is complex.
        """
        try:
            return self._evaluated(self._tree, sizes)
        except KeyError as error:
            known = ", ".join(sorted(map(str, sizes))) or "none"
            raise ConfigError(
                f"{self._where}: {self.text!r} needs {error.args[0]!r}; known: {known}"
            ) from None

    def solve(self, sizes: Mapping[str, int], total: int) -> tuple[str, int] | None:
        """Return the one symbol that `sizes` lacks, and its value if the expression is `total`.

        None if no non-negative integer fits, or several may.

        Raises
        ------
        ConfigError
            If a known part divides by 0 or overflows.
        """
        node = self._tree
        while not isinstance(node, ast.Name):
            if not isinstance(node, ast.BinOp):
                return None
            sides = [self._known(side, sizes) for side in (node.left, node.right)]
            if sides.count(None) != 1:
                return None
            found = _solved_side(node.op, sides[0], sides[1], total)
            if found is None or found < 0:
                return None
            total = found
            node = node.left if sides[0] is None else node.right
        return node.id, total

    def _known(self, node: ast.expr, sizes: Mapping[str, int]) -> int | None:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return self._evaluated(node, sizes) if names <= set(sizes) else None

    def _evaluated(self, node: ast.expr, sizes: Mapping[str, Any]) -> Any:
        try:
            value = self._value(node, sizes)
            float(value)  # flops and bytes are floats; an integer may be too large
            return value
        except ZeroDivisionError:
            raise ConfigError(f"{self._where}: {self.text!r} divides by 0") from None
        except OverflowError:
            raise ConfigError(f"{self._where}: {self.text!r} overflows a float") from None
        except TypeError:  # a fractional power of a negative number is complex
            raise ConfigError(f"{self._where}: {self.text!r} is no real number") from None

    def _value(self, node: ast.expr, sizes: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.UnaryOp):
            return -self._value(node.operand, sizes)
        if isinstance(node, ast.BinOp):
            left = self._value(node.left, sizes)
            return _BINARY[type(node.op)](left, self._value(node.right, sizes))
        if isinstance(node, ast.BoolOp):
            parts = (bool(self._value(part, sizes)) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.Compare):
            sides = [self._value(side, sizes) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return FUNCTIONS[node.func.id](*(self._value(part, sizes) for part in node.args))

    def _check(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            ok = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            is_pair = len(node.args) == 2 or (len(node.args) > 2 and name != "ceil_div")
            ok = name in FUNCTIONS and is_pair and not node.keywords
        elif isinstance(node, ast.operator):
            ok = type(node) in _BINARY
        elif isinstance(node, ast.cmpop):
            ok = type(node) in _COMPARISONS
        else:
            plain = (ast.Name, ast.Load, ast.BinOp, ast.BoolOp, ast.boolop, ast.Compare)
            ok = isinstance(node, (*plain, ast.UnaryOp, ast.USub))
        if not ok:
            raise self._invalid(ast.unparse(node) if isinstance(node, ast.expr) else self.text)

    def _invalid(self, part: str) -> ConfigError:
        hint = "; equality is ==" if re.search(r"[^=<>!]=[^=]", part) else ""
        return ConfigError(
            f"{self._where}: must be numbers, symbols, + - * / // % **, comparisons and "
            f"{', '.join(FUNCTIONS)} of two values (min, max: or more); got {part!r}{hint}"
        )


def _solved_side(op: ast.operator, left: int | None, right: int | None, total: int) -> int | None:
    """Return the unknown side of ``left op right == total``; the other one is given."""
    known = left if right is None else right
    assert known is not None
    if isinstance(op, ast.Add):
        return total - known
    if isinstance(op, ast.Sub):
        return total + known if left is None else known - total
    if isinstance(op, ast.Mult):
        return total // known if known and total % known == 0 else None
    if isinstance(op, ast.Div) and left is None:
        return total * known
    return None
