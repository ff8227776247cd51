"""The engine's kernels in vLLM (0.24 and 0.33): attention, and norms, activations and experts.

vLLM calls `register` in each of its processes, as a plugin of the group `vllm.general_plugins`.
Attention is chosen with ``--attention-backend CUSTOM``; the other layers are replaced if the
environment variable `ENGINE_VLLM_LAYERS` is 1.
"""

from __future__ import annotations

import logging

from engine import env

__all__ = ["register"]

_BACKEND = "engine.integrations.vllm.attention.EngineBackend"

_log = logging.getLogger("engine.integrations.vllm")


def register() -> None:
    """Tell vLLM about the attention backend and, if wanted, replace its layers.

    May run several times in a process. No backend is imported before it is chosen. vLLM does not
    catch what a plugin raises: a version without the interface of attention or of layers gets a
    warning, and keeps its own; so does a process in which another plugin has registered `CUSTOM`.
    """
    wants_layers = env.vllm_layers()
    for function in (_register_backend, *([_register_layers] if wants_layers else [])):
        try:
            function()
        except (ImportError, AttributeError) as error:
            _log.warning("engine's kernels need vLLM 0.24 or 0.33; not registered: %s", error)
            return


def _register_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        _log.warning(
            "attention backend CUSTOM is %s; for engine's, set VLLM_PLUGINS=engine",
            custom.get_path(),
        )
    else:
        register_backend(custom, _BACKEND)


def _register_layers() -> None:
    # Imported lazily: it imports torch and vLLM's layers.
    from engine.integrations.vllm.layers import register_layers

    register_layers()
