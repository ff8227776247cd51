"""Write a Hugging Face model folder with quantized matrices (compressed-tensors)."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import to_numpy
from engine.errors import WeightsError
from engine.loading.classifier import HEAD, is_classifier
from engine.loading.generation_config import with_recommended
from engine.loading.gguf_checkpoint import GgufCheckpoint
from engine.loading.hf_config import load_hf_config
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.loading.safetensors_writer import DTYPE_NAMES, SafetensorsWriter
from engine.loading.text_model import open_model, text_values, wrapper_of
from engine.loading.weight_memory import is_quantized
from engine.loading.weight_table import Placement, place_tensors
from engine.model_files import excerpt, is_present, read_file, read_json
from engine.models.family import WeightName
from engine.models.registry import family
from engine.weights import Format
from engine.weights.compressed_tensors import (
    layout_fault,
    quantization_config,
    stored_arrays,
    stored_shapes,
)
from engine.weights.quantize import Codes, round_to_codes

__all__ = ["FolderPlan", "check_output", "plan_folder", "scale_dtype"]
__all__ += ["take_rows", "write_folder"]

_COPIED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "LICENSE*")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_OLD_CONFIGS = ("quantize_config.json", "quant_config.json")
_MAX_COPIED_BYTES = 1 << 28
_FLOATS = ("float32", "float16", "bfloat16")
_EXPERTS = ("experts_gate_up", "experts_down")
# Other readers look up each expert by name, even if one tensor stores all of them.
_EVERY_EXPERT = r"re:.*\.experts\."


@dataclass(frozen=True)
class FolderPlan:
    """Which tensors of a checkpoint to quantize, and which to copy.

    Attributes
    ----------
    source : Path
    config : ModelConfig
    checkpoint : SafetensorsFile, SafetensorsDirectory or GgufCheckpoint
    form : Format
    matrices : mapping of str to tuple of Placement
        Tensors to quantize -> their rows in the engine's fused weights.
    ignored : tuple of str
        Linear layers to copy: names, or regular expressions prefixed with "re:".
    """

    source: Path
    config: ModelConfig
    checkpoint: SafetensorsFile | SafetensorsDirectory | GgufCheckpoint
    form: Format
    matrices: Mapping[str, tuple[Placement, ...]]
    ignored: tuple[str, ...]

    def dtype(self, name: str) -> str:
        """Return the dtype of tensor `name` of the checkpoint."""
        stored = self.checkpoint.dtype(name)
        return DTYPE_NAMES.get(stored, stored)

    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and shape of every tensor to write."""
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self.checkpoint.names():
            shape = self.checkpoint.shape(name)
            dtype = self.dtype(name)
            if name not in self.matrices:
                entries[name] = dtype, shape
                continue
            stored = stored_shapes(self.form, (shape[0], shape[1]), dtype)
            entries |= {_sibling(name, end): entry for end, entry in stored.items()}
        return entries


def plan_folder(source: Path, form: Format, ignore: Sequence[str] = ()) -> FolderPlan:
    """Read the headers of a checkpoint and choose the matrices to quantize.

    Parameters
    ----------
    source : Path
        A folder in Hugging Face's layout, or a .gguf file, whose matrices are dequantized.
    form : Format
        One of `compressed_tensors.STORABLE`.
    ignore : sequence of str
        Names of linear layers, or regular expressions prefixed with "re:", matched from the start.

    Raises
    ------
    ConfigError
        If the configuration cannot be used.
    WeightsError
        If a folder's model is already quantized, a matrix does not fit the format, one tensor
        stores all experts, or an entry of `ignore` matches no layer.
    """
    checkpoint: SafetensorsFile | SafetensorsDirectory | GgufCheckpoint
    if source.suffix == ".gguf":
        checkpoint = GgufCheckpoint(source)
        config = checkpoint.config
    else:
        _refuse_quantized(source)
        config = load_hf_config(source)
        checkpoint = open_model(source)
    found = {name: checkpoint.shape(name) for name in checkpoint.names()}
    table = family(config.model_type).names
    places: dict[str, list[Placement]] = {}
    heads = (HEAD,) if is_classifier(source) else ()  # kept as they are
    where = str(checkpoint.path)
    for place in place_tensors(
        where, config, table, found, is_spare=lambda name: name.startswith(heads)
    ):
        places.setdefault(place.name, []).append(place)
    linears = [name for name, shape in found.items() if _is_linear(name, shape, places)]
    outputs = ("lm_head", *(head.rstrip(".") for head in heads))
    modules = {**dict.fromkeys(outputs, ""), **{_module(name): name for name in linears}}
    skipped = _matching(modules, ignore)
    matrices = {
        name: tuple(places[name])
        for module, name in modules.items()
        if module not in skipped and name in places and _is_chosen(name, places[name][0])
    }
    ignored = [module for module, name in modules.items() if name not in matrices]
    if any(_is_every_expert(own[0]) for own in places.values()):
        ignored.append(_EVERY_EXPERT)
    plan = FolderPlan(source, config, checkpoint, form, matrices, tuple(ignored))
    _check_matrices(plan, places)
    return plan


