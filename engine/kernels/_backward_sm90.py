"""attention_backward on Hopper: which problems `attention_backward_sm90.cu` takes, its launch."""

from __future__ import annotations

from typing import Any

from engine.kernels._module import ModuleSpec


def specs(dtype: str, *, head_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    return ()


def takes(*args: Any) -> bool:
    return False


def launch(*args: Any) -> None:
    raise NotImplementedError
