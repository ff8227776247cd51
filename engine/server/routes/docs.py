"""/docs: a page of the API, which a browser builds from /openapi.json."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from engine.server.routes.page import file_route, read_file

__all__ = ["PUBLIC_PATHS", "routes"]

_FOLDER = Path(__file__).parents[1] / "static" / "docs"
_FILES = {
    "/docs" if path.name == "index.html" else f"/docs/{path.name}": read_file(path)
    for path in sorted(_FOLDER.iterdir())
}

# Served without an API key, for which the page asks.
PUBLIC_PATHS = frozenset(_FILES)


def routes() -> list[Route]:
    """Return one route per file."""
    return [file_route(path, file) for path, file in _FILES.items()]
