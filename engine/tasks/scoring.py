"""Offline scores of pairs of texts, and scores of a classification head's labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.checks import shown, shown_with_type
from engine.errors import ContextLengthError, RequestError, map_items
from engine.model import Model
from engine.outputs import Logprob, RequestOutput, ScoringOutput, ScoringRequestOutput
from engine.sampling_params import SamplingParams
from engine.tasks import rerankers
from engine.tasks.embeddings import CLASSIFY
from engine.tasks.rerankers import COSINE, RerankFormat, answer_params, probability

__all__ = ["Embed", "Generate", "pairs_of", "scored"]

Embed = Callable[[Sequence[Sequence[int]], str | None], list[np.ndarray[Any, np.dtype[np.float32]]]]
"""Token ids and a pooling of `embed_in_parts` -> the vectors."""

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[RequestOutput]]
"""Token ids, and the parameters of each -> the outputs."""


def pairs_of(text_1: Any, text_2: Any) -> list[tuple[str, str]]:
    """Return pairs of texts: one with each of several, or each with its own.

    Raises
    ------
    RequestError
        If an argument is neither a text nor texts, or the numbers of texts do not fit.

    Examples
    --------
    >>> pairs_of("a", ["b", "c"])
    [('a', 'b'), ('a', 'c')]
    """
    first = _texts("text_1", text_1)
    second = _texts("text_2", text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"text_1 must be one text, or as many as text_2 ({len(second)}); got {len(first)}"
        )
    return list(zip(first, second, strict=True))


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise RequestError(f"{name} must be a text or texts; got {shown_with_type(given)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"{name}[{index}] must be a text; got {shown_with_type(text)}")
    if not texts:
        raise RequestError(f"{name} must have at least one text; got none")
    return list(texts)


def scored(
    model: Model,
    pairs: Sequence[tuple[str, str]],
    embed: Embed,
    generate: Generate,
    *,
    pooling: str | None = None,
    instruction: str | None = None,
    reranker: str | None = None,
) -> list[ScoringRequestOutput]:
    """Return the scores of pairs of texts; see `LLM.score`.

    Parameters
    ----------
    model : Model
    pairs : sequence of (str, str)
    embed, generate : callable
        Compute with the model.
    pooling, instruction, reranker : str, optional

    Raises
    ------
    RequestError, ConfigError
        If an option does not fit the model, or a text cannot be served.
    """
    head = model.classifier
    way = rerankers.chosen(reranker, (model.name,), has_head=head is not None)
    if pooling is not None and way != COSINE:
        raise RequestError(f"pooling needs a model of embeddings, not a reranker; got {pooling!r}")
    if instruction is not None and not isinstance(way, RerankFormat):
        message = "instruction needs a reranker with a prompt"
        raise RequestError(f"{message}; got {shown_with_type(instruction)}")
    if way == COSINE:
        return _cosines(model, pairs, embed, pooling)
    if head is not None and len(head.labels) != 1:
        raise RequestError(f"a score needs a model with one label; it has {len(head.labels)}")

    def encode(pair: tuple[str, str]) -> list[int]:
        ids = rerankers.pair_ids(way, model.tokenizer, *pair, instruction)
        return _fitting(model, ids, "text_1 and text_2", pair, 0 if head is not None else 1)

    ids = map_items("text_2", pairs, encode)
    if head is not None:
        found = [float(score) for [score] in embed(ids, CLASSIFY)]
    else:
        assert isinstance(way, RerankFormat)  # `PAIR` needs a head
        found = _answers(ids, way.answers(model.tokenizer, model.name), generate)
    return [_output(*each) for each in zip(found, ids, strict=True)]


def _fitting(
    model: Model, ids: list[int], name: str, given: str | tuple[str, str], num_reserved: int
) -> list[int]:
    """Return token ids after checking their number; errors name the text, or the texts."""
    if not ids:
        raise RequestError(f"{name} must not be empty; got {shown(given)}")
    if len(ids) > model.max_model_len - num_reserved:
        limit = model.max_model_len
        raise ContextLengthError.of(name, len(ids), limit, num_reserved=num_reserved)
    return ids


def _output(score: float, token_ids: Sequence[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(ScoringOutput(score), list(token_ids))


def _cosines(
    model: Model, pairs: Sequence[tuple[str, str]], embed: Embed, pooling: str | None
) -> list[ScoringRequestOutput]:
    """Return cosines of embeddings; a text in several pairs is computed once."""
    ids: dict[str, list[int]] = {}

    def encode(name: str, text: str) -> None:
        if text not in ids:
            ids[text] = _fitting(model, model.tokenizer.encode(text), name, text, 0)

    for name, column in zip(("text_1", "text_2"), zip(*pairs, strict=True), strict=True):
        given = column if len(set(column)) > 1 else column[:1]  # one text may be in all pairs
        map_items(name, given, functools.partial(encode, name))
    vectors = dict(zip(ids, embed(list(ids.values()), pooling), strict=True))
    found = []
    for first, second in pairs:
        cosine = float(np.dot(vectors[first], vectors[second]))
        found.append(_output(min(1.0, max(-1.0, cosine)), [*ids[first], *ids[second]]))
    return found


def _answers(
    ids: Sequence[Sequence[int]], answers: tuple[int, int], generate: Generate
) -> list[float]:
    """Return the probability of the positive answer to each prompt, of the two."""
    known: list[dict[int, Logprob]] = [{} for _ in ids]
    while open_ids := [i for i, one in enumerate(known) if not one.keys() >= set(answers)]:
        params = [answer_params(set(answers) - known[i].keys()) for i in open_ids]
        for i, output in zip(open_ids, generate([ids[i] for i in open_ids], params), strict=True):
            [completion] = output.outputs
            if not completion.logprobs:
                raise RequestError(f"pair {i} cannot be scored: {completion.stop_reason}")
            known[i] |= completion.logprobs[0]
    return [probability(one, answers) for one in known]
