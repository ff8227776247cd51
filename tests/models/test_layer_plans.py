"""Launch plans: bit for bit the results of calling each layer, and nothing is left out."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import engine
from engine.config import AltUpConfig, ModelConfig, MoeConfig, PerLayerInputConfig, RopeConfig
from engine.device import to_numpy
from engine.errors import LaunchPlanError
from engine.kernels import _prepared_launch
from engine.kernels._launch_plan import PlanBuilder, active_builder, making_plan, plan_call
from engine.kernels._params import ParamStruct
from engine.kernels._peer_memory import Sent
from engine.kernels._prepared_launch import PreparedLaunch
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm.sm90 import HopperConfig
from engine.layers.batch import ForwardBatch
from engine.layers.moe import Experts, MoE
from engine.models.decoder import summed_experts
from engine.models.layer_plans import LayerPlans
from engine.plan_array import PlanArray, unwrapped

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
    "layers without rope": dataclasses.replace(
        CONFIG, rope_layers=(True, False, True, False, False, True)
    ),
    "layernorm without gate": dataclasses.replace(
        CONFIG,
        layer_norm=True,
        norm_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation="gelu_tanh",
    ),
    "parallel branches": dataclasses.replace(
        CONFIG, layer_norm=True, norm_bias=True, parallel=True
    ),
    "parallel branches with norms of their own": dataclasses.replace(
        CONFIG,
        layer_norm=True,
        parallel=True,
        parallel_norms=True,
        gated_mlp=False,
        activation="relu2",
    ),
    "norms after the rotation": dataclasses.replace(CONFIG, qk_norm=True, qk_norm_after_rope=True),
    "experts of other numbers": dataclasses.replace(
        CONFIG, moe=MoeConfig(5, 3, 96, (True,) * 6, layer_top_k=(3, 1, 3, 1, 1, 2))
    ),
    "narrow values": dataclasses.replace(CONFIG, v_head_dim=48, v_scale=0.7),
    "gated attention": dataclasses.replace(CONFIG, attn_gate="sigmoid", qk_norm=True),
    "scaled branches": dataclasses.replace(CONFIG, branch_scale=0.3),
    "norms of outputs": dataclasses.replace(
        CONFIG, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True
    ),
    "experts": dataclasses.replace(
        CONFIG,
        moe=MoeConfig(5, 3, 96, (True,) * 6, renormalize=False, shared_size=64, shared_gate=True),
    ),
    "experts alone": dataclasses.replace(CONFIG, moe=MoeConfig(5, 3, 96, (True,) * 6)),
    "experts after an MLP": dataclasses.replace(
        CONFIG, moe=MoeConfig(5, 3, 96, (False, *(True,) * 5))
    ),
    "experts in some layers": dataclasses.replace(
        CONFIG,
        moe=MoeConfig(
            *(8, 2, 64, (False, True, True, False, True, True)),
            score="sigmoid",
            scale=2.5,
            correction=True,
            num_groups=2,
            top_groups=1,
            router_bias=True,
            expert_bias=True,
            activation="swiglu_clamped",
        ),
    ),
    "per-layer inputs": dataclasses.replace(
        CONFIG,
        qk_norm=True,
        v_norm=True,
        post_norms=True,
        layer_scale=True,
        per_layer_input=PerLayerInputConfig(16, 150),
        activation="gelu_tanh",
        moe=MoeConfig(
            5, 3, 96, (True, False, True, True, False, True), activation="geglu", beside_mlp=True
        ),
    ),
    "several streams": dataclasses.replace(
        CONFIG,
        qk_norm=True,
        v_norm=True,
        post_norms=True,
        per_layer_input=PerLayerInputConfig(16, 199),
        altup=AltUpConfig(4, True, 24),
        activation="gelu_tanh",
        activation_sparsity=(0.5, 0.5, 0.0, 0.0, 0.5, 0.0),
    ),
    "chunks and one expert": dataclasses.replace(
        CONFIG,
        layer_chunks=(8, 0, 8, 8, 0, 8),
        rope_layers=(True, False, True, True, False, True),
        qk_norm=True,
        bare_qk_norm=True,
        moe=MoeConfig(5, 1, 96, (True,) * 6, scales_input=True, shared_size=64),
    ),
}


class Array:
    """The attributes of a CuPy array that a launch reads."""

    def __init__(self, pointer):
        self.data = SimpleNamespace(ptr=pointer)


@pytest.fixture
def launches(monkeypatch):
    """Record the arguments of every launch, as the driver would read them."""
    seen, current = [], []
    stream = SimpleNamespace(ptr=0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(_prepared_launch.device, "cupy", lambda: cupy)

    def drive(config, function, addresses, extra):
        launch = current[-1]
        seen.append([int(launch.host(index)) for index in range(launch.num_values)])
        return 0

    class Seen(PreparedLaunch):
        def __init__(self, *args, **options):
            self.num_values = len(args[4])
            super().__init__(*args, **options)

        def launch(self):
            current.append(self)
            super().launch()

    monkeypatch.setattr(_prepared_launch, "_driver_launch", lambda: drive)
    return SimpleNamespace(seen=seen, kind=Seen)


def _builder(launches, *calls, struct=None):
    builder = PlanBuilder()
    for values in calls:
        launch = launches.kind(1, (2,), (32,), 0, values, struct=struct, pdl=True)
        launch.launch()
        builder.add_launch("kernel", launch, values)
    return builder


STRUCT = ParamStruct("Params", ["x", "weight", "n"], ["ptr", "ptr", "i32"])


@pytest.mark.parametrize("struct", [None, STRUCT], ids=["arguments", "struct"])
def test_a_plan_moves_its_arrays_and_nothing_else(launches, struct):
    x, weight = Array(1000), Array(2000)
    builder = _builder(launches, (x, weight, np.int32(2000)), struct=struct)
    plan = builder.finish([("weight", 2000, 100), ("x", 1000, 50)])
    assert plan.arrays == ("weight", "x") and str(plan) == "kernel(0=x, 1=weight)"
    plan.run([2500, 1500])
    assert launches.seen[1:] == [[1500, 2500, 2000]]
    plan.run([2000, 1000])
    assert launches.seen[2] == launches.seen[0]


def test_a_view_of_an_array_moves_with_it(launches):
    plan = _builder(launches, (Array(2040), Array(2100))).finish([("weight", 2000, 100)])
    plan.run([5000])
    assert launches.seen[1] == [5040, 2100] and str(plan) == "kernel(0=weight+40)"


def test_arrays_that_share_memory_are_refused(launches):
    with pytest.raises(LaunchPlanError, match="'a' and 'b' do"):
        _builder(launches, (Array(2000),)).finish([("a", 1990, 20), ("b", 2000, 8)])


def test_a_host_call_is_an_entry_of_a_plan(launches):
    calls = []

    def all_reduce(*addresses):
        calls.append((len(launches.seen), addresses))

    with making_plan() as builder:
        first = launches.kind(1, (2,), (32,), 0, (Array(1000),), pdl=True)
        first.launch()
        builder.add_launch("first", first, (Array(1000),))
        plan_call(all_reduce, Array(1010), Array(7000))
        first.launch()
        builder.add_launch("second", first, (Array(1000),))
    plan = builder.finish([("delta", 1000, 64)])
    assert str(plan) == "first(0=delta)\nall_reduce(0=delta+10)\nsecond(0=delta)"
    plan.run([3000])
    assert calls == [(1, (1010, 7000)), (3, (3010, 7000))]


def test_plan_call_without_a_plan_calls_immediately():
    seen = []
    plan_call(lambda *addresses: seen.append(addresses), Array(8))
    assert seen == [(8,)]


def test_only_launches_of_the_same_thread_are_recorded():
    assert active_builder() is None
    with making_plan() as outer:
        with making_plan() as inner:
            assert active_builder() is inner
        assert active_builder() is outer
    assert active_builder() is None


class OnDevice:
    """A stand-in for a CuPy array inside a PlanArray: a NumPy array with a device address."""

    def __init__(self, array):
        self.numpy, self.data = array, SimpleNamespace(ptr=array.ctypes.data)

    def __getattr__(self, name):
        return getattr(self.numpy, name)

    def __getitem__(self, index):
        return OnDevice(self.numpy[index])

    def reshape(self, *shape):
        return OnDevice(self.numpy.reshape(*shape))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * 2,
        lambda x: 2 - x,
        lambda x: x @ x,
        lambda x: -x,
        lambda x: x.copy(),
        lambda x: x.sum(),
        lambda x: x.fill(0),
        lambda x: x[[0, 1]],
        lambda x: x[:, 1:].reshape(-1),
        lambda x: np.add(x, 1),
        lambda x: np.asarray(x),
        lambda x: x.__setitem__(0, 1),
        lambda x: float(x),
        lambda x: x.T,
    ],
)
def test_operations_that_a_plan_would_miss_raise(work):
    x = PlanArray(OnDevice(np.ones((4, 4), np.float32)))
    with pytest.raises(LaunchPlanError, match=r"slices or ints|a view|engine's ops"):
        work(x)


def test_a_plan_array_has_the_attributes_that_ops_read():
    array = np.zeros((4, 6), np.float32)
    x = PlanArray(OnDevice(array))
    assert (x.shape, x.dtype, x.strides, x.itemsize) == ((4, 6), np.float32, (24, 4), 4)
    assert x[1:, None, 2].shape == (3, 1) and x.reshape(2, -1).shape == (2, 12)
    assert x[1:].data.ptr == array.ctypes.data + 24 and unwrapped(x).numpy is array


def _parts(part):
    """Yield a layer and all its parts."""
    yield part
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*slots, *getattr(part, "__dict__", ())):
        value = getattr(part, name, None)
        if type(value).__module__.startswith(("engine.layers", "engine.weights.weight")):
            yield from _parts(value)


def _arrays_in(value):
    """Yield an array, or those in a mapping or tuple."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(item)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array_of_a_layer_is_declared(family):
    """An array that a layer does not declare would be the first layer's in all others."""
    decoder = engine.load(config=FAMILIES[family], load_format="dummy", device="cpu").decoder
    for layer in decoder.layers:
        declared = [id(array) for _, array in layer.arrays()]
        names = [name for name, _ in layer.arrays()]
        assert len(set(names)) == len(names)
        held = {
            id(array)
            for part in _parts(layer)
            for name in dir(part)
            for array in _arrays_in(getattr(part, name))
        }
        assert held == set(declared) and len(held) >= 7


