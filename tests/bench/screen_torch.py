"""The example's network in PyTorch, compiled, with cuDNN's attention: the peer of the screen.

torch is imported when a peer is made: nothing else in the suite needs it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from examples.superconductors.network import Batch, Config, Network

__all__ = ["TorchPeer", "has_torch"]


def has_torch() -> bool:
    """Tell whether torch is installed, with a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


class TorchPeer:
    """The network with the same weights, in bfloat16 and `torch.compile`, dense attention.

    Parameters
    ----------
    network : Network
        In bfloat16 on a GPU; elsewhere for tests of this peer.
    """

    def __init__(self, network: Network) -> None:
        import torch

        self.xp = network.xp
        self._torch = torch
        self._model = _model(network.config, network)
        torch._dynamo.reset()  # each peer is a model of its own: no limit on their number
        self._run = torch.compile(self._model, fullgraph=True)
        self._optimizer: Any = None

    def predict(self, batch: Batch) -> Any:
        """Return the outputs, (B, 1) float32, as a CuPy array. See `Network.predict`."""
        with self._torch.no_grad():
            return self.xp.from_dlpack(self.outputs(batch))

    def outputs(self, batch: Batch) -> Any:
        """Return the outputs as a tensor, with a graph for the backward pass."""
        with _attention():
            parts = [self._run(*self._inputs(batch, group)) for group in batch.groups]
        return self._torch.cat(parts)

    def parameter(self, name: str) -> Any:
        """Return the parameter that is called `name` in the network."""
        return self._model.weights[name.replace(".", "_")]

    def train(self, batch: Batch, wanted: Any) -> None:
        """Take a step on the mean absolute error, with fused AdamW on float32 weights."""
        torch = self._torch
        if self._optimizer is None:
            self._masters = [p.detach().float() for p in self._model.parameters()]
            self._optimizer = torch.optim.AdamW(self._masters, lr=1e-3, fused=True)
        (self.outputs(batch) - _tensor(wanted)).abs().mean().backward()
        parameters = list(self._model.parameters())
        for parameter, master in zip(parameters, self._masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self._masters)

    def _inputs(self, batch: Batch, group: Any) -> tuple[Any, Any, bool]:
        shape = (group.count, group.length)
        elements, features = (_tensor(x[group.tokens]) for x in (batch.elements, batch.features))
        return elements.view(shape), features.view(*shape, -1), batch.roots is not None


def _attention() -> Any:
    """Prefer cuDNN; it refuses some shapes, which FlashAttention or torch's own then compute."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel([*order, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def _model(config: Config, network: Network) -> Any:
    """Return the module; it maps elements (B, L), features (B, L, F) to outputs (B, 1)."""
    import torch
    from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

    n = config.hidden

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(_tensor(network.table).clone())
            self.weights = torch.nn.ParameterDict(
                {
                    name.replace(".", "_"): torch.nn.Parameter(_tensor(weight).clone())
                    for name, weight in network.weights.items()
                    if name not in ("embedding", "properties")
                }
            )

        def norm(self, x: Any, name: str) -> Any:
            return rms_norm(x, (n,), self.weights[name], 1e-6)

        def mlp(self, x: Any, layer: int) -> Any:
            y = linear(self.norm(x, f"{layer}_mlp_norm"), self.weights[f"{layer}_gate_up"])
            gate, up = y.chunk(2, -1)
            return x + linear(silu(gate) * up, self.weights[f"{layer}_down"])

        def attend(self, x: Any, layer: int) -> Any:
            rows = linear(self.norm(x, f"{layer}_attention_norm"), self.weights[f"{layer}_qkv"])
            heads = rows.unflatten(-1, (3, config.num_heads, config.head_dim))
            q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
            mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + linear(mixed, self.weights[f"{layer}_out"])

        def forward(self, elements: Any, features: Any, has_roots: bool) -> Any:
            x = linear(features.to(self.table.dtype), self.weights["features"])
            x = self.mlp(x + embedding(elements, self.table), 0)
            for layer in range(1, config.num_layers + 1):
                x = self.mlp(self.attend(x, layer), layer)
            x = x[:, -1] if has_roots else x.float().mean(1).to(x.dtype)
            return linear(self.norm(x, "final_norm"), self.weights["head"]).float()

    return Model()


def _tensor(array: Any) -> Any:
    """Return the tensor over an array's memory; bfloat16 passes as int16, which DLPack knows."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)
