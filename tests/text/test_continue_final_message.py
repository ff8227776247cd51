"""Prompts that end within their last message: those of transformers 5.24."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.text.chat_template import ChatTemplate
from tests.golden.text_templates import (
    CHATML,
    GEMMA_TOKENS,
    HEADERS,
    INST,
    LLAMA_TOKENS,
    TOOLS,
    TURNS,
)

HEADS = {  # template, its special tokens, and the prompt before the last message's content
    "chatml": (
        CHATML,
        {},
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "headers": (
        HEADERS,
        LLAMA_TOKENS,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 1 Jan 2025\n\n"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "tools": (
        TOOLS,
        {},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "turns": (
        TURNS,
        GEMMA_TOKENS,
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    ),
}
KEEPS_SPACES = ("chatml", "tools")  # the others trim contents


def render(source, content, tokens=None, **options):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True} | options
    return ChatTemplate(source).render(messages, special_tokens=tokens, **options)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "content", ["The capital is", "  The capital is  ", "Hi", "a <|im_end|> b"]
)
def test_the_prompt_ends_with_the_content(name, content):
    template, tokens, head = HEADS[name]
    kept = content if name in KEEPS_SPACES else content.strip()
    assert render(template, content, tokens) == head + kept


def test_space_that_the_template_writes_is_not_the_messages():
    template = "{% for m in messages %}{{ m.content | trim }} </s>{% endfor %}"
    assert render(template, "so ") == "Hi </s>so"
    template = "{% for m in messages %}{{ m.content }} </s>{% endfor %}"
    assert render(template, "so ") == "Hi </s>so "


def test_the_last_part_is_continued():
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two "}]
    assert render(CHATML, parts).endswith("assistant\nOne\ntwo ")
    looping = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(looping, parts) == "Hi[One][two "


def test_an_empty_message_is_its_header():
    assert render(CHATML, "").endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "source, content, options, words",
    [
        (CHATML, "a", {"add_generation_prompt": True}, "continue_final_message needs add_gener"),
        (CHATML, "a", {"continue_final_message": "content"}, "must be True or False; got 'cont"),
        (INST, "a", {}, "this one leaves it out"),  # it writes another content
        ("{{ messages[0].content }}", "a", {}, "this one leaves it out"),
    ],
)
def test_what_cannot_be_continued_is_refused(source, content, options, words):
    with pytest.raises(RequestError, match=words):
        render(source, content, **options)


def test_a_call_is_not_continued():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(RequestError, match="needs a last message with content; got None"):
        ChatTemplate(CHATML).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_messages_are_not_changed():
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ChatTemplate(CHATML).render(messages, **options)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
