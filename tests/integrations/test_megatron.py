"""Megatron-core with our modules beside its local spec, on the CPU with the real package.

Megatron's local modules ask for a CUDA device in a few places; the fixture `cpu` answers for it.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

with warnings.catch_warnings():  # Megatron warns of packages that it would like
    warnings.simplefilter("ignore")
    from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe import experts as megatron_experts

    from engine.integrations import megatron
    from engine.integrations import torch as ops
    from tests.integrations import megatron_parts as parts

from engine.errors import ConfigError  # noqa: E402

# Megatron's own warnings, of deprecations and of a missing device, are not ours to fail on.
pytestmark = pytest.mark.filterwarnings("ignore")

functional = torch.nn.functional
ROOT = Path(__file__).parents[2]
LENGTH = parts.LENGTH
BATCH = parts.BATCH
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """One rank of every parallel group."""
    parts.join(tmp_path_factory.mktemp("store"), 0, 1)
    yield
    parts.leave()


@pytest.fixture
def cpu(ranks, monkeypatch):
    """Megatron's local modules without a CUDA device."""
    parts.without_cuda(monkeypatch.setattr)


def _assert_equal_models(ours, local):
    (logits, gradients) = parts.logits_and_gradients(ours)
    (wanted, wanted_gradients) = parts.logits_and_gradients(local)
    torch.testing.assert_close(logits, wanted, **CLOSE)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], **CLOSE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "LayerNorm", "add_bias_linear": True},
        {"qk_layernorm": True},
        {"activation_func": functional.gelu},
        {"num_query_groups": 4, "gated_linear_unit": False, "activation_func": functional.relu},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ],
    ids=["rmsnorm", "layernorm-bias", "qk-norm", "geglu", "plain-relu", "layer-scaling"],
)
def test_a_models_logits_and_gradients_are_the_local_specs(cpu, changes):
    local = parts.local(parts.config(**changes))
    ours = parts.ours(parts.config(**changes, use_te_activation_func=True))
    ours.load_state_dict(local.state_dict())
    _assert_equal_models(ours, local)


def test_names_of_parameters_and_shards_are_the_local_specs(cpu):
    (ours, local) = (parts.ours(parts.config()), parts.local(parts.config()))
    assert list(ours.state_dict()) == list(local.state_dict())
    assert _shards(ours) == _shards(local)


def _shards(model, **metadata):
    """Return name -> (key, global shape or None) of a model's sharded state."""
    state = model.sharded_state_dict(metadata=parts.metadata(**metadata))
    return {name: (x.key, getattr(x, "global_shape", None)) for name, x in state.items()}


@pytest.mark.parametrize("use_te_activation_func", [False, True])
def test_a_layers_spec_alone_will_do(cpu, use_te_activation_func):
    """As `--spec` passes it; the final norm is then Megatron's."""
    config = parts.config(use_te_activation_func=use_te_activation_func)
    (ours, local) = (parts.model(config, megatron.DENSE_LAYER), parts.local(parts.config()))
    assert isinstance(ours.decoder.layers[0].input_layernorm, megatron.EngineRMSNorm)
    _assert_equal_models(ours, local)


@pytest.mark.parametrize("make", [parts.config, parts.moe_config], ids=["dense", "experts"])
def test_twenty_steps_lose_as_much_as_with_the_local_spec(cpu, make, tmp_path):
    local = parts.local(make())
    ours = parts.ours(make(moe_grouped_gemm=True))
    _copy_through_checkpoint(local, ours, tmp_path / "start")
    (losses, wanted) = (_train(ours), _train(local))
    assert wanted[-1] < 0.7 * wanted[0]
    assert losses == pytest.approx(wanted, rel=1e-3)


