"""Bodies as large as they may be: what they cost, and that others are served meanwhile."""

from __future__ import annotations

import json
import time
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from engine.checks import shown
from engine.server.app import build_app
from engine.server.protocol.common import decode_body
from engine.server.protocol.completion import CompletionRequest
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig
from tests.attack import bodies
from tests.attack.target import Target
from tests.server.serving import CannedClient

SIZE = 1 << 20
FILLINGS = bodies.fillings(SIZE)


@pytest.fixture(scope="module")
def requests():
    """The type of each endpoint's request."""
    app = build_app(CannedClient("a"), ServerConfig())
    return {e.path: e.request for e in app.state.endpoints if e.request is not None}


def _structs_in(hint):
    found = [hint] if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else []
    return found + [each for inner in get_args(hint) for each in _structs_in(inner)]


def _missing(example, struct, where=""):
    """Return the fields of a struct, and of those in it, that an example does not have."""
    missing = []
    values = example if isinstance(example, list) else [example]
    values = [each for value in values for each in (value if isinstance(value, list) else [value])]
    for name, hint in get_type_hints(struct).items():
        inside = [value[name] for value in values if isinstance(value, dict) and name in value]
        if not inside:
            missing.append(f"{where}.{name}")
        for inner in _structs_in(hint):
            missing += _missing(inside, inner, f"{where}.{name}")
    return missing


def test_the_attack_knows_every_field_of_every_endpoint(requests):
    assert bodies.EXAMPLES.keys() == requests.keys()
    assert [
        name
        for path, kind in requests.items()
        for name in _missing(bodies.EXAMPLES[path], kind, path)
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", bodies.EXAMPLES)
def test_no_field_takes_long_to_decode(requests, endpoint):
    """1 MiB in each field of a request itself: as CPU time, for other tests may run beside."""
    slow = []
    for name in bodies.EXAMPLES[endpoint]:
        for filling in ("lists", "keys", "long floats", "long numbers", "digits", "depth", "texts"):
            body = bodies.body_of(bodies.EXAMPLES[endpoint], (name,), FILLINGS[filling])
            begin = time.thread_time()
            try:
                decode_body(body, requests[endpoint])
            except APIError as error:
                assert error.status == 400
            taken = time.thread_time() - begin
            slow += [(taken, name, filling)] if taken > 0.6 else []
    assert slow == []


LONG = "at most 10000 numbers of 20 digits or more"
PARTS = "at most 300000 texts, lists and objects in all"


@pytest.mark.parametrize("part, count, words", [
    (b"1.2345678901234567890123e-300,", 10_000, LONG),
    (b"-0.12345678901234567890,", 10_000, LONG),
    (b'{"a":1},', 149_998, PARTS),
    (b'"a\\\\" ,', 299_995, PARTS),
    (b"[],", 299_995, PARTS),
])  # fmt: skip
def test_what_costs_more_than_its_length_is_counted(part, count, words):
    head = b'{"prompt":"a","guided_json":{"enum":['
    found = decode_body(head + part * (count - 5) + b"1]}}", CompletionRequest)
    assert len(found.guided_json["enum"]) == count - 4
    with pytest.raises(APIError, match=words):
        decode_body(head + part * (count + 5) + b"1]}}", CompletionRequest)


def test_json_in_a_text_is_one_text():
    """JSON in a text, as results of tools are."""
    text = json.dumps([{"a": 1234567890123456789, "b": "\\\\"}] * 150_000)
    body = json.dumps({"prompt": text}).encode()
    assert decode_body(body, CompletionRequest).prompt == text


def test_a_value_is_shown_in_an_error_without_sorting_it():
    found = {str(number): number for number in range(1_000_000)}
    begin = time.thread_time()
    text = shown(found)
    assert time.thread_time() - begin < 0.05
    assert text == "{'0': 0, '1': 1, '2': 2, '3': 3, '4': 4, '5': 5, '6': 6, '7': 7, ...}"


def test_a_field_that_is_not_read_is_not_decoded(requests):
    chat: Any = requests["/v1/chat/completions"]
    body = b'{"messages":[{"role":"user","content":"a","audio":{"id":1}}],"prediction":{"a":[1]}}'
    found = decode_body(body, chat)
    assert bytes(found.prediction) == b'{"a":[1]}'
    assert bytes(found.messages[0].audio) == b'{"id":1}'
    with pytest.raises(APIError, match="must be JSON"):
        decode_body(body.replace(b"[1]", b"[1"), chat)


@pytest.mark.slow
def test_health_answers_under_large_bodies():
    with Target(*bodies.OPTIONS) as target:
        found = {figure.name: figure for figure in bodies.attack(target, 0.05)}
    assert found["bodies sent"].value > 10
    assert not found["longest /health"].is_passed, found
