"""/openapi.json is valid, and describes every endpoint with its fields and their ranges."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from starlette.routing import Route

from engine.sampling_params import RANGES
from engine.server.app import build_app
from engine.server.protocol.annotations import structs_in
from engine.server.server_config import ServerConfig, key_hash
from tests.server.serving import CannedClient, serve

UNDESCRIBED = ("/static/", "/v1/engine/")


@pytest.mark.parametrize("hashes", [(), (key_hash("k"),)])
def test_the_published_document_is_valid(hashes):
    with serve(lambda: CannedClient("a"), ServerConfig(api_key_hashes=hashes)) as server:
        headers = {"Authorization": "Bearer k"}
        document = httpx.get(server.url + "/openapi.json", headers=headers).json()
    validate(document, cls=OpenAPIV31SpecValidator)
    assert ("security" in document["paths"]["/v1/completions"]["post"]) == bool(hashes)
    assert "security" not in document["paths"]["/health"]["get"]


def test_every_endpoint_is_described():
    app = build_app(CannedClient("a"), ServerConfig(admin_key_hashes=(key_hash("k"),)))
    described = {(e.method.upper(), e.path) for e in app.state.endpoints}
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        if route.include_in_schema and not path.startswith(UNDESCRIBED):
            for method in route.methods - {"HEAD"}:
                assert (method, path) in described


def test_null_is_the_default_of_every_field():
    """In structs within a request, too; a client may send null for what it leaves out."""
    app = build_app(CannedClient("a"), ServerConfig(admin_key_hashes=(key_hash("k"),)))
    waiting = [e.request for e in app.state.endpoints if e.request is not None]
    seen = set()
    while waiting:
        for struct in set(structs_in(waiting.pop())) - seen:
            seen.add(struct)
            for field in msgspec.structs.fields(struct):
                waiting.append(field.type)
                if not field.required:
                    msgspec.json.decode(b"null", type=field.type)  # raises if it is refused
    assert len(seen) > 20


def test_fields_have_their_ranges():
    with serve(lambda: CannedClient("a")) as server:
        schemas = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert schemas[name]["additionalProperties"] is False
        fields = schemas[name]["properties"]
        for field in RANGES.keys() - {"logprobs"}:
            number = next(o for o in fields[field]["anyOf"] if o["type"] != "null")
            assert number["maximum"] == RANGES[field].high
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
