"""Limits on request fields, set by the server's options."""

from __future__ import annotations

from engine.async_engine import EngineClient
from engine.errors import ContextLengthError
from engine.server.protocol.common import SamplingFields
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig

__all__ = ["check_fields", "check_length", "check_num_tokens"]


def check_fields(body: SamplingFields, config: ServerConfig) -> None:
    """Check a request body against the server's limits.

    Raises
    ------
    APIError
        If a field exceeds its limit.
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


def check_length(text: str, name: str, client: EngineClient) -> None:
    """Reject a text that cannot fit into the context, before spending time on tokenizing it.

    Parameters
    ----------
    text : str
    name : str
        Request field that holds the text.
    client : EngineClient
        Client with a tokenizer.

    Raises
    ------
    ContextLengthError
        If the text is longer than `max_model_len` times the longest token's length.
    """
    max_model_len = client.model_info.max_model_len
    longest = client.tokenizer.max_token_chars
    if len(text) > max_model_len * longest:
        least = -(-len(text) // longest)
        raise ContextLengthError.of(name, least, max_model_len, is_estimate=True)


def check_num_tokens(
    num_tokens: int, name: str, client: EngineClient, *, num_reserved: int = 1
) -> None:
    """Reject a prompt that leaves fewer than `num_reserved` tokens of the context.

    Raises
    ------
    ContextLengthError
        It names `name`, the request field that holds the prompt.
    """
    max_model_len = client.model_info.max_model_len
    if num_tokens > max_model_len - num_reserved:
        raise ContextLengthError.of(name, num_tokens, max_model_len, num_reserved=num_reserved)
