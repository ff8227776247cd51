"""Quantized linear layers: products, gradients, state, and what a module must survive."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine.errors import ContractError, WeightsError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402
from engine.integrations.torch.quantized import _layout, _quantized  # noqa: E402
from engine.weights import FORMATS  # noqa: E402
from engine.weights.quantize import QUANTIZABLE  # noqa: E402

F = torch.nn.functional
# Format -> error of the product relative to that of the dequantized weight: 8-bit formats round
# the activations, too.
FORMAT_ERRORS = {
    "fp8": 0.04,
    "fp8_block": 0.04,
    "int8": 0.01,
    "int4": 0.005,
    "int4_g32_zp": 0.005,
    "int8_g64": 0.005,
    "mxfp4": 0.005,
    "q6_k": 0.005,
}
IN, OUT = 320, 80


def _layer(where, name, dtype=torch.bfloat16, *, bias=True):
    torch.manual_seed(0)
    linear = torch.nn.Linear(IN, OUT, bias=bias).to(where, dtype)
    return linear, ops.QuantizedLinear.from_linear(linear, name)


def _error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("name", FORMAT_ERRORS)
def test_product_and_gradients(where, name, rows, bias):
    linear, layer = _layer(where, name, bias=bias)
    x = torch.randn(rows, 2, IN, device=where, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    weight = layer.dequantize().double()
    want = x.double() @ weight.t() + (0 if linear.bias is None else linear.bias.double())
    assert y.dtype == x.dtype and y.shape == (rows, 2, OUT)
    assert _error(y, want) < FORMAT_ERRORS[name]
    dy = torch.randn_like(y)
    y.backward(dy)
    rounded = layer.dequantize(torch.bfloat16).double()
    assert _error(x.grad, dy.double() @ rounded) < 0.005
    if bias:
        assert _error(layer.bias.grad, dy.double().sum((0, 1))) < 0.01
    assert [name for name, _ in layer.named_parameters()] == ["bias"] * bias


@pytest.mark.parametrize("name", FORMAT_ERRORS)
def test_error_and_size_of_a_weight(where, name):
    linear, layer = _layer(where, name)
    error = _error(layer.dequantize(), linear.weight)
    bits = FORMATS[layer.format].bits
    assert error < {8: 0.03, 6: 0.03, 4: 0.15}[bits]
    assert layer.num_bytes < linear.weight.nbytes * (bits + 1.5) / 16


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_a_new_layer_has_the_layout_of_a_quantized_weight(name):
    form = FORMATS[name]
    for n, k in ((16, 256), (33, 200), (130, 64)):
        made = _quantized(torch.randn(n, k), form)
        assert {key: (tuple(t.shape), t.dtype) for key, t in made.items()} == _layout(form, n, k)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4_g64_zp", "q6_k"])
def test_state_survives(where, name, tmp_path):
    """state_dict, deepcopy, a change of dtype and device, and a file."""
    _, layer = _layer(where, name)
    x = torch.randn(3, IN, device=where, dtype=torch.bfloat16)
    want = layer(x)
    path = tmp_path / "layer.pt"
    torch.save(layer.state_dict(), path)
    loaded = ops.QuantizedLinear(IN, OUT, format=name, device=where, dtype=torch.bfloat16)
    loaded.load_state_dict(torch.load(path, weights_only=True))
    meta = ops.QuantizedLinear.from_linear(torch.nn.Linear(IN, OUT, device="meta"), name)
    meta.load_state_dict(layer.state_dict(), assign=True)
    there_and_back = copy.deepcopy(layer).float().half().to("cpu").to(where, torch.bfloat16)
    for other in (loaded, meta, copy.deepcopy(layer), there_and_back):
        assert _error(other(x), want) < 1e-2
        assert torch.equal(other.dequantize(), layer.dequantize())


def test_other_dtypes_and_views(where):
    for name in ("fp8", "int8"):
        _, layer = _layer(where, name, torch.float32)
        x = torch.randn(2, 6, IN + 8, device=where)[:, ::2, 4 : 4 + IN]
        assert torch.equal(layer(x), layer(x.contiguous()))
        assert layer(x).dtype == torch.float32
        assert layer(x[:0]).shape == (0, 3, OUT)
    _, layer = _layer(where, "int4", torch.float16)
    x = torch.randn(4, IN, device=where, dtype=torch.float16)
    assert _error(layer(x[1]), layer(x)[1]) < 2e-3


def test_autocast(where):
    _, layer = _layer(where, "int4", torch.float32)
    x = torch.randn(4, IN, device=where)
    with torch.autocast(where, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))


def test_compiles_to_one_graph(where):
    _, layer = _layer(where, "int4")
    x = torch.randn(4, IN, device=where, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
    y, want = compiled(x), layer(x) * 2
    assert torch.equal(y, want)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(want.sum(), x)[0])


def test_second_derivative_and_vmap():
    _, layer = _layer("cpu", "int4", torch.float32)
    x = torch.randn(3, IN, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    weight = layer.dequantize()
    assert _error(second, (torch.ones_like(x) @ weight.t()) @ weight * 2) < 1e-4
    assert _error(torch.vmap(layer)(x), layer(x)) < 1e-6


def test_operator_passes_opcheck(where):
    _, layer = _layer(where, "fp8", torch.float32)
    x = torch.randn(3, IN, device=where, requires_grad=True)
    planes = layer._planes()
    arguments = (x, *planes.values(), layer.bias, layer.format, OUT, IN)
    opcheck(torch.ops.engine.quantized_linear.default, arguments)


def test_a_model_is_quantized_in_place(where):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(2)])
            self.norm = torch.nn.LayerNorm(64)
            self.lm_head = torch.nn.Linear(64, 100)

        def forward(self, x):
            for block in self.blocks:
                x = x + torch.relu(block(x))
            return self.lm_head(self.norm(x))

    torch.manual_seed(0)
    model = Model().to(where, torch.bfloat16)
    x = torch.randn(9, 64, device=where, dtype=torch.bfloat16)
    want = model(x)
    assert ops.quantize_linears(model, "int8", skip={"lm_head", "blocks.1"}) is model
    kinds = [type(model.blocks[0]), type(model.blocks[1]), type(model.lm_head)]
    assert kinds == [ops.QuantizedLinear, torch.nn.Linear, torch.nn.Linear]
    assert _error(model(x), want) < 0.03


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"x: must have shape \(\.\.\., 64\); got \(4, 128\)"):
        ops.QuantizedLinear(64, 8, format="fp8")(torch.ones(4, 128))
    with pytest.raises(WeightsError, match=r"quantization must be one of int4, .*; got 'int3'"):
        ops.QuantizedLinear(64, 8, format="int3")
    linear = torch.nn.Linear(64, 8)
    with torch.no_grad():
        linear.weight[0, 0] = float("nan")
    with pytest.raises(WeightsError, match="finite"):
        ops.QuantizedLinear.from_linear(linear, "int4")


def test_a_name_to_skip_that_is_not_in_a_tuple_is_an_error():
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(64, 8)})
    with pytest.raises(ContractError, match="skip: must be a tuple of names; got 'lm_head'"):
        ops.quantize_linears(model, "int8", skip="lm_head")


def test_a_layer_in_two_places_stays_one():
    layer = torch.nn.Linear(64, 64)
    model = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Sequential(layer)})
    ops.quantize_linears(model, "int8")
    assert isinstance(model["a"], ops.QuantizedLinear)
    assert model["b"][0] is model["a"]
