"""`engine.quantize`: write an 8-bit or 4-bit copy of a checkpoint or a .gguf file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import is_integer, shown
from engine.device import Device, resolve_device
from engine.errors import RequestError, WeightsError
from engine.layers.token_ids import checked_sequence
from engine.loading.download import resolve_model
from engine.loading.gguf import GgufFile
from engine.loading.quantized_folder import (
    FolderPlan,
    check_output,
    plan_folder,
    scale_dtype,
    take_rows,
    write_folder,
)
from engine.loading.tensor_reader import half_split
from engine.loading.weight_table import Placement
from engine.loading.weights import load_weights
from engine.model_files import excerpt, read_file
from engine.models.decoder import Decoder
from engine.quantization.gptq_layers import gptq_layers
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.weights.compressed_tensors import storable_format
from engine.weights.quantize import Codes

__all__ = ["quantize"]

_LENGTH = 512  # tokens per calibration sequence
_MAX_TEXT_BYTES = 1 << 30
_CHARACTERS_PER_TOKEN = 16  # characters of text encoded per requested token


def quantize(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    format: str = "int4",
    calibrate: str | PathLike[str] | Sequence[int] | None = None,
    calibration_tokens: int = 32768,
    ignore: Sequence[str] = (),
    device: str | Device = "auto",
    progress: bool = False,
) -> Path:
    """Write a quantized copy of a model in the compressed-tensors layout.

    Linear layers inside decoder layers are quantized. Embeddings, the output layer, norms, routers
    and the tokenizer files are copied.

    Parameters
    ----------
    model : str or path
        A folder in Hugging Face's layout with safetensors, a hub id, or a .gguf file, whose tensors
        are dequantized one at a time; its copy is a folder too, with the file's tokenizer.
    out : str or path
        Output folder, absent or empty. It appears only once the copy is complete.
    format : str
        "fp8", "fp8_block", "int8", "int4" (in groups of 128), or "int4_g32", "int4_g64_zp", ...
        (see `docs/quantization.md`).
    calibrate : path or sequence of int, optional
        UTF-8 text file, or token ids, to calibrate GPTQ with: it minimises the change in layer
        outputs on such text. Expert matrices are rounded to nearest.
    calibration_tokens : int
        Maximum number of calibration tokens, used in sequences of 512.
    ignore : sequence of str
        Linear layers to copy: names, or regular expressions prefixed with "re:", matched from the
        start of a name.
    device : str
        Device for calibration; unused without `calibrate`.
    progress : bool
        Show a progress bar on stderr, if a terminal, while loading weights.

    Returns
    -------
    Path
        The folder `out`.

    Raises
    ------
    ConfigError, WeightsError, DownloadError
        If the model or an option cannot be used. Folders of quantized models are rejected.
    RequestError
        If the calibration text is unreadable or too short.
    """
    form = storable_format(format)
    out = Path(out)
    if isinstance(ignore, str) or not all(isinstance(one, str) for one in ignore):
        raise WeightsError(f"ignore must be a sequence of names; got {shown(ignore)}")
    if calibrate is not None and not form.is_packed:
        raise WeightsError(
            f"calibrate needs a format in groups, which GPTQ rounds to; got {form.name!r}"
        )
    check_output(out)
    source = resolve_model(model, progress=progress)
    plan = plan_folder(source.path, form, ignore)
    calibrated: Iterator[tuple[str, Codes]] = iter(())
    if calibrate is not None:
        sequences = _sequences(plan, calibrate, calibration_tokens)
        calibrated = _calibrated(plan, sequences, resolve_device(device)[0], progress)
    write_folder(plan, out, calibrated)
    return out


def _sequences(plan: FolderPlan, calibrate: Any, count: int) -> np.ndarray[Any, Any]:
    """Return the calibration text as token ids (B, L)."""
    if not is_integer(count) or count < 1:
        raise RequestError(f"calibration_tokens must be a whole number >= 1; got {shown(count)}")
    length = min(_LENGTH, plan.config.max_position_embeddings, count)
    ids: Any = calibrate
    if isinstance(calibrate, str | PathLike):
        data = read_file(Path(calibrate), _MAX_TEXT_BYTES, None, RequestError)
        try:
            text = data.decode("utf-8-sig")  # Some editors write a BOM.
        except UnicodeDecodeError as error:
            raise RequestError(f"{excerpt(calibrate)}: must be UTF-8 ({error.reason})") from None
        ids = _tokenizer(plan).encode(text[: count * _CHARACTERS_PER_TOKEN])
    ids = checked_sequence(ids, plan.config.vocab_size, "calibrate")
    rows = min(len(ids), count) // length
    if rows < 1:
        raise RequestError(f"calibrate must have at least {length} tokens; got {len(ids)}")
    return np.ascontiguousarray(ids[: rows * length].reshape(rows, length))


def _calibrated(
    plan: FolderPlan, sequences: np.ndarray[Any, Any], device: Device, progress: bool
) -> Iterator[tuple[str, Codes]]:
    """Yield the codes of the checkpoint's tensors, layer by layer."""
    config = plan.config
    dtype = config.dtype if device.is_cuda else "float32"
    max_len = sequences.shape[1]
    weights = load_weights(
        plan.source, config, device=device, dtype=dtype, max_model_len=max_len, progress=progress
    )
    tensors: dict[str, dict[str, tuple[Placement, ...]]] = {}
    for name, places in plan.matrices.items():
        tensors.setdefault(str(places[0].target), {})[name] = places
    dtypes = {
        target: scale_dtype(plan.form, plan.dtype(next(iter(own))))
        for target, own in tensors.items()
    }
    layers = gptq_layers(
        Decoder(config, weights, max_len),
        device,
        sequences,
        plan.form,
        scale_dtype=dtypes.__getitem__,
        wanted=tensors.__contains__,
    )
    for target, made in layers:
        for name, places in tensors[target].items():
            yield name, take_rows(made, _rows(plan, places))


def _tokenizer(plan: FolderPlan) -> Tokenizer:
    if plan.source.suffix == ".gguf":
        return load_tokenizer(GgufFile(plan.source).metadata)
    return load_tokenizer(plan.source)


def _rows(plan: FolderPlan, places: Sequence[Placement]) -> np.ndarray[Any, Any]:
    """Return, for each row of a tensor, its row in the fused weight."""
    rows = np.empty(places[0].shape[0], np.int64)
    for place in places:
        own = np.arange(place.last - place.first)
        if place.rotated is not None and plan.config.interleaved_rope:
            own = np.argsort(half_split(own, place.rotated))
        rows[place.first : place.last] = place.start + own
    return rows
