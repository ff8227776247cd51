"""Loading fused arrays: every family, dtype and file format, and mismatched checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.device import CPU, Device
from engine.dtypes import np_dtype
from engine.errors import OutOfMemoryError, WeightsError
from engine.loading import weight_memory
from engine.loading.download import resolve_model
from engine.loading.hf_config import config_from_dict
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights, weight_bytes, weight_shapes
from engine.weights import FORMATS

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text"]


def assert_same(got: dict, wanted: dict, dtype) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        array = got[name].data
        assert array.dtype == dtype and array.flags.c_contiguous, name
        np.testing.assert_array_equal(array, value.astype(dtype), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_every_family(make_model, family, tiny):
    path, config, tensors = make_model(family)
    loaded = load_config(path)
    weights = load_weights(path, loaded)
    assert_same(weights, tiny.fused(config, tensors), np.float32)
    assert {name: w.shape for name, w in weights.items()} == weight_shapes(loaded)
    tied = config.get("tie_word_embeddings", family == "gemma3_text")
    assert (weights["lm_head"] is weights["embed"]) == tied
    distinct = {id(w): w.num_bytes for w in weights.values()}
    assert sum(distinct.values()) == weight_bytes(loaded, "float32")


@pytest.mark.parametrize("slab", [4, 16 << 20])
def test_slabs_hold_whole_heads(tmp_path, monkeypatch, slab):
    """A row of q or k is moved within its head, wherever a slab begins; here with 24 features."""
    monkeypatch.setattr("engine.loading.weights._SLAB_BYTES", slab)
    record = json.loads((GOLDEN / "glm4.json").read_text())
    values = {**record["config"], "num_attention_heads": 128}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in record["tensors"].items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        rows = np.arange(128 * 24, dtype=np.float32)
        tensors[f"{prefix}.q_proj.weight"] = np.repeat(rows[:, None], 64, axis=1)
        tensors[f"{prefix}.q_proj.bias"] = rows
        tensors[f"{prefix}.o_proj.weight"] = np.zeros((64, 128 * 24), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, config_from_dict(values))
    order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, 24)]  # 12 of 24 are rotated
    wanted = (24 * np.arange(128)[:, None] + order).reshape(-1)
    np.testing.assert_array_equal(weights["layers.1.qkv"].data[: 128 * 24, 7], wanted)
    np.testing.assert_array_equal(weights["layers.1.qkv_bias"].data[: 128 * 24], wanted)


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_every_pair_of_dtypes(make_model, stored, target, tiny):
    path, config, tensors = make_model("qwen2", np.float32)
    tensors = {name: value.astype(np_dtype(stored)) for name, value in tensors.items()}
    write_raw(path / "model.safetensors", tensors)
    weights = load_weights(path, load_config(path), dtype=target)
    wanted = {k: v.astype(np.float32) for k, v in tiny.fused(config, tensors).items()}
    assert_same(weights, wanted, np_dtype(target))


def write_raw(path, tensors: dict, odd_header: bool = False) -> None:
    """Write safetensors by hand, since the package does not take bfloat16 from NumPy."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "float64": "F64"}
    header, data = {}, b""
    for name, value in tensors.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {
            "dtype": names[value.dtype.name], "shape": list(value.shape), "data_offsets": offsets,
        }  # fmt: skip
        data += value.tobytes()
    text = json.dumps(header).encode()
    text += b" " * ((1 if odd_header else 0) - len(text) % 8 + 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_data_at_an_odd_address_is_read(make_model, stored, tiny):
    path, config, tensors = make_model("llama")
    tensors = {name: value.astype(stored) for name, value in tensors.items()}
    write_raw(path / "model.safetensors", tensors, odd_header=True)
    weights = load_weights(path, load_config(path))
    wanted = {k: v.astype(np.float32) for k, v in tiny.fused(config, tensors).items()}
    assert_same(weights, wanted, np.float32)


def test_shards(make_model, tiny):
    path, config, tensors = make_model("qwen3")
    (path / "model.safetensors").unlink()
    names = list(tensors)
    index = {}
    for number, start in enumerate(range(0, len(names), 5)):
        part = names[start : start + 5]
        save_file({name: tensors[name] for name in part}, path / f"m-{number}.safetensors")
        index |= {name: f"m-{number}.safetensors" for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(load_weights(path, load_config(path)), tiny.fused(config, tensors), np.float32)
    (path / "m-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shard m-1\.safetensors is missing"):
        load_weights(path, load_config(path))


def test_results_do_not_depend_on_slab_and_step_sizes(make_model, monkeypatch, tiny):
    path, config, tensors = make_model("llama")
    monkeypatch.setattr("engine.loading.weights._SLAB_BYTES", 64)
    monkeypatch.setattr("engine.loading.tensor_reader._STEP_WEIGHTS", 16)
    assert_same(load_weights(path, load_config(path)), tiny.fused(config, tensors), np.float32)


def change(path, tensors: dict, **changes) -> None:
    """Rewrite the checkpoint with tensors replaced, or removed if None."""
    new = {**tensors, **changes}
    write_raw(path / "model.safetensors", {k: v for k, v in new.items() if v is not None})


NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"a tensor is missing: {NORM}"),
        ({NORM: None, QUERY: None}, "2 tensors are missing: "),
        ({"model.extra": np.ones(2, np.float32)}, r"a tensor is not part of.*: model\.extra"),
        ({QUERY.replace("weight", "bias"): np.ones(32, np.float32)}, r"not part of.*q_proj\.bias"),
        ({QUERY: np.ones((32, 31), np.float32)}, rf"'{QUERY}' must .* \(32, 32\).*\(32, 31\)"),
        ({QUERY: np.ones((16, 64), np.float32)}, r"got \(16, 64\)"),
        ({QUERY: np.ones((32, 32, 1), np.float32)}, r"got \(32, 32, 1\)"),
        ({NORM: np.ones((32, 1), np.float32)}, r"must have shape \(32,\).*got \(32, 1\)"),
        ({NORM: np.ones((), np.float32)}, r"got \(\)"),
        (
            {NORM: np.ones(32, np.int8)},
            f"'{NORM}' must be one of F32, F16, BF16; got I8 .*not say that it is quantized",
        ),
        ({NORM: np.ones(32, np.float64)}, f"'{NORM}' must be one of F32, F16, BF16; got F64$"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_match_is_refused(make_model, changes, message):
    path, _, tensors = make_model("llama")
    change(path, tensors, **changes)
    with pytest.raises(WeightsError, match=message):
        load_weights(path, load_config(path))


def test_many_missing_tensors_are_counted(make_model):
    path, config, _ = make_model("llama")
    config = config_from_dict({**config, "num_hidden_layers": 1000})
    with pytest.raises(WeightsError, match=r"8982 tensors are missing: .* and 8978 more"):
        load_weights(path, config)


def test_a_config_mismatch_is_refused_before_allocation(make_model):
    path, config, _ = make_model("llama")
    sizes = {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "head_dim": 8}
    wrong = config_from_dict({**config, **sizes})
    tracemalloc.start()
    with pytest.raises(WeightsError, match="must have shape"):
        load_weights(path, wrong)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [1e5, -np.inf, np.nan])
def test_values_beyond_float16_are_refused(make_model, stored, value):
    path, _, tensors = make_model("llama")
    norm = np.ones(32, np_dtype(stored))
    norm[3] = value
    change(path, tensors, **{NORM: norm})
    config = load_config(path)
    assert load_weights(path, config, dtype="bfloat16")
    with pytest.raises(WeightsError, match=f"'{NORM}' must have finite values up to 65504"):
        load_weights(path, config, dtype="float16")


def test_tables_that_the_engine_computes_itself_are_ignored(make_model, tiny):
    path, config, tensors = make_model("llama")
    freq = np.ones(4, np.float32)
    change(path, tensors, **{
        "model.layers.0.self_attn.rotary_emb.inv_freq": freq,
        "model.rotary_emb.inv_freq": freq,
        "lm_head.weight": tensors["model.embed_tokens.weight"],  # tied, but stored nevertheless
    })  # fmt: skip
    assert_same(load_weights(path, load_config(path)), tiny.fused(config, tensors), np.float32)


def test_out_of_memory_says_how_much_was_needed(make_model, monkeypatch):
    path, _, _ = make_model("llama")
    config = load_config(path)

    def empty(*args):
        raise MemoryError("no")

    monkeypatch.setattr("engine.loading.weights.np.empty", empty)
    with pytest.raises(OutOfMemoryError, match=r"cpu has no room for .* in float16: .* \(no\)"):
        load_weights(path, config, dtype="float16")


def test_weights_that_are_rounded_on_the_cpu_need_room_as_dense_ones(make_model, monkeypatch):
    path, _, _ = make_model("llama")
    config = load_config(path)
    needed = weight_bytes(config, "float32")
    load = partial(load_weights, path, config, dtype="float32", quantization=FORMATS["int4_g32"])
    for free, is_enough in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(weight_memory, "device_memory", lambda _, free=free: (2 * needed, free))
        with contextlib.nullcontext() if is_enough else pytest.raises(OutOfMemoryError):
            weights = load()
    assert (
        sum(weight.num_bytes for weight in {id(w): w for w in weights.values()}.values()) == needed
    )


def test_weight_bytes_counts_tied_embeddings_once(tiny):
    tied = config_from_dict(tiny.config_of("llama"))
    untied = config_from_dict(tiny.config_of("llama", tie_word_embeddings=False))
    assert weight_bytes(untied, "float32") - weight_bytes(tied, "float32") == 40 * 32 * 4
    total = sum(math.prod(shape) for shape in weight_shapes(untied).values())
    assert weight_bytes(untied, "bfloat16") == 2 * total


def test_loading_keeps_no_second_copy(tmp_path, tiny):
    """Apart from the arrays themselves, only slabs are allocated."""
    values = tiny.config_of("llama", vocab_size=65536, hidden_size=512, num_attention_heads=8)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values), np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_from_dict(values)
    tracemalloc.start()
    weights = load_weights(tmp_path, config, dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert weights["embed"].num_bytes == 1 << 26
    assert peak < weight_bytes(config, "bfloat16") + (16 << 20)


def test_no_bar_and_no_output_when_stderr_is_no_terminal(make_model, capfd):
    path, _, _ = make_model("llama")
    load_weights(path, load_config(path), progress=True)
    assert capfd.readouterr() == ("", "")


def test_a_bar_counts_every_byte_on_a_terminal(make_model, monkeypatch, capsys):
    path, _, _ = make_model("llama")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load_weights(path, load_config(path), progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err


# On a GPU the arrays are the same.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_arrays_equal_those_of_the_cpu(cp, make_model, monkeypatch, dtype):
    monkeypatch.setattr("engine.loading.weights._SLAB_BYTES", 4096)
    path, _, _ = make_model("gemma3_text")
    config = load_config(path)
    on_gpu = load_weights(path, config, device=Device("cuda"), dtype=dtype)
    on_cpu = load_weights(path, config, device=CPU, dtype=dtype)
    assert on_gpu["lm_head"] is on_gpu["embed"]
    for name, value in on_cpu.items():
        assert isinstance(on_gpu[name].data, cp.ndarray)
        np.testing.assert_array_equal(on_gpu[name].data.get(), value.data)


@pytest.mark.gpu
def test_device_memory_stays_within_five_percent(cp, smollm2):
    source = resolve_model(smollm2)
    config = load_config(source)
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    weights = load_weights(source, config, device=Device("cuda"), dtype="bfloat16")
    used = pool.total_bytes() - before
    assert used <= 1.05 * weight_bytes(config, "bfloat16"), len(weights)
