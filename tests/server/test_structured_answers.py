"""Structured outputs by OpenAI's client over smollm2."""

from __future__ import annotations

import json
import re
from typing import Literal

import httpx
import pydantic
import pytest

from engine.structured import sources
from engine.text.chat_template import ChatTemplate
from tests.lazily import lazily
from tests.server.serving import CHATML

openai = lazily("openai")

PART = {"$ref": "#/$defs/Part"}
ASK = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Describe a cat."}],
    "temperature": 0,
    "max_tokens": 80,
}


class Animal(pydantic.BaseModel):
    """What the answers are."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=8)
    legs: int = pydantic.Field(ge=0, le=8)
    is_big: bool


@pytest.fixture(autouse=True, scope="module")
def _library():
    pytest.importorskip("llguidance")


def test_a_pydantic_model(client):
    found = client.chat.completions.parse(**ASK, response_format=Animal)
    assert isinstance(found.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(**ASK, response_format=Animal) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == found.choices[0].message.parsed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [
    {"allowed_token_ids": [5], "guided_choice": ["yes"]},
    {"bad_words": ["yes"], "guided_choice": ["yes"]},
    {"allowed_token_ids": [0], "min_tokens": 3, "stop_token_ids": [0]},
    {"min_tokens": 3, "guided_choice": ["yes"], "stop_token_ids": [105, 6602, 10407]},
], ids=lambda options: " and ".join(options))  # fmt: skip
def test_options_that_forbid_every_token_are_the_clients_error(real_server, options, stream):
    body = {"model": "smollm2", "prompt": "Hi", "max_tokens": 9, "stream": stream}
    answer = httpx.post(real_server.url + "/v1/completions", json=body | options)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    first, second = [name if "guided" not in name else "structured output" for name in options][:2]
    assert "conflicting options: " in message and {first, second} <= {*re.findall(
        r"structured output|allowed_token_ids|bad_words|min_tokens", message
    )}  # fmt: skip


def test_choice_regex_and_n(client):
    guided = {"guided_choice": ["yes", "no"]}
    options = ASK | {"temperature": 1.0, "seed": 3}
    found = client.chat.completions.create(**options, n=4, extra_body=guided)
    assert {c.message.content for c in found.choices} <= {"yes", "no"}
    found = client.completions.create(
        model="smollm2",
        prompt="A year: ",
        max_tokens=10,
        extra_body={"structured_outputs": {"regex": "(19|20)[0-9]{2}"}},
    )
    assert re.fullmatch("(19|20)[0-9]{2}", found.choices[0].text)


def test_a_forced_tool_has_valid_arguments(client, smollm2, monkeypatch):
    template = ChatTemplate(CHATML)  # the model's own has no tools
    monkeypatch.setitem(smollm2.tokenizer._templates, "default", template)
    schema = Animal.model_json_schema()
    tool = {"type": "function", "function": {"name": "describe", "parameters": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "describe"}}):
        found = client.chat.completions.create(**ASK, tools=[tool], tool_choice=choice).choices[0]
        [call] = found.message.tool_calls
        assert call.function.name == "describe"
        Animal.model_validate(json.loads(call.function.arguments))


@pytest.mark.slow
def test_a_forced_tool_that_is_cut_anywhere(client, smollm2, monkeypatch):
    """Its arguments are a beginning of the complete ones, and nothing is content."""
    template = ChatTemplate(CHATML)
    monkeypatch.setitem(smollm2.tokenizer._templates, "default", template)
    tool = {
        "type": "function",
        "function": {"name": "describe", "parameters": Animal.model_json_schema()},
    }
    options = ASK | {"tools": [tool], "tool_choice": "required"}
    [call] = client.chat.completions.create(**options).choices[0].message.tool_calls
    complete = call.function.arguments
    for more in ({"max_tokens": 6}, {"max_tokens": 16}, {"stop": '"legs'}):
        [choice] = client.chat.completions.create(**options | more).choices
        assert choice.message.content in (None, "")
        calls = choice.message.tool_calls or []
        assert all(complete.startswith(call.function.arguments) for call in calls)
        assert choice.finish_reason == ("stop" if "stop" in more else "length")
        with client.chat.completions.stream(**options | more) as stream:
            deltas = [e.chunk.choices[0].delta for e in stream if e.type == "chunk"]
        assert not any(delta.content for delta in deltas)
        found = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(f.arguments for f in found) == "".join(c.function.arguments for c in calls)
        assert [f.name for f in found if f.name] == ["describe"] * len(calls)


class Part(pydantic.BaseModel, extra="forbid"):
    """A definition of one tool's schema; the other tool has another of this name."""

    n: Literal[7]


