"""Answers with calls of tools: scripted by tests, and read over HTTP."""

from __future__ import annotations

import json

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def tools(kind):
    named = [{"name": name, "description": ""} for name in ("add", "sub")]
    if kind == "messages":
        return [tool | {"input_schema": SCHEMA} for tool in named]
    if kind == "responses":
        return [tool | {"type": "function", "parameters": SCHEMA} for tool in named]
    return [{"type": "function", "function": tool | {"parameters": SCHEMA}} for tool in named]


def events(answer):
    lines = answer.text.splitlines()
    data = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    return list(map(json.loads, data))


def say(server, text, reason="length", size=3):
    """Let the engine answer with this text, in pieces."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    server.client.pieces = pieces or [""]
    server.client.finish_reason = reason


def chat(http, stream=False, **fields):
    """Return (content, calls, finish reason) of each choice of a chat."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "stream": stream}
    answer = http.post("/v1/chat/completions", json=body | {"tools": tools("chat")} | fields)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [
            (
                choice["message"]["content"] or "",
                [
                    (call["function"]["name"], call["function"]["arguments"])
                    for call in choice["message"].get("tool_calls", ())
                ],
                choice["finish_reason"],
            )
            for choice in answer.json()["choices"]
        ]
    found = {}
    for choice in (choice for event in events(answer) for choice in event["choices"]):
        one = found.setdefault(choice["index"], {"content": "", "calls": []})
        one["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "name" in call["function"]:
                one["calls"].append([call["function"]["name"], ""])
            one["calls"][call["index"]][1] += call["function"]["arguments"]
        one["reason"] = choice["finish_reason"]
    return [
        (one["content"], [tuple(call) for call in one["calls"]], one["reason"])
        for _, one in sorted(found.items())
    ]
