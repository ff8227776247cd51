"""Options of the server itself; see `EngineConfig` and `load` for the engine's.

Each field is a flag of `engine serve` (`--api-server-count`) and a key in the `--config` file.
Names match vLLM's if the meaning is the same.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError, RequestError, did_you_mean, unknown_keyword
from engine.sampling_params import NumberRange

__all__ = ["RANGES", "ServerConfig", "key_hash"]

LOG_LEVELS = ("debug", "info", "warning", "error")

_NUM_STORED = 1024  # default of max_stored_responses

RANGES = {
    "port": NumberRange(0, 65535, integer=True),
    "api_server_count": NumberRange(1, 64, integer=True),
    "data_parallel_size": NumberRange(1, 1024, integer=True),
    "nodes": NumberRange(0, 4096, integer=True),
    "shutdown_timeout": NumberRange(0, 86400),
    "timeout_keep_alive": NumberRange(0, 86400, low_open=True),
    "hang_timeout": NumberRange(1.0, 1e9, optional=True),
    "request_timeout": NumberRange(0, 1e9, optional=True, low_open=True),
    "body_timeout": NumberRange(0, 86400, low_open=True),
    "send_timeout": NumberRange(0, 86400, low_open=True),
    "sse_keep_alive": NumberRange(0, 86400, low_open=True),
    "log_stats_interval": NumberRange(0, 86400),
    "max_body_bytes": NumberRange(1, 2**40, integer=True),
    "max_header_bytes": NumberRange(256, 2**24, integer=True),
    "max_connections": NumberRange(1, 2**20, integer=True),
    "max_concurrent_requests": NumberRange(1, 2**20, integer=True),
    "max_requests_per_key": NumberRange(1, 2**20, integer=True, optional=True),
    "max_prompts": NumberRange(1, 2**20, integer=True),
    "max_n": NumberRange(1, 16, integer=True),
    "max_logprobs": NumberRange(-1, 20, integer=True),
    "max_answer_logprobs": NumberRange(1, 2**30, integer=True),
    "max_embedding_values": NumberRange(1, 2**30, integer=True),
    "max_tools": NumberRange(0, 2**16, integer=True),
    "max_stored_responses": NumberRange(0, 2**20, integer=True, optional=True),
    "max_stored_bytes": NumberRange(1, 2**40, integer=True),
    "max_watchers": NumberRange(0, 2**16, integer=True),
}
"""Valid range of each numeric option."""

_PATTERNS = {
    "allowed_hosts": (
        re.compile(r"\*|\*\.[\w.-]+|[\w.-]+(:\d+)?|[0-9A-Fa-f:.]+|\[[0-9A-Fa-f:.]+\](:\d+)?"),
        "hosts, such as example.com, example.com:8000 or *.example.com, or *",
    ),
    "allowed_origins": (
        re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#*]+"),
        "origins as browsers send them, such as https://example.com, or *",
    ),
}
"""Accepted forms; a value of another form never matches a header."""

_FLAGS = (
    *("allow_credentials", "enable_auto_tool_choice", "enable_page", "enable_metrics"),
    *("enable_tokenizer_info_endpoint", "ignore_unknown_fields", "share_prefixes_between_keys"),
    *("access_log", "json_logs", "log_prompts", "allow_special_in_content"),
)
_TUPLES = (
    *("served_model_name", "api_key_hashes", "admin_key_hashes", "allowed_hosts"),
    *("allowed_origins", "allowed_methods", "allowed_headers"),
)
_TEXTS = (
    *("host", "api_key_file", "root_path", "chat_template", "tool_call_parser"),
    *("reasoning_parser", "reranker", "log_level", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
    *("lora_root", "weights_root"),
)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, access and limits of the server; frozen, plain values only.

    The "help" in each field's metadata is what `engine serve --help` prints. `api_key_hashes` and
    `admin_key_hashes` have no flags: they are computed from `--api-key` and `--admin-api-key`.

    Raises
    ------
    ConfigError
        If a value is out of range or of the wrong type.

    Examples
    --------
    >>> ServerConfig(port=8001).url
    'http://127.0.0.1:8001'
    >>> ServerConfig(port=70000)
    Traceback (most recent call last):
    ...
    engine.errors.ConfigError: port must be a whole number in [0, 65535]; got 70000
    """

    host: str = _option(
        "127.0.0.1",
        "address or host name to listen on; 0.0.0.0: all networks",
    )
    port: int = _option(8000, "port to listen on; 0: any free port")
    root_path: str = _option("", "path under which a proxy exposes this server (default: none)")
    api_server_count: int = _option(1, "processes for HTTP, tokenization and detokenization")
    data_parallel_size: int = _option(1, "engine replicas, each with its own process and GPUs")
    nodes: int = _option(
        0, "serve on a Ray cluster once it has this many machines; 0: on this machine only"
    )
    shutdown_timeout: float = _option(30.0, "seconds for running requests to finish after SIGTERM")
    hang_timeout: float | None = _option(
        None,
        "maximum seconds per step; a slower replica is killed, and the server ends with the last "
        "(default: no limit)",
    )

    served_model_name: tuple[str, ...] = _option(
        (), "model names in the API; repeatable (default: the model's)"
    )
    chat_template: str | None = _option(None, "file with a chat template (default: the model's)")
    allow_special_in_content: bool = _option(
        False, "read control tokens that messages, tools and documents spell; else they are text"
    )
    enable_auto_tool_choice: bool = _option(True, "let the model call tools on its own")
    tool_call_parser: str | None = _option(None, "format of tool calls (default: by the template)")
    reasoning_parser: str | None = _option(None, "format of reasoning (default: by the template)")

    reranker: str | None = _option(
        None,
        "how /score and /rerank judge a text: qwen3, cosine of embeddings, or pair for a model "
        "with a classification head (default: by the model)",
    )

    api_key_hashes: tuple[str, ...] = ()
    admin_key_hashes: tuple[str, ...] = ()
    api_key_file: str | None = _option(
        None, "file with one key per line; reloaded when it changes (default: none)"
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "host under which the server may be addressed (Host header), or * for all; repeatable "
        "(default: without an API key, names that no page of the internet can have)",
    )
    share_prefixes_between_keys: bool = _option(
        False, "let API keys share cached prefixes, which tells each what others have sent"
    )
    lora_root: str | None = _option(
        None, "folder of the LoRA adapters that an admin may load while serving (default: none)"
    )
    weights_root: str | None = _option(
        None, "folder of the weights that an admin may load while serving (default: none)"
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "CORS: allowed origins; repeatable (default: none)"
    )
    allowed_methods: tuple[str, ...] = _option(("GET", "POST"), "CORS: allowed methods; repeatable")
    allowed_headers: tuple[str, ...] = _option(("*",), "CORS: allowed headers; repeatable")
    allow_credentials: bool = _option(False, "CORS: allow cookies")
    ssl_certfile: str | None = _option(None, "TLS certificate, in PEM (default: no TLS)")
    ssl_keyfile: str | None = _option(None, "TLS key, in PEM (default: no TLS)")
    ssl_ca_certs: str | None = _option(
        None, "TLS: clients must present a certificate of these CAs (default: they need none)"
    )

    max_body_bytes: int = _option(
        8 << 20, "maximum bytes of a request body, and of the text that an answer repeats"
    )
    max_header_bytes: int = _option(64 << 10, "maximum bytes of request headers")
    max_connections: int = _option(8192, "maximum connections per API process")
    max_concurrent_requests: int = _option(
        4096, "maximum unfinished requests per API process; more get 429"
    )
    max_requests_per_key: int | None = _option(
        None,
        "maximum unfinished requests per API key and API process (default: a fair share if "
        "the process is busy)",
    )
    max_prompts: int = _option(1024, "maximum prompts per request")
    max_n: int = _option(16, "maximum n and best_of per request")
    max_logprobs: int = _option(
        20, "maximum logprobs and prompt_logprobs per request; -1: the whole vocabulary is allowed"
    )
    max_answer_logprobs: int = _option(
        1 << 19, "maximum log-probabilities per answer, counted before it is computed"
    )
    max_embedding_values: int = _option(
        1 << 22, "maximum values of the embeddings of a request: inputs times dimensions"
    )
    max_tools: int = _option(128, "maximum tools per request")
    max_stored_responses: int | None = _option(
        None,
        "maximum stored responses per API key, 0: none are stored (default: 1024, or 0 with "
        "several API processes)",
    )
    max_stored_bytes: int = _option(256 << 20, "maximum bytes of all stored responses")
    max_watchers: int = _option(16, "maximum viewers of the watch page, per API process")
    ignore_unknown_fields: bool = _option(
        False, "drop the fields of a request that the server does not know, with a warning"
    )
    request_timeout: float | None = _option(
        None, "seconds after which a request is aborted (default: no limit)"
    )
    body_timeout: float = _option(30.0, "maximum seconds for a request body to arrive")
    send_timeout: float = _option(60.0, "seconds without reading after which a client is dropped")
    timeout_keep_alive: float = _option(30.0, "seconds after which an idle connection is closed")
    sse_keep_alive: float = _option(15.0, "seconds between comments on an idle stream")

    enable_page: bool = _option(True, "serve the web pages at / and /docs")
    enable_metrics: bool = _option(True, "serve Prometheus metrics at /metrics")
    enable_tokenizer_info_endpoint: bool = _option(
        False, "serve the special tokens and the chat template at /tokenizer_info"
    )
    access_log: bool = _option(True, "log each request on stderr")
    log_stats_interval: float = _option(
        10.0, "seconds between log lines about the load while the engine is busy; 0: none"
    )
    json_logs: bool = _option(False, "write logs as JSON")
    log_prompts: bool = _option(False, "log prompts")
    log_level: str = _option("info", "debug, info, warning or error")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Build from TOML or JSON values; lists become tuples.

        Raises
        ------
        UnknownOptionError
            If an option is not a field.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown_keyword("ServerConfig", name, known)
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
        }
        return cls(**given)

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            try:
                object.__setattr__(self, name, allowed.check(name, getattr(self, name)))
            except RequestError as error:
                raise ConfigError(str(error)) from None
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False; got {shown(getattr(self, name))}")
        for name in _TUPLES:
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
                raise ConfigError(f"{name} must be texts that are not empty; got {shown(value)}")
        for name, (pattern, wanted) in _PATTERNS.items():
            for value in getattr(self, name):
                if not pattern.fullmatch(value):
                    raise ConfigError(f"{name} must be {wanted}; got {shown(value)}")
        for name in _TEXTS:
            value = getattr(self, name)
            is_optional = type(self).__dict__[name] is None
            if not isinstance(value, str) and not (value is None and is_optional):
                raise ConfigError(f"{name} must be a text; got {shown(value)}")
        if self.log_level not in LOG_LEVELS:
            wanted = ", ".join(LOG_LEVELS)
            raise ConfigError(f"log_level must be one of {wanted}; got {shown(self.log_level)}")
        self._check_names()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile must be given together; got one")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile and ssl_keyfile; got none")
        if self.max_stored_responses and (self.api_server_count > 1 or self.nodes):
            raise ConfigError(
                "max_stored_responses must be 0 with several API processes (api_server_count) or "
                "machines (nodes), since a response is stored in one process; "
                f"got {self.max_stored_responses}"
            )
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("allow_credentials needs origins by name; got allowed_origins *")

    def _check_names(self) -> None:
        """Raise `ConfigError` for an unknown parser or reranker, before a model is loaded."""
        if self.tool_call_parser is self.reasoning_parser is self.reranker is None:
            return
        # Imported lazily: most servers name none of them.
        from engine.server import reasoning, tool_parsers
        from engine.tasks import rerankers

        known = {
            "tool_call_parser": (*tool_parsers.NAMES, "auto"),
            "reasoning_parser": (*reasoning.NAMES, "auto"),
            "reranker": rerankers.NAMES,
        }
        for option, names in known.items():
            name = getattr(self, option)
            if name is not None and name not in names:
                hint = did_you_mean(name, names)
                raise ConfigError(
                    f"{option} must be one of {', '.join(names)}; got {shown(name)}{hint}"
                )

    @property
    def url(self) -> str:
        """URL of the server, derived from these options."""
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://{_bracketed(self.host)}:{self.port}"

    @property
    def num_stored_responses(self) -> int:
        """Maximum stored responses per key: only one API process can have any."""
        if self.max_stored_responses is not None:
            return self.max_stored_responses
        return _NUM_STORED if self.api_server_count == 1 and not self.nodes else 0

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry an API key."""
        return bool(self.api_key_hashes) or self.api_key_file is not None

    def options(self) -> dict[str, Any]:
        """Return all fields as plain values; the inverse of `from_options`."""
        return asdict(self)


def key_hash(key: str) -> str:
    """Return the SHA-256 hex digest of an API key; only hashes are kept in memory.

    Examples
    --------
    >>> key_hash("secret")[:16]
    '2bb80d537b1da3e3'
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _bracketed(host: str) -> str:
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_v6 = False
    return f"[{host}]" if is_v6 else host