class Delta(str):
    """A name in place of an array."""

    shape = (9, 4)


class Layer:
    """A layer that records its arguments."""

    def __init__(self, index, done):
        self.index, self.done = index, done

    def arrays(self):
        return iter(())

    def is_fused(self, num_tokens):
        return False

    def can_plan(self, batch):
        return True

    def __call__(self, delta, residual, batch, pages, rows=None):
        self.done.append(("called", self.index, delta, rows))
        return Delta(f"delta {self.index}"), residual


class Planned:
    """A plan that gets a layer's number instead of its addresses."""

    def __init__(self, residual, done):
        self.residual, self.done = residual, done
        self.runs, self.num_replays = {}, 0
        self.sent = None

    def run(self, addresses, delta):
        self.done.append(("run", *addresses, delta, None))
        return Delta(f"delta {addresses[0]}"), self.residual


@pytest.mark.parametrize("rows", [None, [3]])
def test_the_last_layer_is_called_when_it_drops_tokens(monkeypatch, rows):
    """The memory held by the plans is free by then."""
    done, plans, alive = [], [], []
    layers = [Layer(index, done) for index in range(4)]

    def plan_layer(self, index, *arguments):
        planned = Planned(arguments[1], done)
        plans.append(weakref.ref(planned))
        return *layers[index](*arguments), planned

    def call_last(*arguments):
        alive.append(plans[0]())
        return Layer.__call__(layers[3], *arguments)

    monkeypatch.setattr(LayerPlans, "_plan", plan_layer)
    run_layers = LayerPlans(layers, [0] * 4, None)
    for index, arrays in enumerate(run_layers._arrays):
        arrays.addresses = [index]
    if rows is not None:
        run_layers._layers = (*layers[:3], call_last)
    got = run_layers("residual", SimpleNamespace(num_tokens=9), [()] * 4, rows)
    assert got == ("delta 3", "residual")
    assert done == [
        ("called", 0, None, None),
        ("called", 1, "delta 0", None),
        ("run", 2, "delta 1", None),
        ("run" if rows is None else "called", 3, "delta 2", rows),
    ]
    assert alive == ([] if rows is None else [None])


