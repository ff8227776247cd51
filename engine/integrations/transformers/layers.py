"""Norms and activations of transformers' models: the layer mapping of the kernels library."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import activations

from engine.errors import ConfigError

__all__ = ["kernel_mapping", "kernelize"]

REPOSITORY = Path(__file__).parent / "hub"

# Layer name in transformers' models -> layer of our repository.
LAYERS = {
    "RMSNorm": "RMSNorm",
    "RMSNormZeroCentered": "RMSNormZeroCentered",
    "SiLU": "SiLU",
    "GeLU": "Gelu",
    "GeluTanh": "GeluTanh",
    "NewGELU": "GeluTanh",
    "FastGELU": "GeluTanh",
    "SiluAndMul": "SiluAndMul",
    "GeluAndMul": "GeluAndMul",
    "GeluTanhAndMul": "GeluTanhAndMul",
}

# Layer names of classes that transformers leaves unnamed beside an unsupported version of kernels.
_ACTIVATIONS = {
    activations.SiLUActivation: "SiLU",
    activations.GELUActivation: "GeLU",
    activations.GELUTanh: "GeluTanh",
    activations.NewGELUActivation: "NewGELU",
    activations.FastGELUActivation: "FastGELU",
}


def kernel_mapping() -> dict[str, Any]:
    """Return the layers for `kernels.use_kernel_mapping`, on CPU and CUDA.

    They compute gradients and can be compiled, so they serve every mode of `kernels.kernelize`.

    Raises
    ------
    ConfigError
        If the kernels library is not installed.

    Examples
    --------
    >>> sorted(kernel_mapping()["RMSNorm"])
    ['cpu', 'cuda']
    """
    try:
        from kernels import LocalLayerRepository, Mode
    except ImportError as error:
        raise ConfigError("layers: wanted the package `kernels`; pip install kernels") from error
    mapping = {}
    for name, layer in LAYERS.items():
        repository = LocalLayerRepository(repo_path=REPOSITORY, layer_name=layer)
        modes = (Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE)
        mapping[name] = {device: dict.fromkeys(modes, repository) for device in ("cpu", "cuda")}
    return mapping


def kernelize(model: torch.nn.Module) -> torch.nn.Module:
    """Run the model's norms and activations by our kernels, in training and inference.

    Replaces the `forward` of each layer instance that `kernel_mapping` covers; parameters, hooks
    and state_dict stay. Other layers do not change. transformers names its layers only for the
    versions of the kernels library that it supports; an RMSNorm or activation without a name is
    recognised by its class, and a norm also by its result.

    Parameters
    ----------
    model : torch.nn.Module
        On the device that it will run on.

    Returns
    -------
    model : torch.nn.Module
        The same object.

    Raises
    ------
    ConfigError
        If the kernels library is not installed, or the model has no layer to replace.
    """
    mapping = kernel_mapping()
    from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

    named = [_layer_name(module) for module in model.modules()]
    for module, name in zip(model.modules(), named, strict=True):
        if name is not None and not hasattr(type(module), "kernel_layer_name"):
            replace_kernel_forward_from_hub(type(module), name)
    if not any(named):
        wanted = ", ".join(LAYERS)
        raise ConfigError(f"model: wanted a layer of {wanted}; {type(model).__name__} has none")
    tensor = next(chain(model.parameters(), model.buffers()), None)
    device = "cpu" if tensor is None else tensor.device.type
    with use_kernel_mapping(mapping):
        return kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)


def _layer_name(module: torch.nn.Module) -> str | None:
    """Return the key of `LAYERS` for a module, or None."""
    kind = type(module)
    if hasattr(kind, "kernel_layer_name"):
        return kind.kernel_layer_name if kind.kernel_layer_name in LAYERS else None
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or getattr(module, "weight", None) is None:
        return None
    return _norm_name(module, eps) if kind.__name__.endswith("RMSNorm") else None


def _norm_name(module: torch.nn.Module, eps: float) -> str | None:
    """Return which of our norms computes what the module does, by its result for one row."""
    weight = module.weight.detach().float()
    x = torch.linspace(-1.0, 2.0, weight.shape[-1], device=weight.device)
    normed = x * torch.rsqrt(x.square().mean() + eps)
    result = module.forward(x.to(module.weight.dtype)).detach().float()
    for name, offset in (("RMSNorm", 0.0), ("RMSNormZeroCentered", 1.0)):
        if torch.allclose(result, normed * (weight + offset), rtol=0.05, atol=0.05):
            return name
    return None
