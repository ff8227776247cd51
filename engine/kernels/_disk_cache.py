"""The folder of compiled kernels: private to the user, with files that are written as a whole."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from engine import env
from engine.errors import CompileError

__all__ = ["cache_folder", "write_file"]


def cache_folder() -> Path:
    """Create the kernel cache as a private folder, and return it.

    Raises
    ------
    CompileError
        If it cannot be written, or others can write to it.
    """
    return _created(env.cache_dir())


@cache
def _created(base: Path) -> Path:
    folder = base / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from error
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise CompileError(
            f"kernel cache {folder} must be owned and writable by this user only; got "
            f"uid {status.st_uid}, mode {status.st_mode & 0o777:o}. Fix it or set ENGINE_CACHE_DIR"
        )
    return folder


def write_file(path: Path, data: bytes) -> None:
    """Write a file of the cache; readers see the whole file or none.

    Raises
    ------
    CompileError
        If it cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _not_written(path.parent, error) from error


def _not_written(folder: Path, error: OSError) -> CompileError:
    return CompileError(
        f"kernel cache {folder} cannot be written ({error}); fix it or set ENGINE_CACHE_DIR"
    )
