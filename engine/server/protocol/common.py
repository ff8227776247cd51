"""Shared parts of request bodies: decoding, and the fields that become `SamplingParams`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from engine.checks import shown
from engine.errors import RequestError, did_you_mean
from engine.model_files import excerpt
from engine.sampling_params import RequestOutputKind, SamplingDefaults, SamplingParams
from engine.server.protocol.annotations import (
    field_names,
    hints_at,
    invalid,
    structs_in,
    wrong_choice,
)
from engine.server.protocol.errors import APIError, in_json_words
from engine.server.protocol.unknown_fields import without_unknown
from engine.structured.spec import StructuredOutput

__all__ = [
    "NOT_GIVEN",
    "UNREAD",
    "Chunks",
    "SamplingFields",
    "SamplingOptions",
    "StreamOptions",
    "Usage",
    "check_stream_options",
    "decode_body",
    "is_given",
    "only_output",
    "own_names",
    "refuse_fields",
    "sampling_options",
    "sampling_params",
    "shown_field",
    "structured_options",
    "usage_options",
]

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
_AT = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)

NOT_GIVEN = msgspec.Raw(b"null")
"""Default of a field whose value is not read. It is of type `msgspec.Raw`: checked, not decoded."""

UNREAD = msgspec.field(default_factory=lambda: NOT_GIVEN)
"""The same as a default in a struct, which the OpenAPI document leaves out."""

_MAX_QUOTED = 100  # bytes of such a value in an error
_LONG = 20  # digits
_LONG_NUMBER = re.compile(rb"[0-9.]{%d}[0-9.]*" % _LONG)
_SEARCHED_AT_ONCE = 1 << 18  # bytes
_NOT_IN_NUMBERS = bytes(set(range(256)) - set(b"0123456789."))
_MAX_LONG_NUMBERS = 10_000  # 0.1 s of decoding
_MAX_PARTS = 300_000  # the same
_PART = re.compile(
    rb'"(?:[^"\\]+|\\.)*"?|[\[{]|(?P<number>[0-9.]{%d})[0-9.]*' % _LONG, re.DOTALL
)  # a text, the beginning of a list or an object, or a long number


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raise an `APIError` if a request has `stream_options` but is not streamed."""
    if options is not None and not stream:
        given = {name: value for name, value in msgspec.structs.asdict(options).items() if value}
        got = in_json_words(shown(given))
        message = f"stream_options must be null unless stream is true; got {got}"
        raise APIError(400, message, param="stream_options")


def usage_options(options: StreamOptions | None) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every frame carries it so far."""
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`json_schema` of a `response_format`."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: typing.Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; exactly one field must be given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool | None = None


class SamplingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request that are those of `SamplingParams`; null means the default."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_speculation: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None


class SamplingFields(SamplingOptions, kw_only=True, forbid_unknown_fields=True):
    """The fields that conversations and completions share; null means the default."""

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class PromptTokensDetails(msgspec.Struct):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | msgspec.UnsetType = msgspec.UNSET
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Build the usage from token counts."""
        return cls(prompt, prompt + completion, completion, PromptTokensDetails(cached))


_SAMPLING_NAMES = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "min_tokens", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output",
    "allowed_token_ids", "bad_words", "use_speculation", "typical_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
           "guided_grammar": "grammar"}  # fmt: skip
# Names of a structure in errors of the engine.
_KINDS = tuple(field.name for field in dataclasses.fields(StructuredOutput))
_STRUCTURED = ("structured", *_KINDS)


# ---- decoding


