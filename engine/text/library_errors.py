"""Translates errors of the `tokenizers` library to the engine's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.errors import EngineError
from engine.model_files import excerpt

__all__ = ["library_errors"]


@contextlib.contextmanager
def library_errors(kind: type[EngineError], what: str) -> Iterator[None]:
    """Raise `kind` with the message "`what`: reason" if the library fails inside the block.

    The library raises bare Exceptions; a panic in its Rust code is a BaseException, which
    `except Exception` does not catch. Other BaseExceptions (KeyboardInterrupt) and MemoryError
    pass through.

    Examples
    --------
    >>> from engine.errors import ConfigError
    >>> with library_errors(ConfigError, "tokenizer.json cannot be read"):
    ...     raise Exception("expected `,`")
    Traceback (most recent call last):
    engine.errors.ConfigError: tokenizer.json cannot be read: expected `,`
    """
    try:
        yield
    except (EngineError, MemoryError):
        raise
    except Exception as error:
        raise kind(f"{what}: {excerpt(error)}") from None
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise kind(f"{what}: the tokenizers library panicked ({excerpt(error)})") from None


def _is_panic(error: BaseException) -> bool:
    kind = type(error)  # each extension module defines its own, and none can be imported
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")
