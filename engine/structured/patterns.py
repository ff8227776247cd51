"""Regular expressions of JSON Schema (ECMA-262) in the syntax of Rust's regex library."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.checks import shown
from engine.structured.references import SchemaError, Subschema

__all__ = ["all_but", "translated", "whole", "without_look_ahead"]

_SPACES = (
    r"\t\n\x0B\x0C\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}"
    r"\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
)
# ECMA-262's classes, which Rust's library extends to all of Unicode. A "-" behind one is literal.
_CLASSES = {"d": "0-9", "s": _SPACES, "w": "_A-Za-z0-9"}
# llguidance lets a class with all control characters match '"' and "\\" too, even if the class
# excludes them. So negated classes, and ranges from U+0000, leave out U+0000.
_NUL = r"\x00"
_NOT = f"[^{_NUL}"
_PROPERTY = re.compile(r"\{[^{}]*\}|[A-Za-z]")
_RANGE_OF_NUL = re.compile(r"(?:\\x00|\\u0000|\\u\{0+\}|\x00)-(?!\])")
_LINE_ENDS = r"\n\r\u{2028}\u{2029}"
_NOT_LINE_ENDS = f"[^{_LINE_ENDS}]"
_CHAR = r"(?:\\[^\w\s]|[^\\\[\](){}.*+?^$|])"  # one character
_CLASS = r"(?:\[\^?(?:\\.|[^\\\[\]])+\])"
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
        if in_class and (found := _RANGE_OF_NUL.match(text, i - 1)):
            out.append(r"\x01-")
            i = found.end()
        elif char == "\\":
            follows = text[i : i + 1]
            i += 1
            if follows.isascii() and follows.isalpha() and follows not in _LETTERS:
                raise schema.error(f"pattern {shown(text)}: \\{follows} cannot be enforced")
            if members := _CLASSES.get(follows.lower()):
                if in_class and out[-1] == "-":  # with a class beside it, no range
                    out[-1] = r"\-"
                is_negated = follows.isupper()
                is_whole = is_negated or not in_class
                out.append(f"[{'^' * is_negated}{members}]" if is_whole else members)
            elif follows == "P" and (name := _PROPERTY.match(text, i)):
                out.append(rf"{_NOT}\p{name[0]}]")
                i = name.end()
            else:
                out.append(follows if follows in ("<", ">") else char + follows)
        elif in_class:
            in_class = char != "]"
            is_operator = char in "&~-" and out[-1] in (char, "[", _NOT)
            out.append("\\" + char if char == "[" or is_operator else char)
        elif char == "[":
            in_class = True
            if text[i : i + 1] == "^":
                char = _NOT
                i += 1
            if text[i : i + 1] == "]":
                raise schema.error(f"pattern {shown(text)}: [] and [^] cannot be enforced")
            out.append(char)
        else:
            out.append(_NOT_LINE_ENDS if char == "." else char)
    return "".join(out)


def without_look_ahead(text: str) -> tuple[str, ...]:
    r"""Return patterns that match together what a translated pattern does.

    Look-ahead at the start becomes a pattern of its own: any positive one, and of the negative ones
    those that exclude a character there, a text of given characters, or a character anywhere. Other
    look-ahead stays, for the compiler to refuse.

    Examples
    --------
    >>> without_look_ahead(r"^(?=a)(?!\.)\S+$")
    ('^\\S+$', '^(?:a)', '^(?:$|[^\\x00\\u{2E}])')
    """
    rest = text.removeprefix("^")
    found: list[str] = []
    while rest != text and rest[:3] in ("(?=", "(?!"):
        end = next((i for i, char, depth in _scanned(rest) if char == ")" and depth == 0), 0)
        inner = rest[3:end]
        one = f"^(?:{inner})" if rest[2] == "=" else _unless(inner)
        rest = rest[end + 1 :]
        if not end or not one or rest[:1] in ("*", "+", "?", "{"):
            return (text,)
        found.append(one)
    if not found or any(char == "|" and depth == 0 for _, char, depth in _scanned(rest)):
        return (text,)
    return (f"^{rest}", *found)


def _scanned(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield index, character and depth of groups after it, outside of classes and escapes."""
    depth = 0
    in_classes = 0
    is_escaped = False
    for i, char in enumerate(text):
        if is_escaped or char == "\\":
            is_escaped = not is_escaped
        elif char in "[]":
            in_classes = max(0, in_classes + (1 if char == "[" else -1))
        elif not in_classes:
            depth += {"(": 1, ")": -1}.get(char, 0)
            yield i, char, depth


def _unless(text: str) -> str:
    """Return a pattern of the texts that `text` does not match at the start, or "" if unknown."""
    text = text.removeprefix("^")
    if found := re.fullmatch(rf"({_CHAR}|{_CLASS})([*+]\$)?", text):
        other = _negated(found[1])
        return {None: f"^(?:$|{other})", "*$": other, "+$": f"^$|{other}"}[found[2]]
    anywhere = text.removeprefix(f"{_NOT_LINE_ENDS}*")
    if anywhere != text and (found := re.fullmatch(rf"({_CHAR})(\1)?", anywhere)):
        char = _literal(found[1][-1])
        other = f"[^{char}{_LINE_ENDS}]"
        line = f"(?:{char}?{other})*{char}?" if found[2] else f"{other}*"
        return f"^{line}(?:[{_LINE_ENDS}]|$)"
    return ""


def _negated(text: str) -> str:
    """Return the class of all characters but these."""
    if text[0] != "[":
        return f"{_NOT}{_literal(text[-1])}]"
    if text[1] != "^":
        return f"{_NOT}{text[1:]}"
    return f"[{text[2:].removeprefix(_NUL)}"


def all_but(texts: set[str]) -> str:
    """Return a pattern that matches every text except these.

    Examples
    --------
    >>> all_but({"ab"})
    '^(|a(|b[\\\\s\\\\S]+|[^\\\\x00b][\\\\s\\\\S]*)|[^\\\\x00a][\\\\s\\\\S]*)$'
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
    options.append(rf"{_NOT}{firsts}][\s\S]*")
    return "(" + "|".join(options) + ")"


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else rf"\u{{{ord(char):X}}}"


def whole(pattern: str) -> str:
    """Return an expression that matches a whole text if `pattern` is found in it.

    Raises
    ------
    SchemaError
        If an anchor stands within the pattern.

    Examples
    --------
    >>> whole("^a|b$"), whole("c")
    ('(?:a(?s:.*)|(?s:.*)b)', '(?:(?s:.*)c(?s:.*))')
    """
    found = list(_scanned(pattern))
    cuts = [i for i, char, depth in found if char == "|" and depth == 0]
    anchors = {i for i, char, _ in found if char in "^$"}
    options = []
    begin = 0
    for end in (*cuts, len(pattern)):
        is_begun = begin in anchors and pattern[begin] == "^"
        is_ended = end - 1 in anchors and end > begin and pattern[end - 1] == "$"
        inner = pattern[begin + is_begun : end - is_ended]
        used = {begin} if is_begun else set()
        used |= {end - 1} if is_ended else set()
        if any(begin <= i < end and i not in used for i in anchors):
            raise SchemaError(f"pattern {shown(pattern)}: an anchor within it cannot be enforced")
        before = "" if is_begun else "(?s:.*)"
        after = "" if is_ended else "(?s:.*)"
        options.append(f"{before}{inner}{after}")
        begin = end + 1
    return f"(?:{'|'.join(options)})"
