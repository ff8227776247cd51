"""Rerankers: how a model judges whether a document fits a query."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError
from engine.outputs import Logprob
from engine.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "COSINE",
    "NAMES",
    "PAIR",
    "RerankFormat",
    "answer_params",
    "chosen",
    "pair_ids",
    "probability",
]

COSINE = "cosine"
"""Value of the option `reranker`: compare embeddings."""

PAIR = "pair"
"""Value of the option `reranker`: the model's classification head reads both texts as a pair."""

_MOST_LOGPROBS = 20  # log-probabilities per request; both answers are nearly always among them


@dataclass(frozen=True)
class RerankFormat:
    """Prompt and answers of one family of rerankers.

    The relevance is the probability of `positive` as the next token, if only it and `negative`
    were possible; or, if the model has a classification head, that one's score.

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

    def answers(self, tokenizer: Any, model_name: str) -> tuple[int, int]:
        """Return the token ids of the positive and the negative answer.

        Raises
        ------
        ConfigError
            If the model lacks one of them.
        """
        found = []
        for text in (self.positive, self.negative):
            token_id = None if tokenizer is None else tokenizer.token_to_id(text)
            if token_id is None:
                raise ConfigError(
                    f"the reranker {self.name} needs a model with the token {text!r}; got "
                    f"{model_name}"
                )
            found.append(token_id)
        positive, negative = found
        return positive, negative

    def prompt(self, tokenizer: Any, query: str, document: str, instruction: str | None) -> Any:
        """Return the prompt of a pair; control tokens in the texts are ordinary text."""
        instruction = self.instruction if instruction is None else instruction
        return tokenizer.fill(
            self.template, instruction=instruction, query=query, document=document
        )


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

NAMES = (*_FORMATS, COSINE, PAIR)
"""Values of the option `reranker`."""


def chosen(option: str | None, names: Iterable[str], *, has_head: bool) -> RerankFormat | str:
    """Return how a model judges pairs: a format, `PAIR` or `COSINE`.

    Parameters
    ----------
    option : str or None
        Name of a format, or one of those two; None: by the model.
    names : iterable of str
        Names of the model.
    has_head : bool
        Whether it has a classification head.

    Raises
    ------
    ConfigError
        If the option is not known, or does not fit the model.

    Examples
    --------
    >>> chosen(None, ["Qwen/Qwen3-Reranker-0.6B"], has_head=False).name
    'qwen3'
    >>> chosen(None, ["Qwen/Qwen3-0.6B"], has_head=False), chosen(None, ["x"], has_head=True)
    ('cosine', 'pair')
    """
    if option is None:
        text = "\n".join(names).lower()
        found = (each for each in _FORMATS.values() if each.model_name in text)
        return next(found, PAIR if has_head else COSINE)
    if option == PAIR and not has_head:
        raise ConfigError(f"the reranker {PAIR} needs a model with a classification head")
    if option not in NAMES:
        raise ConfigError(f"reranker must be one of {', '.join(NAMES)}; got {shown(option)}")
    return _FORMATS.get(option, option)


def pair_ids(
    way: RerankFormat | str, tokenizer: Any, query: str, document: str, instruction: str | None
) -> list[int]:
    """Return the token ids that a classification head reads for a pair."""
    if isinstance(way, RerankFormat):
        ids = tokenizer.encode_prompt(way.prompt(tokenizer, query, document, instruction))
    else:
        ids = tokenizer.encode(query, text_pair=document)
    found: list[int] = ids
    return found


def answer_params(answers: Iterable[int]) -> SamplingParams:
    """Return the parameters of a request for the log-probabilities of one of `answers` at least."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=sorted(answers),
        ignore_eos=True,
        logprobs=_MOST_LOGPROBS,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probability(known: dict[int, Logprob], answers: tuple[int, int]) -> float:
    """Return the probability of the first answer, if only the two were possible.

    Examples
    --------
    >>> probability({5: Logprob(-1.0), 7: Logprob(-1.0)}, (5, 7))
    0.5
    """
    positive, negative = answers
    x = known[positive].logprob - known[negative].logprob
    if x >= 0:  # the form whose exponential does not overflow
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