def write_folder(plan: FolderPlan, out: Path, calibrated: Iterable[tuple[str, Codes]] = ()) -> None:
    """Write the folder `out` one tensor at a time; on failure it is removed.

    Parameters
    ----------
    plan : FolderPlan
    out : Path
        Absent or empty.
    calibrated : iterable of (str, Codes)
        Precomputed codes by name; all other matrices are rounded to nearest.

    Raises
    ------
    WeightsError
        If a matrix contains a NaN or infinity, or the folder cannot be written.
    """
    with _new_folder(out) as folder:
        with SafetensorsWriter(folder, plan.entries()) as writer:
            left = dict(plan.matrices)
            for name, made in calibrated:
                del left[name]
                _write_matrix(plan, writer, name, made)
            for name in plan.checkpoint.names():
                if name in left:
                    _write_matrix(plan, writer, name, _rounded(plan, name))
                elif name not in plan.matrices:
                    writer.write(name, plan.checkpoint.view(name))
        if isinstance(plan.checkpoint, GgufCheckpoint):
            files = plan.checkpoint.files()
            config = dict(files.pop("config.json"))
            for name, content in files.items():
                _write_json(folder / name, content)
        else:
            # The text model alone: the checkpoint has its tensors, under its names.
            values = read_json(plan.source / "config.json", root=plan.source)
            config = dict(text_values(values, str(plan.source / "config.json")))
            if wrapper_of(plan.source) is not None:  # the tensors told, not config.json
                config["tie_word_embeddings"] = plan.config.tie_word_embeddings
            for path in _companions(plan.source):
                (folder / path.name).write_bytes(read_file(path, _MAX_COPIED_BYTES, plan.source))
            _write_generation_config(plan.source, folder)
        config["quantization_config"] = quantization_config(plan.form, plan.ignored)
        _write_json(folder / "config.json", config)


def _write_generation_config(source: Path, folder: Path) -> None:
    """Add to the copied generation_config.json what the source's name tells."""
    name = "generation_config.json"
    content = read_json(source / name, root=source) if is_present(source / name) else {}
    if (found := with_recommended(content, source)) is not content:
        _write_json(folder / name, found)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def scale_dtype(form: Format, dtype: str) -> str:
    """Return the dtype that scales are rounded to in a model of `dtype`.

    The engine keeps group scales in 16 bits, so they are rounded even if the file stores float32.
    """
    return "float16" if dtype == "float32" and form.is_packed else dtype


def check_output(out: Path) -> None:
    """Raise `WeightsError` unless `out` is absent or empty and its parent folder exists."""
    if is_present(out) and not (out.is_dir() and not any(out.iterdir())):
        raise WeightsError(f"{excerpt(out)} must be absent or an empty folder; it is not")
    if not out.absolute().parent.is_dir():
        raise WeightsError(f"{excerpt(out.absolute().parent)} must be a folder; it is not")


def _rounded(plan: FolderPlan, name: str) -> Codes:
    array = plan.checkpoint.view(name)
    try:
        return round_to_codes(array, plan.form, scale_dtype(plan.form, array.dtype.name))
    except WeightsError as error:
        raise WeightsError(f"{plan.checkpoint.path}: tensor {name!r}: {error}") from None


def _write_matrix(plan: FolderPlan, writer: SafetensorsWriter, name: str, made: Codes) -> None:
    for end, array in stored_arrays(plan.form, made, plan.dtype(name)).items():
        writer.write(_sibling(name, end), array)


def _refuse_quantized(source: Path) -> None:
    config = text_values(read_json(source / "config.json", root=source))
    old = [name for name in _OLD_CONFIGS if is_present(source / name)]
    if config.get("quantization_config") is not None or old:
        where = old[0] if old else "config.json has quantization_config"
        raise WeightsError(
            f"{excerpt(source)} must be a model of 16 or 32 bits; it is quantized already ({where})"
        )


