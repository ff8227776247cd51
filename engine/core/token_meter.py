"""`TokenMeter`: tokens and time to first token of all requests that one caller makes."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass

from engine.outputs import RequestOutput

__all__ = ["METER", "TokenMeter"]


@dataclass
class TokenMeter:
    """Counts of one caller's requests, such as those of one HTTP request.

    Attributes
    ----------
    num_prompt_tokens, num_output_tokens : int
        Sums over the requests that have ended; prompts include tokens of the prefix cache.
    first_token_time : float or None
        When the first of all tokens was generated, in seconds of `time.monotonic`; None before.

    Examples
    --------
    >>> from engine.outputs import RequestMetrics
    >>> meter = TokenMeter()
    >>> metrics = RequestMetrics(1.0, first_token_time=1.5, num_generation_tokens=2)
    >>> meter.add(RequestOutput("r0", None, [5, 6, 7], [], True, metrics=metrics))
    >>> meter
    TokenMeter(num_prompt_tokens=3, num_output_tokens=2, first_token_time=1.5)
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_time: float | None = None

    def add(self, output: RequestOutput) -> None:
        """Count a request that has ended, by its last output."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        metrics = output.metrics
        if metrics is None:
            return
        self.num_output_tokens += metrics.num_generation_tokens
        first = metrics.first_token_time
        # An engine on another machine reports times of another clock, which are left out.
        if first is None or not metrics.arrival_time <= first <= time.monotonic():
            return
        if self.first_token_time is None or first < self.first_token_time:
            self.first_token_time = first


METER: ContextVar[TokenMeter | None] = ContextVar("token_meter", default=None)
"""Meter of the current task and of the tasks that it starts; None: nothing is counted."""
