"""Chat templates: render messages to a prompt with the model's Jinja template.

The dialect is Hugging Face's: blocks are trimmed, ``break`` and ``continue`` work, ``tojson``
does not escape HTML, and ``raise_exception(message)`` and ``strftime_now(format)`` exist.
A template is untrusted code, so it is parsed and run in another process, in a sandbox
(`template_sandbox`) and under time and memory limits (`template_worker`).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from engine.checks import shown, shown_with_type
from engine.errors import RequestError, TemplateError
from engine.text import template_worker
from engine.text.content_marks import ContentMarks, has_marks
from engine.text.parts import SPECIAL_NAMES
from engine.text.template_worker import MAX_CHARS

__all__ = ["RESERVED_VARIABLES", "ChatTemplate"]

MAX_SOURCE_CHARS = 1_000_000
MAX_DEPTH = 64  # maximum nesting of lists and dicts in a template's arguments
_TAG_SPACE = "\u205f"  # white space that templates strip, but do not write
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning
MAX_INT_BITS = 2048  # below Python's limit for int <-> decimal str conversion

RESERVED_VARIABLES = frozenset(
    [
        # arguments of apply_chat_template, here or in other engines; never variables
        *("messages", "tools", "add_generation_prompt", "chat_template", "conversation"),
        *("tokenize", "add_special_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("continue_final_message", "self", "loop", "caller"),
        # names that templates rely on
        *("raise_exception", "strftime_now", "range", "namespace", "dict", *SPECIAL_NAMES),
    ]
)
"""Names a request cannot set as template variables."""


class ChatTemplate:
    """A Jinja template that turns messages into a prompt.

    Parameters
    ----------
    source : str
        Jinja source; compiled on first use, in the template process.

    Examples
    --------
    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '[user] Hi'
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        marks: ContentMarks | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt.

        Parameters
        ----------
        messages : sequence of dict
            See `Tokenizer.apply_chat_template`.
        add_generation_prompt : bool, optional
            End the prompt with the start of the assistant's reply; by default True, unless
            `continue_final_message` is.
        tools : sequence of dict, optional
            JSON schemas of the functions.
        special_tokens : mapping of str to str, optional
            "bos_token", "eos_token" and the like.
        variables : mapping, optional
            Additional template variables.
        marks : ContentMarks, optional
            Mark the texts of messages, tools and variables; the prompt then carries these marks.
        continue_final_message : bool
            End the prompt with the text of the last message, without what the template writes
            after it. White space at its end is kept if the template keeps it.

        Raises
        ------
        RequestError
            If the messages, tools or variables are invalid, or tools are given to a template that
            ignores them, or the last message's text to continue is missing from the prompt.
        TemplateError
            If the template fails, violates the sandbox, or exceeds its limits.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} must be True or False; got {shown_with_type(flag)}")
        checked = [_with_thoughts(message) for message in _check_messages(messages)]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message needs add_generation_prompt to be False; got True"
                )
            # The message's text may occur elsewhere, so a word that cannot marks its end.
            tag = f"end{secrets.token_hex(16)}{_TAG_SPACE}"
            _append(checked[-1], tag)
        given = {
            "documents": None,
            **_marked(_check_variables(variables or {}), marks),
            "messages": [_marked_message(message, marks) for message in checked],
            "tools": None if tools is None else _marked(self._readable_tools(tools), marks),
            "add_generation_prompt": add_generation_prompt,
        }
        text: str = template_worker.ask(self._checked_source, given, special_tokens, marks)
        if not continue_final_message:
            return text
        return _cut(text, text if marks is None else marks.unmark(text), tag)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads and a request may set."""
        return frozenset(self._facts["reads"]) - RESERVED_VARIABLES

    @property
    def literals(self) -> list[str]:
        """Texts that the template holds."""
        return list(self._facts["literals"])

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = template_worker.ask(self._checked_source)
        return facts

    @property
    def _checked_source(self) -> str:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"a chat template must have at most {MAX_SOURCE_CHARS} characters; "
                f"got {len(self.source)}"
            )
        return self.source

    def _readable_tools(self, tools: Any) -> list[Any]:
        """Return plain copies of the tools; reject them if the template would ignore them."""
        found = _check_tools(tools)
        if found and "tools" not in self._facts["reads"]:
            raise RequestError(f"tools must be empty, the template ignores them; got {len(found)}")
        return found


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return plain copies of the messages; raise at the first invalid one."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        got = type(messages).__name__
        raise RequestError(f"messages must be a list of dicts; got {got}")
    if not messages:
        raise RequestError("messages must not be empty")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has the names that templates read, as in transformers.

    gpt-oss's template reads "thinking", and refuses it beside the content of a message with calls:
    such a message keeps its names.
    """
    given = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if given is None:
        return message
    named = {**message, "reasoning_content": given}
    if named.get("thinking") is None and not (message.get("tool_calls") and message.get("content")):
        named["thinking"] = given
    return named


