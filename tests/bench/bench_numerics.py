"""Distance of logits from float64: fused kernels on and off beside transformers, on three models.

Options, and vLLM's log-probabilities: `python -m tests.quality.numerics`. On a CPU the random
models are small, and fewer tokens are compared.
"""

from __future__ import annotations

from typing import Any

from engine.device import Device


def main(device: Device) -> list[dict[str, Any]]:
    """Measure SmolLM2 and both random models, print, and return the rows."""
    from tests.quality.numerics import Plan, report

    return report(Plan() if device.is_cuda else Plan(size="10m", length=96), device)
