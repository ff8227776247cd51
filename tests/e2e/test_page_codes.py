"""Whole models with pages of codes: the same tokens in any company, less memory, scales."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams, device, load
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.config import RopeConfig
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import ConfigError, RequestError, WeightsError
from engine.loading.kv_scales import read_kv_scales
from engine.loading.page_calibration import take_checkpoint_scales
from tests.e2e.tiny import BYTES_PER_BLOCK, CONFIG, make_engine, run, tiny_model

CODE_BLOCK = BYTES_PER_BLOCK // 4  # bytes of a block of codes: those of float32 / 4
LARGE = dataclasses.replace(
    CONFIG, num_heads=4, head_dim=64, hidden_size=256, rope=RopeConfig(rotary_dim=64)
)
"""Of which Hopper's kernels take every layer."""


def _prompts(seed, count):
    """Some begin alike, so that their blocks are shared."""
    rng = random.Random(seed)
    start = [rng.randrange(4, 97) for _ in range(40)]
    own = [[rng.randrange(4, 97) for _ in range(rng.randint(1, 50))] for _ in range(count)]
    return [(start + ids) if i % 2 else ids for i, ids in enumerate(own)]


@pytest.fixture(params=KV_CODE_DTYPES)
def pages(request):
    """The `kv_cache_dtype`."""
    return request.param


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda-bfloat16", marks=pytest.mark.gpu),
    ],
)
def model(request):
    if request.param == "cuda-bfloat16":
        if not device.resolve_device("auto")[0].is_cuda:
            pytest.skip("no GPU")
        options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
        found = load(config=LARGE, load_format="dummy", **options)
    else:
        found = tiny_model(request.param, deterministic=True)
    found.calibrate_kv_scales(_prompts(99, 4))
    return found


def _alone(model, prompt, count, pages):
    cache = model.new_cache(1, len(prompt) + count, kv_cache_dtype=pages)
    logits = model.step(np.array([prompt]), cache)
    ids = []
    while len(ids) < count:
        ids.append(int(logits[0].argmax()))
        if len(ids) < count:
            logits = model.step(np.array([ids[-1:]]), cache)
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7},
        {"block_size": 32},
        {"num_blocks": 7, "max_model_len": 112, "watermark": 0.0},
        {
            "num_blocks": 8,
            "max_model_len": 112,
            "watermark": 0.0,
            "swap_space_gb": 60.5,  # blocks
            "preemption_mode": "swap",
        },
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items())[:60] or "plain",
)
def test_tokens_do_not_depend_on_other_requests(model, options, pages):
    if "swap_space_gb" in options:
        sizes = model.config.num_layers, model.config.num_kv_heads, model.config.head_dim
        block = KVGeometry.uniform(*sizes, dtype=pages).bytes_per_block
        options = options | {"swap_space_gb": options["swap_space_gb"] * block / 2**30}
    engine = make_engine(model, kv_cache_dtype=pages, **options)
    assert engine.kv_cache.slab.dtype == KV_CODE_DTYPES[pages].dtype
    prompts = _prompts(1, 9)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=5 + 2 * i, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        want = _alone(model, prompt, 5 + 2 * i, pages)
        assert list(outputs[str(i)].outputs[0].token_ids) == want, i
    stats = engine.scheduler.stats()
    if "num_blocks" in options:
        assert stats.num_preemptions > 0
        if "swap_space_gb" in options:
            assert engine._swap.num_blocks == 60


def test_logits_do_not_depend_on_chunks(model, pages):
    ids = np.array(_prompts(5, 2)[1:2])
    whole = model.step(ids, model.new_cache(1, 128, kv_cache_dtype=pages), logits="all")
    cache, parts = model.new_cache(1, 128, kv_cache_dtype=pages), []
    for first, last in ((0, 1), (1, 18), (18, 40), (40, ids.shape[1])):
        parts.append(model.step(ids[:, first:last], cache, logits="all"))
    xp = model.device.xp
    assert bool((xp.concatenate(parts, axis=1) == whole).all())


def test_logits_are_near_those_of_float_pages(model, pages):
    ids = np.array([_prompts(6, 2)[1]])
    exact = model.step(ids, model.new_cache(1, 128), logits="all")
    got = model.step(ids, model.new_cache(1, 128, kv_cache_dtype=pages), logits="all")
    error = float(((got - exact) ** 2).mean() / (exact**2).mean()) ** 0.5
    assert 1e-5 < error < 0.05


