"""A session of LlamaIndex: OpenAILike, its function agent and structured output."""

from __future__ import annotations

import pytest

from tests.clients.libraries.conftest import LONG, MAX_MODEL_LEN

openai_like = pytest.importorskip("llama_index.llms.openai_like")
openai = pytest.importorskip("openai")

from llama_index.core.agent.workflow import FunctionAgent  # noqa: E402
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

ASK = [ChatMessage(role="user", content="What is the capital of France?")]


class City(BaseModel, extra="forbid"):  # a small model adds fields where it may
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(where, name, **options):
    options = {"temperature": 0.0, "max_tokens": 64, "max_retries": 0} | options
    return openai_like.OpenAILike(
        model=name,
        api_base=where.api,
        api_key=where.key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=MAX_MODEL_LEN,
        **options,
    )


def test_a_conversation(server, run):
    llm = model(server, "smollm2")
    found = llm.chat(ASK)
    text = found.message.content
    assert "Paris" in text
    assert found.raw.usage.completion_tokens == 8
    parts = list(llm.stream_chat(ASK))
    assert parts[-1].message.content == text and len(parts) > 4
    assert run(llm.achat(ASK)).message.content == text

    async def stream():
        return [part.delta async for part in await llm.astream_chat(ASK)]

    assert "".join(run(stream())) == text


def test_completions(server):
    llm = model(server, "smollm2", max_tokens=4)
    llm.is_chat_model = False
    text = llm.complete("The capital of France is").text
    assert "Paris" in text
    assert list(llm.stream_complete("The capital of France is"))[-1].text == text


def test_a_loop_with_a_tool(scripted, run):
    llm = model(scripted, "scripted")
    tool = FunctionTool.from_defaults(add)
    answer = llm.chat_with_tools([tool], user_msg="2 + 3?")
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 2, "b": 3})

    async def agent():
        return await FunctionAgent(tools=[tool], llm=llm).run("2 + 3?")

    assert str(run(agent())) == "The sum is 5."
    assert "<result>\n5\n</result>" in scripted.client.prompts[-1]


def test_structured_output(server):
    llm = model(server, "smollm2")
    found = llm.as_structured_llm(City).chat(ASK)
    assert isinstance(found.raw, City)


def test_errors(server):
    llm = model(server, "smollm2")
    with pytest.raises(openai.BadRequestError) as caught:
        llm.chat([ChatMessage(role="user", content=LONG)])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        model(server, "other").chat(ASK)
