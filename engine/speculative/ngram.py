"""N-gram drafts: the tokens that followed an earlier occurrence of the request's last tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.ngram_index import NgramIndex

__all__ = ["NgramProposer", "SuffixProposer"]

_READ_PER_CALL = 1 << 14  # tokens read per `propose` call (a few ms); longer prompts take more
_NUM_CHECKED = 8  # number of last-read tokens compared with the request before it reads on
_LONGEST_SUFFIX = 48  # maximum match length in tokens
_DRAFTS_PER_TOKEN = 2.0  # drafts per matched token
_BRANCH_SHARE = 0.25  # minimum share of the occurrences that justifies a second branch


class NgramProposer:
    """Proposes the tokens after the latest earlier occurrence of the longest final n-gram.

    Every request has an index on the host. It costs a few microseconds per token and per
    proposal, whatever the request's length, and about ten bytes per token and n-gram length. A long
    prompt is read in several calls; until then its request gets no drafts.

    Parameters
    ----------
    shortest, longest : int
        Minimum and maximum match length in tokens.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(ignore_eos=False, stop_token_ids=None)
    >>> request = Request("r0", [1, 2, 3, 4, 5, 1, 2], rules)
    >>> NgramProposer(2, 4).propose([(request, 3)])
    [Drafts(token_ids=(3, 4, 5), parents=None)]
    """

    def __init__(self, shortest: int = 3, longest: int = 8) -> None:
        self._lengths = shortest, longest
        self._indices: dict[Request, NgramIndex] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Drafts | None]:
        """Return drafts for each request. See `Proposer.propose`."""
        proposals: list[Drafts | None] = []
        budget = _READ_PER_CALL
        for request, count in wanted:
            index, num_read, is_read = self._index(request, budget)
            budget -= num_read
            proposals.append(self._drafts(index, count) if is_read else None)
        return proposals

    def read_ahead(self, requests: Sequence[Request]) -> None:
        """Read prompts. See `ReadsAhead.read_ahead`."""
        budget = _READ_PER_CALL
        for request in requests:
            budget -= self._index(request, budget)[1]

    def forget(self, request: Request) -> None:
        """Drop the index of a request."""
        self._indices.pop(request, None)

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return 0.0."""
        return 0.0

    def close(self) -> None:
        """Drop all indices."""
        self._indices.clear()

    def _index(self, request: Request, budget: int) -> tuple[NgramIndex, int, bool]:
        """Read up to `budget` tokens; return the index, the number read, and if it is complete."""
        known = request.num_known_tokens
        index = self._indices.get(request)
        if index is None or index.is_full or not _is_prefix(index.token_ids, request):
            index = self._indices[request] = NgramIndex(*self._lengths, num_tokens=known)
        start = len(index.token_ids)
        stop = min(known, start + budget)
        if stop > start:
            index.extend(request.token_ids(start, stop))
        return index, stop - start, stop == known

    def _drafts(self, index: NgramIndex, count: int) -> Drafts | None:
        _, ends = index.matches(all_of_them=False)
        return Drafts(tuple(_continuation(index.token_ids, ends[0], count))) if ends else None


class SuffixProposer(NgramProposer):
    """Proposes the most frequent continuation of the longest suffix that occurred before.

    Longer matches get more drafts: two per matched token. If the occurrences continue differently,
    the most frequent continuation is proposed (arXiv:2411.04975).

    Parameters
    ----------
    shortest : int
        Minimum match length in tokens.
    allow_trees : bool
        Also propose a second continuation if it is frequent.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(ignore_eos=False, stop_token_ids=None)
    >>> request = Request("r0", [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], rules)
    >>> SuffixProposer(2).propose([(request, 1)])
    [Drafts(token_ids=(3,), parents=None)]
    """

    def __init__(self, shortest: int = 3, *, allow_trees: bool = False) -> None:
        super().__init__(shortest, max(shortest, _LONGEST_SUFFIX))
        self._allow_trees = allow_trees

    def _drafts(self, index: NgramIndex, count: int) -> Drafts | None:
        length, ends = index.matches()
        if not ends:
            return None
        count = min(count, int(length * _DRAFTS_PER_TOKEN))
        if len(ends) == 1:
            return Drafts(tuple(_continuation(index.token_ids, ends[0], count)))
        main, branch = _vote(index.token_ids, ends, count)
        if branch is None or not self._allow_trees:
            return Drafts(tuple(main))
        return _tree(index.token_ids, main, branch, count)


def _is_prefix(read: list[int], request: Request) -> bool:
    """Tell whether the last tokens read still match the request's."""
    start = max(0, len(read) - _NUM_CHECKED)
    return request.token_ids(start, len(read)) == read[start:]


def _continuation(ids: Sequence[int], end: int, count: int) -> list[int]:
    """Return `count` tokens after position `end`; at the end of the sequence, repeat them."""
    found = list(ids[end + 1 : end + 1 + count])
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return found


def _vote(
    ids: Sequence[int], ends: list[int], count: int
) -> tuple[list[int], tuple[float, int, list[int]] | None]:
    """Return the most frequent continuation of the occurrences, and the likeliest second branch.

    The branch is a tuple: its share of the occurrences, its depth, and their last positions.
    """
    main: list[int] = []
    branch = None
    num_all = len(ends)
    while len(ends) > 1 and len(main) < count:
        depth = len(main)
        following = Counter(ids[end + 1 + depth] for end in ends if end + 1 + depth < len(ids))
        if not following:
            break
        (token_id, _), *others = following.most_common(2)
        share = others[0][1] / num_all if others else 0.0
        if share >= _BRANCH_SHARE and (branch is None or share > branch[0]):
            branch = share, depth, _followed_by(ids, ends, depth, others[0][0])
        ends = _followed_by(ids, ends, depth, token_id)
        main.append(token_id)
    return main + _continuation(ids, ends[0], count)[len(main) :], branch


def _followed_by(ids: Sequence[int], ends: list[int], depth: int, token_id: int) -> list[int]:
    return [end for end in ends if end + 1 + depth < len(ids) and ids[end + 1 + depth] == token_id]


def _tree(
    ids: Sequence[int], main: list[int], branch: tuple[float, int, list[int]], count: int
) -> Drafts:
    """Return a tree of the main continuation and one branch, given its share of the drafts."""
    share, depth, ends = branch
    num_branch = min(count - 1 - depth, max(1, int(share * count)))
    if num_branch < 1:
        return Drafts(tuple(main))
    other, _ = _vote(ids, ends, depth + num_branch)
    main = main[: count - num_branch]
    parents = [*range(-1, len(main) - 1), depth - 1]
    parents += range(len(main), len(main) + num_branch - 1)
    return Drafts((*main, *other[depth:]), tuple(parents))
