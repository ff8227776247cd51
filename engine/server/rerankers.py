"""Rerankers: prompts of causal models that answer whether a document fits a query."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.checks import shown
from engine.errors import ConfigError

__all__ = ["COSINE", "RerankFormat", "detect", "get"]

COSINE = "cosine"
"""Value of the option `reranker` that compares embeddings instead of asking a reranker."""


@dataclass(frozen=True)
class RerankFormat:
    """Prompt and answers of one family of rerankers.

    The relevance is the probability of `positive` as the next token, if only it and `negative`
    were possible.

    Attributes
    ----------
    name : str
    model_name : str
        Part of the names of its models, in lower case.
    template : str
        The prompt, with ``{instruction}``, ``{query}`` and ``{document}``.
    instruction : str
        Default of the request's `instruction`.
    positive, negative : str
        Tokens of the two answers.
    """

    name: str
    model_name: str
    template: str
    instruction: str
    positive: str
    negative: str


_FORMATS = {
    each.name: each
    for each in (
        RerankFormat(
            "qwen3",
            "qwen3-reranker",
            # https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n"
            "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            "Given a web search query, retrieve relevant passages that answer the query",
            "yes",
            "no",
        ),
    )
}


def get(name: str) -> RerankFormat | None:
    """Return a format by name; None for `COSINE`.

    Raises
    ------
    ConfigError
        If the name is not known.
    """
    if name != COSINE and name not in _FORMATS:
        wanted = ", ".join([*_FORMATS, COSINE])
        raise ConfigError(f"reranker must be one of {wanted}; got {shown(name)}")
    return _FORMATS.get(name)


def detect(names: Iterable[str]) -> RerankFormat | None:
    """Return the format of a model by its names; None if it is no reranker.

    Examples
    --------
    >>> detect(["Qwen/Qwen3-Reranker-0.6B"]).name, detect(["Qwen/Qwen3-0.6B"])
    ('qwen3', None)
    """
    text = "\n".join(names).lower()
    return next((each for each in _FORMATS.values() if each.model_name in text), None)
