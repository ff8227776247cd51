"""`engine quantize`: what is written, what reads it, what is refused, and what a failure leaves."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import engine
from engine.cli import main
from engine.device import to_numpy
from engine.errors import RequestError, WeightsError
from engine.loading import quantized_folder
from engine.loading.generation_config import sampling_defaults
from engine.loading.safetensors import open_safetensors
from engine.loading.safetensors_writer import SafetensorsWriter
from engine.loading.tensor_reader import half_split
from engine.loading.weight_table import RotatedRows
from engine.quantization import quantize_model
from engine.weights import FORMATS
from engine.weights.compressed_tensors import STORABLE
from engine.weights.quantize import dequantize_codes, round_to_codes
from tests.loading import tiny

_SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2}


def _source(folder, kind="qwen2", dtype=ml_dtypes.bfloat16, **changes):
    """Write a tiny model and return its tensors."""
    folder.mkdir()
    config = tiny.config_of(kind, **{**_SIZES, **changes})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    tensors = tiny.random_tensors(tiny.tensor_shapes(config))
    tensors = {n: (a * 0.1 if a.ndim > 1 else a).astype(dtype) for n, a in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a tiny model's folder and tensors."""
    folder = tmp_path_factory.mktemp("source") / "model"
    return folder, _source(folder)


def _stored(folder):
    """Return the tensors of a folder; the library has no NumPy type for e4m3."""
    read = open_safetensors(folder)
    return {name: read.view(name) for name in read.names()}


def _unpacked(words, bits, columns):
    """Unpack by the published layout: the first code in the lowest bits, along the last axis."""
    per_word = 32 // bits
    wide = words.view(np.uint32).astype(np.int64)[..., None] >> (bits * np.arange(per_word))
    return (wide & ((1 << bits) - 1)).reshape(len(words), -1)[:, :columns]


def _decoded(stored, module, form, shape):
    """Return the numbers of a stored matrix, by the published layouts alone."""
    scale = stored[f"{module}.weight_scale"].astype(np.float32)
    if form.activations:
        codes = stored[f"{module}.weight"].astype(np.float32)
        high, wide = form.block
        each = scale.repeat(high, 0).repeat(wide, 1) if wide else scale
        return codes * each
    assert stored[f"{module}.weight_shape"].tolist() == list(shape)
    bits, group = form.bits, form.group
    codes = _unpacked(stored[f"{module}.weight_packed"], bits, shape[1])
    zero = np.full(scale.shape, 1 << (bits - 1))
    if form.offset:
        zero = _unpacked(stored[f"{module}.weight_zero_point"].T.copy(), bits, shape[0]).T
    shifted = (codes - zero.repeat(group, 1)).astype(np.float32)
    return shifted * scale.repeat(group, 1)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("name", STORABLE)
def test_round_trip(tmp_path, name, dtype):
    """What another decoder reads is what the engine's rounding makes; the rest is copied."""
    tensors, form, out = _source(tmp_path / "in", dtype=dtype), FORMATS[name], tmp_path / "out"
    engine.quantize(tmp_path / "in", out, format=name)
    stored = _stored(out)
    scales = quantized_folder.scale_dtype(form, np.dtype(dtype).name)
    for tensor, array in tensors.items():
        if "_proj.weight" not in tensor:
            assert stored[tensor].tobytes() == array.tobytes()
            continue
        module = tensor.removesuffix(".weight")
        wanted = dequantize_codes(form, round_to_codes(array, form, scales))
        np.testing.assert_array_equal(_decoded(stored, module, form, array.shape), wanted)
        assert stored[f"{module}.weight_scale"].dtype == dtype


