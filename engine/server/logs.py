"""Log lines of the server's processes on standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["ACCESS", "JsonFormatter", "configure_logging", "log_fields"]

ACCESS = "engine.server.access"
"""Name of the access log's logger."""

# Logger of the server's process -> lowest level that it writes. Below it the libraries log every
# step of a start and an end.
_LOGGERS = {
    "engine.server": logging.DEBUG,
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
    "py.warnings": logging.WARNING,
}


def log_fields(logger: logging.Logger, text: str, fields: Mapping[str, Any]) -> None:
    """Log a line at level "info": `text`, or as JSON `fields` in place of a message."""
    logger.info(text, extra={"fields": fields})


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
    logging.getLogger(ACCESS).disabled = not access_log
