"""The engine's kernels in vLLM (0.24 and 0.33): attention, and norms, activations and experts.

vLLM calls `register` in each of its processes, as a plugin of the group `vllm.general_plugins`.
Attention is chosen with ``--attention-backend CUSTOM``; the other layers are replaced if the
environment variable `ENGINE_VLLM_LAYERS` is 1.
"""

from __future__ import annotations

from engine import env

__all__ = ["register"]

_BACKEND = "engine.integrations.vllm.attention.EngineBackend"


def register() -> None:
    """Tell vLLM about the attention backend and, if wanted, replace its layers.

    May run several times in a process. No backend is imported before it is chosen.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    if env.vllm_layers():
        # imports torch and vLLM's layers
        from engine.integrations.vllm.layers import register_layers

        register_layers()
