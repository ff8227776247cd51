"""What heads that draft ask of a model that several ranks share: all of them take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.models.decoder import Decoder

__all__ = ["SharedTarget"]


class SharedTarget:
    """Stands in for the `Decoder` under a head, which only rank 0 has.

    The head's features are the same on all ranks; embedding and output layer are divided.

    Parameters
    ----------
    decoder : Decoder
        Rank 0's part.
    embed : callable
        Looks up token ids (T,), with all ranks: (T, N).
    logits : callable
        Takes hidden states (R, N) to logits (R, V), with all ranks.
    """

    def __init__(
        self, decoder: Decoder, embed: Callable[[Any], Any], logits: Callable[[Any], Any]
    ) -> None:
        self.embed = embed
        self.logits = logits
        self.layers = decoder.layers
        self.final_norm = decoder.final_norm
        self.max_model_len = decoder.max_model_len
        self.xp = decoder.xp
