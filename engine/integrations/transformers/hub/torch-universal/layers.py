"""Layers without state of their own: `forward` takes the place of a model's layer's method.

The kernels library requires that they have no other members, and as many parameters as the method
that they replace.
"""
# mypy: disable-error-code="misc"

import torch

from engine.integrations import torch as ops


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, rounded once; eps has either of two names in models."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        weight = getattr(self, "weight", None)
        if weight is None:  # as the values' norms of Gemma 3n and 4, of the class of the others
            weight = hidden_states.new_ones(hidden_states.shape[-1])
        return ops.rmsnorm(hidden_states, weight, eps)


class RMSNormZeroCentered(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), rounded once."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return ops.rmsnorm(x, self.weight, self.eps, weight_offset=1.0)


class SiLU(torch.nn.Module):
    """x * sigmoid(x)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply to each element."""
        return ops.silu(input)


class Gelu(torch.nn.Module):
    """The exact GELU, based on erf."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply to each element."""
        return ops.gelu(input)


class GeluTanh(torch.nn.Module):
    """The tanh approximation of GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply to each element."""
        return ops.gelu(input, approximate="tanh")


class SiluAndMul(torch.nn.Module):
    """silu(gate) * up of rows [gate | up]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half as many columns."""
        return ops.swiglu(x)


class GeluAndMul(torch.nn.Module):
    """gelu(gate) * up of rows [gate | up], with the exact GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half as many columns."""
        return ops.geglu(x, approximate="none")


class GeluTanhAndMul(torch.nn.Module):
    """gelu(gate) * up of rows [gate | up], with the tanh approximation of GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half as many columns."""
        return ops.geglu(x, approximate="tanh")