class Order(pydantic.BaseModel, extra="forbid"):
    """Arguments of one tool."""

    part: Part


def _other_order():
    class Part(pydantic.BaseModel, extra="forbid"):
        n: bool

    class Order(pydantic.BaseModel, extra="forbid"):
        part: Part

    return Order


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_arguments_of_nested_models(real_server, smollm2, monkeypatch, path):
    template = ChatTemplate(CHATML)
    monkeypatch.setitem(smollm2.tokenizer._templates, "default", template)
    models = {"order": Order, "other": _other_order()}
    schemas = {name: model.model_json_schema() for name, model in models.items()}
    assert all(schema["properties"]["part"] == PART for schema in schemas.values())
    functions = [{"name": name, "parameters": schemas[name]} for name in models]
    body = {"model": "smollm2", "temperature": 0, "tool_choice": "required"}
    if path == "chat/completions":
        body |= {"messages": ASK["messages"], "max_tokens": 50, "parallel_tool_calls": False}
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    elif path == "messages":
        body |= {"messages": ASK["messages"], "max_tokens": 50}
        body["tools"] = [{"name": name, "input_schema": schemas[name]} for name in models]
        body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    else:
        body |= {"input": "Describe.", "max_output_tokens": 50, "parallel_tool_calls": False}
        body["tools"] = [{"type": "function"} | function for function in functions]
    answer = httpx.post(f"{real_server.url}/v1/{path}", json=body, timeout=60).json()
    if path == "chat/completions":
        [found] = (call["function"] for call in answer["choices"][0]["message"]["tool_calls"])
    else:
        [found] = answer["content" if path == "messages" else "output"]
    arguments = found["input"] if path == "messages" else json.loads(found["arguments"])
    models[found["name"]].model_validate(arguments)


def test_five_hundred_optional_properties_are_an_ordinary_schema(client):
    properties = {f"property_{i}": {"type": "integer"} for i in range(500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    named = {"name": "x", "schema": schema}
    found = client.chat.completions.create(
        **ASK | {"max_tokens": 8}, response_format={"type": "json_schema", "json_schema": named}
    )
    assert re.match(r'\{\s*("property_[0-9]+|\})', found.choices[0].message.content)


def test_a_limit_hit_while_writing_is_the_clients_error(client, monkeypatch):
    def ask(name):
        properties = {f"{name}{i}": {"type": "integer"} for i in range(40)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return client.completions.create(
            model="smollm2",
            prompt="{}",
            max_tokens=4,
            temperature=0,
            extra_body={"guided_json": schema},
        )

    monkeypatch.setitem(sources._LIMITS, "max_items_in_row", 100)  # not in the worker's process
    with pytest.raises(openai.BadRequestError, match="has 159 items; max is 100"):
        ask("a")
    monkeypatch.undo()
    assert json.loads(ask("b").choices[0].text) == {}


def _chain(count):
    definitions = {
        str(i): {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}}
        for i in range(count)
    }
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(count): {"type": "string"}}}


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ({"json": _chain(3500)}, "it nests too deeply for a stack of 16 MiB"),
        ({"json": {"type": "number", "minimum": 1e-300}}, "cannot be compiled"),
        ({"json": {"$ref": "https://example.com/schema"}}, "remote schemas are not fetched"),
        ({"json": {"anyOf": [{"minLength": i} for i in range(5000)]}}, "more than 4096"),
        ({"regex": "((a{100}){100}){100}"}, "too many expressions"),
        ({"grammar": 'start: x{1000}\nx: y{1000}\ny: "a"{1000}'}, "limit 200000"),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused_by_name(client, grammar, why):
    with pytest.raises(openai.BadRequestError, match=re.escape(why)):
        client.completions.create(
            model="smollm2", prompt="a", max_tokens=1, extra_body={"structured_outputs": grammar}
        )


def test_a_long_chain_of_references(client):
    """Compiling it needs more stack than a thread has by default."""
    guided = {"structured_outputs": {"json": _chain(1200)}}
    found = client.completions.create(model="smollm2", prompt="a", max_tokens=1, extra_body=guided)
    assert found.choices[0].text.strip()[:1] in ("", "{", '"')


def test_a_schema_that_cannot_be_compiled_is_refused(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ASK, response_format=bad, stream=stream)
        assert "nonsense" in str(caught.value)