def _is_linear(name: str, shape: tuple[int, ...], places: Mapping[str, list[Placement]]) -> bool:
    """Tell whether a tensor is a linear layer's weight, or all experts' matrices."""
    kind = places[name][0].target.kind if name in places else ""
    is_table = kind in ("embed", "embed_positions")
    return len(shape) > 1 and not is_table and not kind.endswith("_bias")


def _is_every_expert(place: Placement) -> bool:
    """Tell whether a tensor holds the matrices of all experts in a layer."""
    return place.target.kind in _EXPERTS and len(place.shape) > 2


def _is_chosen(name: str, place: Placement) -> bool:
    is_expert = place.target.kind in _EXPERTS
    if _is_every_expert(place):
        raise WeightsError(
            f"tensor {name!r} must be the matrix of one expert; it has those of all, which other "
            f"readers of the format do not take. Ignore it, or save the experts apart"
        )
    if place.layout.transposed:
        raise WeightsError(
            f"tensor {name!r} must be the matrix of a linear layer; it is stored transposed, which "
            f"other readers of the format do not take. Quantize the model when it is loaded"
        )
    return is_expert or is_quantized(str(place.target))


def _product(target: WeightName) -> str:
    """Return the name of the unit a matrix belongs to, which must have a single format.

    The unit is a fused weight of the model, or all experts of a layer.
    """
    return f"layers.{target.layer}.experts" if target.kind in _EXPERTS else str(target)


def _check_matrices(plan: FolderPlan, places: Mapping[str, list[Placement]]) -> None:
    if not plan.matrices:
        raise WeightsError("ignore must leave a matrix to quantize; it leaves none")
    fused = {_product(p.target) for own in plan.matrices.values() for p in own}
    for name, own in places.items():
        target = _product(own[0].target)
        if name not in plan.matrices and target in fused:
            raise WeightsError(
                f"ignore must have all parts of {target} or none, because they are one product; "
                f"it has {_module(name)!r}"
            )
    for name, parts in plan.matrices.items():
        if any(part.factor != 1.0 for part in parts):  # `TensorReader` refuses the folder
            raise WeightsError(
                f"tensor {name!r} must not be quantized in a folder, since config.json multiplies "
                "it. Ignore it, or quantize the model when it is loaded"
            )
        fault = layout_fault(plan.form, plan.checkpoint.shape(name))
        if fault:
            raise WeightsError(
                f"tensor {name!r} {fault}. Choose a format with a smaller group or with scales "
                f"of rows, or ignore it"
            )
        if (dtype := plan.dtype(name)) not in _FLOATS:
            raise WeightsError(f"tensor {name!r} must be {', '.join(_FLOATS)}; got {dtype}")


def _matching(modules: Iterable[str], ignore: Sequence[str]) -> set[str]:
    """Return the modules selected by `ignore` under compressed-tensors' rules."""
    chosen: set[str] = set()
    for entry in ignore:
        pattern = entry.removeprefix("re:") if entry.startswith("re:") else re.escape(entry) + "$"
        try:
            found = [module for module in modules if re.match(pattern, module)]
        except re.error as error:
            raise WeightsError(
                f"ignore must have regular expressions after 're:'; got {entry!r} ({error})"
            ) from None
        if not found:
            raise WeightsError(f"ignore must name linear layers of the model; got {entry!r}")
        chosen.update(found)
    return chosen


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _sibling(name: str, end: str) -> str:
    return f"{_module(name)}.{end}"


def _companions(source: Path) -> Iterator[Path]:
    """Yield the other files to copy: tokenizer, generation config, chat templates."""
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.name not in _NOT_COPIED and not path.name.endswith(".index.json"):
                yield path


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder: renamed to `out` on success, removed on failure.

    An empty folder `out` stays itself, since it may be a mount point or someone's working
    directory: it has the temporary folder, whose files move up, config.json last.
    """
    check_output(out)
    final = out.absolute()
    is_new = not final.exists()
    name = f".{final.name}.{secrets.token_hex(4)}.partial"
    folder = final.with_name(name) if is_new else final / name
    try:
        folder.mkdir()
        try:
            yield folder
            if is_new:
                os.replace(folder, final)
                return
            for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, final / path.name)
            folder.rmdir()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise WeightsError(f"{excerpt(out)}: cannot be written ({reason})") from error


def take_rows(made: Codes, rows: np.ndarray[Any, Any]) -> Codes:
    """Return some rows of a group-quantized matrix, on the host."""
    offsets = None if made.offsets is None else to_numpy(made.offsets)[rows]
    return Codes(to_numpy(made.codes)[rows], to_numpy(made.scales)[rows], offsets)
