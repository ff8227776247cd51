"""Evaluate a model on a text: `perplexity`, and `compare` against a reference model.

    model = engine.load("smollm2", device="cpu")
    ids = model.tokenizer.encode(open("text.txt").read())
    print(perplexity(model, ids).perplexity)

The text is split into windows of `context` tokens. By default windows do not overlap, and only the
second half of each is scored, so every scored token has at least half a window of context.
llama.cpp's perplexity tool does the same, so the figures are comparable. With a `stride`, windows
overlap and every token but the first is scored once, as in Hugging Face's guide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.checks import is_integer, items_of, shown, token_ids_of
from engine.device import array_module, to_numpy
from engine.errors import RequestError
from engine.model import Model

__all__ = ["Comparison", "PerplexityResult", "compare", "compare_all", "perplexity", "text_ids"]

_MAX_TOKENS = 1 << 24
_MAX_LOGITS = 1 << 24  # logits computed at once: 64 MiB in float32
_MAX_FLOAT64 = 1 << 21  # logits converted to float64 at once

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a model on a text.

    Attributes
    ----------
    perplexity : float
        exp of the mean negative log-likelihood.
    standard_error : float
        Standard error of the perplexity: the standard error of the mean negative log-likelihood
        times the perplexity. It estimates how far another text of this kind may differ. To compare
        two models on one text, use `Comparison.ratio_error`, which is smaller.
    mean_nll : float
        Mean negative log-likelihood per scored token, in nats.
    num_tokens : int
        Number of scored tokens.
    num_windows : int
    context : int
        Tokens per window.
    """

    perplexity: float
    standard_error: float
    mean_nll: float
    num_tokens: int
    num_windows: int
    context: int


@dataclass(frozen=True)
class Comparison:
    """A model compared with a reference model on the same tokens.

    Attributes
    ----------
    model, reference : PerplexityResult
    ratio, ratio_error : float
        The model's perplexity divided by the reference's, and the standard error of this ratio,
        computed from the per-token differences of the log-likelihoods.
    kl_mean, kl_error, kl_p99 : float
        Kullback-Leibler divergence of the model's next-token distribution from the reference's,
        D(reference || model), in nats: the mean over scored tokens, its standard error, and the
        99th percentile.
    top1_agreement : float
        Fraction of scored tokens for which both models rank the same token first.
    """

    model: PerplexityResult
    reference: PerplexityResult
    ratio: float
    ratio_error: float
    kl_mean: float
    kl_error: float
    kl_p99: float
    top1_agreement: float


def perplexity(
    model: Model,
    token_ids: Any,
    context: int = 512,
    *,
    stride: int | None = None,
    bos_token_id: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = False,
) -> PerplexityResult:
    """Return the perplexity of a model on a text.

    Parameters
    ----------
    model : Model
    token_ids : (T,) array or list of int
        See `text_ids`.
    context : int
        Tokens per window, in [2, model.max_model_len].
    stride : int, optional
        Distance between the starts of successive windows, in [1, context). Every token but the
        first is then scored once, in the first window that contains it, with at least
        ``context - stride`` tokens before it (fewer in the first window). By default windows do not
        overlap, the second half of each is scored, and an incomplete last window is dropped.
    bos_token_id : int, optional
        Replaces the first token of each window (without a stride only), for models trained with a
        BOS token before every text.
    kv_cache_dtype : str
        Type of the KV cache; see `Model.new_cache`. The scored half of a window attends to the
        first half through the cache.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    PerplexityResult

    Raises
    ------
    RequestError
        If an argument is out of range, or the text is shorter than one window (than two tokens,
        with a stride).

    Notes
    -----
    Logits are the float32 output of `Model.step`; log-softmax and sums use float64. A window's
    logits are computed in slices of at most 64 MiB.

    Examples
    --------
    >>> from engine import load
    >>> from engine.config import ModelConfig
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> model = load(config=config, load_format="dummy", device="cpu")
    >>> result = perplexity(model, [i * i % 64 for i in range(40)], context=16)
    >>> result.num_windows, result.num_tokens
    (2, 14)
    """
    windows = _windows(token_ids, context, stride, bos_token_id, [model])
    nll = []
    with closing(model.new_cache(1, context, kv_cache_dtype=kv_cache_dtype)) as cache:
        for window in _shown(windows, progress):
            for targets, logits in _scored(model, cache, window):
                nll += [_nll(*part) for part in _parts(logits, targets)]
    return _result(np.concatenate(nll), len(windows), context)


