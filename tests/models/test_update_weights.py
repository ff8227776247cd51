"""New weights in a loaded model: afterwards it is the model of the new checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.config import ModelConfig
from engine.device import CPU, to_numpy
from engine.errors import WeightsError
from engine.loading.weight_table import expected_tensors
from engine.loading.weight_update import open_update
from engine.loading.weights import load_weights
from engine.models.registry import family
from engine.weights import FORMATS, Shard
from tests.models.test_golden import CASES, LIMIT

Q = "model.layers.0.self_attn.q_proj.weight"


_SPIN = """extern "C" __global__ void spin(long long clocks) {
  for (long long end = clock64() + clocks; clock64() < end;) {}
}"""


class _Tensor:
    """An array that a stream of its own writes; as in torch, only DLPack tells of that stream."""

    def __init__(self, array, stream):
        self._array, self._stream = array, stream

    @property
    def __cuda_array_interface__(self):
        return self._array.__cuda_array_interface__ | {"version": 2, "stream": None}

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        with self._stream:
            return self._array.__dlpack__(**options)


def _other(base, folder):
    """Write a checkpoint of the same shapes with random numbers."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        values = rng.standard_normal(tensor.shape) * 0.2 + (tensor.ndim < 2) * 0.5
        tensors[name] = np.asarray(values, tensor.dtype).reshape(tensor.shape)
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def _logits(model, prompt):
    cache = model.new_cache(1, len(prompt))
    return to_numpy(model.step([prompt], cache, logits="all"))[0]


@pytest.mark.parametrize("case", CASES)
def test_arrays_of_every_family(golden, case, where, tmp_path):
    """From NumPy arrays; the arrays that layers hold stay where they are."""
    want = golden(case)
    other = _other(want.directory, tmp_path / "other")
    model = engine.load(other, device=where, dtype="float32", progress=False)
    places = [array for layer in model.decoder.layers for _, array in layer.arrays()]
    names = model.update_weights(load_file(want.directory / "model.safetensors"))
    assert "embed" in names
    error = np.abs(_logits(model, want.prompt) - want.logits).max() / want.logits.std()
    assert error < LIMIT
    now = [array for layer in model.decoder.layers for _, array in layer.arrays()]
    assert all(a is b for a, b in zip(places, now, strict=True))


@pytest.mark.parametrize("case", ["qwen3", "phi3_longrope_long", "gemma3_wrapped", "gpt_oss"])
def test_a_folder(golden, case, where, tmp_path):
    want = golden(case)
    other = _other(want.directory, tmp_path / "other")
    model = engine.load(other, device=where, dtype="float32", progress=False)
    model.update_weights(want.directory)
    error = np.abs(_logits(model, want.prompt) - want.logits).max() / want.logits.std()
    assert error < LIMIT


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
@pytest.mark.parametrize("case", ["gemma", "olmo_biases_new_keys", "qwen3"])
def test_the_rounded_output_layer_of_tied_embeddings(golden, case, quantization, tmp_path):
    """It is a weight of its own, of the embedding's tensor; qwen3 is not tied."""
    want = golden(case)
    other = _other(want.directory, tmp_path / "other")
    options = {"device": "cpu", "dtype": "float32", "quantization": quantization}
    model, fresh = (
        engine.load(folder, progress=False, **options) for folder in (other, want.directory)
    )
    assert "lm_head" in model.update_weights(want.directory)
    assert np.array_equal(_logits(model, want.prompt), _logits(fresh, want.prompt))


def test_a_part_of_the_weights(golden, tmp_path):
    """Rows of q alone: k and v of the fused weight stay."""
    want = golden("qwen3")
    stored = load_file(want.directory / "model.safetensors")
    new = np.random.default_rng(1).standard_normal(stored[Q].shape).astype(np.float32)
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(want.config))
    save_file({**stored, Q: new}, folder / "model.safetensors")
    model = want.load()
    assert model.update_weights({Q: new.astype(np.float64)}) == ("layers.0.qkv",)
    changed = engine.load(folder, device="cpu", dtype="float32", progress=False)
    assert np.array_equal(_logits(model, want.prompt), _logits(changed, want.prompt))


@pytest.mark.gpu
@pytest.mark.parametrize("is_slow", [False, True])
def test_an_array_on_a_stream_of_its_own(cp, golden, is_slow):
    """It is read once that stream has written it, and before that stream writes it again."""
    want = golden("qwen3")
    stored = load_file(want.directory / "model.safetensors")[Q]
    new = np.random.default_rng(1).standard_normal(stored.shape).astype(np.float32)
    model = want.load("cuda")
    model.update_weights({Q: new})
    expected = _logits(model, want.prompt)
    model.update_weights({Q: stored})
    source = cp.asarray(new)
    array = cp.zeros_like(source)
    stream = cp.cuda.Stream(non_blocking=True)
    spin = cp.RawKernel(_SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))  # loads it
    array[...] = source
    array.fill(0)
    cp.cuda.Device().synchronize()
    with stream if is_slow else cp.cuda.Stream.null:
        spin((1,), (1,), (np.int64(10**8),))
    with stream:
        array[...] = source
    model.update_weights({Q: _Tensor(array, stream)})
    with stream:
        array.fill(0)
    assert np.abs(_logits(model, want.prompt) - expected).max() / expected.std() < LIMIT


