"""Arrays in, arrays out: load, new_cache, step, and the arguments that they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import engine
from engine import device, errors, threads
from engine import model as model_module
from engine.config import ModelConfig, RopeConfig
from engine.device import Device, to_numpy
from engine.kernels import _module
from engine.loading.load_config import resolve_load_config
from engine.loading.weights import dummy_weights, weight_bytes
from engine.models import decoder as decoder_module
from engine.models.decoder import Decoder
from engine.models.rope_tables import rope_bytes

CONFIG = ModelConfig(
    "llama",
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=128,
    rope=RopeConfig(rotary_dim=16),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """The devices that a test body runs on."""
    if request.param == "cuda" and not device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return request.param


def _load(where="cpu", config=CONFIG, **options):
    return engine.load(config=config, load_format="dummy", device=where, **options)


@pytest.fixture
def model(where):
    return _load(where, dtype="float32")


IDS = np.random.default_rng(0).integers(0, 96, (2, 20))


# --- load ---------------------------------------------------------------------------------------


def test_dummy_needs_a_configuration_only(tmp_path):
    values = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 4, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = engine.load(tmp_path, load_format="dummy", device="cpu")
    assert model.step([[1, 2]], model.new_cache(1, 8)).shape == (1, 64)
    with pytest.raises(errors.ConfigError, match="tokenizer"):
        _load().tokenizer  # noqa: B018


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devise": "cpu"}, TypeError, "'devise'; did you mean 'device'"),
        ({"load_format": "pickle"}, ValueError, "load_format must be 'auto' or 'dummy'; got"),
        ({"dtype": "float8"}, ValueError, "dtype must be one of auto, float32, .*; got 'float8'"),
        ({"max_model_len": 129}, ValueError, "from 1 to the model's own 128; got 129"),
        ({"max_model_len": 0}, ValueError, "from 1 to the model's own 128; got 0"),
        ({"max_model_len": 8.0}, ValueError, "must be a whole number; got 8.0"),
        ({"device": "tpu"}, RuntimeError, "device must be .*; got 'tpu'"),
        ({"device": "cuda:99"}, RuntimeError, "'cuda:99' was asked for"),
        ({"device": None}, RuntimeError, "device must be a str or a Device; got None"),
        (
            {"dtype": np.float64},
            ValueError,
            "dtype must be one of auto, float32, .*; got 'float64'",
        ),
        ({"deterministic": "no"}, ValueError, "deterministic must be True or False; got 'no'"),
        ({"config": {}}, ValueError, "config must be a ModelConfig; got dict"),
        ({"model": None}, ValueError, "model must be a name or a path; got None"),
        ({"model": ""}, ValueError, "model must be a name or a path; got ''"),
    ],
)
def test_load_refuses(options, error, message):
    with pytest.raises(error, match=message):
        engine.load(**{"config": CONFIG, "load_format": "dummy", "device": "cpu", **options})


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float32"), ml_dtypes.bfloat16])
def test_load_accepts_numpy_types_and_numbers(dtype):
    model = _load(dtype=dtype, max_model_len=np.int64(64))
    assert (model.dtype, model.max_model_len) == (np.dtype(dtype).name, 64)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(errors.WeightsError, match="does not exist"):
        engine.load(tmp_path / "nothing", device="cpu")


@pytest.mark.parametrize(
    ("place", "stored", "kind", "dtype", "reason"),
    [
        ("cpu", "bfloat16", "hf_dir", "float32", "CPU"),
        ("cuda", "bfloat16", "hf_dir", "bfloat16", "own"),
        ("cuda", "float16", "hf_dir", "float16", "own"),
        ("cuda", "float32", "hf_dir", "bfloat16", "float32 would be slow"),
        ("cuda", "float16", "gguf", "bfloat16", "dequantized"),
    ],
)
def test_auto_dtype_and_its_reason(place, stored, kind, dtype, reason):
    options = resolve_load_config(
        replace(CONFIG, dtype=stored),
        SimpleNamespace(kind=kind),
        (Device(place), "asked for"),
        "auto",
        "auto",
        None,
    )
    assert options.dtype == dtype and reason in options.reasons["dtype"]
    assert options.max_model_len == 128 and "own" in options.reasons["max_model_len"]


def test_auto_device_says_what_it_chose(capsys):
    model = _load("auto")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(model.device) in lines[0] and model.dtype in lines[0]
    assert model.device.is_cuda or f"), {threads.current()}, " in lines[0]
    _load("cpu")
    assert capsys.readouterr().err == ""


def test_a_decoder_without_its_weights():
    weights = dummy_weights(CONFIG)
    del weights["layers.1.down"]
    with pytest.raises(errors.WeightsError, match=r"'layers\.1\.down'"):
        Decoder(CONFIG, weights, 16)


def test_weight_bytes_count_tied_embeddings_once():
    tied = _load(config=replace(CONFIG, tie_word_embeddings=True))
    assert _load().weight_bytes - tied.weight_bytes == 96 * 32 * 4


# --- step ---------------------------------------------------------------------------------------


def test_shapes_and_types(model):
    cache = model.new_cache(batch_size=2, max_tokens=64)
    every = model.step(IDS, cache, logits="all")
    last = model.step(IDS, model.new_cache(2, 64))
    assert every.shape == (2, 20, 96) and last.shape == (2, 96)
    assert every.dtype == last.dtype == np.float32
    assert isinstance(every, model.device.xp.ndarray)
    np.testing.assert_allclose(to_numpy(every)[:, -1], to_numpy(last), rtol=1e-5, atol=1e-6)
    assert cache.lengths.tolist() == [20, 20]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_any_integers(model, dtype):
    want = model.step(IDS, model.new_cache(2, 32))
    got = model.step(IDS.astype(dtype), model.new_cache(2, 32))
    assert bool((want == got).all())


def test_lists_and_foreign_arrays(model):
    class Foreign:
        """Another library's array: not a NumPy array, but with DLPack."""

        def __dlpack__(self, **options):
            return IDS.__dlpack__(**options)

        def __dlpack_device__(self):
            return IDS.__dlpack_device__()

    want = to_numpy(model.step(IDS, model.new_cache(2, 32)))
    for ids in (IDS.tolist(), Foreign(), model.device.xp.asarray(IDS)):
        np.testing.assert_array_equal(to_numpy(model.step(ids, model.new_cache(2, 32))), want)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3, -1]], r"token_ids\[1, 1\] must be in \[0, 96\), the vocabulary; got -1"),
        ([[1, 96], [3, 4]], r"token_ids\[0, 1\] must be in \[0, 96\), the vocabulary; got 96"),
        (np.full((2, 1), 2**64 - 1, np.uint64), "got 18446744073709551615"),
        ([[1], [2], [3]], r"B = 2 \(rows of the cache\) .* got \(3, 1\)"),
        ([1, 2], r"shape \(B, T\) .* got \(2,\)"),
        ([[], []], r"T >= 1; got \(2, 0\)"),
        ([[1, 2], [3]], "rows of equal length"),
        ([[1.0], [2.0]], "must be integers; got float64"),
        ([[True], [False]], "must be integers; got bool"),
    ],
)
def test_bad_token_ids(model, ids, message):
    cache = model.new_cache(2, 32)
    with pytest.raises(ValueError, match=message):
        model.step(ids, cache)
    assert cache.lengths.tolist() == [0, 0]


