"""Relevance of texts to each other: cosine of embeddings, or a reranker's answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.async_engine import EngineClient
from engine.errors import ConfigError
from engine.outputs import Logprob, RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import rerankers
from engine.server.field_limits import check_length, check_num_tokens, limited_timeout
from engine.server.protocol.errors import APIError, failed_request
from engine.server.rerankers import RerankFormat
from engine.server.server_config import ServerConfig
from engine.server.sse import all_or_none

__all__ = ["Pair", "Scorer", "make_scorer"]

_MOST_LOGPROBS = 20  # log-probabilities per request; both answers are nearly always among them

Pair = tuple[str, str]
"""Two texts: a query and a document."""


class Scorer(Protocol):
    """Judges pairs of texts."""

    async def scores(
        self,
        pairs: Sequence[Pair],
        *,
        fields: Pair,
        pooling: str | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[float], int]:
        """Return the score of each pair, and the number of tokens computed.

        Parameters
        ----------
        pairs : sequence of (str, str)
        fields : (str, str)
            The request fields that hold the texts, for messages.
        pooling : str, optional
            "last" or "mean"; only with embeddings.
        instruction : str, optional
            The task that the reranker is told; only with rerankers.
        cache_salt : str, optional
            See `EngineClient.generate`.

        Raises
        ------
        APIError, RequestError
            If a text is too long, or an option does not apply.
        """


def make_scorer(client: EngineClient, config: ServerConfig) -> Scorer:
    """Return the scorer of a model, by the option `reranker` or the model's name.

    Raises
    ------
    ConfigError
        If there is no such reranker, or the model lacks its tokens.
    """
    if config.reranker is None:
        form = rerankers.detect((client.model_info.model, *config.served_model_name))
    else:
        form = rerankers.get(config.reranker)
    return _Cosine(client, config) if form is None else _Reranker(client, config, form)


class _Cosine:
    """Scores are the cosines of the angles between embeddings, in [-1, 1]."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config

    async def scores(
        self,
        pairs: Sequence[Pair],
        *,
        fields: Pair,
        pooling: str | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[float], int]:
        """See `Scorer.scores`; a text in several pairs is computed once."""
        if instruction is not None:
            message = "instruction needs a reranker; this model compares embeddings"
            raise APIError(400, message, param="instruction")
        texts = {text: field for pair in pairs for text, field in zip(pair, fields, strict=True)}
        size = self._client.model_info.hidden_size
        most = self._config.max_embedding_values
        if len(texts) * size > most:
            message = (
                f"at most {most // size} different texts can be compared, as embeddings of {size} "
                f"dimensions must have at most {most} values in all (max_embedding_values); "
                f"got {len(texts)}"
            )
            raise APIError(400, message)
        ids = await asyncio.to_thread(self._encoded, texts)
        vectors = await self._client.embed(ids, pooling or "last")
        by_text = dict(zip(texts, vectors, strict=True))
        found = [float(np.dot(by_text[first], by_text[second])) for first, second in pairs]
        return [min(1.0, max(-1.0, each)) for each in found], sum(map(len, ids))

    def _encoded(self, texts: Mapping[str, str]) -> list[list[int]]:
        """Return the token ids of each text; `texts`: text -> its field."""
        tokenizer = self._client.tokenizer
        if tokenizer is None:
            raise APIError(400, "the model has no tokenizer, and cannot compare texts")
        found = []
        for text, field in texts.items():
            check_length(text, field, self._client)
            ids = tokenizer.encode(text)
            if not ids:
                raise APIError(400, f"{field} must not be empty", param=field)
            check_num_tokens(len(ids), field, self._client, num_reserved=0)
            found.append(ids)
        return found


class _Reranker:
    """Scores are probabilities of a reranker's positive answer.

    Parameters
    ----------
    client : EngineClient
    config : ServerConfig
    form : RerankFormat

    Raises
    ------
    ConfigError
        If the model lacks the tokens of the answers.
    """

    def __init__(self, client: EngineClient, config: ServerConfig, form: RerankFormat) -> None:
        self._client = client
        self._config = config
        self._form = form
        self._positive = self._token(form.positive)
        self._negative = self._token(form.negative)

    def _token(self, text: str) -> int:
        tokenizer = self._client.tokenizer
        found: int | None = None if tokenizer is None else tokenizer.token_to_id(text)
        if found is None:
            raise ConfigError(
                f"the reranker {self._form.name} needs a model with the token {text!r}; got "
                f"{self._client.model_info.model}"
            )
        return found

    async def scores(
        self,
        pairs: Sequence[Pair],
        *,
        fields: Pair,
        pooling: str | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[float], int]:
        """See `Scorer.scores`; each pair is a request of one token."""
        if pooling is not None:
            message = "pooling needs a model of embeddings; this one is a reranker"
            raise APIError(400, message, param="pooling")
        if instruction is None:
            instruction = self._form.instruction
        prompts = await asyncio.to_thread(self._prompts, pairs, fields, instruction)
        found = await all_or_none([self._score(ids, cache_salt) for ids in prompts])
        return found, sum(map(len, prompts))

    def _prompts(self, pairs: Sequence[Pair], fields: Pair, instruction: str) -> list[list[int]]:
        name = " and ".join(fields)
        tokenizer = self._client.tokenizer
        found = []
        most = self._config.max_body_bytes
        num_chars = 0
        for query, document in pairs:
            filling = {"instruction": instruction, "query": query, "document": document}
            prompt = tokenizer.fill(self._form.template, **filling)
            num_chars += len(prompt.text)
            if num_chars > most:  # more than the body's: each prompt repeats the query
                message = f"the prompts of all pairs must have at most {most} characters"
                raise APIError(400, f"{message} (max_body_bytes); got more")
            check_length(prompt.text, name, self._client)
            ids = tokenizer.encode_prompt(prompt)
            check_num_tokens(len(ids), name, self._client)
            found.append(ids)
        return found

    async def _score(self, token_ids: list[int], cache_salt: str | None) -> float:
        """Return the probability of the positive answer, among the two."""
        answers = {self._positive, self._negative}
        known = await self._logprobs(token_ids, answers, cache_salt)
        missing = answers - known.keys()
        if missing:  # the second request finds its prompt cached
            known |= await self._logprobs(token_ids, missing, cache_salt)
        return _sigmoid(known[self._positive] - known[self._negative])

    async def _logprobs(
        self, token_ids: list[int], answers: set[int], cache_salt: str | None
    ) -> dict[int, float]:
        """Return log-probabilities of the next token: of one of `answers` at least."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=sorted(answers),
            ignore_eos=True,
            logprobs=_MOST_LOGPROBS,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = self._client.generate(
            token_ids,
            params,
            request_id=f"score-{secrets.token_hex(16)}",
            cache_salt=cache_salt,
            timeout=limited_timeout(None, self._config),
        )
        async with contextlib.aclosing(outputs):
            [output] = [each async for each in outputs]
        return {i: each.logprob for i, each in _entry(output).items() if i in answers}


def _entry(output: RequestOutput) -> dict[int, Logprob]:
    """Return the log-probabilities of the only token; raise if there is none."""
    [completion] = output.outputs
    if completion.finish_reason == "error":
        raise failed_request(completion.stop_reason)
    if not completion.logprobs:
        if completion.stop_reason == "timeout":
            raise APIError(408, "the request was not finished within its timeout")
        raise APIError(503, "the request was aborted")
    return completion.logprobs[0]


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow.

    Examples
    --------
    >>> _sigmoid(0.0), _sigmoid(1000.0), _sigmoid(-1000.0)
    (0.5, 1.0, 0.0)
    """
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
