"""The files and folders that the server's options name."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from engine.errors import ConfigError
from engine.model_files import excerpt, read_file
from engine.server.auth import read_keys
from engine.server.server_config import ServerConfig

__all__ = ["check_files", "read_template"]

_MAX_TEMPLATE_BYTES = 1 << 20


def check_files(options: ServerConfig) -> None:
    """Raise `ConfigError` for invalid files and missing folders before the model is downloaded."""
    for name in ("lora_root", "weights_root"):
        folder = getattr(options, name)
        if folder is not None and not os.path.isdir(folder):
            raise ConfigError(f"{name} must be a folder that exists; got {excerpt(folder)}")
    if options.chat_template is not None:
        read_template(options.chat_template)
    if options.api_key_file is not None:
        read_keys(options.api_key_file)
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = "ssl_certfile and ssl_keyfile"
    files = f"{excerpt(options.ssl_certfile)} and {excerpt(options.ssl_keyfile)}"
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            names = "ssl_ca_certs"
            files = excerpt(options.ssl_ca_certs)
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:  # OpenSSL errors are OSErrors
        raise ConfigError(f"{names} must be files in PEM; got {files}: {error}") from error


def read_template(path: str) -> str:
    """Return the text of a file with a chat template.

    Raises
    ------
    ConfigError
        If it cannot be read, or has more than 1 MiB.
    """
    try:
        data = read_file(Path(path), _MAX_TEMPLATE_BYTES)
    except ConfigError as error:
        raise ConfigError(f"chat_template {error}") from error
    return data.decode("utf-8", "replace")