def compare(
    model: Model,
    reference: Model,
    token_ids: Any,
    context: int = 512,
    *,
    stride: int | None = None,
    bos_token_id: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = False,
) -> Comparison:
    """Return perplexity, KL divergence and top-1 agreement of a model against a reference.

    Parameters
    ----------
    model, reference : Model
        Models with the same vocabulary, on any devices.
    token_ids, context, stride, bos_token_id, progress
        See `perplexity`.
    kv_cache_dtype : str
        Type of the model's KV cache; the reference's is not quantized.

    Returns
    -------
    Comparison

    Raises
    ------
    RequestError
        As for `perplexity`, or if the vocabularies differ in size.

    Examples
    --------
    >>> from engine import load
    >>> from engine.config import ModelConfig
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> model = load(config=config, load_format="dummy", device="cpu")
    >>> result = compare(model, model, [i * i % 64 for i in range(40)], context=16)
    >>> result.kl_mean, result.top1_agreement, result.ratio
    (0.0, 1.0, 1.0)
    """
    options: dict[str, Any] = {"stride": stride, "bos_token_id": bos_token_id}
    options |= {"kv_cache_dtypes": [kv_cache_dtype], "progress": progress}
    [result] = compare_all([model], reference, token_ids, context, **options)
    return result


def compare_all(
    models: Sequence[Model],
    reference: Model,
    token_ids: Any,
    context: int = 512,
    *,
    stride: int | None = None,
    bos_token_id: int | None = None,
    kv_cache_dtypes: Sequence[str] | None = None,
    progress: bool = False,
) -> list[Comparison]:
    """Compare each model with the reference, which is computed only once.

    Arguments and errors as for `compare`, with one entry of `kv_cache_dtypes` per model.
    """
    pages = ["auto"] * len(models) if kv_cache_dtypes is None else kv_cache_dtypes
    vocab = reference.config.vocab_size
    for model in models:
        if model.config.vocab_size != vocab:
            raise RequestError(
                f"models must have the reference's vocabulary of {vocab} tokens; "
                f"{model!r} has {model.config.vocab_size}"
            )
    windows = _windows(token_ids, context, stride, bos_token_id, [reference, *models])
    columns: list[list[_Floats]] = [[] for _ in models]
    with ExitStack() as stack:
        runs = [
            (
                each,
                stack.enter_context(closing(each.new_cache(1, context, kv_cache_dtype=dtype))),
            )
            for each, dtype in zip((reference, *models), ("auto", *pages), strict=True)
        ]
        for window in _shown(windows, progress):
            scored = zip(*(_scored(*run, window) for run in runs), strict=True)
            for (targets, expected), *others in scored:
                for column, model, (_, logits) in zip(columns, models, others, strict=True):
                    theirs = expected
                    if model.device != reference.device:
                        theirs = array_module(logits).asarray(to_numpy(expected))
                    column += [_compared(*part) for part in _parts(logits, theirs, targets)]
    return [_comparison(np.concatenate(each, axis=1), len(windows), context) for each in columns]


def text_ids(model: Model, text: str) -> tuple[list[int], int | None]:
    """Return a text's token ids, and the `bos_token_id` to pass to `perplexity`.

    If the tokenizer prepends BOS, the ids begin with it; otherwise the second value is None.
    """
    tokenizer = model.tokenizer
    bos = tokenizer.bos_token_id
    ids = tokenizer.encode(text, add_special_tokens=False)
    if bos is None or tokenizer.encode("a")[:1] != [bos]:
        return ids, None
    return (ids if ids[:1] == [bos] else [bos, *ids]), bos


@dataclass(frozen=True)
class _Window:
    """A window of tokens; tokens from index `first` on are scored."""

    token_ids: _Ids
    first: int


