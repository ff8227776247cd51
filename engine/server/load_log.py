"""`LoadLog`: one log line every few seconds about the load of a busy engine."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from engine.llm_engine import LLMEngine
from engine.server.logs import log_fields

__all__ = ["WORDS", "LoadLog", "totals_of"]

_log = logging.getLogger("engine.server.load")


WORDS = {
    "prompt_tokens_per_s": "prompt",
    "output_tokens_per_s": "output",
    "running": "running",
    "waiting": "waiting",
    "kv_cache_used": "KV cache used",
    "prefix_hits": "prefix hits",
    "accepted_drafts": "accepted drafts",
}
"""Field of a JSON line -> its word in a line of text; the Grafana dashboard has the same words."""


def totals_of(engine: LLMEngine) -> dict[str, int]:
    """Return the engine's counters since its start; requests include aborted and failed ones."""
    found = engine.collector
    return {
        "requests": sum(found.request_success.values()),
        "prompt tokens": found.prompt_tokens,
        "output tokens": found.generation_tokens,
    }


class _Counts(NamedTuple):
    """Counters whose growth between two lines is logged."""

    prompt_tokens: int
    output_tokens: int
    prefix_queries: int
    prefix_hits: int
    drafts: int
    accepted_drafts: int


class LoadLog:
    """Logs the load of an engine while it is busy; silent while it is idle.

    A line covers the time since the last one was due. The one in whose time the engine becomes idle
    is the last.

    Parameters
    ----------
    engine : LLMEngine
    interval : float
        Seconds between two lines; 0: no lines.
    replica : int, optional
        Index of the engine among several replicas, which begins the line.
    """

    def __init__(self, engine: LLMEngine, interval: float, replica: int | None = None) -> None:
        self._engine = engine
        self._interval = interval
        self._replica = replica
        self._since = time.monotonic()
        self._counts = self._count()

    def tick(self) -> None:
        """Write a line if one is due; call about every half second, between two steps."""
        now = time.monotonic()
        seconds = now - self._since
        if not self._interval or seconds < self._interval:
            return
        before = self._counts
        self._since = now
        self._counts = self._count()
        new = _Counts(*(new - old for new, old in zip(self._counts, before, strict=True)))
        if any(new) or self._engine.has_unfinished_requests():
            self._write(new, seconds)

    def _count(self) -> _Counts:
        collector = self._engine.collector
        scheduler = self._engine.scheduler.stats()
        speculation = self._engine.speculation.stats()
        return _Counts(
            collector.prompt_tokens,
            collector.generation_tokens,
            scheduler.prefix_cache_queries,
            scheduler.prefix_cache_hits,
            speculation.num_draft_tokens,
            speculation.num_accepted_tokens,
        )

    def _write(self, new: _Counts, seconds: float) -> None:
        now = self._engine.scheduler.stats()
        fields: dict[str, Any] = {
            "prompt_tokens_per_s": round(new.prompt_tokens / seconds, 1),
            "output_tokens_per_s": round(new.output_tokens / seconds, 1),
            "running": now.num_requests_running,
            "waiting": now.num_requests_waiting,
            "kv_cache_used": round(now.kv_cache_usage, 4),
            "prefix_hits": _share(new.prefix_hits, new.prefix_queries),
        }
        if new.drafts:
            fields["accepted_drafts"] = _share(new.accepted_drafts, new.drafts)
        text = ", ".join(f"{WORDS[name]} {_shown(name, value)}" for name, value in fields.items())
        if self._replica is not None:
            fields = {"replica": self._replica, **fields}
            text = f"replica {self._replica}: {text}"
        log_fields(_log, text, fields)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _shown(name: str, value: float | None) -> str:
    if name in ("running", "waiting"):
        return str(value)
    if name.endswith("_per_s"):
        return f"{value:.1f} tokens/s"
    return "-" if value is None else f"{100 * value:.1f} %"
