"""A session of LangChain: ChatOpenAI, ChatAnthropic, OpenAI, OpenAIEmbeddings."""

from __future__ import annotations

import pytest

from tests.clients.libraries.conftest import LONG

langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")

from langchain_core import exceptions  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

ASK = "What is the capital of France?"


class City(BaseModel, extra="forbid"):  # a small model adds fields where it may
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request):
    def make(where, name, **options):
        options = {"temperature": 0.0, "max_tokens": 64, "max_retries": 0} | options
        fields = {"model": name, "api_key": where.key, **options}
        if request.param == "anthropic":
            return langchain_anthropic.ChatAnthropic(base_url=where.url, **fields)
        # With a base_url it asks for the usage of a stream only if told to.
        options = {"use_responses_api": request.param == "responses", "stream_usage": True}
        return langchain_openai.ChatOpenAI(base_url=where.api, **options, **fields)

    return make


def test_a_conversation(model, server, run):
    chat = model(server, "smollm2")
    found = chat.invoke(ASK)
    assert "Paris" in found.text
    assert found.usage_metadata["output_tokens"] == 8
    parts = list(chat.stream(ASK))
    assert "".join(part.text for part in parts) == found.text
    assert len(parts) > 4
    whole = sum(parts[1:], parts[0])
    assert whole.usage_metadata["output_tokens"] == 8
    assert run(model(server, "smollm2").ainvoke(ASK)).text == found.text
    assert [each.text for each in chat.batch([ASK, ASK])] == [found.text] * 2
    assert chat.invoke([HumanMessage(ASK), found, HumanMessage("And of Italy?")]).text


def test_a_loop_with_a_tool(model, scripted):
    chat = model(scripted, "scripted").bind_tools([add])
    messages = [HumanMessage("2 + 3?")]
    for stream in (False, True):
        asked = list(messages)
        if stream:
            parts = list(chat.stream(asked))
            answer = sum(parts[1:], parts[0])
        else:
            answer = chat.invoke(asked)
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
        result = add.invoke(call)
        assert isinstance(result, ToolMessage) and result.content == "5"
        last = chat.invoke([*asked, answer, result])
        assert isinstance(last, AIMessage) and last.text == "The sum is 5."


def test_structured_output(model, server):
    chat = model(server, "smollm2")
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(City, method=method).invoke(ASK)
        assert isinstance(found, City)


def test_errors(model, server, run):
    chat = model(server, "smollm2")
    with pytest.raises(exceptions.ContextOverflowError):
        chat.invoke(LONG)
    with pytest.raises(exceptions.ContextOverflowError):
        list(chat.stream(LONG))
    with pytest.raises(exceptions.ContextOverflowError):
        run(model(server, "smollm2").ainvoke(LONG))
    with pytest.raises(exceptions.ModelNotFoundError):
        model(server, "other").invoke(ASK)
    with pytest.raises(exceptions.ModelInvalidRequestError):
        model(server, "smollm2", temperature=-1.0).invoke(ASK)


def test_completions_and_embeddings(server):
    fields = {"model": "smollm2", "base_url": server.api, "api_key": server.key}
    llm = langchain_openai.OpenAI(**fields, temperature=0, max_tokens=4)
    text = llm.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(llm.stream("The capital of France is")) == text
    # By default it counts tokens with tiktoken, whose files it downloads.
    embeddings = langchain_openai.OpenAIEmbeddings(**fields, check_embedding_ctx_length=False)
    found = embeddings.embed_documents(["one", "two"])
    assert [len(vector) for vector in found] == [576, 576]
    assert embeddings.embed_query("one") == pytest.approx(found[0], abs=1e-6)