def _train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(20):
        (tokens, positions, mask, labels) = parts.batch(step % 2)
        loss = model(tokens, positions, mask, labels=labels).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _copy_through_checkpoint(source, target, folder, **metadata):
    parts.save(source, folder, **metadata)
    parts.load(target, folder, **metadata)


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "singleton-shards"])
@pytest.mark.parametrize("on_input", [False, True], ids=["top-2", "top-1-on-input"])
def test_grouped_experts_are_sequential_ones(cpu, tmp_path, apart, on_input):
    """Weights travel through a distributed checkpoint, there and back."""
    changes = (
        {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True}
        if on_input
        else {}
    )
    local = parts.local(parts.moe_config(**changes))
    ours = parts.ours(parts.moe_config(moe_grouped_gemm=True, **changes))
    assert isinstance(ours.decoder.layers[0].mlp.experts, megatron.EngineGroupedMLP)
    _copy_through_checkpoint(local, ours, tmp_path / "there", singleton_local_shards=apart)
    (logits, gradients) = parts.logits_and_gradients(ours)
    (wanted, wanted_gradients) = parts.logits_and_gradients(local)
    torch.testing.assert_close(logits, wanted, **CLOSE)
    for layer in range(2):
        mlp = f"decoder.layers.{layer}.mlp"
        for ours_name, name in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
            each = [
                wanted_gradients[f"{mlp}.experts.local_experts.{expert}.{name}.weight"]
                for expert in range(4)
            ]
            ours_each = gradients[f"{mlp}.experts.{ours_name}"]
            torch.testing.assert_close(ours_each, torch.stack(each), **CLOSE)
        router = f"{mlp}.router.weight"
        torch.testing.assert_close(gradients[router], wanted_gradients[router], **CLOSE)
    back = parts.local(parts.moe_config(**changes))
    for parameter in back.parameters():
        parameter.data.zero_()
    _copy_through_checkpoint(ours, back, tmp_path / "back", singleton_local_shards=apart)
    for name, parameter in back.named_parameters():
        torch.testing.assert_close(parameter, local.get_parameter(name), rtol=0, atol=0)


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "singleton-shards"])
def test_names_of_grouped_experts_are_megatrons(cpu, monkeypatch, apart):
    monkeypatch.setattr(megatron_experts.gg, "assert_grouped_gemm_is_available", lambda: None)
    ours = parts.ours(parts.moe_config(moe_grouped_gemm=True))
    spec = get_gpt_layer_local_spec(4, moe_grouped_gemm=True, normalization="RMSNorm")
    local = parts.model(parts.moe_config(moe_grouped_gemm=True), spec)
    assert list(ours.state_dict()) == list(local.state_dict())
    (shards, wanted) = (_shards(m, singleton_local_shards=apart) for m in (ours, local))
    assert shards == wanted


@pytest.mark.parametrize(("experts", "tensors"), [(2, 1), (1, 2)], ids=["experts", "halves"])
def test_two_ranks_share_the_experts(cpu, tmp_path, experts, tensors):
    """Two experts a rank, or half of each; weights from a checkpoint of one rank."""
    local = parts.local(parts.moe_config())
    parts.save(local, tmp_path / "checkpoint")
    (wanted, wanted_gradients) = parts.logits_and_gradients(local)
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.megatron_parts"]
    ranks = [
        subprocess.Popen([*command, *map(str, (tmp_path, rank, experts, tensors))], cwd=ROOT)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in range(2):
        (logits, gradients) = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(logits, wanted, **CLOSE)
        for name in set(gradients) & set(wanted_gradients):  # all but the experts'
            torch.testing.assert_close(gradients[name], wanted_gradients[name], **CLOSE)
        number = len(gradients["decoder.layers.0.mlp.experts.weight1"].flatten())
        assert number == 4 * 48 * 32 // 2


def test_experts_without_tokens_have_gradients(cpu):
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    experts = megatron.EngineGroupedMLP(4, parts.moe_config(), groups)
    x = torch.zeros(0, 32, requires_grad=True)
    (out, bias) = experts(x, torch.zeros(4, dtype=torch.int64), torch.zeros(0))
    assert out.shape == (0, 32)
    assert bias is None
    out.sum().backward()
    for weight in (experts.weight1, experts.weight2):
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def _dense(q, k, v, *, scale, visible, sinks=None):
    """Softmax attention of (S, H, D) queries with (S, K, D) keys, from its formula."""
    group = q.shape[1] // k.shape[1]
    (k, v) = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def _attention(config, layer_number=1, **arguments):
    return megatron.EngineAttention(config, layer_number, AttnMaskType.causal, "self", **arguments)


def _qkv(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def _causal(length, window=0):
    keys, queries = torch.arange(length), torch.arange(length)[:, None]
    return (keys <= queries) & (not window or keys > queries - window)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (3, 0), (-1, 0)])
