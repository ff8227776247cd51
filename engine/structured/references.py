"""Finds what the references of a JSON schema mean: `$ref`, `$id`, `$anchor`, JSON pointers.

Only positions that hold schemas are searched: a property named "$ref", or a constant that contains
one, is no reference. Nothing is ever fetched.
"""

from __future__ import annotations

import enum
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from engine.checks import shown

__all__ = ["OWN_DOCUMENT", "Document", "Draft", "SchemaError", "Subschema"]

OWN_DOCUMENT = "x-engine-document"
"""A keyword of ours: its value is a schema whose references do not see the schema around it.

Of the keywords beside it only two count: `title` names the document in messages, and `type` is that
of the arguments of a call, whatever else the schema allows.
"""

# Keywords whose value is a schema, a list of schemas, or an object with schemas as values.
_ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LISTS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_MAPS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)


class SchemaError(ValueError):
    """A schema is not valid, or uses something that cannot be enforced."""


class Draft(enum.IntEnum):
    """A version of JSON Schema."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019 = 8
    DRAFT_2020 = 9


_DRAFTS = {
    "draft-04/schema": Draft.DRAFT_4,
    "draft-06/schema": Draft.DRAFT_6,
    "draft-07/schema": Draft.DRAFT_7,
    "draft/2019-09/schema": Draft.DRAFT_2019,
    "draft/2020-12/schema": Draft.DRAFT_2020,
    "schema": Draft.DRAFT_2020,
    "spec.openapis.org/oas/3.1/dialect/base": Draft.DRAFT_2020,
}


class Subschema:
    """A schema within a document; each position has exactly one object.

    Attributes
    ----------
    value : dict or bool
    base : str
        URI that its references are relative to.
    draft : Draft
    where : str
        Its place, for messages, such as "#/properties/a".
    document : Document
    """

    __slots__ = ("base", "document", "draft", "value", "where")

    def __init__(self, value: Any, base: str, draft: Draft, where: str, document: Document) -> None:
        self.value = value
        self.base = base
        self.draft = draft
        self.where = where
        self.document = document

    def child(self, *path: str | int) -> Subschema:
        """Return the schema at `path` below this one."""
        value = self.value
        for step in path:
            value = value[step]
        where = "/".join([self.where, *map(_escaped, path)])
        return self.document.at(value, self, where)

    def error(self, why: str) -> SchemaError:
        """Return an error that names this place."""
        return SchemaError(f"{why} (at {self.where[:200]})")


class Document:
    """One schema document: its resources (`$id`), anchors and the targets of its references.

    Parameters
    ----------
    value : dict or bool
    where : str
        Its place, for messages.

    Attributes
    ----------
    root : Subschema

    Raises
    ------
    SchemaError
        If a place for a schema holds something else, an `$id` or anchor is used twice, or a
        `$schema` is unknown.
    """

    def __init__(self, value: Any, where: str = "#") -> None:
        self._known: dict[int, Subschema] = {}
        self._values: list[Any] = []  # keeps ids of values in use
        self._resources: dict[str, Subschema] = {}
        self._anchors: dict[tuple[str, str], Subschema] = {}
        self._dynamic: dict[str, set[str]] = {}  # anchor -> URIs of the resources that have it
        self._has_draft = False
        self._recursive: set[str] = set()  # URIs of resources with `$recursiveAnchor`
        self.root = Subschema(value, "", Draft.DRAFT_2020, where, self)
        self._add(self.root, is_root=True)

    def at(self, value: Any, parent: Subschema, where: str) -> Subschema:
        """Return the schema `value`, which stands below `parent`."""
        found = self._known.get(id(value)) if isinstance(value, dict) else None
        if found is None:
            found = Subschema(value, parent.base, parent.draft, where, self)
            self._add(found)
        return found

    def target(self, of: Subschema, keyword: str) -> Subschema:
        """Return what `$ref`, `$dynamicRef` or `$recursiveRef` of a schema refers to.

        Raises
        ------
        SchemaError
            If there is no such schema in the document, or it depends on the path that evaluation
            takes.
        """
        reference = of.value[keyword]
        if not isinstance(reference, str):
            raise of.error(f"{keyword} must be a string; got {shown(reference)}")
        found, anchor = self._resolve(of, reference, keyword)
        if keyword == "$dynamicRef" and found.value is not True and found.value is not False:
            is_dynamic = anchor and found.value.get("$dynamicAnchor") == anchor
            if is_dynamic and len(self._dynamic[anchor]) > 1:
                raise of.error(
                    f"$dynamicRef {shown(reference)} cannot be enforced: "
                    f"several resources have this $dynamicAnchor"
                )
        has_several = len({id(schema) for schema in self._resources.values()}) > 1
        if keyword == "$recursiveRef" and self._recursive and has_several:
            raise of.error("$recursiveRef cannot be enforced in a schema of several resources")
        return found

    def _resolve(self, of: Subschema, reference: str, keyword: str) -> tuple[Subschema, str]:
        """Return the schema and, if the reference names one, the anchor."""
        uri, _, fragment = _joined(of.base, reference).partition("#")
        root = self._resources.get(uri)
        if root is None:
            raise of.error(
                f"{keyword} {shown(reference)} refers to a document that is not in the schema; "
                "remote schemas are not fetched"
            )
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchor = self._anchors.get((uri, fragment))
            if anchor is None:
                raise of.error(f"{keyword} {shown(reference)}: the schema has no such anchor")
            return anchor, fragment
        found = root
        value = root.value
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and re.fullmatch(r"0|[1-9][0-9]{0,9}", step):
                value = value[int(step)] if int(step) < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
            if value is None:
                raise of.error(f"{keyword} {shown(reference)} refers to nothing in the schema")
            if isinstance(value, dict):
                found = self._known.get(id(value), found)
        return self.at(value, found, f"{root.where}{fragment}"), ""

    def _add(self, start: Subschema, *, is_root: bool = False) -> None:
        """Record a schema and all below it."""
        todo = [(start, is_root)]
        while todo:
            schema, is_root = todo.pop()
            value = schema.value
            if isinstance(value, bool):
                if is_root:
                    self._resources[""] = schema
                continue
            if not isinstance(value, dict):
                raise schema.error(f"a schema must be an object or a boolean; got {shown(value)}")
            if id(value) in self._known:
                continue
            self._known[id(value)] = schema
            self._values.append(value)
            self._read_identity(schema, is_root=is_root)
            for path, below in _below(value):
                where = "/".join([schema.where, *map(_escaped, path)])
                todo.append((Subschema(below, schema.base, schema.draft, where, self), False))

    def _read_identity(self, schema: Subschema, *, is_root: bool) -> None:
        value = schema.value
        if "$schema" in value:
            schema.draft = _draft(schema, value["$schema"])
            self._has_draft = True
        if is_root:
            self._resources[""] = schema
        has_only_reference = schema.draft <= Draft.DRAFT_7 and "$ref" in value
        name = value.get("id" if schema.draft == Draft.DRAFT_4 else "$id")
        if isinstance(name, str) and not has_only_reference:
            if "$ref" in value and not is_root and not self._has_draft:
                raise schema.error("$id beside $ref depends on the draft; the schema needs $schema")
            self._identify(schema, name)
        if schema.draft >= Draft.DRAFT_2019:
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := value.get(keyword), str):
                    self._anchor(schema, anchor)
                    if keyword == "$dynamicAnchor":
                        self._dynamic.setdefault(anchor, set()).add(schema.base)
            if value.get("$recursiveAnchor") is True:
                self._recursive.add(schema.base)

    def _identify(self, schema: Subschema, name: str) -> None:
        uri, _, fragment = _joined(schema.base, name).partition("#")
        if name.startswith("#"):  # an anchor, in drafts before 2019-09
            if fragment:
                self._anchor(schema, urllib.parse.unquote(fragment))
        elif uri != schema.base or fragment:
            if uri in self._resources:
                raise schema.error(f"two schemas have the $id {shown(uri)}")
            schema.base = uri
            self._resources[uri] = schema
            if fragment:
                self._anchor(schema, urllib.parse.unquote(fragment))

    def _anchor(self, schema: Subschema, name: str) -> None:
        if self._anchors.setdefault((schema.base, name), schema) is not schema:
            raise schema.error(f"two schemas have the anchor {shown(name)}")


def _below(value: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield path and value of each schema directly below a schema."""
    for key, inner in value.items():
        if key in _LISTS and isinstance(inner, list):
            for i, item in enumerate(inner):
                yield (key, i), item
        elif key in _MAPS and isinstance(inner, dict):
            for name, item in inner.items():
                if not (key == "dependencies" and isinstance(item, list)):
                    yield (key, name), item
        elif key in _ONE and isinstance(inner, dict | bool):
            yield (key,), inner


def _draft(schema: Subschema, name: object) -> Draft:
    text = name.split("://")[-1].rstrip("#/") if isinstance(name, str) else ""
    draft = _DRAFTS.get(text.removeprefix("json-schema.org/"))
    if draft is None:
        raise schema.error(
            f"$schema must be a draft of JSON Schema (4 to 2020-12); got {shown(name)}"
        )
    return draft


def _joined(base: str, reference: str) -> str:
    """Return the URI of a reference.

    Raises
    ------
    SchemaError
        If it is no URI.

    Examples
    --------
    >>> _joined("http://a/b/c?d", "../e#f"), _joined("urn:a", "#f"), _joined("", "b")
    ('http://a/e#f', 'urn:a#f', 'b')
    """
    if reference[:1] in ("", "#"):  # urljoin would forget a base of another scheme, such as "urn:"
        return base + reference
    try:
        return urllib.parse.urljoin(base, reference)
    except ValueError as error:
        raise SchemaError(f"{shown(reference)} is no URI ({error})") from None


def _escaped(step: str | int) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")
