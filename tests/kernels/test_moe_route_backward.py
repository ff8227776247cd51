"""moe_route_backward: kernel against mirror, mirror against finite differences, contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.tolerances import assert_close

# (T, E, k): every width of entry point, all experts chosen, one expert, more tokens than a block.
SHAPES = ((1, 8, 2), (33, 32, 4), (9, 60, 4), (300, 128, 8), (5, 200, 1), (7, 512, 16), (6, 4, 4),
          (3, 1, 1), (0, 8, 2))  # fmt: skip
OPTIONS = [
    {"score": score, "renormalize": renormalize, "scale": scale}
    for score in ("softmax", "sigmoid")
    for renormalize, scale in ((True, 1.0), (False, 2.5))
]


def _inputs(shape):
    num_tokens, num_experts, top_k = shape
    logits = cases.normal((num_tokens, num_experts), "float32", seed=1, scale=2.0)
    experts = reference.moe_route(logits, top_k).experts
    return cases.normal((num_tokens, top_k), "float32", seed=2), logits, experts


@pytest.mark.grid("options", OPTIONS)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, options):
    inputs = _inputs(shape)
    want = reference.moe_route_backward(*inputs, **options)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = kernels.moe_route_backward(*cases.to_module(xp, *inputs), **options, out=out)
    assert got is out
    assert_close(got, want, reduction=max(257, shape[1]))
    assert_guards(buffer)


@pytest.mark.parametrize("options", OPTIONS)
def test_mirror_is_the_derivative(options):
    """Central differences of sum(dweights * weights) in float64: the choice does not move."""
    dweights, logits, experts = _inputs((5, 6, 3))
    dweights, logits = dweights.astype(np.float64), logits.astype(np.float64)
    got = kernels.moe_route_backward(dweights, logits, experts, **options)
    step = 1e-6
    for at in np.ndindex(*logits.shape):
        ends = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[at] += sign * step
            ends.append(np.sum(dweights * kernels.moe_route(moved, 3, **options).weights))
        np.testing.assert_allclose(got[at], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_scores_of_zero_give_finite_gradients(xp):
    """Sigmoids that underflow: the divisor is moe_route's constant."""
    logits = xp.full((2, 4), -200, np.float32)
    experts = xp.asarray(np.array([[0, 1], [2, 3]], np.int32))
    got = kernels.moe_route_backward(xp.ones((2, 2), np.float32), logits, experts, score="sigmoid")
    assert bool(xp.isfinite(got).all())


@pytest.mark.parametrize("renormalize", [True, False])
def test_nan_of_another_expert_stays_there(xp, renormalize):
    """Sigmoids do not depend on each other: only the gradient of the NaN itself is one."""
    dweights, logits, experts = _inputs((6, 40, 3))
    ends = np.argmin(logits, axis=1)[:, None]
    np.put_along_axis(logits, ends, np.float32(np.nan), axis=1)
    options = {"score": "sigmoid", "renormalize": renormalize}
    want = reference.moe_route_backward(dweights, logits, experts, **options)
    got = kernels.moe_route_backward(*cases.to_module(xp, dweights, logits, experts), **options)
    assert np.isnan(want).sum() == 6
    assert_close(got, want, reduction=257)


def test_contract(xp):
    dweights, logits, experts = cases.to_module(xp, *_inputs((3, 8, 2)))
    op = kernels.moe_route_backward
    with pytest.raises(ShapeError, match=r"dweights: must have shape \(T, k\); k = 2 from experts"):
        op(dweights[:, :1], logits, experts)
    with pytest.raises(DTypeError, match=r"experts: must be int32; got int64"):
        op(dweights, logits, experts.astype(np.int64))
    with pytest.raises(ContractError, match=r"score: must be one of .*; got 'relu'"):
        op(dweights, logits, experts, score="relu")
    with pytest.raises(ContractError, match=r"experts: must be 1 to 2 a token; got 3"):
        op(dweights, logits[:, :2], xp.zeros((3, 3), np.int32))