def test_the_same_memory_holds_four_times_the_float32_tokens(pages):
    model = tiny_model()
    sizes = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 16
    assert KVGeometry.uniform(*sizes, dtype=pages).bytes_per_block == CODE_BLOCK
    assert KVGeometry.uniform(*sizes, dtype="bfloat16").bytes_per_block == 2 * CODE_BLOCK
    engine = LLMEngine(model, kv_cache_dtype=pages, num_blocks=10)
    assert engine.kv_cache.slab.nbytes == 10 * CODE_BLOCK


def test_speculative_and_sampled_requests_finish(model, pages):
    engine = make_engine(model, kv_cache_dtype=pages, enable_prefix_caching=False)
    for i, prompt in enumerate(_prompts(3, 5)):
        params = SamplingParams(temperature=0.8, seed=i, n=2, max_tokens=9, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    outputs = run(engine)
    assert all(len(c.token_ids) == 9 for o in outputs.values() for c in o.outputs)


def test_unknown_dtypes_are_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="must be one of 'auto', 'fp8', 'int8'; got 'int3"):
        LLMEngine(model, kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        model.new_cache(1, 8, kv_cache_dtype=8)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'fp8' or 'int8'; got 'auto'"):
        model.kv_scales_of("auto")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'fp8' or 'int8'; got 'int4'"):
        model.set_kv_scales(np.ones((2, 2, 2)), "int4")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_bad_scales_are_refused_by_name(bad):
    model = tiny_model()
    scales = np.ones((2, 2, 2), np.float32)
    scales[1, 1, 0] = bad
    with pytest.raises(ConfigError, match="v_scale of layer 1, head 0 must be positive and finite"):
        model.set_kv_scales(scales)
    with pytest.raises(ConfigError, match=r"kv_scales must be numbers of shape \(2, 2, 2\)"):
        model.set_kv_scales(scales[:1])
    assert (model.kv_scales == 1).all()


def test_calibration_takes_the_largest_magnitude(pages):
    model = tiny_model()
    prompts = _prompts(4, 3)
    model.calibrate_kv_scales(prompts)
    cache = model.new_cache(1, 128)
    model.step([prompts[0]], cache)
    one, scales = cache.peaks() / KV_CODE_DTYPES[pages].largest, model.kv_scales_of(pages)
    assert (scales >= one * (1 - 1e-6)).all() and (scales < 3 * one).all()
    with pytest.raises(RequestError, match="at least one sequence"):
        model.calibrate_kv_scales([])


def test_scales_of_one_kind_of_codes_give_the_other():
    model = tiny_model()
    given = np.random.default_rng(0).uniform(0.01, 2, (2, 2, 2)).astype(np.float32)
    model.set_kv_scales(given)
    np.testing.assert_array_equal(model.kv_scales, given)
    np.testing.assert_allclose(model.kv_scales_of("int8") * 127, given * 448, rtol=1e-6)
    model.set_kv_scales(given, "int8")
    np.testing.assert_array_equal(model.kv_scales_of("int8"), given)
    np.testing.assert_allclose(model.kv_scales * 448, given * 127, rtol=1e-6)
    largest = np.finfo(np.float32).max
    model.set_kv_scales(np.full((2, 2, 2), largest))
    assert (model.kv_scales_of("int8") == largest).all()


def test_scales_of_int8_are_measured_where_there_are_none():
    model, again = tiny_model(), tiny_model()
    engine = LLMEngine(model, kv_cache_dtype="fp8", num_blocks=10)
    assert engine.config.reasons["kv_scales"].startswith("1: neither the checkpoint nor")
    engine = LLMEngine(model, kv_cache_dtype="int8", num_blocks=10)
    assert engine.config.reasons["kv_scales"] == "measured on 1024 random tokens, times 1.25"
    assert (model.kv_scales == 1).all()  # those of fp8 are what they were
    measured = model.kv_scales_of("int8")
    again.new_cache(1, 8, kv_cache_dtype="int8")
    np.testing.assert_array_equal(again.kv_scales_of("int8"), measured)
    cache = model.new_cache(1, 128)
    model.step([_prompts(4, 3)[1]], cache)
    found = cache.peaks() / measured
    assert (found > 40).all() and (found <= 127).all()
    model.calibrate_kv_scales(_prompts(4, 3))
    engine = LLMEngine(model, kv_cache_dtype="int8", num_blocks=10)
    assert engine.config.reasons["kv_scales"] == "set by calibrate_kv_scales"
    assert "kv_scales" not in LLMEngine(model, num_blocks=10).config.reasons


def test_freed_blocks_are_poisoned(pages):
    cache = KVCache(KVGeometry.uniform(2, 2, 8, dtype=pages), num_blocks=4)
    cache.poison([1, 3])
    assert (cache.slab[:, :, [1, 3]] == KV_CODE_DTYPES[pages].poison).all()
    assert (cache.slab[:, :, [0, 2]] == 0).all()


def _write_scales(folder, tensors, scheme=None):
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors")
    config = {} if scheme is None else {"quantization_config": {"kv_cache_scheme": scheme}}
    (folder / "config.json").write_text(json.dumps(config))


_ATTN = "model.layers.{}.self_attn."


def test_scales_of_a_checkpoint(tmp_path):
    one = np.array([0.5], np.float32)
    tensors = {
        _ATTN.format(0) + "k_scale": np.array([[[0.25]], [[0.75]]], np.float32),  # by head
        _ATTN.format(0) + "v_proj.v_scale": np.array(2.0, np.float32),
        _ATTN.format(0) + "q_scale": np.array([np.nan], np.float32),  # not read
        _ATTN.format(1) + "kv_scale": one,
    }
    _write_scales(tmp_path, tensors)
    got, codes = read_kv_scales(tmp_path, CONFIG)
    assert codes == "fp8"
    np.testing.assert_array_equal(got, [[[0.25, 0.75], [2, 2]], [[0.5, 0.5], [0.5, 0.5]]])
    for names in (("k_proj.output_scale", "v_proj.output_scale"), ("qkv_proj.k_scale",)):
        _write_scales(tmp_path, {_ATTN.format(1) + name: one for name in names})
        got, _ = read_kv_scales(tmp_path, CONFIG)
        assert (got[1, : len(names)] == 0.5).all() and np.isnan(got[0]).all()
    _write_scales(tmp_path, tensors, {"num_bits": 8, "type": "int"})
    assert read_kv_scales(tmp_path, CONFIG)[1] == "int8"
    for scheme in (
        {"num_bits": 8, "type": "int", "symmetric": False},
        {"num_bits": 4, "type": "int"},
        {"num_bits": [8], "type": {}},
    ):
        _write_scales(tmp_path, tensors, scheme)
        assert read_kv_scales(tmp_path, CONFIG) is None
    _write_scales(tmp_path, {"model.norm.weight": one})
    assert read_kv_scales(tmp_path, CONFIG) is None


_EVERY = {_ATTN.format(i) + f"{kind}_scale": 0.5 for i in range(2) for kind in "kv"}
_SOME = {_ATTN.format(0) + "k_scale": 0.5}
_INT8 = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("tensors", "scheme", "fp8", "int8"),
    [
        (_EVERY, None, 0.5, 0.5 * 448 / 127),
        (_SOME, None, 1, None),  # of int8 none are usable: they are measured
        (dict.fromkeys(_EVERY, 1.0), None, 1, None),  # not calibrated
        (_EVERY, _INT8, 1, 0.5),
        (_SOME, _INT8, 1, None),
    ],
)
def test_which_pages_take_the_scales_of_a_checkpoint(tmp_path, tensors, scheme, fp8, int8):
    model = tiny_model()
    tensors = {name: np.array([x], np.float32) for name, x in tensors.items()}
    _write_scales(tmp_path, tensors, scheme)
    scales = model.decoder.kv_scales
    take_checkpoint_scales(scales, tmp_path, CONFIG)
    assert (model.kv_scales[1] == fp8).all()
    if int8 is not None:
        np.testing.assert_allclose(model.kv_scales_of("int8"), int8, rtol=1e-6)
    source = {None: ""}.get(int8, "those of the checkpoint")
    assert scales.sources["int8"] == source
    assert model.prepare_pages("int8") == source or "measured" in scales.sources["int8"]


@pytest.mark.parametrize("bad", [np.nan, 0.0, -2.0, np.inf])
def test_bad_scales_of_a_checkpoint_are_refused_by_name(tmp_path, bad):
    name = _ATTN.format(1) + "v_scale"
    _write_scales(tmp_path, {name: np.array([bad], np.float32)})
    with pytest.raises(WeightsError, match=f"{name}' must be positive and finite"):
        read_kv_scales(tmp_path, CONFIG)
    _write_scales(tmp_path, {name: np.ones(3, np.float32)})
    with pytest.raises(WeightsError, match=f"{name}' must have 1 value, or 2"):
        read_kv_scales(tmp_path, CONFIG)


def test_bfloat16_model_on_the_cpu(pages):
    config = dataclasses.replace(CONFIG, qk_norm=True, model_type="qwen3")
    model = load(config=config, load_format="dummy", device="cpu", dtype="bfloat16")
    cache = model.new_cache(2, 40, kv_cache_dtype=pages)
    assert model.step(np.array([[5, 6, 7], [8, 9, 10]]), cache).shape == (2, 97)
