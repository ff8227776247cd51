"""Compiled grammars, and the state of each request in its grammar."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import RequestError
from engine.structured.check_worker import check
from engine.structured.prefixes import MaskStore, Prefix, PrefixTree
from engine.structured.sources import compile_matcher, library, reason, source_of
from engine.structured.spec import StructuredOutput

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "check_structured"]

_MAX_CACHED = 128  # grammars
_MAX_CACHED_CHARS = 16 << 20
_NUM_MATCHERS = min(os.cpu_count() or 1, 16)  # most matchers of one grammar
_MAX_SECONDS = 0.05  # total compile time after which a grammar gets no further matcher

# Slices of the vocabulary: llguidance allows all tokens that match a slice's regex at once if the
# grammar accepts every such text. Its defaults have 10 and 30 characters: with fewer left by
# `maxLength` it would check each token alone, which takes 20 times as long.
_CHARS_OF_SLICES = (3, 6, 10, 15, 20, 30)
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *[f"{_IN_STRINGS}{{1,{count}}}" for count in _CHARS_OF_SLICES],
    f"{_IN_STRINGS}+",
]


@functools.lru_cache(maxsize=_MAX_CACHED)
def check_structured(structured: StructuredOutput) -> None:
    """Raise what `GrammarCompiler.compile` would, without a vocabulary; any thread may call it.

    Raises
    ------
    RequestError
        If it cannot be compiled, or llguidance is not installed.
    """
    library()
    _refuse_if(check(*source_of(structured)), structured)


def _refuse_if(why: str, structured: StructuredOutput) -> None:
    if why:
        raise RequestError(f"structured: {structured.kind} cannot be compiled: {why}")


class GrammarCompiler:
    """Compiles the grammars of requests for one vocabulary, and caches them.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        V of the model, which may be larger than the tokenizer's.
    eos_token_ids : sequence of int
        The ids that a complete text can end with; at least one.

    Raises
    ------
    RequestError
        If llguidance is not installed, or `eos_token_ids` is empty.

    Examples
    --------
    ::

        compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        state = compiler.compile(StructuredOutput(choice=["yes", "no"])).new_state()
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._module = library()
        if not eos_token_ids:
            raise RequestError("structured output needs a model with an end-of-sequence token")
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = self._module.LLTokenizer(
            vocabulary, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=_SLICES
        )
        self._masks = MaskStore()
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the grammar of `structured`.

        Raises
        ------
        RequestError
            If it cannot be compiled; the message ends with llguidance's reason.
        """
        source = source_of(structured)
        with self._lock:
            if source in self._cache:
                self._cache.move_to_end(source)
                return self._cache[source]
        grammar = self._compile(structured, *source)
        with self._lock:
            self._cache[source] = grammar
            while len(self._cache) > _MAX_CACHED or self._num_chars() > _MAX_CACHED_CHARS:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, structured: StructuredOutput, kind: str, text: str) -> Grammar:
        _refuse_if(check(kind, text), structured)
        make = functools.partial(compile_matcher, self._module, self._tokenizer, kind, text)
        grammar = Grammar(make, self._masks)
        _refuse_if(grammar.error, structured)
        return grammar

    def _num_chars(self) -> int:
        return sum(len(text) for _, text in self._cache)


class Grammar:
    """A compiled grammar, shared by the requests that ask for it.

    Copies of a matcher share its lexer behind a lock, so their masks are computed one after
    another. A grammar therefore has several matchers, assigned to requests in turn; each is
    compiled when it is first needed, if compiling is fast (`_MAX_SECONDS`).

    Parameters
    ----------
    compile_one : callable
        Returns a new matcher.
    masks : MaskStore
        Shared by all grammars of this vocabulary.

    Attributes
    ----------
    error : str
        Why it cannot be used; "" if it can.
    """

    def __init__(self, compile_one: Callable[[], Any], masks: MaskStore) -> None:
        self._compile_one = compile_one
        self._masks = masks
        self._tree = PrefixTree()
        self._seconds = 0.0
        self._matchers = [self._new_matcher()]
        self._next = 0
        self.error = reason(self._matchers[0])

    def new_state(self) -> GrammarState:
        """Return the state of a request that has no output yet."""
        index = self._next % _NUM_MATCHERS
        self._next += 1
        if index == len(self._matchers) and self._seconds < _MAX_SECONDS:
            self._matchers.append(self._new_matcher())
        index %= len(self._matchers)
        return GrammarState(self._matchers[index].deep_copy(), self._tree, self._masks, index)

    def _new_matcher(self) -> Any:
        start = time.perf_counter()
        matcher = self._compile_one()
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies inherit the lexer states it computes
        self._seconds += time.perf_counter() - start
        return matcher


class GrammarState:
    """The position of one request's output in its grammar.

    The state follows the committed output ids and nothing else: a step that is rolled back or
    repeated, or a preemption, does not change it. The matcher consumes the ids late, when a mask
    has to be computed: a mask stored for another request with the same output needs no matcher.

    Attributes
    ----------
    matcher : llguidance.LLMatcher
        It has consumed the output up to the ids in `unread`.
    masks : MaskStore
    group : int
        Index of the matcher: states of one grammar in different groups can run in parallel.
    prefix : Prefix or None
        The output, if another request of the grammar may have the same one.
    num_followed : int
        Number of output ids followed so far.
    unread : list of int
        The last of these ids, which the matcher has not consumed yet.
    error : str
        Why no further mask can be computed; "" while no failure is known.
    """

    __slots__ = (
        "_tree", "error", "group", "masks", "matcher", "num_followed", "prefix", "unread"
    )  # fmt: skip

    def __init__(self, matcher: Any, tree: PrefixTree, masks: MaskStore, group: int = 0) -> None:
        self.matcher = matcher
        self.masks = masks
        self.group = group
        self.error = ""
        self.prefix: Prefix | None = tree.start()
        self.num_followed = 0
        self.unread: list[int] = []
        self._tree = tree

    def follow(self, output_ids: Sequence[int]) -> None:
        """Advance to the end of `output_ids`, which continue those of the last call."""
        new = output_ids[self.num_followed :]
        self.num_followed += len(new)
        self.unread += new
        if self.prefix is not None:
            for token_id in new:
                self.prefix = self._tree.after(self.prefix, token_id)
                if self.prefix is None:
                    break

    def catch_up(self) -> None:
        """Let the matcher consume the unread ids; set `error` if the grammar forbids one."""
        if self.unread:
            unread = self.unread
            self.unread = []
            if not self.error and not all(map(self.matcher.consume_token, unread)):
                self.note_error()

    def forced_tokens(self, limit: int) -> list[int]:
        """Return up to `limit` ids that the grammar forces; empty if it leaves a choice.

        They are the forced text as the tokenizer encodes it, without the last tokens that the text
        after it could change. The mask before each of them allows no other token.
        """
        self.catch_up()
        if self.error:
            return []
        ids: list[int] = self.matcher.compute_ff_tokens()
        return ids[:limit]

    def note_error(self) -> None:
        """Set `error` if the matcher has failed: at a limit, or at a forbidden token."""
        if not self.error and (why := reason(self.matcher)):
            self.error = f"structured output: {why}"


class _Vocabulary:
    """Adapter from the engine's tokenizer to the interface that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        special = {*tokenizer.special_ids, *eos_token_ids}
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False)
        return ids