class SendingLayer(Layer):
    """A layer whose norm sums what the preceding one has sent, and that sends `rows` rows."""

    def __init__(self, index, rows, link):
        super().__init__(index, [])
        self.sent = rows and Sent(64, rows)
        self.link = link

    def __call__(self, delta, residual, batch, pages, rows=None):
        assert self.link.sent == self.link.carried  # the host knows what was sent
        self.link.sent = self.link.carried = self.sent
        return super().__call__(delta, residual, batch, pages, rows)


class PlannedSending(Planned):
    """Replays what a `SendingLayer` has done, without the host's part of it."""

    def __init__(self, residual, received, sent, link):
        super().__init__(residual, [])
        self.received, self.sent, self.link = received, sent, link

    def run(self, addresses, delta):
        assert self.link.carried == self.received
        self.link.carried = self.sent
        return super().run(addresses, delta)


@pytest.mark.parametrize("features", [(), (2,), (3, 4)])
@pytest.mark.parametrize("delta", [None, Delta("delta")])
@pytest.mark.parametrize("rows", [None, [3]])
@pytest.mark.parametrize(
    "pattern",
    [(8,) * 7, (8, None) * 4, (8, None, None) * 3, (8, 16) * 4, (None, 8, 8, None, None, 8, 8)],
)
def test_a_replayed_layer_leaves_what_it_has_sent(monkeypatch, pattern, rows, delta, features):
    """Dense layers send rows of their outputs, experts do not; the last layer sends nothing.

    Features sum what enters a layer before it does.
    """
    link = SimpleNamespace(sent=None, carried=None)
    sent = [*pattern[:-1], None]
    layers = [SendingLayer(index, one, link) for index, one in enumerate(sent)]
    plans = []

    def plan_layer(self, index, *arguments):
        received = link.carried
        results = layers[index](*arguments)
        plans.append(PlannedSending(arguments[1], received, link.sent, link))
        return *results, plans[-1]

    monkeypatch.setattr(LayerPlans, "_plan", plan_layer)
    run_layers = LayerPlans(layers, sent, link)
    for index, arrays in enumerate(run_layers._arrays):
        arrays.addresses = [index]

    def keep(index, *_):
        assert link.sent == link.carried
        if index in features:
            link.sent = link.carried = None

    batch = SimpleNamespace(num_tokens=9)
    run_layers("residual", batch, [()] * len(sent), rows, keep, delta)
    assert link.sent is link.carried is None
    assert any(planned.done for planned in plans)


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
def test_plans_give_the_bits_of_calling_each_layer(model, counts, starts):
    _check_bits(model, counts, starts)


