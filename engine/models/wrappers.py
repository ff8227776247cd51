"""`Wrapper`: declares a multimodal model_type, of which the engine serves the text model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WRAPPERS", "Wrapper", "text_name"]

# Prefix of a module of the text model in a checkpoint -> its prefix in the text model alone, the
# first match wins. Which one a checkpoint has depends on the release that wrote it.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.blocks.", "model.layers."),  # of kimi_k25, saved by transformers
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.", "model."),
    ("lm_head.", "lm_head."),
)


def text_name(name: str) -> str:
    """Return the name in the text model alone of a tensor of the text model.

    Examples
    --------
    >>> text_name("model.language_model.norm.weight"), text_name("transformer.norm.weight")
    ('model.norm.weight', 'transformer.norm.weight')
    """
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Wrapper:
    """Declaration of one multimodal model_type.

    Attributes
    ----------
    model_type : str
        Hugging Face's name.
    text : str
        `model_type` of the text model, if `text_config` does not name one.
    towers : tuple of str
        Modules beside the text model, such as "visual". Their tensors are never read.
    idle_keys : tuple of str
        Keys of `text_config` that the text model alone applies, and the multimodal one does not.
    has_adapters : bool
        The checkpoint has LoRA adapters for images and audio beside its matrices. They are never
        read.

    Examples
    --------
    >>> wrapper = Wrapper("qwen3_vl", "qwen3_vl_text", ("visual",))
    >>> wrapper.text_name("model.language_model.norm.weight")
    'model.norm.weight'
    >>> wrapper.text_name("model.visual.pos_embed.weight") is None
    True
    """

    model_type: str
    text: str
    towers: tuple[str, ...]
    idle_keys: tuple[str, ...] = ()
    has_adapters: bool = False

    def text_name(self, name: str) -> str | None:
        """Return the name of a tensor in the text model alone; None for towers and adapters."""
        if name.removeprefix("model.").startswith(tuple(f"{tower}." for tower in self.towers)):
            return None
        if self.has_adapters and ".lora_" in name:
            return None
        return text_name(name.replace(".base_layer.", ".") if self.has_adapters else name)

    def aliases(self, module: str) -> tuple[str, ...]:
        """Return the names by which a quantization_config may call a module of the text model.

        Examples
        --------
        >>> Wrapper("llama4", "llama4_text", ("vision_model",)).aliases("lm_head")
        ('lm_head', 'language_model.lm_head')
        """
        found = [module]
        for prefix, own in _PREFIXES:
            if f"{module}.".startswith(own):
                alias = prefix + f"{module}.".removeprefix(own)
                found.append(alias.removesuffix("."))
        return tuple(dict.fromkeys(found))


_EMBEDDERS = ("embed_vision", "embed_audio")
_DECLARED = (
    Wrapper("mistral3", "mistral", ("vision_tower", "multi_modal_projector")),
    Wrapper(
        "gemma3",
        "gemma3_text",
        ("vision_tower", "multi_modal_projector"),
        idle_keys=("final_logit_softcapping",),
    ),
    Wrapper("gemma3n", "gemma3n_text", ("vision_tower", "audio_tower", *_EMBEDDERS)),
    Wrapper("gemma4", "gemma4_text", ("vision_tower", "audio_tower", *_EMBEDDERS)),
    Wrapper("gemma4_unified", "gemma4_unified_text", ("vision_embedder", *_EMBEDDERS)),
    Wrapper("llama4", "llama4_text", ("vision_model", "multi_modal_projector")),
    Wrapper("qwen2_vl", "qwen2_vl_text", ("visual",)),
    Wrapper("qwen2_5_vl", "qwen2_5_vl_text", ("visual",)),
    Wrapper("qwen3_vl", "qwen3_vl_text", ("visual",)),
    Wrapper("qwen3_vl_moe", "qwen3_vl_moe_text", ("visual",)),
    Wrapper("qwen3_5", "qwen3_5_text", ("visual",)),
    Wrapper("kimi_k25", "deepseek_v3", ("vision_tower", "mm_projector")),
    Wrapper("qwen3_5_moe", "qwen3_5_moe_text", ("visual",)),
    Wrapper("phi4_multimodal", "phi3", ("embed_tokens_extend",)),
    Wrapper("phi4mm", "phi3", ("embed_tokens_extend",), has_adapters=True),
)

WRAPPERS: dict[str, Wrapper] = {known.model_type: known for known in _DECLARED}
"""All supported multimodal model types, by Hugging Face's model_type."""
