"""Random changes of configurations and tensors: an error of ours, or rows that are finite."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from engine.errors import ConfigError, WeightsError
from engine.loading.quantized import QuantizedCheckpoint, load_scheme
from engine.loading.safetensors import SafetensorsFile
from engine.weights import unpack_weight
from tests.fuzz.loader import QUANTIZATION_KEYS
from tests.fuzz.values import change_document, dump
from tests.golden.quantized import CASES, make_linear, write_safetensors

DTYPES = ["F32", "F16", "BF16", "I32", "I64", "I8", "U8", "F8_E4M3", "F8_E8M0"]


def read_or_refuse(folder) -> bool:
    """Tell whether everything can be read; what can must be finite."""
    started = time.perf_counter()
    try:
        scheme = load_scheme(folder)
        checkpoint = QuantizedCheckpoint(SafetensorsFile(folder / "model.safetensors"), scheme)
        for name in list(checkpoint.names()):
            rows = checkpoint.shape(name)[0] if checkpoint.shape(name) else 0
            found = checkpoint.read_rows(name, 0, rows)
            if found is not None:
                assert found.shape == checkpoint.shape(name)
                assert np.isfinite(found.numbers()).all()
                assert unpack_weight(found.to_weight()).shape == found.shape
        return True
    except (ConfigError, WeightsError) as error:
        assert len(str(error)) < 1200
        return False
    finally:
        assert time.perf_counter() - started < 10


def change_tensors(rng: random.Random, tensors: dict) -> dict:
    """Return tensors with one changed: its dtype, shape, values or name, or without it."""
    changed = dict(tensors)
    kind = rng.choice(list(changed))
    dtype, array = changed[kind]
    way = rng.random()
    if way < 0.2:
        changed[kind] = (rng.choice(DTYPES), array)
    elif way < 0.5:
        flat = array.reshape(-1)
        shapes = [(0,), (1,), (), array.shape[::-1], array.shape[:1], (1, *array.shape)]
        shape = rng.choice(shapes)
        changed[kind] = (dtype, np.resize(flat, shape))
    elif way < 0.7:
        raw = np.array(array)
        index = rng.randrange(raw.size)
        raw.reshape(-1)[index] = rng.choice([0, 1, 127]) if raw.dtype.kind != "f" else np.nan
        changed[kind] = (dtype, raw)
    elif way < 0.85:
        del changed[kind]
    else:
        names = ["weight", "qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales"]
        changed[rng.choice(names)] = changed.pop(kind)
    return changed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_changed_checkpoints(tmp_path, case):
    rng = random.Random(case)
    one = CASES[case]
    tensors, _ = make_linear(case, (32, 256))
    plain = {"config.json": "{}"} if one.file != "config.json" else {}
    accepted = 0
    for trial in range(40):
        config, stored = one.config, tensors
        if trial and trial % 2:
            config = change_document(rng, config, QUANTIZATION_KEYS)
        elif trial:
            stored = change_tensors(rng, stored)
        text = dump(config)
        if not plain:
            text = f'{{"quantization_config": {text}}}'
        folder = tmp_path / str(trial)
        folder.mkdir()
        for name, content in {**plain, one.file: text}.items():
            (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
        named = {f"layers.0.up_proj.{kind}": tensor for kind, tensor in stored.items()}
        write_safetensors(folder / "model.safetensors", named)
        done = read_or_refuse(folder)
        assert done or trial, "the case itself"
        accepted += done
    assert accepted > 3
