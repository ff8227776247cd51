"""`SamplingParams`: how to sample a request and when to end it, with vLLM's names and defaults.

`RANGES` is the only table of allowed values; server, command line and documentation read it too.
"""

from __future__ import annotations

import enum
import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checks import checked_text, items_of, shown, shown_with_type, token_ids_of
from engine.errors import RequestError
from engine.signatures import checks_keywords
from engine.structured.spec import StructuredOutput, structured_output_of

__all__ = [
    "GREEDY_EPSILON",
    "RANGES",
    "NumberRange",
    "RequestOutputKind",
    "SamplingDefaults",
    "SamplingParams",
]

GREEDY_EPSILON = 1e-5
"""Temperatures below this take the most probable token (dividing by them would overflow)."""

MAX_TOKENS = 2**31 - 1  # token positions are int32 on the device
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_IDS = 1024  # maximum entries of logit_bias, stop_token_ids
MAX_ALLOWED_IDS = 2**20  # maximum entries of allowed_token_ids; more than any vocabulary has
MAX_BAD_WORDS = 128
MAX_LOGITS_PROCESSORS = 16
_MOST_BREAKERS = (32, 64)  # maximum dry_sequence_breakers, and characters of each


class RequestOutputKind(enum.Enum):
    """Content of each `RequestOutput` of an unfinished request."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only the part since the last output
    FINAL_ONLY = 2  # nothing until the request has finished


@dataclass(frozen=True)
class NumberRange:
    """Range of numbers allowed for a field.

    Attributes
    ----------
    low, high : int or float
        Bounds of the range, inclusive unless `low_open`.
    integer : bool
        Whether only whole numbers are allowed.
    optional : bool
        Whether None is allowed too.
    low_open : bool
        Whether `low` itself is excluded.
    """

    low: float
    high: float
    integer: bool = False
    optional: bool = False
    low_open: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        end = ", or None" if self.optional else ""
        return f"{kind} in {'(' if self.low_open else '['}{self.low}, {self.high}]{end}"

    def check(self, name: str, value: Any) -> Any:
        """Return `value` as int or float (or None); raise a `RequestError` if out of range."""
        if value is None and self.optional:
            return None
        # The usual types first: `isinstance` with an abstract class takes longer than the rest.
        is_usual = type(value) is (int if self.integer else float)
        number = value if is_usual else self._number(value)
        # NaN fails every comparison, so test for being inside the range, not outside.
        above = number > self.low if self.low_open else number >= self.low
        if above and number <= self.high:
            return number
        raise RequestError(f"{name} must be {self}; got {shown_with_type(value)}")

    def _number(self, value: Any) -> Any:
        """Return `value` as int or float; NaN if it is not a number of that kind."""
        kind = numbers.Integral if self.integer else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return math.nan
        try:
            # Convert to Python numbers: NumPy integers would wrap in later arithmetic.
            given: Any = operator.index(value) if isinstance(value, numbers.Integral) else value
            return given if self.integer else float(given)
        except (TypeError, ValueError, OverflowError):
            return math.nan


# Smallest value of options whose effect at 0 is undefined: in float32 they would be 0, or make
# logits infinite.
_SMALLEST = 1e-6

RANGES: dict[str, NumberRange] = {
    "n": NumberRange(1, 16, integer=True),
    "best_of": NumberRange(1, 16, integer=True, optional=True),
    "presence_penalty": NumberRange(-2.0, 2.0),
    "frequency_penalty": NumberRange(-2.0, 2.0),
    "repetition_penalty": NumberRange(_SMALLEST, 100.0),
    "temperature": NumberRange(0.0, 100.0),
    "top_p": NumberRange(0.0, 1.0, low_open=True),
    "top_k": NumberRange(-1, 2**31 - 1, integer=True),
    "min_p": NumberRange(0.0, 1.0),
    "typical_p": NumberRange(_SMALLEST, 1.0),
    "top_n_sigma": NumberRange(0.0, 100.0),
    "xtc_probability": NumberRange(0.0, 1.0),
    "xtc_threshold": NumberRange(0.0, 1.0),
    "dry_multiplier": NumberRange(0.0, 100.0),
    "dry_base": NumberRange(1.0, 100.0),
    "dry_allowed_length": NumberRange(1, 1024, integer=True),
    "dry_penalty_last_n": NumberRange(-1, 2**31 - 1, integer=True),
    "seed": NumberRange(-(2**63), 2**63 - 1, integer=True, optional=True),
    "max_tokens": NumberRange(1, MAX_TOKENS, integer=True, optional=True),
    "min_tokens": NumberRange(0, MAX_TOKENS, integer=True),
    "logprobs": NumberRange(-1, 20, integer=True, optional=True),
    "prompt_logprobs": NumberRange(-1, 20, integer=True, optional=True),
}
"""Range of each numeric field of `SamplingParams`."""

_FLAGS = (
    *("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"),
    "use_speculation",
)
_BIAS = NumberRange(-100.0, 100.0)
_TOKEN_ID = NumberRange(0, 2**31 - 1, integer=True)
_ELSEWHERE = {  # keywords of vLLM, SGLang, transformers and OpenAI's API -> ours
    **dict.fromkeys(("json", "json_schema", "regex", "choice", "grammar"), "structured"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "structured"),
    **dict.fromkeys(("guided_grammar", "guided_decoding", "response_format"), "structured"),
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}


@functools.partial(checks_keywords, elsewhere=_ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request and when to end it; immutable, checked on construction.

    Attributes
    ----------
    n : int
        Number of independent continuations of the prompt.
    best_of : int or None
        Generate this many continuations and return the `n` with the largest `cumulative_logprob`,
        best first.
    presence_penalty, frequency_penalty : float
        Subtracted from the logits of tokens already generated: once, and per occurrence.
    repetition_penalty : float
        Divides positive and multiplies negative logits of tokens in prompt or output; 1: no effect.
    temperature : float
        Divides the logits; 0 (anything below `GREEDY_EPSILON`) takes the most probable token.
    top_p : float
        Keep the most probable tokens whose probabilities sum to `top_p`.
    top_k : int
        Keep the `top_k` most probable tokens; 0 or -1 keeps all.
    min_p : float
        Drop tokens less probable than `min_p` times the most probable one.
    typical_p : float
        Keep the tokens whose information is closest to the distribution's entropy, whose
        probabilities sum to `typical_p`. This and the next three apply after penalties and before
        `temperature`, and not to a temperature of 0.
    top_n_sigma : float
        Keep the tokens whose logit is within this many standard deviations of the largest; 0: all.
    xtc_probability, xtc_threshold : float
        With this probability drop, of the tokens at least `xtc_threshold` probable, all but the
        least probable.
    dry_multiplier, dry_base : float
        Subtract multiplier * base ** (n - allowed_length) from the logit of a token that would
        extend a repetition of n tokens of prompt and output; a multiplier of 0: off.
    dry_allowed_length : int
        Length of repetitions below which their next token is free.
    dry_penalty_last_n : int
        Number of last tokens in which to look for repetitions; -1: all.
    dry_sequence_breakers : sequence of str
        Texts that end repetitions; a token that contains one is never penalised.
    seed : int or None
        Seed for this request, of 64 bits; None (or -1) derives one from the engine's seed. Any
        other negative one is the seed that is 2**63 larger.
    stop : sequence of str
        Strings that end the request, or a single str. At most 16, of up to 256 characters each.
    stop_token_ids : sequence of int
        Token ids that end the request.
    ignore_eos : bool
        Continue past the model's end-of-sequence tokens.
    max_tokens : int or None
        Maximum tokens to generate; None generates up to `max_model_len`.
    min_tokens : int
        Number of tokens before end-of-sequence tokens or stops may end the request.
    logprobs, prompt_logprobs : int or None
        Number of most probable tokens to return log-probabilities for, besides the sampled one;
        0: only the sampled one, -1: the whole vocabulary, None: off.
    detokenize : bool
        Whether outputs include text.
    skip_special_tokens : bool
        Omit special tokens from the text.
    include_stop_str_in_output : bool
        Whether the text includes the stop string that ended it.
    output_kind : RequestOutputKind
        Content of each output of an unfinished request.
    logit_bias : mapping of int to float, optional
        Bias to add to the logits of these ids; each in [-100, 100].
    allowed_token_ids : sequence of int, optional
        The only ids that may be sampled. At most 2**20.
    bad_words : sequence of str
        Texts whose token sequences must never be generated.
    logits_processors : sequence of callable
        Called in this process as ``processor(output_token_ids, logits)``; never sent over HTTP.
    structured : StructuredOutput or mapping of its fields, optional
        Constraint on the text: a JSON schema, regular expression, choice or grammar. An
        end-of-sequence token can then be sampled only where the text may end; once nothing else is
        possible it is sampled, regardless of `ignore_eos` and `min_tokens`.
    use_speculation : bool
        Whether to propose drafts for this request, given the engine's `speculative_config`; affects
        only speed, and the rounding of logits.

    Raises
    ------
    RequestError
        If a field is out of range (see `RANGES`) or has the wrong type.
    UnknownOptionError
        If a keyword is not one of the above.

    Examples
    --------
    >>> SamplingParams(temperature=0.0, stop="###").stop
    ('###',)
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
    ...
    engine.errors.RequestError: top_p must be a number in (0.0, 1.0]; got 0.0
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured: StructuredOutput | Mapping[str, Any] | None = None
    use_speculation: bool = True

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            self._set(name, allowed.check(name, getattr(self, name)))
        self._check_flags()
        self._check_sequences()
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_flags(self) -> None:
        if self.seed == -1:
            self._set("seed", None)
        elif self.seed is not None:
            self._set("seed", self.seed & 2**63 - 1)  # The engine's seeds have 63 bits.
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be True or False; got {shown_with_type(value)}")
        if not isinstance(self.output_kind, RequestOutputKind):
            wanted = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise RequestError(
                f"output_kind must be one of {wanted}; got {shown_with_type(self.output_kind)}"
            )

    def _check_sequences(self) -> None:
        self._set("stop", _texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        self._set("bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_CHARS))
        breakers = _texts("dry_sequence_breakers", self.dry_sequence_breakers, *_MOST_BREAKERS)
        self._set("dry_sequence_breakers", breakers)
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", _ids("stop_token_ids", stop_ids, MAX_IDS))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
            if not allowed:
                raise RequestError("allowed_token_ids must not be empty; None allows every token")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))
        self._set("logits_processors", _processors(self.logits_processors))
        self._set("structured", structured_output_of(self.structured))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}); got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop is matched against text and needs detokenize; got False")
        for name, count in (("n", self.n), ("best_of", self.best_of or 1)):
            if self.greedy and count > 1:
                raise RequestError(
                    f"{name} must be 1 when temperature is 0 (all continuations are equal); "
                    f"got {count}"
                )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n ({self.n}); got {self.best_of}")
        is_ranked = self.best_of is not None and self.best_of > self.n
        if is_ranked and self.output_kind is RequestOutputKind.DELTA:
            raise RequestError("best_of > n cannot stream; got RequestOutputKind.DELTA")

    @property
    def num_continuations(self) -> int:
        """Number of continuations to generate."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        """Tell whether sampling always takes the most probable token."""
        return self.temperature < GREEDY_EPSILON

    def validate_for(self, vocab_size: int) -> None:
        """Check all token ids and log-probability counts against the vocabulary.

        Parameters
        ----------
        vocab_size : int
            V; ids must be in [0, V).

        Raises
        ------
        RequestError
            If an id is outside the vocabulary; the message names the field and the first such id.
        """
        groups = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self.logit_bias,
        }
        for name, ids in groups.items():
            if ids and max(ids) >= vocab_size:
                first = next(token_id for token_id in ids if token_id >= vocab_size)
                raise RequestError(
                    f"{name} must hold token ids in [0, {vocab_size}) (the vocabulary); got {first}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise RequestError(
                    f"{name} must be at most {vocab_size} (the vocabulary); got {count}"
                )


_WAYS_OF_SAMPLING = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of requests that leave them out.

    Attributes
    ----------
    values : dict
        Field of `SamplingParams` -> value.
    is_own : bool
        Whether the model's publisher recommends the values: each stands for the field that a
        request leaves out. Otherwise they are the engine's choice, for a request that says nothing
        of how to sample: one for temperature 1 alone must get the model's own distribution.

    Examples
    --------
    >>> mild = SamplingDefaults({"temperature": 0.7, "min_p": 0.05}, is_own=False)
    >>> mild.for_request({"max_tokens": 8})
    {'temperature': 0.7, 'min_p': 0.05}
    >>> mild.for_request({"temperature": 1.0})
    {}
    """

    values: dict[str, Any] = field(default_factory=dict)
    is_own: bool = True

    def params(self, **overrides: Any) -> SamplingParams:
        """Return all values as sampling parameters; `overrides` take precedence."""
        return SamplingParams(**(self.values | overrides))

    def for_request(self, given: Iterable[str]) -> dict[str, Any]:
        """Return the values for a request that has the fields `given`."""
        if self.is_own or _WAYS_OF_SAMPLING.isdisjoint(given):
            return dict(self.values)
        return {name: each for name, each in self.values.items() if name not in _WAYS_OF_SAMPLING}


