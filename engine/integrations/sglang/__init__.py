"""SGLang on the engine's attention: `--attention-backend engine`, by SGLang's plugin entry point.

SGLang calls `register` in each of its processes; the backend is imported where a model runner
builds it. Written against sglang 0.5.23.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "engine"
"""For `--attention-backend`, `--prefill-attention-backend` and `--decode-attention-backend`."""


def register() -> None:
    """Make the backend known under `NAME`. May run several times in a process."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_build)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _build(runner: Any) -> Any:
    """Return the attention backend of a ModelRunner."""
    # imports the kernels
    from engine.integrations.sglang.attention import EngineAttentionBackend

    return EngineAttentionBackend(runner)
