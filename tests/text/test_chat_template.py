"""Chat templates: the prompts of transformers, and the sandbox with its limits."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError, TemplateError
from engine.text import template_worker
from engine.text.chat_template import MAX_SOURCE_CHARS, RESERVED_VARIABLES, ChatTemplate
from engine.text.content_marks import ContentMarks

CHATS = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())["chats"]
HI = [{"role": "user", "content": "Hi"}]
CHATML = CHATS[0]["template"]
TURNS = CHATS[10]["template"]


def render(source: str, messages=HI, **kwargs) -> str:
    return ChatTemplate(source).render(messages, **kwargs)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_prompts_are_those_of_transformers(chat):
    prompt = ChatTemplate(chat["template"]).render(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        special_tokens=chat.get("special_tokens"),
        variables=chat.get("variables"),
    )
    assert prompt == chat["prompt"]


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__base__ }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__init__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|selectattr('__class__')|list }}",
    "{{ ['']|groupby('__class__')|list }}",
    "{{ ['']|sort(attribute='__class__') }}",
    "{{ [['']]|sum(attribute='0.__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ '{0.__globals__}'.format(raise_exception) }}",
    "{{ ('{0.__globals__}'|string).format(strftime_now) }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}']|map('format', '')|list }}{{ '%s' % strftime_now }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__builtins__ }}",
    "{{ range.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{{ namespace()._Namespace__attrs }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{% for m in messages %}{{ loop.__init__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.pop() }}",
    "{{ messages.sort() }}",
    "{% set add = messages.append %}{{ add(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0].clear() }}",
    "{% set m = messages[0] %}{% set m.role = 'system' %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'x' %}",
    "{{ raise_exception }}",
    "{{ namespace }}",
    "{{ namespace(a=1) }}",
    "{{ self }}",
    "{{ [strftime_now]|tojson }}",
    "{{ strftime_now|string|first }}{{ messages|map('upper') }}",
    "{{ 'a'.encode() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_escapes_the_sandbox(source):
    messages = [{"role": "user", "content": "Hi"}]
    for marks in (None, ContentMarks("<>Hi", "<>")):
        with pytest.raises(TemplateError):
            render(source, messages, marks=marks)
    assert messages == HI


@pytest.mark.parametrize("name", ["cycler", "joiner", "lipsum", "environment", "context", "config"])
def test_globals_of_jinja_are_gone(name):
    assert render("{{ " + name + " is defined }}") == "False"


HUNGRY = [
    "{{ range(10**9)|list }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ 2 ** 100000 ** 2 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ ('\t' * 100000).expandtabs(100000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '{0:1000000000}'.format_map({'0': 1}) }}",
    "{{ (('a' * 100000) ~ '%s' * 100000) % (('b' * 100000),) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "{{ ('x' * 1000000).join('y' * 1000) }}",
    "{{ ('y' * 1000)|join('x' * 1000000) }}",
    "{{ ('a\n' * 1000000)|indent(1000000) }}",
    "{{ [1]|tojson(indent=10**10) }}",
    "{{ strftime_now('%Y' * 10000000) }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set x = 'a' * 9000000 %}{{ x }}{{ x }}",
    "{% set x = 'a' * 9000000 %}{{ x ~ x }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 500 + "]" * 500 + "|tojson }}" * 2,
]
DOUBLINGS = [
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x = ns.x * 2 %}",
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "{% set y = [ns.x, ns.x] %}{% set ns.x = y %}",
    "{% set ns.x = (ns.x, ns.x) %}",
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    "{% set ns.x = [ns.x, ns.x]|join %}",
    "{% set ns.x = range(2)|map('default', 0)|map('replace', '0', ns.x)|list|join %}"
    "{% set ns.x = [ns.x, ns.x] %}",
    "{% set ns.x = ns.x|string|replace('a', 'aa') %}",
]
HUNGRY += [
    "{% set ns = namespace(x='aa') %}{% for i in range(64) %}" + step + "{% endfor %}{{ ns.x }}"
    for step in DOUBLINGS
]


# One call each of a filter or a method, without any Python code in which a limit could be checked.
ENDLESS_CALLS = [
    "{{ ([[1]] * 150000)|sum(start=[])|length }}",
    "{% set l = range(90000)|list %}{{ l|select('in', l)|list|length }}",
    "{% set l = range(90000)|list %}{{ l|reject('in', l)|list|length }}",
    "{% set l = [{'a': -1}] * 90000 %}{% set r = range(90000)|list %}"
    "{{ l|selectattr('a', 'in', r)|list|length }}",
    "{% set l = [{'a': -1}] * 90000 %}{% set r = range(90000)|list %}"
    "{{ l|rejectattr('a', 'in', r)|list|length }}",
    "{{ ('a' * 8000000).strip('b' * 8000000 ~ 'a')|length }}",
    "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{% set ns = namespace(d=[]) %}{% for k in range(9000) %}"
    "{% set ns.d = ns.d + [[k * (2**61 - 1), 1]] %}{% endfor %}{{ dict(ns.d * 1000)|length }}",
    "{% set ns = namespace(l=[]) %}{% for k in range(9000) %}"
    "{% set ns.l = ns.l + [k * (2**61 - 1)] %}{% endfor %}{{ (ns.l * 1000)|unique|list|length }}",
    "{{ 9 ** (9 ** 9) }}",
]


@pytest.fixture
def short_time(monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.5)


def refused(source: str, message: str, max_seconds: float = 2) -> None:
    """Check that a template is refused, within `max_seconds` of CPU time of all processes."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(TemplateError, match=message):
        render(source)
    template_worker.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert time.process_time() - start + spent < max_seconds


