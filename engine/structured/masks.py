"""Masks of many requests, computed in parallel; requests in equal states share one mask."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.structured.grammar import GrammarState, failure
from engine.structured.sources import library

__all__ = ["MaskPlan"]

# With few cores, waking the threads costs more than it saves.
_CONSUMES_ON_ALL_CORES = (os.cpu_count() or 1) >= 8

MaskArray = np.ndarray[Any, np.dtype[np.int32]]
Run = tuple[GrammarState, int, tuple[int, ...]]
"""A state, the index of its first mask, and a chain of drafts, each adding one mask."""


@functools.cache
def _executor() -> Any:
    """Return llguidance's thread pool: by default 80 % of the cores, at most 32."""
    return library().LLExecutor()


class MaskPlan:
    """The masks a step needs, and which mask each row uses.

    Parameters
    ----------
    states : sequence of GrammarState
        One per row. Rows with the same state but different paths are adjacent.
    paths : sequence of tuple of int, optional
        Drafts after each row's output; None if there are no drafts.
    rules : sequence of int, optional
        Id of each row's mask rule; only rows with equal ids may share a mask, which the caller then
        modifies by that rule. None: one rule for all rows.

    Attributes
    ----------
    indices : list of int
        Mask of each row.
    firsts : list of int
        First row of each mask.
    errors : dict of int to str
        Filled by `fill`. By row: why the grammar has no mask there. Behind a draft, this is no
        `GrammarState.error`: the draft may be rejected.
    """

    def __init__(
        self,
        states: Sequence[GrammarState],
        paths: Sequence[tuple[int, ...]] | None = None,
        rules: Sequence[int] | None = None,
    ) -> None:
        self.indices: list[int] = []
        self.firsts: list[int] = []
        self.errors: dict[int, str] = {}
        self._failed_paths: dict[tuple[GrammarState, tuple[int, ...]], str] = {}
        self._states = states
        self._paths = paths
        rules = rules or [0] * len(states)
        indices = self.indices
        firsts = self.firsts
        known: dict[Any, int] = {}
        for row, state in enumerate(states):
            index = len(firsts)
            # Without a prefix no other state is equal, and rows of the same state differ in path.
            if state.prefix is not None:
                key = state.prefix, rules[row], paths[row] if paths else ()
                index = known.setdefault(key, index)
            if index == len(firsts):
                firsts.append(row)
            indices.append(index)

    def fill(self, masks: MaskArray) -> list[bool]:
        """Write the masks.

        Parameters
        ----------
        masks : (n, ceil(V/32)) array of int32
            C-contiguous, one row per entry of `firsts`. Bit i of word w: id 32 w + i is allowed.

        Returns
        -------
        list of bool
            Whether the grammar allows each mask's path. If not, or where there is an error, the
            mask allows every token. A path that contains an end of sequence may be reported either
            way: no token follows it.
        """
        every, alone = self._runs()
        runs = [run for run in every if run[0].prefix is None or not _copy(run, masks)]
        runs.sort(key=_group)  # neighbours, which share a lexer, go to the same thread
        _catch_up([state for state, _, _ in runs])
        _compute([run for run in runs if not run[0].error], masks)
        is_allowed = [True] * len(masks)
        for run in runs:
            state, index, chain = run
            if chain:
                _check(run, masks, is_allowed)
            if not state.matcher.is_error():
                if state.prefix is not None and not state.error:
                    _keep(run, masks, is_allowed)
            elif chain and not state.error:  # find the draft behind which it fails
                state.restart()
                alone += [(state, index + n, chain[:n]) for n in range(len(chain) + 1)]
            else:
                state.note_error()
        failed = {
            index + n: state.error
            for state, index, chain in every
            if state.error
            for n in range(len(chain) + 1)
        }
        for state, index, path in alone:
            is_allowed[index], why = self._fill_after(state, path, masks[index])
            if why:
                failed[index] = why
        if failed:
            self._refill(failed, masks, is_allowed)
        return is_allowed

    def _refill(self, failed: Mapping[int, str], masks: MaskArray, is_allowed: list[bool]) -> None:
        """Recompute the masks of states that failed from another state that shares them.

        Their lexers may differ in what they have computed before. If the second state fails too,
        the others would as well: failing is slow, so they get its error untried.
        """
        states = self._states
        sharers = {index: list[int]() for index in failed}
        for row, index in enumerate(self.indices):
            if index in sharers:
                sharers[index].append(row)
        for index, (first, *rows) in sharers.items():
            masks[index] = -1
            path = self._paths[first] if self._paths is not None else ()
            self.errors[first] = failed[index]
            self.errors |= {row: states[row].error for row in rows if states[row].error}
            others = [row for row in rows if not states[row].error]
            if not others:
                continue
            is_allowed[index], why = self._fill_after(states[others[0]], path, masks[index])
            if why:
                self.errors |= dict.fromkeys(others, why)
                for row in others if not path else ():
                    states[row].error = why

    def _fill_after(
        self, state: GrammarState, path: tuple[int, ...], mask: MaskArray
    ) -> tuple[bool, str]:
        """Write the mask after `path`, then roll the matcher back.

        Returns whether the path is allowed, and why the grammar fails there ("" if it does not).
        """
        mask[:] = -1
        state.catch_up()
        if state.error:
            return False, state.error
        matcher = state.matcher
        # Failing is slow: what follows a path that failed gets its error untried.
        why = self._failed_paths.get((state, path[:-1]), "")
        if not why:
            count: int = matcher.try_consume_tokens(list(path))
            if count == len(path):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if count:
                matcher.rollback(count)
            if not matcher.is_error():
                return count == len(path), ""
            mask[:] = -1
            if not path:
                state.note_error()
                return False, state.error
            why = failure(matcher)
            state.restart()
        self._failed_paths[state, path] = why
        return False, why

    def _runs(self) -> tuple[list[Run], list[Run]]:
        """Return the runs along draft chains, computed in one call each, and the single masks."""
        states = self._states
        paths = self._paths
        if paths is None:
            return [(states[row], i, ()) for i, row in enumerate(self.firsts)], []
        runs: list[Run] = []
        alone: list[Run] = []
        is_run = False
        last = 0
        for index, row in enumerate(self.firsts):
            state = states[row]
            path = paths[row]
            if not path:
                runs.append((state, index, ()))
                is_run = True
                last = row
            elif is_run and row == last + 1 and state is runs[-1][0] and path[:-1] == runs[-1][2]:
                runs[-1] = state, runs[-1][1], path
                last = row
            else:
                alone.append((state, index, path))
                is_run = False
        return runs, alone


