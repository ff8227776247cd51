"""Web page at `/`: its files, with headers that stop browsers from loading anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["HEADERS", "PUBLIC_PATHS", "StaticFile", "file_route", "read_file", "routes"]

_STATIC = Path(__file__).parents[1] / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # browsers revalidate with If-None-Match each time
}


@dataclass(frozen=True)
class StaticFile:
    """A file of a page, read once, with the tag by which browsers know its version."""

    body: bytes
    media_type: str
    etag: str


def read_file(path: Path) -> StaticFile:
    """Read a file of a page."""
    body = path.read_bytes()
    return StaticFile(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


_FILES = {
    "/" if path.name == "index.html" else f"/static/{path.name}": read_file(path)
    for path in sorted(_STATIC.iterdir())
    if path.suffix in _MEDIA_TYPES
}

# Served without an API key, since a browser has none until the page asks for it. The files contain
# no data.
PUBLIC_PATHS = frozenset(_FILES)


def file_route(path: str, file: StaticFile) -> Route:
    """Return the route that serves `file`, under headers that let nothing else run."""
    headers = {**HEADERS, "ETag": file.etag}

    async def page(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)

    return Route(path, page, methods=["GET"], name=f"page:{path}", include_in_schema=False)


def routes() -> list[Route]:
    """Return one route per file; no other files are served."""
    return [file_route(path, file) for path, file in _FILES.items()]
