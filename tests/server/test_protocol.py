"""Bodies of requests: decoding, errors that name the field, sampling, prompts, frames."""

from __future__ import annotations

import json

import msgspec
import pytest

from engine.errors import EngineError, RequestError, TemplateError
from engine.outputs import Logprob
from engine.sampling_params import RANGES, RequestOutputKind, SamplingDefaults
from engine.scheduler.admission import QueueFullError
from engine.server.protocol.chat import (
    ChatChunks,
    ChatCompletionRequest,
    chat_params,
    template_messages,
    template_tools,
)
from engine.server.protocol.common import (
    SamplingFields,
    Usage,
    decode_body,
    structured_options,
)
from engine.server.protocol.completion import (
    CompletionChunks,
    CompletionRequest,
    completion_params,
    prompts_of,
)
from engine.server.protocol.errors import APIError, api_error, error_body
from engine.server.protocol.generate import GenerateRequest, generate_params
from engine.server.protocol.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    trimmed,
)
from engine.server.protocol.tools import selected_tools, tools_schema
from engine.server.tool_parsers import Function

NONE = SamplingDefaults()
USAGE = {"include_usage": True}


def _completion(**fields):
    return decode_body(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionRequest)


def _chat(**fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return decode_body(json.dumps(body).encode(), ChatCompletionRequest)


def _generate(**fields):
    return decode_body(json.dumps({"token_ids": [5], **fields}).encode(), GenerateRequest)


def _tool(name="add", **more):
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    "body, param, words",
    [
        (b'{"prompt": "a", "temprature": 1}', "temprature", "did you mean 'temperature'?"),
        (b'{"prompt": "a", "stream_options": {"include_usge": true}}',
         "stream_options.include_usge", "did you mean 'include_usage'?"),
        (b'{"prompt": "a", "response_format": {"type": "xml"}}', "response_format.type",
         "response_format.type must be one of 'text', 'json_object', 'json_schema'; got 'xml'"),
        (b'{"prompt": "a", "xyzzy": {"a": 1%s}}' % (b"0" * 5000), None, "the body must be valid"),
        (b'{"prompt": "a", "n": "two"}', "n", "expected `int | null`, got `str`"),
        (b'{"prompt": [1, 2.5]}', "prompt[1]", "float"),
        (b"{}", "prompt", "the body must be valid: object missing required field `prompt`"),
        (b"[]", None, "the body must be valid: expected `object`, got `array`"),
        (b'{"prompt": "a", "response_format": {}}', "response_format", "missing required"),
        (b'{"prompt": "a", "xyzzy": 1}', "xyzzy", "known fields: add_special_tokens"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(body, param, words):
    with pytest.raises(APIError) as caught:
        decode_body(body, CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_an_unknown_field_of_a_message_is_named_with_its_place():
    with pytest.raises(APIError, match=r"messages\[0\] has an unknown field 'contnt'") as caught:
        decode_body(b'{"messages": [{"role": "user", "contnt": 1}]}', ChatCompletionRequest)
    assert caught.value.param == "messages[0].contnt"
    assert "did you mean 'content'?" in caught.value.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": NaN}', b"[" * 10**6]
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(APIError) as caught:
        decode_body(body, CompletionRequest)
    assert caught.value.status == 400


def test_null_is_the_default_of_every_field_but_the_prompt():
    names = [f.encode_name for f in msgspec.structs.fields(CompletionRequest) if not f.required]
    assert completion_params(_completion(**dict.fromkeys(names)), NONE) == completion_params(
        _completion(), NONE
    )
    names = [f.encode_name for f in msgspec.structs.fields(ChatCompletionRequest) if not f.required]
    assert chat_params(_chat(**dict.fromkeys(names)), NONE) == chat_params(_chat(), NONE)


def test_null_in_tools_and_calls_is_the_default():
    tool = {"type": None, "function": {"name": "add"}}
    tools = _chat(tools=[tool]).tools
    chosen = {"mode": None, "tools": [tool]}
    for given in (
        {"type": None, "function": {"name": "add"}},
        {"type": "allowed_tools", "allowed_tools": chosen},
    ):
        choice = _chat(tool_choice=given).tool_choice
        wanted = "named" if given["type"] is None else "auto"
        assert selected_tools(tools, choice).mode == wanted
    for arguments in (None, "", "null", "{}", {}):
        call = {"type": None, "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        [found] = template_messages(_chat(messages=[message]).messages)
        assert found["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RequestError("seed must be a number, or None; got True"), "or null; got true"),
        (RequestError("x must be False; got {'a': None, 'b': 'None'}"), "{'a': null, 'b': 'None'}"),
        (
            RequestError("the model's x must be None; got it's True"),
            "x must be null; got it's true",
        ),
        (TemplateError("None of it is True"), "None of it is True"),
    ],
)
def test_errors_about_requests_have_the_words_of_json(error, words):
    assert words in api_error(error).message


def test_every_number_of_sampling_params_is_a_field():
    fields = {f.name for f in msgspec.structs.fields(SamplingFields)}
    assert set(RANGES) - {"logprobs"} <= fields


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 3), ("best_of", 2), ("presence_penalty", 0.5), ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.5), ("temperature", 0.25), ("top_p", 0.5), ("top_k", 7),
        ("min_p", 0.1), ("seed", 5), ("stop", ["a", "b"]), ("stop_token_ids", [3, 4]),
        ("ignore_eos", True), ("max_tokens", 9), ("min_tokens", 3), ("prompt_logprobs", 2),
        ("skip_special_tokens", False), ("include_stop_str_in_output", True),
        ("allowed_token_ids", [1, 2]), ("bad_words", ["x"]), ("logprobs", 4),
    ],
)  # fmt: skip
def test_a_field_reaches_the_sampling(field, value):
    found = getattr(completion_params(_completion(**{field: value}), NONE), field)
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_fields_with_other_shapes_reach_the_sampling():
    params = completion_params(_completion(logit_bias={"5": -100, "6": 2.5}, stop="x"), NONE)
    assert params.logit_bias == {5: -100.0, 6: 2.5}
    assert params.stop == ("x",)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert completion_params(_completion(stream=True), NONE).output_kind is RequestOutputKind.DELTA
    assert chat_params(_chat(max_tokens=3, max_completion_tokens=5), NONE).max_tokens == 5
    assert chat_params(_chat(), NONE).max_tokens is None
    assert completion_params(_completion(), NONE).max_tokens == 16
    assert chat_params(_chat(logprobs=True), NONE).logprobs == 0
    assert chat_params(_chat(logprobs=True, top_logprobs=3), NONE).logprobs == 3
    assert chat_params(_chat(logprobs=False, top_logprobs=0), NONE).logprobs is None


def test_echo_with_logprobs_asks_for_those_of_the_prompt():
    params = completion_params(_completion(echo=True, logprobs=2, max_tokens=0), NONE)
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (2, 2, 1)
    for given, wanted in ((0, 2), (1, 2), (5, 5), (-1, -1)):
        body = _completion(echo=True, logprobs=2, prompt_logprobs=given)
        assert completion_params(body, NONE).prompt_logprobs == wanted
    with pytest.raises(RequestError, match="max_tokens"):
        completion_params(_completion(max_tokens=0), NONE)


def test_entries_are_trimmed_to_the_top_tokens_and_the_actual_one():
    tops = {7: Logprob(-1.0, 1), 8: Logprob(-2.0, 2), 9: Logprob(-3.0, 3)}
    entries = [None, tops, tops, tops | {4: Logprob(-9.0, 40)}]
    for count, wanted in ((2, [{7, 8}, {7, 8, 9}, {7, 8, 4}]), (0, [{7}, {9}, {4}])):
        found = trimmed([1, 7, 9, 4], entries, count)
        assert [set(entry) for entry in found[1:]] == wanted and found[0] is None
    assert trimmed([1, 7, 9, 4], entries, -1) is entries


def test_the_models_defaults_apply_where_nothing_is_given():
    defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20, "max_tokens": 50})
    params = chat_params(_chat(top_k=5), defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 50)
    assert completion_params(_completion(), defaults).max_tokens == 16  # OpenAI's


