"""Structural tags: which texts they allow, and what is refused."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.structured.grammar import GrammarCompiler, check_structured
from engine.structured.spec import MAX_TAG_CHARS, StructuredOutput

pytest.importorskip("llguidance")

EOS, SPECIAL = 256, 257
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-c/]+"}
LINE = {"type": "regex", "pattern": ".*"}


class Tokens:
    """The bytes, an end of sequence, and the special token <s>."""

    special_ids = frozenset({EOS, SPECIAL})
    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < EOS else {EOS: b"<eos>", SPECIAL: b"<s>"}[token_id]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokens(), 258, [EOS])


def tag(form):
    return StructuredOutput(structural_tag={"type": "structural_tag", "format": form})


def const(text):
    return {"type": "const_string", "value": text}


def calls(**fields):
    tags = [
        {"begin": "<f=a>", "content": INTEGER, "end": "</f>"},
        {"begin": "<f=b>", "content": WORD, "end": "</f>"},
    ]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags} | fields


def row(*elements):
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements):
    return {"type": "or", "elements": list(elements)}


def optional(form):
    return {"type": "optional", "content": form}


def tagged(form, end):
    return {"type": "tag", "begin": "<f=", "content": form, "end": end}


def repeated(form, depth):
    return {"type": "repeat", "content": repeated(form, depth - 1), "max": 900} if depth else form


def allows(compiler, form, text):
    """Whether a format allows a text, in which "§" stands for the special token."""
    matcher = compiler.compile(tag(form)).new_state().matcher
    ids = []
    for i, part in enumerate(text.split("§")):
        ids += ([SPECIAL] if i else []) + list(part.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const('a\n"é"'), ['a\n"é"'], ["", "a", "b"]),
        (const("a<s>b"), ["a§b"], ["a<s>b", "ab"]),
        (INTEGER, ["5", "-17"], ["5.5", "a", ""]),
        (WORD, ["a/c"], ["", "d"]),
        ({"type": "grammar", "grammar": 'start: "x" y\ny: "z"+'}, ["xzz"], ["x"]),
        ({"type": "sequence", "elements": [WORD, INTEGER, const("!")]}, ["a5!"], ["5!", "a!"]),
        ({"type": "or", "elements": [WORD, INTEGER]}, ["ab", "5"], ["a5"]),
        (optional(const("x")), ["", "x"], ["xx"]),
        ({"type": "star", "content": const("x")}, ["", "xxx"], ["y"]),
        ({"type": "plus", "content": const("x")}, ["x", "xx"], [""]),
        ({"type": "repeat", "content": const("x"), "min": 2, "max": 3}, ["xx", "xxx"], ["x"]),
        (ANY, ["", "a\n§"[:2]], []),
        (
            {"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"},
            ["<t></t>", "<t>a\n<</t>"],
            ["<t>", "<t></t></t>"],
        ),
        (
            {"type": "tag", "begin": "<s>", "content": ANY, "end": "<s>"},
            ["§§", "§a§"],
            ["<s>a<s>", "§a<s>b§"],
        ),
        (
            {
                "type": "tag",
                "begin": "<t>",
                "content": {"type": "tag", "begin": "", "content": ANY, "end": "!"},
                "end": "</t>",
            },
            ["<t>a!</t>", "<t>!</t>"],
            ["<t>a</t>", "<t>a!b</t>", "<t>a!"],
        ),
        (row(const("<"), row(WORD, ANY), const(""), const(">")), ["<a!>", "<a>"], ["<a>>", "<a!"]),
        (
            row(ANY, {"type": "tag", "begin": "[", "content": INTEGER, "end": "]"}),
            ["a[5]", "[5]"],
            ["a", "[a[5]"],
        ),
        (
            {"type": "tag", "begin": "<", "content": row(WORD, ANY), "end": ">"},
            ["<a>", "<a1>"],
            ["<a1", "<1>", "<a>>"],
        ),
        (
            {"type": "tag", "begin": "<", "content": one_of(INTEGER, const("x"), ANY), "end": ">"},
            ["<5>", "<x>", "<any text>"],
            ["<5", "<5>>"],
        ),
        (
            {"type": "tag", "begin": "<", "content": optional(ANY), "end": ">"},
            ["<>", "<a>"],
            ["<", "<a", "<a>>"],
        ),
        (
            {"type": "tag", "begin": "<", "content": LINE, "end": "</t>"},
            ["<</t>", "<ab</t>", "<a</b></t>"],
            ["<a", "<a</t>b", "<a</t></t>"],
        ),
        (
            {"type": "tag", "begin": "<", "content": one_of(row(INTEGER, LINE), WORD), "end": "/a"},
            ["<5 x/a", "<b/a"],
            ["</a", "<5/a/a", "<b/a/a"],
        ),
        (row(calls(tags=[{"begin": "<f=", "content": LINE, "end": ">"}])), ["a<f=b>c"], ["<f=b"]),
        *(
            (
                {"type": "tag", "begin": "(", "content": content, "end": ")"},
                ["(<f=<f=b>)"],
                ["(<f=<f=b)", "(<f=<f=b>"],
            )
            for content in (
                tagged(LINE, ">"),
                tagged(tagged(LINE, ""), ">"),
                optional(tagged(LINE, ">")),
                {"type": "tags_with_separator", "separator": ",", "tags": [tagged(LINE, ">")]},
            )
        ),
        (calls(), ["", "x", "a<f=a>5</f>b<f=b>c</f>"], ["<f=", "<f=c>", "<f=a>c</f>"]),
        (calls(at_least_one=True), ["<f=a>5</f>", "x<f=b>a</f>y"], ["", "x"]),
        (calls(stop_after_first=True), ["", "x", "x<f=a>5</f>"], ["<f=a>5</f>x"]),
        (
            calls(at_least_one=True, stop_after_first=True),
            ["x<f=a>5</f>"],
            ["", "<f=a>5</f>x", "<f=a>5</f><f=a>5</f>"],
        ),
        (calls(excludes=["q(?s:.*)"]), ["aq", "<f=a>5</f>aq"], ["qa", "<f=a>5</f>qa"]),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"begin": "[", "content": INTEGER, "end": "]"}],
                "separator": ",",
            },
            ["", "[1]", "[1],[2]"],
            ["[1],", "[1][2]"],
        ),
    ],
)
def test_what_a_format_allows(compiler, form, good, bad):
    for text in good:
        assert allows(compiler, form, text), text
    for text in bad:
        assert not allows(compiler, form, text), text


def test_json_without_white_space_of_its_own_may_begin_where_text_may(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    data = {"type": "json_schema", "json_schema": schema, "any_whitespace": False}
    text = {"type": "tag", "begin": "", "content": {**ANY, "excludes": [r"\{(?s:.*)"]}, "end": "."}
    form = {"type": "or", "elements": [data, text]}
    for good in ('{"a": 5}', '{"a":5}', "Some text."):
        assert allows(compiler, form, good)
    for bad in ('{"a": "b"}', "{a.", '{ "a": 5}', "Some text"):
        assert not allows(compiler, form, bad)


def values(kind, required=(), **more):
    properties = {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    schema["additionalProperties"] = False
    return {"type": kind, "json_schema": schema} | more


@pytest.mark.parametrize(
    ("required", "good", "bad"),
    [
        ((), ["", "a=1", "b=true", "a=1, b=true", 'a=1, c="x"', 'b=true, c=""'], ["b=true, a=1"]),
        (("b",), ["b=true", "a=1, b=true", 'b=true, c="x"'], ["", "a=1", "a=1, ", ", b=true"]),
        (("a", "c"), ['a=1, c="x"', 'a=1, b=true, c="x"'], ["a=1", 'c="x"', "a=1, b=true"]),
    ],
)
def test_keyword_values(compiler, required, good, bad):
    form = values("keyword_values", required)
    for text in good:
        assert allows(compiler, form, text), text
    for text in [*bad, "d=1", "a=1,", 'a="x"']:
        assert not allows(compiler, form, text), text


def test_tagged_values(compiler):
    tags = {"begin": "<{key}>", "end": "</>", "close": "</>", "types": {"c": ["string"]}}
    form = values("tagged_values", ["c"], **tags)
    for good in ("<c></>", "<a>1</><c>1 < 2\n</>", "<a>-5</>\n<b>true</><c>null</>\n"):
        assert allows(compiler, form, good), good
    for bad in ("", "<a>1</>", "<c>x</><a>1</>", "<c>x</></>", "<c>x</>\n\n", "<d>1</><c>x</>"):
        assert not allows(compiler, form, bad), bad
    tags["types"] = {"c": ["string", "null", "integer"]}
    form = values("tagged_values", ["c"], **tags)
    assert allows(compiler, form, "<c>nothing</>")
    for read_as_another in ("null", " None ", "5", '"x"'):
        assert not allows(compiler, form, f"<c>{read_as_another}</>")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (None, "format must be an object"),
        ({"type": "x"}, "format.type must be one of const_string"),
        ({"type": "const_string"}, "format.value is missing"),
        ({"type": "const_string", "value": 5}, "format.value is of a wrong type; got 5"),
        ({"type": "const_string", "value": "a", "x": 1}, "unknown field 'x'"),
        ({"type": "sequence", "elements": []}, "format.elements must not be empty"),
        ({"type": "or", "elements": [WORD, 5]}, "format.elements[1] must be an object"),
        ({"type": "repeat", "content": WORD, "min": 2, "max": 1}, "0 <= min <= max"),
        ({"type": "repeat", "content": WORD, "max": 5000}, "max <= 1024"),
        (calls(triggers=["<g="]), "format.tags[0].begin must begin with one of triggers"),
        (calls(tags=[]), "format.tags must not be empty"),
        (row(ANY, INTEGER), "format.elements[1]: a const_string or a tag with a begin must follow"),
        (row({"type": "star", "content": ANY}, const("x")), "any_text that repeats must not be"),
        (calls(excludes=[5]), "format.excludes must be a list of texts"),
        ({"type": "tag", "begin": "", "content": ANY, "end": ""}, "end must not be empty"),
        ({"type": "regex", "pattern": "("}, "unclosed group"),
        ({"type": "grammar", "grammar": "start: x"}, "x"),
        ({"type": "json_schema", "json_schema": {"type": "x"}}, "(at #)"),
        (repeated({"type": "regex", "pattern": "(a{900}){900}"}, 1), "too many states"),
    ],
)
def test_what_is_no_structural_tag_is_refused(form, why):
    with pytest.raises(RequestError) as caught:
        check_structured(tag(form))
    assert str(caught.value).startswith("structured: structural_tag cannot be compiled: ")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (5, "structural_tag must be a str or a dict"),
        ("[]", "structural_tag must be an object"),
        ("{", "structural_tag must be a structural tag"),
        ("[" * 200 + "]" * 200, "at most 132 objects and arrays; got 200"),
        ({"a": "b" * MAX_TAG_CHARS}, "at most 1048576 characters"),
    ],
)
def test_what_is_no_json_is_refused_at_once(given, why):
    with pytest.raises(RequestError, match=why):
        StructuredOutput(structural_tag=given)
