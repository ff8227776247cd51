"""Random bodies of /v1/responses and /v1/messages: a request, or an error that says why."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.server.protocol import anthropic, responses

WORDS = [
    "message", "user", "assistant", "system", "tool", "text", "input_text", "output_text", "auto",
    "any", "none", "required", "function", "function_call", "function_call_output", "reasoning",
    "tool_use", "tool_result", "thinking", "enabled", "json_schema", "json_object", "custom", "",
]  # fmt: skip
KEYS = [
    "type", "role", "content", "text", "name", "arguments", "call_id", "output", "id", "input",
    "tool_use_id", "summary", "thinking", "parameters", "input_schema", "format", "schema",
]  # fmt: skip
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.just(1e300) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=20,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(WORDS), "role": st.sampled_from(WORDS)},
        optional={key: VALUE for key in KEYS[2:]},
    )
    | VALUE,
    max_size=4,
)


def body(kind):
    names = [field.name for field in msgspec.structs.fields(kind)]
    valid = {"model": st.just("m"), "max_tokens": st.just(8)}
    fields = {name: ITEMS | VALUE | valid.get(name, st.nothing()) for name in names}
    start = {"model": "m", "input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    start |= {"max_tokens": 8}
    given = st.fixed_dictionaries({}, optional=fields)
    return given.map(lambda some: {k: v for k, v in start.items() if k in names} | some)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (responses, responses.ResponsesRequest),
        (anthropic, anthropic.MessagesRequest),
        (anthropic, anthropic.CountTokensRequest),
    ],
)
@given(st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_random_bodies(module, kind, data):
    some = data.draw(body(kind))
    with contextlib.suppress(msgspec.ValidationError, RequestError):
        chat = module.to_chat(msgspec.convert(some, kind))
        assert chat.get("model") == some["model"] and chat["messages"]
        assert all(isinstance(message["role"], str) for message in chat["messages"])
        msgspec.json.encode(chat)
