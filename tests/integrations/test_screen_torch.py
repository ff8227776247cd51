"""The peer in PyTorch computes what the network of the example computes, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks`")

from examples.superconductors import crystals, data  # noqa: E402
from examples.superconductors.compositions import batch_of  # noqa: E402
from examples.superconductors.network import Config, Network, absolute_slope  # noqa: E402
from tests.bench.screen_torch import TorchPeer  # noqa: E402

SIZES = {"hidden": 32, "num_heads": 2, "ffn": 48, "num_layers": 2}


def _batches():
    yield batch_of(data.generated(30).compositions)[0], Config(**SIZES)
    config = Config(**SIZES, num_features=crystals.NUM_FEATURES)
    yield crystals.batch_of(crystals.generate(5, length=60))[0], config


@pytest.mark.parametrize("case", [0, 1])
def test_the_peer_is_the_network(case, monkeypatch):
    """Its `torch.compile` is left out: it changes no formula, and needs a C++ compiler."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    batch, config = list(_batches())[case]
    network = Network(config)
    peer = TorchPeer(network)
    expected = network.predict(batch)
    np.testing.assert_allclose(peer.predict(batch), expected, rtol=1e-3, atol=1e-4)
    wanted = np.zeros_like(expected)
    _, gradient = network.gradient(batch, lambda y: absolute_slope(y, wanted))
    outputs = peer.outputs(batch)
    (outputs - torch.from_numpy(wanted)).abs().mean().backward()
    for name, part in network.views(gradient).items():
        if name not in ("embedding", "properties"):  # the peer holds the table made of them
            theirs = peer.parameter(name).grad.numpy()
            np.testing.assert_allclose(part, theirs, rtol=1e-2, atol=1e-5, err_msg=name)
    before = peer.parameter("head").detach().clone()
    peer.train(batch, wanted)
    assert not torch.equal(peer.parameter("head"), before)
    assert peer.parameter("head").grad is None