@pytest.mark.parametrize("name", ["fp8", "int8", "int4_g64", "int4_g32_zp", "int8_g32"])
def test_the_engine_reads_it(tmp_path, source, name):
    folder, tensors = source
    form = FORMATS[name]
    engine.quantize(folder, tmp_path / "out", format=name)
    model = engine.load(tmp_path / "out", device="cpu", dtype="float32", progress=False)
    down = "model.layers.1.mlp.down_proj.weight"
    wanted = dequantize_codes(form, round_to_codes(tensors[down], form, "bfloat16"))
    got = engine.weights.unpack_weight(model.decoder.weights["layers.1.down"])
    np.testing.assert_array_equal(got, wanted)
    logits = model.step([[1, 2, 3, 4]], model.new_cache(1, 8))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    "stated", [None, {"eos_token_id": 2}, {"do_sample": False}, {"top_k": 5, "eos_token_id": [2]}]
)
def test_sampling_defaults_do_not_depend_on_the_copys_name(tmp_path, stated):
    folder, out = tmp_path / "SmolLM2-tiny", tmp_path / "out"
    _source(folder)
    file = folder / "generation_config.json"
    file.unlink() if stated is None else file.write_text(json.dumps(stated))
    engine.quantize(folder, out, format="int8")
    assert sampling_defaults(out) == sampling_defaults(folder)
    found = json.loads((out / "generation_config.json").read_text())
    is_named = stated is not None and not stated.keys().isdisjoint(("do_sample", "top_k"))
    added = {} if is_named else {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert found == (stated or {}) | added


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int8", "int4_g64"])
def test_float32_on_a_gpu(cp, tmp_path, source, name):
    """Kept or rounded while it is read; formats without kernels for float32 are dequantized."""
    engine.quantize(source[0], tmp_path / "out", format=name)
    for folder, options in ((tmp_path / "out", {}), (source[0], {"quantization": name})):
        options = {"dtype": "float32", "progress": False, **options}
        on_cpu, on_gpu = (engine.load(folder, device=d, **options) for d in ("cpu", "cuda"))
        assert on_gpu.decoder.weights["layers.1.down"].format.is_packed is False
        wanted, got = (
            to_numpy(model.step([[1, 2, 3, 4]], model.new_cache(1, 8), logits="all"))
            for model in (on_cpu, on_gpu)
        )
        error = 2e-2 if FORMATS[name].activations else 1e-4
        np.testing.assert_allclose(got, wanted, atol=error * np.abs(wanted).max())


def test_config_and_companions(tmp_path, source):
    engine.quantize(source[0], tmp_path / "out", format="int4")
    config = json.loads((tmp_path / "out/config.json").read_text())
    made = config.pop("quantization_config")
    assert config == json.loads((source[0] / "config.json").read_text())
    group = made["config_groups"]["group_0"]
    assert made["quant_method"] == "compressed-tensors" and made["format"] == "pack-quantized"
    assert made["ignore"] == ["lm_head"] and group["targets"] == ["Linear"]
    weights = {k: group["weights"][k] for k in ("num_bits", "type", "strategy", "group_size")}
    assert weights == {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    assert group["weights"]["symmetric"] and group["input_activations"] is None
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in source[0].iterdir()}


@pytest.mark.parametrize(
    ("name", "layout", "weights", "activations"),
    [
        ("fp8", "float-quantized", "channel", ("token", None)),
        ("fp8_block", "float-quantized", "block", ("group", 128)),
        ("int8", "int-quantized", "channel", ("token", None)),
    ],
)
def test_config_of_both_operands_in_8_bits(tmp_path, source, name, layout, weights, activations):
    engine.quantize(source[0], tmp_path / "out", format=name)
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    group = made["config_groups"]["group_0"]
    given = group["input_activations"]
    assert made["format"] == layout and group["weights"]["strategy"] == weights
    assert (given["strategy"], given["group_size"]) == activations and given["dynamic"] is True
    assert group["weights"]["block_structure"] == ([128, 128] if weights == "block" else None)


def test_ignored_layers_are_copied(tmp_path, source):
    ignore = ["model.layers.0.mlp.down_proj", "re:.*layers\\.1\\.self_attn"]
    engine.quantize(source[0], tmp_path / "out", format="int8", ignore=ignore)
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    attention = [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
    assert set(made["ignore"]) == {"lm_head", "model.layers.0.mlp.down_proj", *attention}
    stored = _stored(tmp_path / "out")
    assert stored[f"{attention[0]}.weight"].dtype == ml_dtypes.bfloat16
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == np.int8


def test_fused_tensors(tmp_path):
    tensors = _source(tmp_path / "in", "phi3", np.float16)
    engine.quantize(tmp_path / "in", tmp_path / "out", format="int8_g128")
    stored = _stored(tmp_path / "out")
    module = "model.layers.0.self_attn.qkv_proj"
    assert stored[f"{module}.weight_packed"].shape == (len(tensors[f"{module}.weight"]), 64)


def _experts_source(folder, *, is_fused=False):
    """Write a tiny model with two experts a layer; return its tensors."""
    dense = tiny.config_of("qwen3", **{**_SIZES, "head_dim": 64})
    shapes = {n: shape for n, shape in tiny.tensor_shapes(dense).items() if ".mlp." not in n}
    n, f, count = dense["hidden_size"], 128, 2
    for block in (f"model.layers.{i}.mlp" for i in range(2)):
        shapes[f"{block}.gate.weight"] = count, n
        if is_fused:
            shapes[f"{block}.experts.gate_up_proj"] = count, 2 * f, n
            shapes[f"{block}.experts.down_proj"] = count, n, f
            continue
        for one in (f"{block}.experts.{e}" for e in range(count)):
            shapes[f"{one}.gate_proj.weight"] = shapes[f"{one}.up_proj.weight"] = f, n
            shapes[f"{one}.down_proj.weight"] = n, f
    experts = {"num_experts": count, "num_experts_per_tok": 1, "moe_intermediate_size": f}
    folder.mkdir()
    config = {**dense, "model_type": "qwen3_moe", **experts}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: a * 0.1 for name, a in tiny.random_tensors(shapes).items()}
    tensors = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _is_ignored(made, module):
    """Tell whether other readers leave a module as it is: names are whole, patterns begin them."""
    return any(
        re.match(one[3:], module) if one.startswith("re:") else one == module
        for one in made["ignore"]
    )


@pytest.mark.parametrize("name", ["fp8_block", "int8", "int4_g64_zp"])
def test_experts(tmp_path, name):
    """Each has tensors of its own; the router is copied."""
    tensors, form = _experts_source(tmp_path / "in"), FORMATS[name]
    engine.quantize(tmp_path / "in", tmp_path / "out", format=name)
    stored = _stored(tmp_path / "out")
    for module in (f"model.layers.1.mlp.experts.1.{x}_proj" for x in ("gate", "up", "down")):
        array = tensors[f"{module}.weight"]
        wanted = dequantize_codes(form, round_to_codes(array, form, "bfloat16"))
        np.testing.assert_array_equal(_decoded(stored, module, form, array.shape), wanted)
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert made["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (0, 1))]
    model = engine.load(tmp_path / "out", device="cpu", dtype="float32", progress=False)
    assert np.isfinite(model.step([[1, 2, 3, 4]], model.new_cache(1, 8))).all()


def test_experts_of_a_layer_are_ignored_together(tmp_path):
    tensors = _experts_source(tmp_path / "in")
    for ignore in ("model.layers.0.mlp.experts.1.up_proj", r"re:.*\.0\.mlp\.experts.*down_proj"):
        with pytest.raises(WeightsError, match=r"all parts of layers\.0\.experts or none"):
            engine.quantize(tmp_path / "in", tmp_path / "out", format="int8", ignore=[ignore])
    ignore = [r"re:model\.layers\.0\.mlp\.experts"]
    engine.quantize(tmp_path / "in", tmp_path / "out", format="int8", ignore=ignore)
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    stored = _stored(tmp_path / "out")
    for layer in (0, 1):
        expert = f"model.layers.{layer}.mlp.experts.1.up_proj"
        assert _is_ignored(made, expert) is (layer == 0)
        copied = np.array_equal(stored[f"{expert}.weight"], tensors[f"{expert}.weight"])
        assert copied is (layer == 0)


def test_experts_in_one_tensor_are_ignored_one_by_one(tmp_path):
    """Readers that split them ask for each expert whether it is quantized."""
    _experts_source(tmp_path / "in", is_fused=True)
    with pytest.raises(WeightsError, match="must be the matrix of one expert"):
        engine.quantize(tmp_path / "in", tmp_path / "out", format="fp8")
    engine.quantize(tmp_path / "in", tmp_path / "out", format="fp8", ignore=["re:.*experts"])
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert _is_ignored(made, "model.layers.0.mlp.experts.0.gate_proj")
    assert not _is_ignored(made, "model.layers.0.mlp.shared_experts.gate_proj")
    assert not _is_ignored(made, "model.layers.0.self_attn.q_proj")


def test_shards(tmp_path):
    entries = {f"t{i}": (dtype, (3, i + 1)) for i, dtype in enumerate(["int8", "int64", "float16"])}
    arrays = {n: np.full(shape, 7, dtype) for n, (dtype, shape) in entries.items()}
    with SafetensorsWriter(tmp_path, entries, max_shard_bytes=60) as writer:
        for name in reversed(entries):
            writer.write(name, arrays[name])
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    read = open_safetensors(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.view(name), array)
    with pytest.raises(WeightsError, match="tensor 't0' must be int8 of shape"):
        writer.write("t0", np.zeros(3, np.int8))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (OSError(28, "No space left on device"), (WeightsError, "No space left")),
        (KeyboardInterrupt(), (KeyboardInterrupt, None)),
    ],
    ids=["disk full", "interrupt"],
)
def test_a_failure_leaves_nothing(tmp_path, source, monkeypatch, fault, seen):
    write, names = SafetensorsWriter.write, []

    def failing(self, name, array):
        names.append(name)
        if len(names) == 9:
            raise fault
        write(self, name, array)

    monkeypatch.setattr(SafetensorsWriter, "write", failing)
    with pytest.raises(seen[0], match=seen[1]):
        engine.quantize(source[0], tmp_path / "out", format="int8")
    assert len(names) == 9 and not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    names.clear()
    with pytest.raises(seen[0], match=seen[1]):
        engine.quantize(source[0], tmp_path / "out", format="int8")
    assert len(names) == 9 and not list((tmp_path / "out").iterdir())


