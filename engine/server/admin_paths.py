"""Paths that an admin names in a request: only in a folder that the server's options allow."""

from __future__ import annotations

import os
from pathlib import Path

from engine.server.protocol.errors import APIError

__all__ = ["path_inside"]


def path_inside(root: str | None, option: str, path: str, field: str) -> str:
    """Return the absolute path of `path` in the folder `root`, through any links.

    Parameters
    ----------
    root : str or None
        Value of the server's option; None: it allows no folder.
    option, field : str
        Names of the option and of the request's field, for messages.
    path : str
        Absolute, or relative to `root`.

    Raises
    ------
    APIError
        403, if there is no such folder; 400, if the path leads out of it.
    """
    if root is None:
        raise APIError(403, f"{field} needs a server with {option}; it has none", param=field)
    try:
        home = Path(os.path.realpath(root))
        target = Path(os.path.realpath(home / path))
        is_inside = target.is_relative_to(home)
    except (OSError, ValueError):  # a NUL, or too many links
        is_inside = False
    if not is_inside:
        message = f"{field} must lie in the server's {option}; got {path[:200]!r}"
        raise APIError(400, message, param=field)
    return str(target)
