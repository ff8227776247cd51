"""Random Jinja from a grammar, and changed templates of real families.

A template gives a text, or is a `TemplateError` or `RequestError`, in time. It touches no file,
starts nothing, and shows no secret of the environment. (Addresses of objects are those of the
process of the templates, which tell nothing.)
"""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path
from typing import Any

from engine.errors import RequestError, TemplateError
from engine.text.chat_template import ChatTemplate
from tests.fuzz.limits import Limits, outcome_of
from tests.golden.text_templates import CALLS, CHATS, LONG, PARTS, SIMPLE, WEATHER

LIMITS = Limits(cpu_seconds=6.0)
SECRET = "a-secret-of-the-environment"
NAMES = (
    "messages",
    "m",
    "x",
    "y",
    "loop",
    "tools",
    "bos_token",
    "ns",
    "self",
    "add_generation_prompt",
)
ATTRIBUTES = (
    *("role", "content", "x", "items", "keys", "values", "split", "strip", "upper", "format"),
    *("format_map", "join", "replace", "__class__", "__init__", "__globals__", "__mro__", "append"),
    *("__subclasses__", "__builtins__", "index0", "last", "index", "zfill", "ljust", "encode"),
    *("__getitem__", "_env", "environment", "gi_frame", "f_globals", "pop", "update", "cycle"),
)
FILTERS = (
    *("abs", "attr", "batch(3)", "capitalize", "center(80)", "default('d')", "dictsort", "escape"),
    *(
        "filesizeformat",
        "first",
        "float",
        "forceescape",
        "format(1)",
        "groupby('role')",
        "indent(4)",
    ),
    *("int", "items", "join(',')", "last", "length", "list", "lower", "map(attribute='role')"),
    *("map('upper')", "max", "min", "pprint", "random", "reject('none')", "replace('a','bb')"),
    *("rejectattr('role')", "reverse", "round", "safe", "select('string')", "slice(2)", "sort"),
    *(
        "selectattr('role','equalto','user')",
        "string",
        "striptags",
        "sum",
        "sum(start=[])",
        "title",
    ),
    *(
        "tojson",
        "tojson(indent=2)",
        "trim",
        "truncate(5)",
        "unique",
        "upper",
        "urlencode",
        "urlize",
    ),
    *("wordcount", "wordwrap(3)", "xmlattr", "map('list')", "nosuchfilter", "join('x'*99)"),
)
TESTS = (
    *("defined", "none", "string", "mapping", "iterable", "number", "odd", "divisibleby(0)"),
    *("eq(1)", "in([1])", "sameas(x)", "callable", "upper", "nosuchtest", "filter", "boolean"),
)
LITERALS = (
    *("1", "0", "-3", "2.5", "1e308", "'a'", "'é😀'", "'%s %d'", "'{0.__class__}'", "'{0:99}'"),
    *("none", "true", "[]", "{}", "(1, 2)", "[1, [2, 'b']]", "{'a': 1}", "range(9)", "7", "'x y'"),
    *("namespace(a=1)", "dict(a=1)", "'\\x00'", "'{}'", "'<b>'", "range(3)", "2", "''"),
)
RARE = (
    "range(10**7)",
    "10**9",
    "'a'*10**7",
    "2**4096",
    "99999999999999999999",
    "range(99999)|list",
)
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "not in")
PAYLOADS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('%s'|attr('format'))('x') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "{{ messages.append({'role': 'x'}) }}",
    "{% set x = messages.__setitem__ %}{{ x(0, 1) }}",
    "{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}",
    "{{ strftime_now('%9999999d') }}{{ raise_exception(messages) }}",
    "{{ namespace.__init__ }}{{ dict.__base__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "{{ ''['__cl' ~ 'ass__'] }}{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}{{ loop.__class__ }}",
    "{{ caller.__self__ }}{{ varargs }}{{ kwargs }}",
    "{{ lipsum(n=10**6) }}{{ joiner }}{{ request }}{{ config }}",
)
_PIECES = re.compile(r"\{%-?|-?%\}|\{\{-?|-?\}\}|\w+|\s+|.", re.DOTALL)


