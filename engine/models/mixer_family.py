"""`MixerFamily`: declares which layers of a family replace attention, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FULL_ATTENTION", "MixerFamily"]

FULL_ATTENTION = "full_attention"
"""The value of `layer_types` for attention over all keys."""


@dataclass(frozen=True)
class MixerFamily:
    """Declaration of a hybrid family's kinds of layers.

    Attributes
    ----------
    kinds : mapping of str to str
        Value of `layer_types` -> kind of the layer (`ModelConfig.layer_kinds`).
    interval : str
        Key of n: without `layer_types`, every n-th layer is full attention; "" for no such key.
    attends_last : bool
        Without `layer_types`, the last layer has full attention if no other one has.
    attends_in_rest : bool
        Without `layer_types`, the layers after the last n-th one have full attention too.
    full_layers : str
        Key of the list of layers with full attention, read without `layer_types`; all layers if
        the list is missing. "" for no such key.
    pattern : str
        Key of a string with one letter of `letters` per layer, read without `layer_types`; "" for
        no such key. Its length is the number of layers.
    letters : mapping of str to str
        Letter -> value of `layer_types`.
    single_branch : bool
        See `ModelConfig.single_branch`.
    conv_activation : str
        Key of the activation after the convolution.
    norm_eps : float
        Epsilon of the norms in gated delta nets; 0 means the model's.
    is_kda : bool
        Gated delta nets are Kimi delta attention, of heads of `linear_head_dim` features.
    has_gate_latents : bool
        Kimi delta attention projects its gates from latents of `linear_head_dim` features.
    config_key : str
        Key of an object with the sizes of such layers, and lists of both kinds, counted from 1:
        without these, every fourth layer after the first is full attention. "" for no such key.
    """

    kinds: Mapping[str, str]
    interval: str = ""
    attends_last: bool = False
    attends_in_rest: bool = False
    full_layers: str = ""
    pattern: str = ""
    letters: Mapping[str, str] = field(default_factory=dict)
    single_branch: bool = False
    conv_activation: str = "hidden_act"
    norm_eps: float = 0.0
    is_kda: bool = False
    has_gate_latents: bool = False
    config_key: str = ""