@pytest.mark.usefixtures("short_time")
@pytest.mark.parametrize("source", HUNGRY)
def test_memory_is_limited(source):
    template_worker.close()
    refused(source, "the chat template failed")


@pytest.mark.usefixtures("short_time")
@pytest.mark.parametrize("source", ENDLESS_CALLS)
def test_the_time_of_one_call_is_limited(source):
    template_worker.close()
    refused(source, r"longer than 0\.5 s$")


def test_the_limits_of_time_and_memory_are_as_documented():
    template_worker.close()
    refused(ENDLESS_CALLS[0], r"longer than 2 s$", 4)
    refused("{{ [1] * 10**9 }}", r"it took more than 1024 MiB$")


ENDLESS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(100000) %}{{ range(100000)|list|sort|first|string|length }}{% endfor %}",
    "{% set x = range(9999)|list %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{% for i in range(100000) if range(100000)|list|length == 1 %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_run_time_is_limited(source, monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.2)
    with pytest.raises(TemplateError, match=r"longer than 0\.2 s"):
        render(source)


def test_a_source_that_takes_long_to_parse_is_refused(monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.2)
    template = ChatTemplate("{{ x }}" * 100_000)
    with pytest.raises(TemplateError, match=r"longer than 0\.2 s"):
        template.render(HI)
    with pytest.raises(TemplateError, match=r"longer than 0\.2 s"):
        template.variables  # noqa: B018


def test_output_is_counted_while_it_is_written():
    # If only counted at the end, the pieces would take 100 GB.
    with pytest.raises(TemplateError, match="more than 16000000 characters"):
        render("{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}")


def test_each_request_has_its_own_time(monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.2)
    template = ChatTemplate("{% for i in range(100000) %}{% endfor %}{{ messages|length }}")
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [template.render(HI) for _ in range(150)] == ["1"] * 150
    template_worker.close()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start.ru_utime
    assert spent > 0.2  # of all together


def test_a_long_chat_is_rendered_in_time():
    messages = HI * 2000
    for index in (0, 3, 6, 13):
        ChatTemplate(CHATS[index]["template"]).render(messages)


def test_text_as_long_as_a_long_context_is_accepted():
    text = "word " * 1_000_000
    assert text in render(CHATML, [{"role": "user", "content": text}])


