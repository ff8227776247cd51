"""Error responses: HTTP status, and JSON bodies in OpenAI's and Anthropic's formats."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engine.errors import (
    ContextLengthError,
    EngineError,
    RequestError,
    TemplateError,
    UnknownAdapterError,
    UnknownOptionError,
    about_item,
)
from engine.scheduler.admission import QueueFullError

__all__ = [
    "APIError",
    "ErrorObject",
    "ErrorResponse",
    "api_error",
    "error_body",
    "error_status",
    "failed_request",
    "in_json_words",
    "is_anthropic",
    "renamed_params",
]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {500: "api_error", 503: "overloaded_error"}
_ANTHROPIC_STATUS = {503: 529}
_ITEM = re.compile(r"([a-z_0-9]+)(\[\d+\]): ")  # see `about_item`
_NAMED = re.compile(rf"(?:{_ITEM.pattern})?(structured(?=:)|[a-z][a-z_0-9]*(?=\[|\.| must| needs))")
MAX_MESSAGE_CHARS = 2000
_PYTHON_WORD = re.compile(
    r"""(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*"|\b(?:None|True|False)\b"""
)  # or a quoted text, in which it stays
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}

_OF_CLIENTS = ("structured output: ", "conflicting options: ")  # beginnings of stop reasons


class ErrorObject(msgspec.Struct):
    """Error in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """Body of an error response."""

    error: ErrorObject


class APIError(Exception):
    """Exception that becomes an error response.

    Parameters
    ----------
    status : int
        HTTP status, 400 to 599.
    message : str
    param : str, optional
        Name of the invalid request field.
    code : str, optional
        Machine-readable reason; the default depends on the status.
    headers : mapping of str to str, optional
    anthropic : mapping, optional
        Fields of the error in Anthropic's format: another message, or details.

    Examples
    --------
    >>> error = APIError(429, "too many streams", headers={"Retry-After": "1"})
    >>> error.type, error.code
    ('rate_limit_error', 'rate_limit_exceeded')
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param
        self.code = _CODES.get(status) if code is None else code
        self.headers = dict(headers or {})
        self.anthropic = dict(anthropic or {})

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        return _TYPES.get(self.status, "invalid_request_error")


def is_anthropic(path: str) -> bool:
    """Whether requests to this path are in Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_status(error: APIError, path: str) -> int:
    """Return the HTTP status of an error: Anthropic's for "try again later" is 529."""
    return _ANTHROPIC_STATUS.get(error.status, error.status) if is_anthropic(path) else error.status


def failed_request(why: object, item: str = "") -> APIError:
    """Return the error of a request that the engine could not finish.

    A grammar that hits a limit while its text is written is the client's (400), and so are options
    that together forbid every token. `item` begins the message: "prompt[3]: ", one of several.

    Examples
    --------
    >>> failed_request("structured output: Current row has 20 items; max is 10").status
    400
    """
    is_clients = isinstance(why, str) and why.startswith(_OF_CLIENTS)
    return APIError(400 if is_clients else 500, f"{item}the request failed: {why}")


def error_body(error: APIError, path: str = "", request_id: str | None = None) -> bytes:
    """Return the JSON body of an error; paths under ``/v1/messages`` use Anthropic's format.

    Examples
    --------
    >>> error_body(APIError(400, "no", param="n"))
    b'{"error":{"message":"no","type":"invalid_request_error","param":"n","code":null}}'
    >>> error_body(APIError(503, "no"), "/v1/messages")
    b'{"type":"error","error":{"type":"overloaded_error","message":"no"},"request_id":null}'
    """
    body: Any
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(error.status, error.type)
        inner = {"type": kind, "message": error.message, **error.anthropic}
        body = {"type": "error", "error": inner, "request_id": request_id}
    else:
        body = ErrorResponse(ErrorObject(error.message, error.type, error.param, error.code))
    return msgspec.json.encode(body)


def api_error(error: BaseException) -> APIError:
    """Convert an exception to an error response.

    A rejected request is the client's fault (400), a full queue means "try again later" (429), and
    a stopped engine means "unavailable" (503). Anything else is a bug (500), and its message is not
    sent.

    Examples
    --------
    >>> api_error(RequestError("top_p must be a number in (0.0, 1.0]; got 2")).param
    'top_p'
    >>> api_error(RequestError("seed must be a whole number, or None; got 'None'")).message
    "seed must be a whole number, or null; got 'None'"
    >>> api_error(KeyError("secret")).message
    'internal error (KeyError)'
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), headers={"Retry-After": "1"})
    if isinstance(error, ContextLengthError):
        return _too_long(error)
    if isinstance(error, UnknownAdapterError):  # it was removed after `check_model`
        message = f"the model does not exist: {error}"
        return APIError(404, message, param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return _refused(in_json_words(str(error)))
    if isinstance(error, TemplateError | UnknownOptionError):
        return _refused(str(error))
    if isinstance(error, EngineError):
        return APIError(503, str(error), headers={"Retry-After": "10"})
    return APIError(500, f"internal error ({type(error).__name__})")


def in_json_words(message: str) -> str:
    """Return a message about values of Python with JSON's words for None, True and False.

    Examples
    --------
    >>> in_json_words("store must be True, or None; got {'a': False, 'b': 'None'}")
    "store must be true, or null; got {'a': false, 'b': 'None'}"
    """
    message = message[:MAX_MESSAGE_CHARS]
    return _PYTHON_WORD.sub(lambda found: _JSON_WORDS.get(found[0], found[0]), message)


def _refused(message: str) -> APIError:
    named = _NAMED.match(message)
    return APIError(400, message, param=named[3] if named else None)


@contextlib.contextmanager
def renamed_params(fields: Mapping[str, str]) -> Iterator[None]:
    """Within the context, errors name the request's own field instead of the one it became.

    A message that begins with the name is changed too, but for "messages": their places differ.
    So is the name of one of several requests before it: see `about_item`.

    Parameters
    ----------
    fields : mapping of str to str
        `param` as raised -> field of the request. Also "param: word" -> field, for messages that
        begin with these.

    Examples
    --------
    >>> with renamed_params({"stop": "stop_sequences"}):
    ...     raise APIError(400, "stop[0] must be shorter; got ''", param="stop")
    Traceback (most recent call last):
    ...
    engine.server.protocol.errors.APIError: stop_sequences[0] must be shorter; got ''
    """
    try:
        yield
    except (APIError, RequestError, TemplateError) as error:
        found = api_error(error)
        message = found.message
        if given := _ITEM.match(message):
            message = message[given.end() :]
        name = found.param
        if name is not None and name in fields:
            found.param = fields[name]
            begins = [field for field in fields if field.startswith(f"{name}: ")]
            begin = "|".join(map(re.escape, (*begins, name)))
            begun = re.match(rf"(?:{begin})(?!\w)", message)
            if begun is not None and name != "messages":
                message = found.param + message[begun.end() :]
        if given:
            message = about_item(fields.get(given[1], given[1]) + given[2], message)
        found.message = message
        found.args = (message,)
        raise found from error


def _too_long(error: ContextLengthError) -> APIError:
    """Convert to the errors that clients of either protocol recognise by code or words."""
    numbers = f"{error.num_tokens} tokens > {error.most} maximum"
    detail = str(error) if error.num_tokens is None else numbers
    return APIError(
        400,
        str(error),
        param=error.name,
        code="context_length_exceeded",
        anthropic={"message": f"prompt is too long: {detail}"},
    )
