"""`LLM`: text in, text out, for many prompts at once."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import numbers
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from engine.checks import length_of, shown_with_type
from engine.core.stats import EngineStats
from engine.engine_config import CONFIG_OPTIONS
from engine.errors import RequestError, TemplateError, in_item, map_items, unknown_keyword
from engine.llm_engine import LLMEngine, Prompt
from engine.lora_request import LoRARequest
from engine.model import LOAD_OPTIONS
from engine.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.shared_engine import SharedEngine
from engine.signatures import takes_keywords
from engine.tasks.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from engine.tasks.embeddings import CLASSIFY, embed_in_parts
from engine.tasks.scoring import pairs_of, scored
from engine.text import template_worker
from engine.text.chat_template import RESERVED_VARIABLES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from engine.options import LLMOptions

__all__ = ["LLM"]

MAX_PROMPTS = 2**20  # maximum prompts per call

Message = Mapping[str, Any]


class LLM:
    """A model that answers prompts, offline.

    Several threads may share one LLM: their requests run together, in the same steps.

    Parameters
    ----------
    model : str
        "smollm2", a directory in Hugging Face layout, a .gguf file, or a hub id.
    **options
        Keywords of `engine.load` (device, dtype, quantization, ...) and of `EngineConfig`
        (max_num_seqs, max_model_len, seed, ...). vLLM's `gpu_memory_utilization` is accepted too.

    Examples
    --------
    ::

        llm = LLM("smollm2")
        [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(output.outputs[0].text)
    """

    @takes_keywords(LOAD_OPTIONS.values(), CONFIG_OPTIONS.values())
    def __init__(self, model: str = "smollm2", **options: Unpack[LLMOptions]) -> None:
        with contextlib.suppress(TemplateError):  # `chat` raises the error if it is called
            template_worker.start()  # imports Jinja while the weights are read
        engine = LLMEngine.from_name(model, **options)
        self._shared: SharedEngine[list[RequestOutput]] = SharedEngine(engine)
        self._counter = itertools.count()

    @property
    def llm_engine(self) -> LLMEngine:
        """Engine that serves the requests."""
        return self._shared.engine

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model; None if it was made from a configuration alone."""
        return self.llm_engine.tokenizer

    @takes_keywords(inspect.signature(SamplingParams).parameters.values())
    def get_default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return the sampling parameters of prompts without any; `overrides` take precedence.

        See `engine.loading.generation_config.sampling_defaults`: those of the model's
        generation_config.json, or else those recommended for its name, or else mild ones.
        """
        return self.llm_engine.model.sampling_defaults.params(**overrides)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Parameters
        ----------
        prompts : prompt or sequence of prompts
            A str, a sequence of token ids, {"prompt": str} or {"prompt_token_ids": ids}; a mapping
            may also contain "cache_salt".
        sampling_params : SamplingParams or sequence of it, optional
            One for all, or one per prompt; defaults to the model's recommendation.
        priority : int or sequence of int
            Smaller values are served first; one for all, or one per prompt.
        lora_request : LoRARequest, or sequence of (LoRARequest or None), optional
            The adapter to apply (`load`'s `enable_lora`); one for all, or one per prompt.
        progress : bool
            Show a progress bar on stderr.

        Returns
        -------
        list of RequestOutput
            One per prompt, in the same order.

        Raises
        ------
        RequestError
            If a prompt cannot be served; then no prompt is queued.
        """
        return self._generate(
            "prompts", _as_prompts(prompts), sampling_params, priority, lora_request, progress
        )

    def _generate(
        self,
        name: str,
        batch: Sequence[Prompt],
        sampling_params: Any,
        priority: Any,
        lora_request: Any,
        progress: bool,
    ) -> list[RequestOutput]:
        """See `generate`; errors call the prompts `name`."""
        # Only final outputs are returned, so the engine need not build intermediate ones.
        params = self._params_for(len(batch), sampling_params, RequestOutputKind.FINAL_ONLY)
        count = len(batch)
        priorities = _one_per_prompt(
            "priority", priority, count, (numbers.Integral, "whole number")
        )
        adapters = _one_per_prompt(
            "lora_request", lora_request, count, (LoRARequest | None, "LoRARequest or None")
        )
        ids = self._add(name, batch, params, priorities, adapters)
        finished: dict[str, RequestOutput] = {}
        from tqdm import tqdm

        with tqdm(total=len(ids), desc="requests", disable=not progress, file=sys.stderr) as bar:
            for output in self._run(ids):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        progress: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        allow_special_in_content: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}, or a sequence of such
            One or several conversations.
        sampling_params : SamplingParams or sequence of it, optional
            One for all, or one per conversation; defaults to the model's recommendation.
        priority : int or sequence of int
            Smaller values are served first; one for all, or one per conversation.
        lora_request : LoRARequest, or sequence of (LoRARequest or None), optional
            The adapter to apply; one for all, or one per conversation.
        progress : bool
            Show a progress bar on stderr.
        tools : sequence of dict, optional
            JSON schemas of functions that the model may call.
        add_generation_prompt : bool, optional
            End the prompt with the start of the assistant's reply; by default True, unless
            `continue_final_message` is.
        continue_final_message : bool
            End the prompt with the text of the last message, so that the model continues it.
        allow_special_in_content : bool
            Read control tokens (``<|im_end|>``) in messages and tools, as transformers does. False,
            as in the server, makes them ordinary text: only the template writes control tokens.
        **template_variables
            Other variables that the model's chat template reads (enable_thinking, ...).

        Raises
        ------
        UnknownOptionError
            If the model's template reads no such variable.
        RequestError
            If a conversation cannot be served; then none is queued.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        is_many = is_list and messages and not isinstance(messages[0], Mapping)
        conversations: Any = messages if is_many else [messages]
        self._check_variables(template_variables, tools is not None)
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "allow_special_in_content": allow_special_in_content,
        }
        options |= template_variables
        prompts = map_items("messages", conversations, lambda one: self._chat_prompt(one, options))
        return self._generate(
            "messages", prompts, sampling_params, priority, lora_request, progress
        )

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt, or answer one conversation, yielding new text as it is generated.

        Closing the iterator aborts the request.

        Parameters
        ----------
        prompt : prompt, or sequence of {"role": ..., "content": ...}
            See `generate` and `chat`.
        sampling_params : SamplingParams, optional
            Defaults to the model's recommendation.
        priority : int
            Smaller values are served first.
        lora_request : LoRARequest, optional
            The adapter to apply.

        Yields
        ------
        RequestOutput
            What is new since the last one.

        Raises
        ------
        RequestError
            If the prompt cannot be served.
        """
        if _is_conversation(prompt):
            prompt = self._chat_prompt(prompt, {"allow_special_in_content": True})
        [params] = self._params_for(1, sampling_params, RequestOutputKind.DELTA)
        request_id = self._next_id()
        with self._shared.lock:
            self.llm_engine.add_request(
                request_id,
                prompt,  # type: ignore[arg-type]
                params,
                priority=priority,
                lora_request=lora_request,
            )
            self._shared.inbox[request_id] = []
        return self._run([request_id])

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Search for the most probable continuations of every prompt.

        Parameters
        ----------
        prompts : prompt or sequence of prompts
            See `generate`.
        params : BeamSearchParams
            Beam width, and length limits.

        Returns
        -------
        list of BeamSearchOutput
            One per prompt, in the same order; each lists its sequences, best first.

        Raises
        ------
        RequestError
            If a prompt cannot be served.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be a BeamSearchParams; got {type(params).__name__}")
        searches: list[BeamSearch] = []
        shared = self._shared
        try:
            given = _as_prompts(prompts)
            for index, prompt in enumerate(given):
                name = self._next_id()
                with shared.lock, in_item("prompts", index, len(given)):
                    searches.append(BeamSearch(shared.engine, prompt, params, name, shared.inbox))
            while not all(search.is_done for search in searches):
                with shared.lock:
                    shared.step()
                    for search in searches:
                        search.advance()
        finally:
            with shared.lock:
                for search in searches:
                    search.close()
        return [search.output() for search in searches]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling: str | None = None,
        instruction: str | None = None,
        reranker: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Judge how relevant texts are to each other, as the server's /score does.

        A model with a classification head of one label reads both texts. A Qwen3-Reranker is asked
        whether the second text answers the first; the score is its probability of "yes". With any
        other model the score is the cosine of the texts' embeddings.

        Parameters
        ----------
        text_1, text_2 : str or sequence of str
            One text, or several; one in `text_1` is compared with each in `text_2`.
        pooling : str, optional
            "last" or "mean", by default as the model's files say: see
            `engine.tasks.embeddings.embed`.
        instruction : str, optional
            The task that the reranker is told.
        reranker : str, optional
            "qwen3" (its prompt), "pair" (the head reads the texts alone) or "cosine"; by default by
            the model.

        Returns
        -------
        list of ScoringRequestOutput
            One per pair, in order; `outputs.score` is its score.

        Raises
        ------
        RequestError, ConfigError
            If a text cannot be served, or an option does not fit the model.

        Examples
        --------
        ::

            for output in llm.score("What do cats eat?", ["Rates rose.", "Cats eat mice."]):
                print(output.outputs.score)
        """
        return scored(
            self.llm_engine.model,
            pairs_of(text_1, text_2),
            self._embed,
            self.generate,
            pooling=pooling,
            instruction=instruction,
            reranker=reranker,
        )

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> list[ClassificationRequestOutput]:
        """Return the scores of the labels of a model with a classification head.

        Parameters
        ----------
        prompts : prompt or sequence of prompts
            See `generate`.

        Returns
        -------
        list of ClassificationRequestOutput
            One per prompt: `outputs.probs` and `outputs.label`.

        Raises
        ------
        RequestError
            If the model has no head, or a prompt cannot be served.
        """
        engine = self.llm_engine
        given = _as_prompts(prompts)
        ids = map_items("prompts", given, lambda prompt: engine.encode(prompt).token_ids)
        rows = self._embed(ids, CLASSIFY)
        labels = () if engine.model.classifier is None else engine.model.classifier.labels
        return [
            ClassificationRequestOutput(
                ClassificationOutput(row.tolist(), labels[int(row.argmax())]), list(each)
            )
            for row, each in zip(rows, ids, strict=True)
        ]

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed.

        See `LLMEngine.reset_prefix_cache`.
        """
        with self._shared.lock:
            return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache until `wake_up`.

        `level` 1 copies the weights to host memory, 2 drops them. Raises RequestError if a request
        is unfinished, ConfigError if the model cannot sleep. See `LLMEngine.sleep`.
        """
        with self._shared.lock:
            self.llm_engine.sleep(level)

    def wake_up(self) -> None:
        """Bring back what `sleep` has freed.

        Raises OutOfMemoryError or WeightsError if that fails; the engine then sleeps on.
        """
        with self._shared.lock:
            self.llm_engine.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: it then refuses requests."""
        return self.llm_engine.is_sleeping

    def update_weights(self, source: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, ...]:
        """Write new weights over the model's, and drop all cached prefixes.

        Parameters
        ----------
        source : str or path, or mapping of str to array
            A folder, or tensors by their names in the checkpoint. See `Model.update_weights`.

        Returns
        -------
        tuple of str
            Names of the weights that have changed.

        Raises
        ------
        RequestError
            If they do not fit the model; then nothing changes.
        """
        with self._shared.lock:
            return self.llm_engine.update_weights(source)

    def get_metrics(self) -> EngineStats:
        """Return the engine's counters and histograms."""
        return self.llm_engine.stats()

    def close(self) -> None:
        """Free the engine's memory."""
        self._shared.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _embed(self, token_ids: Sequence[Sequence[int]], pooling: str | None) -> list[Any]:
        """Compute embeddings, or scores of labels; other threads' requests run in between."""
        shared = self._shared
        parts = embed_in_parts(self.llm_engine.model, token_ids, pooling)
        found: dict[int, Any] = {}
        with contextlib.closing(parts):
            while True:
                with shared.lock:
                    part = next(parts, None)
                if part is None:
                    return [found[index] for index in range(len(token_ids))]
                found.update(part)

    def _chat_prompt(self, messages: Any, options: Mapping[str, Any]) -> Prompt:
        """Render and encode a conversation; the template writes the special tokens itself."""
        tokenizer = self._chat_tokenizer()
        prompt = tokenizer.render_chat(messages, **options)
        ids = tokenizer.encode_prompt(prompt)
        return {"prompt": prompt.text, "prompt_token_ids": ids}

    def _chat_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("messages need a model with a tokenizer, for its chat template")
        return self.tokenizer

    def _check_variables(self, variables: Iterable[str], has_tools: bool) -> None:
        """Reject a variable that the model's template does not read."""
        own = self._chat_tokenizer().template_variables(has_tools)
        for name in variables:
            if name not in own and name not in RESERVED_VARIABLES:
                raise unknown_keyword("chat", name, [*_CHAT_KEYWORDS, *own])

    def _params_for(self, count: int, given: Any, kind: RequestOutputKind) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        params = _one_per_prompt(
            "sampling_params", given, count, (SamplingParams, "SamplingParams")
        )
        for index, item in enumerate(params):
            if not isinstance(item, SamplingParams):
                raise RequestError(
                    f"sampling_params[{index}] must be a SamplingParams; got {type(item).__name__}"
                )
        return [dataclasses.replace(p, output_kind=kind) for p in params]

    def _add(
        self,
        name: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[LoRARequest | None],
    ) -> list[str]:
        """Queue all prompts, or none on an error."""
        ids: list[str] = []
        with self._shared.lock:
            try:
                for index, prompt in enumerate(prompts):
                    ids.append(self._next_id())
                    with in_item(name, index, len(prompts)):
                        self.llm_engine.add_request(
                            ids[-1],
                            prompt,
                            params[index],
                            priority=priorities[index],
                            lora_request=adapters[index],
                        )
            except BaseException:
                self._shared.drop(ids)
                self._shared.abort_dropped()
                raise
            inbox: list[RequestOutput] = []
            self._shared.inbox.update((request_id, inbox) for request_id in ids)
        return ids

    def _run(self, ids: Sequence[str]) -> Generator[RequestOutput, None, None]:
        """Step until the requests finish; closing the iterator early aborts them.

        Several such iterators may be interleaved: each request's outputs go to its inbox.
        """
        outputs = self._outputs(ids)
        next(outputs)  # enters the `try`, so that closing the unread iterator aborts the requests
        return outputs

    def _outputs(self, ids: Sequence[str]) -> Generator[Any, None, None]:
        shared = self._shared
        waiting = dict.fromkeys(ids)
        inbox = shared.inbox[ids[0]] if ids else []
        try:
            yield None
            while waiting:
                with shared.lock:
                    if not inbox:
                        shared.step()
                    arrived = inbox[:]
                    inbox[:] = []
                for output in arrived:
                    if output.finished:
                        del waiting[output.request_id]
                    yield output
        finally:
            shared.drop(waiting)
            for request_id in ids:
                shared.inbox.pop(request_id, None)

    def _next_id(self) -> str:
        return f"llm-{next(self._counter)}"