def _append(message: dict[str, Any], text: str) -> None:
    """Append to a message's content, or to its last part."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + text
    elif content:
        content[-1] = content[-1] | {"text": content[-1]["text"] + text}
    else:
        raise RequestError(
            f"continue_final_message needs a last message with content; got {shown(content)}"
        )


def _cut(text: str, plain: str, tag: str) -> str:
    """Return `text` up to `tag`, which is where it is in `plain`, a text of the same length."""
    end = plain.rfind(tag.rstrip())
    if end < 0:
        raise RequestError(
            "continue_final_message needs a chat template that writes the end of the last "
            "message; this one leaves it out"
        )
    is_trimmed = not plain.startswith(tag, end)
    return text[:end].rstrip() if is_trimmed else text[:end]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict; got {type(message).__name__}")
    plain: dict[str, Any] = _plain(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{where}["role"] must be a non-empty str; got {shown(role)}')
    content = plain.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f'{where}["content"][{i}]')
    elif content is None and plain.get("tool_calls"):
        pass  # an assistant message with tool calls may have no content
    elif not isinstance(content, str):
        raise RequestError(
            f'{where}["content"] must be a str or a list of text parts; got '
            + ("nothing" if "content" not in plain else f"{type(content).__name__}")
        )
    return plain


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f'{where} must be {{"type": "text", "text": ...}}; got {shown(kind)}')
    if not isinstance(part.get("text"), str):
        got = type(part.get("text")).__name__
        raise RequestError(f'{where}["text"] must be a str; got {got}')


def _check_tools(tools: Any) -> list[Any]:
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of dicts; got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            got = type(tool).__name__
            raise RequestError(f"tools[{i}] must be a dict (a JSON schema); got {got}")
    plain: list[Any] = _plain(list(tools), "tools")
    return plain


def _check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in RESERVED_VARIABLES or name.startswith("_") or not name.isidentifier():
            got = shown(name)
            raise RequestError(f"a template variable must not have a reserved name; got {got}")
    return {name: _plain(value, name) for name, value in variables.items()}


def _marked(value: Any, marks: ContentMarks | None) -> Any:
    """Return plain values with their texts marked."""
    if marks is None:
        return value
    if isinstance(value, str):
        if has_marks(value):
            raise RequestError(
                "messages, tools and variables must be valid Unicode; got surrogates"
            )
        return marks.mark(value)
    if isinstance(value, dict):
        return {marks.mark_key(key): _marked(item, marks) for key, item in value.items()}
    return [_marked(item, marks) for item in value] if isinstance(value, list) else value


def _marked_message(message: dict[str, Any], marks: ContentMarks | None) -> dict[str, Any]:
    """Mark all texts of a message but its role, of which templates make control tokens."""
    role = message["role"]
    kept = {"role": role} if role.isalpha() else {}
    found: dict[str, Any] = _marked(message, marks) | kept
    return found


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Rebuild `value` from plain types: a template could call methods of anything else."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} must not be nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise RequestError(f"{where} must have at most {MAX_CHARS} characters")
        return str.__str__(value)
    if isinstance(value, int):
        if int(value).bit_length() > MAX_INT_BITS:
            raise RequestError(f"{where} must have at most {MAX_INT_BITS} bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where} must have str keys; got {shown(key)}")
        return {str(k): _plain(v, f'{where}["{k}"]', depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(
        f"{where} must be a str, number, bool, None, list or dict; got {type(value).__name__}"
    )
