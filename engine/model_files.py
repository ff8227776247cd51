"""Opens and reads a model's files, which are untrusted.

All readers of model files open them here. Only regular files are opened, so a FIFO cannot block
and a device cannot fill the memory; and reads are limited to a given number of bytes.

Links are followed only inside the model's directory, for weights, configuration, tokenizer and
templates alike: otherwise a downloaded directory could make us read any of the user's files, for
example as a template. The one exception is the hub's cache, where the files of
``snapshots/<revision>/``, or of a folder in it, are links into ``blobs/`` beside ``snapshots/``.
The directory itself, and a .gguf file named by the user, may be links to anywhere.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError, EngineError

__all__ = [
    "excerpt",
    "is_present",
    "open_file",
    "read_file",
    "read_json",
    "refuse_link_out",
]

MAX_JSON_BYTES = 64 << 20

_POINTER = b"version https://git-lfs."
_MAX_POINTER = 1024  # bytes, by Git LFS's specification
_MAX_EXCERPT = 200
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def excerpt(text: object) -> str:
    """Return the first 200 characters of a text, for an error message.

    Control characters are escaped, so a file cannot add lines to a log or alter a terminal.
    """
    whole = str(text)[: 2 * _MAX_EXCERPT]
    if not whole.isprintable():
        whole = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in whole)
    return whole if len(whole) <= _MAX_EXCERPT else whole[: _MAX_EXCERPT - 3] + "..."


def is_present(path: Path) -> bool:
    """Tell whether `path` exists, as any kind of file or a dangling link."""
    return os.path.lexists(path)


def open_file(
    path: Path, root: Path | None = None, error: type[EngineError] = ConfigError
) -> io.FileIO:
    """Open the regular file `path` for reading; never blocks.

    Parameters
    ----------
    path : Path
    root : Path, optional
        Model directory that links must not leave; None for a file named by the user.
    error : type
        Class of the error to raise, `ConfigError` or `WeightsError`.

    Raises
    ------
    ConfigError or WeightsError
        If the file does not exist, is not a regular file, is a link out of `root`, cannot be
        opened, or only points to the file that Git LFS would have fetched.
    """
    try:
        if root is not None:
            refuse_link_out(path, root, error)
        # Checked before opening, since opening a device may already have an effect, and again
        # afterwards, in case the file was replaced in between.
        _check_regular(path, os.stat(path).st_mode, error)
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            _check_regular(path, status.st_mode, error)
            if status.st_size < _MAX_POINTER and _is_pointer(file):
                raise error(
                    f"{excerpt(path)}: is a pointer of Git LFS, not the file itself; run "
                    "`git lfs pull` there, or download it again"
                )
            return io.FileIO(file, "rb")
        except BaseException:
            os.close(file)
            raise
    except OSError as fault:
        reason = fault.strerror or fault
        raise error(f"{excerpt(path)}: cannot be read ({reason})") from fault
    except ValueError as fault:  # a NUL or lone surrogate in the path
        if isinstance(fault, error):
            raise
        raise error(f"{excerpt(path)!r}: is no valid path ({fault})") from fault


def _is_pointer(file: int) -> bool:
    """Tell whether an open file begins as those that Git LFS leaves in place of large ones."""
    head = os.read(file, len(_POINTER))
    os.lseek(file, 0, os.SEEK_SET)
    return head == _POINTER


def refuse_link_out(path: Path, root: Path, error: type[EngineError] = ConfigError) -> None:
    """Raise `error` if `path` leads, through any link, out of the model directory `root`."""
    home, target = (Path(os.path.realpath(one)) for one in (root, path))
    homes = [home]
    for folder in home.parents[:2]:
        if folder.name == "snapshots":
            homes.append(folder.parent / "blobs")
    if not any(target.is_relative_to(one) for one in homes):
        raise error(
            f"{excerpt(path)}: must be inside the model's folder; it is a link to "
            f"{excerpt(target)} (copy the file, or give the folder that has it)"
        )


def _check_regular(path: Path, mode: int, error: type[EngineError]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise error(f"{excerpt(path)}: must be a regular file; it is {kind}")


def read_file(
    path: Path,
    max_bytes: int,
    root: Path | None = None,
    error: type[EngineError] = ConfigError,
) -> bytes:
    """Return the contents of the regular file `path`; reads at most `max_bytes` + 1 bytes.

    Raises
    ------
    ConfigError or WeightsError
        As for `open_file`, or if the file is larger than `max_bytes`.
    """
    with open_file(path, root, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{path}: must have at most {max_bytes} bytes; got {size}")
        try:
            data = _read_up_to(file, size + 1)
        except OSError as fault:
            raise error(f"{path}: cannot be read ({fault.strerror or fault})") from fault
    if len(data) != size:
        raise error(f"{path}: must not change while it is read; it had {size} bytes")
    return data


def _read_up_to(file: io.FileIO, count: int) -> bytes:
    """Read up to `count` bytes; a single system `read` may return fewer than available."""
    data = bytearray()
    while len(data) < count and (part := file.read(count - len(data))):
        data += part
    return bytes(data)


def read_json(
    path: Path,
    max_bytes: int = MAX_JSON_BYTES,
    root: Path | None = None,
    error: type[EngineError] = ConfigError,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON object stored in file `path`.

    Raises
    ------
    ConfigError or WeightsError
        As for `read_file`, or if the contents are not UTF-8 or not a JSON object.
    """
    data = read_file(path, max_bytes, root, error)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=object_pairs_hook)
    except (ValueError, RecursionError) as fault:
        raise error(f"{path}: is not valid JSON ({excerpt(fault)})") from fault
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object; got {shown(value)}")
    return value
