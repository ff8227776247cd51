"""`MtpFamily`: declares the tensors of a family's multi-token prediction layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NEXTN", "MtpFamily"]


@dataclass(frozen=True)
class MtpFamily:
    """Declaration of a multi-token prediction layer: a layer of the model behind a projection.

    In names, "{n}" is the number of the model's layers.

    Attributes
    ----------
    layer : str
        Prefix of the layer's tensors, instead of "model.layers.{n}.".
    proj, embed_norm, hidden_norm, final_norm : str
        Modules: the projection of both inputs, and the norms of the embedding, of the model's
        hidden state and of the output.
    repeated : tuple of str
        Modules below `layer` that repeat the model's own; they are not read.
    embedding_first : bool
        The projection reads the embedding's features before the hidden state's.
    zero_first : bool
        The embedding at position 0 is 0.
    modules : mapping of str to str
        Module below `layer` -> the model's name of it, where they differ.
    """

    layer: str
    proj: str
    embed_norm: str
    hidden_norm: str
    final_norm: str
    repeated: tuple[str, ...] = ()
    embedding_first: bool = True
    zero_first: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)


_NEXTN = "model.layers.{n}."

NEXTN = MtpFamily(
    layer=_NEXTN,
    proj=f"{_NEXTN}eh_proj",
    embed_norm=f"{_NEXTN}enorm",
    hidden_norm=f"{_NEXTN}hnorm",
    final_norm=f"{_NEXTN}shared_head.norm",
    repeated=(f"{_NEXTN}embed_tokens", f"{_NEXTN}shared_head.head"),
)
"""DeepSeek-V3 and its relatives: the layer after the last one."""
