"""Relevance of texts: cosine of embeddings, a reranker's answer, or a head's score."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.async_engine import EngineClient
from engine.checks import shown
from engine.errors import RequestError, in_item
from engine.outputs import Logprob, RequestOutput
from engine.server.field_limits import check_length, check_num_tokens, limited_timeout
from engine.server.protocol.errors import APIError, failed_request
from engine.server.server_config import ServerConfig
from engine.server.sse import all_or_none
from engine.tasks import rerankers
from engine.tasks.embeddings import CLASSIFY
from engine.tasks.rerankers import (
    COSINE,
    PAIR,
    RerankFormat,
    answer_params,
    pair_ids,
    probability,
)

__all__ = ["Pair", "Scorer", "make_scorer"]

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
    info = client.model_info
    names = (info.model, *config.served_model_name)
    way = rerankers.chosen(config.reranker, names, has_head=bool(info.labels))
    if way == COSINE:
        return _Cosine(client, config)
    if info.labels:
        return _Head(client, config, way)
    assert isinstance(way, RerankFormat)  # `PAIR` needs labels
    return _Reranker(client, config, way)


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
        texts: dict[str, tuple[str, int, int]] = {}
        for field, column in zip(fields, zip(*pairs, strict=True), strict=True):
            count = len(set(column))  # a query is the same in all pairs
            for index, text in enumerate(column):
                texts.setdefault(text, (field, index, count))
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
        vectors = await self._client.embed(ids, pooling)
        by_text = dict(zip(texts, vectors, strict=True))
        found = [float(np.dot(by_text[first], by_text[second])) for first, second in pairs]
        return [min(1.0, max(-1.0, each)) for each in found], sum(map(len, ids))

    def _encoded(self, texts: Mapping[str, tuple[str, int, int]]) -> list[list[int]]:
        """Return the token ids of each text; `texts`: text -> (field, index, number of texts)."""
        tokenizer = self._client.tokenizer
        if tokenizer is None:
            raise APIError(400, "the model has no tokenizer, and cannot compare texts")
        found = []
        for text, (field, index, count) in texts.items():
            with in_item(field, index, count):
                check_length(text, field, self._client)
                ids = tokenizer.encode(text)
                if not ids:
                    raise RequestError(f"{field} must not be empty; got {shown(text)}")
                check_num_tokens(len(ids), field, self._client, num_reserved=0)
            found.append(ids)
        return found


class _Texts:
    """Token ids of pairs, for models that read both texts of a pair at once."""

    def __init__(self, client: EngineClient, config: ServerConfig, way: RerankFormat | str) -> None:
        self._client = client
        self._config = config
        self._way = way

    async def _ids(
        self,
        pairs: Sequence[Pair],
        fields: Pair,
        pooling: str | None,
        instruction: str | None,
    ) -> list[list[int]]:
        """Check the options of a request, and encode its pairs."""
        if pooling is not None:
            message = "pooling needs a model of embeddings; this one is a reranker"
            raise APIError(400, message, param="pooling")
        if instruction is not None and self._way == PAIR:
            message = "instruction needs a reranker with a prompt; this one reads the texts alone"
            raise APIError(400, message, param="instruction")
        return await asyncio.to_thread(self._encoded, pairs, fields, instruction)

    def _encoded(
        self, pairs: Sequence[Pair], fields: Pair, instruction: str | None
    ) -> list[list[int]]:
        name = " and ".join(fields)
        tokenizer = self._client.tokenizer
        if tokenizer is None:
            raise APIError(400, "the model has no tokenizer, and cannot compare texts")
        found = []
        most = self._config.max_body_bytes
        num_chars = 0
        num_reserved = 0 if self._client.model_info.labels else 1
        for index, (query, document) in enumerate(pairs):
            text = query + document
            if isinstance(self._way, RerankFormat):
                text = self._way.prompt(tokenizer, query, document, instruction).text
            num_chars += len(text)
            if num_chars > most:  # more than the body's: each prompt repeats the query
                message = f"the prompts of all pairs must have at most {most} characters"
                raise APIError(400, f"{message} (max_body_bytes); got more")
            with in_item(fields[1], index, len(pairs)):
                check_length(text, name, self._client)
                ids = pair_ids(self._way, tokenizer, query, document, instruction)
                if not ids:
                    raise RequestError(f"{name} must not be empty; got {shown(text)}")
                check_num_tokens(len(ids), name, self._client, num_reserved=num_reserved)
            found.append(ids)
        return found


class _Head(_Texts):
    """Scores are those of the only label of a model's classification head."""

    async def scores(
        self,
        pairs: Sequence[Pair],
        *,
        fields: Pair,
        pooling: str | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[float], int]:
        """See `Scorer.scores`."""
        labels = self._client.model_info.labels
        if len(labels) != 1:
            message = f"a score needs a model with one label; this one has {len(labels)}"
            raise APIError(400, f"{message}: ask /classify")
        ids = await self._ids(pairs, fields, pooling, instruction)
        found = await self._client.embed(ids, CLASSIFY)
        return [float(score) for [score] in found], sum(map(len, ids))


class _Reranker(_Texts):
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
        super().__init__(client, config, form)
        self._answers = form.answers(client.tokenizer, client.model_info.model)

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
        prompts = await self._ids(pairs, fields, pooling, instruction)
        found = await all_or_none([self._score(ids, cache_salt) for ids in prompts])
        return found, sum(map(len, prompts))

    async def _score(self, token_ids: list[int], cache_salt: str | None) -> float:
        """Return the probability of the positive answer, among the two."""
        known: dict[int, Logprob] = {}
        while missing := set(self._answers) - known.keys():
            # A second request finds its prompt cached.
            known |= await self._logprobs(token_ids, missing, cache_salt)
        return probability(known, self._answers)

    async def _logprobs(
        self, token_ids: list[int], answers: set[int], cache_salt: str | None
    ) -> dict[int, Logprob]:
        """Return log-probabilities of the next token: of one of `answers` at least."""
        outputs = self._client.generate(
            token_ids,
            answer_params(answers),
            request_id=f"score-{secrets.token_hex(16)}",
            cache_salt=cache_salt,
            timeout=limited_timeout(None, self._config),
        )
        async with contextlib.aclosing(outputs):
            [output] = [each async for each in outputs]
        return _entry(output)


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
