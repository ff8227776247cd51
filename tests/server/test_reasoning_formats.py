"""Formats of reasoning: the same answers in each format's markers, whole and in pieces."""

from __future__ import annotations

import functools
import itertools
import json
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server import reasoning, tool_parsers
from engine.server.reasoning.formats import FORMATS
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve

WRAPPED = [name for name, block in FORMATS.items() if block.answers]
PLAIN = "<|im_start|>assistant\n"


def split(name, text, size=10**6, prompt=PLAIN):
    parser = reasoning.get(name, prompt)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def same_in_pieces(name, text, prompt=PLAIN):
    """Return reasoning and content, which do not depend on the pieces."""
    whole = split(name, text, prompt=prompt)
    for size in (1, 2, 3, 7, 16):
        assert split(name, text, size, prompt) == whole, size
    return whole


def marked(name, text):
    """Return a text in which « » are a format's markers, and ¬ ¦ the same without their ends."""
    block = FORMATS[name]
    opening, closing = block.opening[0] + block.label, block.closing[0]
    replaced = {"«": opening, "»": closing, "¦": closing[:-1], "¬": block.opening[0][:-1]}
    return "".join(replaced.get(char, char) for char in text)


ANSWERS = [  # (answer, reasoning, content) see `marked`
    ("«Hm.»Yes.", "Hm.", "Yes."),
    ("«\nHm, 1 < 2.\n»\n\nYes.\n", "Hm, 1 < 2.", "Yes.\n"),
    (" \n« Hm. » Yes. ", "Hm.", "Yes. "),
    ("«one\n\ntwo\n»three\n\nfour", "one\n\ntwo", "three\n\nfour"),
    ("«é 漢 🙂»漢 🙂 é", "é 漢 🙂", "漢 🙂 é"),
    ("«»Yes.", "", "Yes."),
    ("«\n\n»\n\nYes.", "", "Yes."),
    ("«Hm.»", "Hm.", ""),
    ("«Hm.» \n", "Hm.", ""),
    ("«", "", ""),
    ("« \n", "", ""),
    ("«Hm", "Hm", ""),
    ("«Hm \n", "Hm", ""),
    ("«Hm¦", "Hm¦", ""),
    ("«Hm¦ so»Yes", "Hm¦ so", "Yes"),
    ("«Hm ¦¦»Yes", "Hm ¦¦", "Yes"),
    ("Yes.", "", "Yes."),
    (" Yes. \n", "", " Yes. \n"),
    ("", "", ""),
    (" \n", "", " \n"),
    ("¬", "", "¬"),
    ("¬ x", "", "¬ x"),
    ("Yes «no»", "", "Yes «no»"),
    ("Yes » no", "", "Yes » no"),
    ("»Yes.", "", "Yes."),
    (" »\n Yes.", "", "Yes."),
    ("¦", "", "¦"),
    ("«Hm «so» it»Yes", "Hm «so", "it»Yes"),
    ("«a»b«c»d", "a", "b«c»d"),
    ("««Hm»Yes", "Hm", "Yes"),
    ("«Hm»\n»\nYes", "Hm", "Yes"),
    ("«Hm»«»Yes", "Hm", "Yes"),
    ("«Hm» «\n» Yes", "Hm", "Yes"),
    ("«Hm»« Yes", "Hm", "« Yes"),
    ("«Hm»The « and » marks", "Hm", "The « and » marks"),
    ("«[1, 2] {3} <b> `c`»<b>bold</b>", "[1, 2] {3} <b> `c`", "<b>bold</b>"),
    ("«<tool_call>{}</tool_call>»Yes", "<tool_call>{}</tool_call>", "Yes"),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[0][:16])
def test_answers(name, answer):
    text, thought, content = (marked(name, part) for part in answer)
    assert same_in_pieces(name, text) == (thought, content)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "answer", [a for a in ANSWERS if a[0].startswith("«")], ids=lambda answer: answer[0][:16]
)
def test_answers_to_a_prompt_that_opens_the_block(name, answer):
    text, thought, content = (marked(name, part) for part in answer)
    prompt = PLAIN + marked(name, "«")
    for opening in (prompt, prompt.rstrip(), prompt + "\n"):
        behind = text.removeprefix(marked(name, "«"))
        assert same_in_pieces(name, behind, opening) == (thought, content)
        assert reasoning.get(name, opening).is_reasoning


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("Yes.", "Yes."),
        ("\n\nYes. ", "Yes. "),
        ("Yes » «no»", "Yes » «no»"),
        ("»\n\nYes", "Yes"),
        ("«»Yes", "Yes"),
        ("« Yes", "« Yes"),
        ("", ""),
        (" ", ""),
    ],
)
def test_answers_to_a_prompt_that_forbids_thoughts(name, answer, content):
    """Templates write an empty block, or only its end, when thinking is turned off."""
    for prompt in ("«»", "«\n\n»\n\n", "»", "« »\n"):
        begun = PLAIN + marked(name, prompt)
        assert same_in_pieces(name, marked(name, answer), begun) == ("", marked(name, content))


