"""Regular expressions of JSON Schema (ECMA-262) in the syntax of Rust's regex library."""

from __future__ import annotations

from engine.checks import shown
from engine.structured.references import Subschema

__all__ = ["all_but", "translated"]

_SPACES = (
    r"\t\n\x0B\x0C\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}"
    r"\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
)
_NOT_LINE_ENDS = r"[^\n\r\u{2028}\u{2029}]"
_LETTERS = "dDwWsSnrtfvxuUbBpPk"  # escapes that both know, and some that Rust's library refuses


def translated(schema: Subschema, text: str) -> str:
    """Return a pattern that matches, in Rust's syntax, what `text` matches in JavaScript.

    What neither syntax has, such as a group without end, is left for the compiler to refuse.

    Raises
    ------
    SchemaError
        If the two read it differently.
    """
    out: list[str] = []
    in_class = False
    i = 0
    while i < len(text):
        char = text[i]
        i += 1
        if char == "\\":
            follows = text[i : i + 1]
            i += 1
            if follows.isascii() and follows.isalpha() and follows not in _LETTERS:
                raise schema.error(f"pattern {shown(text)}: \\{follows} cannot be enforced")
            if follows == "s":
                out.append(_SPACES if in_class else f"[{_SPACES}]")
            elif follows == "S":
                out.append(f"[^{_SPACES}]")
            else:
                out.append(follows if follows in ("<", ">") else char + follows)
        elif in_class:
            in_class = char != "]"
            is_operator = char in "&~-" and out[-1] == char
            out.append("\\" + char if char == "[" or is_operator else char)
        elif char == "[":
            in_class = True
            if text[i : i + 1] == "^":
                char += "^"
                i += 1
            if text[i : i + 1] == "]":
                raise schema.error(f"pattern {shown(text)}: [] and [^] cannot be enforced")
            out.append(char)
        else:
            out.append(_NOT_LINE_ENDS if char == "." else char)
    return "".join(out)


def all_but(texts: set[str]) -> str:
    """Return a pattern that matches every text except these.

    Examples
    --------
    >>> all_but({"ab"})
    '^(|a(|b[\\\\s\\\\S]+|[^b][\\\\s\\\\S]*)|[^a][\\\\s\\\\S]*)$'
    """
    return f"^{_all_but(texts)}$"


def _all_but(texts: set[str]) -> str:
    if texts == {""}:
        return r"[\s\S]+"
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    options = [] if "" in texts else [""]
    options += [_literal(first) + _all_but(rest) for first, rest in sorted(by_first.items())]
    firsts = "".join(map(_literal, sorted(by_first)))
    options.append(rf"[^{firsts}][\s\S]*")
    return "(" + "|".join(options) + ")"


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else rf"\u{{{ord(char):X}}}"
