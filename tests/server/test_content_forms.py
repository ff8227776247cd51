"""Contents of messages reach the prompt whatever form the template expects."""

from __future__ import annotations

import httpx
import pytest

from tests.server.serving import CannedClient, serve
from tests.text.forged import Family

CONTROL = ("<|im_start|>", "<|im_end|>")
REASONS = (  # fails for a content that is null, as Qwen3's does
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if '</think>' in m.content %}!{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
)
GUARD = (  # prints parts only, as Llama Guard's does
    "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ m['role'] ~ ': ' ~ p['text'] | trim }}\n{% endfor %}{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = '{"name": "f", "arguments": {"x": 1}}'


@pytest.fixture(scope="module", params=[REASONS, GUARD], ids=["reasons", "guard"])
def served(request):
    def make_client():
        client = CannedClient("ok")
        client.tokenizer = Family(request.param, CONTROL, ()).tokenizer()
        return client

    with serve(make_client) as server:
        server.is_guard = request.param == GUARD
        yield server


def prompt_of(served, path, body):
    answer = httpx.post(served.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return served.client.requests[-1][0]["prompt"]


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_nothing_beside_tool_calls(served, content):
    answer = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del answer["content"]
    result = {"role": "tool", "tool_call_id": "c1", "content": "22"}
    messages = [{"role": "user", "content": "Hi"}, answer, result]
    prompt = prompt_of(served, "/v1/chat/completions", {"messages": messages})
    if served.is_guard:
        assert prompt.startswith("user: Hi\n")
        assert prompt.endswith("tool: 22\n")
    else:
        turns = [("user", "Hi"), ("assistant", CALLED), ("tool", "22")]
        expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns)
        assert prompt == expected


def test_a_tool_use_without_text(served):
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "22"}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "scripted", "max_tokens": 4, "messages": messages}
    prompt = prompt_of(served, "/v1/messages", body)
    assert "None" not in prompt
    assert (CALLED in prompt) != served.is_guard
    assert "22" in prompt


def test_a_text_and_its_parts(served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = prompt_of(
        served, "/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}]}
    )
    both = prompt_of(
        served, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    )
    if served.is_guard:
        assert text == "user: one two\n"
        assert both == "user: one\nuser: two\n"
    else:
        assert text == "<|im_start|>user\none two<|im_end|>"
        assert both == "<|im_start|>user\none\ntwo<|im_end|>"