def _texts(name: str, value: object, limit: int, max_chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else items_of(name, value, "str", limit)
    for i, text in enumerate(items):
        if not isinstance(text, str) or not 1 <= len(text) <= max_chars:
            given = f"{len(text)} characters" if isinstance(text, str) else shown_with_type(text)
            raise RequestError(
                f"{name}[{i}] must be a str of 1 to {max_chars} characters; got {given}"
            )
        checked_text(f"{name}[{i}]", text)
    return tuple(items)


def _ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    items = items_of(name, value, "token ids", limit)
    return tuple(token_ids_of(name, items, int(_TOKEN_ID.high) + 1, str(_TOKEN_ID)))


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers; got {shown_with_type(value)}"
        )
    entries = items_of("logit_bias", value.items(), "token ids and numbers", MAX_IDS)
    return {
        _TOKEN_ID.check(f"logit_bias[{shown(key)}]: the key", key): _BIAS.check(
            f"logit_bias[{shown(key)}]", bias
        )
        for key, bias in entries
    }


def _processors(value: object) -> tuple[Callable[..., Any], ...]:
    if value is None:
        return ()
    items = items_of("logits_processors", value, "callables", MAX_LOGITS_PROCESSORS)
    for i, item in enumerate(items):
        if not callable(item):
            raise RequestError(
                f"logits_processors[{i}] must be callable; got {shown_with_type(item)}"
            )
    return tuple(items)