@pytest.mark.parametrize("name", FORMATS)
def test_marks_in_the_middle_of_a_prompt_do_not_count(name):
    for prompt in ("« is a mark", "«Hm» Yes<|im_end|>", "«" + " x" * 200):
        assert same_in_pieces(name, "Yes", marked(name, prompt)) == ("", "Yes")


# ---- markers around the content

ANSWERED = [  # (answer, reasoning, content) with ( and ) for the markers of the content
    ("«Hm.»(Yes.)", "Hm.", "Yes."),
    ("«\nHm.\n»\n(\nYes.\n)", "Hm.", "Yes."),
    ("«\nHm.\n»\n\n(\nYes.\n)\n", "Hm.", "Yes."),
    ("«Hm.»(a\n\nb \n)", "Hm.", "a\n\nb"),
    ("«Hm.»(Yes.", "Hm.", "Yes."),
    ("«Hm.»(Yes.\n", "Hm.", "Yes.\n"),
    ("«Hm.»(", "Hm.", ""),
    ("«Hm.»()", "Hm.", ""),
    ("«Hm.»( )", "Hm.", ""),
    ("«Hm.»(Yes)<tool>{}", "Hm.", "Yes<tool>{}"),
    ("«Hm.»(Yes)\n<tool>{}", "Hm.", "Yes\n<tool>{}"),
    ("«Hm.»(The ) mark)", "Hm.", "The ) mark"),
    ("«Hm.»(The ) and ( marks)", "Hm.", "The ) and ( marks"),
    ("«Hm.»Yes)", "Hm.", "Yes)"),
    ("«Hm.»a (b)", "Hm.", "a (b)"),
    ("«Hm (so)»(Yes)", "Hm (so)", "Yes"),
    ("«»(Yes)", "", "Yes"),
    ("»(Yes)", "", "Yes"),
    ("(Yes)", "", "Yes"),
    (" (Yes) ", "", "Yes"),
    ("(1 < 2)", "", "1 < 2"),
    ("a (Yes)", "", "a (Yes)"),
]


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("answer", ANSWERED, ids=lambda answer: answer[0][:16])
def test_markers_around_the_content(name, answer):
    for begin, end in FORMATS[name].answers:
        given = (part.replace("(", begin).replace(")", end) for part in answer)
        text, thought, content = (marked(name, part) for part in given)
        assert same_in_pieces(name, text) == (thought, content)
        if not answer[0].startswith(("a", " ", "(", "»")):
            continue
        if answer[0].startswith("("):  # the prompt has the opening marker
            behind = text.removeprefix(begin)
            assert same_in_pieces(name, behind, PLAIN + begin) == (thought, content)


def test_a_cut_marker_of_the_content_is_text():
    assert same_in_pieces("hunyuan_a13b", "<think>a</think><answer>b\n</ans") == ("a", "b\n</ans")
    assert same_in_pieces("hunyuan_a13b", "<think>a</think><ans") == ("a", "<ans")