class _Grammar:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def expression(self, depth: int = 0) -> str:
        rng, way = self.rng, self.rng.random()
        if depth > 3 or way < 0.25:
            return rng.choice(RARE) if rng.random() < 0.004 else rng.choice((*LITERALS, *NAMES))
        one = self.expression(depth + 1)
        if way < 0.45:
            return f"({one}) | {rng.choice(FILTERS)}"
        if way < 0.6:
            return f"({one}).{rng.choice(ATTRIBUTES)}"
        if way < 0.7:
            return f"({one})({self.expression(depth + 1)})"
        if way < 0.85:
            return f"({one}) {rng.choice(OPERATORS)} ({self.expression(depth + 1)})"
        if way < 0.9:
            return f"({one})[{rng.choice(['0', '-1', '::-1', '1:', one])}]"
        if way < 0.95:
            return f"({one}) is {rng.choice(['', 'not '])}{rng.choice(TESTS)}"
        return f"({one} if {self.expression(depth + 1)} else {self.expression(depth + 1)})"

    def body(self, depth: int = 0) -> str:
        count = self.rng.choice([1, 1, 2, 3]) if depth < 3 else 1
        return "".join(self.statement(depth) for _ in range(count))

    def statement(self, depth: int) -> str:
        rng, name = self.rng, self.rng.choice(NAMES[1:4])
        value = self.expression(depth)
        if depth > 2 or (way := rng.random()) < 0.45:
            return f"{{{{ {value} }}}}"
        inner = self.body(depth + 1)
        if way < 0.6:
            over = rng.choice(["messages", value, "range(5)", "(1, 2)"])
            more = rng.choice(["", "", " recursive", f" if {value}"])
            extra = rng.choice(["", "{% break %}", "{% continue %}", "{{ loop(m) }}"])
            return f"{{% for {name} in {over}{more} %}}{inner}{extra}{{% endfor %}}"
        if way < 0.7:
            return f"{{%- if {value} %}}{inner}{{% else %}}{value}{{% endif -%}}"
        if way < 0.8:
            target = rng.choice([name, "ns.a", "x, y", "loop"])
            return f"{{% set {target} = {value} %}}"
        if way < 0.87:
            call = rng.choice(["f(1)", "f()", "f(m, z=2)"])
            return f"{{% macro f({name}=1) %}}{inner}{{% endmacro %}}{{{{ {call} }}}}"
        if way < 0.92:
            return f"{{% filter {rng.choice(FILTERS)} %}}{inner}{{% endfilter %}}"
        if way < 0.96:
            marked = f"{{% generation %}}{inner}{{% endgeneration %}}"
            return f"{{% set {name} %}}{inner}{{% endset %}}{marked}"
        return rng.choice(
            ["{% block b %}", "{% with x = 1 %}", "{% call f() %}", "{#", "{% raw %}"]
        )


def _changed(rng: random.Random) -> str:
    pieces = _PIECES.findall(rng.choice(CHATS)["template"])
    for _ in range(rng.choice([1, 1, 2, 5])):
        place, way = rng.randrange(len(pieces)), rng.random()
        if way < 0.3:
            del pieces[place]
        elif way < 0.5:
            pieces[place] = rng.choice(pieces)
        elif way < 0.7:
            pieces[place] = rng.choice((*NAMES, *ATTRIBUTES, *LITERALS))
        elif way < 0.85:
            end = place + rng.randrange(20)
            pieces[place:place] = pieces[place:end]
        else:
            pieces.insert(place, rng.choice((*PAYLOADS, f"{{{{ {_Grammar(rng).expression()} }}}}")))
        pieces = pieces or ["x"]
    return "".join(pieces)


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case."""
    way = rng.random()
    if way < 0.55:
        source = _Grammar(rng).body()
    elif way < 0.9:
        source = _changed(rng)
    else:
        source = rng.choice(PAYLOADS) + _Grammar(rng).body(1)
    source = source[: rng.randrange(len(source) + 1)] if rng.random() < 0.03 else source
    chats = [SIMPLE, LONG, CALLS, PARTS]
    return {"source": source, "chat": rng.randrange(len(chats)), "tools": rng.random() < 0.2}


class _Audit:
    """Notes what a rendering does besides computing."""

    def __init__(self) -> None:
        self.is_on, self.events = False, []
        self._readable = tuple({str(Path(p).resolve()) for p in (*sys.path, sys.prefix) if p})
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and self._is_harmful(event, arguments):
            self.events.append(f"{event} {arguments!r:.200}")

    def _is_harmful(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode = arguments[0], arguments[1] or "r"
            if not isinstance(path, (str, bytes)):
                return False
            name = os.fsdecode(path)
            is_ours = name == "/dev/null" or os.path.realpath(name).startswith(self._readable)
            return not (is_ours and (set(mode) <= set("rbt") or name == "/dev/null"))
        if event == "subprocess.Popen":  # the process that templates run in, if they have one
            return "engine.text.template_worker" not in str(arguments[1])
        head = event.split(".")[0]
        return head in ("ctypes", "shutil", "pty", "ftplib", "urllib", "http") or event in (
            *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename"),
            *("os.mkdir", "os.symlink", "os.chmod", "socket.connect", "socket.bind"),
        )


class Runner:
    """Renders a template under an audit hook."""

    def __init__(self, folder: Path) -> None:
        os.environ["FUZZ_SECRET"] = SECRET
        self._audit = _Audit()
        for chat in CHATS:
            ChatTemplate(chat["template"]).variables  # noqa: B018
        assert self.run({"source": "{{ messages }}", "chat": 0, "tools": False}) == "text"

    def run(self, case: dict[str, Any]) -> str:
        """Return how the rendering ended."""
        messages = [SIMPLE, LONG, CALLS, PARTS][case["chat"]]
        template = ChatTemplate(case["source"])
        self._audit.events.clear()
        self._audit.is_on = True
        try:
            text = template.render(messages, tools=[WEATHER] if case["tools"] else None)
        except (TemplateError, RequestError) as error:
            self._audit.is_on = False
            assert SECRET not in str(error)
            return outcome_of(error)
        finally:
            self._audit.is_on = False
            assert not self._audit.events, self._audit.events
        assert isinstance(text, str) and SECRET not in text
        return "text"
