"""OpenAPI 3.1 document, generated from the structs of the request and response bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine import __version__
from engine.sampling_params import RANGES
from engine.server.api_examples import example_of
from engine.server.protocol.errors import ErrorResponse

__all__ = ["Endpoint", "document"]

_SCHEMAS = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Endpoint:
    """One method of one path; each module in `engine.server.routes` lists its own in `ENDPOINTS`.

    Attributes
    ----------
    method, path, summary : str
    request, response : struct or None
        Types of the bodies; None if a body is absent or not JSON.
    media_type : str
        Media type of the response.
    streams : bool
        Whether `stream` turns the response into server-sent events.
    needs_key : bool
    query : tuple of str
        Names of the parameters in the query.
    is_admin : bool
        Whether only an admin key may call it.
    """

    method: str
    path: str
    summary: str
    request: Any = None
    response: Any = None
    media_type: str = "application/json"
    streams: bool = False
    needs_key: bool = True
    query: tuple[str, ...] = ()
    is_admin: bool = False


def document(
    endpoints: tuple[Endpoint, ...], *, has_keys: bool, model: str = "model"
) -> dict[str, Any]:
    """Return the OpenAPI document.

    Parameters
    ----------
    endpoints : tuple of Endpoint
    has_keys : bool
        Whether the server requires API keys.
    model : str
        Name of the model, for the examples.
    """
    types = [t for e in endpoints for t in (e.request, e.response) if t is not None]
    types.append(ErrorResponse)
    refs, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
    by_type = {t: ref for t, ref in zip(types, refs, strict=True)}
    for schema in schemas.values():
        _add_ranges(schema)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, by_type, has_keys, model)
        paths.setdefault(endpoint.path, {})[endpoint.method] = operation
    components: dict[str, Any] = {"schemas": schemas}
    if has_keys or any(endpoint.is_admin for endpoint in endpoints):
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "engine", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(
    endpoint: Endpoint, refs: Mapping[Any, Any], has_keys: bool, model: str
) -> dict[str, Any]:
    schema = refs[endpoint.response] if endpoint.response is not None else {}
    content = {endpoint.media_type: {"schema": schema}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": refs[ErrorResponse]}}
    found: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method}_{endpoint.path.strip('/').replace('/', '_')}",
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "An error", "content": error},
        },
    }
    if endpoint.request is not None:
        body = {"schema": refs[endpoint.request]}
        if (example := example_of(endpoint.path, model)) is not None:
            body["example"] = example
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    if endpoint.is_admin or (has_keys and endpoint.needs_key):
        found["security"] = [{"key": []}]
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    places = [(name, "path") for name in names] + [(name, "query") for name in endpoint.query]
    if places:
        found["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in places
        ]
    return found


def _add_ranges(schema: dict[str, Any]) -> None:
    """Add the ranges of sampling fields to a request's schema."""
    fields = schema.get("properties", {})
    if not {"temperature", "top_p"} <= set(fields):
        return
    for name in RANGES.keys() & fields.keys():
        allowed = RANGES[name]
        for option in fields[name].get("anyOf", [fields[name]]):
            if option.get("type") in ("integer", "number"):
                option["exclusiveMinimum" if allowed.low_open else "minimum"] = allowed.low
                option["maximum"] = allowed.high
