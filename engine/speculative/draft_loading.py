"""Load the draft model or head, and check that it shares the target's vocabulary."""

from __future__ import annotations

from engine.cache.kv_cache import KVGeometry
from engine.errors import ConfigError
from engine.loading.download import resolve_model
from engine.loading.model_config import load_config
from engine.model import Model, load
from engine.speculative.config import HEAD_METHODS, SpeculativeConfig
from engine.speculative.heads import LoadedHead, load_head

__all__ = ["check_vocabulary", "load_draft"]

_NUM_COMPARED = 512  # number of token ids to compare


def load_draft(config: SpeculativeConfig | None, target: Model) -> Model | LoadedHead | None:
    """Load the draft model or head for a target; None if the method needs neither.

    It is loaded on the target's device, in the target's dtype unless `config` names another.

    Raises
    ------
    ConfigError, WeightsError
        If it does not match the target, or an option or a file cannot be used.
    """
    if config is not None and config.method in HEAD_METHODS:
        return load_head(config, target)
    if config is None or config.method != "draft_model":
        return None
    assert config.model is not None
    if config.revision is not None:
        raise ConfigError(
            "speculative_config.revision must be left out: models are loaded as they are in the "
            f"cache; got {config.revision!r}"
        )
    sizes = load_config(resolve_model(config.model))
    draft = load(
        config.model,
        device=target.device,
        dtype=config.dtype or target.dtype,
        quantization=config.quantization,
        max_model_len=min(sizes.max_position_embeddings, target.max_model_len),
        deterministic=target.deterministic,
        config=sizes,
    )
    try:
        _check_caches(draft)
        check_vocabulary(draft, target)
    except ConfigError:
        draft.close()
        raise
    return draft


def _check_caches(draft: Model) -> None:
    """Reject a draft model with recurrent layers: its states cannot be rolled back."""
    if KVGeometry.of_model(draft.config, draft.dtype).has_states:
        raise ConfigError(
            "speculative_config.model must have no recurrent layers; got "
            f"{draft.name!r} of model_type {draft.config.model_type!r}"
        )


def check_vocabulary(draft: Model, target: Model) -> None:
    """Check that two models use the same token ids.

    The embeddings may have more rows than the tokenizer has ids. At least 512 evenly spaced ids and
    the last 8 are compared, or all ids of a smaller vocabulary.

    Parameters
    ----------
    draft, target : Model
        Loaded models.

    Raises
    ------
    ConfigError
        If they differ; the message names both models and the first difference.
    """
    if not (draft.has_tokenizer and target.has_tokenizer):
        sizes = draft.config.vocab_size, target.config.vocab_size
        if sizes[0] != sizes[1]:
            raise _differs(draft, target, f"they have {sizes[0]} and {sizes[1]} ids")
        return
    ours = draft.tokenizer
    theirs = target.tokenizer
    if ours.vocab_size != theirs.vocab_size:
        what = f"their tokenizers have {ours.vocab_size} and {theirs.vocab_size} ids"
        raise _differs(draft, target, what)
    count = ours.vocab_size
    step = max(1, count // _NUM_COMPARED)
    for token_id in (*range(0, count, step), *range(max(0, count - 8), count)):
        tokens = ours.id_to_token(token_id), theirs.id_to_token(token_id)
        if tokens[0] != tokens[1]:
            raise _differs(draft, target, f"id {token_id} is {tokens[0]!r} and {tokens[1]!r}")


def _differs(draft: Model, target: Model, what: str) -> ConfigError:
    return ConfigError(
        f"speculative_config.model must have the vocabulary of the model, {target.name!r}; got "
        f"{draft.name!r}: {what}"
    )