def test_attention_of_windows_and_sinks(cpu, softmax_type, window):
    """window_size (3, 0): a query sees itself and the 3 keys before it."""
    attention = _attention(parts.config(softmax_type=softmax_type, window_size=window))
    sinks = attention.softmax_offset
    if softmax_type == "learnable":
        sinks.data.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    (q, k, v) = _qkv(LENGTH, BATCH)
    out = attention(q, k, v, None)
    visible = _causal(LENGTH, 4 if window == (3, 0) else 0)
    each = [
        _dense(q[:, i], k[:, i], v[:, i], scale=8**-0.5, visible=visible, sinks=sinks)
        for i in range(BATCH)
    ]
    wanted = torch.stack(each, 1).flatten(2)
    torch.testing.assert_close(out, wanted, **CLOSE)
    inputs = [q, k, v, sinks] if softmax_type == "learnable" else [q, k, v]
    weight = torch.randn(out.shape)
    gradients = torch.autograd.grad(out, inputs, weight)
    for got, want in zip(gradients, torch.autograd.grad(wanted, inputs, weight), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_attention_copies_neither_inputs_nor_output(cpu, monkeypatch):
    """Keys and values are slices of the projection, as Megatron passes them without RoPE."""
    seen = []

    def attention(*tensors, **options):
        result = ops.attention(*tensors, **options)
        seen.extend(x.data_ptr() for x in (*tensors, result))
        return result

    monkeypatch.setattr(megatron, "ops", SimpleNamespace(attention=attention))
    mixed = torch.randn(LENGTH, BATCH, 2, 2 * 8 + 8 + 8)  # groups of 2 queries, a key and a value
    (q, k, v) = mixed.split([16, 8, 8], dim=-1)
    q = q.reshape(LENGTH, BATCH, 4, 8)
    out = _attention(parts.config())(q, k, v, None)
    assert seen == [x.data_ptr() for x in (q, k, v, out)]
    wanted = _dense(q[:, 1], k[:, 1], v[:, 1], scale=8**-0.5, visible=_causal(LENGTH))
    torch.testing.assert_close(out[:, 1].view(LENGTH, 4, 8), wanted, **CLOSE)


def test_windows_skip_the_layers_that_the_configuration_names(cpu):
    config = parts.config(window_size=(3, 0), window_attn_skip_freq=2)
    assert [_attention(config, layer).window for layer in (1, 2, 3)] == [4, 0, 4]


@pytest.mark.parametrize("longest", [6, None])
def test_attention_of_packed_sequences(cpu, longest):
    """Each sequence is as if it were alone, forward and backward."""
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    packed = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **lengths)
    attention = _attention(parts.config())
    (q, k, v) = _qkv(12)
    out = attention(q, k, v, None, AttnMaskType.padding_causal, packed_seq_params=packed)
    pieces = [
        _dense(*(x[a:b] for x in (q, k, v)), scale=8**-0.5, visible=_causal(b - a))
        for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    wanted = torch.cat(pieces)
    torch.testing.assert_close(out, wanted, **CLOSE)
    weight = torch.randn(out.shape)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    for gradient, want in zip(
        gradients, torch.autograd.grad((wanted * weight).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(gradient, want, **CLOSE)


def test_one_new_query_sees_the_window_before_it(cpu):
    """Decoding in Megatron's static inference names no mask."""
    attention = _attention(parts.config(window_size=(3, 0)))
    (q, k, v) = _qkv(LENGTH, 1)
    out = attention(q[-1:], k, v, None, AttnMaskType.no_mask)
    wanted = attention(q, k, v, None)[-1:]
    torch.testing.assert_close(out, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0; got 0.1"),
        ({"window_size": (3, 3)}, r"window_size must not look ahead, \(left, 0\); got \(3, 3\)"),
    ],
)
def test_attention_refuses_configurations_that_it_does_not_compute(cpu, changes, message):
    with pytest.raises(ConfigError, match=message):
        _attention(parts.config(**changes))


@pytest.mark.parametrize("mask", [AttnMaskType.padding, AttnMaskType.arbitrary])
def test_attention_refuses_masks_that_are_tensors(cpu, mask):
    (q, k, v) = _qkv(LENGTH, 1)
    with pytest.raises(ConfigError, match=f"attn_mask_type must be causal.*got {mask.name}"):
        _attention(parts.config())(q, k, v, torch.zeros(1, 1, LENGTH, LENGTH), mask)


def test_attention_refuses_biases_padding_and_causal_masks_of_other_lengths(cpu):
    attention = _attention(parts.config())
    (q, k, v) = _qkv(LENGTH, 1)
    with pytest.raises(ConfigError, match="attention_bias must be None"):
        attention(q, k, v, None, attention_bias=torch.zeros(1, 4, LENGTH, LENGTH))
    with pytest.raises(ConfigError, match="as many queries as keys; got 4 and 12"):
        attention(q[:4], k, v, None)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, cu_seqlens_q_padded=bounds)
    with pytest.raises(ConfigError, match="no padding between sequences"):
        attention(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=packed)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_follow_the_configuration(cpu, kind):
    """Zero-centred weights start at 0, and every parameter has Megatron's flag."""
    config = parts.config(
        normalization=kind,
        layernorm_zero_centered_gamma=True,
        sequence_parallel=True,
        tensor_model_parallel_size=2,
    )
    norm = megatron.EngineNorm(config, 32, 1e-3)
    parameters = dict(norm.named_parameters())
    assert list(parameters) == (["weight"] if kind == "RMSNorm" else ["weight", "bias"])
    assert all(p.sequence_parallel is True for p in parameters.values())
    assert torch.equal(norm.weight, torch.zeros(32))
    norm.weight.data.normal_()
    x = torch.randn(3, 2, 32)
    plain = {"RMSNorm": functional.rms_norm, "LayerNorm": functional.layer_norm}[kind]
    wanted = plain(x, (32,), 1 + norm.weight, eps=1e-3)
    torch.testing.assert_close(norm(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (parts.config, {"normalization": "L2Norm"}, "normalization must be one of"),
        (
            parts.config,
            {"memory_efficient_layer_norm": True},
            "memory_efficient_layer_norm must be",
        ),
        (parts.moe_config, {"add_bias_linear": True}, "add_bias_linear must be False"),
        (parts.moe_config, {"activation_func": functional.gelu}, "activation_func silu"),
    ],
)
def test_modules_refuse_configurations_that_they_do_not_compute(cpu, make, changes, message):
    with pytest.raises(ConfigError, match=message):
        parts.ours(make(moe_grouped_gemm=make is parts.moe_config, **changes))


def test_the_provider_has_the_protocols_methods_and_delegates_linears():
    (ours, local) = (megatron.EngineSpecProvider(), LocalSpecProvider())
    for name, method in inspect.getmembers(BackendSpecProvider, inspect.isfunction):
        if getattr(method, "__isabstractmethod__", False):
            wanted = inspect.signature(method)
            assert inspect.signature(getattr(type(ours), name)).parameters.keys() == (
                wanted.parameters.keys()
            )
    for name in ("column_parallel_linear", "row_parallel_linear", "fuse_layernorm_and_linear"):
        assert getattr(ours, name)() == getattr(local, name)()
    (module, submodules) = ours.grouped_mlp_modules(False, False)
    assert (module, submodules) == local.grouped_mlp_modules(False, False)
