"""Linear: the product is chosen by the weight's format, and an unknown format is refused."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.layers import linear
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, Product
from engine.layers.norm import Norm
from engine.weights import FORMATS, Format, Weight
from engine.weights.quantize import quantize

INT8 = Format("int8 a row", 8, (1, 0), 32)


def _quantized(array):
    """Quantize to 8 bits with one scale per row, as a future format may."""
    scales = np.abs(array).max(axis=1, keepdims=True) / 127
    data = np.round(array / scales).astype(np.int8)
    return Weight(INT8, data, array.shape, scales=scales.astype(np.float32))


def test_a_new_format_is_one_line_in_the_table(monkeypatch):
    def plain(x, weight, *, bias, out_dtype, **others):
        y = x @ (weight.data * weight.scales).T
        return (y if bias is None else y + bias).astype(out_dtype or x.dtype)

    def of_normed(x, norm, weight, *, bias, activation):
        return plain(norm(x), weight, bias=bias, out_dtype=None)

    monkeypatch.setitem(linear.PRODUCTS, INT8.name, Product(plain, of_normed))
    rng = np.random.default_rng(0)
    array = rng.standard_normal((24, 16)).astype(np.float32)
    bias = rng.standard_normal(24).astype(np.float32)
    x = rng.standard_normal((5, 16)).astype(np.float32)
    weight = _quantized(array)
    assert weight.num_bytes == 24 * 16 + 24 * 4 == INT8.num_bytes((24, 16))
    made = Linear(weight, Weight.dense(bias))
    np.testing.assert_allclose(made(x), x @ array.T + bias, atol=0.2)
    assert [name for name, _ in made.arrays()] == ["weight.data", "weight.scales", "bias"]
    norm = Norm(np.ones(16, np.float32), 1e-6)
    np.testing.assert_allclose(made.of_normed(x, norm), norm(x) @ array.T + bias, atol=0.2)


def test_an_unknown_format_is_refused():
    weight = _quantized(np.ones((4, 4), np.float32))
    known = ", ".join(linear.PRODUCTS)
    with pytest.raises(WeightsError, match=f"must have a format of {known}; got 'int8 a row'"):
        Linear(weight)
    with pytest.raises(WeightsError, match="embed must be a dense weight; got 'int8 a row'"):
        Embedding(weight)


@pytest.mark.parametrize(
    ("form", "shape", "num_bytes"),
    [
        (FORMATS["bfloat16"], (3, 5), 30),
        (Format("fp8", 8, (0, 0), 32), (256, 512), 256 * 512 + 4),
        (Format("fp8 blocks", 8, (128, 128), 32), (256, 300), 256 * 300 + 2 * 3 * 4),
        (Format("int4 zeros", 4, (1, 64), 32), (8, 128), 8 * 128 // 2 + 8 * 2 * 4),
        (Format("mxfp4", 4, (1, 32), 8), (8, 64), 8 * 32 + 8 * 2),
    ],
)
def test_bytes_of_formats(form, shape, num_bytes):
    assert form.num_bytes(shape) == num_bytes and form.is_dense == (form.block is None)


@pytest.mark.parametrize(("form", "groups"), [("fp8", 1), ("fp8_block", 3), ("int8", 3)])
def test_a_norm_quantizes_as_the_product_does(form, groups):
    """The codes that a norm passes on give what the product of its result gives."""
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 5, 300)).astype(np.float32)
    x[:, 7] *= 100  # its group's scale is not that of the others
    made = Linear(quantize(rng.standard_normal((32, 300)).astype(np.float32), FORMATS[form]))
    norm = Norm(np.ones(300, np.float32), 1e-6)
    codes, h = norm.add_for(made.weight.format, x.copy(), residual.copy())
    assert codes.scales.shape == (5, groups)
    np.testing.assert_array_equal(made(codes), made(norm(h)))


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_part_of_a_stack_has_its_rows(activation, rows):
    """A stacked weight gives what its parts give, also behind a norm."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    dense = rng.standard_normal((12, 256)).astype(np.float32)
    parts = [Weight.dense(dense), quantize(dense[::-1] / 3, FORMATS["fp8"]), Weight.dense(-dense)]
    bias = rng.standard_normal(36).astype(np.float32)
    made = Linear(Weight.stacked(parts), Weight.dense(bias))
    norm = Norm(rng.standard_normal(256).astype(np.float32), 1e-6)
    want = np.concatenate([Linear(part)(norm(x)) for part in parts], axis=1) + bias
    if activation:
        gate, up = np.split(want, 2, axis=1)
        want = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(made(norm(x), activation=activation), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        made.of_normed(x, norm, activation=activation), want, rtol=2e-5, atol=2e-5
    )