def test_accumulating_in_a_namespace_is_allowed():
    source = (
        "{% set ns = namespace(text='', items=[]) %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content %}{% set ns.items = ns.items + [m] %}"
        "{% endfor %}{{ ns.text|length }} {{ ns.items|length }}"
    )
    assert render(source, [{"role": "user", "content": "x" * 100}] * 500) == "50000 500"


def test_a_source_that_is_too_long_is_refused():
    with pytest.raises(TemplateError, match="at most"):
        render(" " * (MAX_SOURCE_CHARS + 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", r"\(line 1\)"),
        ("\n\n{{ x|nofilter }}", r"\(line 3\).*nofilter"),
        ("{% if %}", "line 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.x.y }}", "no attribute 'x'"),
        ("{{ raise_exception('No system role') }}", "failed: No system role$"),
        ("{{ raise_exception() }}", "failed"),
    ],
)
def test_every_failure_is_a_template_error(source, message):
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(TemplateError, match=message):
            template.render(HI)


def test_messages_of_templates_reach_the_caller():
    odd = [{"role": "assistant", "content": "x"}]
    with pytest.raises(TemplateError, match="Roles must alternate"):
        render(TURNS, odd)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of dicts; got str"),
        ({"role": "user"}, "got dict"),
        (None, "got NoneType"),
        ([], "must not be empty"),
        (["Hi"], r"messages\[0\] must be a dict; got str"),
        ([*HI, {"content": "x"}], r'messages\[1\]\["role"\].*got None'),
        ([{"role": 3, "content": "x"}], r'messages\[0\]\["role"\].*got 3'),
        ([{"role": "", "content": "x"}], r'messages\[0\]\["role"\]'),
        ([*HI, {"role": "user"}], r'messages\[1\]\["content"\].*got nothing'),
        ([{"role": "user", "content": 3}], r'messages\[0\]\["content"\].*got int'),
        ([{"role": "user", "content": None}], r'messages\[0\]\["content"\].*got NoneType'),
        ([{"role": "user", "content": ["x"]}], r'\["content"\]\[0\].*got \'str\''),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r'\[0\]\["text"\].*got NoneType'),
        ([{"role": "user", "content": "x", 3: 4}], "str keys; got 3"),
        ([{"role": "user", "content": "x", "y": {"z": object()}}], r'\["y"\]\["z"\].*got object'),
        ([{"role": "user", "content": "x", "y": b"z"}], "got bytes"),
        (
            [{"role": "user", "content": "x", "y": -(2**2048)}],
            r'\["y"\] must have at most 2048 bits',
        ),
        ([{"role": "user", "content": "x" * 12_000_000}] * 6, "at most 67108864 bytes in total"),
    ],
)
def test_bad_messages_are_named(messages, message):
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def test_deep_messages_are_refused():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested deeper"):
        render(CHATML, [{"role": "user", "content": "x", "deep": deep}])
    loop: list = []
    loop.append(loop)
    with pytest.raises(RequestError, match="nested deeper"):
        render(CHATML, HI, variables={"loopy": loop})


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("x", "list of dicts; got str"),
        ({}, "got dict"),
        ([print], r"tools\[0\] must be a dict \(a JSON schema\); got builtin"),
        ([{"a": print}], r'tools\[0\]\["a"\] must be'),
    ],
)
def test_bad_tools_are_named(tools, message):
    with pytest.raises(RequestError, match=message):
        render(CHATML, tools=tools)


def test_tools_that_the_template_does_not_read_are_refused():
    with pytest.raises(RequestError, match="tools must be empty, the template ignores them; got 1"):
        render("{{ messages[0].content }}", tools=[{"name": "f"}])
    assert render("{{ messages[0].content }}", tools=[]) == HI[0]["content"]


@pytest.mark.parametrize(
    "name",
    [*sorted(RESERVED_VARIABLES), "_private", "__class__", "not a name", ""],
)
def test_reserved_variables_are_refused(name):
    with pytest.raises(RequestError, match="reserved"):
        render(CHATML, variables={name: True})