@pytest.mark.parametrize("given", [{}, {"seed": 1, "max_tokens": 4, "repetition_penalty": 1.1}])
def test_the_engines_own_defaults_apply_to_a_request_that_says_nothing_of_sampling(given):
    mild = SamplingDefaults({"temperature": 0.7, "min_p": 0.05, "max_tokens": 50}, is_own=False)
    for params in (
        chat_params(_chat(**given), mild),
        completion_params(_completion(**given), mild),
    ):
        assert (params.temperature, params.min_p) == (0.7, 0.05)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_n_sigma"])
def test_and_to_no_other(name):
    mild = SamplingDefaults({"temperature": 0.7, "min_p": 0.05, "max_tokens": 50}, is_own=False)
    params = chat_params(_chat(**{name: 0.9}), mild)
    assert getattr(params, name) == 0.9 and (params.min_p, params.max_tokens) == (0.0, 50)
    assert name == "temperature" or params.temperature == 1.0


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: completion_params(_completion(top_p=2), NONE), "top_p must be a number"),
        (lambda: completion_params(_completion(logit_bias={"x": 1}), NONE), "logit_bias"),
        (lambda: completion_params(_completion(suffix="s"), NONE), "suffix is not supported"),
        (lambda: completion_params(_completion(logprobs=21), NONE), "logprobs must be"),
        *(
            (make, r"stream_options must be null unless stream is true; got {'include_usage'")
            for make in (
                lambda: completion_params(_completion(stream_options=USAGE), NONE),
                lambda: chat_params(_chat(stream_options=USAGE, stream=False), NONE),
                lambda: generate_params(_generate(stream_options=USAGE)),
            )
        ),
        (
            lambda: completion_params(_completion(best_of=2, stream=True), NONE),
            r"best_of must be at most n \(1\) in a stream; got 2",
        ),
        (lambda: chat_params(_chat(top_logprobs=3), NONE), "top_logprobs needs logprobs"),
        (lambda: chat_params(_chat(logprobs=True, top_logprobs=99), NONE), "top_logprobs must"),
        (
            lambda: chat_params(_chat(functions=[]), NONE),
            r"functions is not supported, use tools; got \[\]$",
        ),
        (lambda: chat_params(_chat(function_call="auto"), NONE), 'tool_choice; got "auto"$'),
        (lambda: chat_params(_chat(audio="a" * 200), NONE), r'got "a{99}\.\.\.$'),
        (lambda: chat_params(_chat(modalities=["audio"]), NONE), "modalities must be"),
        (lambda: chat_params(_chat(store=True), NONE), "store must be false"),
    ],
)
def test_what_cannot_be_served_is_refused(make, words):
    with pytest.raises((APIError, RequestError), match=words):
        make()


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], ["a"] * 1025])
def test_mixed_prompts_are_refused(prompt):
    with pytest.raises(APIError, match="prompt must be"):
        prompts_of(prompt)


