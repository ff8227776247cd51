"""Sampling parameters of a request that names none: the model's own, or the engine's.

Files are untrusted: every number's type and range are checked.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError
from engine.loading._fields import MAX_VOCAB, Fields
from engine.loading.gguf import GgufFile
from engine.loading.rope_config import MAX_POSITIONS
from engine.model_files import is_present, read_json
from engine.sampling_params import SamplingDefaults, SamplingParams

__all__ = ["generation_config", "sampling_defaults", "with_recommended"]

# Model name -> what its publisher's generation_config.json or model card recommends. A .gguf file
# seldom carries it.
_RECOMMENDED: dict[str, dict[str, float]] = {
    r"deepseek-r1": {"temperature": 0.6, "top_p": 0.95},
    r"gemma-?3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    r"gpt-oss": {"temperature": 1.0, "top_p": 1.0},
    r"llama-?3": {"temperature": 0.6, "top_p": 0.9},
    r"mistral-small": {"temperature": 0.15},
    r"qwen2\.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    r"qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    r"smollm2": {"temperature": 0.2, "top_p": 0.9},
    r"smollm3": {"temperature": 0.6, "top_p": 0.95},
}
_MILD = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}  # for every other model

# Defaults that transformers applies and the engine does not -> values at which they do nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "watermarking_config": (),
    "dola_layers": (),
    # Of .gguf files only
    "xtc_probability": (0.0,),
    "mirostat": (0,),
    "sequence": (),
}
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "repetition_penalty": "general.sampling.penalty_repeat",
    **{
        key: f"general.sampling.{key}"
        for key in ("top_k", "top_p", "min_p", "xtc_probability", "mirostat", "sequence")
    },
}
_ONLY_THE_BEST = 1e-9  # as a top_p, which must be above 0 in `SamplingParams`


def generation_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the sampling defaults in the model's generation_config.json.

    Parameters
    ----------
    path : str or path
        Model directory with or without a generation_config.json; or a .gguf file, whose
        general.sampling.* are read.

    Returns
    -------
    dict
        The keys present in the file, among temperature, top_k, top_p, min_p, repetition_penalty
        (numbers), eos_token_id (list of int), max_new_tokens (int), do_sample (bool).

    Raises
    ------
    ConfigError
        If the file is damaged or a value is out of range.

    Notes
    -----
    Defaults that the engine does not support, such as num_beams, are logged as warnings.
    """
    root = Path(path)
    file = root / "generation_config.json"
    if root.suffix == ".gguf":
        fields = _gguf_fields(root)
    elif is_present(file):
        fields = Fields(read_json(file, root=root), str(file))
    else:
        return {}
    stated = {
        "temperature": fields.real("temperature", 0.0, 100.0, None),
        "top_k": fields.integer("top_k", -1, MAX_VOCAB, None),  # -1 and 0: the whole vocabulary
        "top_p": fields.real("top_p", 0.0, 1.0, None),
        "min_p": fields.real("min_p", 0.0, 1.0, None),
        "repetition_penalty": fields.real("repetition_penalty", 1e-6, 100.0, None),
        "eos_token_id": list(fields.token_ids("eos_token_id", MAX_VOCAB)) or None,
        "max_new_tokens": fields.integer("max_new_tokens", 1, 1 << 62, None),
        "do_sample": fields.flag("do_sample", False) if fields.has("do_sample") else None,
    }
    for key, neutral in _UNSUPPORTED.items():
        if (given := fields.raw(key)) is not None and given not in neutral:
            fields.warn(key, "is not applied: the engine does not support it as a default")
    if stated["top_p"] == 0.0:
        stated["top_p"] = _ONLY_THE_BEST
    if stated["max_new_tokens"] is not None:
        stated["max_new_tokens"] = min(stated["max_new_tokens"], MAX_POSITIONS)
    return {key: value for key, value in stated.items() if value is not None}


def sampling_defaults(path: str | PathLike[str]) -> SamplingDefaults:
    """Return the sampling parameters of requests to a model that leave them out.

    They are those of the model's files. If these name none, they are those recommended for models
    of its name, and for other models a mild choice of the engine: temperature 0.7, top_p 0.95,
    min_p 0.05.

    Parameters
    ----------
    path : str or path
        See `generation_config`.

    Raises
    ------
    ConfigError
        If the file is damaged or a value is out of range.
    """
    config = generation_config(path)
    values = {name: config[key] for key, name in _FIELDS.items() if key in config}
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"{path}: generation_config.json: {error}") from None
    if values.keys() - {"max_tokens"}:
        return SamplingDefaults(values)
    if recommended := _recommended(path):
        return SamplingDefaults(values | recommended)
    return SamplingDefaults(values | _MILD, is_own=False)


def with_recommended(content: dict[str, Any], path: str | PathLike[str]) -> dict[str, Any]:
    """Return the content of a generation_config.json for a copy of a model under any name.

    If `content` names no way of sampling, that recommended for models of the original's name is
    added, since the copy's name may tell nothing.

    Parameters
    ----------
    content : dict
        The original's generation_config.json; empty if it has none.
    path : str or path
        The original; see `generation_config`.
    """
    is_named = any(content.get(key) is not None for key in _SAMPLING)
    if is_named or content.get("do_sample") is False or not (found := _recommended(path)):
        return content
    return {**content, **found, "do_sample": True}


def _recommended(path: str | PathLike[str]) -> dict[str, float]:
    """Return the sampling parameters recommended for models of this name; empty if unknown."""
    names = [name.lower().translate(_SEPARATORS) for name in _names(Path(path))]
    for pattern, recommended in _RECOMMENDED.items():
        if any(re.search(rf"\b{pattern}", name) for name in names):
            return recommended
    return {}


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FIELDS = {**{key: key for key in _SAMPLING}, "max_new_tokens": "max_tokens"}
_SEPARATORS = str.maketrans(" _", "--")


def _names(path: Path) -> list[str]:
    """Return the names of a model: of its file or folder, and those in a .gguf file's metadata."""
    if path.suffix == ".gguf":
        metadata = GgufFile(path).metadata
        found = [metadata.get(f"general.{key}") for key in ("basename", "name")]
        return [path.stem, *(name for name in found if isinstance(name, str))]
    if path.parent.name == "snapshots":  # the hub's cache: models--ORGANIZATION--NAME/snapshots
        return [path.parent.parent.name]
    return [path.name]


def _gguf_fields(path: Path) -> Fields:
    """Return the sampling defaults in a .gguf file's metadata, under generation_config.json's keys.

    Numbers are rounded to 6 digits, since the file stores them in float32.
    """
    metadata = GgufFile(path).metadata
    found = {key: metadata[name] for key, name in _GGUF_KEYS.items() if name in metadata}
    values = {key: float(f"{v:.6g}") if type(v) is float else v for key, v in found.items()}
    return Fields(values, str(path), _GGUF_KEYS)
