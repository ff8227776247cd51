"""What a model's files say about it, read without loading the weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig
from engine.loading.download import ModelSource
from engine.loading.gguf import GgufFile
from engine.loading.model_config import load_config
from engine.loading.quantized.scheme import load_scheme
from engine.loading.weight_table import weight_shapes
from engine.model_files import is_present, read_file, read_json

__all__ = ["ModelFacts", "model_facts", "num_parameters", "quantization_formats"]

_MAX_CARD_BYTES = 4 << 20


@dataclass(frozen=True)
class ModelFacts:
    """What a model is.

    Attributes
    ----------
    architecture : str
    num_parameters : int
    context : int
        Longest sequence, in tokens.
    weights : str
        Its quantization formats, or the dtype of its weights.
    license : str
        "" if the files name none.
    """

    architecture: str
    num_parameters: int
    context: int
    weights: str
    license: str


def model_facts(source: ModelSource) -> ModelFacts:
    """Read what a model is.

    Raises
    ------
    ConfigError, WeightsError
        If its files are damaged, or the model is not supported.
    """
    config = load_config(source)
    return ModelFacts(
        architecture=config.model_type,
        num_parameters=num_parameters(config),
        context=config.max_position_embeddings,
        weights=" ".join(quantization_formats(source)) or config.dtype,
        license=_license(source),
    )


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights; a tied output layer counts once."""
    shapes = weight_shapes(config)
    if config.tie_word_embeddings:
        shapes.pop("lm_head", None)
    return sum(math.prod(shape) for shape in shapes.values())


def quantization_formats(source: ModelSource) -> tuple[str, ...]:
    """Return the quantization formats of a model's files; none for a folder without any.

    A .gguf file mixes types, float ones too: of these, the one of most bytes in layers, by the
    file's name for it.
    """
    if source.kind == "gguf":
        sizes: Counter[str] = Counter()
        for name, tensor in GgufFile(source.path).tensors.items():
            if name.startswith("blk."):
                sizes[tensor.format.name] += tensor.stop - tensor.start
        return tuple(name for name, _ in sizes.most_common(1))
    scheme = load_scheme(source.path)
    return () if scheme is None else tuple(scheme.formats)


def _license(source: ModelSource) -> str:
    if source.kind == "gguf":
        value = GgufFile(source.path).metadata.get("general.license", "")
        return value if isinstance(value, str) else ""
    value = read_json(source.path / "config.json", root=source.path).get("license")
    return value if isinstance(value, str) else _license_of_card(source.path)


def _license_of_card(folder: Path) -> str:
    """Return the license in the header of a model card; "" without one."""
    card = folder / "README.md"
    if not is_present(card):
        return ""
    text = read_file(card, _MAX_CARD_BYTES, root=folder).decode("utf-8", "replace")
    header = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    named = re.search(r"^license:\s*(\S+)", header[1], re.MULTILINE) if header else None
    return named[1] if named else ""
