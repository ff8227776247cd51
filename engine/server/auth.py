"""API keys: stored as hashes, compared in constant time, reloaded when their file changes."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

from engine.errors import ConfigError
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig

__all__ = ["KeyRing", "isolate", "read_keys"]

MAX_KEY_FILE_BYTES = 1 << 20
MAX_KEY_CHARS = 4096
_CHECK_SECONDS = 1.0
_SALT_CHARS = 32  # length of a key's part of a cache salt; fixed, so that none is another's prefix

_log = logging.getLogger("engine.server")


def read_keys(path: str) -> tuple[bytes, ...]:
    """Return the hashes of a file's keys: one key per line; empty lines and # comments are skipped.

    Raises
    ------
    ConfigError
        If the file cannot be read, is too large, or contains no key.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file cannot be read: {error}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"api_key_file must have at most {MAX_KEY_FILE_BYTES} bytes; got more")
    data = data.removeprefix(codecs.BOM_UTF8)  # Some editors write one.
    lines = [line.strip() for line in data.splitlines()]
    keys = tuple(_hash(line) for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise ConfigError("api_key_file must have a key; got none")
    return keys


class KeyRing:
    """API keys that the server accepts.

    Parameters
    ----------
    config : ServerConfig
    clock : callable, optional
        Returns seconds; the key file is checked for changes at most once per second.
    secret : bytes, optional
        Secret from which cache salts are derived; all API processes of a server have the same.

    Raises
    ------
    ConfigError
        If the key file cannot be used.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        self.is_open = not config.needs_key
        self._secret = secrets.token_bytes(16) if secret is None else secret
        # A file may get another key at any time; a single --api-key is one tenant.
        has_tenants = config.api_key_file is not None or len(set(config.api_key_hashes)) > 1
        self._isolates = has_tenants and not config.share_prefixes_between_keys
        self._fixed = tuple(bytes.fromhex(text) for text in config.api_key_hashes)
        self._admin = tuple(bytes.fromhex(text) for text in config.admin_key_hashes)
        self._path = config.api_key_file
        self._clock = clock
        self._checked_at = clock()
        self._stamp = self._file_stamp()
        self._from_file = () if self._path is None else read_keys(self._path)

    def check(self, headers: Headers) -> str | None:
        """Authenticate a request: return its key's hash, or None if the server requires no key.

        Every key is compared, even after a match, so that timing reveals nothing.

        Raises
        ------
        APIError
            401, if the key is missing or wrong.
        """
        if self.is_open:
            return None
        self._reload()
        return _checked(headers, self._fixed + self._from_file, "an API key")

    def check_admin(self, headers: Headers) -> str:
        """Authenticate a request to an administrative path; return its key's hash.

        Raises
        ------
        APIError
            401, if the key is missing or no `--admin-api-key`, whether or not it is an API key.
        """
        return _checked(headers, self._admin, "an admin API key")

    def cache_salt(self, key: str | None) -> str | None:
        """Return the part of a cache salt that keeps a key's prefixes apart from other keys'.

        None if prefixes are shared. `key` is the result of `check`.
        """
        if key is None or not self._isolates:
            return None
        return hmac.digest(self._secret, key.encode(), "sha256").hex()[:_SALT_CHARS]

    def _reload(self) -> None:
        """Reload the file if it has changed; if it is invalid, keep the current keys."""
        now = self._clock()
        if self._path is None or now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        stamp = self._file_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = read_keys(self._path)
        except ConfigError as error:
            _log.error("the keys stay as they are: %s", error)
        else:
            _log.info("read %d keys from the key file", len(self._from_file))

    def _file_stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def isolate(request: Request, body: Any) -> None:
    """Add the key of a request to its `cache_salt`, unless keys share prefixes.

    Raises
    ------
    APIError
        If the request's `priority` is ahead of the default, and thereby of other keys' requests.
    """
    salt = request.state.key_salt
    if salt is None:
        return
    if (body.priority or 0) < 0:
        message = f"priority must be at least 0 on a server of several keys; got {body.priority}"
        raise APIError(400, message, param="priority")
    given = body.cache_salt
    if given != "":  # an empty one is refused later
        body.cache_salt = salt if given is None else f"{salt}/{given}"


def _checked(headers: Headers, accepted: Sequence[bytes], key_name: str) -> str:
    """Return the hash of a request's key; every accepted one is compared, even after a match."""
    given = _hash(_key_of(headers))
    found = False
    for known in accepted:
        found |= hmac.compare_digest(known, given)
    if not found:
        raise APIError(
            401,
            f"{key_name} is needed: Authorization: Bearer KEY, or X-API-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return given.hex()


def _key_of(headers: Headers) -> bytes:
    """Return the API key of a request; b"" if it has none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip()[:MAX_KEY_CHARS].encode("latin-1", "replace")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
