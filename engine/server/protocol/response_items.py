"""/v1/responses/{id}/input_items: pages of the items that a response has answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from engine.server.protocol.errors import APIError

__all__ = ["ItemPage", "ItemQuery", "page_of"]

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ItemQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Query: the items behind the one with the id `after`, by default the newest first."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ItemPage(msgspec.Struct, kw_only=True):
    """Response body of GET /v1/responses/{response_id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def page_of(items: Sequence[Mapping[str, Any]], response_id: str, query: ItemQuery) -> ItemPage:
    """Return a page of items, each complete and with an id.

    Parameters
    ----------
    items : sequence of dict
        All items of the response's input, with those of the responses before it, oldest first.
    response_id : str
    query : ItemQuery

    Raises
    ------
    APIError
        If `query.after` is the id of no item.

    Examples
    --------
    >>> items = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    >>> page = page_of(items, "resp_1", ItemQuery(limit=1))
    >>> page.data[0]["content"], page.has_more
    ([{'type': 'input_text', 'text': 'b'}], True)
    """
    ids = _ids_of(items, response_id)
    order = list(range(len(items)))
    if query.order == "desc":
        order.reverse()
    first = 0
    if query.after is not None:
        if query.after not in ids:
            message = f"after must be the id of an input item; got {query.after[:100]!r}"
            raise APIError(400, message, param="after")
        first = order.index(ids.index(query.after)) + 1
    chosen = order[first : first + query.limit]
    data = [_complete(items[index], ids[index]) for index in chosen]
    return ItemPage(
        data=data,
        first_id=ids[chosen[0]] if chosen else None,
        last_id=ids[chosen[-1]] if chosen else None,
        has_more=first + len(chosen) < len(items),
    )


def _ids_of(items: Sequence[Mapping[str, Any]], response_id: str) -> list[str]:
    """Return an id for each item, each used once and the same in each page.

    An item that was sent without an id, or with that of an item before it, gets another one.
    """
    ids: dict[str, None] = {}
    for index, item in enumerate(items):
        found = str(item.get("id") or "")
        if not found or found in ids:
            digest = hashlib.sha256(f"{response_id}/{index}".encode()).hexdigest()[:32]
            found = f"{_PREFIXES[item.get('type') or 'message']}_{digest}"
        ids[found] = None
    return list(ids)


def _complete(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item with the fields that a client may leave out."""
    kind = item.get("type") or "message"
    found = {**item, "type": kind, "id": item_id, "status": item.get("status") or "completed"}
    if kind == "message" and isinstance(found["content"], str):
        text = found["content"]
        if found["role"] == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        else:
            part = {"type": "input_text", "text": text}
        found["content"] = [part]
    return found
