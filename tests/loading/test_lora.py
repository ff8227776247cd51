"""Reading LoRA adapters: scales, biases, shards, and what is refused by name."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine import device
from engine.errors import ConfigError, ContractError, EngineError, WeightsError
from engine.layers.lora import AdapterSlots, start_copy
from engine.loading import lora
from engine.loading.lora import adapter_bounds, read_adapter
from engine.weights import Shard
from tests.loading.tiny import EXTRA, config_of, random_tensors, tensor_shapes
from tests.lora_files import adaptable, random_adapter, read_tensors, write_adapter

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the folder of a tiny checkpoint of a family."""

    def make(kind, **changes):
        folder = tmp_path_factory.mktemp(kind)
        config = config_of(kind, **changes)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(random_tensors(tensor_shapes(config)), folder / "model.safetensors")
        return folder

    return make


def _model(folder, **options):
    options = {"max_lora_rank": 64, "dtype": "float32"} | options
    return engine.load(folder, device="cpu", progress=False, enable_lora=True, **options)


def _q(pairs_rank=4, rows=32, columns=32, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((pairs_rank, columns)).astype(np.float32)
    return {f"{Q}.weight": (a, rng.standard_normal((rows, pairs_rank)).astype(np.float32))}


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 32}, lambda rank: 32 / rank),
        ({"lora_alpha": 32, "use_rslora": True}, lambda rank: 32 / rank**0.5),
        ({"alpha_pattern": {"q_proj": 7}}, lambda rank: 7 / rank),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 7, "k": 1}}, lambda rank: 7 / rank),
        ({"alpha_pattern": {r"layers\.(0|2)\.self_attn\.(q|k)_proj": 7}}, lambda rank: 7 / rank),
        ({"lora_alpha": None}, lambda rank: 8 / rank),
        ({"alpha_pattern": {"proj": 7}}, lambda rank: 1.0),  # a part of a name is not its ending
        ({"r": 2, "rank_pattern": {"q_proj": "rank"}, "lora_alpha": 6}, lambda rank: 6 / rank),
    ],
)
def test_scales(base, tmp_path, rank, config, scale):
    config = {k: {n: rank for n in v} if k == "rank_pattern" else v for k, v in config.items()}
    pairs = _q(rank)
    model = _model(base("llama"))
    adapter = model.read_adapter("a", write_adapter(tmp_path / "a", pairs, rank, **config))
    [(name, (a, b, bias))] = adapter.matrices.items()
    want_a, want_b = pairs[f"{Q}.weight"]
    assert name == "layers.0.qkv" and adapter.rank == rank and not bias.any()
    assert np.array_equal(a[:rank], want_a) and not a[rank:].any()
    np.testing.assert_allclose(b[:32, :rank], want_b * scale(rank), rtol=1e-6)
    assert not b[32:].any() and not b[:, rank:].any()


