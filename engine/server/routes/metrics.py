"""/metrics: engine metrics for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.metrics import CONTENT_TYPE, metrics_text
from engine.server.openapi import Endpoint
from engine.server.replicas.client import ReplicaClient

__all__ = ["ENDPOINTS", "routes"]


ENDPOINTS = (Endpoint("get", "/metrics", "Counters for Prometheus", media_type="text/plain"),)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/metrics", metrics, methods=["GET"])]


async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's text format."""
    state = request.app.state
    if isinstance(state.client, ReplicaClient):
        stats = await state.client.stats_by_replica()
    else:
        stats = {0: await state.client.stats()}
    text = metrics_text(stats, state.model_names[0])
    return Response(text, headers={"content-type": CONTENT_TYPE})
