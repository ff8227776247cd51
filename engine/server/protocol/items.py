"""Tagged unions in /v1/responses and /v1/messages: items whose fields depend on "type"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.checks import shown
from engine.errors import RequestError, did_you_mean
from engine.server.protocol.annotations import invalid, one_of, wrong_choice
from engine.server.protocol.unknown_fields import is_dropped

__all__ = ["media_hint", "text_of", "typed_item", "typed_items"]

MAX_ITEMS = 4096
MAX_PARTS = 1024
_MEDIA = ("image", "audio", "video")


def media_hint(kind: object) -> str:
    """Return the end of a message that refuses a part of type `kind`; "" if it is no media.

    Examples
    --------
    >>> media_hint("input_image")
    '; this engine serves the text of a model, without image input'
    """
    found = [medium for medium in _MEDIA if isinstance(kind, str) and medium in kind]
    return f"; this engine serves the text of a model, without {found[0]} input" if found else ""


def typed_item(
    item: object, kinds: Mapping[str, type[Any]], where: str, default: str | None = None
) -> Any:
    """Convert an item to the struct for its "type"; null fields count as absent.

    Unknown fields are dropped if they are null or `ignore_unknown_fields` is in effect.

    Parameters
    ----------
    item : object
    kinds : mapping of str to Struct type
    where : str
        Path of the item, for error messages.
    default : str, optional
        Type of an item whose "type" is absent or null.

    Raises
    ------
    RequestError
        If the type is not in `kinds`, or a field is unknown, missing or invalid.
    """
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object; got {shown(item)}")
    kind = default if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in kinds:
        got = f"{shown(kind)}{media_hint(kind)}"
        raise RequestError(f"{where}.type must be {one_of(kinds)}; got {got}")
    struct = kinds[kind]
    fields = {name: value for name, value in item.items() if value is not None and name != "type"}
    known = struct.__struct_encode_fields__
    for name in list(fields):
        if name not in known:
            if is_dropped(f"{where} ({kind})", name, fields[name]):
                del fields[name]
                continue
            hint = did_you_mean(name, known, f"known are {', '.join(known)}")
            raise RequestError(f"{where} ({kind}) has an unknown field {shown(name)}{hint}")
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        if wanted := wrong_choice(reason, struct, path):
            raise RequestError(f"{where}{path} {wanted}") from None
        raise RequestError(f"{where}{path} ({kind}) {invalid(reason)}") from None


def typed_items(items: object, kinds: Mapping[str, type[Any]], where: str) -> list[Any]:
    """Convert each item of a list of at most `MAX_PARTS`; see `typed_item`."""
    if not isinstance(items, list):
        raise RequestError(f"{where} must be a list; got {shown(items)}")
    if len(items) > MAX_PARTS:
        raise RequestError(f"{where} must have at most {MAX_PARTS} items; got {len(items)}")
    return [typed_item(item, kinds, f"{where}[{i}]") for i, item in enumerate(items)]


def text_of(content: object, kinds: Mapping[str, type[Any]], where: str) -> str:
    """Return `content` if it is a str; join the texts if it is a list of text parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in typed_items(content, kinds, where))
