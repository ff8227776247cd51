"""Translates a `StructuredOutput` to the kind and text of a grammar for llguidance."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

from engine.errors import RequestError
from engine.structured.lark import tag_grammar
from engine.structured.spec import StructuredOutput

__all__ = [
    "MAX_REASON_CHARS",
    "STACK_BYTES",
    "compile_matcher",
    "library",
    "on_deep_stack",
    "reason",
    "source_of",
]

_T = TypeVar("_T")

# Bounded: some models never stop writing white space between two JSON tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}

# Limits per request: about 2 KiB per lexer state, and up to about 0.2 s for the worst mask. An
# optional property makes four items of a row.
_LIMITS = {
    "max_grammar_size": 200_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 1 << 16,
    "step_max_items": 200_000,
    "verbose_errors": False,
}
MAX_REASON_CHARS = 400
STACK_BYTES = 32 << 20
"""Stack for compiling: llguidance recurses along chains of references, 10 KiB for each."""

_STACK_SIZE_LOCK = threading.Lock()


def library() -> ModuleType:
    """Import and return the module llguidance.

    Raises
    ------
    RequestError
        If it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise RequestError(
            "structured output needs the package llguidance; "
            f"install it with: pip install 'rawengine[grammar]' ({error})"
        ) from None


def source_of(structured: StructuredOutput) -> tuple[str, str]:
    """Return a grammar's kind ("json_schema", "regex", "lark", "structural_tag") and text.

    Examples
    --------
    >>> source_of(StructuredOutput(choice=["yes", "no"]))
    ('lark', 'start: "yes" | "no"')
    """
    if structured.choice is not None:
        return "lark", "start: " + " | ".join(map(json.dumps, structured.choice))
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.grammar is not None:
        return "lark", structured.grammar
    if structured.structural_tag is not None:
        assert isinstance(structured.structural_tag, str)
        return "structural_tag", structured.structural_tag
    text = '{"type": "object"}' if structured.json_object else structured.json
    assert isinstance(text, str)
    return "json_schema", text


def compile_matcher(
    module: ModuleType,
    tokenizer: Any,
    kind: str,
    text: str,
    special_ids: Mapping[str, int] | None = None,
) -> Any:
    """Return llguidance's matcher for a grammar; it holds any grammar error (see `reason`).

    A JSON schema must be one that `json_schema.normalized` wrote: others are enforced in part only.
    A structural tag must come from `structural_tag.normalized_tag`; `special_ids` are the special
    tokens that its literal text may have.

    Raises
    ------
    ValueError
        If `text` is not a JSON schema.
    """
    if kind == "json_schema":
        grammar = module.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    elif kind == "structural_tag":
        grammar = tag_grammar(json.loads(text), special_ids or {})
    else:
        grammar = getattr(module.LLMatcher, f"grammar_from_{kind}")(text)
    limits = module.LLParserLimits(**_LIMITS)
    return module.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def on_deep_stack(call: Callable[[], _T]) -> _T:
    """Return what `call` returns, in a thread with a stack of `STACK_BYTES`."""
    with ThreadPoolExecutor(1) as executor:
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                future = executor.submit(call)  # starts the thread
            finally:
                threading.stack_size(before)
        return future.result()


def reason(matcher: Any) -> str:
    """Return why `matcher` failed, or "" if it did not."""
    if not matcher.is_error():
        return ""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "no text matches it"
    return text[:MAX_REASON_CHARS] or "unknown reason"
