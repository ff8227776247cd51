"""Access log: one line per request; never prompts or keys."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from starlette.datastructures import Headers

from engine.core.token_meter import TokenMeter
from engine.server.logs import ACCESS, log_fields

__all__ = ["log_request", "request_id_of"]

_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

_access = logging.getLogger(ACCESS)


def request_id_of(headers: Headers) -> str:
    """Return the request's X-Request-Id if it is safe to log, else a new id.

    Examples
    --------
    >>> request_id_of(Headers({"x-request-id": "trace-7"}))
    'trace-7'
    >>> len(request_id_of(Headers({"x-request-id": "a b"})))
    32
    """
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(16)


def log_request(
    request_id: str,
    method: str,
    path: str,
    status: int,
    seconds: float,
    num_bytes: int,
    key: str | None,
    meter: TokenMeter | None = None,
    ttft: float | None = None,
) -> None:
    """Log one request.

    Parameters
    ----------
    request_id, method, path : str
        The path is truncated and escaped.
    status : int
    seconds : float
        From the request's head to the end of the answer.
    num_bytes : int
        Size of the answer's body.
    key : str or None
        Prefix of the key's hash.
    meter : TokenMeter, optional
        Logged if it counts any tokens.
    ttft : float, optional
        Seconds to the first token.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": method[:16],
        "path": path[:200].encode("unicode_escape").decode("ascii"),
        "status": status,
        "ms": round(seconds * 1e3, 1),
        "bytes": num_bytes,
    }
    if meter is not None and meter.num_prompt_tokens:
        fields["prompt_tokens"] = meter.num_prompt_tokens
        fields["output_tokens"] = meter.num_output_tokens
    if ttft is not None:
        fields["ttft_ms"] = round(ttft * 1e3, 1)
    if key is not None:
        fields["key"] = key
    log_fields(_access, " ".join(f"{name}={value}" for name, value in fields.items()), fields)