def test_unknown_kind_of_logits(model):
    with pytest.raises(ValueError, match="'last' or 'all'; got 'first'"):
        model.step(IDS, model.new_cache(2, 32), logits="first")


def test_chunking_long_inputs_does_not_change_the_logits(model, monkeypatch):
    every = to_numpy(model.step(IDS, model.new_cache(2, 32), logits="all"))
    monkeypatch.setattr(model_module, "_MAX_STEP_TOKENS", {"cpu": 7, "cuda": 7})
    cut = to_numpy(model.step(IDS, model.new_cache(2, 32), logits="all"))
    last = to_numpy(model.step(IDS, model.new_cache(2, 32)))
    np.testing.assert_allclose(cut, every, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last, every[:, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_size_changes_nothing(model, block_size):
    want = to_numpy(model.step(IDS, model.new_cache(2, 100)))
    cache = model.new_cache(2, 100, block_size=block_size)
    np.testing.assert_allclose(to_numpy(model.step(IDS, cache)), want, rtol=1e-5, atol=1e-6)


def test_two_models_in_one_process(where):
    a, b = _load(where), _load(where, replace(CONFIG, num_layers=1, vocab_size=50))
    want_a = to_numpy(a.step(IDS, a.new_cache(2, 40)))
    cache_a, cache_b = a.new_cache(2, 40), b.new_cache(1, 20)
    a.step(IDS[:, :10], cache_a)
    b.step([[1, 2, 3]], cache_b)
    got_a = to_numpy(a.step(IDS[:, 10:], cache_a))
    np.testing.assert_allclose(got_a, want_a, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="made by this model's new_cache"):
        b.step([[1]], cache_a)


def _longrope(original=16, short=1.0):
    """A model with longrope; its weights do not depend on the arguments."""
    rope = RopeConfig(
        rotary_dim=16,
        scaling="longrope",
        attention_factor=1.5,
        original_max_position=original,
        short_factor=(short,) * 8,
        long_factor=(9.0,) * 8,
    )
    return _load(config=replace(CONFIG, rope=rope))


@pytest.fixture(scope="module")
def longrope():
    """A model with longrope, and two with its short or its long factors at every length."""
    return _longrope(), _longrope(128), _longrope(128, 9.0)


def _close(got, want):
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-4, atol=1e-5)


def test_longrope_factors_follow_the_length_not_the_limit(longrope):
    model, short, long = longrope
    assert (model.long_rope_offset, model.short_rope_len) == (128, 16)
    assert (short.long_rope_offset, short.short_rope_len) == (0, 0)
    for count in (1, 16, 17, 20):
        plain = short if count <= 16 else long
        want = plain.step(IDS[:, :count], plain.new_cache(2, 20), logits="all")
        for most in (20, 100):
            _close(model.step(IDS[:, :count], model.new_cache(2, most), logits="all"), want)
    short_row, long_row = (m.step(IDS[:, :8], m.new_cache(2, 20)) for m in (short, long))
    assert np.abs(short_row - long_row).max() > 0.01 * short_row.std()


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_step_across_the_border_of_longrope_computes_all_keys_anew(longrope, monkeypatch, chunk):
    monkeypatch.setattr(model_module, "_MAX_STEP_TOKENS", {"cpu": chunk, "cuda": chunk})
    model, short, long = longrope
    wanted = {m: m.step(IDS, m.new_cache(2, 20), logits="all") for m in (short, long)}
    cache = model.new_cache(2, 20)
    for start, stop in [(0, 10), (10, 16), (16, 17), (17, 20)]:
        plain = short if stop <= 16 else long
        got = model.step(IDS[:, start:stop], cache, logits="all")
        _close(got, wanted[plain][:, start:stop])
    # Back below the border, in one row of two.
    cache.truncate(10, row=1)
    cache.truncate(19, row=0)
    got = model.step(np.stack([IDS[0, 19:20], IDS[1, 10:11]]), cache)
    _close(got[0], wanted[long][0, 19])
    _close(got[1], wanted[short][1, 10])
    cache.reset()
    _close(model.step(IDS[:, :4], cache), wanted[short][:, 3])


def test_a_step_across_the_border_that_fails_can_be_repeated(longrope, monkeypatch):
    model, _, long = longrope
    cache = model.new_cache(2, 20)
    model.step(IDS[:, :16], cache)
    calls = []

    def fail(*args):
        calls.append(args)
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model, "forward", fail)
        model.step(IDS[:, 16:], cache)
    assert len(calls) == 1 and cache.lengths.tolist() == [16, 16]
    want = long.step(IDS, long.new_cache(2, 20))
    _close(model.step(IDS[:, 16:], cache), want)


