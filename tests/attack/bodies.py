"""Bodies as large as they may be, in every place of every endpoint's request.

`EXAMPLES` holds one request for each endpoint with all of its fields. Every value in it, however
deep, is replaced by each of `fillings`, which are as long as the body may be. /health has to answer
meanwhile. A test of the suite checks that the examples have all fields.
"""

from __future__ import annotations

import copy
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

from tests.attack.figures import Figure
from tests.attack.target import Target

OPTIONS = ("--served-model-name", "m")
_SECONDS = 240.0
_NUM_WORST = 5
_SLOT = "@here@"

_CACHE = {"type": "ephemeral"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": {}}}
_FILE = {"image_url": None, "input_audio": None, "video_url": None, "file": None, "refusal": None}
_SAMPLING: dict[str, Any] = {
    "model": "m", "n": 1, "best_of": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["x"],
    "seed": 1, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": False, "max_tokens": 1,
    "min_tokens": 0, "prompt_logprobs": 0, "skip_special_tokens": True, "logprobs": 1,
    "include_stop_str_in_output": False, "use_speculation": False, "logit_bias": {"1": 1.0},
    "allowed_token_ids": [1], "bad_words": ["x"], "guided_json": {}, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": "a", "priority": 0, "cache_salt": "s",
    "timeout": 9.0, "stream": False, "user": "u", "add_special_tokens": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False,
                       "continuous_usage_stats": False},
    "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": _SCHEMA, "description": "d", "strict": True}},
    "structured_outputs": {"json": {}, "regex": "a", "choice": ["a"], "grammar": "a",
                           "json_object": True, "structural_tag": {}},
}  # fmt: skip
_BESIDE = {"model", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "priority",
           "cache_salt", "timeout", "stream", "user", "add_special_tokens", "return_token_ids",
           "stream_options", "response_format"}  # fmt: skip
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "name": "n", "cache_control": _CACHE,
         "content": [{"type": "text", "text": "Hi", "cache_control": _CACHE, **_FILE}]},
        {"role": "assistant", "content": "a", "tool_calls": [_CALL], "reasoning_content": "r",
         "reasoning": "r", "refusal": "r", "audio": {}, "annotations": [], "function_call": {}},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION, "cache_control": _CACHE}],
    "chat_template_kwargs": {}, "add_generation_prompt": True,
}  # fmt: skip
_AGENT: dict[str, Any] = {
    "model": "m", "system": [{"type": "text", "text": "s", "cache_control": _CACHE}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "Hi", "cache_control": _CACHE, "citations": []},
            {"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": False}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    ],
    "tools": [{"name": "f", "input_schema": _SCHEMA, "description": "d", "strict": True,
               "cache_control": _CACHE, "eager_input_streaming": False}],
    "tool_choice": {"type": "auto", "name": "f", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "d"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    "cache_control": _CACHE, "thread": None,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
_LABELS = {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "r",
           "service_tier": "auto", "store": False, "metadata": {"a": "b"}}  # fmt: skip
_SCORE = {"text_1": "a", "text_2": ["b"], "model": "m", "pooling": "last", "instruction": "i",
          "user": "u"}  # fmt: skip
_RERANK = {"query": "a", "documents": ["b", {"text": "c"}], "model": "m", "top_n": 1,
           "return_documents": True, "pooling": "last", "instruction": "i",
           "user": "u"}  # fmt: skip
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**_SAMPLING, "prompt": ["a"], "echo": False, "suffix": "s"},
    "/v1/chat/completions": {
        **_SAMPLING, **_CHAT, **_LABELS, "max_completion_tokens": 1, "logprobs": True,
        "top_logprobs": 1, "tool_choice": {
            "type": "function", "function": {"name": "f"}, "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        "parallel_tool_calls": True, "include_reasoning": True, "reasoning_effort": "low",
        "documents": [{"text": "d"}], "prediction": {}, "functions": [], "function_call": {},
        "audio": {}, "modalities": ["text"], "web_search_options": {}, "verbosity": "low",
        "continue_final_message": False,
    },
    "/v1/responses": {
        **_LABELS, "model": "m", "instructions": "i", "max_output_tokens": 1,
        "input": [
            {"type": "message", "role": "user", "id": "i", "status": "s", "phase": "p",
             "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"type": "reasoning", "id": "r", "summary": [], "content": []},
        ],
        "temperature": 0.0, "top_p": 1.0, "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA},
                 "verbosity": "low"},
        "stream": False, "user": "u", "previous_response_id": "p", "conversation": {},
        "background": False, "prompt": {}, "include": ["i"], "max_tool_calls": 1,
        "stream_options": {"include_obfuscation": False}, "top_logprobs": 1, "truncation": "auto",
    },
    "/v1/messages": {
        **_AGENT, "max_tokens": 1, "stop_sequences": ["x"], "stream": False, "temperature": 0.0,
        "top_k": 1, "top_p": 1.0, "metadata": {"user_id": "u"}, "service_tier": "auto",
    },
    "/v1/messages/count_tokens": _AGENT,
    "/v1/embeddings": {
        "input": ["a"], "model": "m", "encoding_format": "float", "dimensions": 32, "user": "u",
        "pooling": "last", "normalize": True,
    },
    "/tokenize": {
        **_CHAT, "prompt": "a", "model": "m", "add_special_tokens": True,
        "return_token_strs": True, "continue_final_message": False,
    },
    **dict.fromkeys(("/score", "/v1/score"), _SCORE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
    "/classify": {"input": ["a"], "model": "m", "user": "u"},
    "/inference/v1/generate": {
        "token_ids": [1, 2], "sampling_params": {
            **{name: value for name, value in _SAMPLING.items() if name not in _BESIDE},
            "detokenize": True},
        "request_id": "r", "model": "m", "stream": False, "cache_salt": "s", "priority": 0,
        "timeout": 9.0, "stream_options": _SAMPLING["stream_options"], "features": {},
        "kv_transfer_params": {},
    },
    "/v1/engine/lens": {
        **{name: _CHAT[name] for name in ("messages", "tools", "chat_template_kwargs")},
        "prompt": "Hi", "token_ids": [1, 2], "num_tokens": 1, "top": 5, "model": "m",
    },
    "/detokenize": {"tokens": [1, 2], "model": "m", "skip_special_tokens": True},
}  # fmt: skip
EXAMPLES["/v1/responses/input_tokens"] = EXAMPLES["/v1/responses"]


def fillings(size: int) -> dict[str, bytes]:
    """Return values in JSON of about `size` bytes, each costly to someone who reads it."""

    def many(part: bytes) -> bytes:
        return b"[" + b",".join([part] * (size // (len(part) + 1))) + b"]"

    keys = b",".join(b'"%x":1' % number for number in range(size // 10))
    lists = b",".join(b'"%x":[]' % number for number in range(size // 11))
    message = b'{"role":"user","content":"a"}'
    return {
        "lists": many(b"[]"),
        "objects": many(b"{}"),
        "keys": b"{" + keys + b"}",
        "keys of lists": b"{" + lists + b"}",
        "numbers": many(b"1"),
        "token ids": b"[" + many(b"12") + b"]",
        "floats": many(b"0.1"),
        "long floats": many(b"1.2345678901234567890123e-300"),
        "long numbers": many(b"9" * 4000),
        "digits": b"9" * size,
        "texts": many(b'"a"'),
        "a text": b'"' + b"a" * size + b'"',
        "words": b'"' + b"a " * (size // 2) + b'"',
        "escapes": b'"' + b"\\u00e9" * (size // 6) + b'"',
        "depth": b"[" * (size // 2) + b"]" * (size // 2),
        "objects in depth": b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
        "messages": many(message),
        "parts": many(b'{"type":"text","text":"a"}'),
        "functions": many(b'{"type":"function","function":{"name":"f"}}'),
        "a schema": b'{"type":"object","properties":{' + lists.replace(b"[]", b"{}") + b"}}",
        "an enum": b'{"enum":' + many(b'"a"') + b"}",
    }


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value within `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def body_of(example: dict[str, Any], path: tuple[str | int, ...], filling: bytes) -> bytes:
    """Return the example in JSON with the value at `path` replaced.

    Other top-level fields are left out, unless the endpoint may need them.
    """
    needed = {"messages", "prompt", "input", "tokens", "token_ids", "model", "max_tokens", "query",
              "documents", "text_1", "text_2", path[0]}  # fmt: skip
    made = copy.deepcopy({name: value for name, value in example.items() if name in needed})
    if {"messages", "prompt"} <= made.keys():
        made.pop("messages" if path[0] == "prompt" else "prompt")
    owner: Any = made
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = _SLOT
    return json.dumps(made).encode().replace(json.dumps(_SLOT).encode(), filling)


def attack(target: Target, scale: float = 1.0) -> list[Figure]:
    """Return the slowest /health, and during which bodies it was slowest."""
    size = max_body_bytes(target)
    made = fillings(size - 20_000)
    cases = [
        (endpoint, path, name)
        for endpoint, example in EXAMPLES.items()
        for path in places(example)
        for name in made
    ]
    random.Random(1).shuffle(cases)
    end = time.monotonic() + _SECONDS * scale
    sent: list[tuple[float, str]] = []
    cpu = []
    begins: list[float] = []
    with target.watched(0.02, begins) as seconds:
        for endpoint, path, name in cases:
            if time.monotonic() > end:
                break
            body = body_of(EXAMPLES[endpoint], path, made[name])
            before = target.cpu_seconds()
            sent.append((time.monotonic(), f"{endpoint} {'.'.join(map(str, path))}: {name}"))
            status = post(target, endpoint, body)
            cpu.append((target.cpu_seconds() - before, f"{sent[-1][1]} ({status})"))
            target.health_seconds()
    # An answer belongs to the last body that was sent before it came.
    taken = []
    for begin, waited in zip(begins, seconds, strict=True):
        before_it = [case for at, case in sent if at <= begin + waited]
        taken.append((waited, before_it[-1] if before_it else "before any body"))
    worst = sorted(taken, reverse=True)[:_NUM_WORST]
    figures = [
        Figure("bodies sent", len(sent), f"of {len(cases)}"),
        Figure("bytes of each", size / 1e6, "MB"),
        Figure("longest /health", worst[0][0], "s", 1.0),
    ]
    figures += [Figure(f"/health, {case}", value, "s") for value, case in worst]
    figures += [
        Figure(f"CPU, {case}", value, "s") for value, case in sorted(cpu, reverse=True)[:_NUM_WORST]
    ]
    return figures


def max_body_bytes(target: Target) -> int:
    """Return the size that a body may have, which the server says when it refuses a larger one."""
    head = _head("/v1/completions", 10**15) + b"\r\n"
    found = re.search(rb"at most (\d+) bytes", target.ask(head))
    assert found is not None
    return int(found[1])


def post(target: Target, endpoint: str, body: bytes, timeout: float = 60.0) -> int:
    """Send a request; return the status of its answer."""
    found = target.ask(_head(endpoint, len(body)) + b"\r\n" + body, timeout)
    return int(found[9:12] or 0)


def _head(endpoint: str, length: int) -> bytes:
    return (
        f"POST {endpoint} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    ).encode()
