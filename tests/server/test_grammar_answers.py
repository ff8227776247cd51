"""Calls and structured answers of smollm2 in a model's own format, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest

from engine.async_engine import AsyncEngine
from engine.llm_engine import LLMEngine
from engine.server.chat_stream import ChatService
from engine.server.server_config import ServerConfig
from engine.text.chat_template import ChatTemplate
from tests.server.serving import CHATML, serve

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "How is the weather in Rome in the next days?"}]
TEMPLATE = CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
THINKS_NOT = {"chat_template_kwargs": {"enable_thinking": False}}
CHAT = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 90}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def tool(name, schema=SCHEMA, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.fixture(scope="module")
def server(smollm2):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(smollm2.tokenizer._templates, "default", ChatTemplate(TEMPLATE))
        options = {"max_num_seqs": 8, "max_model_len": 512, "num_blocks": 256}
        config = ServerConfig(served_model_name=("smollm2",))
        with serve(lambda: AsyncEngine(LLMEngine(smollm2, **options)), config) as found:
            yield found


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture
def set_format(server):
    """A function that lets the server read calls in a format, and thoughts."""

    def set_parsers(name):
        parsers = {"tool_parser": name, "reasoning_parser": "qwen3"}
        server.app.state.chat = ChatService(server.client, **parsers)

    return set_parsers


@pytest.fixture
def http(client, set_format):
    """A client of a server that reads calls as Hermes has them."""
    set_format("hermes")
    return client


def ask(http, **fields):
    answer = http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "kimi_k2"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls_are_valid(http, set_format, name, choice):
    set_format(name)
    fields = {"tools": [tool("weather"), tool("news")], "tool_choice": choice}
    found = ask(http, **fields, **THINKS_NOT, parallel_tool_calls=False)
    [call] = found["message"]["tool_calls"]
    assert found["message"]["content"] is None
    assert found["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert call["function"]["name"] in (("weather", "news") if choice == "required" else "weather")
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("name", [None, "hermes"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_arguments_are_objects(http, set_format, name, choice):
    """Also without `type`, and where calls are JSON since no format is known."""
    set_format(name)
    days = {"properties": {"days": {"const": 3}}, "additionalProperties": False}
    fields = {"tool_choice": choice, "parallel_tool_calls": False, **THINKS_NOT}
    found = ask(http, **fields, tools=[tool("weather", days | {"required": ["days"]})])
    [call] = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"days": 3}
    asked = CHAT | fields | {"tools": [tool("weather", {"type": "array"})]}
    error = http.post("/v1/chat/completions", json=asked).json()["error"]
    assert error["param"] == "tools"
    assert "must be an object (at tools[0].function.parameters#)" in error["message"]


def test_an_answer_that_is_cut_in_its_block_ends_with_length(http):
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nThe user"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    for more in ({"response_format": FORMAT}, {"tools": [tool("weather")], "tool_choice": NAMED}):
        found = ask(http, **fields, **more, max_tokens=12)
        message = found["message"]
        assert found["finish_reason"] == "length"
        assert message["reasoning_content"]
        assert not message["content"] and not message.get("tool_calls")


def test_json_comes_with_or_without_a_block(http):
    message = ask(http, response_format=FORMAT, **THINKS_NOT)["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    message = ask(http, response_format=FORMAT)["message"]  # the model never ends its thoughts
    assert len(message["reasoning_content"]) > 100 and message["content"] == ""


def test_a_schema_that_cannot_be_enforced_ends_no_other_request(http):
    bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    for fields in (
        {"tools": [tool("weather"), tool("bad", bad)], "tool_choice": "required"},
        {"tools": [tool("weather"), tool("bad", bad, strict=True)]},
    ):
        with ThreadPoolExecutor(1) as executor:
            other = executor.submit(ask, http, response_format=FORMAT, **THINKS_NOT)
            answer = http.post("/v1/chat/completions", json=CHAT | fields)
            jsonschema.validate(json.loads(other.result()["message"]["content"]), SCHEMA)
        assert answer.status_code == 400
        assert "'nonsense' (at tools[1].function.parameters#" in answer.json()["error"]["message"]
    ask(http, tools=[tool("weather"), tool("bad", bad)], max_tokens=3)  # not strict, not compiled


BAD = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"guided_json": BAD}, "guided_json cannot be compiled: "),
        ({"guided_regex": "("}, "guided_regex cannot be compiled: "),
        ({"response_format": BAD_FORMAT}, "response_format cannot be compiled: "),
        ({"tools": [tool("f", BAD, strict=True)]}, "tools cannot be compiled: "),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {}}}},
            "structured_outputs: structural_tag",
        ),
    ],
)
def test_errors_of_a_structure_name_only_what_the_request_has(http, fields, begin, thinks):
    """A structure behind reasoning is a structural tag to the engine."""
    answer = http.post("/v1/chat/completions", json=CHAT | fields | ({} if thinks else THINKS_NOT))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(fields)))
    assert error["message"].startswith(begin), error["message"]


def test_errors_of_a_format_in_responses(http):
    form = {"type": "json_schema", "name": "x", "schema": BAD}
    body = {"model": "smollm2", "input": "?", "text": {"format": form}}
    message = http.post("/v1/responses", json=body).json()["error"]["message"]
    assert message.startswith("text.format cannot be compiled: ")