# ---- what only one format has


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("gemma4", PLAIN, "<|channel>Hm<channel|>Yes", ("Hm", "Yes")),
        ("gemma4", PLAIN, "<|channel>thoughtful<channel|>Yes", ("thoughtful", "Yes")),
        ("gemma4", PLAIN, "<|channel>thought", ("thought", "")),
        ("gemma4", PLAIN, "<|channel>thought\n", ("", "")),
        ("gemma4", "<|channel>thought\n", "thought\nHm<channel|>Yes", ("Hm", "Yes")),
        ("gemma4", "<|channel>thought\n<channel|>", "Yes", ("", "Yes")),
        ("gemma4", PLAIN, "<|channel>thought\nHm\n<channel|>Yes", ("Hm", "Yes")),
        (
            "seed_oss",
            "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>",
            "None left.</seed:cot_budget_reflect>\n</seed:think>Yes",
            ("None left.</seed:cot_budget_reflect>", "Yes"),
        ),
        ("granite", PLAIN, "Here's my thought process: Hm Here is my response: Yes", ("Hm", "Yes")),
        ("granite", PLAIN, "Here is my thought process:\n\nHm\n\nHere's my response:\n\nYes",
         ("Hm", "Yes")),
        ("granite", PLAIN, "Here is my answer.", ("", "Here is my answer.")),
        ("granite", PLAIN, "Here is", ("", "Here is")),
        ("cohere", PLAIN, "<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[]",
         ("Hm", "<|START_ACTION|>[]")),
        ("cohere", PLAIN, "<|START_RESPONSE|>Yes<|END_RESPONSE|><|START_ACTION|>[]",
         ("", "Yes<|START_ACTION|>[]")),
        ("apriel", "Here are my reasoning steps:\n", "Hm\n[BEGIN FINAL RESPONSE]\nYes\n"
         "[END FINAL RESPONSE]\n", ("Hm", "Yes")),
        ("apriel", PLAIN, "Here are my reasoning steps:\nHm\n[BEGIN FINAL RESPONSE]Yes [END FINAL",
         ("Hm", "Yes [END FINAL")),
        ("apriel", PLAIN, "Yes [END FINAL RESPONSE]", ("", "Yes [END FINAL RESPONSE]")),
        ("deepseek_r1", None, "Hm</think>Yes", ("Hm", "Yes")),
        ("mistral", None, "Hm[/THINK]Yes", ("", "Hm[/THINK]Yes")),
        ("mistral", None, "[THINK]Hm[/THINK]Yes", ("Hm", "Yes")),
    ],
)  # fmt: skip
def test_particular_answers(name, prompt, text, expected):
    assert same_in_pieces(name, text, prompt) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_continued_messages(name):
    opening, closing = marked(name, "«"), marked(name, "»")
    assert reasoning.last_text(name, opening + "Hm") == (True, "Hm")
    assert reasoning.last_text(name, f"{opening}Hm{closing}Yes") == (False, "Yes")
    assert reasoning.last_text(name, f"A {opening} mark") == (False, f"A {opening} mark")
    for continued, text, expected in (
        (f"{opening}Hm", f" so{closing}Yes", (" so", "Yes")),
        (f"{opening}Hm{closing}Yes", f" {closing} no", ("", f" {closing} no")),
        (opening, f"Hm{closing}Yes", ("Hm", "Yes")),
        ("Yes", " and no", ("", " and no")),
    ):
        parser = reasoning.get(name, PLAIN + continued, continued=continued)
        parts = [parser.feed(text), parser.finish()]
        assert tuple(map("".join, zip(*parts, strict=True))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_passed_on_as_it_arrives(name):
    parser = reasoning.get(name, PLAIN + marked(name, "«"))
    begun = FORMATS[name].closing[0][:3]
    assert [parser.feed(piece) for piece in ("Hm ", "[b] ", "so" + begun)] == [
        ("Hm", ""), (" [b]", ""), (" so", ""),
    ]  # fmt: skip
    assert parser.feed(FORMATS[name].closing[0][3:]) == ("", "")
    assert [parser.feed(piece) for piece in ("\nYes", " no")] == [("", "Yes"), ("", " no")]


@pytest.mark.parametrize(
    ("name", "kind", "call"),
    [
        ("gemma4", "gemma4", "<|tool_call>call:f{a:1}<tool_call|>"),
        ("mistral", "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("cohere", "cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]'),
        ("seed_oss", "seed_oss", "<seed:tool_call><function=f><parameter=a>1</parameter></function>"
         "</seed:tool_call>"),
        ("longcat", "longcat",
         '<longcat_tool_call>{"name": "f", "arguments": {"a": 1}}</longcat_tool_call>'),
        ("hunyuan_a13b", "hunyuan_a13b",
         '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>'),
        ("qwen3", "olmo3", "<function_calls>f(a=1)</function_calls>"),
        ("qwen3", "lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_calls_in_and_after_a_block(name, kind, call):
    names = {"f": {"properties": {"a": {"type": "integer"}}}}
    make = functools.partial(tool_parsers.get, kind, names)

    def answer(text, size):
        thinker, parser = reasoning.get(name, PLAIN, make), make()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        parts = [*map(thinker.feed, pieces), thinker.finish()]
        events = [event for part in parts for event in parser.feed(part[1])]
        found = tool_parsers.collect(events + parser.finish())
        thought = "".join(part[0] for part in parts)
        return thought, found.content, [json.loads(c.arguments) for c in found.tool_calls]

    for text, expected in (
        (f"«Hm.»{call}", ("Hm.", "", [{"a": 1}])),
        (f"«Hm.\n{call}", ("Hm.", "", [{"a": 1}])),
        (f"«Hm. {call} so.»Yes", (f"Hm. {call} so.", "Yes", [])),
        (f"«Hm.»Yes.\n{call}", ("Hm.", "Yes.", [{"a": 1}])),
    ):
        given = marked(name, text)
        for size in (1, 2, 5, 1000):
            assert answer(given, size) == expected


# ---- generated answers, and time


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_split_gives_the_same(name, data):
    block = FORMATS[name]
    fragments = ["«", "»", "¦", "¬", "\n", " ", "Hm", "Yes", "<", "thought\n", *block.markers]
    text = marked(name, "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=10))))
    prompt = PLAIN + marked(name, data.draw(st.sampled_from(["", "«", "»", *block.markers])))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=8))
    whole = split(name, text, prompt=prompt)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parser = reasoning.get(name, prompt)
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    parts = [*map(parser.feed, pieces), parser.finish()]
    assert tuple(map("".join, zip(*parts, strict=True))) == whole
    assert split(name, text, 1, prompt) == whole
    assert len(whole[0]) + len(whole[1]) <= len(text)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|[]\u25c1:"))


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=60)
@given(texts, texts, st.integers(1, 9))
def test_written_blocks_are_read_back(name, thought, content, size):
    found = split(name, marked(name, "«") + thought + marked(name, "»") + content, size)
    assert found == (thought.strip(), content.lstrip())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("begun", ["", "«", "«»", "«»("])
@pytest.mark.parametrize("repeated", ["«", "»", "¦", "«»", "(", ")", " ", " )", "«Hm\n", "<"])
def test_time_is_linear(name, begun, repeated):
    begin, end = FORMATS[name].answers[0] if FORMATS[name].answers else ("(", ")")
    one = marked(name, repeated.replace("(", begin).replace(")", end))
    text = marked(name, begun.replace("(", begin)) + one * (100_000 // len(one))
    start = time.process_time()
    split(name, text, 16)
    assert time.process_time() - start < 2


# ---- which template has which format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|channel>thought\\n<channel|>' }}", "gemma4"),
        ("{{ '<|channel|>analysis' }}", "harmony"),
        ("{{ '[THINK]' + message.reasoning + '[/THINK]' }}", "mistral"),
        ("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", "cohere"),
        ("{%- set think_begin_token = '<seed:think>' -%}", "seed_oss"),
        ("{{ '<longcat_think>\\n' }}", "longcat"),
        ("{%- set inner_token = '<|inner_prefix|>' -%}", "apertus"),
        ("<|im_assistant|>assistant<|im_middle|>\u25c1think\u25b7", "kimi_vl"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("format: [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE].", "apriel"),
        ("Write your thoughts between <think></think> and your response between <response>"
         "</response>", "ernie45"),
        ("{{ '<|extra_0|>' }}{{ '<think>\\n\\n</think>\\n' }}", "hunyuan_a13b"),
        ("{{ content.split('<answer>')[-1] }}{{ '</think>' }}", "hunyuan_a13b"),
        ("{{ '<\uff5cAssistant\uff5c><think>\\n' }}", "deepseek_r1"),
        ("{{ '<\uff5cAssistant\uff5c></think>' }}", "deepseek_r1"),
        ("{{ '<|im_start|>assistant\\n<think>' }}", "qwen3"),
        ("{{ '<|assistant|>\\n<think></think>' }}", "qwen3"),
        ("]~b]ai\n<think>\n{{ '</think>' in content }}", "qwen3"),
        ("detailed thinking on", "qwen3"),
        ("<|im_assistant|>assistant<|im_middle|>{{ '<think>' + rc + '</think>' }}", "qwen3"),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_detect(template, name):
    assert reasoning.detect(template) == name


def test_every_marker_is_kept_where_it_is_a_special_token():
    assert reasoning.markers_of("cohere")[:2] == ("<|START_THINKING|>", "<|END_THINKING|>")
    assert {"<|START_RESPONSE|>", "<|END_TEXT|>"} <= set(reasoning.markers_of("cohere"))
    assert reasoning.markers_of("gemma4") == ("<|channel>", "<channel|>")


# ---- over HTTP

TEMPLATE = (
    "{% if enable_thinking %}<|think|>{% endif %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
    "{% for tool in tools or [] %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}<|turn>model\n"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"
    "{# <|tool_call>call: #}"
)
CALL = '<|tool_call>call:add{a:<|"|>x<|"|>,b:[1]}<tool_call|>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def said(prompt, *_):
    thought = "<|channel>thought\nHm.\n<channel|>" if "<|think|>" in prompt else ""
    return f"{thought}I add.{CALL}"


@pytest.fixture(scope="module")
def server():
    with serve(lambda: ScriptedClient(TEMPLATE, said)) as found:
        yield found


@pytest.mark.parametrize("thinks", [True, False])
def test_chat_in_gemmas_format(server, thinks):
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    with httpx.Client(base_url=server.url, timeout=20) as http:
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message.get("reasoning_content") == ("Hm." if thinks else None)
    assert message["content"] == "I add."
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "x", "b": [1]}
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    told = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert told == ("Hm." if thinks else "")
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": "x", "b": [1]}