@pytest.mark.parametrize(
    "fields, want",
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema":
            {"name": "x", "schema": {"type": "object"}}}}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"guided_json": {"type": "array"}}, {"json": {"type": "array"}}),
        ({"structured_outputs": {"regex": "b"}}, {"regex": "b"}),
    ],
)  # fmt: skip
def test_structured_output_in_every_spelling(fields, want):
    assert structured_options(_chat(**fields)) == want


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"response_format": {"type": "json_schema"}},
    ],
)
def test_structured_output_is_given_once_and_whole(fields):
    with pytest.raises(APIError):
        structured_options(_chat(**fields))


# ---- messages and tools


def test_messages_become_what_templates_read():
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body = _chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None,
             "annotations": [], "audio": None, "function_call": None, "reasoning_content": "Hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c0"},
        ]
    )  # fmt: skip
    assert template_messages(body.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm",
         "tool_calls": [{"type": "function", "id": "c0",
                         "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c0"},
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "null", "{}"])
def test_a_call_without_arguments(text):
    call = {"id": "c0", "function": {"name": "now", "arguments": text}}
    [message] = template_messages(
        _chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    )
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "user"}, "content must be a text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         r"content\[0\] must be .* got type 'image_url'; this engine serves the text of a model"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
         r"got type 'input_audio'; this engine serves the text of a model, without audio input"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]},
         r"got type 'video_url'; this engine serves the text of a model, without video input"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{]"}}]},
         "arguments must be a JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
         "arguments must be a JSON object"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(message, words):
    with pytest.raises(APIError, match=words):
        template_messages(_chat(messages=[message]).messages)


def test_tools_and_tool_choice():
    body = _chat(tools=[_tool(), _tool("sub")], tool_choice=_tool("sub"))
    assert [t["function"]["name"] for t in template_tools(body.tools)] == ["add", "sub"]
    assert _selected(body) == ("named", ["sub"], True)
    assert _selected(_chat(tools=[_tool()])) == ("auto", ["add"], False)
    assert _selected(_chat(tools=[_tool()], tool_choice="none")) == ("none", [], False)
    assert _selected(_chat(tools=[_tool()], tool_choice="required")) == ("required", ["add"], False)
    assert tools_schema([Function("add")], one_call=False)["maxItems"] == 128
    assert tools_schema([Function("add")], one_call=True)["maxItems"] == 1


def _selected(body):
    found = selected_tools(body.tools, body.tool_choice)
    return found.mode, [tool.function.name for _, tool in found.tools], found.is_subset


def _allowed(*names, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(names)}}


