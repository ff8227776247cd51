"""Limits on request fields, set by the server's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from engine.async_engine import EngineClient
from engine.checks import token_ids_of
from engine.errors import ContextLengthError, RequestError
from engine.sampling_params import SamplingParams
from engine.server.protocol.common import SamplingFields, SamplingOptions
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig
from engine.text.detokenizer import known_bytes

__all__ = [
    "check_answer",
    "check_counts",
    "check_fields",
    "check_length",
    "check_num_ids",
    "check_num_tokens",
    "check_text_of",
    "limited_timeout",
    "text_of_ids",
]

_ID_BYTES = 8  # longest token id in JSON, with its comma

WHOLE_VOCABULARY = -1
"""Value of `logprobs` and `prompt_logprobs`, and of their limit."""


def check_fields(body: SamplingFields, config: ServerConfig) -> None:
    """Check a request body against the server's limits, which also bound its timeout.

    Raises
    ------
    APIError
        If a field exceeds its limit.
    """
    check_counts(body, config)
    body.timeout = limited_timeout(body.timeout, config)


def limited_timeout(given: float | None, config: ServerConfig) -> float | None:
    """Return the timeout of a request, seconds: the smaller of its own and the server's."""
    if config.request_timeout is None:
        return given
    return config.request_timeout if given is None else min(given, config.request_timeout)


def check_counts(
    body: SamplingOptions, config: ServerConfig, *, wholes: Sequence[str] = ("prompt_logprobs",)
) -> None:
    """Check the numbers of answers, log-probabilities and tools against the server's limits.

    `wholes` names the fields that may be -1, the whole vocabulary.

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
        if type(value) is not int or limit == WHOLE_VOCABULARY:
            continue
        is_whole = value == WHOLE_VOCABULARY and name in wholes
        if value > limit or is_whole:
            what = "; -1, the whole vocabulary, needs --max-logprobs -1" if is_whole else ""
            raise APIError(400, f"{name} must be at most {limit}; got {value}{what}", param=name)
    num_tools = len(getattr(body, "tools", None) or ())
    if num_tools > config.max_tools:
        message = f"tools must have at most {config.max_tools} entries; got {num_tools}"
        raise APIError(400, message, param="tools")


def check_answer(
    params: SamplingParams,
    num_prompt_tokens: int,
    client: EngineClient,
    config: ServerConfig,
    *,
    num_prompts: int = 1,
    num_copies: int = 1,
) -> SamplingParams:
    """Bound the log-probabilities of an answer before it is computed.

    Parameters
    ----------
    params : SamplingParams
    num_prompt_tokens : int
        Tokens of all prompts.
    client : EngineClient
    config : ServerConfig
        `max_answer_logprobs` is the limit.
    num_prompts : int
    num_copies : int
        How often the answer has the log-probabilities of a prompt.

    Returns
    -------
    SamplingParams
        If `params` leaves `max_tokens` open, it becomes as many as the limit allows.

    Raises
    ------
    APIError
        If the answer would exceed the limit.
    """
    vocab_size = client.model_info.vocab_size
    limit = config.max_answer_logprobs
    per_prompt = num_copies * _num_entries(params.prompt_logprobs, vocab_size)
    per_token = num_prompts * params.num_continuations * _num_entries(params.logprobs, vocab_size)
    left = limit - per_prompt * num_prompt_tokens
    longest = client.model_info.max_model_len
    num_tokens = min(params.max_tokens or 1, longest)
    if left < per_token * num_tokens:
        raise APIError(
            400,
            f"an answer must have at most {limit} log-probabilities (max_answer_logprobs); got "
            f"{per_prompt} for each of {num_prompt_tokens} prompt tokens, and {per_token} for each "
            f"of {num_tokens} generated tokens",
            param="prompt_logprobs" if per_prompt else "logprobs",
        )
    if params.max_tokens is None and left < per_token * longest:
        return dataclasses.replace(params, max_tokens=left // per_token)
    return params


def _num_entries(count: int | None, vocab_size: int) -> int:
    """Return the entries at a position: the most probable tokens, and the actual one."""
    if count is None:
        return 0
    return vocab_size if count == WHOLE_VOCABULARY else count + 1


def check_text_of(
    prompts: Iterable[str | Sequence[int]],
    name: str,
    tokenizer: Any,
    config: ServerConfig,
    *,
    num_copies: int = 1,
) -> None:
    """Reject a request whose answer would repeat a text larger than `max_body_bytes`.

    Parameters
    ----------
    prompts : iterable of str or of sequences of int
        Texts, and token ids that `tokenizer` decodes.
    name : str
        The request field.
    tokenizer : Tokenizer or None
    config : ServerConfig
    num_copies : int
        How often the answer has them.

    Raises
    ------
    APIError
        If the text is too large; counting ends there.
    """
    limit = config.max_body_bytes
    left = limit // num_copies
    for prompt in prompts:
        if isinstance(prompt, str):
            sizes: Iterable[int] = [len(prompt)]
        elif tokenizer is not None:
            sizes = (len(known_bytes(tokenizer, i) or b"") for i in prompt)
        else:
            continue
        for size in sizes:
            left -= size
            if left < 0:
                times = f", {num_copies} times" if num_copies > 1 else ""
                message = f"{name} must have a text of at most {limit} bytes{times}"
                raise APIError(400, f"{message} (max_body_bytes); got more", param=name)


def text_of_ids(
    token_ids: list[int], name: str, client: EngineClient, *, skip_special_tokens: bool = False
) -> str:
    """Return the text of token ids that a request has in its field `name`.

    Raises
    ------
    RequestError
        If an id is outside the vocabulary, or the tokenizer raises.
    """
    vocab_size = client.model_info.vocab_size
    token_ids_of(name, token_ids, vocab_size, f"a token id in [0, {vocab_size})")
    try:
        text: str = client.tokenizer.decode(token_ids, skip_special_tokens)
    except Exception as error:
        got = f"{type(error).__name__} of the tokenizer: {error}"
        raise RequestError(f"{name} must be tokens that have a text; got {got}") from error
    return text


def check_num_ids(
    prompts: Iterable[Sequence[int]], config: ServerConfig, *, num_copies: int
) -> None:
    """Reject a request whose answer would repeat more token ids than `max_body_bytes` can hold.

    Parameters
    ----------
    prompts : iterable of sequences of int
    config : ServerConfig
    num_copies : int
        How often the answer has them.

    Raises
    ------
    APIError
        If there are too many.
    """
    most = config.max_body_bytes // _ID_BYTES
    count = num_copies * sum(map(len, prompts))
    if count > most:
        raise APIError(
            400,
            f"prompt must have at most {most} token ids in an answer with return_token_ids "
            f"(max_body_bytes); got {count} in {num_copies} copies",
            param="prompt",
        )


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
