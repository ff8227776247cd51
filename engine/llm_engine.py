"""The engine: requests in, steps, outputs. Start reading at `LLMEngine.step`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.cache.kv_cache import KVCache
from engine.cache.memory_pool import MemoryPool
from engine.engine_config import EngineConfig
from engine.errors import RequestError
from engine.model import Model, load
from engine.output_processor import OutputStream
from engine.outputs import RequestOutput
from engine.request import Request, RequestStatus
from engine.runner.model_runner import ModelRunner, StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler

__all__ = ["LLMEngine", "Prompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with "prompt" or "prompt_token_ids"."""


class LLMEngine:
    """Serves many requests at once, a step at a time.

    Parameters
    ----------
    model : Model
        From `engine.load`; `LLMEngine.from_name` loads one.
    **options
        Fields of `EngineConfig`.

    Examples
    --------
    ::

        engine = LLMEngine.from_name("smollm2", device="cpu")
        engine.add_request("r0", "The capital of France is", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self.model = model
        self.tokenizer = model.tokenizer if model.has_tokenizer else None
        self.config = EngineConfig.from_options(options).resolve(
            model.config, model.device, model.dtype, model.max_model_len, model.weight_bytes
        )
        self._pool = MemoryPool(model.device)
        self.kv_cache = KVCache(self.config.geometry, self.config.scheduler.num_blocks, self._pool)
        self.scheduler = Scheduler(self.config.scheduler)
        self._seeds: dict[str, int] = {}
        self.runner = ModelRunner(model, self.kv_cache, self._seeds)
        self._streams: dict[str, OutputStream] = {}
        self._aborted: list[OutputStream] = []
        self._counter = itertools.count()

    @classmethod
    def from_name(cls, model: str = "smollm2", **options: Any) -> LLMEngine:
        """Load `model` and build an engine around it; takes the keywords of both."""
        names = ("device", "dtype", "load_format", "progress")
        loading = {name: options.pop(name) for name in names if name in options}
        if "max_model_len" in options:
            loading["max_model_len"] = options["max_model_len"]
        return cls(load(model, **loading), **options)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the outputs of the requests that took part.

        Every request that got a token, failed, or was aborted since the last step has one output.
        """
        output = self.scheduler.schedule()
        self._note_start(output)
        result = self.runner.execute(output) if not output.is_empty else StepResult()
        self._fail(result.failed)
        self.scheduler.commit(output, result.token_ids)
        streams = self._collect(result)
        return [stream.output() for stream in streams if stream.wants_output]

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        request_id : str
            Unique among unfinished requests.
        prompt : str, sequence of int, or mapping
            Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.
        params : SamplingParams, optional
        priority : int
            Smaller is served earlier.
        cache_salt : str, optional
            Requests share cached prefixes only with requests of the same salt.

        Raises
        ------
        RequestError
            If the request cannot be served; nothing is queued and the others go on.
        """
        params = params or SamplingParams()
        text, ids = self._encode(prompt)
        _refuse_unserved(params)
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop: the model has no tokenizer; got {params.stop!r}")
        params.validate_for(self.model.config.vocab_size)
        request = Request(
            request_id,
            ids,
            params,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            long_rope=self._uses_long_rope(ids, params),
            eos_token_ids=self.model.eos_token_ids,
        )
        self.scheduler.add_request(request)
        self._seeds[request_id] = self._seed(params)
        self._streams[request_id] = OutputStream(request, params, text, self.tokenizer)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these requests, in whatever state; unknown and finished ones are left alone.

        The next step returns what they have so far, with finish_reason "abort".
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            if self.scheduler.abort_request(request_id):
                self._aborted.append(self._release(request_id))

    def forget_aborted(self, request_ids: Iterable[str]) -> None:
        """Do not report these requests, which were aborted since the last step."""
        ids = set(request_ids)
        self._aborted = [s for s in self._aborted if s.request.request_id not in ids]

    def has_unfinished_requests(self) -> bool:
        """Tell whether another step has something to do or to report."""
        return self.scheduler.has_unfinished_requests() or bool(self._aborted)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._streams)

    def close(self) -> None:
        """Abort everything and give the pages back."""
        self.abort_request(list(self._streams))
        self._aborted.clear()
        self.kv_cache.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if it has one, and its checked ids."""
        text: str | None = None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    'prompt: a mapping must hold "prompt" or "prompt_token_ids"; '
                    f"got {sorted(map(str, prompt))}"
                )
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            return prompt, self._checked(self._encode_text(prompt))
        return text, self._checked(prompt)

    def _encode_text(self, text: str) -> list[int]:
        """Tokenize, unless the text is so long that it cannot fit: no token is longer than this."""
        if self.tokenizer is None:
            raise RequestError("prompt: the model has no tokenizer; give token ids, not text")
        limit = self.config.scheduler.max_model_len * self.tokenizer.max_token_chars
        if len(text) > limit:
            raise RequestError(
                f"prompt: at most {limit} characters can fit in max_model_len "
                f"{self.config.scheduler.max_model_len} tokens; got {len(text)}"
            )
        return list(self.tokenizer.encode(text))

    def _checked(self, ids: Any) -> list[int]:
        vocab_size = self.model.config.vocab_size
        if isinstance(ids, bytes | bytearray) or not hasattr(ids, "__iter__"):
            raise RequestError(f"prompt: must be text or token ids; got {type(ids).__name__}")
        checked: list[int] = []
        for index, token in enumerate(ids):
            is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not (is_id and 0 <= token < vocab_size):
                raise RequestError(
                    f"prompt: token id {token!r} at {index} must be a whole number in "
                    f"[0, {vocab_size}) (the vocabulary)"
                )
            checked.append(int(token))
        return checked

    def _uses_long_rope(self, ids: list[int], params: SamplingParams) -> bool:
        limit = self.config.scheduler.max_model_len
        longest = limit if params.max_tokens is None else len(ids) + params.max_tokens
        return self.model.uses_long_rope(min(longest, limit))

    def _seed(self, params: SamplingParams) -> int:
        """Return the request's own seed, or one made of the engine's and the request's number."""
        number = next(self._counter)
        if params.seed is not None:
            return params.seed
        state = np.random.SeedSequence([self.config.seed, number]).generate_state(1, np.uint64)
        return int(state[0])

    def _note_start(self, output: ScheduleOutput) -> None:
        for request in output.admitted:
            metrics = self._streams[request.request_id].metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or time.monotonic()

    def _fail(self, failed: Mapping[str, str]) -> None:
        for request_id, why in failed.items():
            request = self._streams[request_id].request
            self.scheduler.finish_request(request, "error", stop_reason=why)

    def _collect(self, result: StepResult) -> list[OutputStream]:
        """Hand the step's tokens to their streams; return those that changed."""
        changed, self._aborted = self._aborted, []
        for request_id, token_ids in result.token_ids.items():
            stream = self._streams[request_id]
            stop = stream.append(token_ids, result.logprobs.get(request_id, ()))
            if stop is not None:
                self._stop(stream.request, stop)
            changed.append(stream)
            if stream.request.is_finished:
                self._release(request_id)
        changed += [self._release(request_id) for request_id in result.failed]
        return changed

    def _stop(self, request: Request, stop: str) -> None:
        """End a request at a stop string, which counts before the length it may have reached."""
        self.scheduler.finish_request(request, "stop", stop_reason=stop)
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, stop

    def _release(self, request_id: str) -> OutputStream:
        """Forget a finished request; its stream still has to be shown once."""
        del self._seeds[request_id]
        stream = self._streams.pop(request_id)
        stream.finish()
        return stream


def _refuse_unserved(params: SamplingParams) -> None:
    """Refuse what this engine does not do yet; nothing is ignored in silence."""
    asked = {
        "n": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "bad_words": bool(params.bad_words),
        "logits_processors": bool(params.logits_processors),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(f"{name} is not served yet; got {getattr(params, name)!r}")
