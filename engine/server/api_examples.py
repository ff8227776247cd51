"""Example bodies of requests, by path: in /openapi.json, and as curl commands on the page /docs."""

from __future__ import annotations

from typing import Any

__all__ = ["example_of"]

_CONVERSATION = [{"role": "user", "content": "Name the three primary colors."}]
_RERANK = {"query": "What do cats eat?", "documents": ["Rates rose.", "Cats eat mice."], "top_n": 1}
_SCORE = {"text_1": "What do cats eat?", "text_2": ["Rates rose.", "Cats eat mice."]}

_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _CONVERSATION, "max_tokens": 64},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "/v1/responses": {"input": "Name the three primary colors.", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": "Name the three primary colors."},
    "/v1/messages": {"model": "", "messages": _CONVERSATION, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "", "messages": _CONVERSATION},
    "/inference/v1/generate": {
        "token_ids": [504, 3575, 282, 4649, 314],
        "sampling_params": {"max_tokens": 16, "temperature": 0},
    },
    "/v1/embeddings": {"input": ["Cats eat mice.", "Rates rose."]},
    "/classify": {"input": ["Cats eat mice.", "Rates rose."]},
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [504, 3575]},
    "/v1/engine/lens": {"prompt": "The capital of France is Paris", "top": 3},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/update_weights_from_disk": {"model_path": "step-200"},
}


def example_of(path: str, model: str) -> dict[str, Any] | None:
    """Return the example body of the endpoint at `path`; None without one.

    Examples
    --------
    >>> example_of("/v1/messages/count_tokens", "smollm2")["model"]
    'smollm2'
    """
    found = _EXAMPLES.get(path)
    return found if found is None or "model" not in found else {**found, "model": model}
