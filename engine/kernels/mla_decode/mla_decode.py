"""Multi-head latent attention over pages of latents: `cuda_src/mla_decode/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine import reference
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels.mla_decode import portable, sm90
from engine.kernels.mla_decode.problem import checked_problem

__all__ = ["mla_decode", "specs"]


def specs(
    dtype: str, *, latent_dim: int | None = None, block_size: int | None = None, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for one latent width and block size or for all."""
    return portable.specs(dtype, latent_dim) + sm90.specs(dtype, latent_dim, block_size)


def mla_decode(
    q: Any,
    q_rope: Any,
    pages: Any,
    *,
    block_tables: Any,
    context_lens: Any,
    scale: float,
    num_splits: int | None = None,
    max_context_len: int | None = None,
    pdl: bool = False,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest Q tokens of each sequence to its latents: softmax(scale S) C.

    Multi-head latent attention in its absorbed form [1]_: all heads share one key per token, the
    latent c and the rotated key k_rope; its value is c. A head's scores are q·c + q_rope·k_rope
    with the query already multiplied by the head's up-projection of the keys, and the result is to
    be multiplied by its up-projection of the values.

    Parameters
    ----------
    q : (B, Q, H, L) array of float32, float16 or bfloat16 (NumPy: or float64)
        The last Q tokens of each sequence, L <= 512. A view whose last axis is contiguous is not
        copied.
    q_rope : (B, Q, H, R) array of q's dtype
        Rotated queries, R <= 64.
    pages : (P, block_size, L + R) array of q's dtype
        Latents and rotated keys, as `mla_store` writes them. block_size is 16, 32, 64 or 128. The
        tokens of a page are contiguous.
    block_tables : (B, NB) array of int32
        Ids of each sequence's pages. Entries beyond its length are never read.
    context_lens : (B,) array of int32
        Number of keys of each sequence, including the Q query tokens: query i sees keys 0 to
        len - Q + i.
    scale : float
        Factor on the scores: the width of an expanded key to the power of -1/2, times the factors
        of the rope scaling. Neither is known from the absorbed shapes.
    num_splits : int, optional
        Number of splits of each sequence's keys. If given, the bits of a result do not depend on
        the rest of the batch. By default the keys are split so that all thread blocks are busy.
    max_context_len : int, optional
        Upper bound of `context_lens`, by default NB * block_size. It affects only the splits.
    pdl : bool
        Programmatic dependent launch (Hopper's kernel only): the kernel starts while the preceding
        one ends. It reads `block_tables` and `context_lens` early: no kernel that is still running
        may write these.
    out : (B, Q, H, L) array of q's dtype, optional
        Array for the result; may be `q`.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : (B, Q, H, L) array of q's dtype
        0 for a query that sees no key.
    lse : (B, Q, H) array of float32 (float64 for float64)
        Natural logarithm of the sum of exp(score); -inf for a query without keys.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and block ids are checked on the CPU only; on
        CUDA they are clamped to the arrays.

    Notes
    -----
    Scores, softmax and sums are float32; exp(score - base) is rounded to q's dtype before it
    multiplies the latents; splits are combined by their log-sum-exp in float32, in the order of the
    keys; the result is rounded once. On Hopper a key is read from memory once for all heads, if L
    is 256 or 512, R is 64 and the values have 16 bits.

    References
    ----------
    .. [1] DeepSeek-AI: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3)  # L = 2, R = 1
    >>> tables, lens = np.array([[1, 0]], np.int32), np.array([17], np.int32)
    >>> q, q_rope = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1, 1), np.float32)
    >>> mla_decode(q, q_rope, pages, block_tables=tables, context_lens=lens, scale=1.0).round(3)
    array([[[[66.353, 67.353]]]], dtype=float32)
    """
    call = Contract("mla_decode")
    return_lse = bool(return_lse)  # an array raises here, before anything is written
    q = call.array("q", q, "B Q H L", MIRROR_FLOATS, layout="rows")
    q_rope = call.array("q_rope", q_rope, "B Q H R", q.dtype, layout="rows")
    tables = {"block_tables": block_tables, "context_lens": context_lens}
    options = {"scale": scale, "num_splits": num_splits, "max_context_len": max_context_len}
    arrays = {"q": q, "q_rope": q_rope, "pages": pages, **tables}
    problem = checked_problem(call, arrays, options)
    if call.on_cpu:
        result, result_lse = reference.mla_decode(
            q,
            q_rope,
            problem.pages,
            block_tables=problem.block_tables,
            context_lens=problem.context_lens,
            scale=problem.scale,
            return_lse=True,
        )
        out = call.finish(out, result, layout="rows")
        return (out, result_lse) if return_lse else out
    out = call.output("out", out, q.shape, q.dtype, layout="rows")
    lse = call.xp.empty(q.shape[:3], np.float32) if return_lse else None
    problem = replace(problem, out=out, lse=lse)
    if sm90.is_supported(problem):
        sm90.launch(problem, pdl=pdl)
    else:
        portable.launch(problem)
    return out if lse is None else (out, lse)