@pytest.mark.gpu
def test_outputs_stored_through_a_tensor_map_move_in_a_plan(model, dtype, monkeypatch):
    """With a tile for large products, the output's address is inside a tensor map."""
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
    delta, residual, caches = decoder._enter(batch, [tuple(pages) for pages in want_pages])
    for layer, own in zip(decoder.layers, caches, strict=True):
        delta, residual = layer(delta, residual, batch, own)
    if decoder.streams is not None:
        hidden = decoder.final_norm(decoder.streams.leave(delta, residual))
    elif delta is None:
        hidden = decoder.final_norm(residual)
    else:
        hidden = decoder.final_norm.add(summed_experts(delta), residual)[0]
    want = to_numpy(decoder.logits(hidden))
    for _ in range(2):
        got_pages = _pages(model, len(counts) * 8)
        got = decoder.forward(batch, [tuple(pages) for pages in got_pages])
        np.testing.assert_array_equal(to_numpy(got), want)
        np.testing.assert_array_equal(
            to_numpy(got_pages).view(np.uint8), to_numpy(want_pages).view(np.uint8)
        )
    assert np.isfinite(want).all()


@pytest.mark.gpu
def test_a_layer_that_calls_cupy_raises(model, monkeypatch):
    """Its multiplication by 2 would be missing from every other layer."""
    batch, decoder = _batch([70, 50], [0, 16], model.device), model.decoder
    mlp = type(decoder.layers[1].mlp)  # no other layer may run a plan of layer 0
    owner, name = (Experts, "first_product") if mlp is MoE else (mlp, "__call__")
    call = getattr(owner, name)

    def doubled(self, *args, **options):
        return call(self, *args, **options) * 2

    monkeypatch.setattr(owner, name, doubled)
    with pytest.raises(LaunchPlanError, match="__mul__"):
        decoder.forward(batch, [tuple(pages) for pages in _pages(model, 16)])