def decode_body(body: bytes, kind: type[T], what: str = "the body") -> T:
    """Decode a JSON request body, or `what` errors call it, into a struct of type `kind`.

    Unknown fields are dropped if they are null or `ignore_unknown_fields` is in effect.

    Raises
    ------
    APIError
        If the body is not UTF-8 JSON, or a field is unknown or of the wrong type. The message names
        the field, and for an unknown one suggests the closest known field.
    """
    _check_cost(body, what)
    try:
        with _no_garbage_collection():
            return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind, what) from None
    except RecursionError:
        raise APIError(400, f"{what} is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(400, f"{what} must be JSON in UTF-8: {error}", code="invalid_json") from None


def _check_cost(body: bytes, what: str) -> None:
    """Refuse what takes much longer to decode than its length suggests.

    Decoding cannot be interrupted, so its time has to be bounded. Exact counts take as long, though
    other threads can run meanwhile; they are taken only if a bound that is quickly computed is too
    large.
    """
    num_parts = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if num_parts <= _MAX_PARTS and not _may_have_long_numbers(body):
        return
    num_parts = num_long = 0
    for found in _PART.finditer(body):
        if found.lastgroup == "number":
            num_long += 1
        else:
            num_parts += 1
        if num_long > _MAX_LONG_NUMBERS:
            most = f"{_MAX_LONG_NUMBERS} numbers of {_LONG} digits or more"
            raise APIError(400, f"{what} must have at most {most}; got more")
        if num_parts > _MAX_PARTS:
            most = f"{_MAX_PARTS} texts, lists and objects in all"
            raise APIError(400, f"{what} must have at most {most}; got more")


def _may_have_long_numbers(body: bytes) -> bool:
    """Return whether there are more long numbers than allowed, including those in texts."""
    # A number that long has a byte in every `_LONG` bytes.
    if len(body[::_LONG].translate(None, _NOT_IN_NUMBERS)) <= _MAX_LONG_NUMBERS:
        return False
    count = 0
    for begin in range(0, len(body), _SEARCHED_AT_ONCE):  # other threads may run in between
        found = _LONG_NUMBER.finditer(body, begin, begin + _SEARCHED_AT_ONCE)
        count += sum(1 for _ in found)
    return count > _MAX_LONG_NUMBERS


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at millions of new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not _UNKNOWN.match(str(error)):
            raise
    known = without_unknown(msgspec.json.decode(body), kind)
    return msgspec.json.decode(_encode(known), type=kind)


def refuse_fields(body: msgspec.Struct, reasons: Mapping[str, str]) -> None:
    """Raise an `APIError` if `body` sets any of the fields in `reasons`.

    Parameters
    ----------
    body : Struct
    reasons : mapping of str to str
        Unsupported field -> advice on what to do instead.
    """
    for name, reason in reasons.items():
        value = getattr(body, name)
        if is_given(value):
            message = f"{name} is not supported, {reason}; got {shown_field(value)}"
            raise APIError(400, message, param=name)


def is_given(value: object) -> bool:
    """Return whether a field is neither absent nor null; it may be one that stays undecoded.

    Examples
    --------
    >>> is_given(NOT_GIVEN), is_given(msgspec.Raw(b"{}")), is_given(None)
    (False, True, False)
    """
    return value is not None and value != NOT_GIVEN


def shown_field(value: object) -> str:
    """Return `shown(value)`; of a field that stays undecoded, the beginning of its JSON."""
    if isinstance(value, msgspec.Raw):
        data = bytes(value)
        text = excerpt(data[:_MAX_QUOTED].decode("utf-8", "replace"))
        return f"{text}..." if len(data) > _MAX_QUOTED else text
    return shown(value)


def _invalid(message: str, kind: Any, what: str) -> APIError:
    unknown = _UNKNOWN.match(message)
    if unknown is None:
        at = _AT.match(message)
        param, text = (at[2], at[1]) if at else (None, message)
        if wanted := wrong_choice(text, kind, f".{param}"):
            return APIError(400, f"{param} {wanted}", param=param)
        if param is not None and param.startswith("["):  # in a field that is not read
            param = None
        where = param or what
        if param is None and (missing := _MISSING.match(text)):
            param = missing[1]
        return APIError(400, f"{where} {invalid(text)}", param=param)
    name = unknown[1][:80]
    path = unknown[2] or ""
    structs = [struct for hint in hints_at(kind, path) for struct in structs_in(hint)]
    known = sorted({field for struct in structs for field in field_names(struct)})
    hint = did_you_mean(name, known, f"known fields: {', '.join(known)}")
    where = f"{path.lstrip('.')} has" if path else f"{what} has"
    param = f"{path}.{name}".lstrip(".")
    return APIError(400, f"{where} an unknown field {name!r}{hint}", param=param)


# ---- sampling


def sampling_params(
    body: SamplingFields, defaults: SamplingDefaults, **overrides: Any
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Parameters
    ----------
    body : SamplingFields
    defaults : SamplingDefaults
        Values for fields that the request leaves out.
    **overrides
        Fields of `SamplingParams` that take precedence unless they are None.

    Raises
    ------
    RequestError
        If a value is out of range.
    """
    given = sampling_options(body)
    structured = structured_options(body)
    if structured is not None:
        given["structured"] = structured
    given |= {name: value for name, value in overrides.items() if value is not None}
    if body.stream and (given.get("best_of") or 0) > given.get("n", 1):
        message = f"best_of must be at most n ({given.get('n', 1)}) in a stream"
        raise APIError(400, f"{message}; got {given['best_of']}", param="best_of")
    check_stream_options(body.stream_options, body.stream)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**defaults.for_request(given), **given, "output_kind": kind})


def sampling_options(body: SamplingOptions) -> dict[str, Any]:
    """Return the given fields as keyword arguments of `SamplingParams`, without structured output.

    Raises
    ------
    RequestError
        If a key of `logit_bias` is not a token id.
    """
    given = {name: value for name in _SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    return given


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias must have token ids as keys; got {shown(key)}")
        found[int(key)] = value
    return found


def structured_options(body: SamplingFields) -> dict[str, Any] | None:
    """Return a request's structured-output options as keyword arguments; None for free text.

    Raises
    ------
    APIError
        If more than one field requests structured output.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, key in _GUIDED.items():
        if getattr(body, name) is not None:
            found[name] = {key: getattr(body, name)}
    if body.structured_outputs is not None:
        found["structured_outputs"] = only_output(body.structured_outputs)
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = _format_options(body.response_format)
    if len(found) > 1:
        names = " and ".join(found)
        message = f"only one structured output can be given; got {names}"
        raise APIError(400, message, param=list(found)[1])
    return next(iter(found.values()), None)


def own_names(body: SamplingFields) -> dict[str, str]:
    """Return the request's name of each field that errors of the engine name otherwise."""
    names: dict[str, str] = {}
    has_format = body.response_format is not None and body.response_format.type != "text"
    given = {
        **{name: getattr(body, name) is not None for name in (*_GUIDED, "structured_outputs")},
        "response_format": has_format,
        "tools": bool(getattr(body, "tools", None)),
    }
    if asked := next((name for name, is_given in given.items() if is_given), None):
        names = dict.fromkeys(_STRUCTURED, asked)
        # The kind of the grammar, which need not be one that the request has a name for.
        outputs = body.structured_outputs
        kinds = (kind for kind in _KINDS if getattr(outputs, kind, None) is None)
        names |= dict.fromkeys((f"structured: {kind}" for kind in kinds), asked)
    if getattr(body, "max_completion_tokens", None) is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def only_output(outputs: StructuredOutputs) -> dict[str, Any]:
    """Return the field of `structured_outputs` that is given; raise unless it is exactly one."""
    fields = msgspec.structs.asdict(outputs)
    given = {k: v for k, v in fields.items() if v is not None and v is not False}
    if len(given) != 1:
        raise APIError(
            400,
            f"structured_outputs must have exactly one field; got {sorted(given)}",
            param="structured_outputs",
        )
    return given


def _format_options(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    schema = given.json_schema.schema if given.json_schema else None
    if schema is None:
        raise APIError(
            400,
            "response_format.json_schema.schema must be a JSON schema; got nothing",
            param="response_format",
        )
    return {"json": schema if isinstance(schema, dict) else msgspec.json.encode(schema).decode()}


class Chunks:
    """Encodes the SSE frames of a streamed answer; fields common to all frames are encoded once.

    Parameters
    ----------
    request_id, model : str
    created : int
        Unix time, seconds.
    shows_usage : bool
        Whether every frame has a null `usage` field.
    """

    _object: ClassVar[str]
    _plain_end: ClassVar[bytes]  # the end of a text-only choice, encoded

    def __init__(self, request_id: str, model: str, created: int, *, shows_usage: bool) -> None:
        head = {"id": request_id, "object": self._object, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._set_tail(b'],"usage":null}' if shows_usage else b"]}")

    def show_usage(self, usage: Usage) -> None:
        """Write this usage into the frames from now on."""
        self._set_tail(b'],"usage":' + _encode(usage) + b"}")

    def _set_tail(self, tail: bytes) -> None:
        self._tail = tail + b"\n\n"
        self._plain_tail = self._plain_end + self._tail

    def choice(self, choice: Any) -> bytes:
        """Return the frame of an arbitrary choice, encoded by msgspec."""
        return self._head + _encode(choice) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """Return the usage frame, which has no choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"
