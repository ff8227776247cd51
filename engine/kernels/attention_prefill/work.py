"""Work division of attention_prefill on Hopper: work tiles of tokens, sections, splits of keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from engine.kernels._launch import ceil_div

__all__ = ["choose_cut", "choose_num_splits", "choose_section", "cut_into_tiles"]

# Tuned on an H200; to tune for another card, time `python -m tests.bench attention_prefill`.
_L2_BYTES = 24 << 20  # maximum bytes of K and V per section, to stay in L2
_MAX_SPLITS = 16  # maximum number of CTAs that share the keys of a work tile
_MIN_SPLIT_TILES = 4  # minimum key tiles per split; fewer do not pay for the combine
_TILE_COST = 1.3  # fixed cost of a work tile, in units of the cost of a warpgroup with rows
_MANY_ROUNDS = 16  # work tiles per CTA beyond which a partly idle last wave is negligible
_MAX_CUT = 8  # maximum number of a sequence's whole work tiles to replace by shorter ones


def choose_num_splits(tiles: int, key_tiles: int, sm_count: int) -> int:
    """Choose the number of CTAs that share the keys of a work tile, to fill the chip.

    Examples
    --------
    >>> choose_num_splits(tiles=16, key_tiles=64, sm_count=132)
    8
    >>> choose_num_splits(tiles=100, key_tiles=64, sm_count=132)
    1
    """
    wanted = min(sm_count // max(tiles, 1), key_tiles // _MIN_SPLIT_TILES, _MAX_SPLITS)
    return max(1, wanted)


@lru_cache(4096)
def choose_cut(
    tokens: int, tile_tokens: int, pairs: int, consumers: int, sm_count: int
) -> tuple[int, int]:
    """Divide a sequence into long and short work tiles so that the last wave is full.

    The cost of a tile must not depend on its position, as it would under a causal mask.

    Parameters
    ----------
    tokens : int
        Tokens of the longest sequence.
    tile_tokens : int
        Tokens of a long tile, which occupies all warpgroups.
    pairs : int
        Pairs (sequence, key/value head).
    consumers : int
        Consumer warpgroups per CTA.

    Returns
    -------
    long_tiles : int
        Number of long tiles, which come first.
    short_tokens : int
        Tokens per short tile, which leaves some of the warpgroups idle.

    Examples
    --------
    >>> choose_cut(8192, tile_tokens=192, pairs=1, consumers=3, sm_count=132)
    (0, 64)
    >>> choose_cut(2048, tile_tokens=192, pairs=32, consumers=3, sm_count=132)
    (8, 128)
    """
    all_long = ceil_div(tokens, tile_tokens)
    best = (_rounds(pairs * all_long, 0, 1.0, sm_count), -all_long, tile_tokens)
    if pairs * all_long > _MANY_ROUNDS * sm_count:
        return all_long, tile_tokens
    counts = {0, *range(max(0, all_long - _MAX_CUT), all_long)}
    for warpgroups in range(1, consumers):
        short_tokens = tile_tokens * warpgroups // consumers
        share = (warpgroups + _TILE_COST) / (consumers + _TILE_COST)
        for long_tiles in counts if short_tokens else ():
            short = ceil_div(tokens - long_tiles * tile_tokens, short_tokens)
            rounds = _rounds(pairs * long_tiles, pairs * short, share, sm_count)
            best = min(best, (rounds, -long_tiles, short_tokens))
    return -best[1], best[2]


def _rounds(long: int, short: int, share: float, sm_count: int) -> float:
    """Return the makespan of `long` tasks of length 1, then `short` tasks of length `share`, that
    are assigned greedily to `sm_count` workers."""
    whole, rest = divmod(long, sm_count)
    last = whole + (rest > 0)
    if not short:
        return float(last)

    def over_by(end: float) -> int:  # short tasks finished by `end`
        early = int((end - whole) / share + 1e-6) * (sm_count - rest)
        return early + max(0, int((end - whole - 1) / share + 1e-6)) * rest

    # The makespan is a number of short tasks after the long ones; each worker gets about `each`.
    each = short // sm_count
    spread = int(1 / share) + 2
    around = range(max(0, each - spread), each + spread + 1)
    ends = sorted([whole + n * share for n in around] + [whole + 1 + n * share for n in around])
    return max(float(last), next(end for end in ends if end >= whole and over_by(end) >= short))


def choose_section(pairs: int, nbytes: int) -> int:
    """Return the pairs per section: sections are equal, and the K and V of one (`nbytes` per pair)
    fit in L2."""
    sections = ceil_div(pairs, max(1, _L2_BYTES // nbytes))
    return ceil_div(pairs, max(1, sections))


def cut_into_tiles(
    tokens: int, tile_tokens: int, pairs: int, splits: int, cut: tuple[int, int] | None
) -> dict[str, Any]:
    """Return the kernel arguments of the work division.

    Parameters
    ----------
    tokens, tile_tokens, pairs : int
        See `choose_cut`.
    splits : int
        CTAs that share the keys of a work tile.
    cut : (int, int) or None
        Result of `choose_cut`; None means long tiles only.

    Examples
    --------
    >>> work = cut_into_tiles(2048, 192, 32, 1, (8, 128))
    >>> work["tiles_of_pair"], work["total"]
    (12, 384)
    """
    long_tiles, short_tokens = cut or (ceil_div(tokens, tile_tokens), tile_tokens)
    rest = max(tokens - long_tiles * tile_tokens, 0)
    tiles_of_pair = long_tiles + ceil_div(rest, short_tokens)
    return {
        "tile_tokens": tile_tokens,
        "num_pairs": pairs,
        "tiles_of_pair": tiles_of_pair,
        "long_tiles": long_tiles,
        "short_tokens": short_tokens,
        "total": pairs * tiles_of_pair * splits,
    }
