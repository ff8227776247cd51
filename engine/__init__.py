"""LLM inference without PyTorch: hand-written CUDA C kernels, each with a NumPy mirror.

Four entry points:

- `LLM(model).generate(prompts, SamplingParams(...))`, `.chat(messages)`, `.stream(prompt)`
- `LLMEngine`: `add_request`, `step`, `abort_request`, `has_unfinished_requests`; `AsyncEngine`
  wraps it for asyncio
- `load(model)`: arrays in, arrays out: `model.step(token_ids, cache)`
- `kernels`: every op, for NumPy and CuPy arrays

Names are imported on first use, so `import engine` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine._version import __version__

if TYPE_CHECKING:
    from engine import errors, kernels, reference
    from engine.async_engine import AsyncEngine
    from engine.llm import LLM
    from engine.llm_engine import LLMEngine
    from engine.lora_request import LoRARequest
    from engine.model import Model, load
    from engine.outputs import CompletionOutput, RequestOutput
    from engine.quantization.quantize_model import quantize
    from engine.sampling_params import SamplingParams
    from engine.structured.spec import StructuredOutput
    from engine.tasks.beam_search import BeamSearchParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "LLMEngine",
    "LoRARequest",
    "Model",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
    "errors",
    "kernels",
    "load",
    "quantize",
    "reference",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "BeamSearchParams": "engine.tasks.beam_search",
    "CompletionOutput": "engine.outputs",
    "LLMEngine": "engine.llm_engine",
    "LoRARequest": "engine.lora_request",
    "Model": "engine.model",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
    "StructuredOutput": "engine.structured.spec",
    "load": "engine.model",
    "quantize": "engine.quantization.quantize_model",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"engine.{name}")
    else:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