def test_closed(model):
    cache = model.new_cache(2, 32)
    with model:
        model.step(IDS, cache)
    with pytest.raises(ValueError, match="was closed"):
        model.step(IDS, model.new_cache(2, 32))


def test_a_closed_or_foreign_cache_is_refused(model):
    cache = model.new_cache(2, 32)
    cache.close()
    cache.close()  # a second call does nothing
    with pytest.raises(errors.RequestError, match="cache must be open; it was closed"):
        model.step(IDS, cache)
    for other in (None, _load().new_cache(2, 32)):
        with pytest.raises(errors.RequestError, match="cache must be made by this model's"):
            model.step(IDS, other)


# --- the cache ----------------------------------------------------------------------------------


def test_overflow_names_the_row_and_the_counts(model):
    cache = model.new_cache(2, 30)
    model.step(IDS, cache)
    with pytest.raises(ValueError, match=r"max_tokens=30; got 11 for row .*, which holds 20"):
        model.step(IDS[:, :11], cache)
    assert cache.lengths.tolist() == [20, 20]
    model.step(IDS[:, :10], cache)


def test_truncate_and_reset(model):
    cache = model.new_cache(2, 40)
    model.step(IDS, cache)
    cache.truncate(12)
    assert cache.lengths.tolist() == [12, 12]
    again = to_numpy(model.step(IDS[:, 12:], cache))
    cache.reset()
    whole = to_numpy(model.step(IDS, cache))
    np.testing.assert_allclose(again, whole, rtol=1e-4, atol=1e-6)


