"""Request outputs: `RequestOutput` and its parts, under vLLM's names.

Times are seconds of the monotonic clock (`time.monotonic`): only differences are meaningful, and
changes of the wall clock cannot make them negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "next_piece",
]

_new = object.__new__


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token.

    Attributes
    ----------
    logprob : float
        Natural logarithm of the token's probability.
    rank : int or None
        1 for the most probable token of the vocabulary; None if not computed.
    decoded_token : str or None
        Text of the token; None if outputs have no text, or the tokenizer raised for this token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)  # not frozen: many are built per step
class CompletionOutput:
    """One continuation of a prompt.

    Attributes
    ----------
    index : int
        Index among the request's `n` continuations.
    text : str
        The whole text, or only its new part (`SamplingParams.output_kind`).
    token_ids : sequence of int
        All tokens, or only the new ones.
    cumulative_logprob : float or None
        Sum of the log-probabilities of all tokens; None unless `logprobs` is set. Of a request that
        another engine began (`LLMEngine.add_request`, `resumed`), the sum covers only the tokens
        generated here: nothing else is known of the others.
    logprobs : sequence of dict from int to Logprob, or None
        Per token in `token_ids`: the sampled token and the most probable ones; {} for a token that
        another engine generated.
    finish_reason : str or None
        "stop", "length", "abort" or "error"; None while unfinished.
    stop_reason : int, str or None
        Stop id or stop string that ended it; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Tell whether the continuation is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When a request reached each stage, in seconds of `time.monotonic`; None if not reached yet.

    Attributes
    ----------
    arrival_time : float
        The request was added.
    first_scheduled_time : float or None
        The first step that computes a part of its prompt was scheduled; for a child that shares
        its parent's blocks at once (`add_request(parent=...)`), it was added.
    first_token_time, last_token_time : float or None
        The first and the newest token were committed.
    finished_time : float or None
        Its last continuation finished.
    num_generation_tokens : int
        Tokens generated so far, over all continuations; without those that another engine
        generated (`add_request(resumed=...)`).
    num_cached_tokens : int
        Prompt tokens found in the prefix cache.
    num_continuations : int
        Number of continuations.

    Examples
    --------
    >>> metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.5)
    >>> metrics.queue_time, metrics.ttft
    (0.5, None)
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_continuations: int = 1

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed part of the prompt."""
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first scheduled step to the first token."""
        return _span(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        return _span(self.first_token_time, self.finished_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival to the first token."""
        return _span(self.arrival_time, self.first_token_time)

    @property
    def itl(self) -> float | None:
        """Mean inter-token latency: seconds between successive tokens of a continuation."""
        span = _span(self.first_token_time, self.last_token_time)
        gaps = self.num_generation_tokens - self.num_continuations
        return None if span is None or gaps < 1 else span * self.num_continuations / gaps

    @property
    def e2e_time(self) -> float | None:
        """Seconds from arrival to the end."""
        return _span(self.arrival_time, self.finished_time)


@dataclass(slots=True)
class RequestOutput:
    """State of one request after a step.

    Attributes
    ----------
    request_id : str
    prompt : str or None
        Text of the prompt, if it was given as text.
    prompt_token_ids : sequence of int
        The engine's own list: do not modify it while the request is unfinished.
    prompt_logprobs : sequence of (dict from int to Logprob, or None), or None
        Per prompt token, if requested; the first entry is None, since nothing precedes it.
    outputs : sequence of CompletionOutput
        One per continuation, by index.
    finished : bool
        Whether every continuation is finished.
    metrics : RequestMetrics or None
    num_cached_tokens : int
        Prompt tokens whose keys and values were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    num_cached_tokens: int = 0


def next_piece(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    text: str,
    token_ids: Sequence[int],
    metrics: RequestMetrics,
    num_cached_tokens: int,
) -> RequestOutput:
    """Return the output of one unfinished continuation, with token ids and text only.

    Equivalent to calling both constructors, which would take half of a step's time with hundreds of
    streaming requests.

    Examples
    --------
    >>> output = next_piece("r0", None, [5, 6], "word", [7], RequestMetrics(0.0), 0)
    >>> output == RequestOutput("r0", None, [5, 6], [CompletionOutput(0, "word", [7])], False)
    True
    """
    completion = _new(CompletionOutput)
    completion.index = 0
    completion.text = text
    completion.token_ids = token_ids
    completion.cumulative_logprob = completion.logprobs = None
    completion.finish_reason = completion.stop_reason = None
    output = _new(RequestOutput)
    output.request_id = request_id
    output.prompt = prompt
    output.prompt_token_ids = prompt_token_ids
    output.outputs = [completion]
    output.finished = False
    output.prompt_logprobs = None
    output.metrics = metrics
    output.num_cached_tokens = num_cached_tokens
    return output


def _span(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start


@dataclass(frozen=True)
class ScoringOutput:
    """Score of a pair of texts: a cosine, a probability, or what the model's head returns."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """Answer to one pair of `LLM.score`.

    Attributes
    ----------
    outputs : ScoringOutput
    prompt_token_ids : list of int
        Tokens of the pair, or those of both texts.
    """

    outputs: ScoringOutput
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class ClassificationOutput:
    """Scores of the labels of a text.

    Attributes
    ----------
    probs : list of float
        Per label: a probability, or the logit of a regression.
    label : str
        Name of the label with the highest score.
    """

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """Answer to one prompt of `LLM.classify`."""

    outputs: ClassificationOutput
    prompt_token_ids: list[int]