def test_tensors_of_other_writers(base, tmp_path):
    """Names with an adapter's name, without peft's prefix, and of a bare file."""
    model = _model(base("llama"))
    pairs = _q()
    folder = write_adapter(tmp_path / "a", pairs, 4)
    want = model.read_adapter("a", folder).matrices["layers.0.qkv"]
    stored = load_file(folder / "adapter_model.safetensors")
    for number, rename in enumerate(
        (
            lambda name: name.replace(".weight", ".default.weight"),
            lambda name: name.removeprefix("base_model.model."),
            lambda name: name.replace("model.model.", "model.model.language_model."),
        )
    ):
        other = write_adapter(tmp_path / f"b{number}", pairs, 4)
        renamed = {rename(name): array for name, array in stored.items()}
        save_file(renamed, other / "adapter_model.safetensors")
        for path in (other, other / "adapter_model.safetensors"):
            got = model.read_adapter("b", path).matrices["layers.0.qkv"]
            assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("llama", "model.layers.1.mlp.down_proj"),
        ("qwen3", "model.layers.0.self_attn.k_proj"),
        ("phi3", "model.layers.1.self_attn.qkv_proj"),
    ],
)
def test_adapters_of_models_without_an_output_layer(base, tmp_path, kind, module):
    """An embedding model's modules have no "model." in front of their names."""
    folder = base(kind)
    model = _model(folder)
    rows, columns = read_tensors(folder)[f"{module}.weight"].shape
    [pair] = _q(4, rows, columns).values()
    found = []
    for number, own in enumerate((module, module.partition(".")[2])):
        patterns = {"rank_pattern": {f"^{own}": 4}, "alpha_pattern": {f"^{own}": 12}}
        path = write_adapter(tmp_path / f"{number}", {f"{own}.weight": pair}, 2, **patterns)
        found.append(model.read_adapter("a", path).matrices)
    [(name, want)], [(other, got)] = (matrices.items() for matrices in found)
    assert name == other and want[1].any()
    assert all(np.array_equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize("start", ["", "^", "(text|language)_", "[kl]anguage_"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_patterns_are_for_the_names_of_the_adapted_model(base, tmp_path, prefix, start):
    """The names in a multimodal model: peft matched them when it trained the adapter."""
    model = _model(base("llama"))
    pairs = _q(4)
    own = Q.replace("model.", prefix, 1)
    pattern = {"": own, "^": f"^{own}"}.get(start, own.replace("language_", start))
    config = {"r": 2, "rank_pattern": {pattern: 4}, "alpha_pattern": {pattern: 12}}
    folder = write_adapter(tmp_path / "a", {f"{own}.weight": pairs[f"{Q}.weight"]}, 2, **config)
    b = model.read_adapter("a", folder).matrices["layers.0.qkv"][1]
    np.testing.assert_allclose(b[:32, :4], 3 * pairs[f"{Q}.weight"][1], rtol=1e-6)
    config |= {"alpha_pattern": {f"^{Q}": 12}, "lora_alpha": 4}
    folder = write_adapter(tmp_path / "b", {f"{own}.weight": pairs[f"{Q}.weight"]}, 2, **config)
    b = model.read_adapter("b", folder).matrices["layers.0.qkv"][1]
    assert np.array_equal(b[:32, :4], pairs[f"{Q}.weight"][1])  # another module's alpha


def test_biases(base, tmp_path):
    """lora_bias adds scale times B's bias; bias='lora_only' replaces the model's own."""
    folder = base("qwen2")
    model = _model(folder)
    bias = np.arange(32, dtype=np.float32)
    made = write_adapter(tmp_path / "a", _q(), 4, biases={f"{Q}.weight": bias}, lora_alpha=8)
    got = model.read_adapter("a", made).matrices["layers.0.qkv"][2]
    assert np.array_equal(got[:32], 2 * bias) and not got[32:].any()
    own = load_file(folder / "model.safetensors")[f"{Q}.bias"]
    for number, name in enumerate((f"{Q}.bias", f"{Q}.base_layer.bias")):
        made = write_adapter(tmp_path / f"b{number}", _q(), 4, bias="lora_only")
        stored = load_file(made / "adapter_model.safetensors")
        stored[f"base_model.model.{name}"] = bias
        save_file(stored, made / "adapter_model.safetensors")
        got = model.read_adapter("b", made).matrices["layers.0.qkv"][2]
        np.testing.assert_allclose(got[:32], bias - own, rtol=1e-6)


@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("by_output", [False, True])
def test_shards_add_up(base, tmp_path, kind, by_output):
    """The ranks' products B (A x), summed or side by side, are those of the whole adapter."""
    folder = base(kind)
    whole = _model(folder)
    tensors = load_file(folder / "model.safetensors")
    names = adaptable(whole, tensors)
    biases = {names[0]: np.ones(len(tensors[names[0]]), np.float32)}
    pairs = random_adapter(names, tensors, 4)
    made = write_adapter(tmp_path / "a", pairs, 4, biases=biases)
    want = whole.read_adapter("a", made).matrices
    config = whole.config
    shares = []
    for rank in range(2):
        shard = Shard(rank, 2, by_output)
        weights = engine.loading.weights.load_weights(folder, config, shard=shard)
        bounds = adapter_bounds(config, weights, shard)
        products = {
            name: _Room(weights[name].shape, bounds[name], whole.decoder.adapters.rank)
            for name in bounds
        }
        shares.append(read_adapter("a", made, config, products, shard).matrices)
    rng = np.random.default_rng(5)
    for name, (a, b, bias) in want.items():
        x = rng.standard_normal(a.shape[1]).astype(np.float32)
        bounds = whole.decoder.adapters.products[name].bounds
        product = _product(a, b, bounds, x) + bias
        parts = []
        for rank, share in enumerate(shares):
            own_a, own_b, own_bias = share[name]
            own_bounds = _own_bounds(bounds, len(b), len(own_b))
            own_x = x.reshape(2, -1)[rank] if own_a.shape[1] < a.shape[1] else x
            parts.append(_product(own_a, own_b, own_bounds, own_x) + own_bias)
        if len(parts[0]) == len(product):
            got = parts[0] + parts[1]
        else:
            ends = (0, *bounds)
            got = np.concatenate(
                [
                    part[start // 2 : end // 2]
                    for start, end in itertools.pairwise(ends)
                    for part in parts
                ]
            )
        np.testing.assert_allclose(got, product, atol=1e-5)


class _Room:
    """Stands in for an `AdaptedProduct`: the shapes of one slot."""

    def __init__(self, shape, bounds, rank):
        self.bounds = bounds
        self.rank = rank
        self.a = np.zeros((1, len(bounds) * rank, shape[1]), np.float32)
        self.b = np.zeros((1, shape[0], rank), np.float32)
        self.bias = np.zeros((1, shape[0]), np.float32)


def _own_bounds(bounds, whole, own):
    return bounds if own == whole else tuple(end * own // whole for end in bounds)


def _product(a, b, bounds, x):
    low = a @ x
    rank = b.shape[1]
    rows = np.arange(len(b))
    part = np.searchsorted(bounds, rows, side="right")
    return np.array([b[row] @ low[part[row] * rank : (part[row] + 1) * rank] for row in rows])


CONFIGS = {
    "peft_type must be 'LORA'; got 'IA3'": {"peft_type": "IA3"},
    "use_dora must be left out": {"use_dora": True},
    "modules_to_save must be left out": {"modules_to_save": ["lm_head"]},
    "fan_in_fan_out must be left out": {"fan_in_fan_out": True},
    "r must be a whole number": {"r": 0},
    "lora_alpha must be": {"lora_alpha": "x"},
    "lora_alpha must be a number .*; got inf": {"lora_alpha": float("inf")},
    "lora_alpha must be a number .*; got a whole": {"lora_alpha": 10**400},
    "alpha_pattern must be .* to numbers above 0; got": {"alpha_pattern": {"q_proj": float("inf")}},
    "alpha_pattern must be a map .* to numbers": {"alpha_pattern": {"q_proj": 10**400}},
    "init_lora_weights must be true": {"init_lora_weights": "pissa_niter_4"},
    "rank_pattern must be a map from names of modules to whole": {"rank_pattern": {"q_proj": -1}},
    "rank_pattern must be .* whole numbers above 0; got": {"rank_pattern": {"q_proj": 4.5}},
    r"alpha_pattern must be .* \('\(a\+\)\+' is none\)": {"alpha_pattern": {"(a+)+": 4}},
    r"alpha_pattern must be .* \('\(q_proj' is none\)": {"alpha_pattern": {"(q_proj": 4}},
    "alpha_pattern must be .* of at most 4 groups": {"alpha_pattern": {"(q|q)" * 30: 4}},
}


@pytest.mark.parametrize(("message", "config"), CONFIGS.items())
def test_configs_that_are_refused(base, tmp_path, message, config):
    folder = write_adapter(tmp_path / "a", _q(), 4, **config)
    with pytest.raises(ConfigError, match=f"adapter 'mine': adapter_config.json: {message}"):
        _model(base("llama")).read_adapter("mine", folder)


def _tensors(**changes):
    a, b = _q()[f"{Q}.weight"]
    good = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    return {name: array for name, array in (good | changes).items() if array is not None}


E1 = "model.embed_tokens"
TENSORS = {
    f"module '{Q}' must have lora_B beside lora_A": _tensors(**{f"{Q}.lora_B.weight": None}),
    f"module '{Q}' must have lora_A beside lora_B": _tensors(**{f"{Q}.lora_A.weight": None}),
    r"must have lora_A \(4, 32\) and lora_B \(32, 4\), .* got \(4, 31\) and \(32, 4\)": _tensors(
        **{f"{Q}.lora_A.weight": np.ones((4, 31), np.float32)}
    ),
    r"got \(5, 32\) and \(32, 4\)": _tensors(
        **{f"{Q}.lora_A.weight": np.ones((5, 32), np.float32)}
    ),
    "must be finite": _tensors(**{f"{Q}.lora_A.weight": np.full((4, 32), np.nan, np.float32)}),
    "must be one of F32, F16, BF16; got I32": _tensors(
        **{f"{Q}.lora_A.weight": np.ones((4, 32), np.int32)}
    ),
    "must be the lora_A, lora_B or bias of a linear layer": _tensors(
        **{f"{E1}.lora_embedding_A": np.ones((4, 32), np.float32)}
    ),
    "'model.layers.0.self_attn.w_proj' is no linear layer of a llama model": {
        "model.layers.0.self_attn.w_proj.lora_A.weight": np.ones((4, 32), np.float32),
        "model.layers.0.self_attn.w_proj.lora_B.weight": np.ones((32, 4), np.float32),
    },
    "'model.layers.7.self_attn.q_proj' is no linear layer": {
        "model.layers.7.self_attn.q_proj.lora_A.weight": np.ones((4, 32), np.float32),
        "model.layers.7.self_attn.q_proj.lora_B.weight": np.ones((32, 4), np.float32),
    },
    "'lm_head' must be a projection of attention": {
        "lm_head.lora_A.weight": np.ones((4, 32), np.float32),
        "lm_head.lora_B.weight": np.ones((64, 4), np.float32),
    },
    "must be a projection of attention": {
        f"{E1}.lora_A.weight": np.ones((4, 32), np.float32),
        f"{E1}.lora_B.weight": np.ones((40, 4), np.float32),
    },
    "must hold tensors": {},
    "must be the only lora_A of its module": _tensors(
        **{f"{Q}.lora_A.default.weight": np.ones((4, 32), np.float32)}
    ),
}


@pytest.mark.parametrize(("message", "tensors"), TENSORS.items())
def test_tensors_that_are_refused(base, tmp_path, message, tensors):
    folder = write_adapter(tmp_path / "a", _q(), 4)
    save_file(
        {f"base_model.model.{name}": array for name, array in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    with pytest.raises(WeightsError, match=message) as error:
        _model(base("llama")).read_adapter("mine", folder)
    assert "adapter 'mine'" in str(error.value)


def test_a_scale_that_no_number_holds(base, tmp_path):
    folder = write_adapter(tmp_path / "a", _q(), 4, lora_alpha=1e300)
    with pytest.raises(WeightsError, match=f"'{Q}' must have values that float32 holds"):
        _model(base("llama")).read_adapter("a", folder)


def test_a_rank_above_the_limit(base, tmp_path):
    folder = write_adapter(tmp_path / "a", _q(20), 20)
    with pytest.raises(WeightsError, match=f"'{Q}' has rank 20; max_lora_rank is 16"):
        _model(base("llama"), max_lora_rank=16).read_adapter("a", folder)


def test_files_that_are_refused(base, tmp_path):
    model = _model(base("llama"))
    with pytest.raises(ConfigError, match=r"must be a folder with adapter_config\.json"):
        model.read_adapter("a", tmp_path / "nothing")
    folder = write_adapter(tmp_path / "a", _q(), 4)
    secret = write_adapter(tmp_path / "b", _q(), 4) / "adapter_model.safetensors"
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError):
        model.read_adapter("a", folder)
    (folder / "adapter_model.safetensors").symlink_to(secret)
    with pytest.raises(WeightsError, match="must be inside the model's folder"):
        model.read_adapter("a", folder)


@pytest.mark.parametrize(
    ("option", "value"), [("max_loras", 0), ("max_lora_rank", 257), ("enable_lora", 1)]
)
def test_options(base, option, value):
    with pytest.raises(ConfigError, match=f"{option} must be"):
        engine.load(base("llama"), device="cpu", **{option: value})


def test_matrices_in_page_locked_memory(base, tmp_path, monkeypatch):
    """They are what they are in ordinary memory, whatever it held and however it is cut."""
    folder = base("qwen2")
    model = _model(folder, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    pairs = random_adapter(adaptable(model, tensors), tensors, 8)
    path = write_adapter(tmp_path / "sql", pairs, 8)
    wanted = model.read_adapter("sql", path).matrices
    pieces = []

    def allocate(num_bytes):
        pieces.append(np.full(num_bytes, 0xFF, np.uint8))
        return pieces[-1]

    products = model.decoder.adapters.products
    for size, count in ((1, len(wanted)), (1 << 30, 1)):
        monkeypatch.setattr(lora, "_PIECE_BYTES", size)
        pieces.clear()
        found = read_adapter("sql", path, model.config, products, allocate=allocate).matrices
        assert found.keys() == wanted.keys() and len(pieces) == count
        for name, arrays in wanted.items():
            for array, want in zip(found[name], arrays, strict=True):
                assert array.dtype == want.dtype and np.array_equal(array, want)
                assert any(np.shares_memory(array, piece) for piece in pieces)


def test_what_was_read_outlives_its_file(base, tmp_path):
    model = _model(base("llama"))
    pairs = _q()
    folder = write_adapter(tmp_path / "a", pairs, 4, lora_alpha=4)
    adapter = model.read_adapter("a", folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # over the mapped pages
    [(a, b, _)] = adapter.matrices.values()
    want_a, want_b = pairs[f"{Q}.weight"]
    assert np.array_equal(a[:4], want_a) and np.array_equal(b[:32, :4], want_b)


def test_what_the_device_copies_is_kept_until_it_is_copied():
    class Event:
        is_done = False

        def __init__(self, *, disable_timing):
            assert disable_timing

        def record(self):
            events.append(self)

        def synchronize(self):
            self.is_done = True

    events = []
    xp = SimpleNamespace(cuda=SimpleNamespace(Event=Event), zeros=np.zeros)
    slots = AdapterSlots(xp, 2, 16, {}, np.dtype(np.float32))
    arrays = [np.zeros((16, 8), np.float32) for _ in range(3)]
    kept = [weakref.ref(array) for array in arrays]
    for slot, number in ((0, 0), (1, 1), (0, 2)):
        slots.write(slot, {"layers.0.qkv": (arrays[number], arrays[number], None)})
    arrays.clear()
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, True, True]
    assert [event.is_done for event in events] == [True, False, False]


def test_copies_to_a_slot_start_where_it_does():
    """Each is one copy in the order of the current stream, whatever the layout of its source."""
    device_array = np.zeros((3, 4, 5), np.float32)
    target = SimpleNamespace(
        data=SimpleNamespace(ptr=device_array.ctypes.data), shape=(3, 4, 5), dtype=np.float32
    )
    started = []

    def copy(to, source, num_bytes, kind, stream):
        started.append((kind, stream))
        ctypes.memmove(to, source, num_bytes)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice="in")
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: SimpleNamespace(ptr="mine"))
    source = np.arange(20, dtype=np.float32).reshape(5, 4).T
    start_copy(SimpleNamespace(cuda=cuda), target, 1, source)
    assert started == [("in", "mine")] and np.array_equal(device_array[1], source)
    assert not device_array[[0, 2]].any()
    with pytest.raises(ContractError, match=r"must have shape \(4, 5\); got \(5, 4\)"):
        start_copy(SimpleNamespace(cuda=cuda), target, 1, source.T)


@pytest.mark.gpu
def test_an_adapter_that_is_dropped_at_once_is_written_whole(base, tmp_path):
    if not device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    folder = base("qwen2")
    model = engine.load(folder, device="cuda", progress=False, enable_lora=True, max_lora_rank=16)
    tensors = load_file(folder / "model.safetensors")
    pairs = random_adapter(adaptable(model, tensors), tensors, 8)
    path = write_adapter(tmp_path / "sql", pairs, 8)
    wanted = model.read_adapter("sql", path).matrices
    model.write_adapter(model.read_adapter("sql", path), 1)
    gc.collect()
    for name, product in model.decoder.adapters.products.items():
        for array, matrix in zip((product.a, product.b, product.bias), wanted[name], strict=True):
            assert (array[1].get() == (0 if matrix is None else matrix)).all()
