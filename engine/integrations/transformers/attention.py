"""Attention of transformers' models: our kernels behind its attention interface."""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ContractError
from engine.integrations import torch as ops
from engine.integrations.transformers.masks import AttentionMask, Runs

__all__ = ["attention_forward"]

_NOT_EXACT = (
    "attention mask: padding between tokens, tokens that see later ones, or too many packed "
    "sequences for a compiled model; pass cu_seq_lens_q and its companions, or do not compile"
)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; for `AttentionInterface.register`.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer. Its `is_causal` is the default for the argument `is_causal`.
    query : (B, H, S, D) tensor
    key, value : (B, K, S_k, D) tensors
        `value` may have fewer columns, as in multi-head latent attention.
    attention_mask : AttentionMask, optional
        See `make_mask`. None means no padding, and `is_causal` and `sliding_window` apply.
    dropout : float
        Must be 0.
    s_aux : (H,) tensor, optional
        Sinks: one extra logit per head, without a value.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k : optional
        Sequences packed into one row, as `DataCollatorWithFlattening` returns them.

    Returns
    -------
    out : (B, S, H, D) tensor
    weights : None

    Raises
    ------
    ContractError
        If the call needs dropout, attention weights, a dense mask or a bias on scores: the kernels
        do not support them.
    """
    _refuse(module, attention_mask, dropout, kwargs)
    mask = attention_mask
    if mask is None:
        mask = _mask_of_layer(module, is_causal, sliding_window)
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    if mask.num_keys is not None:
        key, value = (x[:, :, : mask.num_keys] for x in (key, value))
    rule = {
        "causal": mask.causal,
        "window": mask.window,
        "pattern": mask.pattern,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        _check_packed(query, mask)
        out = ops.attention_varlen(
            _flat(query),
            _flat(key),
            _flat(value),
            cu_seq_lens_q.int(),
            cu_seq_lens_k.int(),
            int(max_length_q),
            int(max_length_k),
            **rule,
        )
    elif mask.runs is not None:
        out = _attend_runs(query, key, value, mask.runs, rule)
    else:
        out = ops.attention(*(x.transpose(1, 2) for x in (query, key, value)), **rule)
    out = out.view(query.shape[0], query.shape[2], *out.shape[-2:])
    return out[..., :width], None


def _refuse(module: torch.nn.Module, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise a ContractError for an argument that the kernels do not support."""
    name = f"attention of {type(module).__name__}"
    if dropout:
        raise ContractError(f"{name}: attention_dropout must be 0 in training; got {dropout}")
    if kwargs.get("output_attentions"):
        raise ContractError(f"{name}: no attention weights are computed; use eager")
    if mask is not None and not isinstance(mask, AttentionMask):
        given = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ContractError(
            f"{name}: attention_mask must be 2-D padding or None; got a mask {given}; use sdpa"
        )
    for unsupported in ("position_bias", "block_table", "cache"):
        if kwargs.get(unsupported) is not None:
            raise ContractError(f"{name}: `{unsupported}` is not supported; use sdpa")


def _mask_of_layer(
    module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None
) -> AttentionMask:
    """Return the mask of a layer that was called without one: its rows have no padding."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window and not causal:
        name = type(module).__name__
        raise ContractError(f"attention of {name}: a window in both directions without a mask")
    return AttentionMask(causal, sliding_window or 0)


def _check_packed(query: torch.Tensor, mask: AttentionMask) -> None:
    if query.shape[0] != 1:
        raise ContractError(
            f"attention: cu_seq_lens_q needs a batch of one packed row; got {query.shape[0]} rows"
        )
    if mask.num_keys is not None:
        raise ContractError("attention: cu_seq_lens_q together with a static cache")


def _attend_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs, rule: dict[str, Any]
) -> torch.Tensor:
    if runs.is_exact is not None:
        torch._assert_async(runs.is_exact, _NOT_EXACT)
    keys, row_length = _tokens(key)
    values, value_row_length = _tokens(value)
    if row_length != value_row_length:
        keys = _flat(key)
        values = _flat(value)
        row_length = key.shape[2]
    key_ends = (runs.key_rows * row_length + runs.key_positions).clamp(max=keys.shape[0])
    return ops.attention_varlen(
        _flat(query),
        keys,
        values,
        runs.query_ends,
        key_ends,
        runs.max_queries,
        runs.max_keys,
        **rule,
    )


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return rows (B, K, S, D) as tokens (T, K, D), and the number of tokens from row to row.

    A cache (B, K, S, D) is not copied: behind a row's S tokens of one head come those of its
    other heads, which belong to no run. Gradients need tokens without such gaps.
    """
    batch, heads, length, width = x.shape
    to_row, to_head, to_token, to_column = x.stride()
    is_cache = to_column == 1 and 0 < to_token * length <= to_row and to_row % to_token == 0
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    if not is_cache or needs_gradient:
        return _flat(x), length
    row_length = to_row // to_token
    shape = ((batch - 1) * row_length + length, heads, width)
    return x.as_strided(shape, (to_token, to_head, to_column)), row_length


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return rows (B, H, S, D) as tokens (B * S, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)