_CHAT_KEYWORDS = [  # for the hint of an unknown keyword
    name
    for name, parameter in inspect.signature(LLM.chat).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and name not in ("self", "messages")
]


def _is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return bool(is_list and prompt and isinstance(prompt[0], Mapping) and "role" in prompt[0])


def _as_prompts(prompts: Any) -> list[Prompt]:
    """Return a list of prompts; a single text, mapping or list of ids becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_no_list = isinstance(prompts, bytes | bytearray | set | frozenset)
    if is_no_list or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(
            f"prompts must be a prompt or a sequence of prompts; got {type(prompts).__name__}"
        )
    items = iter(prompts)
    first = list(itertools.islice(items, 1))
    is_ids = first and not isinstance(first[0], str | Mapping) and not hasattr(first[0], "__iter__")
    if is_ids:  # may be an endless iterator: the engine reads only as many ids as it can serve
        return [prompts] if hasattr(prompts, "__len__") else [itertools.chain(first, items)]  # type: ignore[list-item]
    found = [*first, *itertools.islice(items, MAX_PROMPTS)]  # `items` may be endless
    if len(found) > MAX_PROMPTS:
        raise RequestError(f"prompts must be at most {MAX_PROMPTS}; got more")
    return found


def _one_per_prompt(name: str, values: Any, count: int, kind: tuple[Any, str]) -> list[Any]:
    """Return `values`, a sequence or one value of `kind` (type, name), as a list of `count`."""
    if isinstance(values, kind[0]):
        return [values] * count
    is_no_list = isinstance(values, str | Mapping) or not hasattr(values, "__iter__")
    if is_no_list or getattr(values, "ndim", 1) == 0:
        got = shown_with_type(values)
    else:
        items = list(itertools.islice(values, count + 1))
        if len(items) == count:
            return items
        known = length_of(values)
        got = (
            f"{'more' if len(items) > count else len(items)}"
            if known is None
            else shown_with_type(known)
        )
    raise RequestError(f"{name} must be one {kind[1]}, or one per prompt ({count}); got {got}")
