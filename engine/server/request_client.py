"""`RequestClient`: base class of the clients of engines in other processes.

The client validates, tokenizes and detokenizes, and matches stop strings, to keep work off the
engine loop.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.async_engine import EngineClient, ModelInfo
from engine.core.input_processor import Prompt, PromptInput
from engine.errors import EngineError
from engine.sampling_params import SamplingParams
from engine.server import messages as m
from engine.server.remote_request import RemoteRequest, RequestMaker
from engine.structured.grammar import check_structured
from engine.structured.spec import StructuredOutput

__all__ = ["Answerer", "RequestClient"]

Answerer = Callable[[m.FromClient], Iterable[m.FromEngine]]
"""Stand-in for an engine: message -> replies."""


class RequestClient(EngineClient):
    """Builds requests; a subclass sends them to an engine."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._take_model(ModelInfo("", 0, 0))

    def _take_model(self, info: ModelInfo) -> None:
        self.model_info = info
        self._maker = RequestMaker(info, self.tokenizer)

    @abstractmethod
    def submit(self, request: RemoteRequest) -> None:
        """Send a request to an engine.

        Raises
        ------
        RequestError
            If its id is in use (`QueueFullError`: try again later).
        EngineError
            If the engine has ended.
        """

    @contextlib.contextmanager
    def answered_by(self, answer: Answerer) -> Iterator[None]:
        """Within the context, `answer` replies to all messages instead of the engine."""
        self._set_answer(answer)
        try:
            yield
        finally:
            self._set_answer(None)

    @abstractmethod
    def _set_answer(self, answer: Answerer | None) -> None: ...

    def _encode(self, prompt: Prompt, cache_salt: str | None = None) -> PromptInput:
        return self._maker.encode(prompt, cache_salt)

    def _prepare(self, params: SamplingParams) -> None:
        # Also checked here, so that an invalid grammar costs the engine process nothing.
        if isinstance(params.structured, StructuredOutput):
            check_structured(params.structured)

    def _start(
        self, request_id: str, prompt: Prompt | PromptInput, params: SamplingParams, **options: Any
    ) -> RemoteRequest:
        salt = options.pop("cache_salt")
        lora_request = options.pop("lora_request")
        checked = prompt if isinstance(prompt, PromptInput) else self._maker.encode(prompt, salt)
        request = self._maker.make(request_id, checked, params, **options)
        if lora_request is not None:
            request.message.adapter = lora_request.lora_name
        self.submit(request)
        return request

    def _check_alive(self) -> None:
        if self.error is not None:
            raise EngineError(f"the engine has ended: {self.error}")