def _updated_as_fresh(want, form, folder):
    """Return other weights, updated to those of `want`, after a comparison with loading these."""
    other = _other(want.directory, folder / "other")
    options = {"device": "cpu", "dtype": "float32", "progress": False, "quantization": form}
    model = engine.load(other, **options)
    model.update_weights(want.directory)
    fresh = engine.load(want.directory, **options)
    assert np.array_equal(_logits(model, want.prompt), _logits(fresh, want.prompt))
    return model


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_quantized_weights_are_quantized_anew(golden, form, tmp_path):
    want = golden("qwen3")
    model = _updated_as_fresh(want, form, tmp_path)
    value = Q.replace("q_proj", "v_proj")
    part = {value: load_file(want.directory / "model.safetensors")[value]}
    with pytest.raises(WeightsError, match=r"'layers\.0\.qkv', which .*q_proj.*k_proj\.weight$"):
        model.update_weights(part)


@pytest.mark.parametrize("form", ["fp8_block", "int4_g32"])
def test_quantized_rows_that_no_tensor_fills(golden, form, tmp_path):
    """They are zeros, as after loading: narrow values leave rows between the heads."""
    _updated_as_fresh(golden("mimo_v2_flash"), form, tmp_path)


def test_the_rounded_output_layer_of_a_padded_vocabulary(tmp_path):
    shard = Shard(4, 5)
    config = ModelConfig("llama", 67, 32, 1, 5, 5, 8, 40, 64)
    folders = [tmp_path / "old", tmp_path / "new"]
    rng = np.random.default_rng(0)
    for folder in folders:
        folder.mkdir()
        tensors = {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, (shape, _) in expected_tensors(config, family("llama").names).items()
        }
        save_file(tensors, folder / "model.safetensors")
    options = {"quantization": FORMATS["q8_0"], "shard": shard}
    weights, fresh = (load_weights(folder, config, **options) for folder in folders)
    open_update(folders[1], config, weights, CPU, "q8_0", shard).write()
    for name, weight in fresh.items():
        assert np.array_equal(weights[name].data, weight.data)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "must hold weights of the model; got none"),
        ({"model.layers.9.self_attn.q_proj.weight": np.ones((2, 2))}, "not part of a qwen3 model"),
        ({Q: np.ones((3, 5), np.float32)}, r"must have shape .* got \(3, 5\)"),
        ({Q: np.ones((3, 5), np.int32)}, "must be one of float32, .* got int32"),
        ({Q: "x"}, "must be an array; got str"),
        ({5: np.ones(3)}, "names of weights must be str; got 5"),
    ],
)
def test_what_is_refused_changes_nothing(golden, source, message):
    want = golden("qwen3")
    model = want.load()
    stored = load_file(want.directory / "model.safetensors")
    if source:
        source = {"model.norm.weight": stored["model.norm.weight"] * 2, **source}
    with pytest.raises(WeightsError, match=message):
        model.update_weights(source)
    error = np.abs(_logits(model, want.prompt) - want.logits).max() / want.logits.std()
    assert error < LIMIT


def test_values_beyond_float16_change_nothing(golden):
    want = golden("qwen3")
    model = want.load(dtype="float16")
    before = _logits(model, want.prompt)
    stored = load_file(want.directory / "model.safetensors")
    new = {name: tensor * 2 for name, tensor in stored.items()}
    new[Q][-1] = 7e4
    with pytest.raises(WeightsError, match=r"q_proj\.weight' must have finite values up to 65504"):
        model.update_weights(new)
    assert np.array_equal(_logits(model, want.prompt), before)


def test_a_damaged_quantized_folder_changes_nothing(golden, tmp_path):
    want = golden("qwen3")
    model = want.load()
    stored = load_file(want.directory / "model.safetensors")
    new = {name: tensor * 2 for name, tensor in stored.items()}
    new[Q] = new[Q].astype(np.int8)
    new[f"{Q}_scale"] = np.full((len(new[Q]), 1), np.nan, np.float32)
    group = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }
    config = want.config | {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(new, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj\.weight_scale"):
        model.update_weights(tmp_path)
    error = np.abs(_logits(model, want.prompt) - want.logits).max() / want.logits.std()
    assert error < LIMIT
