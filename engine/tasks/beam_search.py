"""Beam search: extend the most probable continuations of a prompt in parallel.

Each beam is an engine request. A beam extended by its own most probable token keeps its request;
every other child is a fork that shares the parent's blocks (`add_request(parent=)`); a beam without
children is aborted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checks import shown
from engine.errors import RequestError
from engine.llm_engine import LLMEngine, Prompt
from engine.outputs import Logprob, RequestOutput
from engine.sampling_params import NumberRange, RequestOutputKind, SamplingParams
from engine.signatures import checks_keywords
from engine.text.detokenizer import IncrementalDetokenizer

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]

_RANGES = {
    "beam_width": NumberRange(1, 10, integer=True),
    "max_tokens": NumberRange(1, 2**31 - 1, integer=True),
    "length_penalty": NumberRange(-10.0, 10.0),
}


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes
    ----------
    beam_width : int
        Beams kept per step, and sequences returned.
    max_tokens : int
        Maximum number of tokens per sequence.
    length_penalty : float
        A sequence of n generated tokens (end of sequence not counted) is scored by its cumulative
        log-probability divided by ``n ** length_penalty``; values above 0 favour long sequences.
    ignore_eos : bool
        Treat the model's end-of-sequence tokens as ordinary tokens.

    Raises
    ------
    RequestError
        If a value is out of range.
    UnknownOptionError
        If a keyword is not one of the above.

    Examples
    --------
    >>> BeamSearchParams(beam_width=4, max_tokens=8).length_penalty
    1.0
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            object.__setattr__(self, name, allowed.check(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False; got {shown(self.ignore_eos)}")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence found by the search.

    Attributes
    ----------
    token_ids : tuple of int
        Generated tokens, including the end of sequence.
    cum_logprob : float
        Sum of the tokens' log-probabilities.
    score : float
        Length-normalised log-probability; sequences are ranked by it.
    text : str or None
        Text that follows the prompt's, without special tokens and the end of sequence; None if the
        model has no tokenizer.
    finish_reason : str
        "stop" or "length".
    """

    token_ids: tuple[int, ...]
    cum_logprob: float
    score: float
    text: str | None
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """Result of `LLM.beam_search` for a prompt.

    Attributes
    ----------
    prompt : str or None
        Text of the prompt, if it was given as text.
    prompt_token_ids : sequence of int
    sequences : list of BeamSearchSequence
        At most `beam_width`, best first.
    """

    prompt: str | None
    prompt_token_ids: Sequence[int]
    sequences: list[BeamSearchSequence]


@dataclass
class _Beam:
    """An unfinished sequence and the request that computes it.

    `logprobs[i]` is the distribution of token `start + i`. The request may have generated more
    tokens, but greedily, so they need not match the sequence.
    """

    request_id: str
    token_ids: tuple[int, ...]
    cum_logprob: float
    start: int
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    own_ids: list[int] = field(default_factory=list)

    @property
    def next_logprobs(self) -> dict[int, Logprob] | None:
        """Distribution of the token after `token_ids`; None until it is known."""
        index = len(self.token_ids) - self.start
        return self.logprobs[index] if index < len(self.logprobs) else None

    @property
    def next_own_id(self) -> int:
        """Token the request itself generated after `token_ids`."""
        return self.own_ids[len(self.token_ids) - self.start]


