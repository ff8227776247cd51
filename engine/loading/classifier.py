"""Classification heads: the matrix that `...ForSequenceClassification` models end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import ConfigError, WeightsError
from engine.loading.text_model import open_model, wrapper_of
from engine.model_files import is_present, read_json

__all__ = ["HEAD", "Classifier", "is_classifier", "read_classifier"]

HEAD = "score."
"""Beginning of the names of a head's tensors."""

_ENDING = "ForSequenceClassification"
_ACTIVATIONS = {  # problem_type -> activation; by default that of the number of labels
    "regression": "none",
    "multi_label_classification": "sigmoid",
}
_PAIR_ACTIVATIONS = {  # end of the name of a class of torch -> activation
    ".Identity": "none",
    ".Sigmoid": "sigmoid",
}

_Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Classifier:
    """A head, on the host.

    Attributes
    ----------
    weight : (L, N) array of float32
        L labels, N features of the final norm.
    bias : (L,) array of float32, or None
    labels : tuple of str
        Names of the labels.
    activation : str
        Makes scores of logits: "sigmoid", "softmax" over the labels, or "none".
    """

    weight: _Array
    bias: _Array | None
    labels: tuple[str, ...]
    activation: str

    def scores(self, features: _Array) -> _Array:
        """Return the score of each label.

        Parameters
        ----------
        features : (N,) array of float32
            Output of the final norm for the last token.

        Examples
        --------
        >>> head = Classifier(np.eye(2, dtype=np.float32), None, ("no", "yes"), "softmax")
        >>> head.scores(np.array([1.0, 1.0], np.float32)).tolist()
        [0.5, 0.5]
        """
        logits: _Array = self.weight @ features
        if self.bias is not None:
            logits = logits + self.bias
        if self.activation == "none":
            return logits
        # Both in the form whose exponentials are at most 1.
        if self.activation == "softmax":
            parts = np.exp(logits - logits.max())
            return np.asarray(parts / parts.sum(), np.float32)
        small = np.exp(-np.abs(logits))
        return np.asarray(np.where(logits < 0, small, np.float32(1)) / (1 + small), np.float32)


def is_classifier(directory: str | PathLike[str]) -> bool:
    """Tell whether the model in `directory` ends in a classification head, by its config.json.

    Raises
    ------
    ConfigError
        If it is a multimodal one.
    """
    name = _architecture(directory)
    if not name.endswith(_ENDING):
        return False
    if wrapper_of(directory) is not None:
        raise ConfigError(f"{directory}: {name} is not supported: it reads more than text")
    return True


def read_classifier(directory: str | PathLike[str], hidden_size: int) -> Classifier | None:
    """Read the head of the model in `directory`; None if it has none.

    Raises
    ------
    WeightsError
        If the head is missing or damaged.
    ConfigError
        See `is_classifier`.
    """
    path = Path(directory)
    if not is_classifier(path):
        return None
    values = read_json(path / "config.json", root=path)
    weight = _tensor(path, f"{HEAD}weight")
    if weight is None:
        raise WeightsError(f"{path}: tensor '{HEAD}weight' of {_architecture(path)} is missing")
    if weight.ndim != 2 or not len(weight) or weight.shape[1] != hidden_size:
        wanted = f"(labels, {hidden_size})"
        message = f"{path}: tensor '{HEAD}weight' must have shape {wanted}; got {weight.shape}"
        raise WeightsError(message)
    bias = _tensor(path, f"{HEAD}bias")
    if bias is not None and bias.shape != weight.shape[:1]:
        wanted = f"({len(weight)},), as many as '{HEAD}weight' has labels"
        message = f"{path}: tensor '{HEAD}bias' must have shape {wanted}; got {bias.shape}"
        raise WeightsError(message)
    labels = _labels(values, len(weight), path)
    return Classifier(weight, bias, labels, _activation(values, len(weight), path))


def _architecture(directory: str | PathLike[str]) -> str:
    path = Path(directory)
    if not path.is_dir() or not is_present(path / "config.json"):
        return ""
    names = read_json(path / "config.json", root=path).get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _tensor(path: Path, name: str) -> _Array | None:
    checkpoint = open_model(path)
    if name not in checkpoint:
        return None
    shape = checkpoint.shape(name)
    rows = checkpoint.read(name, 0, shape[0] if shape else 1)
    return np.array(rows, np.float32).reshape(shape)


def _activation(values: Mapping[str, Any], count: int, path: Path) -> str:
    """Return the activation of a head of `count` labels.

    One label scores pairs, with the activation that sentence-transformers writes for its
    cross-encoders. (It writes one for several labels, too, but these are classes.)
    """
    own = values.get("sentence_transformers")
    name = "sbert_ce_default_activation_function"  # written before release 4
    given = values.get(name)
    if isinstance(own, dict) and own.get("activation_fn") is not None:
        name = "sentence_transformers.activation_fn"
        given = own["activation_fn"]
    if count > 1 or given is None:
        default = "sigmoid" if count == 1 else "softmax"
        return _ACTIVATIONS.get(str(values.get("problem_type")), default)
    for ending, activation in _PAIR_ACTIVATIONS.items():
        if isinstance(given, str) and given.startswith("torch.") and given.endswith(ending):
            return activation
    raise ConfigError(
        f"{path / 'config.json'}: {name} must be torch's Sigmoid or Identity; got {shown(given)}"
    )


def _labels(values: Mapping[str, Any], count: int, path: Path) -> tuple[str, ...]:
    """Return the names of `count` labels; transformers leaves them out if there are two."""
    given = values.get("id2label")
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    keys = set(map(str, range(count)))
    if not isinstance(given, dict) or given.keys() != keys:
        raise ConfigError(
            f"{path / 'config.json'}: id2label must name the {count} labels of '{HEAD}weight'; "
            f"got {shown(given)}"
        )
    return tuple(str(given[str(i)]) for i in range(count))
