"""Hashes of what a request's blocks hold, for keys that the scheduler does not know of."""

from __future__ import annotations

from engine.request import Request

__all__ = ["prefix_hash"]


def prefix_hash(hashes: list[int], request: Request, index: int, size: int, salt: int) -> int:
    """Return the hash of a request's tokens up to the end of block `index`.

    Parameters
    ----------
    hashes : list of int
        Those of the request's first blocks; the missing ones up to `index` are appended.
    request : Request
        Its tokens up to the end of the block are known.
    index, size : int
        Number of the block in the request, and tokens per block.
    salt : int
        Requests of different salts have different hashes of the same tokens.
    """
    for i in range(len(hashes), index + 1):
        before = hashes[-1] if hashes else salt
        hashes.append(hash((before, *request.token_ids(i * size, (i + 1) * size))))
    return hashes[index]
