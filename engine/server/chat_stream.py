"""Chat requests: prepares a conversation for the engine, and streams its answers.

Shared by /v1/chat/completions, /v1/responses and /v1/messages: `ChatService.prepare` renders and
tokenizes the conversation, and `ChatStream.pieces` splits the generated text into content,
reasoning and tool calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.async_engine import EngineClient
from engine.errors import unknown_keyword
from engine.lora_request import LoRARequest
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import SamplingDefaults, SamplingParams
from engine.server import reasoning, response_template, tool_parsers
from engine.server.answer_forms import HARMONY, Opening, forms_of
from engine.server.answer_grammar import (
    ToolUse,
    answer_structure,
    opening_of,
    tool_use,
)
from engine.server.field_limits import (
    check_answer,
    check_fields,
    check_length,
    check_num_tokens,
)
from engine.server.prompt_log import log_prompt
from engine.server.protocol.chat import (
    ChatCompletionRequest,
    chat_params,
    template_messages,
    template_tools,
)
from engine.server.protocol.common import own_names
from engine.server.protocol.errors import APIError, failed_request, renamed_params
from engine.server.protocol.logprobs import TokenLogprob, chat_logprobs
from engine.server.reasoning import ReasoningReader
from engine.server.response_template import DeclaredReaders
from engine.server.server_config import ServerConfig
from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolParser,
    settle,
)
from engine.server.tool_parsers.surrogates import SurrogateGate

__all__ = ["ChatPiece", "ChatRequest", "ChatService", "ChatStream"]

_MANY_LOGPROBS = 256  # number of tokens whose log-probabilities are written in another thread

AUTO = "auto"
"""Parser name that selects the parser matching the model's chat template."""