def test_allowed_tools():
    tools = [_tool(), _tool("sub"), _tool("mul")]
    for mode in ("auto", "required"):
        choice = _allowed(_tool("mul"), _tool("add"), mode=mode)
        assert _selected(_chat(tools=tools, tool_choice=choice)) == (mode, ["mul", "add"], True)
    every = _allowed(*tools)
    assert _selected(_chat(tools=tools, tool_choice=every)) == (
        "auto",
        ["add", "sub", "mul"],
        False,
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tools": [_tool(), _tool()]}, r"tools\[1\].function.name must"),
        ({"tools": [_tool("a b")]}, r"tools\[0\].function.name must"),
        ({"tools": [_tool(f"t{i}") for i in range(129)]}, "at most 128"),
    ],
)
def test_tools_without_a_usable_name_are_refused(fields, words):
    with pytest.raises(APIError, match=words):
        template_tools(_chat(**fields).tools)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [_tool()], "tool_choice": _tool("sub")},
        {"tools": [_tool()], "tool_choice": _allowed()},
        {"tools": [_tool()], "tool_choice": _allowed(_tool("sub"))},
        {"tools": [_tool()], "tool_choice": _allowed(_tool()) | {"type": "function"}},
        {"tools": [_tool()], "tool_choice": {"type": "function"}},
    ],
)
def test_a_choice_without_its_tool_is_refused(fields):
    with pytest.raises(APIError) as caught:
        _selected(_chat(**fields))
    assert caught.value.param == "tool_choice"


# ---- answers


class _Bytes:
    def token_bytes(self, token_id):
        return {1: b"a", 2: b"\xc3", 3: "€".encode()}[token_id]


def test_logprobs_of_both_endpoints():
    entries = [
        {1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "\ufffd"), 3: Logprob(float("-inf"), 9, "€")}
    ]
    [found] = chat_logprobs([3], entries, 2, _Bytes())
    assert (found.token, found.logprob, found.bytes) == ("€", -9999.0, [226, 130, 172])
    assert [(t.token, t.bytes) for t in found.top_logprobs] == [("a", [97]), ("\ufffd", [195])]
    logs = completion_logprobs([2, 3], [None, *entries], [5, 6], _Bytes())
    assert logs.tokens == ["\ufffd", "€"]
    assert logs.token_logprobs == [None, -9999.0]
    assert logs.text_offset == [5, 6]
    assert logs.top_logprobs == [None, {"a": -0.5, "\ufffd": -1.0, "€": -9999.0}]
    assert prompt_logprobs(None) is None
    assert prompt_logprobs([None, *entries])[1][1].rank == 1


@pytest.mark.parametrize("shows_usage", [False, True])
@pytest.mark.parametrize("text", ["Hi", '"\\\n\u2028\u0000', "€😀"])
def test_frames_are_json_whatever_the_text(text, shows_usage):
    for chunks, frame in (
        (c := CompletionChunks("cmpl-0", 'm"', 5, shows_usage=shows_usage), c.text(1, text)),
        (c := ChatChunks("chat-0", 'm"', 5, shows_usage=shows_usage), c.content(1, text)),
    ):
        assert frame.startswith(b"data: ") and frame.endswith(b"\n\n")
        assert frame.count(b"\n") == 2
        found = json.loads(frame[6:])
        [choice] = found["choices"]
        assert choice["index"] == 1
        assert choice.get("text", choice.get("delta", {}).get("content")) == text
        assert ("usage" in found) == shows_usage
        total = json.loads(chunks.usage(Usage.of(3, 4, 1))[6:])
        assert total["choices"] == []
        assert total["usage"] == {
            "prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
        }  # fmt: skip


# ---- errors


@pytest.mark.parametrize(
    "error, status, param",
    [
        (RequestError("top_p must be a number in (0.0, 1.0]; got 2"), 400, "top_p"),
        (RequestError("prompts[3]: stop[0] must be a str"), 400, "stop"),
        (QueueFullError("the queue is full"), 429, None),
        (EngineError("the engine has ended"), 503, None),
        (ZeroDivisionError("x"), 500, None),
    ],
)
def test_errors_of_the_engine_have_a_status(error, status, param):
    found = api_error(error)
    assert (found.status, found.param) == (status, param)
    assert ("Retry-After" in found.headers) == (status in (429, 503))
    assert json.loads(error_body(found))["error"]["message"] == found.message


def test_anthropic_has_its_own_shape():
    found = json.loads(error_body(APIError(404, "no"), "/v1/messages", "req-1"))
    assert found == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no"},
        "request_id": "req-1",
    }
