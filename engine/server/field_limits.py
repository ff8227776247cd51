"""Limits of a server on the fields of a request, besides those of `SamplingParams`."""

from __future__ import annotations

from engine.server.protocol.common import SamplingFields
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig

__all__ = ["check_fields"]


def check_fields(body: SamplingFields, config: ServerConfig) -> None:
    """Check a body against the limits of the server.

    Raises
    ------
    APIError
        If a number is larger than the server allows.
    """
    allowed = {
        "n": config.max_n,
        "best_of": config.max_n,
        "logprobs": config.max_logprobs,
        "top_logprobs": config.max_logprobs,
        "prompt_logprobs": config.max_logprobs,
    }
    for name, limit in allowed.items():
        value = getattr(body, name, None)
        if type(value) is int and value > limit:
            raise APIError(400, f"{name} must be at most {limit}; got {value}", param=name)
    num_tools = len(getattr(body, "tools", None) or ())
    if num_tools > config.max_tools:
        message = f"tools must have at most {config.max_tools} entries; got {num_tools}"
        raise APIError(400, message, param="tools")
    if config.request_timeout is not None:
        given = config.request_timeout if body.timeout is None else body.timeout
        body.timeout = min(given, config.request_timeout)
