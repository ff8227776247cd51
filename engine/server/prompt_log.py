"""Prompt log; written only if `log_prompts` is set."""

from __future__ import annotations

import logging

__all__ = ["log_prompt"]

MAX_PROMPT_CHARS = 4000

_log = logging.getLogger("engine.server.prompts")


def log_prompt(request_id: str, prompt: object) -> None:
    """Log the start of a prompt (text or token ids)."""
    text = prompt if isinstance(prompt, str) else str(prompt)
    shown = text[:MAX_PROMPT_CHARS].encode("unicode_escape").decode("ascii")
    fields = {"request_id": request_id, "prompt": shown}
    _log.info("request_id=%s prompt=%s", request_id, shown, extra={"fields": fields})
