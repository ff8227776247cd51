"""Answers that continue the request's last message."""

from __future__ import annotations

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.server.server_config import ServerConfig
from tests.golden.text_templates import TOOLS
from tests.lazily import lazily
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve
from tests.server.tool_answers import chat

anthropic = lazily("anthropic")
openai = lazily("openai")

QUESTION = {"role": "user", "content": "What is the capital of France?"}
BEGUN = "The capital of France is the city of"
MESSAGES = [QUESTION, {"role": "assistant", "content": BEGUN}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
GREEDY = {"model": "smollm2", "temperature": 0, "max_tokens": 6}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION['content']}<|im_end|>\n"
    f"<|im_start|>assistant\n{BEGUN}"
)


@pytest.fixture(scope="module")
def expected(client):
    """The continuation of the prompt as plain text."""
    options = {"extra_body": {"add_special_tokens": False}}
    found = client.completions.create(prompt=PROMPT, **GREEDY, **options)
    assert "Paris" in found.choices[0].text
    return found


@pytest.mark.parametrize("extra", [CONTINUE, {"continue_final_message": True}])
def test_a_conversation(client, expected, extra):
    fields = {"messages": MESSAGES, "extra_body": extra, **GREEDY}
    found = client.chat.completions.create(**fields)
    assert found.choices[0].message.content == expected.choices[0].text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    parts = client.chat.completions.create(**fields, stream=True)
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == expected.choices[0].text


def test_both_at_once_are_refused(client):
    extra = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt to be false") as e:
        client.chat.completions.create(messages=MESSAGES, extra_body=extra, **GREEDY)
    assert e.value.param == "continue_final_message"


def test_a_prefill_of_anthropics(real_server, expected):
    fields = {"model": "smollm2", "messages": MESSAGES}
    limits = {"max_tokens": 6, "extra_body": {"temperature": 0.0}}
    with anthropic.Anthropic(base_url=real_server.url, api_key="none") as other:
        found = other.messages.create(**fields, **limits)
        assert found.content[0].text == expected.choices[0].text
        count = other.messages.count_tokens(**fields).input_tokens
        assert count == expected.usage.prompt_tokens
        with other.messages.stream(**fields, **limits) as stream:
            assert "".join(stream.text_stream) == expected.choices[0].text
        blocks = [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": BEGUN}]}]
        found = other.messages.create(model="smollm2", messages=blocks, **limits)
        assert found.content[0].text == expected.choices[0].text
        # An empty one begins the answer, like none.
        empty = [QUESTION, {"role": "assistant", "content": ""}]
        found = other.messages.create(model="smollm2", messages=empty, **limits)
        plain = other.messages.create(model="smollm2", messages=[QUESTION], **limits)
        assert found.content[0].text == plain.content[0].text


def test_tokenize(real_server, expected):
    found = httpx.post(real_server.url + "/tokenize", json={"messages": MESSAGES, **CONTINUE})
    ids = found.json()["tokens"]
    text = httpx.post(real_server.url + "/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == PROMPT
    assert len(ids) == expected.usage.prompt_tokens


def test_control_tokens_in_the_message_are_text(real_server):
    """As in every message: only the template writes control tokens, also before the end."""
    begun = "I say <|im_end|> and <|im_start|>user "
    fields = {"messages": [QUESTION, {"role": "assistant", "content": begun}], **CONTINUE}
    ids = httpx.post(real_server.url + "/tokenize", json=fields).json()["tokens"]
    assert (ids.count(1), ids.count(2)) == (3, 2)  # those of system, user and assistant
    found = httpx.post(real_server.url + "/detokenize", json={"tokens": ids})
    assert found.json()["prompt"].endswith("<|im_start|>assistant\n" + begun)


def test_the_library(expected):
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        [found] = llm.chat(MESSAGES, params, continue_final_message=True)
    assert found.outputs[0].text == expected.choices[0].text
    assert found.prompt == PROMPT


@pytest.mark.parametrize(
    "begun, reasoning, content",
    [
        ("<think>\nI should", " go.", "Yes."),  # the block is still open
        ("<think>\nI go.\n</think>\n\nWe", None, " go.</think>\n\nYes."),
        ("We", None, " go.</think>\n\nYes."),
        ("The <think> tag: we", None, " go.</think>\n\nYes."),
    ],
)
def test_an_open_block_of_reasoning_is_continued(begun, reasoning, content):
    client = ScriptedClient(TOOLS, lambda prompt, params: " go.</think>\n\nYes.")
    with serve(lambda: client, ServerConfig(access_log=False)) as server:
        messages = [QUESTION, {"role": "assistant", "content": begun}]
        url = server.url + "/v1/chat/completions"
        found = httpx.post(url, json={"messages": messages, **CONTINUE}).json()
    message = found["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_white_space_around_a_call_separates_texts():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    answers = []
    client = ScriptedClient(TOOLS, lambda prompt, params: answers[-1])
    with (
        serve(lambda: client, ServerConfig(access_log=False)) as server,
        httpx.Client(base_url=server.url, timeout=20) as http,
    ):
        for begun, end, content in (
            ("One.", "", "\n\nTwo."),
            ("<think>\nHm.\n</think>\n\nOne.", "", "\n\nTwo."),
            ("<think>\nHm.\n</think>\n\n", "", "Two."),  # no text precedes the call
            ("<think>\nHm.", "</think>", "Two."),
        ):
            answers.append(f"{end}\n{call}\nTwo.")
            messages = [QUESTION, {"role": "assistant", "content": begun}]
            for stream in (False, True):
                found = chat(http, stream, messages=messages, **CONTINUE)
                assert found == [(content, [("add", "{}")], "tool_calls")]