@dataclass(frozen=True)
class ChatRequest:
    """Conversation, rendered and tokenized for the engine.

    Attributes
    ----------
    request_id : str
    prompt : mapping
        "prompt" (the rendered text) and "prompt_token_ids".
    params : SamplingParams
    priority, cache_salt, timeout
        See `EngineClient.generate`.
    tool_parser : callable or None
        Factory that returns a new parser for each answer.
    reasoning_parser : callable or None
    shows_reasoning : bool
        Whether the answer includes the reasoning.
    adapter : LoRARequest or None
        The LoRA adapter that the request's model names.
    is_forced : bool
        Whether `tool_choice` names a function.
    one_call : bool
        Whether to drop all tool calls after an answer's first one that is not damaged.
    is_declared : bool
        Whether answers are read by the checkpoint's own format, which may take time.
    names : mapping of str to str
        See `own_names`.
    """

    request_id: str
    prompt: Mapping[str, Any]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    tool_parser: Callable[[], ToolParser] | None = None
    reasoning_parser: Callable[[], ReasoningReader] | None = None
    shows_reasoning: bool = True
    adapter: LoRARequest | None = None
    is_forced: bool = False
    one_call: bool = False
    is_declared: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ChatPiece:
    """Delta that one engine output adds to one answer.

    Attributes
    ----------
    index : int
        Index of the answer, below `n`.
    content, reasoning : str
        New text. Within a piece, reasoning precedes content, and content precedes calls.
    calls : sequence of Event
        Events from `engine.server.tool_parsers`, except `TextDelta`.
    logprobs : list of TokenLogprob or None
    finish_reason : str or None
        "stop", "length", "tool_calls" or "abort" in the last piece of an answer.
    stop_reason : int, str or None
    events : sequence of Event
        `content` and `calls` in text order; filled in only if the request has tools.
    token_ids : sequence of int
        New tokens; their text may be in a later piece, or in none.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: Sequence[Event] = ()
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    events: Sequence[Event] = ()
    token_ids: Sequence[int] = ()


class ChatService:
    """Prepares chat requests for one model.

    Parameters
    ----------
    client : EngineClient
    tool_parser, reasoning_parser : str or None
        Parser name, `AUTO`, or None to disable parsing.
    sampling_defaults : SamplingDefaults, optional
        If omitted, the model's.
    config : ServerConfig, optional
        Request limits, whether to log prompts, and whether control tokens in contents are read; by
        default the server's defaults.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        tool_parser: str | None = AUTO,
        reasoning_parser: str | None = AUTO,
        sampling_defaults: SamplingDefaults | None = None,
        config: ServerConfig | None = None,
    ) -> None:
        self.config = config or ServerConfig()
        self._allow_special = self.config.allow_special_in_content
        self.client = client
        template = getattr(client.tokenizer, "chat_template", None) or ""
        is_auto = tool_parser == reasoning_parser == AUTO
        if tool_parser == AUTO:
            tool_parser = tool_parsers.detect(template)
        elif tool_parser is not None:
            tool_parsers.get(tool_parser)
        if reasoning_parser == AUTO:
            reasoning_parser = reasoning.detect(template)
        elif reasoning_parser is not None:
            reasoning.get(reasoning_parser)
        self._declared = None
        if is_auto:
            declared = getattr(client.tokenizer, "response_format", None)
            self._declared = response_template.chosen(declared, tool_parser, reasoning_parser)
        if self._declared is not None:
            tool_parser = reasoning_parser = self._declared[0]
        special_ids = getattr(client.tokenizer, "special_ids", ())
        self._special_texts = frozenset(
            client.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in special_ids
        )
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.sampling_defaults = sampling_defaults or client.model_info.sampling_defaults

    async def prepare(self, body: ChatCompletionRequest, request_id: str) -> ChatRequest:
        """Render and tokenize a conversation in a worker thread.

        Raises
        ------
        APIError, RequestError, TemplateError
            If it cannot be served.
        """
        with renamed_params(own_names(body)):
            return await self._prepare(body, request_id)

    async def _prepare(self, body: ChatCompletionRequest, request_id: str) -> ChatRequest:
        check_fields(body, self.config)
        # Render first: if the template ignores tools, that error is the more useful one.
        prompt = await asyncio.to_thread(self.render, body)
        check_num_tokens(len(prompt["prompt_token_ids"]), "messages", self.client)
        continued = body.messages[-1].text if body.continue_final_message else ""
        readers = self._declared_readers(body, prompt["prompt"])
        name = self.reasoning_parser if readers is None else None
        is_thought = False
        text = continued
        if name is not None:
            is_thought, text = reasoning.last_text(name, continued)
        follows_text = not is_thought and bool(text.strip())
        uses = functools.partial(
            tool_use,
            body,
            self.tool_parser,
            name,
            follows_text=follows_text,
            declared=readers,
            allows_auto=self.config.enable_auto_tool_choice,
        )
        if readers is None:
            use = uses()
            forms = forms_of(name)
            opening = opening_of(name, prompt["prompt"], continued)
        else:
            use = await asyncio.to_thread(uses)  # asks the process that reads the format
            forms = readers.forms
            opening = readers.opening if use.calls is not None else "closed"
        structured = answer_structure(body, use, forms, opening)
        tools = use.make_parser
        overrides: dict[str, Any] = {"structured": structured}
        if readers is not None or self._has_special_markers(tools):
            overrides["skip_special_tokens"] = False
        params = chat_params(body, self.sampling_defaults, **overrides)
        num_tokens = len(prompt["prompt_token_ids"])
        params = check_answer(params, num_tokens, self.client, self.config)
        if self.config.log_prompts:
            log_prompt(request_id, prompt["prompt"])
        reader = self._reader(prompt["prompt"], continued, opening, use, structured, readers)
        return ChatRequest(
            request_id,
            prompt,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout=body.timeout,
            tool_parser=tools,
            reasoning_parser=reader,
            shows_reasoning=body.include_reasoning is not False,
            is_declared=readers is not None,
            adapter=self.client.adapter_of(body.model),
            is_forced=use.mode == "named",
            one_call=use.one_call,
            names=own_names(body),
        )

    def _declared_readers(self, body: ChatCompletionRequest, prompt: str) -> DeclaredReaders | None:
        """Return the readers of answers in the checkpoint's own format, if that is used."""
        if self._declared is None:
            return None
        tools = [] if body.tool_choice == "none" else body.tools or []
        names = {tool.function.name: tool.function.parameters or {} for tool in tools}
        return DeclaredReaders(self._declared, prompt, names)

    def _has_special_markers(self, tools: Callable[[], ToolParser] | None) -> bool:
        """Return whether a parser looks for a marker that is a special token."""
        markers = tools().markers if tools is not None else ()
        if self.reasoning_parser is not None:
            markers += reasoning.markers_of(self.reasoning_parser)
        return not self._special_texts.isdisjoint(markers)

    def _reader(
        self,
        prompt: str,
        continued: str,
        opening: Opening,
        use: ToolUse,
        structured: Mapping[str, Any] | None,
        readers: DeclaredReaders | None,
    ) -> Callable[[], ReasoningReader] | None:
        """Return a function that makes readers of the answers' reasoning."""
        if readers is not None:
            keeps_calls = use.make_parser is not None
            reader = functools.partial(readers.reasoning, keeps_calls=keeps_calls)
            return reader if structured is None or use.calls is not None else None
        name = self.reasoning_parser
        has_none = opening == "closed" and structured is not None and use.make_parser is None
        if name is None or has_none:
            return None
        # In a constrained answer nothing but the closing marker ends a block.
        tools = use.make_parser if structured is None or name == HARMONY else None
        return functools.partial(reasoning.get, name, prompt, tools, continued=continued)

    def render(self, body: ChatCompletionRequest) -> dict[str, Any]:
        """Return the text and token ids of a conversation; this takes milliseconds.

        Raises
        ------
        APIError, RequestError, TemplateError
            If the model has no template, or the template rejects the conversation.
        """
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise APIError(400, "the model has no tokenizer; give token ids to /v1/completions")
        messages = template_messages(body.messages)
        has_tools = bool(body.tools) and body.tool_choice != "none"
        tools = template_tools(body.tools or []) if has_tools else None
        variables = self._variables(body, has_tools)
        given = (body.chat_template_kwargs or {}).keys() & variables
        with renamed_params({name: f"chat_template_kwargs.{name}" for name in given}):
            prompt = tokenizer.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                tools=tools,
                allow_special_in_content=self._allow_special,
                **variables,
            )
        check_length(prompt.text, "messages", self.client)
        ids = tokenizer.encode_prompt(prompt, add_special_tokens=bool(body.add_special_tokens))
        return {"prompt": prompt.text, "prompt_token_ids": ids}

    def _variables(self, body: ChatCompletionRequest, has_tools: bool) -> dict[str, Any]:
        """Return the template's variables; raise if it does not read one that the request sets."""
        given = dict(body.chat_template_kwargs or {})
        fields = [name for name in ("reasoning_effort", "documents") if name not in given]
        for name in fields:
            if (value := getattr(body, name)) is not None:
                given[name] = value
        if given:
            known = self.client.tokenizer.template_variables(has_tools)
            given = {k: value for k, value in given.items() if k in known or value is not None}
            for name in given:
                if name not in known:
                    message = str(unknown_keyword("the chat template", name, known))
                    param = name if name in fields else "chat_template_kwargs"
                    raise APIError(400, message, param=param)
        return given


