"""The form in which a chat template expects contents: a text, or a list of parts.

Templates differ, by role and with tools: some lose a text because they only loop over parts, others
print a list as Python would, or fail. So a template first renders small probe conversations in both
forms, and the forms whose text survives are those it supports. The same decides what it gets for
the empty content of a message with tool calls (null, an empty text, or none at all), and whether
arguments of calls are objects or JSON texts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Forms", "probe"]

MAX_PROBE_SECONDS = 0.1  # CPU time, after which nothing more is tried

_WORDS = ("Zq7alpha", "Zq7beta")
_NAME = "zq7_name"
_PARAMETER = "zq7_parameter"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {_PARAMETER: {"type": "string", "description": "A text."}},
            "required": [_PARAMETER],
        },
    },
}
_CALL_ID = "zq7callid"  # Mistral's templates accept nine letters and digits only
_PRINTED_PART = re.compile(r"""["']text["']: *["']zq7""", re.IGNORECASE)
_NOTHING = re.compile(r"None|null")
_EMPTY = {"null": None, "text": "", "absent": None, "parts": [{"type": "text", "text": ""}]}
_NO_CALL = 1 << 10  # losses
_FAILED = 1 << 20

_Message = dict[str, Any]
_Render = Callable[[Mapping[str, Any]], str]


@dataclass
class Forms:
    """What a template supports.

    Attributes
    ----------
    texts, parts, single_parts : set of (str, bool)
        Roles, without and with tools, whose contents it prints if they are texts, lists of parts,
        or (if neither) lists of one part.
    losses : dict
        For each empty content (a key of `_EMPTY`) of a message with tool calls: how much is lost
        or printed wrongly.
    is_json : bool
        Whether the arguments of calls must be JSON texts.
    """

    texts: set[tuple[str, bool]] = field(default_factory=set)
    parts: set[tuple[str, bool]] = field(default_factory=set)
    single_parts: set[tuple[str, bool]] = field(default_factory=set)
    losses: dict[str, int] = field(default_factory=dict)
    is_json: bool = False

    def fit(self, messages: Sequence[_Message], has_tools: bool) -> list[_Message]:
        """Return the messages in the forms that the template supports."""
        return [self._fitted(dict(message), has_tools) for message in messages]

    @property
    def least_loss(self) -> int:
        """Loss of the best content of a message with tool calls."""
        return min(self.losses.values())

    def _fitted(self, message: _Message, has_tools: bool) -> _Message:
        content = message.get("content")
        calls = message.get("tool_calls")
        if calls and not content:
            given = "text" if content is not None else "null" if "content" in message else "absent"
            best = min((given, *_EMPTY), key=lambda name: self.losses.get(name, 0))
            message = _with_empty(message, best)
        else:
            message["content"] = self._content(content, (message["role"], has_tools))
        return self.with_arguments(message)

    def with_arguments(self, message: _Message) -> _Message:
        """Return a message whose calls have arguments in the form that the template supports."""
        calls = message.get("tool_calls")
        if not calls or not self.is_json or not isinstance(calls, list):
            return message
        return message | {"tool_calls": [_with_json_arguments(call) for call in calls]}

    def _content(self, content: Any, role: tuple[str, bool]) -> Any:
        if isinstance(content, str):
            is_lost = role in self.parts | self.single_parts and role not in self.texts
            return [{"type": "text", "text": content}] if is_lost else content
        if role in self.parts and content:
            return content
        return self._content("\n".join(part["text"] for part in content), role)


def probe(render: _Render, special_tokens: Mapping[str, Any]) -> Forms:
    """Find out the forms that a template supports.

    Parameters
    ----------
    render : callable
        Renders a template's variables; whatever it raises says that a form is not supported.
    special_tokens : mapping
        Variables besides those of a conversation.
    """
    fixed = {**special_tokens, "documents": None, "add_generation_prompt": True}
    end = time.process_time() + MAX_PROBE_SECONDS

    def tried(messages: list[_Message], has_tools: bool) -> str | None:
        if time.process_time() > end:
            return None
        tools = [_TOOL] if has_tools else None
        try:
            return render({**fixed, "messages": messages, "tools": tools})
        except MemoryError:
            raise
        except Exception:  # untrusted code may raise anything
            return None

    forms = Forms()
    for is_json in (False, True):
        found = Forms(is_json=is_json)
        for empty in _EMPTY:
            messages = list(map(found.with_arguments, _calling(empty)))
            found.losses[empty] = _loss(tried(messages, True))
        if not is_json or found.least_loss < forms.least_loss:
            forms = found
    call = forms.fit(_calling("null"), True)[1]
    for has_tools in (False, True):
        for role in ("user", "system", "assistant", "tool"):
            with_tools = has_tools or role == "tool"
            texts = [tried(m, with_tools) for m in _conversations(role, _TEXT, call)]
            parts = [tried(m, with_tools) for m in _conversations(role, _PARTS, call)]
            if _survives(texts):
                forms.texts.add((role, has_tools))
            if _survives(parts) and not (_survives(texts) and _are_printed(parts)):
                forms.parts.add((role, has_tools))
            elif not _survives(texts):
                part = [tried(m, with_tools) for m in _conversations(role, _parts(_TEXT), call)]
                if _survives(part):
                    forms.single_parts.add((role, has_tools))
    return forms


def _conversations(role: str, content: Any, call: _Message) -> list[list[_Message]]:
    """Return conversations in which a message of this role has this content."""
    probed = {"role": role, "content": content}
    found = []
    for user, answer in (("Hi", "Ok"), (_parts("Hi"), _parts("Ok"))):
        asked = {"role": "user", "content": user}
        if role == "user":
            found += [[probed], [asked, {"role": "assistant", "content": answer}, probed]]
        elif role == "system":
            found += [[probed, asked]]
        elif role == "assistant":
            found += [[asked, probed, asked]]
        else:
            found += [[asked, call, probed | {"name": _NAME, "tool_call_id": _CALL_ID}]]
    return found


def _parts(*texts: str) -> list[_Message]:
    return [{"type": "text", "text": text} for text in texts]


_TEXT = " ".join(_WORDS)
_PARTS = _parts(*_WORDS)


def _survives(prompts: list[str | None]) -> bool:
    """Tell whether contents are in each prompt of a conversation that was accepted."""
    found = [prompt.casefold() for prompt in prompts if prompt is not None]
    return bool(found) and all(word.casefold() in text for text in found for word in _WORDS)


def _are_printed(prompts: list[str | None]) -> bool:
    """Tell whether a prompt shows a part as it is, instead of its text."""
    return any(prompt and _PRINTED_PART.search(prompt) for prompt in prompts)


def _with_empty(message: _Message, name: str) -> _Message:
    """Return a message with an empty content, a key of `_EMPTY`."""
    found = message | {"content": _EMPTY[name]}
    if name == "absent":
        del found["content"]
    return found


def _calling(empty: str) -> list[_Message]:
    """Return a conversation with a tool call beside an empty content."""
    function = {"name": _NAME, "arguments": {_PARAMETER: _WORDS[0]}}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    message = _with_empty({"role": "assistant", "tool_calls": [call]}, empty)
    result = {"role": "tool", "content": "Ok", "name": _NAME, "tool_call_id": _CALL_ID}
    return [{"role": "user", "content": "Hi"}, message, result]


def _loss(text: str | None) -> int:
    """Return how bad a prompt with a tool call beside an empty content is."""
    if text is None:
        return _FAILED
    as_python = f"'{_PARAMETER}': '{_WORDS[0]}"
    is_lost = _WORDS[0] not in text or as_python in text or f'\\"{_PARAMETER}' in text
    return len(_NOTHING.findall(text)) + (_NO_CALL if is_lost else 0)


def _with_json_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}
