"""A response whose body is JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["JsonResponse"]


class JsonResponse(Response):
    """A response with a body that msgspec encodes; bytes are sent as they are."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)