def test_rows_of_different_length(model):
    """A truncated row continues separately and does not affect the other row."""
    cache = model.new_cache(2, 40)
    model.step(IDS, cache)
    cache.truncate(5, row=0)
    assert cache.lengths.tolist() == [5, 20]
    for count in (3, 1):  # prefill, then decode
        got = to_numpy(model.step(np.full((2, count), 7), cache))
    for row, length in enumerate((5, 20)):
        alone = model.new_cache(1, 40)
        ids = [[*IDS[row, :length], 7, 7, 7, 7]]
        want = to_numpy(model.step(ids, alone))[0]
        np.testing.assert_allclose(got[row], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((21,), r"num_tokens must be in \[0, 20\], the tokens held; got 21"),
        ((-1,), "got -1"),
        ((1, 2), r"row must be in \[0, 2\); got 2"),
        ((0.5,), r"num_tokens must be in \[0, 20\], the tokens held; got 0.5"),
        ((1, 0.0), r"row must be in \[0, 2\); got 0.0"),
    ],
)
def test_bad_truncation(args, message):
    model = _load()
    cache = model.new_cache(2, 40)
    model.step(IDS, cache)
    with pytest.raises(ValueError, match=message):
        cache.truncate(*args)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0, 16), {}, "batch_size must be a whole number from 1"),
        ((1, 129), {}, "max_tokens must be a whole number from 1 to 128; got 129"),
        ((1, True), {}, "max_tokens must be a whole number"),
        ((1, 16), {"block_size": 24}, "block_size must be one of"),
        ((1, 16), {"block_size": 16.0}, r"block_size must be one of .*; got 16\.0"),
    ],
)
def test_bad_cache(args, options, message):
    with pytest.raises(ValueError, match=message):
        _load().new_cache(*args, **options)


# --- tracing ------------------------------------------------------------------------------------


def test_trace_is_what_step_computes():
    model = _load()
    trace = model.trace(IDS[0])
    want = model.step(IDS[:1], model.new_cache(1, 32), logits="all")[0]
    np.testing.assert_allclose(model.read_residual(trace.hidden[-1]), want, rtol=1e-4, atol=1e-6)
    assert [a.shape for a in trace.attention] == [(4, 20, 20)] * 2


# --- on the GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nothing_is_compiled_after_loading(cp):
    for dtype in ("float32", "float16", "bfloat16"):
        model = _load("cuda", dtype=dtype)
        before = _module.stats().compiles_after_ready
        cache = model.new_cache(2, 64)
        model.step(IDS, cache)
        model.step(IDS[:, :1], cache)
        assert _module.stats().compiles_after_ready == before, _module.stats().late


@pytest.mark.gpu
def test_device_memory_is_the_weights_and_little_more(cp):
    config = replace(CONFIG, vocab_size=32000, hidden_size=1024, intermediate_size=4096)
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    with _load("cuda", config, dtype="bfloat16") as model:
        assert pool.total_bytes() - before < 1.05 * model.weight_bytes
    pool.free_all_blocks()
    assert pool.total_bytes() <= before


# --- memory -------------------------------------------------------------------------------------


def test_the_plan_counts_everything_allocated():
    model = _load()
    decoder = model.decoder
    arrays = {id(w): w.data for w in decoder.weights.values()}
    tables = sum(table.nbytes for table in decoder.rope_tables)
    assert tables == rope_bytes(model.config, model.max_model_len) > 0
    assert model.weight_bytes == sum(a.nbytes for a in arrays.values()) + tables
    assert model.weight_bytes == weight_bytes(model.config, model.dtype) + tables


def test_rope_tables_that_cannot_fit_are_refused_before_they_are_made(monkeypatch):
    """2**24 positions with 1024 features are 64 GiB."""
    config = replace(
        CONFIG,
        head_dim=1024,
        max_position_embeddings=1 << 24,
        rope=replace(CONFIG.rope, rotary_dim=1024),
    )
    monkeypatch.setattr(decoder_module, "RopeTable", None)  # must not be called
    with pytest.raises(errors.OutOfMemoryError, match=r"64\.00 GiB for max_model_len=16777216"):
        _load(config=config)
