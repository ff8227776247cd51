"""A session of Instructor, which parses answers into Pydantic models."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients.libraries.conftest import LONG

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from pydantic import BaseModel, Field  # noqa: E402

ASK = [{"role": "user", "content": "Who was the first programmer?"}]
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


class Address(BaseModel, extra="forbid"):  # a small model adds fields where it may
    city: str = Field(max_length=20)


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    address: Address  # a reference within the schema


def fields(**more):
    return {"model": "smollm2", "messages": ASK, "temperature": 0.0, "max_tokens": 128, **more}


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_a_model(server, mode):
    mode = getattr(instructor.Mode, mode)
    client = instructor.from_openai(openai.OpenAI(base_url=server.api, api_key=server.key), mode)
    found, raw = client.create_with_completion(response_model=Person, max_retries=0, **fields())
    assert isinstance(found, Person)
    assert raw.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_streams(server, mode):
    mode = getattr(instructor.Mode, mode)
    client = instructor.from_openai(openai.OpenAI(base_url=server.api, api_key=server.key), mode)
    parts = list(client.create_partial(response_model=Person, **fields()))
    assert len(parts) > 4 and isinstance(Person(**parts[-1].model_dump()), Person)


def test_async(server, run):
    async def create():
        raw = openai.AsyncOpenAI(base_url=server.api, api_key=server.key)
        client = instructor.from_openai(raw)
        return await asyncio.gather(
            *(client.create(response_model=Person, **fields()) for _ in range(3))
        )

    assert all(isinstance(found, Person) for found in run(create()))


@pytest.mark.parametrize("mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_JSON"])
def test_anthropics_protocol(server, scripted, mode, monkeypatch):
    where, name = (server, "smollm2") if mode == "ANTHROPIC_TOOLS" else (scripted, "scripted")
    raw = anthropic.Anthropic(base_url=where.url, api_key=where.key)
    client = instructor.from_anthropic(raw, getattr(instructor.Mode, mode))

    class Simple(BaseModel, extra="forbid"):
        name: str = Field(max_length=20)
        age: int

    if mode == "ANTHROPIC_JSON":  # the schema is only in the prompt
        monkeypatch.setattr(scripted.client, "script", lambda *_: '{"name": "Ada", "age": 36}')
    found = client.create(
        response_model=Simple, max_retries=0, model=name, messages=ASK, max_tokens=128
    )
    assert isinstance(found, Simple)


def test_errors(server):
    raw = openai.OpenAI(base_url=server.api, api_key=server.key, max_retries=0)
    client = instructor.from_openai(raw)
    long = [{"role": "user", "content": LONG}]
    with pytest.raises(Exception, match="maximum context length"):
        client.create(response_model=Person, max_retries=0, **fields(messages=long))