def test_an_empty_folder_is_taken_and_another_is_not(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    engine.quantize(source[0], out, format="int8")
    with pytest.raises(WeightsError, match="must be absent or an empty folder"):
        engine.quantize(source[0], out, format="int8")
    with pytest.raises(WeightsError, match="must be a folder; it is not"):
        engine.quantize(source[0], tmp_path / "none/out", format="int8")


@pytest.mark.parametrize("name", [".", "link"])
def test_an_empty_folder_stays_itself(tmp_path, source, monkeypatch, name):
    """It may be the working directory, a mount point, or what a link leads to."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "link").symlink_to(out)
    before = out.stat().st_ino
    monkeypatch.chdir(out if name == "." else tmp_path)
    written = engine.quantize(source[0], name, format="int8")
    assert out.stat().st_ino == before
    assert {path.name for path in written.iterdir()} == {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    engine.load(out, device="cpu").close()


def test_refused(tmp_path, source):
    def quantize(model=source[0], **options):
        return engine.quantize(model, tmp_path / "no", **{"format": "int8", **options})

    with pytest.raises(WeightsError, match=r"format must be one of int4, fp8, .*; got 'q4_k'"):
        quantize(format="q4_k")
    engine.quantize(source[0], tmp_path / "out", format="int8")
    with pytest.raises(WeightsError, match="it is quantized already"):
        quantize(tmp_path / "out")
    with pytest.raises(WeightsError, match="must name linear layers of the model; got 'down'"):
        quantize(ignore=["down"])
    with pytest.raises(WeightsError, match="must have regular expressions"):
        quantize(ignore=["re:("])
    with pytest.raises(WeightsError, match=r"all parts of layers\.0\.qkv or none"):
        quantize(ignore=["model.layers.0.self_attn.q_proj"])
    with pytest.raises(WeightsError, match="it leaves none"):
        quantize(ignore=["re:model"])
    with pytest.raises(WeightsError, match="calibrate needs a format in groups"):
        quantize(calibrate=[1] * 600)
    with pytest.raises(RequestError, match="calibrate must have at least 128 tokens; got 50"):
        quantize(format="int4", calibrate=[1] * 50)
    _source(tmp_path / "odd", hidden_size=288)
    with pytest.raises(WeightsError, match="must have a multiple of 128 columns for int4_g128"):
        quantize(tmp_path / "odd", format="int4")
    assert not (tmp_path / "no").exists()


def test_numbers_that_are_not_finite(tmp_path):
    tensors = _source(tmp_path / "in")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, tmp_path / "in/model.safetensors")
    with pytest.raises(WeightsError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        engine.quantize(tmp_path / "in", tmp_path / "out", format="int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_calibrated_weights_disturb_the_last_layer_less(tmp_path, kind, device, request):
    """The stream after the layers, for text like the calibration's, is nearer to the original."""
    if device == "cuda":
        request.getfixturevalue("cp")
    _source(tmp_path / "in", kind, np.float32, max_position_embeddings=256)
    rng = np.random.default_rng(1)
    ids = rng.choice(40, 8192, p=rng.dirichlet(np.full(40, 0.3)))
    options = {"format": "int4_g128", "device": device}
    engine.quantize(tmp_path / "in", tmp_path / "nearest", **options)
    engine.quantize(tmp_path / "in", tmp_path / "gptq", calibrate=ids[:-256].tolist(), **options)
    models = {
        name: engine.load(tmp_path / name, device="cpu", dtype="float32", progress=False)
        for name in ("in", "nearest", "gptq")
    }
    hidden = {name: model.trace(ids[-256:]).hidden[-1] for name, model in models.items()}
    errors = {name: np.linalg.norm(hidden[name] - hidden["in"]) for name in ("nearest", "gptq")}
    assert errors["gptq"] < 0.8 * errors["nearest"], errors


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_rows_of_a_tensor_are_those_of_the_weight(tmp_path, kind, monkeypatch):
    """With a GPTQ that is the rounding to the nearest, both ways write the same files."""
    _source(tmp_path / "in", kind, max_position_embeddings=256)
    monkeypatch.setattr(
        "engine.quantization.gptq_layers.gptq",
        lambda matrix, hessian, form, **options: round_to_codes(matrix, form, **options),
    )
    options = {"format": "int4_g32_zp", "device": "cpu"}
    engine.quantize(tmp_path / "in", tmp_path / "a", **options)
    engine.quantize(tmp_path / "in", tmp_path / "b", calibrate=[1, 2, 3, 4] * 64, **options)
    a, b = (_stored(tmp_path / name) for name in "ab")
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


def test_interleaved_rows():
    """Rows of rotated heads go back to the order of the file."""
    config = SimpleNamespace(interleaved_rope=True)
    stored = np.arange(32)[:, None].astype(np.float32)
    place = quantized_folder.Placement("q", "t", (32, 1), 0, 32, 5, rotated=RotatedRows(8, 0, 8))
    rows = quantize_model._rows(SimpleNamespace(config=config), [place])
    turned = half_split(stored, RotatedRows(8, 0, 8))
    fused = np.concatenate([np.full((5, 1), -1, np.float32), turned])
    np.testing.assert_array_equal(fused[rows], stored)


def test_command_line(tmp_path, source, capsys):
    arguments = [str(source[0]), str(tmp_path / "out"), "--format", "int4_g32"]
    with pytest.raises(SystemExit) as done:
        main(
            [
                "quantize",
                *arguments,
                "--ignore",
                "re:.*down_proj$",
                "model.layers.0.self_attn.o_proj",
            ]
        )
    shown = capsys.readouterr()
    assert done.value.code == 0 and shown.out.strip() == str(tmp_path / "out")
    kilobytes = sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) / 1000
    size = re.search(r"(\d+) kB in int4_g32\n", shown.err)
    assert abs(int(size[1]) - kilobytes) <= 0.5
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert len(made["ignore"]) == 4
    with pytest.raises(SystemExit) as done:
        main(["quantize", str(source[0]), str(tmp_path / "b"), "--format", "int3"])
    assert done.value.code == 2 and "format must be one of" in capsys.readouterr().err