def _copy(run: Run, masks: MaskArray) -> bool:
    """Copy a run's masks from the store; return False if any is missing."""
    state, index, chain = run
    assert state.prefix is not None
    kept = [state.masks.get(prefix) for prefix in state.prefix.along(chain)]
    found = [mask for mask in kept if mask is not None]
    if len(found) <= len(chain):
        return False
    masks[index : index + len(found)] = found
    return True


def _keep(run: Run, masks: MaskArray, is_allowed: Sequence[bool]) -> None:
    """Store the masks of a run's prefixes."""
    state, index, chain = run
    assert state.prefix is not None
    for i, prefix in enumerate(state.prefix.along(chain), index):
        if is_allowed[i]:
            state.masks.add(prefix, masks[i])


def _check(run: Run, masks: MaskArray, is_allowed: list[bool]) -> None:
    """Mark which drafts of a chain are allowed; masks after a forbidden one allow every token."""
    _, index, chain = run
    num_words = masks.shape[1]
    stop = index + 1 + len(chain)
    for i, token in enumerate(chain, index):
        word, bit = divmod(token, 32)
        if word >= num_words or not masks[i, word] >> bit & 1:
            masks[i + 1 : stop] = -1
            is_allowed[i + 1 : stop] = [False] * (stop - i - 1)
            break


def _catch_up(states: Sequence[GrammarState]) -> None:
    """Have the matchers consume their unread ids; single ids are consumed in parallel."""
    ones = [state for state in states if len(state.unread) == 1]
    if _CONSUMES_ON_ALL_CORES and len(ones) > 1:
        pairs = [(state.matcher, state.unread.pop()) for state in ones]
        for state, is_allowed in zip(ones, _executor().consume_token_par(pairs), strict=True):
            if not is_allowed:
                state.note_error()
    for state in states:
        if state.unread:
            state.catch_up()


def _group(run: Run) -> int:
    return run[0].group


def _compute(runs: list[Run], masks: MaskArray) -> None:
    """Compute and write the masks of `runs`; masks after a forbidden draft are -1."""
    plain = [(state.matcher, index) for state, index, chain in runs if not chain]
    chains = [(state.matcher, index, list(chain)) for state, index, chain in runs if chain]
    for _, index, chain in chains:
        masks[index + 1 : index + 1 + len(chain)] = -1
    where = masks.ctypes.data, masks.shape[1] * 4, len(masks)
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, *where)
    if chains:
        _executor().unsafe_compute_mask_ptr_with_draft_token(chains, *where)
