"""Structured outputs by OpenAI's client over smollm2."""

from __future__ import annotations

import json
import re

import pydantic
import pytest

from engine.text.chat_template import ChatTemplate
from tests.lazily import lazily
from tests.server.serving import CHATML

openai = lazily("openai")

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


def test_a_schema_that_cannot_be_compiled_is_refused(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ASK, response_format=bad, stream=stream)
        assert "nonsense" in str(caught.value)
