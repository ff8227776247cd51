"""`RequestClient`: what the clients of engines in other processes have in common.

Text is tokenized and detokenized here, stop strings are found here, and requests are checked here
as far as possible, so that the engine's loop has less to do.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from engine.async_engine import LONG_TEXT, ModelInfo
from engine.errors import EngineError
from engine.llm_engine import Prompt
from engine.outputs import RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server.remote_request import RemoteRequest, RequestMaker
from engine.structured import check_structured
from engine.structured.spec import StructuredOutput

__all__ = ["RequestClient"]


class RequestClient(ABC):
    """Makes requests and yields their outputs; a subclass brings them to an engine.

    Attributes
    ----------
    model_info : ModelInfo
    tokenizer : Tokenizer or None
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._names = itertools.count(1)
        self._take_model(ModelInfo("", 0, 0))

    def _take_model(self, info: ModelInfo) -> None:
        self.model_info = info
        self._maker = RequestMaker(info, self.tokenizer)

    @property
    @abstractmethod
    def error(self) -> EngineError | None:
        """Why no more requests are served; None while they are."""

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; see `AsyncEngine.generate`.

        A reader that falls behind gets outputs of several tokens.

        Raises
        ------
        RequestError
            Also for `logits_processors`, as functions are never sent.
        """
        if params is None:
            given = self.model_info.generation_config
            kind = RequestOutputKind.DELTA
            params = SamplingParams.from_generation_config(given, output_kind=kind)
        if request_id is None:
            request_id = f"async-{next(self._names)}"
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            checked = await asyncio.to_thread(self._maker.encode, prompt, cache_salt)
        else:
            checked = self._maker.encode(prompt, cache_salt)
        if isinstance(params.structured, StructuredOutput):
            # Here, as the engine's process, which compiles it again, serves others meanwhile.
            await asyncio.to_thread(check_structured, params.structured)
        request = self._maker.make(request_id, checked, params, priority, timeout)
        self.submit(request)
        try:
            output = await request.next_output()
            self._note_first(request, output)
            yield output
            while not output.finished:
                output = await request.next_output()
                yield output
        finally:
            self.drop(request)

    @abstractmethod
    def submit(self, request: RemoteRequest) -> None:
        """Ask an engine for a request.

        Raises
        ------
        RequestError
            If its id is in use (`QueueFullError`: try again later).
        EngineError
            If no more requests are served.
        """

    @abstractmethod
    def drop(self, request: RemoteRequest) -> None:
        """End a request that nobody waits for, if it has not ended."""

    def _note_first(self, request: RemoteRequest, output: RequestOutput) -> None:  # noqa: B027
        """Take notice of the first output of a request."""

    def _check_alive(self) -> None:
        if self.error is not None:
            raise EngineError(f"the engine has ended: {self.error}")
