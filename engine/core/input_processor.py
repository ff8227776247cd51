"""Checks and converts user input (prompts, sampling parameters, bad words) into requests."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.checks import items_of, length_of, shown, shown_with_type, token_ids_of
from engine.errors import ContextLengthError, RequestError
from engine.loading.lora import LoraAdapter
from engine.model import Model
from engine.request import Request
from engine.runner.dry import DryRule
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import RANGES, NumberRange, SamplingParams
from engine.structured.grammar import Grammar, GrammarCompiler, GrammarState
from engine.structured.spec import StructuredOutput
from engine.text.continuation import ids_behind

__all__ = ["InputProcessor", "Prompt", "PromptInput"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids" (and "cache_salt")."""

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_PRIORITY = NumberRange(1 - 2**31, 2**31 - 1, integer=True)
# Sets seeds derived from a request's apart from those derived from the engine's: both may be 0.
_CONTINUATION = 1
_TIMEOUT = NumberRange(0, math.inf, optional=True, low_open=True)


@dataclass(frozen=True)
class PromptInput:
    """A checked prompt; `text` is None if the user passed token ids only."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class InputProcessor:
    """Checks and encodes prompts, and builds scheduler requests from them.

    Parameters
    ----------
    model : Model
    tokenizer : Tokenizer or None
    max_model_len : int
        Maximum length of a request in tokens, prompt plus output.
    seed : int
        Seed for requests that set none of their own.
    logits_processors : sequence of callable
        Applied to every request, before its own.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        *,
        max_model_len: int,
        seed: int = 0,
        logits_processors: Sequence[Any] = (),
    ) -> None:
        self._processors = tuple(logits_processors)
        self.tokenizer = tokenizer
        self._model = model
        self._vocab_size = model.config.vocab_size
        self._max_model_len = max_model_len
        self._seed = seed
        self._counter = itertools.count()
        self._grammars: GrammarCompiler | None = None  # built on first use
        self._grammars_lock = threading.Lock()

    def encode(self, prompt: Prompt, cache_salt: str | None = None) -> PromptInput:
        """Return the prompt's text (if any), token ids and salt; `cache_salt` overrides its salt.

        Raises
        ------
        RequestError
            If `prompt` is not a valid prompt, contains an id outside the vocabulary, or is longer
            than `max_model_len` tokens.
        """
        text = None
        salt = _checked_salt(cache_salt)
        content = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _KEYS
            if unknown or not ({"prompt", "prompt_token_ids"} & set(prompt)):
                raise RequestError(
                    'prompt, as a mapping, must have "prompt" or "prompt_token_ids", and may have '
                    f'"cache_salt"; got {shown_with_type(list(prompt))}'
                )
            text = prompt.get("prompt")
            own_salt = _checked_salt(prompt.get("cache_salt"))
            salt = own_salt if salt is None else salt
            content = prompt.get("prompt_token_ids", text)
            if text is not None and not isinstance(text, str):
                raise RequestError(f'prompt["prompt"] must be a str; got {shown_with_type(text)}')
        if isinstance(content, str):
            return PromptInput(content, self._checked_ids(self._encode_text(content)), salt)
        return PromptInput(text, self._checked_ids(content), salt)

    def check(
        self, request_id: str, params: SamplingParams, priority: int, timeout: float | None
    ) -> tuple[int, float | None]:
        """Check the arguments that accompany a prompt.

        Returns
        -------
        tuple
            `priority` as Python's int and `timeout` as a float.

        Raises
        ------
        RequestError
            If an argument has the wrong type, or if `params` names token ids outside the
            vocabulary or needs a tokenizer that the model lacks.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str; got {shown_with_type(request_id)}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be a SamplingParams; got {type(params).__name__}")
        priority = _PRIORITY.check("priority", priority)
        timeout = _TIMEOUT.check("timeout", timeout)
        params.validate_for(self._vocab_size)
        for name in ("stop", "bad_words", "structured"):
            value = getattr(params, name)
            if value and self.tokenizer is None:
                raise RequestError(f"{name} needs a model with a tokenizer; got {shown(value)}")
        return priority, timeout

    def sampling_specs(self, params: SamplingParams) -> list[SamplingSpec]:
        """Return the sampling spec of each continuation.

        Continuations differ only in seed: the first uses the request's own seed, or one derived
        from the engine's seed and the request's number; the others derive theirs from the first
        seed and their index. With a grammar, each starts in its own initial state.

        Raises
        ------
        RequestError
            If `params.structured` cannot be compiled.
        """
        states = self._grammar_states(params)
        if self._processors:
            own = params.logits_processors or ()
            params = replace(params, logits_processors=(*self._processors, *own))
        seed = params.seed
        if seed is None:
            seed = _derived_seed(self._seed, next(self._counter))
        is_ranked = params.num_continuations > params.n
        num_logprobs = 0 if params.logprobs is None and is_ranked else params.logprobs
        bad_words = self._bad_words(params)
        dry = self._dry(params)
        return [
            SamplingSpec(
                params,
                seed if index == 0 else _derived_seed(seed, index, _CONTINUATION),
                bad_words,
                num_logprobs,
                state,
                dry,
            )
            for index, state in enumerate(states)
        ]

    def requests(
        self,
        request_id: str,
        token_ids: list[int],
        specs: Sequence[SamplingSpec],
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: LoraAdapter | None = None,
    ) -> list[Request]:
        """Return one scheduler request per spec; all share one list of prompt ids.

        The first carries the user's id, the others "<id>#1", "<id>#2" and so on.

        Raises
        ------
        ContextLengthError
            If the prompt leaves no room for an answer.
        """
        if len(token_ids) >= self._max_model_len:
            raise ContextLengthError.of("prompt", len(token_ids), self._max_model_len)
        params = specs[0].params
        return [
            Request(
                f"{request_id}#{index}" if index else request_id,
                token_ids,
                params,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
                short_rope_len=self._model.short_rope_len,
                reuse_prefix=params.prompt_logprobs is None,
                eos_token_ids=self._model.eos_token_ids,
                always_ends_at_eos=spec.grammar is not None,
                spec=spec,
            )
            for index, spec in enumerate(specs)
        ]

    def _encode_text(self, text: str) -> list[int]:
        """Tokenize `text`; reject it up front if it could not fit even with the longest tokens."""
        if self.tokenizer is None:
            raise RequestError("prompt must be token ids, as the model has no tokenizer; got text")
        limit = self._max_model_len * self.tokenizer.max_token_chars
        if len(text) > limit:
            least = -(-len(text) // self.tokenizer.max_token_chars)
            raise ContextLengthError.of("prompt", least, self._max_model_len, is_estimate=True)
        return list(self.tokenizer.encode(text))

    def _checked_ids(self, ids: Any) -> list[int]:
        # A set is unordered, and a 0-d array cannot be iterated over.
        is_no_list = isinstance(ids, str | bytes | bytearray | set | frozenset | Mapping)
        if is_no_list or not hasattr(ids, "__iter__") or getattr(ids, "ndim", 1) != 1:
            raise RequestError(f"prompt must be text or token ids; got {type(ids).__name__}")
        limit = self._max_model_len
        is_iterator = not hasattr(ids, "__len__")  # possibly endless
        if is_iterator:
            ids = list(itertools.islice(ids, limit + 1))
        count = length_of(ids)
        if count is not None and count > limit:
            raise ContextLengthError.of("prompt", count, limit, is_estimate=is_iterator)
        items = items_of("prompt", ids, "token ids", limit)
        return self._in_vocabulary("prompt", items)

    def check_resumed(self, resumed: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Return the tokens that another engine has generated; see `LLMEngine.add_request`.

        Raises
        ------
        RequestError
            If they are no sequences of token ids, or one is outside the vocabulary.
        """
        items = items_of("resumed", resumed, "continuations", int(RANGES["n"].high))
        return [
            None if ids is None else self._resumed_ids(f"resumed[{index}]", ids)
            for index, ids in enumerate(items)
        ]

    def _resumed_ids(self, name: str, ids: Any) -> list[int]:
        return self._in_vocabulary(name, items_of(name, ids, "token ids", self._max_model_len))

    def _in_vocabulary(self, name: str, items: list[Any]) -> list[int]:
        wanted = f"a token id, a whole number in [0, {self._vocab_size})"
        return token_ids_of(name, items, self._vocab_size, wanted)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the compiled grammar of `params`, or None; callable from any thread.

        Raises
        ------
        RequestError
            If the grammar cannot be compiled.
        """
        if params.structured is None or self.tokenizer is None:
            return None
        assert isinstance(params.structured, StructuredOutput)
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(
                    self.tokenizer, self._vocab_size, self._model.eos_token_ids
                )
        return self._grammars.compile(params.structured)

    def _grammar_states(self, params: SamplingParams) -> list[GrammarState | None]:
        """Return each continuation's initial grammar state; None without a grammar."""
        grammar = self.grammar(params)
        count = params.num_continuations
        return [None if grammar is None else grammar.new_state() for _ in range(count)]

    def _dry(self, params: SamplingParams) -> DryRule | None:
        """Return the rule of `params` on repetitions; None if it is off."""
        if not params.dry_multiplier:
            return None
        breakers = tuple(params.dry_sequence_breakers)

        @functools.lru_cache(maxsize=1 << 16)
        def is_breaker(token: int) -> bool:
            if self.tokenizer is None:
                return False
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            return any(breaker in text for breaker in breakers)

        return DryRule(
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_penalty_last_n,
            is_breaker,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return token ids for each bad word: at the start of a text, and after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            stem = word.lstrip() or word  # a word may be whitespace alone
            for text in (stem, " " + stem):
                own = self.tokenizer.encode(text, add_special_tokens=False)
                behind = ids_behind(self.tokenizer, text, self._spelled)
                words |= {tuple(ids): None for ids in (own, behind) if ids}
        # The model cannot draw words with ids beyond its vocabulary, which a tokenizer may have.
        return tuple(ids for ids in words if max(ids) < self._vocab_size)

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.tokenizer.token_bytes, ids))


def _checked_salt(salt: Any) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a non-empty str, or None; got {shown_with_type(salt)}"
        )
    return salt


def _derived_seed(*numbers: int) -> int:
    """Derive a seed in [0, 2**63), the range users may pass, from `numbers`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
