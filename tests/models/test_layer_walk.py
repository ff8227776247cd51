"""Layers that are replayed: bit for bit what each layer called by itself gives."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import engine
from engine.config import ModelConfig, RopeConfig
from engine.device import to_numpy
from engine.kernels import _prepared_launch
from engine.kernels._prepared_launch import PreparedLaunch
from engine.kernels._replay import Recording, active_recording, record
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm.sm90 import HopperConfig
from engine.layers.batch import ForwardBatch
from engine.models.layer_walk import LayerWalk

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=199,
    hidden_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    max_position_embeddings=512,
    rope=RopeConfig(rotary_dim=64),
)
FAMILIES = {
    "plain": CONFIG,
    "norms and biases": dataclasses.replace(CONFIG, qk_norm=True, qkv_bias=True),
    "windows": dataclasses.replace(
        CONFIG,
        layer_windows=(0, 8, 0, 8, 8, 0),
        rope_local=RopeConfig(rotary_dim=64, theta=500.0),
        post_norms=True,
        norm_weight_offset=1.0,
        activation="gelu_tanh",
    ),
}


class Array:
    """What a launch wants to know of a CuPy array."""

    def __init__(self, pointer):
        self.data = SimpleNamespace(ptr=pointer)


@pytest.fixture
def launches(monkeypatch):
    """The arguments of every launch, as the driver would read them."""
    seen, current = [], []
    stream = SimpleNamespace(ptr=0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(_prepared_launch.device, "cupy", lambda: cupy)

    def drive(config, function, addresses, extra):
        seen.append([int(host) for host in current[-1].hosts])
        return 0

    class Seen(PreparedLaunch):
        def launch(self):
            current.append(self)
            super().launch()

    monkeypatch.setattr(_prepared_launch, "_driver_launch", lambda: drive)
    return SimpleNamespace(seen=seen, kind=Seen)


def _recording(launches, *calls):
    recording = Recording()
    for values in calls:
        launch = launches.kind(1, (2,), (32,), 0, values, pdl=True)
        launch.launch()
        recording.add(launch, values)
    return recording


def test_a_replay_moves_what_was_bound_and_nothing_else(launches):
    x, weight, out = Array(1000), Array(2000), Array(3000)
    recording = _recording(
        launches,
        (x, weight, np.int32(2000), np.uint64(0), out),
        (out, np.float32(0.0), weight),
    )
    assert recording.bind([(2000, 100), (1000, 50)])
    recording.replay([2500, 1500])
    assert launches.seen[2:] == [[1500, 2500, 2000, 0, 3000], [3000, 0, 2500]]
    recording.replay([2000, 1000])
    assert launches.seen[4:] == launches.seen[:2]


@pytest.mark.parametrize("arrays", [[(1990, 20)], [(2000, 8), (2000, 8)]])
def test_what_is_no_whole_array_cannot_be_replayed(launches, arrays):
    assert not _recording(launches, (Array(2000),)).bind(arrays)


def test_only_the_thread_inside_is_recorded():
    assert active_recording() is None
    with record() as outer:
        with record() as inner:
            assert active_recording() is inner
        assert active_recording() is outer
    assert active_recording() is None


class Layer:
    """A layer that takes note of what it is called with."""

    def __init__(self, index, done):
        self.index, self.done = index, done

    def is_fused(self, num_tokens):
        return False

    def __call__(self, delta, residual, batch, pages, rows=None):
        self.done.append(("called", self.index, delta, rows))
        return f"delta {self.index}", residual


class Recorded:
    """A recording, which is told a layer's number for its pointers."""

    def __init__(self, residual, done):
        self.residual, self.done = residual, done

    def replay(self, pointers, delta):
        self.done.append(("replayed", *pointers, delta, None))
        return f"delta {pointers[0]}", self.residual


