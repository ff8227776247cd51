"""Compiled grammars, and each request's state in its grammar."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import RequestError
from engine.structured.check_worker import check
from engine.structured.prefixes import MaskStore, Prefix, PrefixTree
from engine.structured.sources import (
    compile_matcher,
    library,
    on_deep_stack,
    reason,
    source_of,
)
from engine.structured.spec import StructuredOutput
from engine.text.continuation import ids_behind

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "check_structured", "failure"]

_LOG = logging.getLogger("engine")

_MAX_CACHED = 128  # maximum grammars in the cache
_MAX_CACHED_CHARS = 16 << 20
_NUM_MATCHERS = min(os.cpu_count() or 1, 16)  # maximum matchers per grammar
_MAX_SECONDS = 0.05  # total compile seconds after which a grammar gets no further matchers

# Slices of the vocabulary: if the grammar accepts every text that matches a slice's regex,
# llguidance allows all the slice's tokens at once. Its defaults are 10 and 30 characters; when
# `maxLength` leaves fewer, it would check each token individually, 20 times as slow.
_CHARS_OF_SLICES = (3, 6, 10, 15, 20, 30)
# Without line separators too: "." of a pattern matches all the others.
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F\u{2028}\u{2029}]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *[f"{_IN_STRINGS}{{1,{count}}}" for count in _CHARS_OF_SLICES],
    f"{_IN_STRINGS}+",
]


@functools.lru_cache(maxsize=_MAX_CACHED)
def check_structured(structured: StructuredOutput) -> None:
    """Raise as `GrammarCompiler.compile` would, but without a vocabulary; callable from any thread.

    Raises
    ------
    RequestError
        If the grammar does not compile, or llguidance is not installed.
    """
    library()
    _checked(structured, *source_of(structured))


def _checked(structured: StructuredOutput, kind: str, text: str) -> str:
    """Return the text to compile; log what it does not enforce."""
    found = check(kind, text)
    _refuse_if(found.why, structured)
    for warning in found.warnings:
        _LOG.warning("structured: %s: %s", structured.kind, warning)
    return found.text


def _refuse_if(why: str, structured: StructuredOutput) -> None:
    if why:
        raise RequestError(f"structured: {structured.kind} cannot be compiled: {why}")


class GrammarCompiler:
    """Compiles and caches requests' grammars for one vocabulary.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        The model's V, which may exceed the tokenizer's.
    eos_token_ids : sequence of int
        Ids that may end a complete text; at least one.

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
        self._special_ids = vocabulary.special_ids()
        self._masks = MaskStore()
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the grammar of `structured`.

        Raises
        ------
        RequestError
            If the grammar does not compile; the message ends with llguidance's reason.
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
        ours = _checked(structured, kind, text)
        make = functools.partial(
            compile_matcher, self._module, self._tokenizer, kind, ours, self._special_ids
        )
        grammar = Grammar(make, self._masks, len(ours))
        _refuse_if(grammar.error, structured)
        return grammar

    def _num_chars(self) -> int:
        return sum(len(text) + found.num_chars for (_, text), found in self._cache.items())


class Grammar:
    """A compiled grammar, shared by the requests that use it.

    Copies of a matcher share its lexer behind a lock, so their masks are computed one after
    another. A grammar therefore has several matchers, assigned to requests round-robin; each is
    compiled when first needed, provided compilation is fast (`_MAX_SECONDS`).

    Parameters
    ----------
    compile_one : callable
        Returns a new matcher.
    masks : MaskStore
        Shared by all grammars of the vocabulary.
    num_chars : int
        Characters of what `compile_one` compiles.

    Attributes
    ----------
    num_chars : int
    error : str
        Why the grammar is unusable; "" if it is usable.
    """

    def __init__(self, compile_one: Callable[[], Any], masks: MaskStore, num_chars: int) -> None:
        self.num_chars = num_chars
        self._compile_one = compile_one
        self._masks = masks
        self._tree = PrefixTree()
        self._seconds = 0.0
        self._matchers = [self._new_matcher()]
        self._next = 0
        self.error = reason(self._matchers[0])

    def new_state(self) -> GrammarState:
        """Return the initial state, for a request without output."""
        index = self._next % _NUM_MATCHERS
        self._next += 1
        if index == len(self._matchers) and self._seconds < _MAX_SECONDS:
            self._matchers.append(self._new_matcher())
        index %= len(self._matchers)
        return GrammarState(self._matchers[index], self._tree, self._masks, index)

    def _new_matcher(self) -> Any:
        start = time.perf_counter()
        matcher = on_deep_stack(self._compile_one)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies inherit the lexer states this computes
        self._seconds += time.perf_counter() - start
        return matcher


