"""Access log: one line per request, as text or JSON; never prompts or keys."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from starlette.datastructures import Headers

__all__ = ["configure_logging", "log_request", "request_id_of"]

_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

# Loggers of the server's process, and the lowest level of their lines. The libraries' own lines
# of lower levels tell what every start and every end consists of.
_LOGGERS = {
    "engine.server": logging.DEBUG,
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
    "py.warnings": logging.WARNING,
}

_access = logging.getLogger("engine.server.access")


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
) -> None:
    """Log one request; `key` is a prefix of the key's hash; the path is truncated and escaped."""
    if not _access.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": request_id,
        "method": method[:16],
        "path": path[:200].encode("unicode_escape").decode("ascii"),
        "status": status,
        "ms": round(seconds * 1e3, 1),
        "bytes": num_bytes,
    }
    if key is not None:
        fields["key"] = key
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    _access.info(text, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        found: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        found |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def configure_logging(level: str, *, json_logs: bool, access_log: bool) -> None:
    """Configure the server's loggers to write to stderr.

    Parameters
    ----------
    level : str
        "debug", "info", "warning" or "error".
    json_logs : bool
        Write each record as one line of JSON.
    access_log : bool
        Whether to log requests.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if json_logs else text)
    for name, lowest in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(max(logging.getLevelName(level.upper()), lowest))
    _access.disabled = not access_log