class BeamSearch:
    """Beam search for one prompt; call `advance` when its requests have new outputs.

    Parameters
    ----------
    engine : LLMEngine
    prompt : prompt
    params : BeamSearchParams
    name : str
        Prefix for the ids of all its requests.
    inbox : dict of str to list of RequestOutput
        Outputs by request id: the search adds an entry for each of its requests; whoever steps
        the engine appends the outputs.

    Attributes
    ----------
    is_done : bool
    """

    def __init__(
        self,
        engine: LLMEngine,
        prompt: Prompt,
        params: BeamSearchParams,
        name: str,
        inbox: dict[str, list[RequestOutput]],
    ) -> None:
        self.is_done = False
        self._engine = engine
        self._params = params
        self._names = (f"{name}/{number}" for number in itertools.count())
        self._inbox = inbox
        self._started: dict[str, None] = {}  # requests not stopped yet
        self._eos = () if params.ignore_eos else engine.model.eos_token_ids
        self._done: list[BeamSearchSequence] = []
        self._prompt = engine.encode(prompt)
        first = next(self._names)
        self._beams = [_Beam(first, (), 0.0, 0)]
        self._start(first, (), None)

    def advance(self) -> None:
        """Read new outputs; choose the next beams once every beam's distribution is known."""
        for beam in self._beams:
            self._receive(beam)
        while not self.is_done and all(b.next_logprobs is not None for b in self._beams):
            self._choose()

    def close(self) -> None:
        """Abort all remaining requests."""
        self.is_done = True
        for request_id in list(self._started):  # an error may have come before they were beams
            self._stop(request_id)
        self._beams = []

    def output(self) -> BeamSearchOutput:
        """Return the best sequences found so far."""
        best = sorted(self._done, key=lambda s: -s.score)[: self._params.beam_width]
        return BeamSearchOutput(self._prompt.text, self._prompt.token_ids, best)

    def _receive(self, beam: _Beam) -> None:
        outputs = self._inbox[beam.request_id]
        self._inbox[beam.request_id] = []
        for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason in ("error", "abort"):
                    self.close()
                    raise RequestError(
                        f"beam search ended early: {completion.finish_reason} "
                        f"({completion.stop_reason})"
                    )
                beam.logprobs += completion.logprobs or ()
                beam.own_ids += completion.token_ids

    def _choose(self) -> None:
        """Replace the beams by their best continuations; finish the ones that have ended."""
        width = self._params.beam_width
        chosen: list[tuple[float, _Beam, int]] = []
        for total, beam, token_id in self._candidates():
            if token_id in self._eos:
                self._finish(beam, token_id, total, "stop")
            elif len(chosen) < width:
                chosen.append((total, beam, token_id))
        length = len(self._beams[0].token_ids) + 1
        room = self._engine.config.scheduler.max_model_len - len(self._prompt.token_ids)
        if length >= min(self._params.max_tokens, room) or not chosen:
            for total, beam, token_id in chosen:
                self._finish(beam, token_id, total, "length")
            self.close()
        else:
            self._follow(chosen)

    def _candidates(self) -> list[tuple[float, _Beam, int]]:
        """Return the 2 * beam_width best continuations, best first; ties in a fixed order."""
        candidates = []
        for beam in self._beams:
            for token_id, entry in (beam.next_logprobs or {}).items():
                candidates.append((beam.cum_logprob + entry.logprob, beam, token_id))
        candidates.sort(key=lambda c: -c[0])  # stable
        return candidates[: 2 * self._params.beam_width]

    def _follow(self, chosen: Iterable[tuple[float, _Beam, int]]) -> None:
        """Build the next beams, forking first, while the parents still hold their blocks."""
        beams: list[_Beam] = []
        for total, parent, token_id in chosen:
            token_ids = (*parent.token_ids, token_id)
            if token_id == parent.next_own_id:
                beam = _Beam(parent.request_id, token_ids, total, parent.start)
                beam.logprobs = parent.logprobs
                beam.own_ids = parent.own_ids
            else:
                beam = _Beam(next(self._names), token_ids, total, len(token_ids))
                self._start(beam.request_id, token_ids, parent.request_id)
            beams.append(beam)
        going_on = {beam.request_id for beam in beams}
        for beam in self._beams:
            if beam.request_id not in going_on:
                self._stop(beam.request_id)
        self._beams = beams

    def _start(self, request_id: str, token_ids: Sequence[int], parent: str | None) -> None:
        params = SamplingParams(
            temperature=0.0,
            logprobs=min(2 * self._params.beam_width, self._engine.model.config.vocab_size),
            max_tokens=self._params.max_tokens - len(token_ids),
            ignore_eos=True,
            detokenize=False,
            use_speculation=False,  # beams are chosen anew after each token
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: Mapping[str, Any] = {
            "prompt_token_ids": [*self._prompt.token_ids, *token_ids],
            "cache_salt": self._prompt.cache_salt,
        }
        # The queue's limits do not apply to resumed requests, and must not end an accepted search.
        resumed = None if parent is None else [()]
        if parent is not None and not self._engine.is_unfinished(parent):
            parent = None  # already finished, with its blocks in the prefix tree
        self._engine.add_request(request_id, prompt, params, parent=parent, resumed=resumed)
        self._started[request_id] = None
        self._inbox[request_id] = []

    def _stop(self, request_id: str) -> None:
        self._engine.abort_request(request_id)
        self._engine.forget_aborted([request_id])
        self._started.pop(request_id, None)
        self._inbox.pop(request_id, None)

    def _finish(self, beam: _Beam, token_id: int, total: float, finish_reason: str) -> None:
        token_ids = (*beam.token_ids, token_id)
        length = len(token_ids) - (finish_reason == "stop")
        score = total / max(1, length) ** self._params.length_penalty
        text = self._text(token_ids[:length])
        self._done.append(BeamSearchSequence(token_ids, total, score, text, finish_reason))

    def _text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that the tokens add to the prompt's, as `LLM.generate` does."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return None
        stream = IncrementalDetokenizer(tokenizer, self._prompt.token_ids)
        return stream.push(token_ids) + stream.finish()