@pytest.mark.parametrize("rows", [None, [3]])
def test_the_last_layer_is_called_where_tokens_leave(monkeypatch, rows):
    """And what the recordings hold is free by then."""
    done, recordings, alive = [], [], []
    layers = [Layer(index, done) for index in range(4)]

    def record_layer(walk, index, *arguments):
        recording = Recorded(arguments[1], done)
        recordings.append(weakref.ref(recording))
        return *layers[index](*arguments), recording

    def call_last(*arguments):
        alive.append(recordings[0]())
        return Layer.__call__(layers[3], *arguments)

    monkeypatch.setattr(LayerWalk, "_record", record_layer)
    walk = LayerWalk(layers, [0] * 4)
    walk._pointers = [[index] for index in range(4)]
    if rows is not None:
        walk._layers = (*layers[:3], call_last)
    got = walk("residual", SimpleNamespace(num_tokens=9), [()] * 4, rows)
    assert got == ("delta 3", "residual")
    assert done == [
        ("called", 0, None, None),
        ("called", 1, "delta 0", None),
        ("replayed", 2, "delta 1", None),
        ("replayed" if rows is None else "called", 3, "delta 2", rows),
    ]
    assert alive == ([] if rows is None else [None])


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, dtype):
    if not engine.device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return engine.load(
        config=FAMILIES[request.param], load_format="dummy", device="cuda", dtype=dtype
    )


def _batch(counts, starts, device):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, CONFIG.vocab_size, count).tolist() for count in counts]
    blocks = rng.permutation(len(counts) * 8).reshape(len(counts), 8)
    return ForwardBatch.build(ids, starts, blocks.astype(np.int32), 16, logits="all").to(device)


def _pages(model, count):
    xp, config = model.device.xp, model.config
    shape = (config.num_layers, 2, count, config.num_kv_heads, 16, config.head_dim)
    noise = np.random.default_rng(1).standard_normal(shape, np.float32)
    return xp.asarray(noise.astype(model.decoder.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "starts"),
    [
        ([1], [37]),
        ([1] * 7, [3, 37, 90, 0, 15, 16, 100]),
        ([1] * 40, [index * 2 for index in range(40)]),
        ([70, 50], [0, 16]),
        ([1, 1, 40, 33], [20, 64, 0, 7]),
    ],
    ids=["one", "few", "many", "prompts", "mixed"],
)
def test_bits_are_those_of_each_layer_called_by_itself(model, counts, starts):
    _check_bits(model, counts, starts)


@pytest.mark.gpu
def test_results_that_are_stored_by_map_move_in_a_replay(model, dtype, monkeypatch):
    """A tile of large products, whose results' address is inside a map."""
    tile, choose, forced = HopperConfig(256, 128, cluster_n=2), gemm_launch.choose_config, []

    def choose_tile(*problem, **options):
        if not options["is_hopper"]:
            return choose(*problem, **options)
        forced.append(problem)
        return tile

    monkeypatch.setattr(gemm_launch, "choose_config", choose_tile)
    _check_bits(model, [70, 50], [0, 16])
    assert bool(forced) == gemm_launch.is_hopper(dtype)


def _check_bits(model, counts, starts):
    batch = _batch(counts, starts, model.device)
    decoder = model.decoder
    want_pages = _pages(model, len(counts) * 8)
    delta, residual = None, decoder.embed(batch.token_ids)
    for layer, pages in zip(decoder.layers, want_pages, strict=True):
        delta, residual = layer(delta, residual, batch, tuple(pages))
    if delta is None:
        hidden = decoder.final_norm(residual)
    else:
        hidden = decoder.final_norm.add(delta, residual)[0]
    want = to_numpy(decoder.logits(hidden))
    for _ in range(2):
        got_pages = _pages(model, len(counts) * 8)
        got = decoder.forward(batch, [tuple(pages) for pages in got_pages])
        np.testing.assert_array_equal(to_numpy(got), want)
        np.testing.assert_array_equal(
            to_numpy(got_pages).view(np.uint8), to_numpy(want_pages).view(np.uint8)
        )
    assert np.isfinite(want).all()