class GrammarState:
    """How far one request's output has advanced in its grammar.

    The state depends on the committed output ids and nothing else: rollbacks, repeated steps,
    preemptions and drafts do not change it. The matcher consumes ids lazily, only when a mask must
    be computed: a mask already stored for another request with the same output needs no matcher.

    Parameters
    ----------
    start : llguidance.LLMatcher
        Matcher of an empty output; a copy of it is used.
    tree : PrefixTree
    masks : MaskStore
    group : int

    Attributes
    ----------
    matcher : llguidance.LLMatcher
        Has consumed the output except the ids in `unread`.
    masks : MaskStore
    group : int
        Index of the matcher: states of one grammar in different groups can be computed in parallel.
    prefix : Prefix or None
        Node for the output so far; None if no other request of the grammar shares it.
    num_followed : int
        Number of output ids followed so far.
    unread : list of int
        The last of these ids, not yet consumed by the matcher.
    error : str
        Why no further mask can be computed; "" while nothing has failed.
    """

    __slots__ = (
        "_output_ids", "_start", "_tree", "error", "group", "masks", "matcher", "num_followed",
        "prefix", "unread",
    )  # fmt: skip

    def __init__(self, start: Any, tree: PrefixTree, masks: MaskStore, group: int) -> None:
        self.matcher = start.deep_copy()
        self.masks = masks
        self.group = group
        self.error = ""
        self.prefix: Prefix | None = tree.start()
        self.num_followed = 0
        self.unread: list[int] = []
        self._start = start
        self._tree = tree
        self._output_ids: Sequence[int] = ()  # the caller's list, of at least `num_followed` ids

    def follow(self, output_ids: Sequence[int]) -> None:
        """Advance to the end of `output_ids`, which extend those of the previous call."""
        new = output_ids[self.num_followed :]
        self.num_followed += len(new)
        self.unread += new
        self._output_ids = output_ids
        if self.prefix is not None:
            for token_id in new:
                self.prefix = self._tree.after(self.prefix, token_id)
                if self.prefix is None:
                    break

    def catch_up(self) -> None:
        """Have the matcher consume the unread ids; set `error` if the grammar forbids one."""
        if self.unread:
            unread = self.unread
            self.unread = []
            if not self.error and not all(map(self.matcher.consume_token, unread)):
                self.note_error()

    def restart(self) -> None:
        """Replace a matcher that failed behind a draft by a new one, yet to read the output."""
        self.matcher = self._start.deep_copy()
        self.unread = list(self._output_ids[: self.num_followed])

    def forced_tokens(self, limit: int) -> list[int]:
        """Return up to `limit` ids that the grammar forces; empty if it leaves a choice.

        These are the tokens of the forced text, minus trailing ones that could change with the text
        after it. The mask before each allows no other token.
        """
        self.catch_up()
        if self.error:
            return []
        ids: list[int] = self.matcher.compute_ff_tokens()
        return ids[:limit]

    def note_error(self) -> None:
        """Set `error` if the matcher has failed, at a limit or a forbidden token."""
        self.error = self.error or failure(self.matcher)


def failure(matcher: Any) -> str:
    """Return the error of a request whose matcher has failed; "" if it has not."""
    why = reason(matcher)
    return f"structured output: {why}" if why else ""


class _Vocabulary:
    """Adapts the engine's tokenizer to the interface llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        special = {*tokenizer.special_ids, *eos_token_ids}
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self._tokenizer = tokenizer
        ordinary = enumerate(self.tokens)
        self._ordinary = {i: text for i, text in ordinary if text and i not in special}

    def special_ids(self) -> dict[str, int]:
        """Return the special tokens by their text."""
        texts = ((i, self.tokens[i].decode("utf-8", "replace")) for i in self.special_token_ids)
        return {text: i for i, text in texts if text}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that the grammar forces behind other text.

        They are the tokenizer's, unless it reads the name of a special token as that token. No
        tokens would mean that no text matches: a tokenizer without tokens for the text's beginning
        returns what it has.
        """
        ids = ids_behind(self._tokenizer, text, self._spelled)
        if ids is None:
            ids = self._longest_tokens(text.encode())
        return ids or list(self._tokenizer.encode(text, add_special_tokens=False))

    def _spelled(self, ids: Sequence[int]) -> bytes | None:
        """Return the text of `ids`; None if one is special or has no text."""
        if not self._ordinary.keys() >= set(ids):
            return None
        return b"".join(self._ordinary[i] for i in ids)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Return the longest ordinary tokens, one after the other, until none follows."""
        ids = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            found = next((end for end in ends if data[start:end] in self._ids), None)
            if found is None:
                break
            ids.append(self._ids[data[start:found]])
            start = found
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ordinary tokens by their text."""
        return {text: i for i, text in self._ordinary.items()}

    @functools.cached_property
    def _longest(self) -> int:
        """Bytes of the longest ordinary token."""
        return max(map(len, self._ids), default=0)
