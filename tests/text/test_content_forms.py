"""Contents reach a template in the form that it prints: a text, parts, or nothing."""

from __future__ import annotations

import time

import pytest

from engine.text import content_forms
from engine.text.chat_template import ChatTemplate

EACH = "{% for m in messages %}[{{ m.role }}]"
LOOP = EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
GUARD = (
    EACH + "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] | trim }};{% endfor %}{% endfor %}"
)
ASSIGNED = (
    EACH + "{% set c = m['content'] %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}({{ p['text'] }}){% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "({{ p.text }}){% endfor %}{% endif %}{% endmacro %}"
    + EACH
    + "{{ show(m.content) }}{% endfor %}"
)
TEXT_ONLY = EACH + "{{ m.content }}{% endfor %}"
RAISES_FOR_TEXT = (
    EACH + "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}"
    "{{ m.content[0].text }}{% for p in m.content[1:] %}+{{ p.text }}{% endfor %}{% endfor %}"
)
RAISES_FOR_PARTS = (
    EACH + "{% if m.content is not string %}{{ raise_exception('text!') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
FIRST_PART = EACH + "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
SYSTEM_IS_TEXT = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = "
    "messages[1:] %}{% endif %}" + ASSIGNED
)
FIRST_USER_WITH_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }}:{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}" + ASSIGNED
)
ONE_PART = EACH + "{{ m.content[0]['text'] }}{% endfor %}"
CHARACTERS = EACH + "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [
        (LOOP, "[user]one two", "[user]onetwo"),
        (GUARD, "[user]one two;", "[user]one;two;"),
        (ASSIGNED, "[user]one two", "[user](one)(two)"),
        (MACRO, "[user]one two", "[user](one)(two)"),
        (TEXT_ONLY, "[user]one two", "[user]one\ntwo"),
        (RAISES_FOR_TEXT, "[user]one two", "[user]one+two"),
        (RAISES_FOR_PARTS, "[user]one two", "[user]one\ntwo"),
        (FIRST_PART, "[user]one two", "[user]one\ntwo"),
        (ONE_PART, "[user]one two", "[user]one\ntwo"),
        (CHARACTERS, "[user]one two", "[user]one\ntwo"),
    ],
)
def test_a_users_text_is_never_lost(source, of_text, of_parts):
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "one two"}]) == of_text
    assert template.render([{"role": "user", "content": PARTS}]) == of_parts


def test_roles_differ():
    template = ChatTemplate(SYSTEM_IS_TEXT)
    messages = [{"role": role, "content": PARTS} for role in ("system", "user")]
    assert template.render(messages) == "one\ntwo[user](one)(two)"


def test_tools_make_a_difference():
    template = ChatTemplate(FIRST_USER_WITH_TOOLS)
    messages = [{"role": "user", "content": PARTS}]
    assert template.render(messages) == "[user](one)(two)"
    assert template.render(messages, tools=[TOOL]) == "f:one\ntwo"


def test_results_of_tools_are_whole():
    """A template that prints a result's parts as JSON, and of a text only its characters."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% for c in m.content %}"
        "{{ loop.index0 }}: {{ c | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": "Hi "}, {"role": "tool", "content": "22 C"}]
    assert ChatTemplate(source).render(messages) == 'Hi 0: {"type": "text", "text": "22 C"}'


@pytest.mark.parametrize("source", [LOOP, GUARD, ASSIGNED, TEXT_ONLY, RAISES_FOR_PARTS, FIRST_PART])
@pytest.mark.parametrize("content", ["", []])
def test_an_empty_content_prints_nothing(source, content):
    prompt = ChatTemplate(source).render([{"role": "user", "content": content}])
    assert prompt.replace(";", "") == "[user]"


CALL = {"function": {"name": "f", "arguments": {"x": "é"}}}
CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
CALLS += "{% endfor %}"


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ("{{ m.content }}", ["Hi"]),
        ("{{ m.content | trim }}", ["Hi"]),
        ("{{ '' + m.content }}", ["Hi"]),
        ("{{ m.content | tojson }}", ['"Hi"', '"Hi"""']),
        ("{% if '</think>' in m.content %}x{% endif %}{{ m.content }}", ["Hi"]),
        ("{% if m.content %}{{ m.content }}{% endif %}", ["Hi"]),
        ("{% if m.content is defined %}{{ m.content }};{% endif %}", ["Hi;", "Hi;;"]),
        ("{% if m.content is none %}-{% else %}{{ m.content }}{% endif %}", ["Hi", "Hi-"]),
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", ["Hi"]),
        ("{{ m.content[0].text }}", ["Hi"]),
    ],
)
@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_nothing_beside_calls_is_nothing(body, prompts, content):
    source = "{% for m in messages %}" + body + CALLS + "{% endfor %}"
    message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del message["content"]
    found = ChatTemplate(source).render([{"role": "user", "content": "Hi"}, message])
    start, calls = found.split("<")
    assert calls == 'f {"x": "é"}>'
    assert start in prompts


def test_a_template_that_looks_for_null_gets_it():
    """DeepSeek-V3's writes calls only beside a content that is none, and wants JSON texts."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}{{ '<' + c.function.name + ' ' + c.function.arguments + '>' }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for content in (None, "", []):
        message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        messages = [{"role": "user", "content": "Hi"}, message]
        assert ChatTemplate(source).render(messages) == 'Hi<f {"x": "é"}>'


@pytest.mark.parametrize(
    "printed",
    ["{{ a }}", "{{ '' + a }}", "{{ a | tojson }}", "{{ a if a is string else a|tojson }}"],
)
def test_arguments_of_calls_are_json_once(printed):
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{% set a = c.function.arguments %}" + printed + "{% endfor %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert ChatTemplate(source).render(messages) == '{"x": "é"}'


def test_contents_beside_calls_stay():
    source = "{% for m in messages %}{{ m.content }}" + CALLS + "{% endfor %}"
    messages = [{"role": "assistant", "content": "Let me see. ", "tool_calls": [CALL]}]
    assert ChatTemplate(source).render(messages) == 'Let me see. <f {"x": "é"}>'


def test_the_probes_are_bounded_and_made_once():
    calls = []

    def render(values):
        calls.append(values)
        time.process_time()
        end = time.process_time() + content_forms.MAX_PROBE_SECONDS / 4
        while time.process_time() < end:
            pass
        raise ValueError

    forms = content_forms.probe(render, {})
    assert len(calls) <= 5
    message = {"role": "user", "content": "x"}
    assert forms.fit([message], False) == [message]
    slow = ChatTemplate("{% for i in range(3000) %}{% endfor %}{{ messages[0].content }}")
    start = time.perf_counter()
    slow.render([message])
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(5):
        slow.render([message])
    assert (time.perf_counter() - start) / 5 < first
