"""Writes reduced structural tags (`structural_tag.normalized_tag`) as grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["containing", "escaped", "tag_grammar"]

_PLAIN = re.compile(r"[A-Za-z0-9_ <>]|[^\x00-\x7F]")
_ANY = "(?s:.*)"
_LINE_ENDS = {"\n": r"\n", "\r": r"\r"}

# No white space but a space in the separators, which is how models write the JSON of calls.
_ONE_LINE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
_FLEXIBLE = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}


def escaped(text: str) -> str:
    r"""Return an expression that matches `text`, in the syntax of Rust's regex library.

    Examples
    --------
    >>> escaped("</a>")
    '<\\u{2F}a>'
    """
    return "".join(c if _PLAIN.match(c) else rf"\u{{{ord(c):X}}}" for c in text)


def containing(text: str) -> str:
    """Return an expression of the texts that contain `text`.

    Examples
    --------
    >>> containing("a")
    '(?s:.*)a(?s:.*)'
    """
    return f"{_ANY}{escaped(text)}{_ANY}"


def tag_grammar(form: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """Return the grammar of a reduced structural tag.

    Parameters
    ----------
    form : mapping
    special_ids : mapping of str to int
        Special tokens by their text. Where literal text has one, the token is meant.

    Examples
    --------
    >>> form = {"type": "const_string", "value": "a<b>"}
    >>> json.loads(tag_grammar(form, {"<b>": 7}))["grammars"][0]["lark_grammar"]
    'start: "a" <[7]>'
    """
    writer = _Writer(special_ids)
    start = f"start: {writer.expression(form)}"
    main = {"lark_grammar": "\n".join([start, *writer.definitions])}
    return json.dumps({"grammars": [main, *writer.grammars]})


class _Writer:
    """Writes formats as expressions, and collects the definitions they use."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.definitions: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._special_ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._names: dict[tuple[str, str], str] = {}
        self._rules: dict[str, str] = {}  # name of a rule in the format -> in the grammar
        self._num_rules = 0

    def expression(self, form: Mapping[str, Any]) -> str:
        """Return the expression of a format."""
        kind = form["type"]
        if kind == "const_string":
            return self._literal(form["value"])
        if kind == "regex":
            return self._regex_before(form["pattern"], form.get("end", ""))
        if kind == "any_text":
            return self._text(form)
        if kind == "json_schema":
            options = _FLEXIBLE if form["any_whitespace"] else _ONE_LINE
            schema = dict(form["json_schema"])
            schema["x-guidance"] = schema.get("x-guidance", {}) | options
            return self._subgrammar("json_schema", schema)
        if kind == "grammar":
            return self._subgrammar("lark_grammar", form["grammar"])
        if kind == "repeat":
            return f"({self.expression(form['content'])}){_count(form['min'], form['max'])}"
        if kind == "list":
            one = self._defined("r", self.expression(form["content"]))
            more = f"{self.expression(form['separator'])} {one}"
            return f"{one} ({more}){_count(0, form['max'] - 1)}" if form["max"] > 1 else one
        if kind == "rule":
            return self._rules[form["name"]]
        if kind == "rules":
            return self._with_rules(form)
        parts = [self.expression(one) for one in form["elements"]]
        if kind == "or":
            return f"({' | '.join(parts)})"
        return " ".join(parts) or '""'

    def _with_rules(self, form: Mapping[str, Any]) -> str:
        """Return the expression of a format whose parts refer to rules, also to each other."""
        before = self._rules
        first = self._num_rules
        self._rules = {name: f"v{first + i}" for i, name in enumerate(form["rules"])}
        self._num_rules += len(self._rules)
        for name, one in form["rules"].items():
            self.definitions.append(f"{self._rules[name]}: {self.expression(one)}")
        found = self.expression(form["content"])
        self._rules = before
        return found

    def _literal(self, text: str) -> str:
        """Return literal text, with tokens for the special tokens in it."""
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        pieces = []
        at = 0
        for match in self._special.finditer(text) if self._special else ():
            if match.start() > at:
                pieces.append(json.dumps(text[at : match.start()]))
            pieces.append(f"<[{self._special_ids[match[0]]}]>")
            at = match.end()
        if at < len(text):
            pieces.append(json.dumps(text[at:]))
        return pieces

    def _regex_before(self, pattern: str, end: str) -> str:
        """Return a match of an expression up to `end`, which the expression may match too."""
        first, *rest = self._pieces(end) or [""]
        if not first or first.startswith("<"):
            return " ".join([self._defined("T", _regex(pattern)), first, *rest]).rstrip()
        return " ".join([self._defined(f"e[suffix={first}]", _regex(pattern)), *rest])

    def _text(self, form: Mapping[str, Any]) -> str:
        """Return free text, up to the first of the texts that end it."""
        options = [self._text_before(form, end) for end in form["ends"]]
        return f"({' | '.join(options)})" if options else self._terminal(form, "")

    def _text_before(self, form: Mapping[str, Any], end: str) -> str:
        first, *rest = self._pieces(end)
        if first.startswith("<"):  # a special token; a reader finds its spelling too
            return " ".join([self._terminal(form, end), first, *rest])
        before = json.loads(first)
        is_free = not any(form.get(name) for name in ("matches", "also", "excludes"))
        # Where a terminal precedes the text, llguidance reads past an end of one byte.
        text = self._terminal(form, "" if is_free and len(before.encode()) > 1 else before)
        return " ".join([self._defined(f"e[suffix={first}]", text), *rest])

    def _terminal(self, form: Mapping[str, Any], end: str) -> str:
        matches = form.get("matches") or [_ANY]
        excludes = list(form.get("excludes", ()))
        also = list(form.get("also", ()))
        bounds = [containing(one) for one in form.get("never", ())]
        if end:
            bounds.append(containing(end))
        shut = [f"~{_regex(one)}" for one in bounds]
        plain = [*map(_regex, matches), *(f"~{_regex(one)}" for one in excludes), *shut]
        options = [" & ".join(plain), *(" & ".join([_regex(one), *shut]) for one in also)]
        return self._defined("T", " | ".join(options))

    def _defined(self, head: str, body: str) -> str:
        """Return the name of a rule or terminal, which is defined at its first use."""
        key = head, body
        if key not in self._names:
            letter, bracket, options = head.partition("[")
            name = f"{letter}{len(self._names)}"
            self._names[key] = name
            self.definitions.append(f"{name}{bracket}{options}: {body}")
        return self._names[key]

    def _subgrammar(self, kind: str, content: Any) -> str:
        key = kind, json.dumps(content)
        if key not in self._names:
            name = f"g{len(self._names)}"
            self._names[key] = name
            self.grammars.append({"name": name, kind: content})
        return f"@{self._names[key]}"


def _regex(pattern: str) -> str:
    """Return an expression between slashes."""
    out: list[str] = []
    is_escaped = False
    for char in pattern:
        if char == "/" and not is_escaped:
            out.append("\\")
        if is_escaped and char in _LINE_ENDS:
            out.pop()
        out.append(_LINE_ENDS.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(out)}/"


def _count(low: int, high: int | None) -> str:
    if (low, high) == (1, 1):
        return ""
    if (low, high) == (0, 1):
        return "?"
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"