def _windows(
    token_ids: Any,
    context: int,
    stride: int | None,
    bos_token_id: int | None,
    models: Sequence[Model],
) -> list[_Window]:
    """Check the arguments and return the windows."""
    longest = min(each.max_model_len for each in models)
    _check_range("context", context, 2, longest, "the models' max_model_len")
    if stride is not None:
        _check_range("stride", stride, 1, context - 1, "less than context")
    vocab = models[0].config.vocab_size
    if bos_token_id is not None:
        _check_range("bos_token_id", bos_token_id, 0, vocab - 1, "the last id of the vocabulary")
    items = items_of("token_ids", token_ids, "token ids", _MAX_TOKENS)
    wanted = f"in [0, {vocab}), the vocabulary"
    ids = np.array(token_ids_of("token_ids", items, vocab, wanted), np.int32)
    least = context if stride is None else 2
    if len(ids) < least:
        what = "a whole window (context)" if stride is None else "a token to score"
        raise RequestError(f"token_ids must have at least {least}, {what}; got {len(ids)}")
    if stride is not None:
        return list(_overlapping(ids, context, stride))
    rows = ids[: len(ids) // context * context].reshape(-1, context)
    if bos_token_id is not None:
        rows[:, 0] = bos_token_id
    # As in llama.cpp, the token at context // 2 is the last unscored one; in a window of two
    # tokens, that would leave nothing to score.
    first = context // 2 + 1 if context > 2 else 1
    return [_Window(row, first) for row in rows]


def _overlapping(ids: _Ids, context: int, stride: int) -> Iterator[_Window]:
    """Yield windows `stride` apart; each scores only the tokens new to it."""
    done = 1  # the first token has no context
    for start in range(0, len(ids), stride):
        window = ids[start : start + context]
        yield _Window(window, done - start)
        done = start + len(window)
        if done == len(ids):
            return


def _check_range(name: str, value: object, least: int, most: int, what: str) -> None:
    if not is_integer(value) or not least <= value <= most:  # type: ignore[operator]
        raise RequestError(
            f"{name} must be a whole number in [{least}, {most}], {what}; got {shown(value)}"
        )


def _shown(windows: list[_Window], progress: bool) -> Any:
    from tqdm import tqdm  # on demand: the import takes a tenth of a second

    return tqdm(windows, desc="windows", disable=not progress, file=sys.stderr)


def _scored(model: Model, cache: Any, window: _Window) -> Iterator[tuple[Any, Any]]:
    """Yield (targets (R,), logits (R, V) float32) slices covering a window's scored tokens."""
    ids = window.token_ids[None]
    cache.reset()
    # A token's logits predict the next token.
    first = window.first - 1
    last = ids.shape[1] - 1
    if first:
        model.step(ids[:, :first], cache)
    size = max(1, _MAX_LOGITS // model.config.vocab_size)
    for start in range(first, last, size):
        stop = min(start + size, last)
        logits = model.step(ids[:, start:stop], cache, logits="all")
        yield ids[0, start + 1 : stop + 1], logits[0]


def _parts(logits: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield slices of the arrays' rows, small enough to convert to float64."""
    num_rows, vocab = logits.shape
    size = max(1, _MAX_FLOAT64 // vocab)
    for start in range(0, num_rows, size):
        yield tuple(each[start : start + size] for each in (logits, *others))


def _log_softmax(logits: Any) -> Any:
    xp = array_module(logits)
    x = logits.astype(xp.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= xp.log(xp.exp(x).sum(axis=1, keepdims=True))
    return x


def _picked(log_probs: Any, targets: Any) -> Any:
    xp = array_module(log_probs)
    return log_probs[xp.arange(len(targets)), xp.asarray(targets)]


def _nll(logits: Any, targets: Any) -> _Floats:
    return np.asarray(to_numpy(-_picked(_log_softmax(logits), targets)))


def _compared(ours: Any, theirs: Any, targets: Any) -> _Floats:
    """Return (4, R): our NLL, the reference's NLL, KL divergence, top-1 agreement."""
    xp = array_module(ours)
    log_q = _log_softmax(ours)
    log_p = _log_softmax(theirs)
    kl = (xp.exp(log_p) * (log_p - log_q)).sum(axis=1)
    same = (log_q.argmax(axis=1) == log_p.argmax(axis=1)).astype(xp.float64)
    rows = [-_picked(log_q, targets), -_picked(log_p, targets), kl, same]
    return np.asarray(to_numpy(xp.stack(rows)))


def _standard_error(values: _Floats) -> float:
    """Return the standard error of the mean; NaN for a single value."""
    count = len(values)
    return float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def _result(nll: _Floats, num_windows: int, context: int) -> PerplexityResult:
    mean = float(nll.mean())
    value = float(np.exp(mean))  # overflows to inf; math.exp would raise
    error = value * _standard_error(nll)
    return PerplexityResult(value, error, mean, len(nll), num_windows, context)


def _comparison(columns: _Floats, num_windows: int, context: int) -> Comparison:
    ours, theirs, kl, same = columns
    ratio = float(np.exp((ours - theirs).mean()))
    return Comparison(
        model=_result(ours, num_windows, context),
        reference=_result(theirs, num_windows, context),
        ratio=ratio,
        ratio_error=ratio * _standard_error(ours - theirs),
        kl_mean=float(kl.mean()),
        kl_error=_standard_error(kl),
        kl_p99=float(np.percentile(kl, 99)),
        top1_agreement=float(same.mean()),
    )