def test_reserved_variables_are_refused_by_the_tokenizer(byte_level_metadata):
    from engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(byte_level_metadata(), chat_template=CHATML)
    for name in ("tokenize", "chat_template", "return_tensors", "bos_token"):
        with pytest.raises(RequestError, match=name):
            tokenizer.apply_chat_template(HI, **{name: True})


def test_a_template_says_which_variables_it_reads():
    source = "{% set a = 1 %}{{ a }}{{ bos_token }}{% for m in messages %}{{ m.b }}{% endfor %}"
    source += "{{ x | default(y) }}{% if add_generation_prompt and z is defined %}{% endif %}"
    assert ChatTemplate(source).variables == {"x", "y", "z"}


def test_variables_are_plain_copies():
    class Name(str):
        def danger(self):
            return "out"

    assert render("{{ name is defined }}{{ name }}", variables={"name": Name("x")}) == "Truex"
    with pytest.raises(TemplateError, match="danger"):
        render("{{ name.danger() }}", variables={"name": Name("x")})


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 2**2048 - 1, 0.1, 1e300, -0.0, 5e-324, True, False, None, float("inf")),
        *("", "\0\n\x7f\u2028", "\ud800", "\udfff\ud800", "\ud83d\ude00", "\U0001f600", '"\\"'),
        *([], {}, [[]], {"": 0}, {"b": 1, "a": 2, "\ud800": [None]}),
    ],
    ids=ascii,
)
def test_values_reach_the_template_as_they_are(value):
    source = "{{ x is number }} {{ [x] }} {{ x if x is string }}"
    found = render(source, variables={"x": value})
    number, text = isinstance(value, (int, float)), value if isinstance(value, str) else ""
    assert found == f"{number} {[value]!r} {text}"


def test_nan_reaches_the_template():
    assert render("{{ x }} {{ x == x }}", variables={"x": float("nan")}) == "nan False"


def test_the_callers_messages_are_not_modified():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(parts)
    assert "a" in render(CHATML, parts)
    assert json.dumps(parts) == before


def test_parts_are_joined_for_templates_that_want_a_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert "one\ntwo" in render(CHATML, messages)
    assert "onetwo" in render(TURNS, messages, special_tokens={"bos_token": ""})


def test_a_message_that_only_calls_tools_needs_no_content():
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[1].tool_calls[0].name }}", [*HI, call]) == "f"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_read(name):
    """As in transformers: gpt-oss's template reads `thinking`, most others `reasoning_content`."""
    source = "{% for m in messages %}{{ m.thinking }},{{ m.reasoning_content }};{% endfor %}"
    answer = {"role": "assistant", "content": "Yes.", name: "Hm"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], name: "So"}
    assert render(source, [*HI, answer, call]) == ",;Hm,Hm;So,So;"


def test_reasoning_beside_a_call_and_content_does_not_fail_in_gpt_oss():
    source = (
        "{% set m = messages[1] %}{% if m.content and m.thinking %}"
        '{{ raise_exception("Cannot pass both") }}{% endif %}{{ m.content }}'
    )
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "f"}]}
    assert render(source, [*HI, {**call, "reasoning_content": "Hm"}]) == "I look."


def test_the_context_is_complete():
    names = ["tools", "documents", "add_generation_prompt", "bos_token"]
    source = " ".join("{{ " + name + " }}" for name in names)
    assert render(source, special_tokens={"bos_token": "<s>"}) == "None None True <s>"
    assert render(source, add_generation_prompt=False) == "None None False "
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_templates_of_several_threads_do_not_mix():
    from concurrent.futures import ThreadPoolExecutor

    template = ChatTemplate("{% for i in range(200) %}{{ x * 1000 }}{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        prompts = list(
            pool.map(lambda i: template.render(HI, variables={"x": f"{i % 8}"}), range(64))
        )
    assert prompts == [str(i % 8) * 200_000 for i in range(64)]


@given(st.text(st.sampled_from("{}%#-_.|'\"()[]+*~ \nab10fornseti=:,")))
@settings(max_examples=300, deadline=None)
def test_any_source_renders_or_is_a_template_error(source):
    with contextlib.suppress(TemplateError):
        assert isinstance(render(source), str)
