"""Sampling parameters of running requests, in persistent arrays that steps gather from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.device import Device
from engine.layers.sampler import SamplingBatch
from engine.request import Request
from engine.runner.allowed_masks import AllowedMasks
from engine.runner.dry import DryRule
from engine.runner.history import HistoryTable
from engine.sampling_params import SamplingParams
from engine.scheduler.output import ScheduledSequence

__all__ = ["SamplingSpec", "SamplingTable"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_NO_LOGPROBS = -2
_XTC = 0x587463  # seed of XTC beside the request's, so that no other use draws the same numbers
_TINY = np.finfo(np.float32).tiny  # smallest top_p that stays above 0 in float32
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, eq=False)
class SamplingSpec:
    """Sampling specification of one request.

    Attributes
    ----------
    params : SamplingParams
    seed : int
        In [0, 2**64).
    bad_words : tuple of tuple of int
        Token sequences the output must not contain.
    num_logprobs : int or None
        See `SamplingParams.logprobs`; also 0 if only the sum of log-probabilities is needed.
    grammar : engine.structured.grammar.GrammarState, optional
        State of the grammar the output must match.
    dry : DryRule, optional
        Penalties on repetitions.
    """

    params: SamplingParams
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = field(default=None)
    grammar: Any = field(default=None)
    dry: DryRule | None = field(default=None)

    @property
    def has_filters(self) -> bool:
        """Tell whether `layers.candidate_filters` choose among the tokens."""
        p = self.params
        is_on = p.typical_p < 1 or p.top_n_sigma > 0 or p.xtc_probability > 0
        return is_on and not p.greedy

    @property
    def needs_host_ids(self) -> bool:
        """Tell whether sampling a token requires the previous id on the host."""
        has_rules = self.grammar is not None or self.dry is not None
        return bool(self.bad_words or self.params.logits_processors or has_rules)

    @property
    def forbidding(self) -> list[str]:
        """Names of the options that forbid tokens."""
        params = self.params
        is_given = {
            "structured output": self.grammar is not None,
            "allowed_token_ids": params.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            # The grammar, not min_tokens, decides about EOS; stop_token_ids are forbidden anyway.
            "min_tokens": params.min_tokens > 0
            and bool(self.grammar is None or params.stop_token_ids),
        }
        return [name for name in is_given if is_given[name]]

    @property
    def is_penalised(self) -> bool:
        """Tell whether any penalty changes a logit."""
        p = self.params
        return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)


class SamplingTable:
    """Sampling parameters, one row per running request (see `RequestRows`).

    Parameters
    ----------
    num_rows, vocab_size : int
    eos_token_ids : sequence of int
        Ids masked out until `min_tokens` tokens are generated, besides `stop_token_ids`.
    device : Device
        Device that holds the histories; all other arrays are on the host.

    Attributes
    ----------
    has_processors, may_conflict : (num_rows,) bool
        Request rows with logits processors, and with several options that forbid tokens.
    num_prompt_scored : int
        Running requests with `prompt_logprobs`.
    version : int
        Changes whenever the result of `plain_columns` may have changed.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: Device
    ) -> None:
        self.history = HistoryTable(num_rows, device)
        self.is_penalised = np.zeros(num_rows, np.bool_)
        self.has_processors = np.zeros(num_rows, np.bool_)
        self.may_conflict = np.zeros(num_rows, np.bool_)
        self._needs_host_ids = np.zeros(num_rows, np.bool_)
        self.num_prompt_scored = self.version = 0
        self._eos = tuple(eos_token_ids)
        self._floats = {
            name: np.zeros(num_rows, np.float32)
            for name in ("temperature", "top_p", "min_p", *_PENALTIES)
        }
        self._top_k = np.zeros(num_rows, np.int32)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._prompt_lens = np.zeros(num_rows, np.int32)
        self._num_logprobs = np.full(num_rows, _NO_LOGPROBS, np.int64)
        self._has_bias = np.zeros(num_rows, np.bool_)
        self._has_filters = np.zeros(num_rows, np.bool_)
        self._masks = AllowedMasks(num_rows, vocab_size, eos_token_ids, device)

    def assign(self, request: Request) -> None:
        """Fill the row of `request`."""
        self.version += 1
        row = request.row
        spec = request.spec
        params = spec.params
        for name, column in self._floats.items():
            column[row] = getattr(params, name)
        if params.greedy:
            self._floats["temperature"][row] = 0.0
        self._floats["top_p"][row] = max(params.top_p, _TINY)
        self._top_k[row] = max(params.top_k, 0)
        self._seeds[row] = spec.seed
        self._prompt_lens[row] = request.num_prompt_tokens
        self._num_logprobs[row] = _NO_LOGPROBS if spec.num_logprobs is None else spec.num_logprobs
        has_bias = params.logit_bias or spec.bad_words or params.min_tokens
        self._has_bias[row] = bool(has_bias or spec.dry is not None)
        self._has_filters[row] = spec.has_filters
        self.has_processors[row] = bool(params.logits_processors)
        self.may_conflict[row] = len(spec.forbidding) > 1
        self.is_penalised[row] = spec.is_penalised
        self._needs_host_ids[row] = spec.needs_host_ids
        self.num_prompt_scored += params.prompt_logprobs is not None
        if spec.is_penalised:
            ids = request.token_ids(0, request.num_known_tokens)
            self.history.assign(row, ids, request.max_num_tokens)
        self._masks.assign(request)

    @property
    def grammar_errors(self) -> dict[int, str]:
        """By row of logits of the last `build`: why its grammar allows no token."""
        return self._masks.errors

    def release(self, request: Request) -> None:
        """Release the row of `request`."""
        self.version += 1
        self.num_prompt_scored -= request.spec.params.prompt_logprobs is not None

    def needs_host_ids(self, rows: IntArray) -> bool:
        """Tell whether sampling any of these rows requires all earlier ids on the host."""
        return bool(self._needs_host_ids[rows].any())

    def build(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        positions: IntArray,
        paths: Sequence[tuple[int, ...]] | None = None,
    ) -> SamplingBatch:
        """Return the host arrays for R rows of logits, without the history.

        Parameters
        ----------
        sampled : sequence of ScheduledSequence
            Sequence of each row of logits.
        rows : (R,) int64
            Request row of each row of logits.
        positions : (R,) int32
            Positions of the tokens to sample.
        paths : sequence of tuple of int, optional
            For each row of logits, the drafts between the last known token and the token to sample.
        """
        return SamplingBatch(
            temperature=self._floats["temperature"][rows],
            top_k=self._top_k[rows],
            top_p=self._floats["top_p"][rows],
            min_p=self._floats["min_p"][rows],
            seeds=self._seeds[rows],
            positions=positions.astype(np.int64),
            num_logprobs=self._most_logprobs(rows),
            **self._masks.build(sampled, rows, positions, paths),
            **self._penalties(rows, positions),
            **self._biases(sampled, rows, positions, paths or [()] * len(rows)),
            **self._filters(sampled, rows, positions),
        )

    def plain_columns(self, rows: IntArray) -> dict[str, IntArray] | None:
        """Return the columns required by `kernels.sample`; None if any row needs more."""
        is_special = self.is_penalised | self.has_processors | self._has_bias
        is_special |= self._num_logprobs != _NO_LOGPROBS
        is_special |= self._masks.has_mask | self._has_filters
        if self.num_prompt_scored or is_special[rows].any():
            return None
        return {
            "temperature": self._floats["temperature"][rows],
            "top_k": self._top_k[rows],
            "top_p": self._floats["top_p"][rows],
            "min_p": self._floats["min_p"][rows],
            "seeds": self._seeds[rows],
        }

    def _most_logprobs(self, rows: IntArray) -> int | None:
        """Return the largest log-probability count of these rows (-1: all), or None."""
        wanted = self._num_logprobs[rows]
        most = int(wanted.max())
        if most == _NO_LOGPROBS:
            return None
        return -1 if (wanted == -1).any() else most

    def _penalties(self, rows: IntArray, positions: IntArray) -> dict[str, IntArray]:
        is_penalised = self.is_penalised[rows]
        if not is_penalised.any():
            return {}
        lens = np.where(is_penalised, positions, 0).astype(np.int32)
        return {
            "history_lens": lens,
            "prompt_lens": np.minimum(self._prompt_lens[rows], lens),
            **{name: self._floats[name][rows] for name in _PENALTIES},
        }

    def _biases(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        positions: IntArray,
        paths: Sequence[tuple[int, ...]],
    ) -> dict[str, IntArray]:
        """Return the concatenated logit biases of all rows; {} if there are none."""
        ids: list[int] = []
        values: list[float] = []
        counts = np.zeros(len(rows) + 1, np.int32)
        for index in np.flatnonzero(self._has_bias[rows]).tolist():
            bias = self._bias(
                sampled[index].request, int(rows[index]), int(positions[index]), paths[index]
            )
            ids += bias
            values += bias.values()
            counts[index + 1] = len(bias)
        if not ids:
            return {}
        return {
            "logit_bias_ids": np.array(ids, np.int32),
            "logit_bias_values": np.array(values, np.float32),
            "cu_logit_bias": np.cumsum(counts, dtype=np.int32),
        }

    def _filters(
        self, sampled: Sequence[ScheduledSequence], rows: IntArray, positions: IntArray
    ) -> dict[str, IntArray]:
        """Return the filters of the rows that have any, without those that no row uses.

        Whether XTC drops tokens depends on seed and position alone.
        """
        chosen = np.flatnonzero(self._has_filters[rows])
        if not chosen.size:
            return {}
        all_params = [sampled[index].request.spec.params for index in chosen.tolist()]
        seeds = self._seeds[rows[chosen]].tolist()
        coins = [
            np.random.default_rng([seed, position, _XTC]).random()
            for seed, position in zip(seeds, positions[chosen].tolist(), strict=True)
        ]
        thresholds = [
            params.xtc_threshold if coin < params.xtc_probability else 1.0
            for params, coin in zip(all_params, coins, strict=True)
        ]
        typical_p = np.array([params.typical_p for params in all_params], np.float32)
        top_n_sigma = np.array([params.top_n_sigma for params in all_params], np.float32)
        xtc_threshold = np.array(thresholds, np.float32)
        columns: dict[str, IntArray] = {"filter_rows": chosen}
        if (typical_p < 1).any():
            columns["typical_p"] = typical_p
        if (top_n_sigma > 0).any():
            columns["top_n_sigma"] = top_n_sigma
        if (xtc_threshold <= 0.5).any():
            columns["xtc_threshold"] = xtc_threshold
        return columns

    def _bias(
        self, request: Request, row: int, position: int, path: tuple[int, ...]
    ) -> dict[int, float]:
        """Return the logit biases by id for the token at `position`, after `path`."""
        spec: SamplingSpec = request.spec
        params = spec.params
        bias = dict(params.logit_bias or {})
        if position - request.num_prompt_tokens < params.min_tokens:
            ends = {*(() if params.ignore_eos else self._eos), *(params.stop_token_ids or ())}
            if spec.grammar is not None:  # its mask decides whether the text may end
                ends -= {*self._eos}
            bias |= dict.fromkeys(sorted(ends), -np.inf)
        elif not bias and not spec.bad_words and not path and spec.dry is None:
            self._has_bias[row] = False  # min_tokens, its only bias, has been reached
            self.version += 1
        if spec.dry is not None:
            known = request.token_ids(0, request.num_known_tokens)
            for token, penalty in spec.dry.penalties([*known, *path]).items():
                bias[token] = bias.get(token, 0.0) - penalty
        if not spec.bad_words:
            return bias
        output = [*request.output_token_ids, *path]
        return bias | dict.fromkeys(_last_of_bad_words(spec, output), -np.inf)


def _last_of_bad_words(spec: SamplingSpec, output: list[int]) -> list[int]:
    """Return the ids that would complete a bad word if they followed `output`."""
    return [
        word[-1]
        for word in spec.bad_words
        if len(word) <= len(output) + 1
        and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
    ]