class ChatStream:
    """Answers to one request, as a stream.

    Parameters
    ----------
    client : EngineClient
    request : ChatRequest

    Attributes
    ----------
    prompt_token_ids : sequence of int
    num_prompt_tokens, num_cached_tokens, num_output_tokens : int
        Running totals over all answers.
    prompt_logprobs : sequence or None
        From the engine's first output.
    """

    def __init__(self, client: EngineClient, request: ChatRequest) -> None:
        self._client = client
        self._request = request
        self._num_top = request.params.logprobs
        self._answers = [_Answer(request) for _ in range(request.params.n)]
        is_plain = request.tool_parser is None and request.reasoning_parser is None
        self._is_plain = is_plain and self._num_top is None
        self.prompt_token_ids: Sequence[int] = request.prompt["prompt_token_ids"]
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.prompt_logprobs: Sequence[Any] | None = None

    async def pieces(self) -> AsyncGenerator[ChatPiece, None]:
        """Yield pieces until all answers are finished; closing the generator aborts the request.

        Raises
        ------
        RequestError, EngineError, APIError
            If the request cannot be served, or fails.
        """
        request = self._request
        outputs = self._client.generate(
            request.prompt,
            request.params,
            request_id=request.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout=request.timeout,
            lora_request=request.adapter,
        )
        with renamed_params(request.names):
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._note(output)
                    for completion in output.outputs:
                        if self._is_slow(completion):
                            pieces = await asyncio.to_thread(self._pieces, completion)
                        else:
                            pieces = self._pieces(completion)
                        for piece in pieces:
                            yield piece

    def _is_slow(self, completion: CompletionOutput) -> bool:
        """Return whether `_pieces` would hold other requests up."""
        num_logprobs = 0 if completion.logprobs is None else len(completion.logprobs)
        return self._request.is_declared or num_logprobs > _MANY_LOGPROBS

    def _note(self, output: RequestOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    def _pieces(self, completion: CompletionOutput) -> list[ChatPiece]:
        """Return the pieces of an output: one, unless it has the beginnings of messages."""
        index = completion.index
        reason = completion.finish_reason
        self.num_output_tokens += len(completion.token_ids)
        if self._is_plain and reason is None:
            return [ChatPiece(index, completion.text, token_ids=completion.token_ids)]
        if reason == "error":
            raise failed_request(completion.stop_reason)
        logprobs = None
        if self._num_top is not None and completion.logprobs is not None:
            tokenizer = self._client.tokenizer
            logprobs = chat_logprobs(
                completion.token_ids, completion.logprobs, self._num_top, tokenizer
            )
        answer = self._answers[index]
        *firsts, rest = answer.cut(completion.text)
        pieces = [self._piece(index, answer, text) for text in firsts]
        last = self._piece(index, answer, rest, is_last=reason is not None)
        if reason == "stop" and answer.has_calls and not self._request.is_forced:
            reason = "tool_calls"
        last.logprobs = logprobs
        last.finish_reason = reason
        last.stop_reason = completion.stop_reason
        last.token_ids = completion.token_ids
        return [*pieces, last]

    def _piece(self, index: int, answer: _Answer, text: str, *, is_last: bool = False) -> ChatPiece:
        thought, content, events = answer.feed(text, is_last=is_last)
        calls = [event for event in events if not isinstance(event, TextDelta)] if events else ()
        if not self._request.shows_reasoning:
            thought = ""
        return ChatPiece(index, content, thought, calls, events=events)


class _Answer:
    """Parser state of one answer."""

    def __init__(self, request: ChatRequest) -> None:
        self._tools = request.tool_parser() if request.tool_parser else None
        self._reasoning = request.reasoning_parser() if request.reasoning_parser else None
        self._arguments = SurrogateGate()
        self._one_call = request.one_call
        # With one_call, one call is kept: not always the first, as damaged ones before it become
        # text. A later call's events are held until it ends.
        self._kept_index = 0
        self._later: list[Event] = []
        self._tail = ""  # end of the text, where a header's end may have begun
        self.has_calls = False

    def cut(self, text: str) -> list[str]:
        """Cut text where reasoning may begin behind content, so that pieces keep their order."""
        mark = "" if self._reasoning is None else self._reasoning.ends_header
        if not mark:
            return [text]
        num_known = len(self._tail)
        *heads, rest = (self._tail + text).split(mark)
        self._tail = rest[1 - len(mark) :]
        if not heads:
            return [text]
        first, *others = [head + mark for head in heads]
        return [first[num_known:], *others, *([rest] if rest else [])]

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str, Sequence[Event]]:
        """Feed text; return the reasoning, content and tool events that are now final."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
            if is_last:
                more_thought, more = self._reasoning.finish()
                thought = thought + more_thought
                text = text + more
        if self._tools is None:
            return thought, text, ()
        events = self._tools.feed(text) if text else []
        if is_last:
            events = events + self._tools.finish()
        if not events:
            return thought, "", ()
        return thought, *self._split(events)

    def _split(self, events: Sequence[Event]) -> tuple[str, Sequence[Event]]:
        events = self._without_surrogates(events)
        if self._one_call:
            events = self._without_later_calls(events)
        is_whole = any(isinstance(e, ToolCallEnd) and e.is_complete for e in events)
        self.has_calls = self.has_calls or is_whole
        return "".join(e.text for e in events if isinstance(e, TextDelta)), events

    def _without_surrogates(self, events: Sequence[Event]) -> list[Event]:
        """Make the arguments of calls a text that UTF-8 can hold, once they are decoded."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallDelta):
                if text := self._arguments.push(event.arguments):
                    found.append(ToolCallDelta(event.index, text))
                continue
            if isinstance(event, ToolCallEnd) and (rest := self._arguments.finish()):
                found.append(ToolCallDelta(event.index, rest))
            found.append(event)
        return found

    def _without_later_calls(self, events: Sequence[Event]) -> list[Event]:
        """Drop the calls after the first one that is not damaged; damaged ones are text."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                found.append(event)
                continue
            is_later = event.index > self._kept_index
            (self._later if is_later else found).append(event)
            if not isinstance(event, ToolCallEnd):
                continue
            if event.is_damaged and is_later:
                found += settle(self._later)
            elif event.is_damaged:
                self._kept_index += 1
            self._later = []
        return found
